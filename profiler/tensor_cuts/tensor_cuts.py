"""Find what tensor parallelism may cut in a layer, from the data flow, and try it on fake tensors.

A group is a row module (it takes a slice of features and gives a partial sum) with the column modules that all its
input comes from, and with other rows that read the same (a low-rank adapter's first matrix beside its base). Whether
the layer still works with the group's weights cut is tried, and checked operator by operator: nothing between columns
and row may reduce over the cut features, and what a fused projection is split into is cut part by part. The same trial
decides whether the rest of the layer can run on a slice of the sequence.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..model.chain import LayerChain
from ..model.layer_run import LayerRun
from ..model.layer_units import has_backward_hooks
from ..model.model_profile import TensorCut
from ..running.fake import FakeModel
from ..running.meters import View
from ..running.run_shapes import Shapes
from .tensor_flow import (
    ByHeads,
    Door,
    Flow,
    Tap,
    batch_norm,
    by_heads_of,
    channels_of,
    columns_of,
    cut_storages,
    group_norms,
    is_attention,
    is_plain,
    kind_and_units,
    made_by,
    one_head_for_all,
    parts_of,
    read_directly,
    rows_of,
    sources,
)
from .tensor_modules import counts_of, features, has_weight, is_convolution, is_linear, is_product, output_dim
from .tensor_rank import CutRunError, layer_modules, run_cut
from .tensor_trial import (
    OTHER_OPERATORS,
    aligned,
    leading_problem,
    number_problem,
    ops_of_model,
    order_problem,
    reduction_problem,
    working,
)

SMALLEST_VOCABULARY = 1024
"""Embeddings with fewer rows (positions of short sequences, token types) are not worth a collective."""

_DEGREES = (2, 3, 5, 7)
"""Degrees that are tried on fake tensors. Numbers that none of these divides are not divided by any from 2 to 10."""

_OWN_LOOK_UP = "because its forward does more than look up what it is given, and go on element by element"

_DOES_NOT_RUN = "with its weights cut the layer does not run"


@dataclass(frozen=True)
class Found:
    """The cuts of one layer, and notes on what could not be cut."""

    cuts: tuple[TensorCut, ...] = ()
    notes: tuple[str, ...] = ()
    attention_modules: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    """Operators of the layer's forward with one sample, without views; () if it was not run."""


def find_cuts(fake: FakeModel, chain: LayerChain, index: int, shapes: Sequence[Shapes], seq_len: int | None) -> Found:
    """The cuts of layer `index`. shapes: those of runs with one and with two samples."""
    probe = _Probe(fake, chain, index, shapes[0], seq_len)
    flow = probe.flow()
    cuts: list[TensorCut] = []
    problems: dict[str, str] = {}
    products = [row for row, tap in flow.taps.items() if is_product(tap.module)]
    for row in sorted(products, key=lambda row: bool(read_directly(flow, row))):
        used = {name for cut in cuts for name in (*cut.columns, *cut.rows)}
        if row in used:
            continue
        outcome = probe.group_of(flow, row, used)
        if isinstance(outcome, TensorCut):
            cuts.append(outcome)
        elif outcome:
            problems[row] = outcome
    others = (*_head_cuts(probe, flow, cuts), *_embedding_cuts(probe, flow, shapes), *_table_cuts(probe, flow))
    for name, outcome in others:
        if isinstance(outcome, TensorCut):
            cuts.append(outcome)
        else:
            problems[name] = outcome
    noted = problems.keys() - {name for cut in cuts for name in (*cut.columns, *cut.rows, *_first_matrices(flow, cut))}
    notes = tuple(
        f"{probe.where(name)}: not cut by tensor parallelism, {problem}"
        for name, problem in problems.items()
        if name in noted
    )
    attention = dict.fromkeys(op.module for op in flow.ops if op.kind == "attention")
    notes += tuple(_passed_over(probe, flow, any(cut.kind == "attention" for cut in cuts) or bool(notes)))
    return Found(tuple(cuts), notes, tuple(attention), working(flow.ops))


def _passed_over(probe: "_Probe", flow: Flow, knows_attention: bool) -> Iterator[str]:
    """Notes on products that are in no pair of columns and row. knows_attention: attention is cut, or a note says why
    not."""
    products = [name for name, module in probe.modules.items() if is_product(module)]
    numbers = {name: number for number, name in flow.parameters.items()}
    read = {view.storage for op in flow.ops for view in op.inputs}
    repeated = [name for name in products if flow.calls.get(name, 0) > 1]
    own = [name for name in products if flow.calls.get(name) == 1 and name not in flow.taps]
    bare = [name for name in products if name not in flow.calls and numbers.get(f"{probe.where(name)}.weight") in read]
    for names, why in (
        (repeated, "they run more than once in it"),
        (own, "more than a product with their weights lies in their forwards"),
        (bare, "their weights are read in another way than by calling them"),
    ):
        if names:
            yield f"{probe.where('')}: {', '.join(names)} not cut by tensor parallelism, because {why}"
    if knows_attention or repeated or own or bare:
        return
    for name in dict.fromkeys(op.module for op in flow.ops if is_attention(op)):
        yield f"{probe.where(name)}: not cut by tensor parallelism, because no linear modules lie around its attention"


def _first_matrices(flow: Flow, cut: TensorCut) -> set[str]:
    """Products whose output a column is given as it is: the first matrices of adapters, whose second ones are cut."""
    return {name for column in cut.columns if column in flow.taps for name in read_directly(flow, column)}


def common_degree(cuts: Sequence[TensorCut]) -> int | None:
    """The smallest of the tried degrees that divides all units of all cuts; None if none does."""
    units = [unit for cut in cuts for unit in cut.units]
    return next((degree for degree in _DEGREES if all(unit % degree == 0 for unit in units)), None)


def gathering_ways(
    fake: FakeModel, chain: LayerChain, index: int, cuts: Sequence[TensorCut]
) -> list[tuple[TensorCut, ...]]:
    """The cuts with each choice of where the sequence is gathered: before the columns, or before the module around
    them, or around them and their rows.

    Attention modules that take shapes from their input (Hugging Face's) need the whole sequence at their door.
    """
    modules = layer_modules(fake, chain, index)

    def around(cut: TensorCut, names: tuple[str, ...]) -> TensorCut:
        shared = _around_all(names)
        # hooks there would see what each rank has of the gradient of all tokens, which is summed after them
        usable = cut.rows and shared and shared in modules and not has_backward_hooks(modules[shared])
        return cut.model_copy(update={"gather": shared}) if usable else cut

    ways = [tuple(cuts)]
    for with_rows in (False, True):
        doors = [around(cut, (*cut.columns, *(cut.rows if with_rows else ()))) for cut in cuts]
        of_attention = (door if cut.kind == "attention" else cut for door, cut in zip(doors, cuts, strict=True))
        ways += [tuple(of_attention), tuple(doors)]
    return [way for i, way in enumerate(ways) if way not in ways[:i]]


def _around_all(names: Sequence[str]) -> str:
    """Name of the innermost module around all of these; '' for the root of the layer."""
    parents = [name.split(".")[:-1] for name in names]
    return ".".join(a[0] for a in itertools.takewhile(lambda a: len(set(a)) == 1, zip(*parents, strict=False)))


class _Probe:
    """Runs of one layer at one sample, to see its data flow and to try cuts."""

    def __init__(self, fake: FakeModel, chain: LayerChain, index: int, shapes: Shapes, seq_len: int | None) -> None:
        self.fake = fake
        self.chain = chain
        self.index = index
        self.shapes = shapes
        self.seq_len = seq_len
        self.layer = chain.layers[index]
        self.modules = layer_modules(fake, chain, index)

    def where(self, name: str) -> str:
        """Full name of a module of the layer, for people; for the whole layer, that of the layer."""
        return ".".join(part for part in (self.layer.root, name) if part) or self.layer.name

    def flow(self, shapes: Shapes | None = None, size: int = 1) -> Flow:
        """Data flow of the layer as it is."""
        run = LayerRun(self.fake, self.chain, self.index, shapes or self.shapes, size, self.seq_len)
        taps: dict[str, Tap] = {}
        calls: dict[str, int] = defaultdict(int)
        given: list[tuple[torch.Tensor, str]] = []
        spans: dict[str, list[int]] = defaultdict(list)

        def mark(name: str) -> Callable[..., None]:
            return lambda *_: spans[name].append(len(run.recorder.ops)) if run.recorder.active else None

        def tap(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                # a router may be a linear layer that returns scores and logits
                if run.recorder.active and args and all(isinstance(x, torch.Tensor) for x in (args[0], output)):
                    calls[name] += 1
                    like = next((first for tensor, first in given if tensor is args[0]), name)
                    given.append((args[0], like))
                    number = run.storages.number
                    taps[name] = Tap(module, View.of(args[0], number(args[0])), View.of(output, number(output)), like)

            return hook

        doors: dict[str, Door] = {}

        def door(name: str) -> Callable[..., None]:
            def views(value: Any) -> dict[int, View]:
                leaves = enumerate(tree_leaves(value))
                return {i: View.of(x, run.storages.number(x)) for i, x in leaves if isinstance(x, torch.Tensor)}

            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                if run.recorder.active:
                    calls[name] += 1
                    doors[name] = Door(views((args, kwargs)), views(output))

            return hook

        tapped = {
            name
            for name, module in self.modules.items()
            if is_product(module) or (isinstance(module, nn.Embedding | nn.EmbeddingBag) and has_weight(module))
        }
        handles = [
            module.register_forward_hook(tap(name))
            if name in tapped
            else module.register_forward_hook(door(name), with_kwargs=True)
            for name, module in self.modules.items()
        ]
        for name in tapped:
            handles.append(self.modules[name].register_forward_pre_hook(mark(name)))
            handles.append(self.modules[name].register_forward_hook(mark(name), prepend=True))
        whole = run.run(backward=False)
        for handle in handles:
            handle.remove()
        if size == 1:
            self.looks_back = run.has_own_backward
            again = LayerRun(self.fake, self.chain, self.index, self.shapes, 1, self.seq_len)
            self.whole = again.run() if self.looks_back else whole
        parameters = {run.storages.number(p): name for name, p in self.fake.module.named_parameters()}
        once = {name: found for name, found in taps.items() if calls[name] == 1}
        for name, found in [*once.items()]:
            weights = [run.storages.number(found.module.get_parameter("weight")), *parameters]
            if not is_plain(found.module, found.input, weights, run.recorder.ops[slice(*spans[name])]):
                once[name] = replace(found, plain=False)
        once = {name: found for name, found in once.items() if found.plain or not is_product(found.module)}
        flow = Flow(once, whole.ops, parameters, whole.arrived, {n: d for n, d in doors.items() if calls[n] == 1})
        flow.calls.update(calls)
        flow.storages.add_nodes_from(tap.input.storage for tap in once.values())
        for op in whole.ops:
            if not op.is_view:
                pairs = itertools.product(op.inputs, op.outputs)
                flow.storages.add_edges_from((read.storage, made.storage) for read, made in pairs)
        return flow

    def group_of(self, flow: Flow, row: str, used: set[str]) -> TensorCut | str:
        """The cut that consists of a row and its columns, or the reason against it ("" if the module is not a row)."""
        group = columns_of(flow, row)
        by_heads = by_heads_of(flow, row) if group else ByHeads()
        if not isinstance(group, str) and by_heads.storages:  # a tensor may have as many rows by chance
            outcome = self._cut_of(flow, row, used, group, by_heads)
            return self._cut_of(flow, row, used, group, ByHeads()) if isinstance(outcome, str) else outcome
        if isinstance(group, str) and by_heads.storages:
            group = columns_of(flow, row, by_heads.storages)
        if isinstance(group, str):
            return group
        return self._cut_of(flow, row, used, group, by_heads)

    def _cut_of(
        self,
        flow: Flow,
        row: str,
        used: set[str],
        group: tuple[tuple[str, ...], set[int], tuple[str, ...]],
        by_heads: ByHeads,
    ) -> TensorCut | str:
        """The cut that consists of a row and these columns, or the reason against it."""
        columns, between, entries = group
        rows = rows_of(flow, row, columns, between) if columns else (row,)
        if not columns or used & {*columns, *entries, *rows}:
            return ""
        return self.try_group(flow, rows, columns, between, entries, by_heads)

    def try_group(
        self,
        flow: Flow,
        rows: tuple[str, ...],
        columns: tuple[str, ...],
        between: set[int],
        entries: tuple[str, ...],
        by_heads: ByHeads,
    ) -> TensorCut | str:
        """The cut of these columns and rows, with all that must be divided for it to work; or the reason against it."""
        shared = one_head_for_all(flow, rows[0], columns, between)
        columns, entries = tuple(name for name in columns if name not in shared), (*entries, *shared)
        parts = {}
        for column in columns:
            found = channels_of(flow, column) if is_convolution(flow.taps[column].module) else parts_of(flow, column)
            if isinstance(found, str):
                return found
            if len(found) > 1:
                parts[column] = found
        if norm := batch_norm(flow, self.modules, between):
            return f"because {norm}, which lies between its columns and it, keeps statistics of every feature"
        kind, units = kind_and_units(flow, rows[0], columns, parts, between)
        sharded: dict[str, int] = {}
        for column in columns:
            sharded |= self.sharded(column, output_dim(flow.taps[column].module), bias=True)
        for row in rows:
            sharded |= self.sharded(row, 1 - output_dim(flow.taps[row].module), bias=False)
        norms = group_norms(flow, self.modules, between)
        for name in norms:
            sharded |= self.sharded(name, 0, bias=True)
        entered = {column for column in columns if sources(flow, column) & set(entries)}
        read = partial(self._read_between, flow, rows, between, sharded)
        cut = TensorCut(
            kind=kind,
            columns=columns,
            rows=rows,
            parts=parts,
            inputs={column: "" if column in entered else flow.taps[column].like for column in columns},
            entries=entries,
            between=tuple(norms),
            partial=self._trained(read()),
            tables=by_heads.tables,
            door=by_heads.door,
            given=by_heads.given,
            returned=by_heads.returned,
            units=tuple(dict.fromkeys([*units, *norms.values()])),
            sharded=sharded,
        )
        return self._try_with_counts(cut, read(looked_up=True), self._narrowed(flow, columns, rows))

    def _trained(self, names: Iterable[str]) -> tuple[str, ...]:
        own = self._own
        return tuple(name for name in names if own[name].requires_grad)

    def _read_between(
        self, flow: Flow, rows: tuple[str, ...], between: set[int], sharded: dict[str, int], looked_up: bool = False
    ) -> tuple[str, ...]:
        """Names of parameters that are read, as they are or cast, together with what differs between ranks before the
        rows. looked_up: also those that are first read with something that is not trained, as a table is with
        indices."""
        differs = cut_storages(flow, between) - set(flow.parameters)
        named, own = dict(self.fake.module.named_parameters()), self._own
        names: dict[int, set[str]] = defaultdict(set)
        for name, parameter in own.items():
            names[id(parameter)].add(name)
        # Those of the flow are the first names: of a module that several layers hold, those of the first of them.
        known = {number: set(names[id(named[name])]) for number, name in flow.parameters.items()}
        trained = {storage for storage, requires_grad in flow.arriving.items() if requires_grad}
        found: set[str] = set()
        for op in flow.ops:
            read = {view.storage for view in op.inputs}
            if not op.is_view and read & trained:
                trained |= made_by(op)
            if read & differs and op.module not in rows:
                found |= {name for storage in read for name in known.get(storage, ())}
            elif read and (read <= set(known) or (looked_up and read & set(known) and not read & trained)):
                for storage in made_by(op):
                    known.setdefault(storage, set()).update(*(known.get(s, ()) for s in read))
        return tuple(sorted(found - set(sharded)))

    @cached_property
    def _own(self) -> dict[str, nn.Parameter]:
        """Parameters of the layer, by their names in it."""
        named = dict(self.fake.module.named_parameters(remove_duplicate=False))
        prefix = self.layer.root + "." if self.layer.root else ""
        return {name.removeprefix(prefix): named[name] for name in self.layer.parameters}

    def sharded(self, name: str, dim: int, bias: bool) -> dict[str, int]:
        """Name -> the dim that is cut, for the parameters of a cut module, and for their other names in this layer."""
        module = self.modules[name]
        cut = {id(module.weight): dim}
        if bias and getattr(module, "bias", None) is not None:
            cut[id(module.bias)] = 0
        return {name: cut[id(parameter)] for name, parameter in self._own.items() if id(parameter) in cut}

    def _try_with_counts(self, cut: TensorCut, read: Sequence[str], narrowed: Mapping[str, object]) -> TensorCut | str:
        """The cut with as few counts and parameters divided as the layer needs to run; or why it does not work. read:
        names of the parameters read between columns and rows. narrowed: what `_narrowed` found."""
        degree = common_degree([cut])
        if degree is None:
            return f"its {' and '.join(map(str, cut.units))} units cannot be shared evenly by 2 to 10 ranks"
        problems: list[str] = []

        def problem(chosen: Sequence[_Divided]) -> str:
            problems.append(self.problem(self._dividing(cut, chosen), degree))
            return problems[-1]

        if not problem(()):
            return self._dividing(cut, ())
        values = self._values(cut)
        own, kept = self._counts(cut, values)
        if own and not problem(own):
            return self._dividing(cut, _fewest(own, problem))
        for few in (*itertools.combinations(own, 1), *itertools.combinations(own, 2)):
            if not problem(few):
                return self._dividing(cut, few)
        for chosen in _wider(own, kept, self._by_units(cut, read, values)):
            if not problem(chosen):
                return self._dividing(cut, _fewest(chosen, problem))
        if narrowed and any(each.startswith(_DOES_NOT_RUN) for each in problems):
            cut = cut.model_copy(update=narrowed)
            if not self.problem(self._dividing(cut, own), degree):
                return self._dividing(cut, _fewest(own, problem))
        return min(problems, key=lambda problem: (problem.startswith(_DOES_NOT_RUN), problem == OTHER_OPERATORS))

    def _narrowed(self, flow: Flow, columns: Sequence[str], rows: Sequence[str]) -> dict[str, object]:
        """Fields of `TensorCut`: the module around columns and rows, and which tensors it is given with features in
        their last dim that columns read; {} if there are none, or if this module is the whole layer."""
        around, prefix = _around_all((*columns, *rows)), self.layer.root + "." if self.layer.root else ""
        if not around or prefix + around in self.layer.units or around not in flow.doors:
            return {}
        read = {flow.taps[name].input for name in columns if not is_convolution(flow.taps[name].module)}
        places = tuple(place for place, view in flow.doors[around].given.items() if view in read)
        return {"narrowed": around, "shown": places} if places else {}

    def _dividing(self, cut: TensorCut, chosen: Iterable["_Divided"]) -> TensorCut:
        """The cut, with these counts and parameters divided by the degree, and a Conv1D's own width, by which it
        reshapes."""
        attributes: dict[str, tuple[str, ...]] = {c: ("nf",) for c in cut.columns if hasattr(self.modules[c], "nf")}
        attributes |= dict.fromkeys(cut.between, ("num_groups", "num_channels"))
        sharded, own = dict(cut.sharded), self._own
        for name, what in chosen:
            if isinstance(what, str):
                attributes[name] = (*attributes.get(name, ()), what)
            else:
                sharded |= {other: what for other, parameter in own.items() if parameter is own[name]}
        shared = tuple(name for name in cut.partial if name not in sharded)
        return cut.model_copy(update={"attributes": attributes, "sharded": sharded, "partial": shared})

    def _values(self, cut: TensorCut) -> set[int]:
        """Numbers that may count what is cut: widths of columns and of their parts, and units."""
        widths = {features(self.modules[column])[1] for column in cut.columns}
        return widths | set(cut.units) | {width for parts in cut.parts.values() for width in parts}

    def _counts(self, cut: TensorCut, values: set[int]) -> tuple[tuple["_Divided", ...], tuple["_Divided", ...]]:
        """(module, attribute) of all these numbers in modules around the columns: (their own attributes, those of
        objects that they hold)."""
        names = dict.fromkeys(module for column in cut.columns for module in _around(column, cut))
        found = [
            (name, attribute)
            for name in names
            for attribute, value in counts_of(self.modules.get(name, nn.Module())).items()
            if value in values
        ]
        return tuple(c for c in found if "." not in c[1]), tuple(c for c in found if "." in c[1])

    def _by_units(self, cut: TensorCut, read: Iterable[str], values: set[int]) -> tuple["_Divided", ...]:
        """(parameter, dim) of parameters that are read between columns and rows, for dims that may have an entry for
        each unit."""
        own = self._own
        return tuple(
            (name, dim)
            for name in read
            if name.rpartition(".")[0] in self.modules
            for dim, size in enumerate(own[name].shape)
            if size in values and any(size % unit == 0 for unit in cut.units)
        )

    def problem(self, cut: TensorCut, degree: int) -> str:
        """Why the layer does not work with the cut, in words; "" if it does."""
        try:
            seen = run_cut(
                self.fake, self.chain, self.index, self.shapes, 1, self.seq_len, [cut], degree, backward=self.looks_back
            )
        except CutRunError as error:
            where = f"in {error.module}: " if error.module else ""
            return f"{_DOES_NOT_RUN} ({where}{_first_line(error.__cause__ or error)})"
        if [spec.shape for spec in seen.outputs] != [spec.shape for spec in self.whole.outputs]:
            return "with its weights cut the layer's output changes its shape"
        whole, trial = aligned(ops_of_model(self.whole), ops_of_model(seen))
        problem = reduction_problem(whole, trial, set(cut.rows))
        if problem or not cut.rows:
            return problem
        return (
            leading_problem(self.modules, whole, trial, cut)
            or order_problem(whole, trial, cut)
            or number_problem(whole, trial, set(cut.rows))
        )

    def staying_cut(self, head: TensorCut) -> TensorCut:
        """The cut of the head with an output that stays cut up to the loss, if a slice of the classes is enough for the
        loss; else the cut as it is."""
        apart, degree = head.model_copy(update={"stays_cut": True}), common_degree([head])
        assert degree is not None
        try:
            seen = run_cut(self.fake, self.chain, self.index, self.shapes, 1, self.seq_len, [apart], degree)
        except ValueError:
            return head
        gathers = any(collective.kind == "all_gather" for collective in seen.collectives)
        return head if gathers or not any(op.kind == "loss" for op in seen.ops) else apart


_Divided = tuple[str, str | int]
"""Something that is divided together with weights: (module, attribute) or (parameter, dim)."""


def _fewest(chosen: Sequence[_Divided], problem: Callable[[Sequence[_Divided]], str]) -> Sequence[_Divided]:
    """Those of `chosen` without which there is a problem; with all of them there is none."""
    for one in chosen:
        fewer = tuple(other for other in chosen if other != one)
        chosen = chosen if problem(fewer) else fewer
    return chosen


def _wider(
    own: tuple[_Divided, ...], kept: tuple[_Divided, ...], parameters: tuple[_Divided, ...]
) -> Iterator[tuple[_Divided, ...]]:
    """Further combinations to try after the modules' own counts: with counts of objects that they hold, and with
    parameters. One count may be left out: the number of query heads per key head may happen to be equal to it."""
    of_own, of_all = (
        ((*counts,), *itertools.combinations(counts, len(counts) - 1)) if counts else ((),)
        for counts in (own, (*own, *kept))
    )
    if kept:
        yield from of_all
    first_dims = tuple({name: (name, dim) for name, dim in reversed(parameters)}.values())
    for some in dict.fromkeys((first_dims, *((one,) for one in parameters))) if parameters else ():
        for counts in (*of_own, *of_all) if kept else of_own:
            yield (*counts, *some)


def _around(column: str, cut: TensorCut) -> list[str]:
    """Names of the modules around a column, from the innermost to the one around the whole cut."""
    found = [column.rpartition(".")[0]]
    while found[-1] != _around_all((*cut.columns, *cut.rows)):
        found.append(found[-1].rpartition(".")[0])
    return found


def _head_cuts(probe: _Probe, flow: Flow, cuts: Sequence[TensorCut]) -> list[tuple[str, TensorCut | str]]:
    """The projection to the vocabulary: the last linear of the model, whose output is gathered for the loss."""
    linears = [name for name, tap in flow.taps.items() if is_linear(tap.module)]
    used = {name for cut in cuts for name in (*cut.columns, *cut.rows)}
    if probe.index != len(probe.chain.layers) - 1 or not linears or linears[-1] in used:
        return []
    name = linears[-1]
    module = flow.taps[name].module
    width = features(module)[1]
    if width == 1:
        return []
    sharded = probe.sharded(name, output_dim(module), bias=True)
    inputs = {name: flow.taps[name].like}
    cut = TensorCut(kind="head", columns=(name,), inputs=inputs, units=(width,), sharded=sharded)
    outcome = _tried(probe, cut, f"{width} output features")
    return [(name, probe.staying_cut(outcome) if isinstance(outcome, TensorCut) else outcome)]


def _embedding_cuts(probe: _Probe, flow: Flow, shapes: Sequence[Shapes]) -> list[tuple[str, TensorCut | str]]:
    """Tables that the tokens of the batch are looked up in (positions do not grow with the batch)."""
    tables = [
        name
        for name, tap in flow.taps.items()
        if isinstance(tap.module, nn.Embedding) and tap.module.weight.shape[0] >= SMALLEST_VOCABULARY
    ]
    if not tables:
        return []
    larger = probe.flow(shapes[1], 2).taps
    outcomes: list[tuple[str, TensorCut | str]] = []
    for name in tables:
        rows = flow.taps[name].module.get_parameter("weight").shape[0]
        if not flow.taps[name].plain:
            outcomes.append((name, _OWN_LOOK_UP))
            continue
        if math.prod(larger[name].input.shape) == math.prod(flow.taps[name].input.shape):
            continue
        cut = TensorCut(kind="embedding", columns=(name,), units=(rows,), sharded=probe.sharded(name, 0, bias=False))
        outcomes.append((name, _tried(probe, cut, f"{rows} rows")))
    return outcomes


def _table_cuts(probe: _Probe, flow: Flow) -> list[tuple[str, TensorCut | str]]:
    """The large tables of embedding bags, as cuts or with the reason against it. Features of rows are added up
    separately, so each rank may have some of them."""
    outcomes: list[tuple[str, TensorCut | str]] = []
    for name, tap in flow.taps.items():
        table = tap.module
        if not isinstance(table, nn.EmbeddingBag) or table.num_embeddings < SMALLEST_VOCABULARY:
            continue
        if not tap.plain:
            outcomes.append((name, _OWN_LOOK_UP))
            continue
        if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            outcomes.append((name, "because it norms its rows, or its gradients are sparse"))
            continue
        width = table.embedding_dim
        cut = TensorCut(kind="table", columns=(name,), units=(width,), sharded=probe.sharded(name, 1, bias=False))
        outcomes.append((name, _tried(probe, cut, f"{width} features")))
    return outcomes


def _tried(probe: _Probe, cut: TensorCut, what: str) -> TensorCut | str:
    degree = common_degree([cut])
    if degree is None:
        return f"because 2 to 10 ranks cannot share its {what} evenly; padding to a multiple of 64 would help"
    return probe.problem(cut, degree) or cut


def _first_line(error: BaseException) -> str:
    return shorten(str(error).strip().split("\n")[0], 160, placeholder=" ...")
