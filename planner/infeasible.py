"""When nothing fits: what is over, by how much, on which stage; how many GPUs would do; the cheapest change."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..profiler.cluster import ClusterSpec, cluster_of, device_names, load_device
from ..profiler.units import format_bytes
from .estimate import Estimate, estimate
from .explain import does_not_fit
from .explore import Explorer
from .pins import blamed, in_words
from .plan import Plan
from .simulate import ZERO_BUBBLE, is_chunked
from .space import Space
from .strategy import LayerOption, Pins, Shape, make_plan, shape_of

MOST_GPUS = 64
"""How many times more GPUs are tried before giving up on the smallest number that would do."""


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


@dataclass(frozen=True)
class Closest:
    """The plan that misses the budget by least."""

    plan: Plan
    estimate: Estimate

    @property
    def stage(self) -> int:
        """The stage that is most over."""
        memory = self.estimate.memory
        return max(range(len(memory)), key=lambda stage: memory[stage].over_bytes)

    @property
    def over_bytes(self) -> float:
        """Bytes over the budget on that stage; not positive: it fits."""
        return self.estimate.memory[self.stage].over_bytes


def closest_plan(explorer: Explorer, pins: Pins) -> Closest | None:
    """Of the legal shapes with the smallest micro-batch, everything recomputed and sharded that may be, the plan that
    misses the budget by least; None if no shape is legal."""
    best: Closest | None = None
    for shape in _frugal_shapes(explorer, pins):
        stages = _even_stages(explorer, shape, pins)
        plan = make_plan(explorer.profile, explorer.cluster, explorer.training, shape, stages)
        found = Closest(plan, estimate(plan, explorer.profile))
        if best is None or found.over_bytes < best.over_bytes:
            best = found
    return best


def _frugal_shapes(explorer: Explorer, pins: Pins) -> Iterator[Shape]:
    """Per choice of degrees: the smallest micro-batch and the widest sharding."""
    space = Space(explorer.profile, explorer.cluster, explorer.training, pins)
    smallest: dict[object, Shape] = {}
    for family in space.families():
        if is_chunked(family.schedule) and pins.schedule is None:
            continue  # 1F1B holds no more
        degrees = family.tensor, family.context, family.expert, family.pipeline
        key = *degrees, family.sequence, family.schedule, family.virtual_stages
        if key not in smallest or family.micro_batch < smallest[key].micro_batch:
            smallest[key] = max(
                space.shapes(family), key=lambda s: (s.data_shard, s.gradient_sync == "every", s.reshard)
            )
    yield from smallest.values()


def _even_stages(explorer: Explorer, shape: Shape, pins: Pins) -> list[list[LayerOption]]:
    """As many layers on each stage as on any other, at the options that hold least."""
    model, kinds = explorer.model, explorer.model.kinds
    frugal = {}
    recompute = "none" if shape.schedule in ZERO_BUBBLE else pins.recompute
    for kind in dict.fromkeys(kinds):
        options = model.options(kind, shape, recompute, pins.reshard)
        frugal[kind] = min(options, key=lambda o: _held(explorer, kind, shape, o))
    num_layers, stages, first = len(kinds), [], 0
    num_stages = shape.pipeline * shape.virtual_stages
    for stage in range(num_stages):
        last = (stage + 1) * num_layers // num_stages
        stages.append([frugal[kind] for kind in kinds[first:last]])
        first = last
    return stages


def _held(explorer: Explorer, kind: object, shape: Shape, option: LayerOption) -> float:
    cost = explorer.model.cost(kind, shape, option)  # type: ignore[arg-type]
    return shape.in_flight(0) * cost.kept_bytes + cost.held_bytes


def closest_verdict(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> str:
    """Why a pinned set-up has no plan: the rule that excludes it, or what is over its budget."""
    closest = closest_plan(explorer, pins)
    if closest is None:
        space = Space(explorer.profile, explorer.cluster, explorer.training, pins)
        for _ in space.families():
            pass
        rules = {rule: count for rule, count in (rejected or space.rejected).items() if count}
        degrees = f"no layout of {explorer.cluster.num_devices} GPUs has these degrees"
        return f"not legal: {max(rules, key=lambda rule: rules[rule], default=degrees)}"
    return does_not_fit(closest.estimate)


def _nothing_legal(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> str:
    """Why not even one shape is legal, and the way out."""
    count, batch = explorer.cluster.num_devices, explorer.training.global_batch
    found = blamed(explorer.profile, explorer.cluster, explorer.training, pins)
    if found is not None:
        return f"{found}; leave out {'one of the pins' if len(in_words(pins)) > 1 else 'the pin'}"
    whole = (batch // count + 1) * count
    return (
        f"no layout of {count} GPUs is legal: {'; '.join(rejected)}. "
        f"--global-batch {whole} would split over any {count} data ranks"
    )


def explain_infeasible(explorer: Explorer, pins: Pins, rejected: dict[str, int]) -> InfeasibleError:
    """The error for a search that found nothing, with ways out that were tried and do fit.

    Raises ValueError if no shape is even legal.
    """
    closest = closest_plan(explorer, pins)
    if closest is None:
        raise ValueError(_nothing_legal(explorer, pins, rejected))
    memory = closest.estimate.memory[closest.stage]
    items = sorted(memory.items.items(), key=lambda item: -item[1])[:3]
    smallest = _smallest_cluster(explorer, pins)
    changes = tuple(_changes(explorer, pins, smallest))
    num_stages = len(closest.estimate.memory)
    where = f"stage {closest.stage} of {num_stages}" if num_stages > 1 else "every GPU"
    message = (
        f"{explorer.profile.name} fits on no layout of {explorer.cluster.name}. The closest, "
        f"{shape_of(closest.plan).label} with micro-batch {closest.plan.micro_batch} and everything recomputed, is "
        f"over by {format_bytes(closest.over_bytes)} on {where}: it needs {format_bytes(memory.device_bytes)} of "
        f"{format_bytes(memory.budget_bytes)} ("
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in items)
        + "). "
        + ("What would do: " + "; ".join(changes) if changes else "No single change that was tried would do")
        + "."
    )
    return InfeasibleError(
        message,
        label=shape_of(closest.plan).label,
        stage=closest.stage,
        over_bytes=closest.over_bytes,
        items=dict(memory.items),
        smallest_gpus=smallest,
        changes=changes,
    )


def _fits(explorer: Explorer, pins: Pins) -> bool:
    closest = closest_plan(explorer, pins)
    return closest is not None and closest.over_bytes <= 0


def _smallest_cluster(explorer: Explorer, pins: Pins) -> int | None:
    """The smallest number of GPUs of this kind that would do, by doubling and then by halving the interval."""
    cluster = explorer.cluster
    group = cluster.hosts[0]
    free = replace(pins, data_replicate=None, data_shard=None, pipeline=None, tensor=None)

    def would_do(count: int) -> bool:
        return _fits(Explorer(explorer.profile, grown(cluster, count), explorer.training), free)

    few = cluster.num_devices
    many = next(
        (few * factor for factor in _powers(MOST_GPUS) if would_do(few * factor)),
        None,
    )
    if many is None:
        return None
    few = many // 2
    step = group.devices_per_host if few >= group.devices_per_host else 1
    for count in range(few + step, many, max(step, (many - few) // 8 // step * step)):
        if would_do(count):
            return count
    return many


def _powers(most: int) -> Iterator[int]:
    factor = 2
    while factor <= most:
        yield factor
        factor *= 2


def grown(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """A cluster of `count` of the same devices on the same kind of host."""
    per_host = cluster.hosts[0].devices_per_host
    grown = cluster_of(cluster.device, count, per_host if count % per_host == 0 and per_host > 1 else None)
    hosts = tuple(group.model_copy(update={"link": cluster.link}) for group in grown.hosts)
    return grown.model_copy(update={"hosts": hosts, "network": cluster.network})


def _changes(explorer: Explorer, pins: Pins, smallest: int | None) -> Iterator[str]:
    """Ways out that were tried, cheapest first."""
    if pins.recompute == "none" and _fits(explorer, replace(pins, recompute=None)):
        yield "allow recompute (leave out --pin recompute=none)"
    if pins.micro_batch not in (None, 1) and _fits(explorer, replace(pins, micro_batch=None)):
        yield "a smaller micro-batch (leave out --pin micro_batch)"
    degrees = replace(pins, data_replicate=None, data_shard=None, tensor=None, pipeline=None)
    if degrees != pins and _fits(explorer, degrees):
        yield "other degrees (leave out the --pin of degrees)"
    if smallest is not None:
        yield f"{smallest} GPUs of this kind (--gpus {smallest})"
    memory = explorer.cluster.device.memory
    larger = sorted((d for d in map(load_device, device_names()) if d.memory > memory), key=lambda d: d.memory)
    for device in larger:
        same = cluster_of(device, explorer.cluster.num_devices)
        if _fits(Explorer(explorer.profile, same, explorer.training), pins):
            yield f"devices with {format_bytes(device.memory)} (--device {device.name})"
            return
