"""Profile a model on fake tensors: its chain of layers, and what one layer of each class does and keeps.

No GPU and no memory are needed: the model is built on the meta device and run on fake tensors, in bfloat16, so that
tensors of the compute dtype can be told from those of a dtype of their own (fp32 losses, integer indices).
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from .chain import Chain, Crossing, Layer, observe, shapes_at
from .context_trial import context_problem
from .fake import DecidesByValuesError, FakeModel, fake_model, real_model
from .layer_run import LayerRun, Observation
from .lengths import at_seq_len
from .load import Batch, LoadedModel, without_garbage_collection
from .meters import NOTHING, Op, Size
from .mixed_precision import mixed_precision_problem
from .model_profile import (
    Amount,
    BatchTensor,
    Bytes,
    CollectiveProfile,
    Costs,
    CrossingTensor,
    Experts,
    LayerClass,
    LayerProfile,
    ModelProfile,
    OpPart,
    OpProfile,
    ParameterProfile,
    Producer,
    TensorCut,
)
from .positions import longest
from .run_shapes import Shapes
from .tensor_cuts import Found, common_degree, find_cuts, gathering_ways
from .tensor_rank import run_cut
from .tensor_trial import sequence_problem

Dim = Literal["batch", "sequence", "other"]

_SHORTEST = 16
"""Below this many tokens a quarter of the sequence is too short to run."""

_LONGEST_REAL = 256
"""Tokens per sample of a run on real tensors; longer ones follow from it and two shorter runs."""

_MOST_REAL_ELEMENTS = 500_000_000
"""Parameters of a model that is run on real tensors: 2 GB, and as much again for gradients."""

_BY_VALUES = "it decides by values, which change with the precision"


Progress = Callable[[str, int, int], None]
"""Called with (layer, layers done, layers in all) before a layer of each class is run alone."""


def trace(
    loaded: LoadedModel,
    *,
    seq_len: int | None = None,
    lengths: bool = False,
    progress: Progress = lambda layer, done, total: None,
) -> ModelProfile:
    """Profile of the model at `seq_len` tokens per sample (default: its own length).

    lengths: run it at two shorter lengths as well, so that at_seq_len gives the profile at any length.
    Raises ValueError in words where the model cannot be built, does not take its batch, or decides by values.
    """
    if seq_len is not None:
        loaded = loaded.with_seq_len(seq_len)
    with without_garbage_collection():
        try:
            return _on_fake_tensors(loaded, lengths, progress)
        except DecidesByValuesError as decision:
            return _on_real_tensors(loaded, str(decision), lengths, progress)


def _on_fake_tensors(loaded: LoadedModel, lengths: bool, progress: Progress) -> ModelProfile:
    try:
        return _profile(fake_model(loaded, torch.bfloat16), (), lengths, progress)
    except ValueError as error:
        note = f"profiled in float32, because it does not run in bfloat16: {error}"
        try:
            return _profile(fake_model(loaded, torch.float32), (note,), lengths, progress)
        except ValueError:
            raise error from None


def _on_real_tensors(loaded: LoadedModel, decision: str, lengths: bool, progress: Progress) -> ModelProfile:
    """Profile of the way that real numbers take through a model: one sample, the same in every batch."""
    elements = sum(parameter.numel() for parameter in fake_model(loaded, torch.float32).module.parameters())
    if elements > _MOST_REAL_ELEMENTS:
        raise ValueError(
            f"{loaded.source} decides by the values of its tensors what to compute, at {decision}, so it must be run "
            f"with real numbers; {elements:,} parameters are too many for that (at most {_MOST_REAL_ELEMENTS:,}). Let "
            "the decision depend on shapes or on the configuration, or profile a smaller version: model.py:small"
        )
    seq_len = loaded.seq_len
    if seq_len is not None and seq_len > _LONGEST_REAL:
        loaded, lengths = loaded.with_seq_len(_LONGEST_REAL), True
    note = (
        f"run on real tensors, because {decision} decides by values: what the other branch costs is not in the profile"
    )
    profile = _profile(real_model(loaded), (note,), lengths, progress)
    profile = profile.model_copy(update={"decides_by_values": decision})
    return profile if seq_len in (None, profile.seq_len) else at_seq_len(profile, seq_len)


def _profile(fake: FakeModel, notes: tuple[str, ...], lengths: bool, progress: Progress) -> ModelProfile:
    loaded = fake.loaded
    _check_trainable(fake)
    chain = observe(fake, 2, loaded.seq_len)
    sizes = _Sizes(fake, chain, loaded.seq_len, chain.shapes)
    _check_positions(loaded, sizes)
    firsts = sorted(set(chain.representatives()))
    found = _found_cuts(fake, chain, sizes, firsts)
    problem = mixed_precision_problem(fake, chain) if fake.mode is not None else _BY_VALUES
    profile = _profile_at(fake, chain, sizes, found, problem, notes, progress)
    profile = profile.model_copy(
        update={"context_problem": context_problem(fake, profile.expert_modules, profile.layers)}
    )
    if not lengths or loaded.seq_len is None or loaded.seq_len < _SHORTEST:
        return profile
    others = []
    for seq_len in (loaded.seq_len // 2, loaded.seq_len // 4):
        try:
            shorter = _Sizes(fake, chain, seq_len, shapes_at(fake, chain, 2, seq_len), sizes)
            others.append(_profile_at(fake, chain, shorter, found, problem, (), progress))
        except ValueError as error:
            told = f"holds one sequence length only, because at {seq_len} tokens: {error}"
            return profile.model_copy(update={"notes": (*profile.notes, told)})
    return profile.model_copy(update={"other_lengths": tuple(others)})


def _profile_at(
    fake: FakeModel,
    chain: Chain,
    sizes: "_Sizes",
    found: dict[int, Found],
    mixed_precision: str,
    notes: tuple[str, ...],
    progress: Progress,
) -> ModelProfile:
    loaded = fake.loaded
    firsts = sorted(found)
    class_of = {first: i for i, first in enumerate(firsts)}
    costed, seen = [], {}
    for done, first in enumerate(firsts):
        progress(chain.layers[first].name, done, len(firsts))
        layer_class, seen[first] = _layer_class(fake, chain, sizes, first, found[first])
        costed.append(layer_class)
    classes = _uniquely_named(costed)
    layers = tuple(
        LayerProfile(
            name=layer.name,
            layer_class=class_of[first],
            root=layer.root,
            modules=layer.units,
            parameters=layer.parameters,
        )
        for layer, first in zip(chain.layers, chain.representatives(), strict=True)
    )
    _check_complete(fake, layers)
    profile = ModelProfile(
        name=loaded.name,
        source=loaded.source,
        fingerprint="",
        seq_len=sizes.seq_len,
        torch_version=torch.__version__,
        classes=classes,
        layers=layers,
        tensors=_crossing_tensors(fake, chain, sizes, seen),
        ties=_ties(fake, layers),
        buffers=fake.buffers,
        batch=_batch_tensors(fake, sizes),
        returns_loss=loaded.loss is None,
        attention_modules=_attention_modules(chain, found),
        mixed_precision_problem=mixed_precision,
        smallest_micro_batch=2 if sizes.one.refused else 1,
        global_batch=loaded.global_batch,
        longest_seq_len=sizes.longest,
        notes=(
            *notes,
            *_batch_norms(fake),
            *chain.notes,
            *(note for i in firsts for note in found[i].notes),
            *_uncut(classes),
        ),
    )
    return profile.model_copy(update={"fingerprint": _fingerprint(profile)})


class _Sizes:
    """Shapes at two batch sizes (at a third when asked) and, for models with a sequence, at a second length."""

    def __init__(
        self, fake: FakeModel, chain: Chain, seq_len: int | None, two: Shapes, like: "_Sizes | None" = None
    ) -> None:
        self.seq_len = seq_len
        self.one = shapes_at(fake, chain, 1, seq_len)
        self.two = two
        self._fake, self._chain = fake, chain
        self._longer = None if like is not None else _at_other_length(fake, chain, seq_len)
        self._other = _other_length(seq_len)
        self._like = like or self

    @property
    def takes_other_lengths(self) -> bool:
        """Whether the model ran at a second length."""
        return self._like._longer is not None

    @property
    def longest(self) -> int | None:
        """Tokens per sample for which all tables of positions have rows; None if nothing says where one ends."""
        if self._like is not self:
            return self._like.longest
        if self._longer is None or self.seq_len is None or self._other is None:
            return None
        return longest(self.one.furthest, self.seq_len, self._longer.furthest, self._other)

    def at(self, size: int) -> Shapes:
        """Shapes at one, two or three samples."""
        return {1: self.one, 2: self.two}.get(size) or self._three

    @cached_property
    def _three(self) -> Shapes:
        if self._fake.mode is None or self.one.tensors.keys() != self.two.tensors.keys():
            return shapes_at(self._fake, self._chain, 3, self.seq_len)
        return self.two.one_more(self.one)

    def dims(self, crossing: Crossing) -> tuple[Dim, ...]:
        """What makes each dim of a crossing tensor larger."""
        if self._like is not self:
            return self._like.dims(crossing)
        one, two = (shapes.tensors[crossing.producer].shape for shapes in (self.one, self.two))
        return _dims(one, two, None if self._longer is None else self._longer.tensors[crossing.producer].shape)

    def sequence_dim(self, crossing: Crossing) -> int | None:
        """The one dim of a crossing tensor that grows with the sequence; None if there is none or more than one."""
        dims = self.dims(crossing)
        return dims.index("sequence") if dims.count("sequence") == 1 else None


def _at_other_length(fake: FakeModel, chain: Chain, seq_len: int | None) -> Shapes | None:
    """Shapes of one sample at another length; None where there is none that the model takes."""
    other = _other_length(seq_len)
    if other is None:
        return None
    try:
        return shapes_at(fake, chain, 1, other)
    except ValueError:
        return None


def _other_length(seq_len: int | None) -> int | None:
    """A shorter sequence: models with learned positions take none that is longer."""
    return seq_len // 2 if seq_len is not None and seq_len >= 2 else None


def _layer_class(
    fake: FakeModel, chain: Chain, sizes: _Sizes, index: int, found: Found
) -> tuple[LayerClass, Observation]:
    layer = chain.layers[index]
    whole = _whole_runs(fake, chain, sizes, index)
    tensor = sequence = None
    alone: tuple[Costs, ...] = ()
    without: tuple[Costs | None, ...] = ()
    cuts = found.cuts
    if cuts:
        degree = common_degree(found.cuts)
        assert degree is not None
        tensor = _costs(whole, _cut_runs(fake, chain, sizes, index, cuts, degree, whole), degree)
        if len(cuts) > 1:
            runs = (_cut_runs(fake, chain, sizes, index, (cut,), degree, whole) for cut in cuts)
            alone = tuple(_costs(whole, run, degree) for run in runs)
        cuts, sequence, without = _sequence_costs(fake, chain, sizes, index, cuts, degree, whole)
    layer_class = LayerClass(
        name=_class_name(fake, layer),
        parameters=_parameters(fake, layer),
        whole=_costs(whole),
        cuts=cuts,
        tensor=tensor,
        sequence=sequence,
        tensor_alone=alone,
        sequence_without=without,
        experts=_experts(whole),
        writes_input=layer.writes_input,
        writes_into_kept=whole[0].writes_into_kept,
        writes_into_attention=whole[0].writes_into_attention,
        input_overwritten=layer.input_overwritten,
    )
    return layer_class, whole[0]


def _whole_runs(fake: FakeModel, chain: Chain, sizes: _Sizes, index: int) -> list[Observation]:
    """Runs of a layer at two batch sizes: one and two samples, or two and three where one sample is copied less often
    (a transposed batch of one is as contiguous as before), which no other batch would follow."""

    def run(size: int) -> Observation:
        return LayerRun(fake, chain, index, sizes.at(size), size, sizes.seq_len).run()

    one, two = run(1), run(2)
    alike = [op.name for op in one.ops if not op.is_view] == [op.name for op in two.ops if not op.is_view]
    return [one, two] if alike else [two, run(3)]


def _cut_runs(
    fake: FakeModel,
    chain: Chain,
    sizes: _Sizes,
    index: int,
    cuts: tuple[TensorCut, ...],
    degree: int,
    like: Sequence[Observation],
    sequence_dims: dict[Producer, int] | None = None,
) -> list[Observation]:
    """The runs of a layer in one cut of it, at the batch sizes of `like`."""
    return [
        run_cut(fake, chain, index, sizes.at(run.size), run.size, sizes.seq_len, cuts, degree, sequence_dims)
        for run in like
    ]


def _sequence_costs(
    fake: FakeModel,
    chain: Chain,
    sizes: _Sizes,
    index: int,
    cuts: tuple[TensorCut, ...],
    degree: int,
    whole: Sequence[Observation],
) -> tuple[tuple[TensorCut, ...], Costs | None, tuple[Costs | None, ...]]:
    """Cuts that say where to gather, costs with the rest on a slice of the sequence, and [cut] -> those with that one
    left whole. None where no trial works."""
    if sizes.seq_len is None or sizes.seq_len % degree or not any(cut.rows for cut in cuts):
        return cuts, None, ()
    arriving = [c for c in chain.crossings if index in c.used_by and c.spec.requires_grad]
    dims = {c.producer: sizes.sequence_dim(c) for c in arriving}
    leaving = [sizes.sequence_dim(c) for c in chain.crossings if c.made_by == index]
    positions = set(dims.values())
    if len(positions) != 1 or None in positions:
        return cuts, None, ()
    sequence_dims = {producer: dim for producer, dim in dims.items() if dim is not None}

    def tried(way: tuple[TensorCut, ...]) -> Costs | None:
        try:
            runs = _cut_runs(fake, chain, sizes, index, way, degree, whole, sequence_dims)
        except ValueError:
            return None
        if sequence_problem(whole[0], runs[0], way, degree, leaving):
            return None
        return _costs(whole, runs, degree)

    for way in gathering_ways(fake, chain, index, cuts):
        found = tried(way)
        if found is not None:
            rest = [tuple(other for other in way if other is not cut) for cut in way]
            return way, found, tuple(tried(others) if others else None for others in rest)
    return cuts, None, ()


def _found_cuts(fake: FakeModel, chain: Chain, sizes: _Sizes, firsts: Sequence[int]) -> dict[int, Found]:
    """Cuts of each class's first layer; together they must allow a common degree and agree on tied parameters."""
    if fake.mode is None:
        return dict.fromkeys(firsts, Found())
    found = {}
    for index in firsts:
        seen = find_cuts(fake, chain, index, (sizes.one, sizes.two), sizes.seq_len)
        found[index] = seen if not seen.cuts or common_degree(seen.cuts) else _with_common_degree(chain, index, seen)
    return _agreeing_on_ties(fake, chain, found)


def _with_common_degree(chain: Chain, index: int, found: Found) -> Found:
    cuts: list[TensorCut] = []
    notes = list(found.notes)
    for cut in found.cuts:
        if common_degree([*cuts, cut]):
            cuts.append(cut)
        else:
            names = ", ".join((*cut.columns, *cut.rows))
            notes.append(f"{chain.layers[index].name}: {names} not cut, no small degree divides it and the others")
    return replace(found, cuts=tuple(cuts), notes=tuple(notes))


def _agreeing_on_ties(fake: FakeModel, chain: Chain, found: dict[int, Found]) -> dict[int, Found]:
    """A parameter with several readers is cut alike in all of them, or not at all."""
    named = dict(fake.module.named_parameters(remove_duplicate=False))
    ways: dict[int, set[int | None]] = defaultdict(set)
    for layer, first in zip(chain.layers, chain.representatives(), strict=True):
        representative = chain.layers[first]
        for name, like in zip(layer.parameters, representative.parameters, strict=True):
            ways[id(named[name])].add(_cut_dim(found[first].cuts, representative, like))
    agreed = {}
    for index, seen in found.items():
        layer = chain.layers[index]
        kept = []
        notes = list(seen.notes)
        for cut in seen.cuts:
            prefix = layer.root + "." if layer.root else ""
            if all(len(ways[id(named[prefix + name])]) == 1 for name in cut.sharded):
                kept.append(cut)
            else:
                notes.append(
                    f"{prefix}{cut.columns[0]}: not cut, because its weight is shared with a module that is not"
                )
        agreed[index] = replace(seen, cuts=tuple(kept), notes=tuple(notes))
    return agreed


def _cut_dim(cuts: Sequence[TensorCut], layer: Layer, name: str) -> int | None:
    relative = name.removeprefix(layer.root + ".") if layer.root else name
    return next((cut.sharded[relative] for cut in cuts if relative in cut.sharded), None)


def _uniquely_named(classes: Sequence[LayerClass]) -> tuple[LayerClass, ...]:
    """Classes of one module type are told apart by number: T5Block, T5Block.2, ..."""
    count: dict[str, int] = defaultdict(int)
    named = []
    for layer_class in classes:
        count[layer_class.name] += 1
        number = count[layer_class.name]
        name = layer_class.name if number == 1 else f"{layer_class.name}.{number}"
        named.append(layer_class.model_copy(update={"name": name}))
    return tuple(named)


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
            name=name.removeprefix(prefix), shape=tuple(named[name].shape), trainable=named[name].requires_grad
        )
        for name in layer.parameters
    )


def _costs(whole: Sequence[Observation], cut: Sequence[Observation] = (), degree: int = 1) -> Costs:
    """Costs fitted to runs at two batch sizes, whole and (where given) with weights cut by `degree`."""
    runs = [*whole, *cut]
    size = whole[0].size
    return Costs(
        operators=tuple(_op_profile(ops, degree, size) for ops in _aligned([run.ops for run in runs])),
        saved=_fit_bytes([run.saved for run in runs], degree, size),
        full=_fit_bytes([run.full for run in runs], degree, size),
        attention=_fit_bytes([run.attention for run in runs], degree, size),
        selective=_fit_bytes([run.selective for run in runs], degree, size),
        inputs=_fit_bytes([run.inputs for run in runs], degree, size),
        forward_transient=_fit_bytes([run.forward_transient for run in runs], degree, size),
        backward_transient=_fit_bytes([run.backward_transient for run in runs], degree, size),
        collectives=_collectives(cut),
    )


def _experts(whole: Sequence[Observation]) -> tuple[Experts, ...]:
    """Modules whose matmuls read parameters that are stacked over experts, one matrix each."""
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
                called=seen.called if all(run.experts[module].called == seen.called for run in whole) else "",
                attributes=seen.attributes,
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
        flops=_fit([op.flops for op in ops], degree, size),
        moved=_fit_bytes([op.moved for op in ops], degree, size),
        shape=shape,
    )


def _aligned(runs: Sequence[list[Op]]) -> list[tuple[Op, ...]]:
    """Operators that do work, one tuple of the same operator in each run."""
    working = [[op for op in ops if op.flops or op.moved != NOTHING] for ops in runs]
    names = [[op.name for op in ops] for ops in working]
    if all(n == names[0] for n in names):
        return list(zip(*working, strict=True))
    return _aligned_by_name(working)


def _aligned_by_name(runs: Sequence[list[Op]]) -> list[tuple[Op, ...]]:
    """The how-manieth operator of a name in a module stands for itself; one that is missing in a run costs nothing."""
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
    return Op(like.name, like.kind, like.module, like.backward, like.is_view, (), (), part=like.part)


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


def _fit_bytes(amounts: Sequence[Size], degree: int, size: int) -> Bytes:
    return Bytes(
        elements=_fit([amount.elements for amount in amounts], degree, size),
        other_bytes=_fit([amount.other_bytes for amount in amounts], degree, size),
        in_fp32=_fit([amount.in_fp32 for amount in amounts], degree, size),
    )


def _collectives(runs: Sequence[Observation]) -> tuple[CollectiveProfile, ...]:
    if not runs:
        return ()
    less, more = (run.collectives for run in runs)
    last = runs[0].saved_after
    return tuple(
        CollectiveProfile(
            kind=a.kind,  # type: ignore[arg-type]
            part=a.part,  # type: ignore[arg-type]
            tensor=_fit_bytes([a.tensor, b.tensor], 1, runs[0].size),
            repeated=a.after <= last,
            entry=a.entry,
        )
        for a, b in zip(less, more, strict=True)
    )


def _crossing_tensors(
    fake: FakeModel, chain: Chain, sizes: _Sizes, seen: dict[int, Observation]
) -> tuple[CrossingTensor, ...]:
    """seen: of each class what its first layer did; the others save the tensors of the same ordinal."""
    saved_by: dict[Producer, list[int]] = defaultdict(list)
    saved_in_fp32_by: dict[Producer, list[int]] = defaultdict(list)
    given_to: dict[Producer, list[int]] = defaultdict(list)
    for i, first in enumerate(chain.representatives()):
        arriving = [c.producer for c in chain.crossings if i in c.used_by]
        leaving = [c.producer for c in chain.crossings if c.made_by == i]
        for producer, is_given in zip(arriving, seen[first].given_arriving, strict=True):
            if is_given:
                given_to[producer].append(i)
        saves = [*seen[first].saves_leaving, *seen[first].saves_arriving]
        for producer, is_saved, in_fp32 in zip([*leaving, *arriving], saves, seen[first].saves_in_fp32, strict=True):
            if is_saved:
                saved_by[producer].append(i)
            if in_fp32:
                saved_in_fp32_by[producer].append(i)
    first_with: dict[int, int] = {}
    tensors = []
    for i, crossing in enumerate(chain.crossings):
        same = first_with.setdefault(crossing.storage, i)
        tensor = _crossing_tensor(fake, sizes, crossing)
        given = given_to[crossing.producer]
        savers, in_fp32_by = saved_by[crossing.producer], saved_in_fp32_by[crossing.producer]
        found = {
            "given_to": None if given == sorted(crossing.used_by) else tuple(given),
            "saved_by": tuple(savers),
            "saved_in_fp32_by": None if in_fp32_by == savers else tuple(in_fp32_by),
            "same_as": None if same == i else same,
        }
        tensors.append(tensor.model_copy(update=found))
    return tuple(tensors)


def _crossing_tensor(fake: FakeModel, sizes: _Sizes, crossing: Crossing) -> CrossingTensor:
    spec = sizes.one.tensors[crossing.producer]
    runs = [sizes.one, sizes.two]
    amounts = []
    for shapes in runs:
        seen = shapes.tensors[crossing.producer]
        elements = torch.Size(seen.shape).numel()
        amounts.append(Size(elements) if seen.dtype == fake.dtype else Size(0.0, float(elements * seen.dtype.itemsize)))
    return CrossingTensor(
        producer=crossing.producer,
        made_by=crossing.made_by,
        last_used_by=crossing.last_used_by,
        used_by=tuple(sorted(crossing.used_by)),
        shape=spec.shape,
        dims=sizes.dims(crossing),
        dtype=_dtype_name(spec.dtype, fake.dtype),
        requires_grad=spec.requires_grad,
        size=_fit_bytes(amounts, 1, 1),
    )


def _dims(one: Sequence[int], two: Sequence[int], longer: Sequence[int] | None) -> tuple[Dim, ...]:
    """What makes each dim larger; a dim that both do (tokens of all samples in one) counts as batch."""
    dims: list[Dim] = []
    for i, size in enumerate(one):
        if two[i] != size:
            dims.append("batch")
        elif longer is not None and longer[i] != size:
            dims.append("sequence")
        else:
            dims.append("other")
    return tuple(dims)


def _dtype_name(dtype: torch.dtype, compute: torch.dtype) -> str:
    return "compute" if dtype == compute else str(dtype).removeprefix("torch.")


def _ties(fake: FakeModel, layers: Sequence[LayerProfile]) -> tuple[tuple[str, ...], ...]:
    """Names of one parameter, in the order in which layers read it; names that no layer reads come last."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in fake.module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    order = {name: i for i, name in reversed(list(enumerate(n for layer in layers for n in layer.parameters)))}
    return tuple(
        tuple(sorted(group, key=lambda name: order.get(name, len(order)))) for group in names.values() if len(group) > 1
    )


def _batch_tensors(fake: FakeModel, sizes: _Sizes) -> tuple[BatchTensor, ...]:
    one = _named_tensors(fake.batch(1, sizes.seq_len))
    two = _named_tensors(fake.batch(2, sizes.seq_len))
    other = _other_length(sizes.seq_len)
    longer = None if other is None or not sizes.takes_other_lengths else _named_tensors(fake.batch(1, other))
    return tuple(
        BatchTensor(
            name=name,
            shape=tuple(tensor.shape),
            dims=_dims(tensor.shape, two[name].shape, None if longer is None else longer[name].shape),
            dtype=_dtype_name(tensor.dtype, fake.dtype),
        )
        for name, tensor in one.items()
    )


def _named_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    items: Any = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return {str(name): value for name, value in items if isinstance(value, torch.Tensor)}


def _attention_modules(chain: Chain, found: dict[int, Found]) -> tuple[str, ...]:
    """Full names of the modules that call fused attention, in every layer."""
    return tuple(
        ".".join(part for part in (layer.root, name) if part)
        for layer, first in zip(chain.layers, chain.representatives(), strict=True)
        for name in found[first].attention_modules
    )


def _uncut(classes: Sequence[LayerClass]) -> tuple[str, ...]:
    """A note on classes that hold weights, of which tensor parallelism can cut none."""
    uncut = [c for c in classes if not c.cuts and any(len(p.shape) > 1 for p in c.parameters)]
    names = dict.fromkeys(c.name.partition(".")[0] for c in uncut)
    if not names:
        return ()
    return (f"no weights to cut by tensor parallelism (no linear layers in column-row pairs) in: {', '.join(names)}",)


def _batch_norms(fake: FakeModel) -> tuple[str, ...]:
    """A note where statistics run over the micro-batch of one rank, so that they change with the layout."""
    modules = [name for name, m in fake.module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not modules:
        return ()
    return (
        f"{modules[0]} and {len(modules) - 1} others normalise over the micro-batch of one rank, so the numbers "
        "change with data parallelism and micro-batch, as in any framework; group norm would not",
    )


def _check_positions(loaded: LoadedModel, sizes: _Sizes) -> None:
    for name, (rows, highest) in sizes.one.furthest.items():
        if highest < rows:
            continue
        most = "" if sizes.longest is None else f": give --seq-len {sizes.longest} or less, or make the table longer"
        at = "its own batch" if sizes.seq_len is None else f"{sizes.seq_len} tokens per sample"
        raise ValueError(f"at {at} {loaded.source} reads row {highest} of {name}, which has {rows} rows{most}")


def _check_trainable(fake: FakeModel) -> None:
    if not any(p.requires_grad for p in fake.module.parameters()):
        raise ValueError(
            f"{fake.loaded.source} has no parameter with requires_grad=True, so there is nothing to train; "
            "return the module with trainable parameters"
        )


def _check_complete(fake: FakeModel, layers: Sequence[LayerProfile]) -> None:
    named = dict(fake.module.named_parameters(remove_duplicate=False))
    listed = {id(named[name]) for layer in layers for name in layer.parameters}
    missing = [name for name, parameter in named.items() if id(parameter) not in listed]
    assert not missing, f"parameters in no layer: {missing}"


def _fingerprint(profile: ModelProfile) -> str:
    """Hash of what a plan depends on: layers, classes, tensors, ties and batch; not of names, notes or versions."""
    told = {"name", "source", "fingerprint", "torch_version", "notes", "global_batch", "mixed_precision_problem"}
    told.add("context_problem")
    document = profile.model_dump(mode="json", exclude=told)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
