"""Plan: a versioned document with all that the executor needs to know, and what each rank holds of it."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ...profiler.document import Document, Frozen
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import format_bytes, format_seconds
from ...profiler.model.model_profile import BatchTensor, CrossingTensor, Experts, TensorCut, check_crossing
from .display import Shown
from .schedules import SCHEDULE_NAMES, Schedule, num_microbatches_rule, rank_and_chunk, stage_of
from .training import TrainingSpec

Axis = Literal["pipeline", "data_replicate", "data_shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data_replicate", "data_shard", "context", "tensor")

PARTS = "parts:"
"""Beginning of a `Recompute` that names parts of a layer."""

_PART_NAMES = re.compile(rf"{PARTS}[^\s+]+(\+[^\s+]+)*")


def known_recompute(value: str) -> str:
    """The value, if it is a kind of recompute, or names parts of which none lies inside another. Raises ValueError
    otherwise."""
    if value in EXECUTABLE_RECOMPUTES:
        return value
    if not _PART_NAMES.fullmatch(value):
        kinds = ", ".join(EXECUTABLE_RECOMPUTES)
        raise ValueError(f"recompute={value!r} is not one of {kinds}, or {PARTS}NAME+NAME of submodules of the layer")
    for inner, outer in permutations(parts_of(value), 2):
        if f"{inner}.".startswith(f"{outer}."):
            raise ValueError(f"recompute={value!r}: {inner} runs again with {outer} already; leave it out")
    return value


Recompute = Annotated[str, AfterValidator(known_recompute)]
"""What backward computes again. none; attention: from scores to output; selective: all but matmuls and attention; full;
or "parts:NAME+NAME": whole submodules of the layer, by their names in it, in the order in which the profile lists
them."""


def parts_of(recompute: Recompute) -> tuple[str, ...]:
    """Names of the submodules that a recompute runs again; () unless it is one of parts."""
    return tuple(recompute.removeprefix(PARTS).split("+")) if recompute.startswith(PARTS) else ()


def parts_in_words(recompute: Recompute) -> str:
    """Names of the parts, for people to read; empty unless the recompute is one of parts."""
    return " + ".join(parts_of(recompute))


def recompute_of_parts(parts: Sequence[str]) -> Recompute:
    """The recompute of these submodules of a layer; "none" if there are none."""
    return PARTS + "+".join(parts) if parts else "none"


ContextKind = Literal["ring", "all_to_all", "all_gather"]
"""How ranks that hold parts of one sequence attend to each other. ring: keys and values go round, hidden behind
attention. all_to_all: queries, keys and values change from parts of the sequence to heads, and the output back
(Ulysses). all_gather: each rank gathers all keys and values (Llama 3)."""

CONTEXT_NAMES: dict[ContextKind, str] = {"ring": "ring", "all_to_all": "all-to-all", "all_gather": "all-gather"}

GroupAxis = Axis | Literal["expert"]
"""A mesh axis, or "expert": the groups over which experts are spread, which run along other axes."""

KEPT_ON_DEVICE: tuple[Recompute, ...] = ("attention", "selective")
"""Kinds of recompute that store what they keep by themselves, where no hook can move it to the host."""

EXECUTABLE_RECOMPUTES: tuple[Recompute, ...] = ("none", "attention", "selective", "full")
"""All kinds of recompute except those of parts."""


class Degrees(Frozen):
    """How many ways each axis splits. All but expert and virtual_stages multiply to the number of GPUs."""

    data_replicate: PositiveInt = 1
    data_shard: PositiveInt = 1
    tensor: PositiveInt = 1
    context: PositiveInt = Field(default=1, description="ranks that hold parts of the same sequences")
    expert: PositiveInt = Field(default=1, description="ranks over which the experts of a layer are spread")
    pipeline: PositiveInt = 1
    virtual_stages: PositiveInt = Field(default=1, description="stages of each pipeline rank")

    @property
    def num_devices(self) -> int:
        """Ranks of the job."""
        return self.data_replicate * self.data_shard * self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Number of ranks that see different samples."""
        return self.data_replicate * self.data_shard

    @property
    def sharded_over(self) -> int:
        """Number of ranks that parameters are sharded over: those of data_shard, times the context ranks that share
        their samples."""
        return self.data_shard * self.context

    @property
    def rank_noun(self) -> str:
        """How people call a pipeline rank: "stage" if it holds one."""
        return "stage" if self.virtual_stages == 1 else "rank"

    def of(self, axis: Axis) -> int:
        """Degree of a mesh axis."""
        degree: int = getattr(self, axis)
        return degree


def layout_name(degrees: Degrees, schedule: Schedule, sequence: bool, context_kind: ContextKind) -> str:
    """How people call a layout: DDP, FSDP, HSDP 2x4, TP 4, PP 2 and so on, joined by " + "."""
    names = []
    if degrees.data_shard > 1:
        hybrid = f"HSDP {degrees.data_replicate}x{degrees.data_shard}"
        names.append(hybrid if degrees.data_replicate > 1 else f"FSDP {degrees.data_shard}")
    elif degrees.data_replicate > 1:
        names.append(f"DDP {degrees.data_replicate}")
    if degrees.tensor > 1:
        names.append(f"TP {degrees.tensor}" + (" with sequence parallel" if sequence else ""))
    if degrees.context > 1:
        names.append(f"CP {degrees.context} ({CONTEXT_NAMES[context_kind]})")
    if degrees.expert > 1:
        names.append(f"EP {degrees.expert}")
    if degrees.pipeline > 1:
        chunks = f" x {degrees.virtual_stages}" if degrees.virtual_stages > 1 else ""
        names.append(f"PP {degrees.pipeline}{chunks} ({SCHEDULE_NAMES[schedule]})")
    return " + ".join(names) or "one device"


class LayerPlan(Frozen):
    """One layer of a stage."""

    name: str
    layer_class: str
    root: str = Field(description="module that the class's relative names start from; '' for the model itself")
    modules: tuple[str, ...] = Field(description="full names of the outermost modules of this layer")
    parameters: tuple[str, ...] = Field(description="full names")
    recompute: Recompute
    reshard: bool = Field(description="give gathered parameters back after forward (ZeRO-3); False keeps them")
    offload: bool = Field(default=False, description="what is kept for backward waits in the host's memory")


class Stage(Frozen):
    """Consecutive layers that one pipeline coordinate holds; one chunk of them, if it has several.

    The search puts those of several equal layers first that hold most during their backward beyond what they keep:
    fully recomputed ones, then those that recompute less, then those that keep everything. The backward of the first
    layers comes last, when least is held. The executor does with each layer what the layer says, in any order.
    """

    layers: tuple[LayerPlan, ...] = Field(min_length=1)


class ClassPlan(Frozen):
    """How tensor parallelism cuts the layers of a class (not at all, if cuts are empty), and which of its experts are
    spread."""

    name: str
    cuts: tuple[TensorCut, ...] = ()
    sequence: bool = Field(default=False, description="between the cuts each rank holds a slice of the sequence")
    experts: tuple[Experts, ...] = Field(default=(), description="banks that are spread over the expert ranks")


class ModelReference(Frozen):
    """The model that a plan is for."""

    name: str
    source: str
    fingerprint: str
    num_parameters: NonNegativeInt
    ties: tuple[tuple[str, ...], ...] = ()
    tensors: tuple[CrossingTensor, ...] = Field(default=(), description="everything that can cross a cut")
    layer_modules: tuple[str, ...] = Field(description="outermost modules of all layers: what producers.py counts")
    attention_modules: tuple[str, ...] = ()
    expert_modules: tuple[str, ...] = Field(default=(), description="banks of experts; each token runs by itself there")
    packed: bool = Field(default=False, description="frozen weights are kept in 4 bits")
    decides_by_values: bool = Field(default=False, description="ranks may run different layers in the same step")
    without_dims: str = Field(default="", description="the first parameter that has no dims")
    returns_loss: bool = False
    batch: tuple[BatchTensor, ...] = Field(default=(), description="tensors of one sample, and where more samples go")


_SAME = 1e-6
"""Relative difference of two steps that may be due to rounding."""


class Certificate(Frozen):
    """What the search has proven about simulated steps of all plans in the searched space, and how."""

    step_s: PositiveFloat = Field(description="seconds: the plan's simulated step")
    fastest_s: PositiveFloat = Field(description="seconds: the simulated step of the fastest plan that was found")
    bound: NonNegativeFloat = Field(description="seconds: no plan in the space has a shorter simulated step")
    gap: float = Field(description="(fastest_s - bound) / fastest_s: how much faster an unknown plan may be at most")
    status: Literal["optimal", "feasible"] = Field(description="optimal: the gap is at most 0.1%")
    solver: str
    search_seconds: NonNegativeFloat
    shapes: dict[Literal["total", "rejected", "pruned", "solved"], NonNegativeInt]
    rejected: dict[str, NonNegativeInt] = Field(default={}, description="rule -> shapes it excluded")
    framework: str | None = Field(default=None, description="the space holds only what this framework runs")
    open_s: PositiveFloat | None = Field(
        default=None, description="seconds: the fastest plan found for the same software without that restriction"
    )

    @model_validator(mode="after")
    def _all_counts_are_there(self) -> Self:
        if missing := {"total", "rejected", "pruned", "solved"} - self.shapes.keys():
            raise ValueError(f"shapes: {sorted(missing)[0]} is missing")
        return self

    @model_validator(mode="after")
    def _what_is_proven_follows(self) -> Self:
        steps = self.bound, self.fastest_s, self.step_s
        if any(later < earlier * (1 - _SAME) for earlier, later in pairwise(steps)):
            raise ValueError(f"bound <= fastest_s <= step_s; found {' and '.join(f'{step:g}' for step in steps)}")
        gap = 1 - self.bound / self.fastest_s
        if abs(self.gap - gap) > _SAME:
            raise ValueError(f"gap={self.gap:g}, but fastest_s and bound leave {gap:g}")
        return self

    @property
    def given_away(self) -> float:
        """Share by which the plan's step is longer than the fastest found, because a simpler plan was preferred."""
        return self.step_s / self.fastest_s - 1.0

    @property
    def restriction(self) -> float | None:
        """Share by which the fastest step is longer because only plans for a framework were searched; a lower bound.
        None if plans without that restriction were not looked for."""
        return None if self.open_s is None else self.fastest_s / self.open_s - 1.0


class Prediction(Frozen):
    """The predicted figures by which a plan was chosen; estimate.py gives all of them."""

    step_time_s: NonNegativeFloat
    tokens_per_s: NonNegativeFloat
    mfu: NonNegativeFloat
    stage_memory_bytes: tuple[NonNegativeFloat, ...]
    budget_bytes: NonNegativeFloat = Field(description="of the first stage")
    stage_budget_bytes: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="of every stage, where devices are unequal"
    )
    launch_share: NonNegativeFloat = Field(
        default=0.0, description="of the step, that the busiest stage waits for its CPU to launch kernels"
    )

    def budget_of(self, position: int) -> float:
        """Bytes that a plan may use on each device of a pipeline coordinate."""
        return self.stage_budget_bytes[position] if self.stage_budget_bytes else self.budget_bytes


class MeasuredPlan(Frozen):
    """What a plan took when `plan tune` ran it, beside the prediction."""

    step_time_s: float = Field(description="median seconds of a step, over all turns that it took")
    spread: float = Field(description="half of the distance between the quartiles of a step, relative to the median")
    num_steps: PositiveInt
    turns: PositiveInt = Field(description="times that it ran, between runs of other plans")
    peak_memory_bytes: tuple[int, ...] = Field(description="[rank]")
    memory_kind: Literal["resident", "allocated"] = Field(
        description="resident: of the whole process, libraries included; allocated: by torch on the GPU"
    )
    predicted_before_s: float = Field(description="by the constants before they were fitted to what was measured")


class WeighedLayers(Frozen):
    """Consecutive layers of a stage with the same options."""

    count: PositiveInt
    recompute: Recompute = "none"
    reshard: bool = False
    offload: bool = False


class WeighedLayout(Frozen):
    """Choices of a layout that was weighed beside the plan: enough to make its plan again."""

    degrees: Degrees
    mesh_axes: tuple[Axis, ...]
    schedule: Schedule
    micro_batch: PositiveInt
    num_microbatches: PositiveInt
    gradient_sync: Literal["every", "last"]
    sequence: bool = False
    context_kind: ContextKind = "ring"
    offload_optimizer: bool = False
    cuts: dict[str, tuple[str, ...]] | None = Field(default=None, description="class -> cuts of it; null: all")
    first_hosts: tuple[NonNegativeInt, ...] = Field(default=(), description="where hosts are in another order: that")
    stages: tuple[tuple[WeighedLayers, ...], ...]


class Alternative(Frozen):
    """Another layout that was weighed beside the plan, and why it is not the plan."""

    label: str
    by_rule: bool = Field(default=False, description="what a rule of thumb leads to")
    outcome: str = Field(description="the plan, slower, faster, as fast, does not fit, illegal, ...")
    detail: str = Field(default="", description="what costs most, the rule that excludes it, or why it is not the plan")
    note: str = ""
    ratio: float = Field(default=0.0, description="its step over the plan's, less one")
    stage: int | None = Field(default=None, description="the stage that is most over its budget")
    over_bytes: float = 0.0
    step_time_s: float | None = Field(default=None, description="null where it does not fit or is not legal")
    device_bytes: float | None = Field(default=None, description="on its fullest GPU")
    layout: WeighedLayout | None = None


class Plan(Document):
    """A decided layout: its degrees and schedule, and for each layer its stage, its recompute, and whether it
    reshards."""

    made_by: ClassVar[str] = "plan MODEL -o {path}"

    schema_version: Literal[1] = 1
    kind: Literal["meshwright-plan"] = "meshwright-plan"
    model: ModelReference
    cluster: ClusterSpec
    training: TrainingSpec
    degrees: Degrees
    mesh_axes: tuple[Axis, ...] = Field(default=AXES, description="outermost first; the last runs over neighbours")
    schedule: Schedule = "none"
    micro_batch: PositiveInt = Field(description="samples of one data rank per forward")
    num_microbatches: PositiveInt
    gradient_sync: Literal["every", "last"] = Field(
        default="last", description="reduce gradients after every micro-batch, or once after the last"
    )
    context_kind: ContextKind = Field(default="ring", description="how context ranks attend to each other")
    offload_optimizer: bool = Field(default=False, description="optimizer state and its step are on the host")
    classes: tuple[ClassPlan, ...] = ()
    stages: tuple[Stage, ...] = Field(min_length=1)
    prediction: Prediction | None = None
    measured: MeasuredPlan | None = Field(default=None, description="by `plan tune`, on the cluster itself")
    certificate: Certificate | None = None
    alternatives: tuple[Alternative, ...] = Field(
        default=(), description="what was weighed beside it, the best of each other kind first"
    )
    versions: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> Self:
        degrees = self.degrees
        if degrees.num_devices != self.cluster.num_devices:
            raise ValueError(
                f"degrees multiply to {degrees.num_devices} ranks, the cluster has {self.cluster.num_devices} devices"
            )
        if sorted(self.mesh_axes) != sorted(AXES):
            raise ValueError(f"mesh_axes must order {', '.join(AXES)}; found {', '.join(self.mesh_axes)}")
        if len(self.stages) != degrees.pipeline * degrees.virtual_stages:
            raise ValueError(
                f"pipeline={degrees.pipeline} with {degrees.virtual_stages} stages on each rank needs "
                f"{degrees.pipeline * degrees.virtual_stages} stages; found {len(self.stages)}"
            )
        samples = self.micro_batch * self.num_microbatches * degrees.data
        if samples != self.training.global_batch:
            raise ValueError(
                f"micro_batch x num_microbatches x data ranks = {self.micro_batch} x {self.num_microbatches} x "
                f"{degrees.data} = {samples} samples, but global_batch is {self.training.global_batch}"
            )
        if (self.schedule == "none") != (degrees.pipeline == 1):
            raise ValueError(f"schedule={self.schedule!r} does not go with pipeline={degrees.pipeline}")
        follows = self.mesh_axes.index("context") == self.mesh_axes.index("data_shard") + 1
        if degrees.context > 1 and not follows:
            raise ValueError(
                "parameters are sharded over data_shard and context together, so context must follow data_shard in "
                f"mesh_axes; found {', '.join(self.mesh_axes)}"
            )
        if self.experts_over % degrees.expert:
            raise ValueError(
                f"expert={degrees.expert} does not divide the {self.experts_over} ranks that hold tokens of their own: "
                "data_shard x context, and x tensor under sequence parallelism"
            )
        chunks = degrees.virtual_stages
        if (self.schedule in ("none", "gpipe", "1f1b") and chunks > 1) or (self.schedule == "zb-v" and chunks != 2):
            raise ValueError(
                f"schedule={self.schedule!r} gives each rank {2 if self.schedule == 'zb-v' else 1} stage(s), not "
                f"virtual_stages={chunks}; interleaved, zb-h1 and zb-h2 take any number"
            )
        rule = num_microbatches_rule(self.schedule, degrees.pipeline, self.num_microbatches, chunks)
        if rule is not None and self.schedule != "1f1b":  # of which plans are told, and exports, where they are checked
            raise ValueError(rule)
        self._check_layers()
        return self

    def _check_layers(self) -> None:
        """Raise ValueError unless the stages hold each of the model's layers once, in order, and crossing tensors
        belong to layers that exist."""
        held = tuple(dict.fromkeys(name for layer in self.layers for name in layer.modules))
        if held != self.model.layer_modules:
            pairs = zip(held, self.model.layer_modules, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(self.model.layer_modules)))
            expected = next(iter(self.model.layer_modules[place:]), "no more")
            raise ValueError(
                f"the stages do not hold the model's modules in its order: number {place} is "
                f"{next(iter(held[place:]), 'missing')}, and the model has {expected} there"
            )
        layers = len(self.layers)
        for number, tensor in enumerate(self.model.tensors):
            check_crossing(number, tensor, layers, len(self.model.tensors))
        ranks = self.degrees.pipeline
        if self.prediction is not None and len(self.prediction.stage_memory_bytes) != ranks:
            found = len(self.prediction.stage_memory_bytes)
            raise ValueError(f"the prediction has memory of {found} pipeline ranks; there are {ranks}")

    @property
    def sequence_parallel(self) -> bool:
        """Whether layers of any class run on slices of the sequence between their tensor cuts."""
        return any(c.sequence for c in self.classes)

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        """Mesh axes, outermost first, along which ranks of a stage hold different tokens and share the experts.
        (Replicas hold different tokens, too, but each has all experts.)"""
        spread = ("data_shard", "context", "tensor") if self.sequence_parallel else ("data_shard", "context")
        return tuple(axis for axis in self.mesh_axes if axis in spread)

    @property
    def experts_over(self) -> int:
        """Number of ranks of a stage that hold different tokens and share the experts."""
        return math.prod(self.degrees.of(axis) for axis in self.token_axes)

    def class_plan(self, name: str) -> ClassPlan:
        """How a layer class is cut; an empty ClassPlan if it stays whole."""
        return next((c for c in self.classes if c.name == name), ClassPlan(name=name))

    @property
    def layers(self) -> list[LayerPlan]:
        """All layers, in the order of the chain."""
        return [layer for stage in self.stages for layer in stage.layers]

    def stages_of(self, position: int) -> tuple[int, ...]:
        """Numbers of the stages that a pipeline coordinate holds, in the order of its chunks."""
        degrees = self.degrees
        chunks = range(degrees.virtual_stages)
        return tuple(stage_of(self.schedule, position, chunk, degrees.pipeline) for chunk in chunks)

    def position_of(self, stage: int) -> int:
        """The pipeline coordinate that holds a stage."""
        return rank_and_chunk(self.schedule, stage, self.degrees.pipeline)[0]

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, by what data ranks share: 0 nothing; 1 optimizer state; 2 also gradients; 3 also parameters
        (FSDP)."""
        if self.degrees.sharded_over == 1:
            return 0
        if any(layer.reshard for layer in self.layers):
            return 3
        return 2 if self.gradient_sync == "every" else 1

    @property
    def label(self) -> str:
        """How people call the layout, in all output: by its degrees; but ZeRO-1 or ZeRO-2 instead of FSDP if all
        parameters stay gathered (each rank stores only a shard of them in these modes, too)."""
        layout = layout_name(self.degrees, self.schedule, self.sequence_parallel, self.context_kind)
        return layout if self.zero_stage in (0, 3) else layout.replace("FSDP ", f"ZeRO-{self.zero_stage} over ")

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours on a mesh axis."""
        inner = self.mesh_axes[self.mesh_axes.index(axis) + 1 :]
        return math.prod(self.degrees.of(a) for a in inner)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Position of a rank on every mesh axis."""
        return {axis: rank // self.stride(axis) % self.degrees.of(axis) for axis in self.mesh_axes}

    def __rich__(self) -> object:
        """A table for rich's print."""
        return self._table().rich()

    def _repr_html_(self) -> str:
        """A table for a notebook's cell."""
        return self._table().html()

    def _table(self) -> Shown:
        """Table of the plan's layout, with one row for each stage."""
        title = (
            f"{self.model.name} on {self.cluster.devices}: {self.label}, "
            f"micro-batch {self.micro_batch} x {self.num_microbatches}"
        )
        predicted = self.prediction
        if predicted is not None:
            title += f", {format_seconds(predicted.step_time_s)} a step, MFU {predicted.mfu:.1%}"
        rows = []
        for index, stage in enumerate(self.stages):
            rank = self.position_of(index)
            layers = stage.layers
            span = layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"
            peak = "" if predicted is None else format_bytes(predicted.stage_memory_bytes[rank])
            recomputed = sum(layer.recompute != "none" for layer in layers)
            rows.append((str(index), span, str(len(layers)), str(recomputed), str(rank), peak))
        return Shown(title, ("stage", "layers", "count", "recomputed", "rank", "memory"), tuple(rows), 2)

    @classmethod
    def _not_json(cls, path: Path, error: ValueError) -> str:
        if path.suffix == ".json":
            return super()._not_json(path, error)
        return f"{path} is not a plan; if it is a model, make its plan first: plan {path} -o plan.json"


class Placement(Frozen):
    """Host, device and layers of one rank."""

    rank: NonNegativeInt
    host: NonNegativeInt
    device: NonNegativeInt
    device_name: str
    coordinates: dict[Axis, int]
    layers: tuple[str, ...]


def placement(plan: Plan, rank: int) -> Placement:
    """Host, device, mesh coordinates and layers of a rank; no other code derives them."""
    host, device = plan.cluster.host_of(rank)
    coordinates = plan.coordinates(rank)
    stages = plan.stages_of(coordinates["pipeline"])
    return Placement(
        rank=rank,
        host=host,
        device=device,
        device_name=plan.cluster.device_of(rank).name,
        coordinates=coordinates,
        layers=tuple(layer.name for stage in stages for layer in plan.stages[stage].layers),
    )


def placements(plan: Plan) -> Iterator[Placement]:
    """Every rank's placement, in rank order."""
    return (placement(plan, rank) for rank in range(plan.degrees.num_devices))


def load_plan(path: Path) -> Plan:
    """Read a plan document. Raises ValueError for a file that is damaged, no plan, or of a later version."""
    return Plan.load(path)
