"""Mixtures of experts: what one rank holds and computes of a layer's experts, and how tokens reach them and return."""

from dataclasses import dataclass, replace

import numpy as np

from ...profiler.machine.cluster import Device
from ...profiler.model.model_profile import Costs, Experts, LayerClass, amount_at
from ..arrays import Flags, Floats
from ..plan.shape import Shape
from .comm_cost import ONE_GROUP, ExpertGroups, GroupLinks, direct_s, exchange_s, places_reached
from .compute_cost import Amounts, OperatorTable, amounts_of
from .kernels import ExchangeRates

COUNT_BYTES = 8
"""Bytes of one expert's number of tokens. Ranks tell each other these numbers before they exchange tokens."""


@dataclass(frozen=True)
class Spread:
    """Parameter elements of a layer on one tensor rank, in three sizes for three purposes. stored: divided by the ranks
    that share the layer's other parameters, it gives what a rank stores. gathered: what is there while the layer runs.
    reduced: what data ranks gather and reduce, as the size that has the same traffic in the larger group of the other
    parameters."""

    stored: float
    gathered: float
    reduced: float


NO_ELEMENTS = Spread(0.0, 0.0, 0.0)


def spread(elements: float, of_experts: float, shape: Shape) -> Spread:
    """The sizes of a layer's `elements`, of which `of_experts` belong to experts. Each expert rank holds 1/expert of
    those, sharded over the ranks that hold the same experts."""
    if shape.expert == 1 or of_experts == 0.0:
        return Spread(elements, elements, elements)
    others = elements - of_experts
    same, all_ranks = shape.same_experts, shape.sharded_over
    held = of_experts / shape.expert
    moved = held * (1 - 1 / same) / (1 - 1 / all_ranks) if same > 1 and all_ranks > 1 else 0.0
    return Spread(others + of_experts * all_ranks / shape.experts_over, others + held, others + moved)


def on_one_rank(
    table: OperatorTable,
    at: Floats,
    products: tuple[tuple[Flags, int], ...],
    device: Device,
    expert: int,
    imbalance: float,
) -> Amounts:
    """Amounts of the operators as the busiest of the ranks that share the experts runs them.

    at: as from batches_at. products: for each bank of experts, which operators are products with its weights, and its
    number of experts. Of these a rank holds 1/expert, and it gets `imbalance` times the mean number of tokens. Each
    expert's tokens fill tiles of their own, so with few tokens for each the last tile of each is mostly empty.
    """
    elements = table.elements.copy()
    for mask, _ in products:
        elements[mask] *= np.array([1.0 / expert, imbalance, 1.0 / expert, imbalance])
    amounts = amounts_of(replace(table, elements=elements), at)
    flops, all_rows = amounts.flops, amounts.sides[0]
    is_weight = table.parts[2] > 0
    if device.kernels:
        groups = np.ones_like(all_rows)
        for mask, count in products:
            held = max(1, count // expert)
            flops[mask] *= imbalance
            each = np.where(is_weight[mask], 1, 0)  # the side that tokens are: the inner one of gradients of weights
            for index, side in zip(np.flatnonzero(mask).tolist(), each.tolist(), strict=True):
                amounts.sides[side, index] *= imbalance / held
                groups[index] = held
        return replace(amounts, groups=groups)
    for mask, count in products:
        held = max(1, count // expert)
        flops[mask] *= imbalance
        for index in np.flatnonzero(mask).tolist():
            rows = all_rows[index]
            if is_weight[index]:  # one product for each expert, its tokens summed over
                filled = held * _tiled(rows, device)
            else:
                each = imbalance * rows / held
                filled = np.where(each >= 1, held, imbalance * rows) * _tiled(each, device)
                flops[index] *= filled / np.where(rows > 0, imbalance * rows, 1.0)  # an expert may have got no tokens
            all_rows[index] = filled
    return amounts


def _tiled(rows: Floats, device: Device) -> Floats:
    tiles: Floats = np.ceil(np.maximum(rows, 1.0) / device.tile[0]) * device.tile[0]
    return tiles


def expert_products(layer_class: LayerClass, costs: Costs) -> tuple[tuple[Flags, int], ...]:
    """For each bank of experts: which operators of a class (in one of its modes) are products with its weights, and its
    number of experts."""
    return tuple((_products(costs, bank), bank.count) for bank in layer_class.experts)


def _products(costs: Costs, bank: Experts) -> Flags:
    return np.array([op.kind == "matmul" and _is_in(op.module, bank) for op in costs.operators], dtype=bool)


def routed_bytes(bank: Experts, costs: Costs, samples: float, slices: int, element_bytes: int) -> float:
    """Bytes that one rank sends to a bank of experts for one micro-batch: a copy of each token for every expert that it
    goes to. slices: number of parts of the sequence, of which the rank has one."""
    first = next((op for op in costs.operators if op.kind == "matmul" and _is_in(op.module, bank)), None)
    width = amount_at(first.shape[1], samples) if first is not None and first.shape is not None else 0.0
    return amount_at(bank.routed, samples) / slices * width * element_bytes


def copies(bank: Experts, tokens_per_sample: int) -> float:
    """Number of experts that each token goes to."""
    return amount_at(bank.routed, 1.0) / tokens_per_sample


def exchange_of(
    num_bytes: float,
    num_copies: float,
    links: GroupLinks,
    direct: bool,
    rates: ExchangeRates | None = None,
    tokens: float = 1.0,
    groups: ExpertGroups = ONE_GROUP,
) -> float:
    """Seconds of one exchange of tokens between the ranks that share experts: dispatch or combine, in forward or
    backward.

    num_bytes: bytes of all copies of tokens that a rank sends. direct: a token crosses the network once for each host
    with any of its experts, and where rates are known reaches each rank once (DeepEP, HybridEP); else it crosses once
    for each expert. Experts are taken to be drawn at random from a token's groups.
    """
    if direct and rates is not None and tokens > 0.0:
        row_bytes = num_bytes / (tokens * num_copies)
        return direct_s(tokens, row_bytes, num_copies, links, EXCHANGE_UNITS, rates, groups)
    return exchange_s(num_bytes, num_bytes * network_share(num_copies, links.group.hosts, direct, groups), links)


EXCHANGE_UNITS = 32
"""Multiprocessors that exchange tokens, in units of DeepEP's work: it uses 20 to 24 itself; HybridEP uses 16, each of
which moves twice as much (their authors' tables)."""


def groups_of(bank: Experts) -> ExpertGroups:
    """Groups of experts that a bank's router chooses from."""
    return ExpertGroups(bank.groups, bank.chosen_groups)


SENDING_UNITS = 20
"""Multiprocessors that an exchange of tokens keeps from the work that it hides behind: DeepSeek-V3 (arXiv 2412.19437),
section 3.2.2, "only 20 SMs are sufficient"; DeepEP's default."""


def network_share(num_copies: float, hosts: int, once_per_host: bool, groups: ExpertGroups = ONE_GROUP) -> float:
    """Share of the copies that cross the network. once_per_host: the copies of a token for one host cross it as one."""
    if hosts == 1 or num_copies <= 1 or not once_per_host:
        return 1.0
    return places_reached(hosts, num_copies, groups) / num_copies


def _is_in(module: str, bank: Experts) -> bool:
    return f"{module}.".startswith(f"{bank.module}.")
