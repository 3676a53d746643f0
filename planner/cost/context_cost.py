"""Context parallelism: what ranks that hold parts of one sequence exchange for attention, and how much of it is
exposed.

Work, saved bytes and everything else of a layer are those of samples / context samples (Shape.samples): tokens are
divided, and each rank has s^2 / context of a sample's s^2 scores, with causal ones in balanced chunks. An operator that
runs over samples but not over positions (a classifier after pooling) is divided as well, although every rank would
repeat it.
"""

from dataclasses import dataclass

from ...profiler.machine.cluster import Device
from ...profiler.model.model_profile import Amount, Costs, LayerClass, amount_at
from ..plan.document import ContextKind, Recompute
from .comm_cost import CollectiveKind, GroupLinks, collective_s, exposed_s
from .compute_cost import moving_s, operator_s

AttentionBytes = tuple[float, float]
"""(bytes of queries, bytes of keys and values), of whole sequences."""


@dataclass(frozen=True)
class Exchange:
    """One kind of collective that a pass of attention needs: its bytes (as collective_s counts them) and its number of
    calls."""

    kind: CollectiveKind
    num_bytes: float
    calls: int


@dataclass(frozen=True)
class ContextCost:
    """Exposed seconds of one layer's exchanges for one micro-batch, their traffic, and bytes of memory that they need.

    kept_bytes: what a layer keeps for backward beyond what attention keeps in one process; kept_selectively_bytes: the
    same under selective recompute.
    """

    forward_s: float
    backward_s: float
    forward: tuple[Exchange, ...]
    backward: tuple[Exchange, ...]
    buffer_bytes: float
    kept_bytes: float = 0.0
    kept_selectively_bytes: float = 0.0

    def kept(self, recompute: Recompute) -> float:
        """Bytes that a layer keeps beyond what attention keeps in one process, under a kind of recompute."""
        if recompute == "full":
            return 0.0
        return self.kept_selectively_bytes if recompute == "selective" else self.kept_bytes


NOTHING = ContextCost(0.0, 0.0, (), (), 0.0)


def attention_bytes(
    layer_class: LayerClass, costs: Costs, micro_batch: int, element_bytes: int, tensor: int
) -> AttentionBytes | None:
    """Bytes of what a layer's attention reads, of a micro-batch's whole sequences on one tensor rank; None if the layer
    has no attention.

    Fused attention moves queries, keys, values and an output as wide as the queries. Unfused attention begins with the
    product of queries and keys.
    """
    groups = _keys_per_query(layer_class)
    forward = [op for op in costs.operators if op.part == "forward"]
    fused = [op for op in forward if op.kind == "attention"]
    if fused:
        moved = sum(amount_at(op.moved.elements, micro_batch, tensor) for op in fused)
        queries = moved / (2 + 2 * groups)
        return element_bytes * queries, element_bytes * 2 * groups * queries
    scores = next((op.shape for op in forward if op.core and op.kind == "matmul" and op.shape is not None), None)
    if scores is None:
        return None
    queries = amount_at(scores[0], micro_batch, tensor) * amount_at(scores[1], micro_batch, tensor)
    return element_bytes * queries, element_bytes * 2 * groups * queries


def _keys_per_query(layer_class: LayerClass) -> float:
    """Width of the keys over that of the queries: below 1 if heads share keys. It is read off the three projections
    (adapters are as wide), or off the three parts of a fused projection; 1 if there are none."""
    shapes = {parameter.name: parameter.shape for parameter in layer_class.parameters}
    for cut in layer_class.cuts:
        if cut.kind == "attention":
            names = [f"{column}.weight" for column in cut.columns]
            widths = [shapes[name][cut.sharded[name]] for name in names if name in cut.sharded]
            widths = next((list(parts) for parts in cut.parts.values() if len(parts) == 3), widths)
            if len(widths) >= 3:
                return min(widths) / max(widths)
    return 1.0


def exchanges(
    sizes: AttentionBytes, context: int, kind: ContextKind
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """(forward, backward) exchanges of one layer.

    ring: each rank passes on the block of keys and values that it has, context - 1 times; backward their gradients go
    round as well. all_to_all: queries, keys, values and output change from slices of the sequence to heads or back.
    all_gather: all keys and values are gathered, in backward again, and their gradients are summed and scattered.
    """
    queries, keys_values = sizes
    if kind == "ring":
        block, steps = keys_values / context, context - 1
        return (Exchange("p2p", block, steps),), (Exchange("p2p", block, 2 * steps),)
    if kind == "all_to_all":
        both = Exchange("all_to_all", queries / context, 2), Exchange("all_to_all", keys_values / 2 / context, 2)
        return both, both
    gather = Exchange("all_gather", keys_values, 1)
    return (gather,), (gather, Exchange("reduce_scatter", keys_values, 1))


def context_cost(
    layer_class: LayerClass,
    costs: Costs,
    micro_batch: int,
    element_bytes: int,
    tensor: int,
    context: int,
    kind: ContextKind,
    links: GroupLinks,
    device: Device,
    precision: str,
) -> ContextCost:
    """Cost of a layer's exchanges. Each step of a ring hides behind the attention to the block before, and slows it as
    other hidden communication does; all other exchanges are exposed. The time that attention loses by running one
    kernel for each block of keys counts with the exchanges."""
    sizes = attention_bytes(layer_class, costs, micro_batch, element_bytes, tensor) if context > 1 else None
    if sizes is None:
        return NOTHING
    forward, backward = exchanges(sizes, context, kind)
    seconds = [sum(e.calls * collective_s(e.kind, e.num_bytes, links) for e in part) for part in (forward, backward)]
    if kind == "ring":
        samples = micro_batch / context
        attention = [0.0, 0.0]
        for op in costs.operators:
            if op.kind == "attention" or op.core:
                op_s = operator_s(op, device, precision, element_bytes, samples, tensor)
                attention[op.part != "forward"] += op_s
        if not any(op.kind == "attention" for op in costs.operators):
            attention[1] = 2 * attention[0]  # unfused: its backward has products twice as many
        behind = [(context - 1) / context * attention_s for attention_s in attention]
        seconds = [exposed_s(s, b, 1.0, device.contention) for s, b in zip(seconds, behind, strict=True)]
    if kind == "all_to_all" and device.kernels:
        copied = [sum(e.calls * e.num_bytes for e in part) for part in (forward, backward)]
        seconds = [s + moving_s(COPIED * size, device, "cat", "copy") for s, size in zip(seconds, copied, strict=True)]
    if kind in IN_BLOCKS and device.kernels:
        pieces = pieces_s(costs, device, precision, element_bytes, micro_batch / context, tensor, context)
        seconds = [s + more for s, more in zip(seconds, pieces, strict=True)]
    buffers = {
        "ring": 2 * sizes[1] / context,
        "all_to_all": (2 * sizes[0] + sizes[1]) / context,
        "all_gather": sizes[1],
    }
    # All-to-all: attention keeps its output by heads, and what follows it keeps the same by tokens. Selective recompute
    # keeps what the exchanged attention returns, and that includes its exchanged inputs.
    more = (sizes[0] / context, (2 * sizes[0] + sizes[1]) / context) if kind == "all_to_all" else (0.0, 0.0)
    return ContextCost(seconds[0], seconds[1], forward, backward, buffers[kind], *more)


def pieces_s(
    costs: Costs, device: Device, precision: str, element_bytes: int, samples: float, tensor: int, context: int
) -> list[float]:
    """[forward, backward] -> seconds by which fused attention takes longer in one kernel for each block of keys and
    values than in one kernel for all, on the rank whose queries attend to every block; merging the results of the
    blocks included."""
    longer = [0.0, 0.0]
    for op in costs.operators:
        if op.kind != "attention" or op.shape is None:
            continue
        rows, inner, columns = op.shape
        piece = op.model_copy(
            update={"flops": _divided(op.flops, context), "shape": (rows, inner, _divided(columns, context))}
        )
        whole_s, piece_s = (operator_s(o, device, precision, element_bytes, samples, tensor) for o in (op, piece))
        elements = amount_at(rows, samples, tensor) * amount_at(inner, samples, tensor)
        merging = MERGING if op.part == "forward" else MERGING_GRADIENTS
        num_bytes = (merging.once_bytes + merging.step_bytes * (context - 1)) * elements
        summed_s = moving_s(num_bytes, device, "add", "elementwise") + merging.kernels * (context - 1) * device.launch
        longer[op.part != "forward"] += max(0.0, context * piece_s - whole_s) + summed_s
    return longer


COPIED = 4
"""Times that a tensor is moved on the device for an all-to-all exchange. Before it the tensor's parts are ordered by
rank, after it they are joined along another dim; each takes a read and a write."""

IN_BLOCKS: tuple[ContextKind, ...] = ("ring", "all_gather")
"""Kinds of context parallelism in which a rank attends to the keys of one rank after the other, and merges the
results."""


@dataclass(frozen=True)
class Merging:
    """What merging attention over several blocks of keys takes: bytes for each element of the output, once and again
    for each block after the first, and the number of small kernels for each of these blocks."""

    once_bytes: float
    step_bytes: float
    kernels: int


MERGING = Merging(once_bytes=12.0, step_bytes=26.0, kernels=8)
"""Counted in executor/parallel/context_attention.py, which merges outputs in fp32. Once: to fp32 (2 bytes read, 4
written) and back. For each block: its output times a weight (2 + 4), the sum so far times another (4 + 4), and their
sum (4 + 4 + 4); and eight kernels on the logarithms of the sums of exponentials. Stacks that fuse elementwise kernels
move less of it, as of other traffic."""

MERGING_GRADIENTS = Merging(once_bytes=20.0, step_bytes=10.0, kernels=2)
"""Counted likewise for gradients of queries. Once: zeros in fp32 (4), the first block's gradients added to them (10),
and the cast to bf16 (6). For each block: its gradients added (2 + 4 + 4), and the packing of what is sent."""


def _divided(amount: Amount, by: float) -> Amount:
    fixed, per_sample, fixed_cut, per_sample_cut = amount
    return fixed / by, per_sample / by, fixed_cut / by, per_sample_cut / by
