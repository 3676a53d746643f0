"""Plans at random that the planner could emit: any shape of its space, any place to cut, any option of every layer."""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.accuracy import cases
from meshwright.executor.parallel.dropout_calls import may_drop
from meshwright.planner.answers.check import check
from meshwright.planner.cost.chain import Chain
from meshwright.planner.cost.kinds import Kind as LayerKind
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import AXES, EXECUTABLE_RECOMPUTES, Plan, Recompute, parts_of
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE, num_microbatches_rule
from meshwright.planner.plan.shape import NO_EXTRAS, LayerOption, Offered, Shape
from meshwright.planner.plan.training import COMPILING, TrainingSpec
from meshwright.planner.solve.space import Family, Space
from meshwright.profiler.machine.cluster import HostGroup, cluster_of, load_device
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

from .adapters import LoraLinear, with_adapters

GLOBAL_BATCH = 16

_SEQ_LEN = 32
"""Tokens per sample, where a model lets us say so: enough for eight tensor ranks with sequence parallelism."""

_LEFT_OUT = ("convnext_base", "train_gpt")
"""Zoo models that have no small version (88 million parameters), or are another one (gpt) again."""

_NOISE = 0.05
"""Added to all initial values, so that no bias hides behind a zero and no norm behind a one."""

_KINKED = ("resnet50",)
"""Models that are run with SiLU for ReLU and average for max pooling. Moved by one ulp, inputs of ResNet-50 change its
gradient norms by up to 2.2e-2 in one process; without kinks by 4e-7 (python -m benchmarks.execution.kinks)."""

_LETTERS: dict[str, str] = {"none": "n", "full": "f", "selective": "s", "attention": "a"}


Kind = Literal[
    "plain",
    "bf16",
    "frozen",
    "compiled",
    "unequal",
    "parts",
    "dropout",
    "adapters",
    "lengths",
    "Muon",
    "Adafactor",
    "growing",
    "offload",
]
"""plain: fp32 on equal devices. frozen: the first half of the parameters, and every other bias or norm, is not trained.
compiled: layers by torch.compile, with what needs no C++ compiler. unequal: hosts of two kinds of devices. parts: each
layer recomputes some of its parts. dropout: a tenth of what the model's dropouts see. adapters: only LoRA's low-rank
matrices beside every linear layer are trained. lengths: samples of all lengths, padded, weighed by their valid tokens.
Muon, Adafactor: that optimizer of the matrices, AdamW of the rest. growing: global batches that grow up to the
plan's. offload: some layers' activations, the optimizer with its state, or both wait in the host's memory."""

_CHANGED: tuple[Kind, ...] = ("frozen", "dropout", "adapters", "lengths")
"""Kinds whose model or data is another one."""

_NEXT_TOKEN = ("deepseek_v3", "gpt2", "llama31_405b", "mixtral_8x7b", "qwen3_30b_a3b")
"""Models of Hugging Face that shift their labels themselves."""

_RATE = 0.1
"""Of dropout."""

_IGNORED = -100
"""A label that torch's cross entropy, and Hugging Face, leave out."""


@dataclass(frozen=True)
class Drawn:
    """A plan for one of the models."""

    model: str
    plan: Plan
    kind: Kind = "plain"

    @property
    def loaded(self) -> LoadedModel:
        """The model that it trains."""
        return small(self.model, self.kind)

    @property
    def label(self) -> str:
        """Layout, and each stage's layers: recompute (none, full, selective, attention, or how many parts), gathered
        copies (kept, given back), activations on the host."""
        plan = self.plan
        stages = "|".join(
            " ".join(_letter(layer.recompute) + "kg"[layer.reshard] + "h" * layer.offload for layer in stage.layers)
            for stage in plan.stages
        )
        sync = ", reduced in every micro-batch" if plan.gradient_sync == "every" else ""
        order = (
            "" if plan.mesh_axes == AXES else f", axes {'/'.join(a for a in plan.mesh_axes if plan.degrees.of(a) > 1)}"
        )
        kind = "" if self.kind == "plain" else f", {self.kind}"
        host = ", optimizer on the host" if plan.offload_optimizer else ""
        return f"{shape_of(plan).label}{sync}{order}{kind}{host}: {stages}"


def _letter(recompute: Recompute) -> str:
    return str(len(parts_of(recompute))) if parts_of(recompute) else _LETTERS[recompute]


@functools.cache
def names() -> tuple[str, ...]:
    """Models of the zoo whose small versions are not the same."""
    return tuple(name for name in cases.small_models()[0] if name not in _LEFT_OUT)


@functools.cache
def small(model: str, kind: Kind = "plain", kinked: bool = False) -> LoadedModel:
    """A small version of a model of the zoo, in fp32, with noisy initial values. kinked: as it is in the zoo.

    Raises ValueError if the kind cannot be had of this model.
    """
    loaded = cases.small(next(s for s in cases.sources() if cases.name_of(s) == model))
    if model in _KINKED and not kinked:
        loaded = replace(loaded, build=functools.partial(_changed, loaded.build, _smooth))
    if kind == "dropout":
        loaded = replace(loaded, build=functools.partial(_changed, loaded.build, _dropping))
        if not may_drop(loaded.build()):
            raise ValueError(f"{model} drops nothing")
    if kind == "adapters":
        loaded = replace(loaded, build=functools.partial(_changed, loaded.build, with_adapters))
        if not any(isinstance(module, LoraLinear) for module in loaded.build().modules()):
            raise ValueError(f"{model} has no linear layers in its layers")
    loaded = _noisy(loaded, kind == "frozen")
    return _padded(loaded, model in _NEXT_TOKEN) if kind == "lengths" else loaded


def _changed(build: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return change(build())


def _dropping(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = _RATE
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = _RATE
    return model


def _padded(loaded: LoadedModel, next_token: bool) -> LoadedModel:
    """The model with samples of all lengths. next_token: whether it holds its labels against the tokens before them.
    Raises ValueError if there are no labels by token."""
    make = loaded.batch

    def labels_of(batch: Any) -> torch.Tensor:
        found: torch.Tensor = batch["labels"] if isinstance(batch, dict) else batch[-1]
        return found

    def padded(size: int) -> Any:
        whole = make(size)
        length = labels_of(whole).shape[1]
        valid = torch.randint(length // 4, length + 1, (size, 1))
        labels = labels_of(whole).masked_fill(torch.arange(length) >= valid, _IGNORED)
        return {**whole, "labels": labels} if isinstance(whole, dict) else (*whole[:-1], labels)

    def weight(part: Any) -> torch.Tensor:
        labels = labels_of(part)
        return ((labels[:, 1:] if next_token else labels) != _IGNORED).sum()

    example = labels_of(make(1))
    if loaded.seq_len is None or example.dim() != 2:
        raise ValueError(f"{loaded.name} has no labels by token")
    return replace(loaded, batch=padded, weight=weight)


def _smooth(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU(inplace=child.inplace))
            elif isinstance(child, nn.MaxPool2d):
                setattr(module, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
    return model


def _noisy(loaded: LoadedModel, frozen: bool) -> LoadedModel:
    if loaded.seq_len is not None and loaded.seq_len > _SEQ_LEN:
        loaded = loaded.with_seq_len(_SEQ_LEN)
    build = loaded.build

    def noisy() -> nn.Module:
        model: nn.Module = build().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
        if frozen:
            parameters = list(model.parameters())
            for place, parameter in enumerate(parameters):
                parameter.requires_grad_(2 * place >= len(parameters) and (parameter.dim() > 1 or place % 2 == 0))
        return model

    return replace(loaded, build=noisy)


@functools.cache
def profile_of(model: str, kind: Kind = "plain") -> ModelProfile:
    """Profile of that small version."""
    return cases.profile_of(small(model, kind))


@functools.cache
def _space(model: str, num_devices: int, hosts: int, kind: Kind) -> tuple[Space, list[Family], CostModel]:
    """The planner's space for a model on so many ranks, its families, and what layers cost in it."""
    profile = profile_of(model, kind if kind in _CHANGED else "plain")
    machines = cluster_of(load_device("h100-80gb"), num_devices, num_devices // hosts)
    if kind == "unequal":
        machines = machines.model_copy(
            update={"hosts": tuple(map(_half, ("a100-80gb", "h100-80gb"), [num_devices] * 2))}
        )
    training = TrainingSpec(
        global_batch=GLOBAL_BATCH,
        seq_len=profile.seq_len,
        precision="bf16" if kind == "bf16" else "fp32",
        software=COMPILING if kind == "compiled" else TrainingSpec.model_fields["software"].default,
    )
    space = Space(profile, machines, training, Pins())
    return space, list(space.families()), CostModel(profile, machines, training)


def _half(device: str, num_devices: int) -> HostGroup:
    on = load_device(device)
    return HostGroup(count=1, devices_per_host=num_devices // 2, device=on, link=on.link)


@st.composite
def plans(draw: Callable[[st.SearchStrategy[Any]], Any], model: str, num_devices: int, kind: Kind = "plain") -> Plan:
    """A plan of a model for so many ranks, on one host or two."""

    def pick(choices: list[Any]) -> Any:
        return draw(st.sampled_from(choices))

    space, families, costs = _space(model, num_devices, pick([1, 2]) if kind == "plain" else 1, kind)
    degrees = pick(sorted({(f.tensor, f.pipeline, f.context, f.expert) for f in families}))
    families = [f for f in families if (f.tensor, f.pipeline, f.context, f.expert) == degrees]
    schedule = pick(sorted({f.schedule for f in families} - set(ZERO_BUBBLE if kind == "parts" else ())))
    family = pick([f for f in families if f.schedule == schedule])
    shape = pick(list(space.shapes(family)))
    if kind == "offload":
        shape = replace(shape, offload_optimizer=pick([False, True]))
    plan = make_plan(space.profile, space.cluster, space.training, shape, _stages(pick, costs, shape, kind))
    assert check(plan, space.profile) == [], plan
    assume(kind != "offload" or plan.offload_optimizer or any(o.offload for o in plan.layers))
    assume(kind != "growing" or len(global_batches(plan)) > 1)
    return plan


def global_batches(plan: Plan) -> list[int]:
    """All global batches that a plan can run, the smallest first."""
    degrees = plan.degrees
    return [
        count * plan.micro_batch * degrees.data
        for count in range(1, plan.num_microbatches + 1)
        if num_microbatches_rule(plan.schedule, degrees.pipeline, count, degrees.virtual_stages) is None
    ]


def _stages(pick: Callable[[list[Any]], Any], costs: CostModel, shape: Shape, kind: Kind) -> list[list[LayerOption]]:
    chain = Chain(costs)
    ends = [0]
    num_stages = shape.pipeline * shape.virtual_stages
    places = chain.places[1:-1]
    assume(len(places) >= num_stages - 1)
    for behind in reversed(range(num_stages - 1)):  # so many cuts must find a place after this one
        free = [place for place in places if place > ends[-1]]
        ends.append(pick(free[: len(free) - behind]))
    may_recompute = shape.schedule not in ZERO_BUBBLE
    modes: list[Recompute] = [mode for mode in EXECUTABLE_RECOMPUTES if may_recompute or mode == "none"]
    offered: Offered = frozenset({"offload"}) if kind == "offload" and may_recompute else NO_EXTRAS
    stages = []
    for first, last in pairwise([*ends, chain.num_layers]):
        stage: list[LayerOption] = []
        for run in chain.runs:
            layers = range(max(first, run.start), min(last, run.start + run.length))
            given = costs.kinds[run.start], shape
            options = [
                pick(_in_parts(costs, *given) if kind == "parts" else costs.options(*given, pick(modes), None, offered))
                for _ in layers
            ]
            stage += sorted(options, key=lambda option: option.recompute != "full")
        stages.append(stage)
    return stages


def _in_parts(costs: CostModel, kind: LayerKind, shape: Shape) -> list[LayerOption]:
    """A layer's options that recompute parts of it; all, if there are none."""
    options = costs.options(kind, shape, offered=frozenset({"parts"}))
    return [option for option in options if parts_of(option.recompute)] or options


def can_be(model: str, kind: Kind) -> bool:
    """Whether the kind can be had of a model."""
    try:
        small(model, kind)
    except ValueError:
        return False
    return kind not in ("Muon", "Adafactor") or any(p.dim() == 2 for p in small(model).build().parameters())


def draw(model: str, num_devices: int, count: int, kind: Kind = "plain") -> list[Drawn]:
    """`count` plans of different shapes (fewer, if there are not so many, or none); every time the same."""
    if not can_be(model, kind) or not _space(model, num_devices, 1, kind)[1]:
        return []
    found: dict[tuple[object, ...], Plan] = {}

    @seed(zlib.crc32(f"{model} {num_devices} {kind}".encode()))
    @settings(
        max_examples=8 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(model, num_devices, kind))
    def note(plan: Plan) -> None:
        shape = shape_of(plan)
        found[(*shape.layout, shape.gradient_sync, shape.reshard)] = plan

    note()
    return [Drawn(model, plan, kind) for plan in list(found.values())[-count:]]
