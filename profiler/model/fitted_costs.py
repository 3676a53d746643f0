"""The costs of a layer at any batch size and tensor degree, fitted to runs of it; every amount is linear in both."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ..running.meters import NOTHING, Op, Size
from .layer_run import Collective, Observation
from .model_profile import Amount, Bytes, CollectiveProfile, Costs, Experts, OpPart, OpProfile, PartBytes


def fitted_costs(
    whole: Sequence[Observation], cut: Sequence[Observation] = (), degree: int = 1, parts: tuple[str, ...] = ()
) -> Costs:
    """Costs fitted to runs at two batch sizes, whole and (where given) with weights cut by `degree`. parts: submodules
    of the layer that can be recomputed by themselves."""
    runs = [*whole, *cut]
    size = whole[0].size
    for run in runs:
        _mark_parts(run, parts)
    return Costs(
        operators=tuple(_op_profile(ops, degree, size) for ops in _aligned([run.ops for run in runs])),
        saved=fit_bytes([run.saved for run in runs], degree, size),
        full=fit_bytes([run.full for run in runs], degree, size),
        attention=fit_bytes([run.attention for run in runs], degree, size),
        selective=fit_bytes([run.selective for run in runs], degree, size),
        part_bytes=_part_bytes(runs, parts, degree, size),
        part_peaks=_part_peaks(runs, parts, degree, size),
        inputs=fit_bytes([run.inputs for run in runs], degree, size),
        forward_transient=fit_bytes([run.forward_transient for run in runs], degree, size),
        backward_transient=fit_bytes([run.backward_transient for run in runs], degree, size),
        put_off=fit_bytes([run.put_off for run in runs], degree, size),
        spent=fit_bytes([run.spent for run in runs], degree, size),
        fused=fit_bytes([run.fused for run in runs], degree, size),
        fused_inputs=fit_bytes([run.fused_inputs for run in runs], degree, size),
        collectives=_collectives(cut, parts),
    )


def fitted_experts(whole: Sequence[Observation]) -> tuple[Experts, ...]:
    """The banks of experts that runs of a layer showed, with their number of rows fitted over the batch size."""
    experts = []
    for module, seen in whole[0].experts.items():
        routed = [run.experts[module].rows for run in whole]
        names = tuple(dict.fromkeys(seen.parameters))
        experts.append(
            Experts(
                module=module,
                count=seen.count,
                parameters=names,
                routed=_fit(routed, 1, whole[0].size),
                groups=seen.groups[0],
                chosen_groups=seen.groups[1],
                called=seen.called if all(run.experts[module].called == seen.called for run in whole) else "",
                attributes=seen.attributes,
                problem=seen.problem,
            )
        )
    return tuple(experts)


def _op_profile(ops: Sequence[Op], degree: int, size: int) -> OpProfile:
    first = ops[0]
    shape = None
    if all(op.shape is not None for op in ops):
        rows, inner, columns = (_fit([op.shape[i] for op in ops if op.shape], degree, size) for i in range(3))
        shape = (rows, inner, columns)
    return OpProfile(
        name=first.name,
        module=first.module,
        kind=first.kind,
        part=first.part,
        repeated=first.repeated,
        core=first.core,
        within=first.within,
        flops=_fit([op.flops for op in ops], degree, size),
        moved=fit_bytes([op.moved for op in ops], degree, size),
        shape=shape,
        kernels=max(1.0, ops[0].kernels - (size - 1) * (ops[1].kernels - ops[0].kernels)),
    )


def _aligned(runs: Sequence[list[Op]]) -> list[tuple[Op, ...]]:
    """Operators that do work, in tuples: the same operator in each run."""
    working = [[op for op in ops if op.flops or op.moved != NOTHING] for ops in runs]
    names = [[op.name for op in ops] for ops in working]
    if all(n == names[0] for n in names):
        return list(zip(*working, strict=True))
    counts = [Counter(map(_alike, ops)) for ops in working]
    pairs = list(zip(counts[::2], counts[1::2], strict=True))
    by_sample = {key for less, more in pairs for key in less | more if less[key] != more[key]}
    return _aligned_by_name([list(_as_one(ops, by_sample)) for ops in working])


_Alike = tuple[str, str, OpPart, bool, bool, str]


def _alike(op: Op) -> _Alike:
    return op.name, op.module, op.part, op.repeated, op.core, op.within


def _as_one(ops: Sequence[Op], by_sample: Collection[_Alike]) -> Iterator[Op]:
    """The operators in order. Those of `by_sample`, which run more often for more samples, become one operator with the
    sum of FLOPs and bytes, where the first of them is."""
    of_key: dict[_Alike, list[Op]] = defaultdict(list)
    for op in ops:
        of_key[_alike(op)].append(op)
    for op in ops:
        same = of_key[_alike(op)]
        if _alike(op) not in by_sample:
            yield op
        elif same[0] is op:
            moved = sum((each.moved for each in same), NOTHING)
            yield replace(op, flops=sum(each.flops for each in same), moved=moved, kernels=float(len(same)))


def _aligned_by_name(runs: Sequence[list[Op]]) -> list[tuple[Op, ...]]:
    """Operators of all runs, matched by name, module and number among those of this name there; one that is missing in
    a run costs nothing in it."""
    tables: list[dict[tuple[str, str, OpPart, int], Op]] = []
    order: dict[tuple[str, str, OpPart, int], None] = {}
    for ops in runs:
        count: dict[tuple[str, str, OpPart], int] = defaultdict(int)
        table: dict[tuple[str, str, OpPart, int], Op] = {}
        for op in ops:
            key = (op.name, op.module, op.part)
            table[*key, count[key]] = op
            count[key] += 1
        tables.append(table)
        order.update(dict.fromkeys(table))
    return [tuple(table.get(key) or _idle(key, tables) for table in tables) for key in order]


def _idle(key: tuple[str, str, OpPart, int], tables: Sequence[dict[tuple[str, str, OpPart, int], Op]]) -> Op:
    like = next(table[key] for table in tables if key in table)
    return Op(like.name, like.kind, like.module, like.backward, like.is_view, (), (), part=like.part, kernels=0.0)


def _fit(values: Sequence[float], degree: int, size: int) -> Amount:
    """(fixed, per sample, fixed / t, per sample / t) through values at `size` samples and one more, whole and cut."""
    less, more = values[0], values[1]
    per_sample = more - less
    fixed = less - size * per_sample
    if len(values) == 2:
        return (fixed, per_sample, 0.0, 0.0)
    cut_per_sample = values[3] - values[2]
    cut_fixed = values[2] - size * cut_per_sample
    share = degree / (degree - 1)
    divided_fixed = (fixed - cut_fixed) * share
    divided_per_sample = (per_sample - cut_per_sample) * share
    return (fixed - divided_fixed, per_sample - divided_per_sample, divided_fixed, divided_per_sample)


def fit_bytes(amounts: Sequence[Size], degree: int, size: int) -> Bytes:
    """A size in bytes, fitted through the sizes in the runs in the order that `_fit` takes them in."""
    return Bytes(
        elements=_fit([amount.elements for amount in amounts], degree, size),
        other_bytes=_fit([amount.other_bytes for amount in amounts], degree, size),
        in_fp32=_fit([amount.in_fp32 for amount in amounts], degree, size),
    )


def _mark_parts(run: Observation, parts: tuple[str, ...]) -> None:
    """Note on every operator the part of the layer that would run it again ('' if none does)."""
    for i, op in enumerate(run.ops):
        op.within = run.calls.within(op.call, i, parts) if run.calls is not None else ""


def _part_bytes(runs: Sequence[Observation], parts: tuple[str, ...], degree: int, size: int) -> tuple[PartBytes, ...]:
    """Bytes that parts of the layer save and are given, one entry for each combination of parts."""
    if not parts:
        return ()
    tables = [run.calls.sizes(parts) for run in runs if run.calls is not None]
    keys = sorted({key for table in tables for key in table})
    return tuple(
        PartBytes(
            saved_in=saved_in,
            given_to=given_to,
            size=fit_bytes([table.get((saved_in, given_to), NOTHING) for table in tables], degree, size),
        )
        for saved_in, given_to in keys
    )


def _part_peaks(runs: Sequence[Observation], parts: tuple[str, ...], degree: int, size: int) -> tuple[Bytes, ...]:
    """Peaks of memory during the backward of the parts, in the order in which `ModuleCalls.peaks` has them."""
    each = [
        run.calls.peaks(parts, [op for op in run.ops if op.backward], run.peak_of, run.saved)
        for run in runs
        if run.calls is not None and run.peak_of is not None
    ]
    return tuple(fit_bytes(peaks, degree, size) for peaks in zip(*each, strict=True))


def _collectives(runs: Sequence[Observation], parts: tuple[str, ...]) -> tuple[CollectiveProfile, ...]:
    if not runs:
        return ()
    last, calls = runs[0].saved_after, runs[0].calls
    return tuple(
        CollectiveProfile(
            kind=a.kind,  # type: ignore[arg-type]
            part=a.part,  # type: ignore[arg-type]
            tensor=fit_bytes([a.tensor, b.tensor], 1, runs[0].size),
            repeated=a.after <= last,
            within="" if calls is None else calls.within(a.call, a.after, parts, last=True),
            entry=a.entry,
        )
        for a, b in _paired(*(run.collectives for run in runs))
    )


def _paired(less: Sequence[Collective], more: Sequence[Collective]) -> Iterator[tuple[Collective, Collective]]:
    """Pairs of the same collective in both runs. If the runs differ in number (a module is called for each sample), all
    collectives of a kind count as one with the sum of their bytes."""
    if len(less) == len(more):
        yield from zip(less, more, strict=True)
        return
    for kind, part, entry in dict.fromkeys((each.kind, each.part, each.entry) for each in less):
        alike = [[x for x in run if (x.kind, x.part, x.entry) == (kind, part, entry)] for run in (less, more)]
        a, b = (replace(same[0], tensor=sum((x.tensor for x in same), NOTHING)) for same in alike)
        yield a, b
