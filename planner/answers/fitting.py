"""What fits: the plan that needs least memory, how full the state alone makes all devices, and how many would do."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...profiler.machine.cluster import ClusterSpec, cluster_of
from ..cost.estimate import Estimate, estimate, memory_by
from ..cost.memory_cost import state_bytes
from ..cost.stage_cost import budget_bytes
from ..cost.stage_models import stage_models
from ..plan.document import Plan
from ..plan.making import make_plan
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, is_chunked, rank_and_chunk
from ..plan.shape import LayerOption, Shape
from ..solve.explore import Explorer
from ..solve.nodes import Solved
from ..solve.scan import scan, simulated_s
from ..solve.space import Family, Space, Split
from .explain import rank_in_words

SEARCHED_S = 4.0
"""Seconds for the smallest number of GPUs, and for other ways out: each is looked for in the whole space."""

CLOSEST_S = 3.0
"""Seconds for the plan that is over by least."""

EACH_S = (1.0, 2.0)
"""Of these, each of them has so many: at least, when those of all are over; at most, so that one that stays open leaves
some for the others."""

MOST_GPUS = 64
"""How many times more GPUs are tried before giving up on the smallest number that would do."""

MOST_TRIED = 4
"""Numbers of GPUs that are tried one by one between one that is too small and one that does."""

LEAN_TRIED = 3
"""Of the shapes that hold least those that are cut as they must be, to see whether one fits: a few milliseconds each,
half a second where many kinds of layers take turns. (DeepSeek-V3 on 192 GPUs: the first does; a search took 3.6 s.)"""

LEAN_S = 1.0
"""Seconds for those of one number of GPUs: where they do not fit, it may take long to show that of all their cuts."""

PRECISE = 0.005
"""So near, in device memory, the plan that is over by least is looked for."""


@dataclass(frozen=True)
class Closest:
    """The plan that misses the budget by least, or by least of those that were looked at.

    of_all: whether it is that of the whole space. needed: nothing fits with fewer than so many times the memory.
    """

    plan: Plan
    estimate: Estimate
    of_all: bool = False
    needed: float = 1.0

    @property
    def stage(self) -> int:
        """The stage that is most over."""
        memory = self.estimate.memory
        return max(range(len(memory)), key=lambda stage: memory[stage].over_bytes)

    @property
    def over_bytes(self) -> float:
        """Bytes over the budget on that stage; not positive: it fits."""
        return self.estimate.memory[self.stage].over_bytes

    @property
    def where(self) -> str:
        """That stage, in words that say from where stages are counted."""
        last = len(self.estimate.memory) - 1
        return rank_in_words(self.plan, self.stage) + (f" (of 0 to {last})" if last else "")

    @property
    def more_memory(self) -> float:
        """With so many times the memory on every device it fits."""
        return max(memory.device_bytes / memory.budget_bytes for memory in self.estimate.memory)


def closest_plan(explorer: Explorer, pins: Pins) -> Closest | None:
    """Of the frugal shapes, everything recomputed that may be and holds less so, the plan that misses the budget by
    least; None if no shape is legal."""
    best = min(_leanest(explorer, pins), key=lambda one: one[0], default=None)
    if best is None:
        return None
    plan = make_plan(explorer.profile, explorer.cluster, explorer.training, *best[1:])
    return Closest(plan, estimate(plan, explorer.profile))


def _leanest(explorer: Explorer, pins: Pins) -> Iterator[tuple[float, Shape, list[list[LayerOption]]]]:
    """(bytes over the budget on the stage that is most over, shape, options by stage) of each of the frugal shapes."""
    for shape in frugal_shapes(explorer, pins):
        stages = even_stages(explorer, shape, pins)
        yield _over_bytes(explorer, shape, stages), shape, stages


def _over_bytes(explorer: Explorer, shape: Shape, stages: Sequence[Sequence[LayerOption]]) -> float:
    """Bytes over the budget on the stage that is most over."""
    return max(memory.over_bytes for memory in memory_by(explorer.model, shape, stages))


def closest_of_all(explorer: Explorer, pins: Pins, even: Closest, deadline: float) -> Closest:
    """The plan of the whole space, with uneven stages and chunked schedules, that needs least memory of its devices,
    to PRECISE: by halving between devices on which nothing fits and such on which something does.

    even: a plan that does not fit. deadline: time.monotonic() from which the closest so far does, and says so; so it
    does where layouts are left of which it is not known whether they fit.
    """
    closest, fails, does = even, max(1.0, filled_by_state(explorer, pins)), even.more_memory
    while does > fails * (1 + PRECISE):
        middle = math.sqrt(fails * does)
        roomier = Explorer(
            explorer.profile, _with_memory(explorer.cluster, middle), explorer.training, explorer.framework
        )
        found = roomier.explore(pins, deadline, near=0, any_will_do=True)
        if found.best is not None:
            plan = explorer.plan_of(found.best)
            closest = Closest(plan, estimate(plan, explorer.profile))
            does = min(middle, closest.more_memory)
        elif found.nothing_fits:
            fails = middle
        else:
            return replace(closest, needed=fails)
    return replace(closest, of_all=True, needed=fails)


def filled_by_state(explorer: Explorer, pins: Pins) -> float:
    """How full parameters, gradients and optimizer state make all devices together at least: from 1 on, nothing
    fits."""
    needed, room = state_and_room(explorer, pins)
    return needed / room


def state_and_room(explorer: Explorer, pins: Pins) -> tuple[float, float]:
    """(bytes of parameters, gradients and optimizer state at least, whatever the layout, each element being on one of
    the devices, bytes that all devices together may use)."""
    cluster, training = explorer.cluster, explorer.training
    shapes = (Shape(1, 2, 1, 1, 1, 1, reshard=each, offload_optimizer=pins.offload_optimizer) for each in (False, True))
    states = [state_bytes(shape, training) for shape in shapes]
    least = min(2 * (state.sharded_parameters + state.sharded_gradients + state.optimizer) for state in states)
    room = sum(group.count * group.devices_per_host * budget_bytes(group.device, training) for group in cluster.hosts)
    return explorer.profile.num_trainable * least, room


def _with_memory(cluster: ClusterSpec, times: float) -> ClusterSpec:
    """The cluster with so many times the memory on every device."""
    hosts = tuple(
        group.model_copy(update={"device": group.device.model_copy(update={"memory": times * group.device.memory})})
        for group in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts})


def frugal_shapes(explorer: Explorer, pins: Pins) -> Iterator[Shape]:
    """Per choice of tensor, context and pipeline degree: sequence parallelism, the most expert ranks, the smallest
    micro-batch (or all samples at once, where shards would have to keep whole gradients) and the widest sharding."""
    return (shape for _, shape in _frugal(explorer, pins))


def _frugal(explorer: Explorer, pins: Pins) -> Iterator[tuple[Family, Shape]]:
    """These shapes, each with its family."""
    space = Space(explorer.profile, explorer.cluster, explorer.training, pins, anywhere=True)
    may_be_whole = pins.allows("schedule", "1f1b") and pins.allows("virtual_stages", 1)
    splits: dict[tuple[int, int, int], Split] = {}
    for split in space.splits():
        key = split.tensor, split.context, split.pipeline
        splits[key] = min(splits.get(key, split), split, key=lambda each: (not each.sequence, -each.expert))
    for split in splits.values():
        frugal: dict[int, Family] = {}
        at_once: dict[int, Family] = {}
        for family in space.families_of(split):
            if may_be_whole and is_chunked(family.schedule):
                continue  # 1F1B holds no more
            best = frugal.setdefault(family.virtual_stages, family)
            frugal[family.virtual_stages] = min(best, family, key=lambda f: (f.micro_batch, f.schedule == "gpipe"))
            if family.num_microbatches == 1:
                at_once.setdefault(family.virtual_stages, family)
        for chunks, family in frugal.items():
            shape = _widest(space, family)
            yield family, shape
            whole = shape.sharded_over > 1 and shape.gradient_sync == "last" and shape.num_microbatches > 1
            if whole and chunks in at_once:  # or gradients stay whole from one micro-batch to the next
                yield at_once[chunks], _widest(space, at_once[chunks])


def _widest(space: Space, family: Family) -> Shape:
    """The family's shape whose state is sharded most."""
    return max(space.shapes(family), key=lambda s: (s.data_shard, s.gradient_sync == "every", s.reshard))


def even_stages(explorer: Explorer, shape: Shape, pins: Pins) -> list[list[LayerOption]]:
    """Layers by the memory of the stages' devices, as many on each where they are equal, at the options that hold
    least."""
    model, kinds = explorer.model, explorer.model.kinds
    frugal = {}
    recompute = "none" if shape.schedule in ZERO_BUBBLE else pins.recompute
    for kind in dict.fromkeys(kinds):
        options = model.options(kind, shape, recompute, pins.reshard, pins.offered - {"offload"})
        frugal[kind] = min(options, key=lambda o: _held(explorer, kind, shape, o))
    num_layers, stages, first = len(kinds), [], 0
    num_stages = shape.pipeline * shape.virtual_stages
    devices = [each.device for each in stage_models(model, shape)]
    places = (rank_and_chunk(shape.schedule, stage, shape.pipeline)[0] for stage in range(num_stages))
    rooms = [max(1, int(budget_bytes(devices[place], model.training))) for place in places]
    for stage in range(num_stages):
        last = min(sum(rooms[: stage + 1]) * num_layers // sum(rooms), num_layers - num_stages + stage + 1)
        last = max(last, first + 1)
        stages.append([frugal[kind] for kind in kinds[first:last]])
        first = last
    return stages


def _held(explorer: Explorer, kind: object, shape: Shape, option: LayerOption) -> float:
    cost = explorer.model.cost(kind, shape, option)  # type: ignore[arg-type]
    return shape.in_flight(0) * cost.kept_bytes + cost.held_bytes


def fits(explorer: Explorer, pins: Pins, deadline: float = 0.0) -> bool | None:
    """Whether a plan fits: there is room for the state, and one of the leanest does, or any of the space that is found
    until the deadline, as far as `EACH_S` allows; None where that leaves it open."""
    if filled_by_state(explorer, pins) >= 1:
        return False
    if leanest_fits(explorer, pins):
        return True
    least_s, most_s = (time.monotonic() + seconds for seconds in EACH_S)
    found = explorer.explore(pins, min(most_s, max(least_s, deadline)), near=0, any_will_do=True)
    if found.best is not None:
        return True
    return False if found.nothing_fits else None


def leanest_fits(explorer: Explorer, pins: Pins) -> bool:
    """Whether one of the leanest shapes fits, cut evenly or as it must be; where none does, another shape may."""
    if filled_by_state(explorer, pins) >= 1:
        return False
    lean: list[tuple[float, Shape]] = []
    for over, shape in _lean(explorer, pins):
        if over <= 0:
            return True
        lean.append((over, shape))
    with explorer.until(time.monotonic() + LEAN_S):
        return _first_solved(explorer, pins, lean) is not None


def lean_plan(explorer: Explorer, pins: Pins) -> Solved | None:
    """One of the leanest shapes at its best, if one fits: a plan where no time is left to look for a faster one."""
    return _first_solved(explorer, pins, list(_lean(explorer, pins)))


def _lean(explorer: Explorer, pins: Pins) -> Iterator[tuple[float, Shape]]:
    """(bytes over the budget with even stages, shape) of each of the frugal shapes that may fit."""
    for family, shape in _frugal(explorer, pins):
        if explorer.kinds is not None or explorer.bounds.least_of_family(family) is not None:
            yield _over_bytes(explorer, shape, even_stages(explorer, shape, pins)), shape


def _first_solved(explorer: Explorer, pins: Pins, lean: Sequence[tuple[float, Shape]]) -> Solved | None:
    """The first of the leanest of these shapes that fits when it is cut as it must be."""
    few = sorted(lean, key=lambda each: each[0])[:LEAN_TRIED]
    return next(filter(None, (solved(explorer, shape, pins) for _, shape in few)), None)


def solved(explorer: Explorer, shape: Shape, pins: Pins) -> Solved | None:
    """The best assignment of a shape, if it fits; of none whose ranks hold several stages or split their backward."""
    if is_chunked(shape.schedule):
        return None
    prices = explorer.priced(shape, pins.recompute, pins.reshard, pins.offered)
    found = scan(prices)
    return None if found is None else Solved(shape, prices, found, simulated_s(prices, found))


@dataclass(frozen=True)
class Fewest:
    """The least number of GPUs that was found to do, if one was; shown: whether no smaller one does."""

    count: int | None
    shown: bool


def fewest(counts: Sequence[int], does: Callable[[int], bool | None]) -> Fewest:
    """The first count that does: of the first, and of powers of two in their order; then by halving what lies between
    the last two, at the count that two divides most often, until that is short, then one by one. Counts below the last
    power of two that does not do are left out where they are many. does: None where it is not known."""
    answers: dict[int, bool | None] = {}

    def asked(count: int) -> bool:
        answers[count] = does(count)
        return bool(answers[count])

    failed, place = -1, None
    for i, count in enumerate(counts):
        if i in (0, len(counts) - 1) or count & (count - 1) == 0:
            if asked(count):
                place = i
                break
            failed = i
    if place is None:
        return Fewest(None, False)
    while place - failed - 1 > MOST_TRIED:
        middle = max(range(failed + 1, place), key=lambda i: counts[i] & -counts[i])
        if asked(counts[middle]):
            place = middle
        else:
            failed = middle
    left = [i for i in range(place) if counts[i] not in answers]
    if len(left) > MOST_TRIED:
        left = [i for i in left if i > failed]
    place = next((i for i in left if asked(counts[i])), place)
    return Fewest(counts[place], all(answers.get(count) is False for count in counts[:place]))


def with_any_degrees(pins: Pins) -> Pins:
    """The pins without those of degrees, which another number of GPUs may not go with."""
    return replace(pins, data_replicate=None, data_shard=None, pipeline=None, tensor=None, context=None, expert=None)


def smallest_cluster(explorer: Explorer, pins: Pins, deadline: float) -> Fewest:
    """The smallest number of GPUs of this kind that would do with these pins, spread evenly, over full hosts where the
    user said how many GPUs these have, by a search of the whole space for each until the deadline; none if not even 64
    times as many do."""
    cluster = explorer.cluster
    per_host, here = _full_host(cluster), cluster.num_devices

    def with_gpus(count: int) -> Explorer:
        return Explorer(explorer.profile, grown(cluster, count), explorer.training, explorer.framework)

    def would_do(count: int) -> bool | None:
        return fits(with_gpus(count), pins, deadline)

    most = MOST_GPUS * max(1, here // per_host) * per_host
    whole = math.lcm(_pinned_ways(pins), per_host if cluster.full_hosts else 1)
    counts = [count for count in spread_evenly(cluster, most) if count > here and count % whole == 0]
    if not counts:
        return Fewest(None, False)
    needed = counts[0] * filled_by_state(with_gpus(counts[0]), pins)  # of this kind, whatever else is in the cluster
    return fewest([count for count in counts if count > needed] or counts[-1:], would_do)


def _pinned_ways(pins: Pins) -> int:
    """What the number of GPUs is a multiple of: the product of the degrees that are pinned."""
    degrees = pins.data_replicate, pins.data_shard, pins.tensor, pins.context, pins.pipeline
    return math.prod(degree or 1 for degree in degrees)


def spread_evenly(cluster: ClusterSpec, most: int) -> list[int]:
    """Numbers of devices up to `most`, ascending, of which as few hosts as hold them have as many each."""
    per_host = _full_host(cluster)
    return [count for count in range(1, most + 1) if count % -(-count // per_host) == 0]


def _full_host(cluster: ClusterSpec) -> int:
    """Devices of a host: a cluster that is part of one can grow to all of it, unless the user said how many it has."""
    here = cluster.devices_per_host
    part = cluster.num_hosts == 1 and not cluster.full_hosts
    return max(here, cluster.device.devices_per_host) if part else here


def grown(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """A cluster of `count` of the same devices on the same kind of host, as full as lets all have as many."""
    per_host = max(size for size in range(1, min(count, _full_host(cluster)) + 1) if count % size == 0)
    grown = cluster_of(cluster.device, count, per_host)
    hosts = tuple(group.model_copy(update={"link": cluster.link}) for group in grown.hosts)
    more = {"hosts": hosts, "network": cluster.between_hosts, "full_hosts": cluster.full_hosts}
    return grown.model_copy(update=more)
