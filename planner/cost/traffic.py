"""What one rank transfers through every kind of collective in a step: bytes and calls, counted as the executor makes
them.

It cannot be told from single layers: fully_shard gathers what several layers of a stage share in one call of its root,
flat buffers join gradients of many layers, and who exchanges what between two layers depends on the stage that each is
in.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from ...profiler.model.model_profile import ModelProfile
from ..plan.document import GroupAxis, Plan
from ..plan.shape import Shape
from .comm_cost import CollectiveKind
from .kept import kept
from .kinds import kinds_of
from .layer_cost import CostModel
from .memory_cost import MASTER_BYTES, uses_fully_shard
from .priced_layer import HeldParameter, LayerCost

BUCKET_ELEMENTS = 16 * 2**20
"""Elements of gradients that the executor reduces together in one flat buffer (64 MiB in fp32)."""

FIRST_DDP_BUCKET_BYTES, DDP_BUCKET_BYTES = 2**20, 25 * 2**20
"""Bytes at which a bucket of DistributedDataParallel is full: the one that is reduced first, and all others (torch
2.13, nn/parallel/distributed.py)."""


OwnElements = tuple[float, float]
"""(all, trainable) elements."""


class Tally:
    """Bytes and calls by axis and kind of collective; bytes are those of full tensors, not of shards."""

    def __init__(self) -> None:
        self.passed: dict[tuple[GroupAxis, CollectiveKind], tuple[float, float]] = {}

    def copy(self) -> "Tally":
        """A tally with the same counts, to which more can be added."""
        found = Tally()
        found.passed.update(self.passed)
        return found

    def add(self, axis: GroupAxis, kind: CollectiveKind, num_bytes: float, calls: float = 1.0) -> None:
        """Add `calls` calls with `num_bytes` in total; both negative to take them away."""
        before = self.passed.get((axis, kind), (0.0, 0.0))
        self.passed[axis, kind] = before[0] + num_bytes, before[1] + calls


def add_layers(tally: Tally, layers: Iterable[tuple[LayerCost, int]], num_microbatches: int) -> None:
    """Add what single layers transfer by themselves. layers: (cost, number of such layers)."""
    for layer, count in layers:
        for item in layer.traffic:
            calls = count * item.calls * (1 if item.per_step else num_microbatches)
            tally.add(item.axis, item.kind, calls * item.bytes, calls)


def rank_tallies(plan: Plan, model: CostModel, shape: Shape) -> list[Tally]:
    """[pipeline coordinate] -> what its rank transfers beside what single layers do by themselves."""
    ends = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    stages = [range(first, last) for first, last in pairwise(ends)]
    tallies = []
    fully_sharded = uses_fully_shard(shape, model.training)
    own = _own_parameters(model, shape, stages) if fully_sharded else []
    shared, known = _shared_names(model.profile), dict[object, Tally]()
    for position in range(shape.pipeline):
        here = plan.stages_of(position)
        layers = [layer for stage in here for layer in stages[stage]]
        reshards = [[layer.reshard for layer in plan.stages[stage].layers] for stage in here]
        # Ranks with the same kinds of layers pass the same, unless what one shares depends on the others there.
        ties = position if any(shared[layer] for layer in layers) else None
        alike = ties, tuple(id(model.kinds[layer]) for layer in layers), tuple(map(tuple, reshards))
        if alike not in known:
            known[alike] = tally = Tally()
            if fully_sharded:
                for stage, each in zip(here, reshards, strict=True):
                    _add_units(tally, model, shape, stages[stage], own[stage], each)
                    _add_banks(tally, model, shape, stages[stage], each)
            elif shape.data_replicate > 1:
                _add_replicas(tally, model, shape, layers)
            if shape.tensor > 1:
                _add_partial(tally, model, shape, layers)
        tallies.append(known[alike].copy())
    places = [tallies[plan.position_of(stage)] for stage in range(len(stages))]
    if shape.pipeline > 1:
        _add_ties(places, model, shape, stages)
    for before, after, cut in zip(places, places[1:], ends[1:], strict=False):
        if before is not after:
            _add_transfers(before, after, model, shape, cut)
        if shape.sequence:
            _move_gathers(before, after, model, shape, cut)
    return tallies


def _add_units(
    tally: Tally, model: CostModel, shape: Shape, layers: range, own: Sequence[OwnElements], reshards: Sequence[bool]
) -> None:
    """Add gathers and reductions of fully_shard. Every layer is a unit, except layers that share parameters with others
    of the stage: those are in the root, which gathers and reduces them all at once and never gives them back."""
    shared = _shared_names(model.profile)
    readers = Counter(name for layer in layers if shared[layer] for name in set(shared[layer].values()))
    units: Counter[tuple[float, float, bool]] = Counter()
    root = [0.0, 0.0]
    for layer, (total, trainable), reshard in zip(layers, own, reshards, strict=True):
        if shared[layer] and any(readers[name] > 1 for name in shared[layer].values()):
            root = [root[0] + total, root[1] + trainable]
        else:
            units[total, trainable, reshard] += 1
    units[root[0], root[1], False] += 1
    for (total, trainable, reshard), count in units.items():
        _add_unit(tally, model, shape, (total, trainable), reshard, count, shape.sharded_over)


def _add_banks(tally: Tally, model: CostModel, shape: Shape, layers: range, reshards: Sequence[bool]) -> None:
    """Add gathers and reductions of experts that are spread over ranks: they are units of their own, sharded over the
    ranks that hold the same experts."""
    if shape.expert == 1:
        return
    units: Counter[tuple[float, float, bool]] = Counter()
    for layer, reshard in zip(layers, reshards, strict=True):
        for total, trainable in model.bank_elements(model.kinds[layer], shape):
            units[total, trainable, reshard] += 1
    for (total, trainable, reshard), count in units.items():
        _add_unit(tally, model, shape, (total, trainable), reshard, count, shape.same_experts)


def _add_unit(
    tally: Tally, model: CostModel, shape: Shape, elements: OwnElements, reshard: bool, count: int, sharded_over: int
) -> None:
    """Add gathers and reductions of `count` units of fully_shard with so many elements each."""
    total, trainable = elements
    num_reductions = shape.num_microbatches if shape.gradient_sync == "every" else 1
    num_gathers = 2 * shape.num_microbatches if reshard else num_reductions
    gathered, reduced = model.gathered_bytes * total, MASTER_BYTES * trainable
    if total and sharded_over > 1:
        calls = count * num_gathers
        tally.add("data_shard", "all_gather", calls * gathered, calls)
    calls = count * num_reductions
    if trainable and sharded_over > 1:
        tally.add("data_shard", "reduce_scatter", calls * reduced, calls)
    if trainable and shape.data_replicate > 1:
        tally.add("data_replicate", "all_reduce", calls * reduced / sharded_over, calls)


def _own_parameters(model: CostModel, shape: Shape, stages: Sequence[range]) -> list[list[OwnElements]]:
    """[stage][layer] -> elements that data shards gather, without those that an earlier layer of the stage has already,
    and without experts that are spread over ranks."""
    shared = _shared_names(model.profile)
    known: dict[int, OwnElements] = {}
    found = []
    for layers in stages:
        own: list[OwnElements] = []
        seen: set[str] = set()
        for layer in layers:
            kind, names = model.kinds[layer], shared[layer]
            if names:
                again = frozenset(name for name, full in names.items() if full in seen)
                own.append(model.elements(kind, shape, again | model.spread_names(kind, shape)))
                seen.update(names.values())
            else:
                if kind.layer_class not in known:
                    known[kind.layer_class] = model.elements(kind, shape, model.spread_names(kind, shape))
                own.append(known[kind.layer_class])
        found.append(own)
    return found


def _add_replicas(tally: Tally, model: CostModel, shape: Shape, layers: Sequence[int]) -> None:
    """Add reductions of the gradients of whole replicas: by DDP in its buckets, in the order in which backward reaches
    them. In a pipeline, and for models that decide by values, they are reduced once a step in flat buffers."""
    sizes = _sizes(model, shape, layers, lambda _, item: item.trainable)
    if shape.pipeline > 1 or model.profile.decides_by_values:
        in_order = sizes[::-1] if shape.pipeline > 1 else sizes
        tally.add("data_replicate", "all_reduce", MASTER_BYTES * sum(sizes), num_buffers(in_order))
        return
    times = shape.num_microbatches if shape.gradient_sync == "every" else 1
    calls = times * num_ddp_buckets([MASTER_BYTES * size for size in reversed(sizes)])
    tally.add("data_replicate", "all_reduce", times * MASTER_BYTES * sum(sizes), calls)


def _add_partial(tally: Tally, model: CostModel, shape: Shape, layers: Sequence[int]) -> None:
    """Add sums over tensor ranks of gradients of which each rank has only the share of its slice of the sequence, or of
    its heads; once a step, in flat buffers of a rank's shards."""
    kinds = dict.fromkeys(model.kinds[layer] for layer in layers)
    sliced = {kind for kind in kinds if model.mode(kind, shape)[0] == "sequence"}
    spread = set[str]().union(*(model.spread_names(kind, shape) for kind in sliced))

    def is_share(layer: int, item: HeldParameter) -> bool:
        share = item.whole and item.name not in spread if model.kinds[layer] in sliced else item.partial
        return item.trainable and share

    sizes = _sizes(model, shape, layers, is_share)
    if sizes:
        shards = [size / shape.sharded_over for size in sizes]
        tally.add("tensor", "all_reduce", MASTER_BYTES * sum(shards), num_buffers(shards))


def _sizes(
    model: CostModel, shape: Shape, layers: Iterable[int], wanted: Callable[[int, HeldParameter], bool]
) -> list[int]:
    """Elements of those parameters of layers that `wanted` selects, in the order of layers. A parameter that several
    layers share counts with the first."""
    shared = _shared_names(model.profile)
    known: dict[int, list[int]] = {}
    seen: set[str] = set()
    sizes: list[int] = []
    for layer in layers:
        kind, names = model.kinds[layer], shared[layer]
        if names:
            held = [item for item in model.held(kind, shape) if wanted(layer, item)]
            sizes += [item.elements for item in held if names.get(item.name) not in seen]
            seen.update(names.values())
        else:
            if kind.layer_class not in known:
                known[kind.layer_class] = [item.elements for item in model.held(kind, shape) if wanted(layer, item)]
            sizes += known[kind.layer_class]
    return sizes


def num_buffers(sizes: Iterable[float]) -> int:
    """Number of flat buffers that gradients of so many elements fill one after another
    (executor/parallel/flat_gradients.py)."""
    buffers = filled = 0.0
    for size in sizes:
        if not buffers or filled + size > BUCKET_ELEMENTS:
            buffers, filled = buffers + 1, 0.0
        filled += size
    return int(buffers)


def num_ddp_buckets(sizes: Iterable[int]) -> int:
    """Number of buckets that DDP makes of gradients of so many bytes, in this order; a gradient that fills a bucket
    ends it."""
    full, filled, limit = 0, 0, FIRST_DDP_BUCKET_BYTES
    for size in sizes:
        filled += size
        if filled >= limit:
            full, filled, limit = full + 1, 0, DDP_BUCKET_BYTES
    return full + (1 if filled else 0)


def _add_ties(places: Sequence[Tally], model: CostModel, shape: Shape, stages: Sequence[range]) -> None:
    """Add sums of gradients of weights of which several pipeline ranks hold copies: one call for each weight, once a
    step. places: [stage] -> tally of its rank."""
    shared = _shared_names(model.profile)
    holders: dict[str, dict[int, Tally]] = {}
    elements: dict[str, int] = {}
    for tally, layers in zip(places, stages, strict=True):
        for layer in layers:
            for item in model.held(model.kinds[layer], shape) if shared[layer] else ():
                if item.name in shared[layer]:
                    name = shared[layer][item.name]
                    holders.setdefault(name, {})[id(tally)] = tally
                    elements[name] = item.elements
    for name, tallies in holders.items():
        for tally in tallies.values() if len(tallies) > 1 else ():
            tally.add("pipeline", "all_reduce", model.tie_bytes(elements[name], shape))


def _add_transfers(before: Tally, after: Tally, model: CostModel, shape: Shape, cut: int) -> None:
    """Add what crosses a cut between stages: one call for every tensor, and one for its gradient; sender and receiver
    both count it."""
    for index in _crossing(model.profile)[cut]:
        tensor = model.profile.tensors[index]
        size = tensor.size.at(shape.samples, model.training.compute_bytes)
        around = range(tensor.made_by, tensor.made_by + 2)
        if tensor.requires_grad and "sequence" in tensor.dims and all(_is_sliced(model, shape, i) for i in around):
            size /= shape.tensor
        calls = shape.num_microbatches * (2 if tensor.requires_grad else 1)
        before.add("pipeline", "p2p", calls * size, calls)
        after.add("pipeline", "p2p", calls * size, calls)


def _move_gathers(before: Tally, after: Tally, model: CostModel, shape: Shape, cut: int) -> None:
    """Move gathers at a cut to the rank that makes them, which is not the one that makes them inside a stage: a sliced
    tensor that the next layer needs whole is gathered before it is sent, and a whole tensor is sliced after it has
    arrived."""
    leaves = model.kinds[cut].leaves and not _is_sliced(model, shape, cut)
    enters = model.kinds[cut - 1].enters and not _is_sliced(model, shape, cut - 1)
    if not (leaves or enters):
        return
    num_bytes, calls = shape.num_microbatches * model.hidden_bytes(shape), shape.num_microbatches
    if leaves:
        before.add("tensor", "all_gather", num_bytes, calls)
        after.add("tensor", "all_gather", -num_bytes, -calls)
    if enters:
        before.add("tensor", "all_gather", -num_bytes, -calls)
        after.add("tensor", "all_gather", num_bytes, calls)


def _is_sliced(model: CostModel, shape: Shape, layer: int) -> bool:
    return model.mode(model.kinds[layer], shape)[0] == "sequence"


@kept
def _shared_names(profile: ModelProfile) -> tuple[dict[str, str], ...]:
    """[layer] -> its parameters that other layers read, too: name in the layer -> one name that all of them have for
    it."""
    first_of = {name: names[0] for names in profile.ties for name in names}
    found = []
    for layer, kind in zip(profile.layers, kinds_of(profile), strict=True):
        prefix = f"{layer.root}." if layer.root else ""
        found.append({item.name: first_of.get(prefix + item.name, prefix + item.name) for item in kind.shared})
    return tuple(found)


@kept
def _crossing(profile: ModelProfile) -> tuple[tuple[int, ...], ...]:
    """[place of the chain] -> indices of the tensors that cross there."""
    places: list[list[int]] = [[] for _ in range(len(profile.layers) + 1)]
    for index, tensor in enumerate(profile.tensors):
        for place in range(tensor.made_by + 1, tensor.last_used_by + 1):
            places[place].append(index)
    return tuple(map(tuple, places))
