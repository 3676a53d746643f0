"""What exporters share: the blocks of a plan by stage, and notes on what a target does differently."""

from collections import Counter
from typing import Any, Literal

from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, Axis, Plan, Recompute, parts_in_words
from .targets import NAMES, Target

Settings = dict[str, Any]


def with_sharded_optimizer(plan: Plan) -> str:
    """The plan's degrees as a --setup in which only the optimizer's state is sharded."""
    degrees = plan.degrees
    named = {"tp": degrees.tensor, "pp": degrees.pipeline, "cp": degrees.context, "ep": degrees.expert}
    return f'--setup "{" ".join(f"{word}={degree}" for word, degree in named.items() if degree > 1)} zero=1"'


class OtherTargetError(ValueError):
    """A feature of a plan that this target's settings cannot express, but those of others can. `export` finds out which
    of them accept the plan.

    found: the feature, and why not. others: targets whose settings have it. instead: how to plan without it.
    """

    def __init__(self, found: str, others: tuple[Target, ...], instead: str) -> None:
        super().__init__(f"{found}; {instead}")
        self.found, self.others, self.instead = found, others, instead


def refuse_pipeline(plan: Plan, target: Target) -> None:
    """Raise ValueError for a plan with a pipeline, for targets without pipelines in their settings."""
    if plan.degrees.pipeline > 1:
        found = f"pipeline={plan.degrees.pipeline}: {NAMES[target]} has stages in code, not in its settings"
        raise OtherTargetError(found, ("megatron", "torchtitan"), "plan with --pin pipeline=1")


def row_of(plan: Plan, target: Target) -> BlockRow:
    """The plan's row of blocks. Raises ValueError if the model is not made of one."""
    row = block_row(plan.layers)
    if row is None:
        found = f"{plan.model.name} is no single row of numbered blocks, which is what {NAMES[target]} builds"
        raise OtherTargetError(found, ("torchtitan", "accelerate"), "plan --for torchtitan or accelerate")
    return row


def blocks_by_stage(plan: Plan, row: BlockRow, target: Target) -> tuple[int, ...]:
    """Number of blocks on each stage. Raises ValueError if layers before the blocks are not on the first stage, or
    layers after them not on the last."""
    counts, place = [], 0
    for index, stage in enumerate(plan.stages):
        places = range(place, place + len(stage.layers))
        counts.append(sum(row.holds(p) for p in places))
        for p, layer in zip(places, stage.layers, strict=True):
            outside = p < row.before and index > 0
            if outside or (p >= row.before + row.blocks and index < len(plan.stages) - 1):
                raise ValueError(
                    f"{layer.name} is on stage {index}: {NAMES[target]} keeps what comes before the blocks on the "
                    "first stage, and what comes after them on the last; plan with fewer stages, for example "
                    f"--pin pipeline={max(1, plan.degrees.pipeline // 2)}"
                )
        place += len(stage.layers)
    return tuple(counts)


def recomputed_blocks(
    plan: Plan, row: BlockRow, target: Target, notes: list[str]
) -> tuple[Recompute, tuple[int, ...], tuple[int, ...]]:
    """(kind of recompute, number of blocks on each stage that recompute, number of blocks on each stage). If blocks
    recompute in several ways the kind is "full", which holds least, and a note says so. Notes also name other layers
    that recompute."""
    counts, sizes, others, place = [], [], [], 0
    ways: Counter[Recompute] = Counter()
    for stage in plan.stages:
        places = range(place, place + len(stage.layers))
        blocks = [layer for p, layer in zip(places, stage.layers, strict=True) if row.holds(p)]
        others += [x.name for x in stage.layers if x.recompute != "none" and x not in blocks]
        ways += Counter(layer.recompute for layer in blocks if layer.recompute != "none")
        counts.append(sum(layer.recompute != "none" for layer in blocks))
        sizes.append(len(blocks))
        place += len(stage.layers)
    if len(ways) > 1:
        names = {kind: parts_in_words(kind) or kind for kind in ways}
        partly = ", ".join(f"{names[kind]} recompute of {ways[kind]} blocks" for kind in sorted(ways) if kind != "full")
        notes.append(f"{partly} becomes full: {NAMES[target]} takes one way for all; less memory, more time")
    if others:
        notes.append(f"recompute of {', '.join(others)} is left out: {NAMES[target]} recomputes blocks only")
    kind: Recompute = "full" if len(ways) > 1 else next(iter(ways), "none")
    return kind, tuple(counts), tuple(sizes)


def kept_note(plan: Plan, target: Target) -> list[str]:
    """A note that some layers keep their parameters gathered, for targets in which all layers give them back; empty if
    none does."""
    kept = sum(not layer.reshard for layer in plan.layers if layer.parameters)
    return [
        f"{kept} of {len(plan.layers)} layers keep their parameters gathered in the plan; {NAMES[target]} gives "
        "all back: less memory, more time"
    ] * (kept > 0 and plan.zero_stage == 3)


def sync_note(plan: Plan, target: Target) -> list[str]:
    """A note that gradients are reduced once a step, for targets that reduce them after every micro-batch; empty if
    they are not."""
    return [
        f"the plan reduces gradients once, after {plan.num_microbatches} micro-batches; {NAMES[target]} does after "
        "each: less memory, more time"
    ] * (plan.gradient_sync == "last" and plan.num_microbatches > 1 and plan.degrees.sharded_over > 1)


def ordered(plan: Plan, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Those of the axes whose degree is above 1, in the same order."""
    return tuple(axis for axis in axes if plan.degrees.of(axis) > 1)


def order_note(plan: Plan, target: Target) -> str:
    """A note that the plan arranges ranks in another order than the target."""
    return (
        f"the plan orders ranks {' > '.join(ordered(plan, plan.mesh_axes))}, outermost first; {NAMES[target]} orders "
        f"them {' > '.join(ordered(plan, AXES))}: other links carry the traffic"
    )


def whole_layers_notes(plan: Plan) -> list[str]:
    """Notes on layers, or parts of them, that stay whole in the plan though the target may cut them."""
    if plan.degrees.tensor == 1:
        return []
    cut = {c.name for c in plan.classes if c.cuts}
    whole = [layer.name for layer in plan.layers if layer.parameters and layer.layer_class not in cut]
    some = ", ".join(whole) if len(whole) <= _MANY else f"{', '.join(whole[:_MANY])} and {len(whole) - _MANY} more"
    notes = [
        f"{some} stay whole in the plan, on each of {plan.degrees.tensor} tensor ranks; the target may cut them: less "
        "memory"
    ] * bool(whole)
    return notes + _whole_attention(plan) + _whole_feed_forward(plan)


_MANY = 6
"""Most layers that a note names; the others are only counted."""


def _whole_attention(plan: Plan) -> list[str]:
    """A note on attention that stays whole in layers whose other modules are cut; empty if there is none."""
    roots = _roots_without(plan, "attention")
    count = sum(any(name.startswith(f"{root}.") for name in plan.model.attention_modules) for root in roots)
    return [
        f"the attention of {count} layers stays whole in the plan, on each of {plan.degrees.tensor} tensor ranks; the "
        "target cuts it, or refuses where its heads do not divide: other times and memory than the plan's"
    ] * bool(count)


def _whole_feed_forward(plan: Plan) -> list[str]:
    """A note on feed-forwards that stay whole in layers whose attention is cut; empty if there are none. Other notes
    cover experts."""
    roots = _roots_without(plan, "mlp")
    count = sum(not any(name.startswith(f"{root}.") for name in plan.model.expert_modules) for root in roots)
    return [
        f"of {count} layers only the attention is cut in the plan; the target cuts the feed-forward, too: less memory, "
        "other times"
    ] * bool(count)


def _roots_without(plan: Plan, kind: Literal["attention", "mlp"]) -> list[str]:
    """Module names of the layers that have cuts of attention or feed-forward, but none of this kind."""
    inner = {c.name: {cut.kind for cut in c.cuts} & {"attention", "mlp"} for c in plan.classes}
    others = {name for name, kinds in inner.items() if kinds and kind not in kinds}
    return [layer.root for layer in plan.layers if layer.layer_class in others and layer.root]
