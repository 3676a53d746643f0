"""Explains that nothing fits: what exceeds its budget, by how much, on which stage, how many GPUs would do, and which
change is cheapest."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...profiler.machine.cluster import ClusterSpec, cluster_of, device_names, load_device, made_by_flags
from ...profiler.machine.units import format_bytes, format_seconds, gpus_in_words
from ...profiler.model.frozen import in_bf16
from ...profiler.model.source import LORA
from ..cost.estimate import Estimate, estimate
from ..plan.document import Plan, parts_of
from ..plan.legality import divisors
from ..plan.making import make_plan
from ..plan.pin_texts import in_words
from ..plan.pins import Pins
from ..plan.shape import Shape
from ..solve.explore import Explorer, Outcome
from ..solve.space import Space
from .blame import blamed
from .explain import does_not_fit
from .fitting import (
    CLOSEST_S,
    SEARCHED_S,
    Closest,
    Fewest,
    closest_of_all,
    closest_plan,
    even_stages,
    fits,
    frugal_shapes,
    leanest_fits,
    smallest_cluster,
    solved,
    state_and_room,
    with_any_degrees,
)
from .verdict import LATE, Verdict, not_legal

OFFLOADED_TRIED = 3
"""Number of shapes with the optimizer on the host whose cuts and options are chosen at their best: those whose even
stages are fastest."""


class InfeasibleError(RuntimeError):
    """No legal plan fits. shown: that is proven; if not, none was found that does. The message says what exceeds its
    budget, by how much, on which stage, and the ways out."""

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
        shown: bool = True,
    ) -> None:
        super().__init__(message)
        self.label = label
        self.stage = stage
        self.over_bytes = over_bytes
        self.items = items or {}
        self.smallest_gpus = smallest_gpus
        self.changes = changes
        self.shown = shown


def closest_verdict(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> Verdict:
    """The verdict on a pinned set-up without a plan: the rule that excludes it, or what exceeds its budget."""
    closest = closest_plan(explorer, pins)
    if closest is None:
        found = blamed(explorer.profile, explorer.cluster, explorer.training, pins)
        if found is not None:
            return not_legal(found.rule)
        rules = {rule: count for rule, count in (rejected or _rejected(explorer, pins)).items() if count}
        degrees = f"no layout of {gpus_in_words(explorer.cluster.num_devices)} has these degrees"
        return not_legal(max(rules, key=lambda rule: rules[rule], default=degrees))
    return does_not_fit(closest.plan, closest.estimate) if closest.over_bytes > 0 else LATE


def _rejected(explorer: Explorer, pins: Pins) -> dict[str, int]:
    """Rule -> number of layouts that it excludes."""
    space = Space(explorer.profile, explorer.cluster, explorer.training, pins)
    for _ in space.splits():
        pass
    return space.rejected


def _nothing_legal(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> str:
    """Why no shape at all is legal, and the way out."""
    count, batch = explorer.cluster.num_devices, explorer.training.global_batch
    found = blamed(explorer.profile, explorer.cluster, explorer.training, pins)
    if found is not None:
        which = f"no layout of {gpus_in_words(count)} is legal with {' and '.join(found.pins)}: {found.rule}"
        return f"{which}; leave out {'one of the pins' if len(in_words(pins)) > 1 else 'the pin'}"
    told = [rule for rule in rejected if rule.startswith("micro_batch: ")]
    if told:
        others = [rule for rule in _one_of_each(rejected) if rule not in told]
        return f"no layout of {gpus_in_words(count)} is legal: {'; '.join([told[0], *others])}"
    whole = (batch // count + 1) * count
    return (
        f"no layout of {gpus_in_words(count)} is legal: {'; '.join(_one_of_each(rejected))}. "
        f"--global-batch {whole} would split over any {count} data ranks"
    )


def _one_of_each(rejected: dict[str, int]) -> Iterator[str]:
    """The rules; of those that differ only in numbers just the one that excludes most, with the number of the
    others."""
    alike: dict[str, list[str]] = {}
    for rule in sorted(rejected, key=lambda rule: -rejected[rule]):
        alike.setdefault(re.sub(r"\d+", "", rule), []).append(rule)
    for first, *others in alike.values():
        yield f"{first} (and {len(others)} like it)" if others else first


def explain_infeasible(explorer: Explorer, pins: Pins, searched: Outcome | None) -> InfeasibleError:
    """The error for a search that found nothing, with ways out that were tried and would fit.

    searched: outcome of the search, None if it was not needed. Raises ValueError if no shape is even legal.
    """
    closest = closest_plan(explorer, pins)
    if closest is None:
        raise ValueError(_nothing_legal(explorer, pins, searched.rejected if searched else _rejected(explorer, pins)))
    name, cluster = explorer.profile.name, explorer.cluster
    state, room = state_and_room(explorer, pins)
    shown = state >= room or searched is None or searched.nothing_fits
    what = f"{name} fits on no layout of {cluster.name}"
    if state >= room:
        needs, has = format_bytes(state), format_bytes(room)
        what += f": parameters, gradients and optimizer state alone take {needs}, and all GPUs together may use {has}"
        said = " with even stages"
    else:
        closest = closest_of_all(explorer, pins, closest, time.monotonic() + CLOSEST_S)
        said = "" if closest.of_all else " that was found"
        if not shown:
            what = f"no layout of {cluster.name} was found on which {name} fits, but not all are shown not to fit"
    memory = closest.estimate.memory[closest.stage]
    items = sorted(memory.items.items(), key=lambda item: -item[1])[:3]
    deadline = time.monotonic() + SEARCHED_S
    free = with_any_degrees(pins)
    smallest, here = smallest_cluster(explorer, pins, deadline), free != pins and bool(fits(explorer, free, deadline))
    as_pinned = smallest.count is not None or free == pins
    if not as_pinned and not here:
        smallest = smallest_cluster(explorer, free, deadline)
    more = _more_gpus(explorer.cluster, smallest, as_pinned)
    changes = tuple(_changes(explorer, pins, here, more, closest))
    message = (
        f"{what}. The closest{said}, "
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
        smallest_gpus=smallest.count,
        changes=changes,
        shown=shown,
    )


def _recomputed(plan: Plan) -> str:
    """How much a leanest plan recomputes, in a word."""
    return "everything" if any(layer.recompute != "none" for layer in plan.layers) else "nothing"


def _more_gpus(cluster: ClusterSpec, smallest: Fewest, as_pinned: bool) -> str:
    """The smallest number of GPUs that would do, with the flags that ask for it; "" if none was found."""
    if smallest.count is None:
        return ""
    kind = "GPUs of this kind" if len(cluster.kinds) == 1 else f"GPUs, all of them {cluster.device.name}"
    other = "" if as_pinned else " with other degrees than are pinned"
    perhaps = "" if smallest.shown else ", perhaps fewer"
    flags = f"--gpus {smallest.count}" if made_by_flags(cluster) else ""
    flags += "" if as_pinned or not flags else ", without the --pin or --setup of degrees"
    return f"{smallest.count} {kind}{other}{perhaps}" + (f" ({flags})" if flags else "")


def _changes(explorer: Explorer, pins: Pins, other_degrees: bool, more: str, closest: Closest) -> Iterator[str]:
    """Ways out that were tried and would do, cheapest first. other_degrees: whether other degrees would do. more: how
    many GPUs would do, in words."""
    deadline = time.monotonic() + SEARCHED_S
    if pins.recompute == "none" and fits(explorer, replace(pins, recompute=None), deadline):
        yield "allow recompute (leave out --pin recompute=none)"
    if parts_of(pins.recompute or "none") and fits(explorer, replace(pins, recompute="full"), deadline):
        yield f"recompute whole layers (--pin recompute=full in place of {pins.recompute})"
    if pins.micro_batch not in (None, 1) and fits(explorer, replace(pins, micro_batch=None), deadline):
        yield "a smaller micro-batch (leave out --pin micro_batch)"
    if other_degrees:
        yield "other degrees (leave out the --pin or --setup of degrees)"
    margin = _margin(closest, explorer.training.memory_margin)
    if margin is not None:
        yield f"a memory margin of {margin:.1%} (--memory-margin {margin:.3f})"
    adapters = explorer.profile.source.partition(LORA)[2]
    if adapters and not any(each.kept_as for of in explorer.profile.classes for each in of.parameters):
        halved = Explorer(in_bf16(explorer.profile), explorer.cluster, explorer.training, explorer.framework)
        if fits(halved, pins):
            yield f"a base in 16 bits (--lora {adapters},base=bf16)"
    cluster, by_flags = explorer.cluster, made_by_flags(explorer.cluster)
    if more:
        yield more
    memory = closest.needed * cluster.device.memory
    larger = sorted((d for d in map(load_device, device_names()) if d.memory > memory), key=lambda d: d.memory)
    for device in larger:
        same = cluster_of(device, cluster.num_devices)
        if leanest_fits(Explorer(explorer.profile, same, explorer.training, explorer.framework), pins):
            named = f"--device {device.name}" if by_flags else f"such as {device.name}"
            yield f"devices with {format_bytes(device.memory)} ({named})"
            break
    away = offloaded(explorer, pins)
    if away is not None:
        yield away.sentence


def _margin(closest: Closest, margin: float) -> float | None:
    """Share of memory to leave free with which the closest plan fits, rounded down to a tenth of a percent; None if
    there is none."""
    memory = closest.estimate.memory[closest.stage]
    device = memory.budget_bytes / (1 - margin)
    left = math.floor(1000 * (1 - memory.device_bytes / device)) / 1000
    return left if 0 <= left < margin else None


@dataclass(frozen=True)
class Offloaded:
    """A plan whose optimizer state and step are on the host, as the last resort. host_bytes: optimizer state on each
    host."""

    plan: Plan
    estimate: Estimate
    host_bytes: float

    @property
    def sentence(self) -> str:
        """What the plan takes, and how to ask for it."""
        return (
            f"with the optimizer state in host memory ({format_bytes(self.host_bytes)} on every host) it fits as "
            f"{self.plan.label}, micro-batch {self.plan.micro_batch}: "
            f"{format_seconds(self.estimate.step_time_s)} a step; plan it with --pin offload=optimizer"
        )


def offloaded(explorer: Explorer, pins: Pins) -> Offloaded | None:
    """The fastest plan that was found to fit with its optimizer state on the host: of the leanest shapes, and of larger
    micro-batches of the fastest of these. None if none fits, or the optimizer has no state."""
    if explorer.training.state_bytes == 0:
        return None
    lean: list[tuple[float, int, Shape]] = []
    for shape in (replace(each, offload_optimizer=True) for each in frugal_shapes(explorer, pins)):
        stages = even_stages(explorer, shape, pins)
        plan = make_plan(explorer.profile, explorer.cluster, explorer.training, shape, stages)
        priced = estimate(plan, explorer.profile)
        if priced.fits:
            lean.append((priced.step_time_s, len(lean), shape))
    fastest = [shape for _, _, shape in sorted(lean)[:OFFLOADED_TRIED]]
    each = [found for found in (solved(explorer, shape, pins) for shape in fastest) if found is not None]
    if not each:
        return None
    best = min(each, key=lambda found: found.seconds)
    for shape in _larger(best.shape, pins):
        found = solved(explorer, shape, pins)
        if found is None:
            break
        best = min(best, found, key=lambda each: each.seconds)
    plan = explorer.plan_of(best)
    kept = estimate(plan.model_copy(update={"offload_optimizer": False}), explorer.profile)
    state = max(memory.items["optimizer"] for memory in kept.memory)
    return Offloaded(plan, estimate(plan, explorer.profile), state * explorer.cluster.devices_per_host)


def _larger(shape: Shape, pins: Pins) -> Iterator[Shape]:
    """The shape with larger and larger micro-batches, as far as the pins allow."""
    share = shape.micro_batch * shape.num_microbatches
    for micro_batch in divisors(share):
        count = share // micro_batch
        enough = shape.schedule != "1f1b" or count >= shape.pipeline
        if micro_batch > shape.micro_batch and enough and pins.allows("micro_batch", micro_batch):
            sync = shape.gradient_sync if count > 1 else "last"
            yield replace(shape, micro_batch=micro_batch, num_microbatches=count, gradient_sync=sync)
