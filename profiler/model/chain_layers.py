"""The layers of a model and what crosses between them, read off a watched forward run; and why they are no more."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..running.fake import FakeModel
from ..running.forward_state import Reached
from .chain import Crossing, Layer, LayerChain
from .chain_watch import CallEvent, ChainWatch
from .layer_graph import wired
from .layer_spans import LayerSpans, spans_of
from .layer_units import Units, has_backward_hooks
from .model_profile import Producer

_UNREAD = "never used by the forward"
_UNREAD_THIS_WAY = "not used on the way that this forward took (others may, as it is decided by values or draws)"
"""Of parameters, in words: of all forwards, or of one among several ways."""

_MOST_TOLD = 5
"""Most parameters, or modules with all of their parameters, that a note names."""


def build_chain(fake: FakeModel, units: Units, watch: ChainWatch) -> LayerChain:
    """The chain of a model whose forward was watched."""
    root, events = fake.module, watch.events
    found = spans_of(units, watch, watch.graph())
    _join_hooked(root, watch, found)
    spans, notes = found.each, [*units.notes, *found.notes]
    if len(spans) == 1 and not any(note.endswith("one layer") for note in notes):
        notes.append(_why_one(root, units, watch))
    crossings = _crossings(watch, spans)
    unread = _UNREAD if fake.mode is not None else _UNREAD_THIS_WAY
    layers = _layers(root, units, watch, spans, notes, unread)
    graph = wired(len(layers), ((c.made_by, c.used_by, c.num_bytes) for c in crossings))
    chain = LayerChain(
        units,
        layers,
        crossings,
        graph,
        signatures=(),
        shapes=watch.shapes,
        notes=tuple(notes),
        sharding_problem=_sharding_problem(fake, watch, layers),
        hooks_gradients=watch.inputs.hooks_inside,
        repeats_reentrantly=watch.inputs.reentrant,
        repeats_selectively=watch.inputs.selective,
        written=frozenset(watch.written()),
        read_again=tuple(watch.inputs.read_again),
    )
    parameters = dict(root.named_parameters(remove_duplicate=False))
    signatures = tuple(_signature(root, parameters, events, chain, index) for index in range(len(layers)))
    return replace(chain, signatures=signatures)


def _why_one(root: nn.Module, units: Units, watch: ChainWatch) -> str:
    """A note on why the model is one layer although no layers had to be joined."""
    name = type(root).__name__
    if watch.inputs.transforms:
        who = watch.inputs.transforms
        return f"{who} differentiates or maps the model (autograd.grad, torch.func), so all of it is one layer"
    if any(event.key[1] == "CheckpointFunction" for event in watch.events):
        return (
            f"{name} has its layers repeated by reentrant checkpoints, inside of which they are not seen "
            "(checkpoint(..., use_reentrant=False) shows them), so all of it is one layer"
        )
    if len(watch.ran) > 1:
        seen = {producer.name for producer in watch.shapes.tensors if producer.kind == "module"}
        unseen = next((name for name in watch.ran if name not in seen), None)
        if unseen is not None:
            return (
                f"what {unseen} returns is no tensor, nor a tuple, list or dict with any in it, and what crosses a "
                "cut is seen there only, so all of it is one layer"
            )
        idle = next((name for name in sorted(units.elements) if name not in watch.ran), "none of its layers")
        return f"the forward does not call {idle}, but what is inside of it, if anything, so all of it is one layer"
    if watch.ran:
        return f"{watch.ran[0]} is the only part of {name} that runs as a module, so all of it is one layer"
    return f"{name} computes with its parameters by itself, not through modules of its own, so all of it is one layer"


def _read_early(root: nn.Module, events: list[CallEvent], layers: tuple[Layer, ...]) -> str:
    """Name of a parameter that only one layer reads, before the first or after the last of the layer's modules runs; ''
    if there is none."""
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    alike = {name: group for group in aliases.values() for name in group}
    readers: dict[str, int] = defaultdict(int)
    for layer in layers:
        for name in {alike[name][0] for name in layer.parameters}:
            readers[name] += 1
    for layer in layers:
        span = events[layer.first : layer.last + 1]
        runs = [i for i, event in enumerate(span) if event.key[0] == "module"]
        inside = tuple(f"{unit}." for unit in layer.units)
        for i, event in enumerate(span):
            if runs and runs[0] <= i <= runs[-1]:
                continue
            for name in sorted(event.parameters):
                if readers[alike[name][0]] == 1 and all(n.startswith(inside) for n in alike[name]):
                    return name
    return ""


def _sharding_problem(fake: FakeModel, watch: ChainWatch, layers: tuple[Layer, ...]) -> str:
    """Why fully_shard cannot take the model's modules; '' if it can."""
    if fake.whole_because:
        return fake.whole_because
    if who := watch.inputs.differentiates:
        return f"{who} calls torch.autograd.grad, for which fully_shard does not gather parameters again"
    if watch.inputs.swaps:
        return "the forward calls torch.func.functional_call, whose tensors fully_shard replaces by its parameters"
    if changed := watch.inputs.changes_copies:
        return (
            f"{changed} that it is given, of which fully_shard gives it a copy (but not of a UserList or UserDict of "
            "collections)"
        )
    if early := _read_early(fake.module, watch.events, layers):
        return f"fully_shard gathers {early} when its module runs, and the forward reads it outside of that"
    if len(fake.trained_as) > 1:
        each = " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in fake.trained_as)
        return f"fully_shard takes parameters of one dtype, and {each}"
    for name, dtype in fake.trained_as:
        if dtype.is_complex:
            return f"fully_shard takes real parameters, and {name} is {str(dtype).removeprefix('torch.')}"
    scripted = [name for name, module in fake.module.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        return f"{scripted[0] or 'the model'} is scripted by torch.jit, whose modules take no hooks"
    return ""


def _join_hooked(root: nn.Module, watch: ChainWatch, found: LayerSpans) -> None:
    """Join the layers between which the output of a module with backward hooks would cross: a stage takes that output
    before torch has put the hooks on it."""
    hooked = any(map(has_backward_hooks, root.modules()))
    crossing = next((c for c in _crossings(watch, found.each) if _is_hooked(root, c)), None) if hooked else None
    if crossing is not None:
        first, last = found.each[crossing.made_by][0], found.each[max(crossing.used_by)][1]
        name = crossing.producer.name
        found.join(first, last, f"{name} has hooks on its backward, so it and what reads its output are one layer")
        _join_hooked(root, watch, found)


def _is_hooked(root: nn.Module, crossing: Crossing) -> bool:
    kind, name = crossing.producer.kind, crossing.producer.name
    return kind == "module" and has_backward_hooks(root.get_submodule(name))


def _crossings(watch: ChainWatch, spans: list[tuple[int, int]]) -> tuple[Crossing, ...]:
    layer_of = [i for i, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
    used: dict[Producer, set[int]] = defaultdict(set)
    made_by: dict[Producer, int] = {}
    covered: set[tuple[int, int]] = set()
    by_storage: dict[int, list[tuple[Producer, int]]] = defaultdict(list)
    specs = dict(watch.shapes.tensors)
    for key, made in watch.made.items():
        for producer, _ in made if watch.tensors[key].requires_grad else ():  # also by what is written into it later
            specs[producer] = replace(specs[producer], requires_grad=True)
        number = watch.storages.number(watch.tensors[key])
        if number not in watch.from_parameters:
            continue
        by_storage[number] += made
        for read in watch.reads.get(key, ()):
            _use(made, layer_of, read, used, made_by)
            covered.add((number, layer_of[read]))
    for number, reads in watch.storage_reads.items():
        for read in reads:
            if (number, layer_of[read]) not in covered and layer_of[watch.storage_made[number]] < layer_of[read]:
                _use(sorted(by_storage.get(number, ()), key=lambda m: m[1]), layer_of, read, used, made_by)
    storage_of = {producer: number for number, made in by_storage.items() for producer, _ in made}
    found = [Crossing(p, made_by[p], max(used[p]), frozenset(used[p]), specs[p], storage_of[p]) for p in used]
    order = {p: i for i, p in enumerate(specs)}
    return tuple(sorted(found, key=lambda c: order[c.producer]))


def _use(
    made: list[tuple[Producer, int]],
    layer_of: list[int],
    read: int,
    used: dict[Producer, set[int]],
    made_by: dict[Producer, int],
) -> None:
    """Note that a layer reads a tensor of the last producer in an earlier layer; nothing if the reading layer has made
    the tensor itself before."""
    reader = layer_of[read]
    earlier = [(producer, event) for producer, event in made if event <= read]
    if earlier and layer_of[earlier[-1][1]] < reader:
        producer, event = earlier[-1]
    else:
        before = [(producer, event) for producer, event in made if layer_of[event] < reader]
        if not before:
            return
        producer, event = before[-1]
    used[producer].add(reader)
    made_by[producer] = layer_of[event]


def _layers(
    root: nn.Module, units: Units, watch: ChainWatch, spans: list[tuple[int, int]], notes: list[str], unread_words: str
) -> tuple[Layer, ...]:
    names = dict(root.named_parameters(remove_duplicate=False))
    order = {name: i for i, name in enumerate(names)}
    canonical = {id(p): name for name, p in root.named_parameters()}
    reads = [{id(names[n]) for e in watch.events[first : last + 1] for n in e.parameters} for first, last in spans]
    read_somewhere = set().union(*reads)
    read_anywhere: set[int] = set()
    lost = watch.inputs.overwritten()
    if Reached(root).iterators:  # what is taken from one cannot be put back
        lost |= {name for name in watch.ran if Reached(root.get_submodule(name)).iterators}
    layers = []
    for (first, last), read_here in zip(spans, reads, strict=True):
        span = watch.events[first : last + 1]
        calls = tuple((e.key[1], e.key[2]) for e in span if e.key[0] == "module")
        own = tuple(dict.fromkeys(name for name, _ in calls))
        within = (root.get_submodule(unit).named_parameters(unit, remove_duplicate=False) for unit in own)
        # A module that many layers hold is part of those that use it.
        parameters = {n: p for found in within for n, p in found if id(p) in read_here or id(p) not in read_somewhere}
        present = {id(p) for p in parameters.values()}
        for event in span:
            for name in event.parameters:
                if id(names[name]) not in present:
                    parameters[canonical[id(names[name])]] = names[name]
        read_anywhere |= {id(p) for p in parameters.values()}
        single = len(own) == 1 and all(n.startswith(own[0] + ".") for n in parameters)
        root_name = own[0] if single else ""
        read = tuple(sorted(parameters, key=order.__getitem__))
        writes, overwritten = (not names.isdisjoint(own) for names in (watch.inputs.writers, lost))
        layers.append(Layer("", root_name, own, calls, read, first, last, span[-1].key, writes, overwritten))
    unread = tuple(name for name, p in names.items() if id(p) not in read_anywhere)
    if unread:
        notes.append(f"{unread_words}, kept with the last layer: {_told(unread, names)}")
        layers[-1] = replace(layers[-1], root="", parameters=(*layers[-1].parameters, *unread))
    return _named([_name(layer, i, len(layers), units, root) for i, layer in enumerate(layers)], layers)


def _told(some: Sequence[str], names: Iterable[str]) -> str:
    """A list of these parameters for people: whole modules by name where all of their parameters are among them, the
    outermost ones, each with how many."""
    inside, all_inside = (Counter(place for name in each for place in _places(name)) for each in (some, names))
    groups = Counter(next(place for place in _places(name) if inside[place] == all_inside[place]) for name in some)
    told = [f"{place} ({count} parameters)" if count > 1 else place for place, count in groups.items()]
    more = [f"{len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
    return ", ".join((*told[:_MOST_TOLD], *more))


def _places(name: str) -> list[str]:
    """The names of all modules around a parameter, the outermost first, and then its own."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _named(names: list[str], layers: list[Layer]) -> tuple[Layer, ...]:
    """The layers, each with a name of its own: one that runs again gets the number of its run."""
    runs = [names[:i].count(name) + 1 for i, name in enumerate(names)]
    return tuple(
        replace(layer, name=name if run == 1 else f"{name} (run {run})")
        for layer, name, run in zip(layers, names, runs, strict=True)
    )


def _name(layer: Layer, index: int, num_layers: int, units: Units, root: nn.Module) -> str:
    if not layer.units:
        return type(root).__name__
    loose = bool(units.elements) and not any(unit in units.elements for unit in layer.units)
    if loose and index == num_layers - 1:
        return "head"
    if len(layer.units) == 1:
        return layer.units[0]
    embeds = any(isinstance(m, nn.Embedding) for unit in layer.units for m in root.get_submodule(unit).modules())
    if loose and index == 0 and embeds:
        return "embedding"
    return "+".join(layer.units) if len(layer.units) <= 3 else f"{layer.units[0]}..{layer.units[-1]}"


def _signature(
    root: nn.Module, parameters: dict[str, nn.Parameter], events: list[CallEvent], chain: LayerChain, index: int
) -> tuple[Any, ...]:
    """What must be equal for two layers to be of one class."""
    layer = chain.layers[index]
    prefix = layer.root + "." if layer.root else ""
    return (
        tuple(type(root.get_submodule(unit)) for unit in layer.units),
        tuple(tuple(e.operators) for e in events[layer.first : layer.last + 1]),
        tuple((n.removeprefix(prefix), parameters[n].shape, parameters[n].requires_grad) for n in layer.parameters),
        tuple(crossing.spec for crossing in chain.arriving(index)),
        tuple(crossing.spec for crossing in chain.leaving(index)),
        layer.writes_input,
        layer.input_overwritten,
    )
