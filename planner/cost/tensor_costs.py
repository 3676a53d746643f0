"""Costs of a layer with some of its tensor cuts applied, from runs with all cuts, with each cut alone, and with each
left out.

Cuts of one layer share no weight, and what lies between the columns and the rows of one is read by no other. So every
amount changes by the sum of what each cut changes alone; only the highest of several peaks is no sum.
"""

from collections import Counter

from ...profiler.model.model_profile import Amount, Bytes, CollectiveProfile, Costs, LayerClass, OpProfile, PartBytes
from .kept import kept

_Key = tuple[str, str, str, int]


def mode_costs(layer_class: LayerClass, chosen: tuple[int, ...], sequence: bool) -> Costs:
    """Costs of a layer with the cuts of these indices applied. sequence: all else runs on slices of the sequence; if
    not, it stays whole."""
    known = _known(layer_class)
    key = chosen, sequence
    if key not in known:
        known[key] = _combined(layer_class, chosen, sequence)
    return known[key]


@kept
def _known(layer_class: LayerClass) -> dict[tuple[tuple[int, ...], bool], Costs]:
    every = tuple(range(len(layer_class.cuts)))
    found: dict[tuple[tuple[int, ...], bool], Costs] = {((), False): layer_class.whole}
    if layer_class.tensor is not None:
        found[every, False] = layer_class.tensor
    if layer_class.sequence is not None:
        found[every, True] = layer_class.sequence
    if len(every) > 1:
        found |= {((i,), False): costs for i, costs in enumerate(layer_class.tensor_alone)}
        for i, costs in enumerate(layer_class.sequence_without):
            if costs is not None:
                found[(*every[:i], *every[i + 1 :]), True] = costs
    return found


def _combined(layer_class: LayerClass, chosen: tuple[int, ...], sequence: bool) -> Costs:
    if not sequence:
        assert layer_class.tensor_alone, f"the cuts of {layer_class.name} were not run one by one"
        return _changed(layer_class.whole, [layer_class.tensor_alone[i] for i in chosen], peaks_fall=True)
    assert layer_class.sequence is not None
    left = [costs for i, costs in enumerate(layer_class.sequence_without) if i not in chosen]
    return _changed(layer_class.sequence, [costs for costs in left if costs is not None], peaks_fall=False)


def _changed(base: Costs, alone: list[Costs], peaks_fall: bool) -> Costs:
    """`base` with all the changes that each of `alone` shows. peaks_fall: each change lowers peaks (or leaves them), so
    that together they are no higher than the lowest; else each may raise a peak to its own."""
    best = min if peaks_fall else max

    def peak(name: str) -> Bytes:
        peaks: list[Bytes] = [getattr(costs, name) for costs in alone]
        return best(peaks, key=lambda size: size.at(1, 2, 2))

    def total(name: str) -> Bytes:
        return _sum_of_bytes(getattr(base, name), [getattr(costs, name) for costs in alone])

    return Costs(
        operators=_operators(base, alone),
        saved=total("saved"),
        full=total("full"),
        attention=total("attention"),
        selective=total("selective"),
        part_bytes=_part_bytes(base, alone),
        part_peaks=_part_peaks(base, alone),
        inputs=total("inputs"),
        forward_transient=peak("forward_transient"),
        backward_transient=peak("backward_transient"),
        put_off=total("put_off"),
        spent=total("spent"),
        fused=None if any(costs.fused is None for costs in (base, *alone)) else total("fused"),
        fused_inputs=total("fused_inputs"),
        collectives=_collectives(base, alone),
    )


def _part_bytes(base: Costs, alone: list[Costs]) -> tuple[PartBytes, ...]:
    """Bytes that parts of the layer save and are given: those of `base` with all the changes that each of `alone`
    shows."""
    first, *tables = ({(item.saved_in, item.given_to): item.size for item in c.part_bytes} for c in (base, *alone))
    return tuple(
        PartBytes(
            saved_in=saved_in,
            given_to=given_to,
            size=_sum_of_bytes(
                first.get((saved_in, given_to), Bytes()),
                [table.get((saved_in, given_to), Bytes()) for table in tables],
            ),
        )
        for saved_in, given_to in sorted({key for table in (first, *tables) for key in table})
    )


def _part_peaks(base: Costs, alone: list[Costs]) -> tuple[Bytes, ...]:
    """[part] -> peak while its backward runs: the highest of what each of `alone` shows, and of `base` with all
    changes."""
    found = []
    for here, *others in zip(base.part_peaks, *(costs.part_peaks for costs in alone), strict=True):
        found.append(max([_sum_of_bytes(here, others), *others], key=lambda size: size.at(1, 2, 2)))
    return tuple(found)


def _collectives(base: Costs, alone: list[Costs]) -> tuple[CollectiveProfile, ...]:
    """Collectives of `base`, without those that any change removes, and with those that any change adds."""
    kept_ones = Counter(base.collectives)
    gone: Counter[CollectiveProfile] = Counter()
    new: Counter[CollectiveProfile] = Counter()
    for costs in alone:
        there = Counter(costs.collectives)
        gone += kept_ones - there
        new += there - kept_ones
    return tuple((Counter(base.collectives) - gone + new).elements())


def _numbered(costs: Costs) -> dict[_Key, OpProfile]:
    count: Counter[tuple[str, str, str]] = Counter()
    table: dict[_Key, OpProfile] = {}
    for op in costs.operators:
        key = op.name, op.module, op.part
        table[*key, count[key]] = op
        count[key] += 1
    return table


def _operators(base: Costs, alone: list[Costs]) -> tuple[OpProfile, ...]:
    first = _numbered(base)
    tables = [_numbered(costs) for costs in alone]
    keys = dict.fromkeys([*first, *(key for table in tables for key in table)])
    return tuple(_operator(first.get(key), [table.get(key) for table in tables]) for key in keys)


def _operator(base: OpProfile | None, alone: list[OpProfile | None]) -> OpProfile:
    """One operator with all changes; in a run in which it is missing it counts as doing nothing."""
    differing = [op for op in alone if op != base]
    like = base or next(op for op in alone if op is not None)
    if not differing:
        return like
    shapes = [op.shape for op in (base, *differing) if op is not None]
    shape = None
    if base is not None and all(s is not None for s in shapes) and None not in differing:
        rows, inner, columns = (
            _sum_of(base.shape[side], [op.shape[side] for op in differing if op is not None and op.shape])
            for side in range(3)
            if base.shape is not None
        )
        shape = rows, inner, columns
    elif base is None:
        shape = like.shape
    return like.model_copy(
        update={
            "flops": _sum_of(_flops(base), [_flops(op) for op in differing]),
            "moved": _sum_of_bytes(_moved(base), [_moved(op) for op in differing]),
            "shape": shape,
        }
    )


def _flops(op: OpProfile | None) -> Amount:
    return (0.0, 0.0, 0.0, 0.0) if op is None else op.flops


def _moved(op: OpProfile | None) -> Bytes:
    return Bytes() if op is None else op.moved


def _sum_of(base: Amount, others: list[Amount]) -> Amount:
    a, b, c, d = (x + sum(other[i] - x for other in others) for i, x in enumerate(base))
    return a, b, c, d


def _sum_of_bytes(base: Bytes, others: list[Bytes]) -> Bytes:
    return Bytes(
        elements=_sum_of(base.elements, [other.elements for other in others]),
        other_bytes=_sum_of(base.other_bytes, [other.other_bytes for other in others]),
        in_fp32=_sum_of(base.in_fp32, [other.in_fp32 for other in others]),
    )
