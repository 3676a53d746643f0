"""Frameworks that plans may be made for. Each is one declaration of what it can run of our plans without changes.

A plan that keeps to a declaration exports to that framework (exchange/), which then does what the plan says. In all
four, settings can only make all blocks recompute alike, and nothing but blocks. Versions: exchange/targets.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from ...profiler.model.model_profile import ModelProfile
from .block_row import block_row
from .document import AXES, Axis, ContextKind, Plan, Recompute, parts_in_words
from .legality import dims_rule, has_experts, inner_cuts, stage_starts, undivided
from .schedules import Schedule
from .shape import Shape
from .training import COMPILING, REFERENCE, Precision, TrainingSpec

Target = Literal["megatron", "torchtitan", "accelerate", "deepspeed"]

TARGETS: tuple[Target, ...] = get_args(Target)

DATA_OUTERMOST: tuple[Axis, ...] = ("data_replicate", "data_shard", "context", "pipeline", "tensor")
"""Megatron-LM's other order of the mesh axes, by --use-tp-pp-dp-mapping; its usual order is that of AXES."""


class Zero(NamedTuple):
    """When gradients are reduced to shards ("every" micro-batch, or after the "last"), and whether gathered parameters
    are given back after forward."""

    sync: Literal["every", "last"]
    reshard: bool


ZERO_1, ZERO_2, ZERO_3 = Zero("last", False), Zero("every", False), Zero("every", True)


def _in_words(mode: Zero) -> str:
    """How people call this way of sharding."""
    if mode.reshard:
        return "zero=3" if mode.sync == "every" else "zero=3 with gradients reduced once a step"
    return "zero=2" if mode.sync == "every" else "zero=1"


@dataclass(frozen=True)
class Asked:
    """What a rule looks at: a shape, whose micro-batch and schedule do not count, with its model and job."""

    shape: Shape
    profile: ModelProfile
    training: TrainingSpec


Rule = Callable[[Asked], str | None]
"""Function that returns, in words, why a framework does not run a shape; None if it does."""


@dataclass(frozen=True)
class Framework:
    """What a framework can run of our plans.

    schedules: of pipelines; () if its settings have none. partly: the kind of recompute that may be restricted to the
    first blocks of each stage, equally many in every stage. zero, zero_in_pipelines: ways to shard state over data
    ranks. orders, orders_with_context: possible orders of the mesh axes. in_rounds: interleaved schedules need a number
    of micro-batches that is a multiple of the pipeline degree. needs_blocks: models must be one row of numbered blocks.
    offloads_optimizer: the optimizer, and nothing else, may be on the host. packs: frozen weights may be in 4 bits.
    rules: on how a model is split; data_rules: on how data ranks go with that.
    """

    target: Target
    name: str
    software: str
    precisions: tuple[Precision, ...]
    recomputes: tuple[Recompute, ...]
    zero: tuple[Zero, ...]
    rules: tuple[Rule, ...]
    data_rules: tuple[Rule, ...] = ()
    partly: Recompute | None = None
    schedules: tuple[Schedule, ...] = ()
    zero_in_pipelines: tuple[Zero, ...] = ()
    contexts: tuple[ContextKind, ...] = ()
    experts: bool = False
    orders: tuple[tuple[Axis, ...], ...] = (AXES,)
    orders_with_context: tuple[tuple[Axis, ...], ...] = (AXES,)
    in_rounds: bool = False
    needs_blocks: bool = False
    offloads_optimizer: bool = False
    packs: bool = False

    @cached_property
    def reshards(self) -> tuple[bool, ...]:
        """Possible choices of whether gathered parameters are given back: (False,), (True,) or both."""
        return tuple(sorted({mode.reshard for mode in (*self.zero, *self.zero_in_pipelines)}))

    @property
    def mixed(self) -> tuple[Recompute, ...]:
        """Kinds of recompute that blocks may choose from in the search, if they need not all have the same."""
        return self.recomputes if self.partly is None else ("none", self.partly)

    def as_told(self, plan: Plan, count: int) -> Plan:
        """The plan with the recompute `partly` in the first `count` blocks of each stage, and none elsewhere."""
        row, place, stages = block_row(plan.layers), 0, []
        for stage in plan.stages:
            left, layers = count, []
            for at, layer in enumerate(stage.layers, place):
                again = self.partly if left > 0 and row is not None and row.holds(at) else None
                left -= again is not None
                layers.append(layer.model_copy(update={"recompute": again or "none"}))
            place += len(stage.layers)
            stages.append(stage.model_copy(update={"layers": tuple(layers)}))
        return plan.model_copy(update={"stages": tuple(stages)})

    def cannot_run(self, profile: ModelProfile, training: TrainingSpec) -> str | None:
        """Why the framework runs no layout of this model and job, with a way out; None if it runs some."""
        if self.needs_blocks and block_row(profile.layers) is None:
            others = " or ".join(f.target for f in FRAMEWORKS.values() if not f.needs_blocks)
            return (
                f"{profile.name} is no single row of numbered blocks, which is what {self.name} builds: plan --for "
                f"{others}"
            )
        if profile.packed and not self.packs:
            return f"{self.name} keeps no frozen weights in 4 bits: plan with --lora ...,base=bf16"
        if training.precision not in self.precisions:
            return f"{self.name} has no setting for {training.precision}: give --precision {self.precisions[0]}"
        return None

    def recompute_rule(self, recompute: Recompute) -> str | None:
        """Why the framework's settings cannot ask for a kind of recompute; None if they can."""
        if recompute in self.recomputes:
            return None
        asked = f"parts ({parts_in_words(recompute)})" if parts_in_words(recompute) else recompute
        return f"recompute={asked} is nothing that {self.name} is told; it takes {', '.join(self.recomputes)}"

    def pipeline_rule(
        self,
        schedule: Schedule | None = None,
        sync: Literal["every", "last"] | None = None,
        reshard: bool | None = None,
    ) -> str | None:
        """Why the framework runs no pipeline with this schedule and this way of sharding state; None if it does.
        Arguments that are None may take any value."""
        if not self.schedules:
            return f"pipeline: {self.name} has stages in code, not in its settings"
        if schedule is not None and schedule not in self.schedules:
            return f"schedule={schedule} is none of {self.name}'s: it takes {', '.join(self.schedules)}"
        modes = self.zero_in_pipelines
        if any(sync in (None, mode.sync) and reshard in (None, mode.reshard) for mode in modes):
            return None
        return f"data_shard: {self.name} takes {' or '.join(map(_in_words, modes))} beside a pipeline"

    def context_rule(self, kind: ContextKind | None) -> str | None:
        """Why the framework has no context parallelism of this kind (None: of any kind); None if it has."""
        if not self.contexts:
            return f"context: {self.name} has no context parallelism in its settings"
        if kind is None or kind in self.contexts:
            return None
        return f"context_kind={kind} is none of {self.name}'s: it takes {', '.join(self.contexts)}"

    def starts(self, profile: ModelProfile) -> list[int]:
        """Layers before which a stage may begin. What comes before the blocks is on the first stage, what comes after
        them on the last. A model without a row of blocks is cut only between its children and items of its lists."""
        if not self.schedules:
            return []
        row, starts = block_row(profile.layers), stage_starts(profile)
        if row is not None:
            return [place for place in starts if row.before <= place <= row.before + row.blocks]
        deep = any(name.count(".") > 1 for layer in profile.layers for name in layer.modules)
        return [] if deep else starts

    def schedule_rule(self, schedule: Schedule, pipeline: int, count: int) -> str | None:
        """Why a schedule does not run with `count` micro-batches; None if it does."""
        if self.in_rounds and schedule == "interleaved" and count % pipeline:
            return f"{self.name} interleaves micro-batches in groups of as many as there are stages"
        return None

    def split_rule(self, asked: Asked) -> str | None:
        """Why a model cannot be split as in the shape, however data ranks are used; None if it can."""
        if asked.shape.pipeline > 1 and not self.schedules:
            return self.pipeline_rule()
        return next((found for rule in self.rules if (found := rule(asked)) is not None), None)

    def data_rule(self, asked: Asked) -> str | None:
        """Why the shape's replicas and shards do not go with its other degrees; None if they do."""
        return next((found for rule in self.data_rules if (found := rule(asked)) is not None), None)

    def may_lie(self, axes: Sequence[Axis], context: int) -> bool:
        """Whether ranks may be arranged in this order of axes. axes: those with a degree above 1."""
        orders = self.orders_with_context if context > 1 else self.orders
        return any([axis for axis in order if axis in axes] == list(axes) for order in orders)


def _whole(asked: Asked) -> str | None:
    """Why a tensor degree is not run: it leaves some attention or feed-forward whole, which frameworks cut, or refuse.
    None if it is."""
    tensor = asked.shape.tensor
    return undivided(inner_cuts(asked.profile), tensor) if tensor > 1 else None


def _megatron_experts(asked: Asked) -> str | None:
    if asked.shape.tensor > 1 and not asked.shape.sequence and has_experts(asked.profile):
        return "sequence: Megatron-LM trains mixtures of experts on tensor ranks only with sequence parallelism"
    return None


def _megatron_expert_state(asked: Asked) -> str | None:
    if asked.shape.expert > 1 and asked.shape.sharded_over == 1:
        return "expert: ranks that share experts and no optimizer state are not what Megatron-LM's distributed one does"
    return None


def _dims(name: str) -> Rule:
    return lambda asked: dims_rule(asked.profile, name) if asked.shape.sharded_over > 1 else None


def _titan_experts(asked: Asked) -> str | None:
    if asked.shape.tensor == 1 or not has_experts(asked.profile):
        return None
    if asked.shape.expert == 1:
        return "expert: torchtitan cuts experts by tensor parallelism where they are not spread, which is not priced"
    if not asked.shape.sequence:
        return "sequence: torchtitan spreads experts over tensor ranks, which hold the same tokens without it"
    return None


def _titan_precision(asked: Asked) -> str | None:
    shape = asked.shape
    alone = shape.tensor * shape.pipeline == 1
    if asked.training.precision == "bf16" and shape.sharded_over == 1 and not alone:
        return "data_shard: torchtitan computes in bf16 through FSDP or plain DDP, not on tensor ranks or stages alone"
    return None


def _no_sequence(name: str, why: str) -> Rule:
    return lambda asked: f"sequence: {name} has {why}" if asked.shape.sequence else None


def _no_experts(name: str, why: str) -> Rule:
    return lambda asked: f"expert: {name} {why}" if asked.shape.expert > 1 else None


def _accelerate_data(asked: Asked) -> str | None:
    shape = asked.shape
    if shape.tensor > 1 and shape.sharded_over == 1:
        return "data_shard: Accelerate's tensor parallelism goes with FSDP2"
    if shape.data_replicate > 1 and shape.data_shard == 1 and shape.context > 1:
        return "data_replicate: Accelerate takes replicas of context ranks only beside data_shard above 1"
    return None


def _deepspeed_data(asked: Asked) -> str | None:
    shape = asked.shape
    if shape.data_replicate > 1 and shape.data_shard > 1:
        return "data_replicate: ZeRO of DeepSpeed shards over all data ranks"
    if shape.tensor > 1 and shape.reshard:
        return "tensor: DeepSpeed's AutoTP goes with ZeRO up to 2"
    return None


FRAMEWORKS: dict[Target, Framework] = {
    framework.target: framework
    for framework in (
        Framework(
            target="megatron",
            name="Megatron-LM",
            software="megatron-core",
            precisions=("bf16", "fp16", "fp32", "fp8", "fp4"),
            recomputes=("none", "attention", "full"),
            partly="full",
            zero=(ZERO_1, ZERO_2, ZERO_3),
            zero_in_pipelines=(ZERO_1,),
            schedules=("1f1b", "interleaved"),
            contexts=("ring", "all_to_all", "all_gather"),
            experts=True,
            orders=(AXES, DATA_OUTERMOST),
            in_rounds=True,
            needs_blocks=True,
            offloads_optimizer=True,
            rules=(_whole, _megatron_experts),
            data_rules=(_megatron_expert_state,),
        ),
        Framework(
            target="torchtitan",
            name="torchtitan",
            software=COMPILING,
            precisions=("bf16", "fp32"),
            recomputes=("none", "selective", "full"),
            zero=(ZERO_2, ZERO_3),
            zero_in_pipelines=(ZERO_1, Zero("last", True)),
            schedules=("gpipe", "1f1b", "interleaved", "zb-v"),
            contexts=("all_gather",),
            experts=True,
            rules=(_whole, _titan_experts),
            data_rules=(_titan_precision, _dims("torchtitan")),
        ),
        Framework(
            target="accelerate",
            name="Accelerate",
            software=REFERENCE,
            precisions=("bf16", "fp16", "fp32", "fp8"),
            recomputes=("none", "full"),
            zero=(ZERO_1, ZERO_2, ZERO_3, Zero("last", True)),
            contexts=("all_to_all", "all_gather"),
            packs=True,
            rules=(
                _whole,
                _no_sequence("Accelerate", "the model's tp_plan, no sequence parallelism of its own"),
                _no_experts("Accelerate", "has no expert ranks in its ParallelismConfig"),
            ),
            data_rules=(_accelerate_data, _dims("Accelerate")),
        ),
        Framework(
            target="deepspeed",
            name="DeepSpeed",
            software=REFERENCE,
            precisions=("bf16", "fp16", "fp32"),
            recomputes=("none", "full"),
            zero=(ZERO_1, ZERO_2, ZERO_3),
            offloads_optimizer=True,
            packs=True,
            rules=(
                _whole,
                _no_sequence("DeepSpeed", "no sequence parallelism beside its AutoTP"),
                _no_experts("DeepSpeed", "says expert ranks in code"),
            ),
            data_rules=(_deepspeed_data,),
        ),
    )
}
"""Name on the command line -> framework."""

NAMES: dict[Target, str] = {target: framework.name for target, framework in FRAMEWORKS.items()}


def framework_of(name: str) -> Framework:
    """The framework with this name on the command line. Raises ValueError, with all names, if there is none."""
    for target, framework in FRAMEWORKS.items():
        if target == name.strip().lower():
            return framework
    raise ValueError(f"--for {name}: plans are made for {', '.join(FRAMEWORKS)}")
