"""The search against brute force: on random small problems every plan is priced, and nothing beats what is said.

    python -m benchmarks.planning_time.brute_force --instances 500 [--out FOLDER]

Brute force writes down shapes and cuts with loops of its own, and prices each plan with planner/cost/estimate.py: all
cuts, any layers recomputed in any way. It knows no bound, no column, no composition and none of the space's shortcuts
(GPipe where 1F1B does as well, orders of axes that place every group alike). Of the search it is asked whether its
bound is below the simulated step of every plan, and whether no plan is faster than what was found by more than the
stated gap. Beside it, of pipelines with one stage per rank, by their closed form: brute force, the scan of every shape
(exact dynamic programming), and one ILP over all shapes, by HiGHS and by CBC.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations, count, islice, pairwise, permutations, product
from pathlib import Path
from typing import get_args

from meshwright.planner.cost.chain import Chain
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import (
    AXES,
    EXECUTABLE_RECOMPUTES,
    Axis,
    ContextKind,
    Plan,
    Recompute,
    parts_of,
    recompute_of_parts,
)
from meshwright.planner.plan.legality import (
    can_recompute,
    context_rule,
    divisors,
    expert_rule,
    has_experts,
    sequence_rule,
    tensor_rule,
)
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.schedules import ZERO_BUBBLE, Schedule, is_chunked
from meshwright.planner.plan.shape import Cuts, LayerOption, Shape
from meshwright.planner.solve.columns import StagePrices
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.ilp import solve_master
from meshwright.planner.solve.scan import scan
from meshwright.planner.solve.space import MOST_CHUNKS, Space

from .instances import Instance, instance

EXACT = 1e-9
"""Relative difference between brute force, search and scan: rounding."""

OF_SOLVERS = 1e-5
"""Relative difference between brute force and an ILP that is solved to a gap of 1e-6."""

FEWEST_PLANS = 2
"""A question with fewer plans is no question."""


@dataclass(frozen=True)
class Agreement:
    """What one instance says; None: nothing fits. brute_force: the shortest simulated step of all plans; search, bound:
    of what was found, and what no plan is said to beat. unchunked, scan, highs, cbc: the least closed form without
    interleaved and zero-bubble pipelines, by each way."""

    seed: int
    plans: int
    label: str
    brute_force: float | None
    search: float | None
    bound: float
    unchunked: float | None
    scan: float | None
    highs: float | None
    cbc: float | None
    recomputes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the bound holds, nothing is faster by more than the stated gap, and all ways found the same."""
        if self.brute_force is None or self.search is None:
            honest = self.brute_force is self.search
        else:
            honest = self.bound <= self.brute_force * (1 + EXACT) and self.search >= self.brute_force * (1 - EXACT)
        exact = _same(self.scan, self.unchunked, EXACT)
        return honest and exact and all(_same(found, self.unchunked, OF_SOLVERS) for found in (self.highs, self.cbc))

    @property
    def gap(self) -> float:
        """How much faster an unknown plan may be at most, as the search says."""
        return 0.0 if self.search is None else 1 - min(self.bound, self.search) / self.search

    @property
    def slower(self) -> float:
        """By how much the plan found takes longer than the best there is."""
        return 0.0 if self.search is None or self.brute_force is None else self.search / self.brute_force - 1


def _same(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=tolerance)


def agreement(asked: Instance) -> Agreement:
    """The optimum of an instance by brute force and by all other ways."""
    best: tuple[float, Plan] | None = None
    unchunked: float | None = None
    count = 0
    for plan in every_plan(asked):
        count += 1
        found = estimate(plan, asked.profile)
        if not found.fits:
            continue
        if best is None or found.step_time_s < best[0]:
            best = found.step_time_s, plan
        if not is_chunked(plan.schedule) and (unchunked is None or found.closed_form_s < unchunked):
            unchunked = found.closed_form_s
    explorer = Explorer(asked.profile, asked.cluster, asked.training)
    outcome, once_s = explorer.explore(asked.pins, time.monotonic() + 600), explorer.model.software.step_s
    searched = outcome.best
    shapes = [shape for shape in _shapes_of_space(asked) if not is_chunked(shape.schedule)]
    layers = Chain(CostModel(asked.profile, asked.cluster, asked.training))

    def prices() -> list[StagePrices]:
        pins = asked.pins
        return [StagePrices(layers, shape, pins.recompute, pins.reshard, pins.offered) for shape in shapes]

    scanned = [found.seconds for found in map(scan, prices()) if found is not None]
    solved = [solve_master(prices(), solver=name) if shapes else None for name in ("HiGHS", "CBC")]
    highs, cbc = (None if found is None else found[0].objective for found in solved)
    return Agreement(
        seed=asked.seed,
        plans=count,
        label="nothing fits" if best is None else shape_of(best[1]).label,
        brute_force=None if best is None else best[0],
        search=None if searched is None else searched.seconds + once_s,
        bound=outcome.bound + once_s,
        unchunked=unchunked,
        scan=min(scanned, default=None),
        highs=highs,
        cbc=cbc,
        recomputes=() if best is None else _recomputes_of(best[1]),
    )


def _shapes_of_space(asked: Instance) -> Iterator[Shape]:
    space = Space(asked.profile, asked.cluster, asked.training, asked.pins, asked.choice.worth_trying)
    for family in list(space.families()):
        yield from space.shapes(family)


def _recomputes_of(plan: Plan) -> tuple[str, ...]:
    return tuple(sorted({layer.recompute for layer in plan.layers}))


def every_plan(asked: Instance) -> Iterator[Plan]:
    """Every plan that agrees with the pins."""
    for shape in every_shape(asked):
        for stages in every_assignment(asked, shape):
            yield make_plan(asked.profile, asked.cluster, asked.training, shape, stages)


def num_plans(asked: Instance, most: float = math.inf) -> int:
    """How many plans there are; counted no further than to more than `most`."""
    count = 0
    for shape in every_shape(asked):
        count += _num_assignments(asked, shape)
        if count > most:
            break
    return count


def every_shape(asked: Instance) -> Iterator[Shape]:
    """Every legal shape that agrees with the pins, by plain loops."""
    profile, cluster, training, pins = asked.profile, asked.cluster, asked.training, asked.pins
    num_devices = cluster.num_devices
    for tensor, pipeline, context in product(divisors(num_devices), repeat=3):
        data, rest = divmod(num_devices, tensor * pipeline * context)
        if rest or training.global_batch % data or pipeline > len(profile.layers) or tensor_rule(profile, tensor):
            continue
        cuts_of = cache(partial(_cut_choices, asked, tensor, data, context))
        for shard, micro_batch in product(divisors(data), divisors(training.global_batch // data)):
            count = training.global_batch // data // micro_batch
            sharded = shard * context > 1
            for (kind, sequence, expert), (schedule, virtual) in product(
                _tokens(asked, tensor, context, shard), _schedules(asked, pipeline, count)
            ):
                syncs = ("every", "last") if sharded and count > 1 else ("last",)
                reshards = (False, True) if sharded and pipeline > 1 else (False,)
                for sync, reshard in product(syncs, reshards):
                    if len(syncs) > 1 and pins.gradient_sync not in (None, sync):
                        continue
                    if len(reshards) > 1 and pins.reshard not in (None, reshard):
                        continue
                    shape = Shape(
                        data_replicate=data // shard,
                        data_shard=shard,
                        tensor=tensor,
                        pipeline=pipeline,
                        micro_batch=micro_batch,
                        num_microbatches=count,
                        sequence=sequence,
                        schedule=schedule,
                        virtual_stages=virtual,
                        gradient_sync=sync,  # type: ignore[arg-type]
                        reshard=reshard,
                        context=context,
                        context_kind=kind,
                        expert=expert,
                        offload_optimizer=pins.offload_optimizer,
                    )
                    if pins.allows_shape(shape):
                        choices = product(_orders(asked, shape), cuts_of(sequence))
                        yield from (replace(shape, mesh_axes=order, cuts=cuts) for order, cuts in choices)


def _tokens(asked: Instance, tensor: int, context: int, shard: int) -> Iterator[tuple[ContextKind, bool, int]]:
    """(kind of context parallelism, whether tensor ranks hold slices of the sequence, expert degree): how the tokens of
    a micro-batch are spread over the ranks that share it."""
    profile = asked.profile
    kinds: tuple[ContextKind, ...] = get_args(ContextKind) if context > 1 else ("ring",)
    for kind, sequence in product(kinds, (False, True)):
        if context_rule(profile, context, tensor, kind):
            continue
        if sequence and (tensor == 1 or sequence_rule(profile, tensor, context)):
            continue
        ranks = shard * context * (tensor if sequence else 1)
        experts = divisors(ranks) if has_experts(profile) else [1]
        yield from ((kind, sequence, expert) for expert in experts if expert_rule(profile, expert, sequence) is None)


def _cut_choices(asked: Instance, tensor: int, data: int, context: int, sequence: bool) -> list[Cuts | None]:
    """What tensor parallelism cuts: all that its degree divides, or what the integer program of tensor_choice.py (which
    has a brute force of its own in its tests) finds worth leaving whole for any micro-batch."""
    found: dict[Cuts | None, None] = {None: None}
    if tensor > 1:
        share = asked.training.global_batch // data
        for size in divisors(share):
            if asked.pins.allows("micro_batch", size):
                whole = Shape(1, data, tensor, 1, size, share // size, sequence, context=context)
                found |= dict.fromkeys(asked.choice.worth_trying(whole))
    return list(found)


def _schedules(asked: Instance, pipeline: int, count: int) -> Iterator[tuple[Schedule, int]]:
    """(schedule, stages of each rank) that `count` micro-batches can run through."""
    if pipeline == 1:
        yield "none", 1
        return
    yield "gpipe", 1
    most = len(asked.profile.layers) // pipeline
    if count >= pipeline:
        yield "1f1b", 1
    in_rounds = count % max(1, count // pipeline) == 0
    chunked: list[tuple[Schedule, int]] = [("zb-h1", 1), ("zb-h2", 1)]
    chunked += [("zb-v", 2)] * (most >= 2)
    chunked += [("interleaved", virtual) for virtual in range(2, min(most, MOST_CHUNKS) + 1) if in_rounds]
    for schedule, virtual in chunked:
        if schedule not in ZERO_BUBBLE or asked.pins.recompute in (None, "none"):
            yield schedule, virtual


def _orders(asked: Instance, shape: Shape) -> list[tuple[Axis, ...]]:
    """Orders of the mesh axes; one where all devices share a host."""
    active = [axis for axis in AXES if shape.degree(axis) > 1]
    if asked.cluster.num_hosts == 1:
        return [AXES]
    idle = tuple(axis for axis in AXES if axis not in active)
    orders = [idle + order for order in permutations(active)]
    if shape.context == 1:
        return orders
    if "data_shard" not in active:  # parameters are sharded over both, so they are neighbours
        orders = [_with_shards(order) for order in orders]
    return [order for order in orders if order.index("context") == order.index("data_shard") + 1]


def _with_shards(order: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The order with data_shard right before context."""
    others = tuple(axis for axis in order if axis != "data_shard")
    place = others.index("context")
    return (*others[:place], "data_shard", *others[place:])


def every_assignment(asked: Instance, shape: Shape) -> Iterator[list[list[LayerOption]]]:
    """All cuts of a shape with all options of every layer; with zero bubbles nothing is recomputed."""
    num_layers = len(asked.profile.layers)
    for cuts in combinations(range(1, num_layers), shape.pipeline * shape.virtual_stages - 1):
        bounds = (0, *cuts, num_layers)
        for choice in product(*_options(asked, shape)):
            yield [list(choice[a:b]) for a, b in pairwise(bounds)]


def _num_assignments(asked: Instance, shape: Shape) -> int:
    cuts = math.comb(len(asked.profile.layers) - 1, shape.pipeline * shape.virtual_stages - 1)
    return cuts * math.prod(len(options) for options in _options(asked, shape))


def _options(asked: Instance, shape: Shape) -> list[list[LayerOption]]:
    """[layer] -> recompute x whether parameters are given back x whether activations wait on the host."""
    reshards: tuple[bool, ...] = (shape.reshard,)
    if shape.sharded_over > 1 and shape.pipeline == 1:
        reshards = (False, True) if asked.pins.reshard is None else (asked.pins.reshard,)
    in_parts = shape.schedule in ZERO_BUBBLE
    ways = [("none",) for _ in asked.profile.layers] if in_parts else _recomputes(asked)
    may_leave = asked.pins.everything or asked.pins.offload_activations
    found = []
    for layer, each in zip(asked.profile.layers, ways, strict=True):
        aways = (False, True) if may_leave and not in_parts and can_recompute(asked.profile, layer) else (False,)
        options = [LayerOption(r, s, away) for r, s, away in product(each, reshards, aways)]
        found.append([o for o in options if not (o.offload and o.recompute in ("attention", "selective"))])
    return found


def _recomputes(asked: Instance) -> list[tuple[Recompute, ...]]:
    """[layer] -> what it may run again, as far as that makes a difference."""
    found: list[tuple[Recompute, ...]] = []
    for layer in asked.profile.layers:
        layer_class = asked.profile.classes[layer.layer_class]
        costs, pinned = layer_class.whole, asked.pins.recompute
        wanted = [r for r in EXECUTABLE_RECOMPUTES if r != "attention" or costs.attention != costs.saved]
        names = [part.name for part in layer_class.parts]
        if asked.pins.parts or asked.pins.everything:
            chosen = chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1))
            wanted += [recompute_of_parts(some) for some in chosen]
        if pinned is not None:
            there = [name for name in names if name in parts_of(pinned)]
            wanted = [recompute_of_parts(there) if parts_of(pinned) else pinned]
        found.append(tuple(wanted) if can_recompute(asked.profile, layer) else ("none",))
    return found


def instances(number: int, most_plans: int) -> Iterator[Instance]:
    """So many instances with no more plans than that."""
    drawn = map(instance, count())
    return islice((each for each in drawn if FEWEST_PLANS <= num_plans(each, most_plans) <= most_plans), number)


_USES = {
    "replicas": "DDP",
    "shards": "FSDP",
    "replicas of shards": "HSDP",
    "tensor": "TP",
    "sequence": "sequence parallel",
    "context": "CP",
    "expert": "EP",
    "pipeline": "PP",
    "GPipe": "GPipe",
    "1F1B": "(1F1B",
    "interleaved": "interleaved",
    "zero-bubble": "ZB",
    "nothing fits": "nothing fits",
}
"""What an optimum uses -> the words of its label that say so."""


def summary(found: list[Agreement], most_plans: int, seconds: float) -> str:
    """The result in Markdown."""
    wrong = [each for each in found if not each.agrees]
    uses = Counter(name for each in found for name, words in _USES.items() if words in each.label)
    kinds = [{"parts" if parts_of(kind) else kind for kind in each.recomputes} - {"none"} for each in found]
    uses.update(f"recompute {kind}" for each in kinds for kind in each)
    rows = "\n".join(f"| {name} | {count} |" for name, count in uses.most_common())
    told = "the bound held and all ways agree in every one" if not wrong else f"WRONG in {[w.seed for w in wrong]}"
    gaps = sorted(each.gap for each in found)
    best = sum(each.slower <= 1e-3 for each in found)
    return (
        "# The search against brute force\n\n"
        f"`python -m benchmarks.planning_time.brute_force --instances {len(found)} --most-plans {most_plans}`\n\n"
        f"{len(found)} random instances, {sum(each.plans for each in found):,} plans priced one by one in "
        f"{seconds:.0f} CPU s: {told}.\n"
        f"Within 0.1% of the best of all plans: {best} of {len(found)}, the worst {max(e.slower for e in found):.1%} "
        f"above it. The stated gap: {gaps[len(gaps) // 2]:.2%} in the median, {gaps[-len(gaps) // 20]:.1%} at the 95th "
        f"percentile, {gaps[-1]:.1%} at worst; at most 0.1% (`optimal`) in {sum(gap <= 1e-3 for gap in gaps)}.\n"
        "Ways beside the search, by closed form: brute force, scan (dynamic programming), one ILP over all shapes by "
        "HiGHS, the same by CBC.\n\n"
        f"| the optimum uses | instances |\n|---|---|\n{rows}\n"
    )


def main() -> int:
    """Exit code 0 if the bound holds and all ways agree in every instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--most-plans", type=int, default=3000, help="of one instance")
    parser.add_argument("--out", type=Path, help="folder for brute_force.md")
    arguments = parser.parse_args()
    start, found = time.process_time(), []
    for asked in instances(arguments.instances, arguments.most_plans):
        found.append(agreement(asked))
        if not found[-1].agrees:
            print(found[-1], file=sys.stderr, flush=True)
    text = summary(found, arguments.most_plans, time.process_time() - start)
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "brute_force.md").write_text(text)
    return int(not all(each.agrees for each in found))


if __name__ == "__main__":
    sys.exit(main())
