"""Costs of one class of layers: its first layer is run alone, whole and with the cuts of tensor parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..running.fake import FakeModel
from ..tensor_cuts.tensor_cuts import Found, common_degree, gathering_ways
from ..tensor_cuts.tensor_rank import run_cut
from ..tensor_cuts.tensor_trial import forward_ops, sequence_problem, working
from .chain import Layer, LayerChain
from .fitted_costs import fitted_costs, fitted_experts
from .frozen import unpacked
from .layer_run import LayerRun, Observation
from .model_profile import Costs, LayerClass, LayerPart, ParameterProfile, Producer, TensorCut
from .run_sizes import RunSizes

_Like = Callable[[tuple[TensorCut, ...]], Sequence[Observation]]
"""Takes the cuts that are applied; returns the runs of the layer that a run with them is compared with."""

_Columns = tuple[tuple[str, ...], ...]
"""Names of the columns of several cuts, by which the cuts are known."""


_NOT_ON_A_SLICE = "on which it does not run"


@dataclass(frozen=True)
class Costed:
    """A class of layers, and the runs of its first layer with nothing cut."""

    layer_class: LayerClass
    whole: list[Observation]
    unsliced: str = ""
    """Why its layers do not run on slices of the sequence, in words; '' if they do, or if it was not tried."""


def layer_class_of(
    fake: FakeModel, chain: LayerChain, sizes: RunSizes, index: int, found: Found, elsewhere: Costed | None = None
) -> Costed:
    """The class of layer `index`. found: what tensor parallelism may cut. elsewhere: the class at another length; where
    the layer does the same at this one with as many samples (that of a picture, say) it is the class here, too, and
    what ran on no slices of the sequence there is not tried on them."""
    layer = chain.layers[index]

    @cache
    def run(size: int) -> Observation:
        return LayerRun(fake, chain, index, sizes.at(size), size, sizes.seq_len).run()

    slices = elsewhere is None or elsewhere.layer_class.sequence is not None
    if elsewhere is not None and not slices and _did_as(run(elsewhere.whole[0].size), elsewhere.whole[0]):
        return elsewhere
    forward = found.forward
    if elsewhere is not None:
        forward = _forward_of_one(fake, chain, sizes, index) if elsewhere.whole[0].size != 1 else ()
    whole = _whole_runs(run, forward)
    tensor = sequence = None
    alone: tuple[Costs, ...] = ()
    without: tuple[Costs | None, ...] = ()
    unsliced = ""
    cuts, parts = found.cuts, _parts(layer, whole)
    names = tuple(part.name for part in parts)
    if cuts:
        degree = common_degree(found.cuts)
        assert degree is not None
        like = _runs_like(fake, chain, sizes, index, cuts, whole)

        cut_runs: dict[_Columns, Observation] = {}

        def costs(applied: tuple[TensorCut, ...]) -> Costs:
            runs = _cut_runs(fake, chain, sizes, index, applied, degree, whole)
            cut_runs[_columns(applied)] = runs[0]
            return fitted_costs(like(applied), runs, degree, names)

        tensor = costs(cuts)
        if len(cuts) > 1:
            alone = tuple(costs((cut,)) for cut in cuts)
        if slices:
            cuts, sequence, without, unsliced = _sequence_costs(
                fake, chain, sizes, index, cuts, degree, whole, like, names, cut_runs
            )
    layer_class = LayerClass(
        name=_class_name(fake, layer),
        parameters=_parameters(fake, layer),
        whole=fitted_costs(whole, parts=names),
        cuts=cuts,
        tensor=tensor,
        sequence=sequence,
        tensor_alone=alone,
        sequence_without=without,
        experts=fitted_experts(whole),
        parts=parts,
        writes_input=layer.writes_input,
        writes_into_kept=whole[0].writes_into_kept,
        writes_into_attention=whole[0].writes_into_attention,
        input_overwritten=layer.input_overwritten,
    )
    return Costed(unpacked(layer_class), whole, unsliced)


def _did_as(one: Observation, other: Observation) -> bool:
    """Whether two runs did the same: operators, sizes and all else that is compared of them."""

    def counted(run: Observation) -> Observation:
        # arguments may hold tensors, and in which part an operator is comes later
        ops = [replace(op, arguments=(), within="") for op in run.ops]
        return replace(run, ops=ops, calls=None, peak_of=None)

    return len(one.ops) == len(other.ops) and counted(one) == counted(other)


def _parts(layer: Layer, whole: Sequence[Observation]) -> tuple[LayerPart, ...]:
    """Submodules of a layer that can be recomputed by themselves: where it is one module, and alike in all runs."""
    if layer.units != (layer.root,):
        return ()
    runs = [(run.calls, [op for op in run.ops if not op.backward]) for run in whole]
    found = [calls.parts(forward) for calls, forward in runs if calls is not None]
    first = whole[0].calls
    if first is None or any(names != found[0] for names in found):
        return ()
    return tuple(LayerPart(name=name, reads_arriving=first.reads_arriving(name)) for name in found[0])


def _whole_runs(run: Callable[[int], Observation], forward: tuple[str, ...]) -> list[Observation]:
    """Runs of a layer at two batch sizes: one and two samples, or two and three if one sample is copied less often (a
    transposed batch of one stays contiguous), so that other batches would not follow from it.

    forward: operators that do work in the forward of one sample, if they are known: where they differ from those of two
    samples, one sample is not run.
    """
    two = run(2)
    if forward and forward != working(forward_ops(two)):
        return [two, run(3)]
    one = run(1)
    return [one, two] if working(one.ops) == working(two.ops) else [two, run(3)]


def _forward_of_one(fake: FakeModel, chain: LayerChain, sizes: RunSizes, index: int) -> tuple[str, ...]:
    return working(LayerRun(fake, chain, index, sizes.at(1), 1, sizes.seq_len).run(backward=False).ops)


def _runs_like(
    fake: FakeModel,
    chain: LayerChain,
    sizes: RunSizes,
    index: int,
    cuts: tuple[TensorCut, ...],
    whole: Sequence[Observation],
) -> _Like:
    """What runs with cuts are compared with: runs of the whole layer, or, if its logits stay cut (then the loss takes
    other operators), runs with that cut on a single rank."""
    apart = tuple(cut for cut in cuts if cut.stays_cut)
    alone = _cut_runs(fake, chain, sizes, index, apart, 1, whole) if apart else whole
    return lambda applied: alone if any(cut.stays_cut for cut in applied) else whole


def _cut_runs(
    fake: FakeModel,
    chain: LayerChain,
    sizes: RunSizes,
    index: int,
    cuts: tuple[TensorCut, ...],
    degree: int,
    like: Sequence[Observation],
    sequence_dims: dict[Producer, int] | None = None,
) -> list[Observation]:
    """Runs of a layer as one of `degree` ranks that apply these cuts, at the batch sizes of `like`."""
    return [
        run_cut(fake, chain, index, sizes.at(run.size), run.size, sizes.seq_len, cuts, degree, sequence_dims)
        for run in like
    ]


def _sequence_costs(
    fake: FakeModel,
    chain: LayerChain,
    sizes: RunSizes,
    index: int,
    cuts: tuple[TensorCut, ...],
    degree: int,
    whole: Sequence[Observation],
    like: _Like,
    parts: tuple[str, ...],
    cut_runs: dict[_Columns, Observation],
) -> tuple[tuple[TensorCut, ...], Costs | None, tuple[Costs | None, ...], str]:
    """(the cuts, which now say where the sequence is gathered; costs with all other work on a slice of the sequence;
    the same for each cut, with that cut left whole; why there are none, in words). Costs are None where no trial works.
    cut_runs: runs with some of the cuts on the whole sequence; those that are made here are added."""
    if sizes.seq_len is None or sizes.seq_len % degree or not any(cut.rows for cut in cuts):
        return cuts, None, (), ""
    if any(
        cut.door or cut.tables for cut in cuts
    ):  # a bias for each pair of tokens goes on to layers that need it whole
        return cuts, None, (), "because a bias for each pair of tokens goes on to layers that need all of it"
    arriving = [crossing for crossing in chain.arriving(index) if crossing.spec.requires_grad]
    dims = {c.producer: sizes.sequence_dim(c) for c in arriving}
    leaving = [sizes.sequence_dim(crossing) for crossing in chain.leaving(index)]
    positions = set(dims.values())
    if len(positions) != 1 or None in positions or not leaving:  # the last layer ends in a loss over all tokens
        return cuts, None, (), ""
    sequence_dims = {producer: dim for producer, dim in dims.items() if dim is not None}

    problems: list[str] = []

    def tried(way: tuple[TensorCut, ...]) -> Costs | None:
        def runs(of: Sequence[Observation]) -> list[Observation]:
            return _cut_runs(fake, chain, sizes, index, way, degree, of, sequence_dims)

        try:
            first = runs(whole[:1])
            if (key := _columns(way)) not in cut_runs:
                cut_runs[key] = _cut_runs(fake, chain, sizes, index, way, degree, whole[:1])[0]
            problem = sequence_problem(like(way)[0], cut_runs[key], first[0], way, degree, leaving)
            if not problem:
                return fitted_costs(like(way), [*first, *runs(whole[1:])], degree, parts)
        except ValueError as error:
            problem = f"{_NOT_ON_A_SLICE} ({str(error.__cause__ or error).splitlines()[0]})"
        problems.append(problem)
        return None

    for way in gathering_ways(fake, chain, index, cuts):
        found = tried(way)
        if found is not None:
            rest = [tuple(other for other in way if other is not cut) for cut in way]
            return way, found, tuple(tried(others) if others else None for others in rest), ""
    return cuts, None, (), min(problems, key=lambda problem: problem.startswith(_NOT_ON_A_SLICE))


def _columns(cuts: Sequence[TensorCut]) -> _Columns:
    return tuple(cut.columns for cut in cuts)


def _class_name(fake: FakeModel, layer: Layer) -> str:
    if layer.root:
        return type(fake.module.get_submodule(layer.root)).__name__
    if layer.units and layer.name not in ("embedding", "head"):
        return "+".join(dict.fromkeys(type(fake.module.get_submodule(unit)).__name__ for unit in layer.units))
    return layer.name


def _parameters(fake: FakeModel, layer: Layer) -> tuple[ParameterProfile, ...]:
    named = dict(fake.module.named_parameters(remove_duplicate=False))
    prefix = layer.root + "." if layer.root else ""
    return tuple(
        ParameterProfile(
            name=name.removeprefix(prefix),
            shape=tuple(named[name].shape),
            trainable=named[name].requires_grad,
            kept_as=fake.kept_as.get(name, ""),
        )
        for name in layer.parameters
    )
