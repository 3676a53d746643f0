"""When nothing fits: what is over, by how much, on which stage; how many GPUs would do; the cheapest change."""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...profiler.machine.cluster import ClusterSpec, cluster_of, device_names, load_device
from ...profiler.machine.units import format_bytes, format_seconds
from ..cost.estimate import Estimate, estimate, memory_by
from ..cost.memory_cost import state_bytes
from ..cost.stage_cost import budget_bytes
from ..cost.stage_models import stage_models
from ..plan.document import Plan, parts_of
from ..plan.legality import divisors
from ..plan.making import make_plan
from ..plan.pin_texts import in_words
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, is_chunked, rank_and_chunk
from ..plan.shape import LayerOption, Shape
from ..solve.explore import Explorer
from ..solve.nodes import Solved
from ..solve.scan import scan, simulated_s
from ..solve.space import Family, Space
from .blame import blamed
from .explain import does_not_fit
from .verdict import LATE, Verdict, not_legal

MOST_GPUS = 64
"""How many times more GPUs are tried before giving up on the smallest number that would do."""

MOST_TRIED = 24
"""Numbers of GPUs that are tried one by one between one that is too small and one that does."""

OFFLOADED_TRIED = 3
"""Shapes with the optimizer on the host whose stages are chosen at their best, the fastest even ones."""


class InfeasibleError(RuntimeError):
    """No legal plan fits. The message says what is over, by how much, on which stage, and the ways out."""

    def __init__(
        self,
        message: str,
        *,
        label: str = "",
        stage: int = 0,
        over_bytes: float = 0.0,
        items: dict[str, float] | None = None,
        smallest_gpus: int | None = None,
        changes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.label = label
        self.stage = stage
        self.over_bytes = over_bytes
        self.items = items or {}
        self.smallest_gpus = smallest_gpus
        self.changes = changes


SEARCHED_S = 10.0
"""Seconds for the plan that is over by least, for the smallest cluster, and for other ways out: each is looked for in
the whole space."""

EACH_S = 2.0
"""Seconds that each number of GPUs gets at least, whatever the others took."""

PRECISE = 0.005
"""So near, in device memory, the plan that is over by least is looked for."""


@dataclass(frozen=True)
class Closest:
    """The plan that misses the budget by least, or by least of those that were found in time."""

    plan: Plan
    estimate: Estimate
    in_time: bool = True

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
        word = "stage" if self.plan.degrees.virtual_stages == 1 else "pipeline rank"
        return f"{word} {self.stage} (of 0 to {last})" if last else "every GPU"

    @property
    def more_memory(self) -> float:
        """With so many times the memory on every device it fits."""
        return max(memory.device_bytes / memory.budget_bytes for memory in self.estimate.memory)


def closest_plan(explorer: Explorer, pins: Pins) -> Closest | None:
    """Of the legal shapes with the smallest micro-batch, everything recomputed and sharded that may be, the plan that
    misses the budget by least; None if no shape is legal."""
    best = min(_leanest(explorer, pins), key=lambda one: one[0], default=None)
    return None if best is None else Closest(best[1], estimate(best[1], explorer.profile))


def _leanest(explorer: Explorer, pins: Pins) -> Iterator[tuple[float, Plan]]:
    """(bytes over the budget on the stage that is most over, plan) of each of the frugal shapes."""
    for shape in _frugal_shapes(explorer, pins):
        stages = _even_stages(explorer, shape, pins)
        plan = make_plan(explorer.profile, explorer.cluster, explorer.training, shape, stages)
        yield max(memory.over_bytes for memory in memory_by(explorer.model, plan)), plan


def closest_of_all(explorer: Explorer, pins: Pins, even: Closest, deadline: float) -> Closest:
    """The plan of the whole space, with uneven stages and chunked schedules, that needs least memory of its devices,
    to PRECISE: by halving between devices on which nothing fits and such on which something does.

    even: a plan that does not fit. deadline: time.monotonic() from which the closest so far does, and says so.
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
        elif found.complete:
            fails = middle
        else:
            return replace(closest, in_time=False)
    return closest


def filled_by_state(explorer: Explorer, pins: Pins) -> float:
    """How full parameters, gradients and optimizer state make all devices together at least, each element being on one
    of them, whatever the layout: from 1 on, nothing fits."""
    cluster, training = explorer.cluster, explorer.training
    shapes = (Shape(1, 2, 1, 1, 1, 1, reshard=each, offload_optimizer=pins.offload_optimizer) for each in (False, True))
    states = [state_bytes(shape, training) for shape in shapes]
    least = min(2 * (state.sharded_parameters + state.sharded_gradients + state.optimizer) for state in states)
    room = sum(group.count * group.devices_per_host * budget_bytes(group.device, training) for group in cluster.hosts)
    return explorer.profile.num_trainable * least / room


def _with_memory(cluster: ClusterSpec, times: float) -> ClusterSpec:
    """The cluster with so many times the memory on every device."""
    hosts = tuple(
        group.model_copy(update={"device": group.device.model_copy(update={"memory": times * group.device.memory})})
        for group in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts})


def _frugal_shapes(explorer: Explorer, pins: Pins) -> Iterator[Shape]:
    """Per choice of tensor, context and pipeline degree: sequence parallelism, the most expert ranks, the smallest
    micro-batch and the widest sharding."""
    space = Space(explorer.profile, explorer.cluster, explorer.training, pins)
    frugal: dict[object, Family] = {}
    for family in space.families():
        if pins.schedule is None and is_chunked(family.schedule):
            continue  # 1F1B holds no more
        key = family.tensor, family.context, family.pipeline, family.virtual_stages
        best = frugal.setdefault(key, family)
        if _frugal_first(family) < _frugal_first(best):
            frugal[key] = family
    for family in frugal.values():
        yield max(space.shapes(family), key=lambda s: (s.data_shard, s.gradient_sync == "every", s.reshard))


def _frugal_first(family: Family) -> tuple[bool, int, int, bool]:
    """What holds less of families of the same degrees comes first."""
    return not family.sequence, -family.expert, family.micro_batch, family.schedule == "gpipe"


def _even_stages(explorer: Explorer, shape: Shape, pins: Pins) -> list[list[LayerOption]]:
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


def closest_verdict(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> Verdict:
    """Why a pinned set-up has no plan: the rule that excludes it, or what is over its budget."""
    closest = closest_plan(explorer, pins)
    if closest is None:
        space = Space(explorer.profile, explorer.cluster, explorer.training, pins)
        for _ in space.families():
            pass
        rules = {rule: count for rule, count in (rejected or space.rejected).items() if count}
        degrees = f"no layout of {explorer.cluster.num_devices} GPUs has these degrees"
        return not_legal(max(rules, key=lambda rule: rules[rule], default=degrees))
    return does_not_fit(closest.estimate) if closest.over_bytes > 0 else LATE


def _nothing_legal(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> str:
    """Why not even one shape is legal, and the way out."""
    count, batch = explorer.cluster.num_devices, explorer.training.global_batch
    found = blamed(explorer.profile, explorer.cluster, explorer.training, pins)
    if found is not None:
        which = f"no layout of {count} GPUs is legal with {' and '.join(found.pins)}: {found.rule}"
        return f"{which}; leave out {'one of the pins' if len(in_words(pins)) > 1 else 'the pin'}"
    told = [rule for rule in rejected if rule.startswith("micro_batch: ")]
    if told:
        others = [rule for rule in _one_of_each(rejected) if rule not in told]
        return f"no layout of {count} GPUs is legal: {'; '.join([told[0], *others])}"
    whole = (batch // count + 1) * count
    return (
        f"no layout of {count} GPUs is legal: {'; '.join(_one_of_each(rejected))}. "
        f"--global-batch {whole} would split over any {count} data ranks"
    )


def _one_of_each(rejected: dict[str, int]) -> Iterator[str]:
    """The rules, of those that differ only in numbers the one that excludes most, with how many others there are."""
    alike: dict[str, list[str]] = {}
    for rule in sorted(rejected, key=lambda rule: -rejected[rule]):
        alike.setdefault(re.sub(r"\d+", "", rule), []).append(rule)
    for first, *others in alike.values():
        yield f"{first} (and {len(others)} like it)" if others else first


def explain_infeasible(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> InfeasibleError:
    """The error for a search that found nothing, with ways out that were tried and do fit.

    Raises ValueError if no shape is even legal.
    """
    closest = closest_plan(explorer, pins)
    if closest is None:
        raise ValueError(_nothing_legal(explorer, pins, rejected))
    closest = closest_of_all(explorer, pins, closest, time.monotonic() + SEARCHED_S)
    memory = closest.estimate.memory[closest.stage]
    items = sorted(memory.items.items(), key=lambda item: -item[1])[:3]
    deadline = time.monotonic() + SEARCHED_S
    smallest = _smallest_cluster(explorer, pins, deadline)
    all_tried = time.monotonic() < deadline
    changes = tuple(_changes(explorer, pins, smallest, all_tried, closest))
    message = (
        f"{explorer.profile.name} fits on no layout of {explorer.cluster.name}. The closest"
        f"{', ' if closest.in_time else f' that {SEARCHED_S:g} s found, '}"
        f"{closest.plan.label} with micro-batch {closest.plan.micro_batch} and {_recomputed(closest.plan)} "
        f"recomputed, is over by {format_bytes(closest.over_bytes)} on {closest.where}: it needs "
        f"{format_bytes(memory.device_bytes)} and may use {format_bytes(memory.budget_bytes)} ("
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in items)
        + "). "
        + ("What would do: " + "; ".join(changes) if changes else "No single change that was tried would do")
        + "."
    )
    return InfeasibleError(
        message,
        label=closest.plan.label,
        stage=closest.stage,
        over_bytes=closest.over_bytes,
        items=dict(memory.items),
        smallest_gpus=smallest,
        changes=changes,
    )


def _recomputed(plan: Plan) -> str:
    """How much of a leanest plan is run again, in a word."""
    return "everything" if any(layer.recompute != "none" for s in plan.stages for layer in s.layers) else "nothing"


def fits(explorer: Explorer, pins: Pins, deadline: float) -> bool:
    """Whether a plan fits: there is room for the state, and one of the leanest even ones does, or any of the space that
    is found until the deadline."""
    if filled_by_state(explorer, pins) >= 1:
        return False
    if any(over <= 0 for over, _ in _leanest(explorer, pins)):
        return True
    return explorer.explore(pins, deadline, near=0, any_will_do=True).best is not None


def _smallest_cluster(explorer: Explorer, pins: Pins, deadline: float) -> int | None:
    """The smallest number of GPUs of this kind that would do, of those that fill hosts, by a search of the whole space
    for each until the deadline; None if not even 64 times as many do."""
    cluster = explorer.cluster
    per_host, here = _full_host(cluster), cluster.num_devices
    free = replace(pins, data_replicate=None, data_shard=None, pipeline=None, tensor=None, context=None, expert=None)

    def would_do(count: int) -> bool:
        more = Explorer(explorer.profile, grown(cluster, count), explorer.training, explorer.framework)
        return fits(more, free, max(deadline, time.monotonic() + EACH_S))

    inside = range(here + 1, per_host + 1)
    hosts = range(here // per_host + 1, MOST_GPUS * max(1, here // per_host) + 1)
    return fewest([*inside, *(per_host * count for count in hosts if count > 1)], would_do)


def fewest(counts: Sequence[int], does: Callable[[int], bool]) -> int | None:
    """The first count that does: by doubling the place in the list, then by halving what lies between the last two
    until it is short, then one by one. None if none does that was tried."""
    failed, place = -1, 0
    while not does(counts[place]):
        if place == len(counts) - 1:
            return None
        failed, place = place, min(2 * place + 1, len(counts) - 1)
    while place - failed > MOST_TRIED:
        middle = (failed + place) // 2
        if does(counts[middle]):
            place = middle
        else:
            failed = middle
    return next((counts[i] for i in range(failed + 1, place) if does(counts[i])), counts[place])


def _full_host(cluster: ClusterSpec) -> int:
    """Devices of a host: a cluster that is part of one can grow to all of it."""
    here = cluster.devices_per_host
    return max(here, cluster.device.devices_per_host) if cluster.num_hosts == 1 else here


def grown(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """A cluster of `count` of the same devices on the same kind of host."""
    per_host = _full_host(cluster)
    grown = cluster_of(cluster.device, count, per_host if count % per_host == 0 and per_host > 1 else None)
    hosts = tuple(group.model_copy(update={"link": cluster.link}) for group in grown.hosts)
    return grown.model_copy(update={"hosts": hosts, "network": cluster.network})


def _changes(explorer: Explorer, pins: Pins, smallest: int | None, all_tried: bool, closest: Closest) -> Iterator[str]:
    """Ways out that were tried, cheapest first. all_tried: whether fewer than the smallest number of GPUs do not do."""
    deadline = time.monotonic() + SEARCHED_S
    if pins.recompute == "none" and fits(explorer, replace(pins, recompute=None), deadline):
        yield "allow recompute (leave out --pin recompute=none)"
    if parts_of(pins.recompute or "none") and fits(explorer, replace(pins, recompute="full"), deadline):
        yield f"recompute whole layers (--pin recompute=full in place of {pins.recompute})"
    if pins.micro_batch not in (None, 1) and fits(explorer, replace(pins, micro_batch=None), deadline):
        yield "a smaller micro-batch (leave out --pin micro_batch)"
    degrees = replace(pins, data_replicate=None, data_shard=None, tensor=None, pipeline=None)
    if degrees != pins and fits(explorer, degrees, deadline):
        yield "other degrees (leave out the --pin of degrees)"
    margin = _margin(closest, explorer.training.memory_margin)
    if margin is not None:
        yield f"a memory margin of {margin:.1%} (--memory-margin {margin:.3f})"
    if smallest is not None:
        cluster = explorer.cluster
        kind = "of this kind" if len(cluster.kinds) == 1 else f"like {cluster.device.name}, all of them,"
        perhaps = "" if all_tried else ", perhaps fewer"
        yield f"{smallest} GPUs {kind}{perhaps} (--gpus {smallest})"
    memory = explorer.cluster.device.memory
    larger = sorted((d for d in map(load_device, device_names()) if d.memory > memory), key=lambda d: d.memory)
    for device in larger:
        same = cluster_of(device, explorer.cluster.num_devices)
        if fits(Explorer(explorer.profile, same, explorer.training, explorer.framework), pins, deadline):
            yield f"devices with {format_bytes(device.memory)} (--device {device.name})"
            break
    away = offloaded(explorer, pins)
    if away is not None:
        yield away.sentence


def _margin(closest: Closest, margin: float) -> float | None:
    """The share of memory left free with which the closest plan fits, in full tenths of a percent; None if none."""
    memory = closest.estimate.memory[closest.stage]
    device = memory.budget_bytes / (1 - margin)
    left = math.floor(1000 * (1 - memory.device_bytes / device)) / 1000
    return left if 0 <= left < margin else None


@dataclass(frozen=True)
class Offloaded:
    """The last resort: a plan whose optimizer state and step are on the host."""

    plan: Plan
    estimate: Estimate
    host_bytes: float

    @property
    def sentence(self) -> str:
        """What it takes, and how to ask for it."""
        return (
            f"with the optimizer state in host memory ({format_bytes(self.host_bytes)} on every host) it fits as "
            f"{self.plan.label}, micro-batch {self.plan.micro_batch}: "
            f"{format_seconds(self.estimate.step_time_s)} a step; plan it with --pin offload=optimizer"
        )


def offloaded(explorer: Explorer, pins: Pins) -> Offloaded | None:
    """The fastest plan that fits with its optimizer state on the host, of the leanest shapes and of larger
    micro-batches of the fastest of these; None if none fits, or if there is no state."""
    if explorer.training.state_bytes == 0:
        return None
    lean: list[tuple[float, int, Shape]] = []
    for shape in (replace(each, offload_optimizer=True) for each in _frugal_shapes(explorer, pins)):
        stages = _even_stages(explorer, shape, pins)
        plan = make_plan(explorer.profile, explorer.cluster, explorer.training, shape, stages)
        priced = estimate(plan, explorer.profile)
        if priced.fits:
            lean.append((priced.step_time_s, len(lean), shape))
    fastest = [shape for _, _, shape in sorted(lean)[:OFFLOADED_TRIED]]
    solved = [found for found in (_solved(explorer, shape, pins) for shape in fastest) if found is not None]
    if not solved:
        return None
    best = min(solved, key=lambda found: found.seconds)
    for shape in _larger(best.shape, pins):
        found = _solved(explorer, shape, pins)
        if found is None:
            break
        best = min(best, found, key=lambda each: each.seconds)
    plan = explorer.plan_of(best)
    kept = estimate(plan.model_copy(update={"offload_optimizer": False}), explorer.profile)
    state = max(memory.items["optimizer"] for memory in kept.memory)
    return Offloaded(plan, estimate(plan, explorer.profile), state * explorer.cluster.devices_per_host)


def _larger(shape: Shape, pins: Pins) -> Iterator[Shape]:
    """The shape with larger and larger micro-batches."""
    share = shape.micro_batch * shape.num_microbatches
    for micro_batch in divisors(share):
        count = share // micro_batch
        enough = shape.schedule != "1f1b" or count >= shape.pipeline
        if micro_batch > shape.micro_batch and enough and pins.allows("micro_batch", micro_batch):
            sync = shape.gradient_sync if count > 1 else "last"
            yield replace(shape, micro_batch=micro_batch, num_microbatches=count, gradient_sync=sync)


def _solved(explorer: Explorer, shape: Shape, pins: Pins) -> Solved | None:
    """The best assignment of a shape, if it fits."""
    if is_chunked(shape.schedule):
        return None
    prices = explorer.priced(shape, pins.recompute, pins.reshard, pins.offered)
    found = scan(prices)
    return None if found is None else Solved(shape, prices, found, simulated_s(prices, found))
