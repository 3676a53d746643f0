"""Prove a plan: a small version of its model, trained by it on processes of this machine, beside one process.

What is small: the model file's `small()`, else a shrunken Hugging Face config, else the model itself if it is small
enough. The plan is scaled with it: cuts in proportion, every kind of parallelism kept at a degree of at least 2.
"""

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ...planner.cost.layer_parts import within
from ...planner.plan.document import Degrees, LayerPlan, Plan, Recompute, Stage, parts_of
from ...planner.plan.legality import (
    can_recompute,
    context_rule,
    divisors,
    expert_rule,
    legal_cuts,
    sequence_rule,
    tensor_rule,
)
from ...planner.plan.making import make_plan, shape_of
from ...planner.plan.shape import LayerOption, Shape
from ...profiler.machine.cluster import cluster_of
from ...profiler.model.building import in_training, on_meta
from ...profiler.model.coupling import as_float, upcast, with_own_loss
from ...profiler.model.load import load_model
from ...profiler.model.loaded import Batch, LoadedModel, split_inputs
from ...profiler.model.model_profile import ModelProfile
from ...profiler.model.source import file_of, with_adapters_of
from ...profiler.model.trace import trace
from ...profiler.semantics.draws import SameDraws, dice_apart, seed_dice
from ..parallel.mesh import RankMesh
from ..parallel.micro_batches import loss_of, num_microbatches, num_samples, split_micro_batches
from ..parallel.random_numbers import KEEPS_ALL, RandomNumbers, of_micro_batch
from ..parallel.synced_norms import normalise_here, normalised, synced_norms
from ..trainer import parallelize
from .local_ranks import RankError, apart, run_local_ranks
from .shrink import full_config, shrunken_config

MAX_RANKS = 8
"""Processes a plan is run on; plans that use four kinds of parallelism at once take 16."""

MAX_PARAMETERS = 20_000_000
"""Models up to this size are run as they are, if there is no small version of them."""

TOLERANCE = 1e-4
"""Largest difference, relative to the largest element of the tensor."""

_FLOOR = 5e-3
"""Gradients below this share of the model's largest, and parameters below what AdamW moves them by for such gradients,
are held against that instead: a gradient that is zero by mathematics (an attention key's bias, or one before a norm) is
nothing but rounding. TOLERANCE of it is 5e-7 of the largest, four times what fp32 can tell apart there."""

_AS_FAR = 4.0
"""How much farther from exact numbers than one process a plan may be: it rounds in another order."""

_MOST_REPLICATED = 100_000_000
"""Parameters of all replicas in the reference: 0.4 GB, and as much again for gradients."""

_EPS = 1.0
"""AdamW's eps as a share of the RMS gradient: the usual 1e-8 would turn rounding into whole steps."""

_SEED = 0
_LEARNING_RATE = 1e-3
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Difference:
    """The element of a tensor in which two runs differ most."""

    what: str
    one_process: float
    plan: float
    relative: float


@dataclass(frozen=True)
class VerifyReport:
    """Whether a plan computes what one process computes.

    largest: of the losses, gradient norms, gradients and parameters each the largest relative difference.
    first: the first tensor that differs by more than TOLERANCE, in the order in which they come about.
    failure: why the plan could not be run to the end; detail: the traceback to that.
    splitting: what the same process computes otherwise where the batch is one micro-batch; None: the same.
    """

    title: str
    notes: tuple[str, ...]
    largest: dict[str, Difference]
    first: Difference | None = None
    failure: str | None = None
    detail: str = ""
    splitting: Difference | None = None

    @property
    def ok(self) -> bool:
        """Whether all numbers agree."""
        return self.first is None and self.failure is None

    @property
    def lines(self) -> list[str]:
        """The report for people."""
        lines = [self.title, *(f"  note: {note}" for note in self.notes)]
        if self.failure is not None:
            return [*lines, f"NOT VERIFIED: {self.failure}"]
        for kind, d in self.largest.items():
            found = f"largest difference {d.relative:.1e} ({d.what})" if d.relative else "bit for bit the same"
            lines.append(f"  {kind}: {found}")
        if self.splitting is not None:
            d = self.splitting
            lines.append(
                f"  splitting the batch, with one process or many, changes the {d.what}: {d.one_process:.7g} with all "
                f"samples in one forward, {d.plan:.7g} in the plan's micro-batches (relative difference "
                f"{d.relative:.1e}): samples see each other (batch norm, a loss over pairs), or a forward follows on "
                "the one before"
            )
        alike = " that splits its batch alike" if self.splitting is not None else ""
        if self.first is None:
            return [*lines, f"SAME NUMBERS as one process{alike} (relative difference below {TOLERANCE:g})"]
        return [
            *lines,
            f"DIFFERENT NUMBERS, first in {self.first.what}: one process {self.first.one_process:.7g}, "
            f"plan {self.first.plan:.7g} (relative difference {self.first.relative:.1e}, allowed {TOLERANCE:g})",
        ]


NamedOptimizers = Callable[[list[tuple[str, nn.Parameter]]], list[torch.optim.Optimizer]]


def adamw(eps: float) -> NamedOptimizers:
    """Makes an AdamW of all parameters."""
    return lambda named: [torch.optim.AdamW([p for _, p in named], lr=_LEARNING_RATE, eps=eps)]


@dataclass(frozen=True)
class Training:
    """How both runs train. compile: as parallelize takes it. optimizers: of AdamW's eps. dropout: whether dropout is
    on, in both runs with the masks that the executor draws by sample."""

    compile: bool | str = False
    optimizers: Callable[[float], NamedOptimizers] = adamw
    dropout: bool = False


@dataclass(frozen=True)
class _RunResult:
    """What a run computed. gradients: of the first step; parameters: after the last; evaluated: mean loss of the last
    batch then."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    eps: float
    drew: bool = False
    """Whether the model has drawn random numbers."""
    evaluated: float | None = None


def verify(plan: Plan, loaded: LoadedModel, steps: int = 3) -> VerifyReport:
    """Train a small version of the model by a small version of the plan, and beside it in one process.

    Compares losses, gradient norms, the first step's gradients, and all parameters after `steps` AdamW steps in fp32.
    Raises ValueError if there is no small version, or it cannot be cut as the plan says.
    """
    with tempfile.TemporaryDirectory() as folder:
        small, notes = small_model(plan, loaded, Path(folder))
        try:
            profile = apart(trace, small)
        except ValueError:
            if small.seq_len == loaded.seq_len or small.make_batch is not loaded.make_batch:
                raise
            small = small.with_seq_len(loaded.seq_len or 1)  # it takes its own length only
            profile = apart(trace, small)
    trial, shrunk = small_plan(plan, profile)
    title = f"{plan.model.name} by {plan.label}, run as {small.name} by {trial.label}"
    notes += shrunk
    batches = _batches(small, trial, steps, profile.batch_problem)
    dropouts = any(getattr(m, "p", 0) for m in _built(small).modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    if dropouts:
        notes += ("dropout is off in both runs",)
    return beside_one_process(VerifyReport(title, notes, {}), trial, small, batches)


def beside_one_process(
    report: VerifyReport,
    plan: Plan,
    loaded: LoadedModel,
    batches: Sequence[Batch],
    timeout_s: float = _TIMEOUT_S,
    training: Training = Training(),
) -> VerifyReport:
    """The report with what differs when a model is trained by the plan as it stands and in one process.

    batches: one global batch per step, smaller than the plan's if the plan can run it.
    """
    ranks = plan.degrees.num_devices
    try:
        expected: _RunResult = run_local_ranks(one_process, 1, loaded, plan, batches, training, timeout_s=timeout_s)[0]
    except RankError as error:
        return replace(report, failure=f"the model does not train in one process: {error}", detail=error.detail)
    if not training.dropout:
        report = replace(report, splitting=_splitting(expected, loaded, plan, batches[0], timeout_s))
    if expected.evaluated is None:
        alone = "it is not evaluated: its forward asks for gradients, and evaluation has none"
        report = replace(report, notes=(*report.notes, alone))
    if expected.drew:
        report = replace(report, notes=(*report.notes, "random numbers are one and the same in all runs"))
    try:
        told = loaded, plan, batches, expected.eps, training, expected.drew, expected.evaluated is not None
        found: _RunResult = run_local_ranks(_one_rank, ranks, *told, timeout_s=timeout_s)[0]
    except RankError as error:
        return replace(report, failure=f"the plan did not run: {error}", detail=error.detail)
    seen = compared(report, expected, found)
    if seen.first is None:
        return seen
    try:
        given = in_double(loaded), plan, [_as_double(batch) for batch in batches], training
        exact: _RunResult = run_local_ranks(one_process, 1, *given, timeout_s=timeout_s)[0]
    except RankError:
        return seen
    return compared(report, expected, found, exact)


def _splitting(
    expected: _RunResult, loaded: LoadedModel, plan: Plan, batch: Batch, timeout_s: float
) -> Difference | None:
    """What splitting the first batch changes, in one process: the loss if that, else the gradient that differs most.
    None: nothing beyond rounding, or the batch is not one that could be run as it is."""
    if plan.num_microbatches * plan.degrees.data == 1 or isinstance(batch, SharesApart):
        return None
    try:
        whole: _RunResult = run_local_ranks(unsplit, 1, loaded, plan, batch, timeout_s=timeout_s)[0]
    except RankError:
        return None
    floor = _floor(whole)
    loss = _difference("loss of step 1", torch.tensor(whole.losses[0]), torch.tensor(expected.losses[0]))
    differences = [
        _difference(f"gradient of {name} in step 1", gradient, expected.gradients[name], floor)
        for name, gradient in whole.gradients.items()
        if name in expected.gradients
    ]
    largest = max(differences, key=lambda d: d.relative, default=loss)
    return next((d for d in (loss, largest) if not d.relative <= TOLERANCE), None)


def _floor(expected: _RunResult) -> float:
    """Gradients below this are held against it."""
    return _FLOOR * max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)


def compared(
    report: VerifyReport, expected: _RunResult, found: _RunResult, exact: _RunResult | None = None
) -> VerifyReport:
    """The report with what differs between two runs. exact: one process in float64. The plan's tensors may be as far
    from its as those of one process in fp32 are (_AS_FAR), however few digits rounding leaves."""
    missing = [f"gradient of {name}" for name in expected.gradients if name not in found.gradients]
    missing += [name for name in expected.parameters if name not in found.parameters]
    if missing:
        return replace(report, failure=f"the plan has no {missing[0]} (and {len(missing) - 1} more)")
    if exact is not None:
        expected = _nearer(expected, found, exact)
    floor = _floor(expected)
    moved = _LEARNING_RATE * len(expected.losses) * min(1.0, max(_FLOOR, floor / expected.eps))
    kinds = {
        "loss": [
            _difference(f"loss of step {i + 1}", torch.tensor(a), torch.tensor(b))
            for i, (a, b) in enumerate(zip(expected.losses, found.losses, strict=True))
        ],
        "gradient norm": [
            _difference(f"gradient norm of step {i + 1}", torch.tensor(a), torch.tensor(b))
            for i, (a, b) in enumerate(zip(expected.norms, found.norms, strict=True))
        ],
        "gradients": [
            _difference(f"gradient of {n} in step 1", g, found.gradients[n], floor)
            for n, g in expected.gradients.items()
        ],
        "parameters": [
            _difference(f"{n} after step {len(expected.losses)}", p, found.parameters[n], moved)
            for n, p in expected.parameters.items()
        ],
        "evaluation": [
            _difference("evaluated loss", torch.tensor(a), torch.tensor(b))
            for a, b in [(expected.evaluated, found.evaluated)]
            if a is not None and b is not None
        ],
    }
    in_order = [kinds["loss"][0], *kinds["gradients"], *kinds["gradient norm"], *kinds["loss"], *kinds["parameters"]]
    in_order += kinds["evaluation"]
    return replace(
        report,
        largest={kind: max(ds, key=lambda d: d.relative) for kind, ds in kinds.items() if ds},
        first=next((d for d in in_order if not d.relative <= TOLERANCE), None),
    )


def _nearer(expected: _RunResult, found: _RunResult, exact: _RunResult) -> _RunResult:
    """What one process computed, and what the plan did where that is no farther from the exact numbers."""

    def nearer(a: torch.Tensor, b: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        if not a.shape == b.shape == true.shape or not a.numel():
            return a
        off, other = (float((x.detach().double() - true.detach()).abs().max()) for x in map(_real, (a, b)))
        return b if other <= _AS_FAR * off else a

    return replace(
        expected,
        gradients={n: nearer(g, found.gradients[n], exact.gradients[n]) for n, g in expected.gradients.items()},
        parameters={n: nearer(p, found.parameters[n], exact.parameters[n]) for n, p in expected.parameters.items()},
    )


def in_double(loaded: LoadedModel) -> LoadedModel:
    """The model in float64."""
    return replace(loaded, build=lambda: loaded.build().double())


def _as_double(batch: Any) -> Any:
    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    if isinstance(batch, SharesApart):
        return SharesApart(tree_map(double, share) for share in batch)
    return tree_map(double, batch)


def small_model(plan: Plan, loaded: LoadedModel, folder: Path) -> tuple[LoadedModel, tuple[str, ...]]:
    """A version of the model that this machine can train, and notes on it. folder: for a shrunken config.

    Raises ValueError if the model is too large and has no small version.
    """
    if loaded.small is not None:
        return _short(loaded.small(), plan), ()
    source = file_of(loaded.source)
    if source.suffix == ".json":
        config = full_config(source)
        shrunken = shrunken_config(config, plan.degrees, MAX_RANKS)
        (folder / "config.json").write_text(json.dumps(shrunken))
        small = replace(load_model(with_adapters_of(str(folder), loaded.source)), name=f"{loaded.name}-small")
        return _short(small, plan), ("its config.json shrunken: fewer and narrower layers, small vocabulary",)
    if plan.model.num_parameters <= MAX_PARAMETERS:
        return _short(loaded, plan), ()
    raise ValueError(
        f"{plan.model.name} has {plan.model.num_parameters:,} parameters, too many to train here (at most "
        f"{MAX_PARAMETERS:,}): add to {loaded.source} a function small() that returns a small version of the model, "
        "and small_batch(size) if batch(size) does not suit it"
    )


def small_plan(plan: Plan, profile: ModelProfile) -> tuple[Plan, tuple[str, ...]]:
    """The plan for a small model on at most MAX_RANKS ranks, and what was changed, in words.

    Raises ValueError if the small model cannot be split into two where the plan splits.
    """
    notes: list[str] = []
    places = legal_cuts(profile)
    degrees = shrunken_degrees(plan.degrees, MAX_RANKS)
    degrees = degrees.model_copy(
        update={
            "tensor": _tensor_degree(plan, degrees.tensor, profile),
            "pipeline": min(degrees.pipeline, len(places) + 1),
        }
    )
    if degrees.pipeline == 1 < plan.degrees.pipeline:
        raise ValueError(f"{profile.name} can be cut nowhere, so it cannot run {plan.degrees.pipeline} stages")
    virtual = min(degrees.virtual_stages, (len(places) + 1) // degrees.pipeline)
    if plan.schedule == "zb-v" and virtual < 2:
        raise ValueError(
            f"{profile.name} can be cut at {len(places)} places, but {plan.schedule} on {degrees.pipeline} ranks takes "
            f"{2 * degrees.pipeline - 1}; give small() more layers"
        )
    degrees = degrees.model_copy(update={"virtual_stages": virtual})
    degrees = degrees.model_copy(update={"context": _context_degree(plan, degrees, profile)})
    for axis in ("data_replicate", "data_shard", "context", "tensor", "pipeline", "virtual_stages"):
        old, new = getattr(plan.degrees, axis), getattr(degrees, axis)
        if old != new:
            notes.append(f"{axis} is {new} here instead of {old}")
    num_microbatches = 1 if profile.batch_problem else min(plan.num_microbatches, max(2 * degrees.pipeline, 4))
    micro_batch = min(plan.micro_batch, 2 * profile.smallest_micro_batch)
    shape = replace(
        shape_of(plan),
        data_replicate=degrees.data_replicate,
        data_shard=degrees.data_shard,
        tensor=degrees.tensor,
        context=degrees.context,
        pipeline=degrees.pipeline,
        virtual_stages=degrees.virtual_stages,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
    )
    shape = replace(shape, expert=_expert_degree(shape, profile))
    if shape.expert != plan.degrees.expert:
        notes.append(f"expert is {shape.expert} here instead of {plan.degrees.expert}")
    training = plan.training.model_copy(
        update={
            "global_batch": micro_batch * num_microbatches * degrees.data,
            "seq_len": profile.seq_len,
            "precision": "fp32",
            "optimizer": "adamw",
        }
    )
    stages = _merged(plan.stages, degrees.pipeline * degrees.virtual_stages)
    options = small_stages(stages, [can_recompute(profile, layer) for layer in profile.layers], places)
    options = _with_parts_there_are(options, profile)
    lost = _parts_in(layer for stage in stages for layer in stage) - _parts_in(o for stage in options for o in stage)
    if lost:
        notes.append(f"{', '.join(sorted(lost))} is not recomputed here: no such part is in the small model's layers")
    cluster = cluster_of(plan.cluster.device, degrees.num_devices)
    return make_plan(profile, cluster, training, shape, options), tuple(notes)


def shrunken_degrees(degrees: Degrees, max_ranks: int) -> Degrees:
    """Degrees that multiply to at most max_ranks, as far as that goes with none falling from above 1 to below 2."""
    axes = ("data_replicate", "data_shard", "context", "pipeline", "tensor")
    while degrees.num_devices > max_ranks:
        axis = max(axes, key=lambda a: getattr(degrees, a))
        degree: int = getattr(degrees, axis)
        if degree <= 2:
            break
        smallest_factor = next(f for f in range(2, degree + 1) if degree % f == 0)
        degrees = degrees.model_copy(update={axis: max(2, degree // smallest_factor)})
    return degrees


def small_stages(
    stages: Sequence[Sequence[LayerPlan]], recomputable: Sequence[bool], places: Sequence[int]
) -> list[list[LayerOption]]:
    """[stage][layer] options for a model of fewer layers: cuts in proportion, every choice of a stage kept once.

    recomputable: by layer of the small model. places: where a stage may begin, at least as many as there are cuts.
    """
    total, count = sum(len(stage) for stage in stages), len(recomputable)
    firsts = [0]
    for i, stage in enumerate(stages[:-1]):
        end = sum(len(s) for s in stages[:i]) + len(stage)
        wanted = round(end * count / total)
        ahead = [place for place in places if place > firsts[-1]]
        firsts.append(min(ahead[: len(ahead) - (len(stages) - 2 - i)], key=lambda place: abs(place - wanted)))
    options = []
    for stage, first, end in zip(stages, firsts, [*firsts[1:], count], strict=True):
        chosen = [stage[i * len(stage) // (end - first)] for i in range(end - first)]
        able = [i for i in range(end - first) if recomputable[first + i]]
        recompute: dict[int, Recompute] = {i: chosen[i].recompute for i in able if chosen[i].recompute != "none"}
        reshard = {i for i in range(end - first) if chosen[i].reshard}
        missed = [layer.recompute for layer in stage if layer.recompute not in ("none", *recompute.values())]
        free = [i for i in able if i not in recompute]
        recompute |= dict(zip(free, dict.fromkeys(missed), strict=False))
        if any(layer.reshard for layer in stage):
            reshard = reshard or {0}
        options.append(
            [LayerOption(recompute=recompute.get(i, "none"), reshard=i in reshard) for i in range(end - first)]
        )
    return options


def _with_parts_there_are(options: Sequence[Sequence[LayerOption]], profile: ModelProfile) -> list[list[LayerOption]]:
    """[stage][layer] options that name only parts which the layers have: a layer may stand for one of another class."""
    layers = iter(profile.layers)
    return [
        [
            replace(option, recompute=within(profile.classes[layer.layer_class], option.recompute))
            for option, layer in zip(stage, layers, strict=False)
        ]
        for stage in options
    ]


def _parts_in(layers: Iterable[LayerPlan | LayerOption]) -> set[str]:
    return {part for layer in layers for part in parts_of(layer.recompute)}


def _merged(stages: Sequence[Stage], count: int) -> list[list[LayerPlan]]:
    """`count` stages of consecutive ones joined."""
    places = [round(i * len(stages) / count) for i in range(count + 1)]
    return [[layer for stage in stages[start:end] for layer in stage.layers] for start, end in pairwise(places)]


def _tensor_degree(plan: Plan, degree: int, profile: ModelProfile) -> int:
    rule = None
    for smaller in range(degree, 1, -1):
        rule = tensor_rule(profile, smaller)
        if rule is None and plan.sequence_parallel:
            rule = sequence_rule(profile, smaller)
        if rule is None:
            return smaller
    if degree > 1:
        raise ValueError(f"{profile.name} cannot be cut by tensor parallelism ({rule}); give small() divisible sizes")
    return 1


def _context_degree(plan: Plan, degrees: Degrees, profile: ModelProfile) -> int:
    rule = None
    for smaller in range(degrees.context, 1, -1):
        rule = context_rule(profile, smaller, degrees.tensor, plan.context_kind)
        if rule is None and plan.sequence_parallel:
            rule = sequence_rule(profile, degrees.tensor, smaller)
        if rule is None:
            return smaller
    if degrees.context > 1:
        raise ValueError(f"{profile.name} cannot be split over context ranks ({rule}); give small() divisible sizes")
    return 1


def _expert_degree(shape: Shape, profile: ModelProfile) -> int:
    """The largest degree up to the shape's that divides its ranks and the experts. Raises ValueError if none does."""
    if shape.expert == 1:
        return 1
    rules = {e: expert_rule(profile, e, shape.sequence) for e in divisors(shape.experts_over) if 1 < e <= shape.expert}
    able = [expert for expert, rule in rules.items() if rule is None]
    if not able:
        why = next(iter(rules.values()), None) or f"{shape.experts_over} ranks hold tokens of their own here"
        raise ValueError(f"{profile.name} cannot be run with spread experts ({why}); give small() more experts")
    return able[-1]


def _short(loaded: LoadedModel, plan: Plan) -> LoadedModel:
    """The model with sequences that are short, and divisible by every degree this may come down to."""
    length = 8 * min(plan.degrees.tensor, MAX_RANKS) * min(plan.degrees.context, MAX_RANKS)
    length *= -(-loaded.fewest_tokens // length)
    if loaded.seq_len is not None and loaded.seq_len > length:
        loaded = loaded.with_seq_len(length)
    build = loaded.build
    return replace(loaded, build=lambda: upcast(build()))


def _built(loaded: LoadedModel) -> nn.Module:
    return on_meta(loaded.build)


def _batches(loaded: LoadedModel, plan: Plan, steps: int, problem: str) -> list[Any]:
    """Global batches, in single precision what is in half. problem: why they cannot be cut, if so."""
    share = plan.micro_batch * plan.num_microbatches
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        if problem:
            ranks = range(plan.degrees.data)
            return [SharesApart(tree_map(as_float, loaded.batch(share)) for _ in ranks) for _ in range(steps)]
        return [tree_map(as_float, loaded.batch(plan.training.global_batch)) for _ in range(steps)]


def one_process(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[Batch],
    training: Training = Training(),
) -> _RunResult:
    """What training in one process gives on these batches, with none of our machinery but the masks of dropout and
    where Python's and numpy's random numbers begin.

    A batch goes through in the plan's micro-batches, one after the other. What a forward leaves behind (running
    averages, counters) is each data rank's own under the plan, so each has a replica of the module here, too.
    """
    torch.manual_seed(_SEED)
    parameters = plan.degrees.data * plan.model.num_parameters
    count = plan.degrees.data if parameters <= _MOST_REPLICATED else 1
    replicas = [in_training(_seeded(loaded)) for _ in range(count)]
    model = replicas[0]
    alone = [with_own_loss(loaded) for _ in replicas]
    together = Together(replicas) if synced_norms(model) and count > 1 else None
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    eps = 1e-8
    optimizers: list[torch.optim.Optimizer] = []
    draws = SameDraws()
    masks = _masks_of_one_process(plan, replicas) if training.dropout else None
    last = _copied(batches[-1])  # for the evaluation: models may write into what they are given

    def begins(step: int, place: int) -> None:
        seed_dice(of_micro_batch(_SEED, (step, 0), place * plan.micro_batch))

    off = nullcontext() if training.dropout else no_dropout()
    with off, nullcontext() if training.dropout else draws, dice_apart():
        for step, batch in enumerate(batches, start=1):
            shares = [_micro_batches(share, plan) for share in _shares(batch, plan)]
            with nullcontext() if masks is None else masks.step(step):
                losses.append(_accumulate(replicas, alone, shares, together, masks, partial(begins, step)))
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            each = [torch.linalg.vector_norm(_real(grad), dtype=torch.float64) for grad in grads]
            norms.append(float(torch.stack(each).norm()))
            if not optimizers:
                named = model.named_parameters(remove_duplicate=False)
                gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
                eps = max(eps, _EPS * norms[0] / sum(g.numel() for g in grads) ** 0.5)
                optimizers = training.optimizers(eps)(list(model.named_parameters()))
            for optimizer in optimizers:
                optimizer.step()
            _hand_on(replicas)
        found = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
        drew = draws.drew or (together is not None and together.drew)
        shares = [_micro_batches(share, plan) for share in _shares(last, plan)]
        return _RunResult(
            losses, norms, gradients, found, eps, drew, _evaluated(replicas, alone, shares, partial(begins, 0))
        )


def _masks_of_one_process(plan: Plan, replicas: Sequence[nn.Module]) -> RandomNumbers:
    """Random numbers of a process that takes all micro-batches of the plan, one after the other."""
    alone = plan.model_copy(
        update={"degrees": Degrees(), "num_microbatches": plan.num_microbatches * plan.degrees.data}
    )
    masks = RandomNumbers(replicas[0], alone, RankMesh(alone, 0, torch.device("cpu"), None), _SEED)
    for replica in replicas:
        masks.watch(replica, ())
    return masks


@torch.no_grad()
def _evaluated(
    replicas: Sequence[nn.Module],
    alone: Sequence[LoadedModel],
    shares: Sequence[Sequence[Any]],
    begins: Callable[[int], None],
) -> float | None:
    """Mean loss of a batch in evaluation mode, None where the forward asks for gradients, of which there are none then.
    shares: [data rank] -> micro-batches. begins: is told that so manieth one does."""
    total, count = 0.0, 0.0
    for i, share in enumerate(shares):
        model, loaded = replicas[i % len(replicas)].eval(), alone[i % len(replicas)]
        for place, part in enumerate(share, start=i * len(share)):
            begins(place)
            weight = 1.0 if loaded.weight is None else float(loaded.weight(part))
            try:
                loss = float(_loss(model, loaded, part))
            except RuntimeError as error:
                if not re.search(r"requires?[ _]grad", str(error)):
                    raise
                return None
            total, count = total + weight * loss, count + weight
    return total / count


def unsplit(loaded: LoadedModel, plan: Plan, batch: Batch) -> _RunResult:
    """The first step's loss and gradients of a global batch that goes through one process as it is, in one forward."""
    model = in_training(_seeded(loaded))
    with no_dropout(), SameDraws():
        loss = _accumulate([model], [with_own_loss(loaded)], [[batch]])
    named = model.named_parameters(remove_duplicate=False)
    gradients = {n: p.grad for n, p in named if p.grad is not None}
    return _RunResult([loss], [], gradients, {}, 0.0)


def _seeded(loaded: LoadedModel) -> nn.Module:
    torch.manual_seed(_SEED)
    return loaded.build()


class Together:
    """Replicas in threads of one process, whose synchronised norms look at the samples of all of them."""

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        self.drew = False
        self._count = len(replicas)
        self._barrier = threading.Barrier(self._count)
        self._shared: list[torch.Tensor | None] = [None] * self._count
        for rank, replica in enumerate(replicas):
            for norm in synced_norms(replica):
                reduce = partial(self._reduce, rank)
                normalise_here(norm).forward = partial(normalised, norm, reduce, self._count)

    def _reduce(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        self._shared[rank] = value
        self._barrier.wait()
        found = torch.stack([x for x in self._shared if x is not None]).sum(0)
        self._barrier.wait()
        return found

    def sum_of(self, runs: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
        """The sum of what the replicas' runs give, all at once."""

        def alone(run: Callable[[], torch.Tensor]) -> torch.Tensor:
            try:
                with SameDraws() as draws:  # modes are a thread's own
                    loss = run()
                self.drew |= draws.drew
                return loss
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self._count) as pool:
            found = [future.result() for future in [pool.submit(alone, run) for run in runs]]
        return torch.stack(found).sum()


class SharesApart(tuple[Batch, ...]):
    """The shares of data ranks, where a batch cannot be cut into them."""


def _shares(batch: "Batch | SharesApart", plan: Plan) -> list[Any]:
    """[data rank] -> its share of a global batch, which may be smaller than the plan's."""
    if isinstance(batch, SharesApart):
        return list(batch)
    samples = num_samples(batch, plan.training.global_batch, plan.model.batch)
    return split_micro_batches(batch, plan.degrees.data, samples, plan.model.batch)


def _micro_batches(share: Any, plan: Plan) -> list[Any]:
    samples = num_samples(share, plan.micro_batch * plan.num_microbatches, plan.model.batch)
    return split_micro_batches(share, num_microbatches(plan, samples), samples, plan.model.batch)


def _accumulate(
    replicas: Sequence[nn.Module],
    alone: Sequence[LoadedModel],
    shares: Sequence[Sequence[Any]],
    together: "Together | None" = None,
    masks: RandomNumbers | None = None,
    begins: Callable[[int], None] = lambda place: None,
) -> float:
    """Loss of a step; gradients are left on the first replica's parameters. shares: [data rank] -> micro-batches.
    alone: the model with each replica's own loss. together: runs those of all data ranks at once, where a norm looks
    at all of them. masks: draws dropout's. begins:
    is told that so manieth micro-batch does, unless they run together."""
    parts = [(i % len(replicas), part) for i, share in enumerate(shares) for part in share]
    weight_of = alone[0].weight
    weights = [1.0 if weight_of is None else float(weight_of(part)) for _, part in parts]
    total = 0.0
    for replica in replicas:
        replica.zero_grad()

    def scaled(number: int, part: Any, weight: float) -> torch.Tensor:
        return _loss(replicas[number], alone[number], part) * (weight / sum(weights))

    runs = [partial(scaled, *part, weight) for part, weight in zip(parts, weights, strict=True)]
    if together is None:
        for place, run in enumerate(runs):
            if masks is not None:
                masks.micro_batch(place)
            begins(place)
            loss = run()
            loss.backward()
            total += float(loss.detach())
    else:
        for i in range(len(shares[0])):
            loss = together.sum_of(runs[i :: len(shares[0])])
            loss.backward()
            total += float(loss.detach())
    for replica in replicas[1:]:
        for own, parameter in zip(replicas[0].parameters(), replica.parameters(), strict=True):
            if parameter.grad is not None:
                own.grad = parameter.grad if own.grad is None else own.grad + parameter.grad
    return total


def _loss(model: nn.Module, loaded: LoadedModel, part: Any) -> torch.Tensor:
    args, kwargs = split_inputs(model, part, loaded.loss is not None)
    output = model(*args, **kwargs)
    return loss_of(output) if loaded.loss is None else loaded.loss(output, part)


@torch.no_grad()
def _hand_on(replicas: Sequence[nn.Module]) -> None:
    """Give the first replica's parameters to the others."""
    for replica in replicas[1:]:
        for own, parameter in zip(replicas[0].parameters(), replica.parameters(), strict=True):
            parameter.copy_(own)


def _one_rank(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[Batch],
    eps: float,
    training: Training,
    draws: bool = False,
    evaluates: bool = True,
) -> _RunResult | None:
    """The training by the plan; what it computed, on rank 0. draws: the model draws random numbers. evaluates: it runs
    without gradients."""
    make = training.optimizers(eps)
    trainer = parallelize(
        loaded.build,
        plan,
        lambda named: make(named),
        loaded.loss,
        loaded.weight,
        seed=_SEED,
        device="cpu",
        compile=training.compile,
    )
    last = _copied(batches[-1])
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    with nullcontext() if training.dropout else no_dropout(), SameDraws() if draws else nullcontext():
        for batch in batches:
            metrics = trainer.step(_shares(batch, plan)[trainer.data_rank])
            losses.append(metrics.loss)
            norms.append(metrics.grad_norm)
            if len(losses) == 1:
                gradients = {name: grad.clone() for name, grad in trainer.named_gradients().items()}
        shares = [_shares(last, plan)[trainer.data_rank]]
        evaluated = trainer.evaluate(shares)["loss"] if evaluates else None
    parameters = trainer.full_state_dict()
    is_first = trainer.mesh.rank == 0
    trainer.close()
    return _RunResult(losses, norms, gradients, parameters, eps, evaluated=evaluated) if is_first else None


@contextmanager
def no_dropout() -> Iterator[None]:
    """Every dropout keeps everything: two runs that draw differently cannot be compared."""
    names = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
    originals = {name: getattr(functional, name) for name in (*names, "scaled_dot_product_attention")}

    def keep_all(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)  # tensors between layers are known by the name of the function that made them
        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return original(input, 0.0, training, inplace)

        setattr(dropout, KEEPS_ALL, True)
        return dropout

    @wraps(originals["scaled_dot_product_attention"])
    def attend(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("dropout_p", None)
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return originals["scaled_dot_product_attention"](*args, **kwargs)

    for name in names:
        setattr(functional, name, keep_all(originals[name]))
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def _difference(what: str, expected: torch.Tensor, found: torch.Tensor, floor: float = 0.0) -> Difference:
    """Where two tensors differ most, relative to the largest element of the first (or `floor`, if that is larger)."""
    if expected.shape != found.shape:
        return Difference(f"{what}, of shape {tuple(expected.shape)} and {tuple(found.shape)}", 0.0, 0.0, float("inf"))
    if expected.numel() == 0:
        return Difference(what, 0.0, 0.0, 0.0)
    a, b = (_real(tensor.detach()).double().flatten() for tensor in (expected, found))
    gap = (a - b).abs().nan_to_num(nan=float("inf"))
    place = int(gap.argmax())
    scale = max(float(a.abs().max()), floor)
    relative = float(gap[place]) / scale if scale else float(gap[place])
    return Difference(what, float(a[place]), float(b[place]), relative)


def _copied(batch: Any) -> Any:
    def cloned(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    if isinstance(batch, SharesApart):
        return SharesApart(tree_map(cloned, share) for share in batch)
    return tree_map(cloned, batch)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, a complex one with its real and imaginary parts side by side."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
