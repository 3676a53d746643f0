"""What fits: the plan that needs least memory, how full parameters, gradients and optimizer state alone make all
devices, and how many devices would do."""

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
"""Seconds to look for the smallest number of GPUs, and again for other ways out; each searches the whole space."""

CLOSEST_S = 3.0
"""Seconds to look for the plan that exceeds the budget by least."""

EACH_S = (1.0, 2.0)
"""(least, most) seconds for one number of GPUs: at least the first even if the time for all is over; at most the
second, so that one which stays open leaves time for others."""

MOST_GPUS = 64
"""Multiple of the GPUs up to which larger numbers are tried."""

MOST_TRIED = 4
"""Most numbers of GPUs that are tried one by one, between one that is too small and one that does."""

LEAN_TRIED = 3
"""Number of the shapes that hold least whose best cuts are looked for, to see whether one fits. Each takes a few
milliseconds, or half a second if many kinds of layers take turns. (DeepSeek-V3 on 192 GPUs: the first one fits; a
search took 3.6 s.)"""

LEAN_S = 1.0
"""Most seconds for those shapes with one number of GPUs: if none fits, it may take long to show that for all their
cuts."""

PRECISE = 0.005
"""Relative precision, in device memory, to which the plan that exceeds the budget by least is looked for."""


@dataclass(frozen=True)
class Closest:
    """The plan that exceeds the budget by least, among those that were looked at.

    of_all: whether no plan in the whole space exceeds it by less. needed: nothing fits on devices with less than so
    many times the memory.
    """

    plan: Plan
    estimate: Estimate
    of_all: bool = False
    needed: float = 1.0

    @property
    def stage(self) -> int:
        """Number of the stage that exceeds its budget most."""
        memory = self.estimate.memory
        return max(range(len(memory)), key=lambda stage: memory[stage].over_bytes)

    @property
    def over_bytes(self) -> float:
        """Bytes by which that stage exceeds its budget; 0 or negative if the plan fits."""
        return self.estimate.memory[self.stage].over_bytes

    @property
    def where(self) -> str:
        """That stage, in words that also say how stages are numbered."""
        last = len(self.estimate.memory) - 1
        return rank_in_words(self.plan, self.stage) + (f" (of 0 to {last})" if last else "")

    @property
    def more_memory(self) -> float:
        """Factor on the memory of every device with which the plan fits."""
        return max(memory.device_bytes / memory.budget_bytes for memory in self.estimate.memory)


def closest_plan(explorer: Explorer, pins: Pins) -> Closest | None:
    """The plan that exceeds the budget by least among the frugal shapes, with even stages and every layer at the option
    that holds least; None if no shape is legal."""
    best = min(_leanest(explorer, pins), key=lambda one: one[0], default=None)
    if best is None:
        return None
    plan = make_plan(explorer.profile, explorer.cluster, explorer.training, *best[1:])
    return Closest(plan, estimate(plan, explorer.profile))


def _leanest(explorer: Explorer, pins: Pins) -> Iterator[tuple[float, Shape, list[list[LayerOption]]]]:
    """For each of the frugal shapes: (bytes over the budget on the stage that exceeds it most, shape, options by
    stage)."""
    for shape in frugal_shapes(explorer, pins):
        stages = even_stages(explorer, shape, pins)
        yield _over_bytes(explorer, shape, stages), shape, stages


def _over_bytes(explorer: Explorer, shape: Shape, stages: Sequence[Sequence[LayerOption]]) -> float:
    """Bytes by which the stage that exceeds its budget most does so."""
    return max(memory.over_bytes for memory in memory_by(explorer.model, shape, stages))


def closest_of_all(explorer: Explorer, pins: Pins, even: Closest, deadline: float) -> Closest:
    """The plan in the whole space, uneven stages and chunked schedules included, that needs least memory on its
    devices, to the precision PRECISE. The memory of devices is bisected between a size with which nothing fits and one
    with which something does.

    even: a plan that does not fit, to begin with. deadline: time.monotonic() at which the search ends with the closest
    plan so far. It also ends so if it stays open whether some layouts fit. In both cases `of_all` is False.
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
    """Lower bound on the share of all devices' budgets that parameters, gradients and optimizer state fill; from 1 on,
    nothing fits."""
    needed, room = state_and_room(explorer, pins)
    return needed / room


def state_and_room(explorer: Explorer, pins: Pins) -> tuple[float, float]:
    """(lower bound on the bytes of parameters, gradients and optimizer state under any layout, since each element is on
    at least one device; bytes that plans may use on all devices together)."""
    cluster, training = explorer.cluster, explorer.training
    shapes = (Shape(1, 2, 1, 1, 1, 1, reshard=each, offload_optimizer=pins.offload_optimizer) for each in (False, True))
    states = [state_bytes(shape, training) for shape in shapes]
    least = min(2 * (state.sharded_parameters + state.sharded_gradients + state.optimizer) for state in states)
    room = sum(group.count * group.devices_per_host * budget_bytes(group.device, training) for group in cluster.hosts)
    return explorer.profile.num_trainable * least, room


def _with_memory(cluster: ClusterSpec, times: float) -> ClusterSpec:
    """The cluster with `times` times the memory on every device."""
    hosts = tuple(
        group.model_copy(update={"device": group.device.model_copy(update={"memory": times * group.device.memory})})
        for group in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts})


def frugal_shapes(explorer: Explorer, pins: Pins) -> Iterator[Shape]:
    """Shapes that hold little, for each choice of tensor, context and pipeline degree: with sequence parallelism, the
    most expert ranks, the smallest micro-batch, and the widest sharding. Also with all samples in one micro-batch, if
    shards would otherwise keep whole gradients between micro-batches."""
    return (shape for _, shape in _frugal(explorer, pins))


def _frugal(explorer: Explorer, pins: Pins) -> Iterator[tuple[Family, Shape]]:
    """The frugal shapes, each with its family."""
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
    """[stage][layer] -> options that hold least, with as many layers on each stage as its share of all stages' budgets:
    equally many if devices are equal."""
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
    """Whether any plan fits: there is room for the state, and one of the leanest shapes fits, or a plan that the search
    finds before the deadline (which `EACH_S` may move); None if that leaves it open."""
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
    """Whether one of the leanest shapes fits, with even cuts or with its best ones. If not, another shape may still
    fit."""
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
    """One of the leanest shapes at its best, if one fits: a plan for when no time is left to look for a faster one."""
    return _first_solved(explorer, pins, list(_lean(explorer, pins)))


def _lean(explorer: Explorer, pins: Pins) -> Iterator[tuple[float, Shape]]:
    """For each of the frugal shapes that may fit: (bytes over the budget with even stages, shape)."""
    for family, shape in _frugal(explorer, pins):
        if explorer.kinds is not None or explorer.bounds.least_of_family(family) is not None:
            yield _over_bytes(explorer, shape, even_stages(explorer, shape, pins)), shape


def _first_solved(explorer: Explorer, pins: Pins, lean: Sequence[tuple[float, Shape]]) -> Solved | None:
    """The first of the leanest of these shapes that fits with its best cuts; None if none does."""
    few = sorted(lean, key=lambda each: each[0])[:LEAN_TRIED]
    return next(filter(None, (solved(explorer, shape, pins) for _, shape in few)), None)


def solved(explorer: Explorer, shape: Shape, pins: Pins) -> Solved | None:
    """The best cuts and options of a shape; None if it does not fit, or if its ranks hold several stages or split their
    backward."""
    if is_chunked(shape.schedule):
        return None
    prices = explorer.priced(shape, pins.recompute, pins.reshard, pins.offered)
    found = scan(prices)
    return None if found is None else Solved(shape, prices, found, simulated_s(prices, found))


@dataclass(frozen=True)
class Fewest:
    """The smallest number of GPUs for which a plan was found, None if there is none. shown: whether it is shown that no
    smaller number does."""

    count: int | None
    shown: bool


def fewest(counts: Sequence[int], does: Callable[[int], bool | None]) -> Fewest:
    """The smallest of `counts` that was found to do. The first count, the powers of two and the last are tried in order
    until one does. Then what lies between it and the one before is bisected, at the count that is most often divisible
    by two, until few are left, which are tried one by one. Counts below the last power of two that does not do are only
    tried if they are few. does: whether a count does; None if that stays open."""
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
    """The pins without degrees, which may not go with another number of GPUs."""
    return replace(pins, data_replicate=None, data_shard=None, pipeline=None, tensor=None, context=None, expert=None)


def smallest_cluster(explorer: Explorer, pins: Pins, deadline: float) -> Fewest:
    """The smallest larger number of GPUs of this kind on which a plan with these pins fits, equally many on each host,
    and full hosts if the user said how many GPUs a host has. For each number the whole space is searched, until the
    deadline. None if not even MOST_GPUS times as many do."""
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
    """Product of the pinned degrees, of which the number of GPUs must be a multiple."""
    degrees = pins.data_replicate, pins.data_shard, pins.tensor, pins.context, pins.pipeline
    return math.prod(degree or 1 for degree in degrees)


def spread_evenly(cluster: ClusterSpec, most: int) -> list[int]:
    """Numbers of devices up to `most`, ascending, that can be spread evenly over the fewest hosts which hold them."""
    per_host = _full_host(cluster)
    return [count for count in range(1, most + 1) if count % -(-count // per_host) == 0]


def _full_host(cluster: ClusterSpec) -> int:
    """Number of devices of a full host. A cluster that is part of one host may grow to all of it, unless the user said
    how many devices a host has."""
    here = cluster.devices_per_host
    part = cluster.num_hosts == 1 and not cluster.full_hosts
    return max(here, cluster.device.devices_per_host) if part else here


def grown(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """A cluster of `count` devices of the same kind on hosts of the same kind, with equally many on each host, and as
    many as possible."""
    per_host = max(size for size in range(1, min(count, _full_host(cluster)) + 1) if count % size == 0)
    grown = cluster_of(cluster.device, count, per_host)
    hosts = tuple(group.model_copy(update={"link": cluster.link}) for group in grown.hosts)
    more = {"hosts": hosts, "network": cluster.between_hosts, "full_hosts": cluster.full_hosts}
    return grown.model_copy(update=more)
