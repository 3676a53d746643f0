"""Makes a Plan from the layout that another framework's settings describe; what they leave open is chosen as well as
possible."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate, estimate
from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, Axis, ContextKind, Plan, Recompute
from ..plan.legality import (
    can_recompute,
    context_rule,
    dims_rule,
    divisors,
    expert_rule,
    legal_cuts,
    sequence_rule,
    sharding_rule,
    tensor_rule,
)
from ..plan.making import make_plan
from ..plan.schedules import Schedule
from ..plan.shape import LayerOption, Shape
from ..plan.training import Precision, TrainingSpec
from .targets import NAMES, Target


@dataclass(frozen=True)
class Layout:
    """What settings of `target` decide. Fields that are None are not set; the fastest choice that fits is taken for
    them.

    reshard: which layers give gathered parameters back after forward; "inner" is all except those after the blocks.
    sync_every: gradients are reduced to shards after every micro-batch. recomputed: number of blocks on each stage that
    recompute, the first ones; None: all. stage_sizes: number of layers on each stage; (): all on one.
    """

    target: Target
    data_replicate: int = 1
    data_shard: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context_kind: ContextKind = "ring"
    sequence: bool = False
    schedule: Schedule = "none"
    reshard: Literal["all", "inner", "none"] = "none"
    sync_every: bool = False
    mesh_axes: tuple[Axis, ...] = AXES
    stage_sizes: tuple[int, ...] = ()
    micro_batch: int | None = None
    num_microbatches: int | None = None
    global_batch: int | None = None
    recompute: Recompute | None = None
    recomputed: int | None = None
    seq_len: int | None = None
    precision: Precision | None = None
    software: str = "fsdp2-eager"
    sgd: bool | None = None
    offload_optimizer: bool = False
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    asks: tuple[tuple[str, str], ...] = ()
    """(field that a launcher fills in, what the user should give for it); nothing is priced before that is given."""
    defaults: tuple[tuple[str, int, str], ...] = ()
    """(field, value, reason) of fields that a launcher fills in by a rule of its own."""

    @property
    def sharded_over(self) -> int:
        """Number of ranks that parameters or optimizer state are sharded over."""
        return self.data_shard * self.context


@dataclass(frozen=True)
class Said:
    """What our own flags say of the job, beside the settings; None: nothing."""

    precision: Precision | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    sgd: bool | None = None


_FLAGS = {
    "precision": "--precision",
    "micro_batch": "--micro-batch",
    "global_batch": "--global-batch",
    "seq_len": "--seq-len",
    "sgd": "--optimizer",
}


def with_flags(layout: Layout, said: Said) -> Layout:
    """The layout, with fields that its settings leave open set by our flags, and then by the rules of its launcher.

    Raises ValueError if a flag contradicts the settings, and names both; also if a field is left to a launcher that has
    no rule for it, and no flag sets it.
    """
    for name, flag in _FLAGS.items():
        mine, theirs = getattr(said, name), getattr(layout, name)
        if mine is None:
            continue
        if theirs is not None and mine != theirs:
            words = {True: "sgd", False: "adamw"} if name == "sgd" else {}
            raise ValueError(
                f"{flag} {words.get(mine, mine)}, but the settings say {words.get(theirs, theirs)}: leave out {flag}, "
                "or change the settings"
            )
        layout = replace(layout, **{name: mine})
    unsaid = [ask for name, ask in layout.asks if getattr(layout, name) is None]
    if unsaid:
        raise ValueError("; ".join(unsaid))
    for name, value, rule in layout.defaults:
        follows = name == "num_microbatches" and layout.global_batch is not None
        if getattr(layout, name) is None and not follows:
            layout = replace(layout, **{name: value}, notes=(*layout.notes, rule))  # type: ignore[arg-type]
    data = layout.data_replicate * layout.data_shard
    if layout.global_batch is None and layout.micro_batch and layout.num_microbatches:
        layout = replace(layout, global_batch=layout.micro_batch * layout.num_microbatches * data)
    return layout


@dataclass(frozen=True)
class Imported:
    """A layout as a plan, with its estimate, which says whether it fits."""

    plan: Plan
    estimate: Estimate


def imported(layout: Layout, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec) -> Imported:
    """The plan of a layout for a model and a job. Of what the layout leaves open the fastest choice that fits is taken;
    if none fits, the one that needs least memory.

    Raises ValueError if the layout does not go with the model, the cluster or the global batch.
    """
    _check_legal(layout, profile, training)
    best: Imported | None = None
    for micro_batch, recompute in _open_choices(layout, training):
        plan = plan_of(layout, profile, cluster, training, micro_batch, recompute)
        found = Imported(plan, estimate(plan, profile))
        if best is None or _rank(found) < _rank(best):
            best = found
    assert best is not None, "a share of the batch has a divisor"
    return best


def _rank(found: Imported) -> tuple[bool, float]:
    """Sort key: plans that fit come first, by their step; then the others, by how much they exceed their budget."""
    if found.estimate.fits:
        return False, found.estimate.step_time_s
    return True, max(stage.over_bytes for stage in found.estimate.memory)


def _check_legal(layout: Layout, profile: ModelProfile, training: TrainingSpec) -> None:
    name = NAMES[layout.target]
    wrapped = layout.target in ("torchtitan", "accelerate") and layout.sharded_over > 1
    rules = (
        tensor_rule(profile, layout.tensor),
        sequence_rule(profile, layout.tensor, layout.context) if layout.sequence else None,
        context_rule(profile, layout.context, layout.tensor, layout.context_kind),
        expert_rule(profile, layout.expert, layout.sequence),
        sharding_rule(profile, training.precision) if wrapped else None,
        dims_rule(profile, name) if wrapped else None,
    )
    for rule in rules:
        if rule is not None:
            raise ValueError(f"{name} set-up is not legal for {profile.name}: {rule}")
    data = layout.data_replicate * layout.data_shard
    each = data * (layout.micro_batch or 1)
    if training.global_batch % each:
        raise ValueError(
            f"the global batch of {training.global_batch} is no multiple of {each}, which is {data} data ranks x "
            f"micro-batch {layout.micro_batch or 1}: change one of them"
        )


def _open_choices(layout: Layout, training: TrainingSpec) -> Iterator[tuple[int, Recompute]]:
    share = training.global_batch // (layout.data_replicate * layout.data_shard)
    sizes = [layout.micro_batch] if layout.micro_batch else divisors(share)
    count = layout.num_microbatches
    if count is not None and not layout.micro_batch:
        if share % count:
            raise ValueError(
                f"the global batch of {training.global_batch} is no multiple of {count} micro-batches x "
                f"{training.global_batch // share} data ranks: change one of them"
            )
        sizes = [share // count]
    if count is not None and layout.micro_batch and share != count * layout.micro_batch:
        raise ValueError(
            f"the global batch of {training.global_batch} is not {training.global_batch // share} data ranks x "
            f"micro-batch {layout.micro_batch} x {count} micro-batches: change one of them"
        )
    kinds: tuple[Recompute, ...] = ("none", "full") if layout.recompute is None else (layout.recompute,)
    return ((size, kind) for size in sizes for kind in kinds)


def plan_of(
    layout: Layout,
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    micro_batch: int,
    recompute: Recompute,
) -> Plan:
    """The plan of a layout with this micro-batch and recompute. Raises ValueError if its numbers do not go together."""
    count = training.global_batch // (layout.data_replicate * layout.data_shard) // micro_batch
    every = layout.sync_every and layout.sharded_over > 1 and count > 1
    row = block_row(profile.layers) or BlockRow(0, len(profile.layers), 0)
    sizes = layout.stage_sizes or (len(profile.layers),)
    if sum(sizes) != len(profile.layers):
        raise ValueError(
            f"the stages hold {sum(sizes)} layers, {profile.name} has {len(profile.layers)}: the flags are for another "
            "model"
        )
    stages, place = [], 0
    for size in sizes:
        stages.append(_options(layout, profile, row, range(place, place + size), recompute))
        place += size
    shape = Shape(
        data_replicate=layout.data_replicate,
        data_shard=layout.data_shard,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        micro_batch=micro_batch,
        num_microbatches=count,
        sequence=layout.sequence,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        gradient_sync="every" if every else "last",
        mesh_axes=layout.mesh_axes,
        context=layout.context,
        context_kind=layout.context_kind if layout.context > 1 else "ring",
        expert=layout.expert,
        offload_optimizer=layout.offload_optimizer,
    )
    try:
        return make_plan(profile, cluster, training, shape, stages)
    except ValueError as error:  # pydantic's sentence for degrees, batch and schedule that do not go together
        first = str(error).partition("Value error, ")[2].partition(" [type=")[0] or str(error)
        raise ValueError(f"{NAMES[layout.target]} set-up: {first}") from None


def _options(
    layout: Layout, profile: ModelProfile, row: BlockRow, places: range, recompute: Recompute
) -> list[LayerOption]:
    """Options of the layers of one stage. places: their numbers in the chain."""
    begins = places.start
    if begins and begins not in legal_cuts(profile):
        raise ValueError(
            f"a stage begins at {profile.layers[begins].name}, before which {profile.name} cannot be cut: the layer "
            "shares a parameter with the one before it, or the model decides by values"
        )
    left = len(places) if layout.recomputed is None else layout.recomputed
    options = []
    for place in places:
        again = row.holds(place) and left > 0 and can_recompute(profile, profile.layers[place])
        left -= row.holds(place)
        inner = layout.reshard == "inner" and place < row.before + row.blocks
        options.append(
            LayerOption(
                recompute=recompute if again else "none",
                reshard=layout.sharded_over > 1 and (layout.reshard == "all" or inner),
            )
        )
    return options
