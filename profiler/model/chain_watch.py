"""Watches a whole model run once: which layer module or function makes and reads which tensor."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..running.fake import FakeModel, TokenByTokenError
from ..running.gpu_kernel_emulation import Mode, device_of, tensors_in
from ..running.meters import NOTHING, Storages
from ..running.repeated_forwards import noting_repeated
from ..running.run_shapes import OutputSpec, Shapes, TensorSpec
from ..semantics.draws import draws
from ..semantics.producers import Producers, is_wrapped
from .layer_graph import wired
from .layer_units import Units
from .model_profile import Producer

_OF_SIZES = {f"new_{name}" for name in ("empty", "full", "ones", "zeros", "empty_strided")}
_OF_SIZES |= {f"{name}_like" for name in ("empty", "full", "ones", "zeros")}
"""Names of operators that read only the sizes of their inputs."""

Key = tuple[str, str, int]
"""(kind, name, call) of something that ran: a layer module, a glue function, or the loss."""

LOSS: Key = ("loss", "loss", 0)

FORWARD = "the forward"
"""How messages call the forward, as opposed to the loss."""


@dataclass
class CallEvent:
    """One layer module call, glue function call, or the loss."""

    key: Key
    operators: list[Any] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


class Cursor:
    """Which event is running, and in which layer of a chain.

    Events are found again by their key, not by counting: at another batch size a helper may run that is not needed
    at this one.
    """

    def __init__(self, last_keys: Sequence[Key] = (), calls: Sequence[Collection[tuple[str, int]]] = ()) -> None:
        """last_keys: of the last event of each layer, which may be a helper that does not run at every batch size.
        calls: of each layer's modules, which do."""
        self.index = -1
        self.key: Key = ("start", "", 0)
        self.layer = 0
        self._ended = True
        self._after = {key: i + 1 for i, key in enumerate(last_keys)}
        self._within: dict[Key, int] = {("module", *call): i for i, own in enumerate(calls) for call in own}

    def start(self, kind: str, name: str, call: int) -> None:
        """Note that an event begins. It has the number of the last one if that was a function which returned no
        tensor."""
        if self._ended:
            self.index += 1
            self.layer = self._after.get(self.key, self.layer)
        self.key = (kind, name, call)
        self.layer = max(self.layer, self._within.get(self.key, 0))
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the running event has returned, so that the next one gets a new number."""
        return self._ended

    def end(self) -> None:
        """Note that the running event has produced a tensor."""
        self._ended = True


@contextmanager
def stubbed(
    root: nn.Module, names: set[str], producers: Producers, stub: Callable[[str, int], Any | None]
) -> Iterator[None]:
    """Layer modules return stub(name, call) instead of running, where that is not None."""
    modules = {name: root.get_submodule(name) for name in names}
    for name, module in modules.items():
        module.__dict__["forward"] = _stub_forward(name, module.forward, producers, stub)
    try:
        yield
    finally:
        for module in modules.values():
            del module.__dict__["forward"]


def _stub_forward(
    name: str, forward: Callable[..., Any], producers: Producers, stub: Callable[[str, int], Any | None]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        output = stub(name, producers.calls(name)) if producers.depth == 1 else None
        return forward(*args, **kwargs) if output is None else output

    return run


@contextmanager
def recording_outputs(root: nn.Module, names: tuple[str, ...], cursor: Cursor, shapes: Shapes) -> Iterator[None]:
    """While it lasts, what each call of the named modules returns is noted in `shapes`, without its numbers."""

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kind, running, call = cursor.key
            if (kind, running) == ("module", name):
                shapes.outputs[name, call] = OutputSpec.of(output)

        return hook

    handles = [root.get_submodule(name).register_forward_hook(record(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Inputs:
    """Notes what the modules of a forward do with what they are given: which of them write into it, and what others
    write into it later."""

    def __init__(self, root: nn.Module, names: tuple[str, ...]) -> None:
        self._modules = {name: root.get_submodule(name) for name in names}
        self._given: list[tuple[str, torch.Tensor, int]] = []
        self._trained: dict[str, list[bool]] = {}
        self._running: list[int] = []
        self._objects: list[list[tuple[Any, list[Any]]]] = []
        self.writers: set[str] = set()
        self.changers: dict[str, str] = {}
        """Module -> what it changes of an object that it is given, in words."""
        self.changes_copies = ""
        """The first change that a module makes to a container or dataclass, in words. fully_shard gives the module a
        copy of these, with cast tensors."""
        self.changed_by_several: dict[str, list[str]] = {}
        """What several modules change besides the activations, in words -> these modules, in the order in which they
        ran."""
        self.gives_objects = False
        """Whether modules are given objects, which may hold tensors that are not seen there."""
        self.read_aside: list[str] = []
        """Modules that also keep what they return somewhere else, from where it is read."""
        self.transforms = ""
        """What uses torch.autograd.grad or torch.func on the model or a part of it: "the forward" or the loss; '' if
        neither."""
        self.overwrites = False
        """Whether anything writes into what a module or function has made before."""
        self.swaps = False
        """Whether the model calls torch.func.functional_call, which puts tensors in the place of a module's
        parameters."""
        self.differentiates = ""
        """What uses torch.autograd.grad, outside of torch.func: the forward or the loss; '' if neither."""
        self.hooks_inside = False
        """Whether code in a layer puts hooks on gradients."""
        self.hooks_between = False
        """Whether code between layers puts hooks on gradients."""
        self.read_again: list[str] = []
        """Places where a forward leaves something that the next forward reads."""
        self.repeats: list[tuple[int, int]] = []
        """(first, last) event of each part of the forward that the model itself repeats in backward, by calling
        checkpoint."""
        self.reentrant = False
        """Whether the model calls a reentrant checkpoint."""
        self.selective = False
        """Whether the model calls a checkpoint with a context_fn, as selective ones are."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, the modules are watched."""
        handles: list[RemovableHandle] = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._after, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def overwritten(self) -> set[str]:
        """Modules of which an input was written into after they began, or of which the set of trained parameters has
        changed."""
        written = {name for name, tensor, version in self._given if tensor._version != version}
        return written | {name for name, before in self._trained.items() if before != self._flags(name)}

    def _flags(self, name: str) -> list[bool]:
        return [parameter.requires_grad for parameter in self._modules[name].parameters()]

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(len(self._given))
        self._trained[name] = self._flags(name)
        leaves = tree_leaves((args, kwargs))
        self.gives_objects |= not all(isinstance(x, _SEEN) for x in leaves)
        self._given += [(name, x, x._version) for x in leaves if isinstance(x, torch.Tensor)]
        self._objects.append([(x, _held_by(x)) for x in _changeable((*args, *kwargs.values()))])

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if any(map(is_wrapped, tree_leaves((args, output)))):
            self.transforms = self.transforms or FORWARD
        for given, before in self._objects.pop():
            now = _held_by(given)
            if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
                kind = type(given).__name__
                what = f"a {kind}" if isinstance(given, _CONTAINERS) else f"attributes of an object of {kind}"
                self.changers.setdefault(name, what)
                if isinstance(given, _CONTAINERS) or is_dataclass(given):
                    self.changes_copies = self.changes_copies or f"{name} changes {what}"
        if any(x._version != version for own, x, version in self._given[self._running.pop() :] if own == name):
            self.writers.add(name)


_SEEN = (torch.Tensor, int, float, complex, str, bytes, slice, torch.dtype, torch.device, type(None))
"""Types of values that hold no other tensors."""

_CONTAINERS = (list, dict, deque)
"""Containers that code changes in place."""


def _changeable(given: Any) -> list[Any]:
    """The objects and containers that a module is given, also those within other containers: all that it may change."""
    if isinstance(given, (*_CONTAINERS, tuple)):
        parts = given.values() if isinstance(given, dict) else given
        inside = [found for part in parts for found in _changeable(part)]
        return inside if isinstance(given, tuple) else [given, *inside]
    is_object = hasattr(given, "__dict__") and not isinstance(given, torch.Tensor | nn.Module | type)
    return [given] if is_object and not callable(given) else []


def _held_by(given: Any) -> list[Any]:
    """All that an object or container holds, with the names of attributes and keys. Of an object also what containers
    in its attributes hold (a UserList has its items in one)."""
    if isinstance(given, dict):
        return [*given.keys(), *given.values()]
    if isinstance(given, (*_CONTAINERS, tuple)):
        return list(given)
    held = [*vars(given), *vars(given).values()]
    seen: set[int] = set()
    for own in held:  # the list grows in this loop
        if isinstance(own, (*_CONTAINERS, tuple)) and id(own) not in seen:
            seen.add(id(own))
            held += _held_by(own)
    return held


class ChainWatch(Mode):
    """Notes, per event, what is read and made while the whole model runs once."""

    def __init__(self, fake: FakeModel, units: Units, most_operators: int | None = None) -> None:
        """most_operators: of one event, or calls of one module, at which TokenByTokenError is raised."""
        super().__init__()
        self._most_operators = most_operators
        self.cursor = Cursor()
        self.events: list[CallEvent] = []
        self.shapes = Shapes()
        self.storages = Storages(fake.dtype)
        self.made: dict[int, list[tuple[Producer, int]]] = defaultdict(list)
        self.tensors: dict[int, torch.Tensor] = {}
        self.reads: dict[int, set[int]] = defaultdict(set)
        self.storage_made: dict[int, int] = {}
        self.storage_reads: dict[int, set[int]] = defaultdict(set)
        self.from_parameters: set[int] = set()
        self.from_batch: set[int] = set()
        self.producers = Producers(fake.module, units.names, on_produced=self._produced, on_start=self._start)
        self._parameters = {self.storages.number(p): name for name, p in reversed(list(fake.module.named_parameters()))}
        own = [*fake.module.named_parameters(), *fake.module.named_buffers()]
        self._held = {name: (x, x.untyped_storage()) for name, x in own}
        self._named = {self.storages.number(x): name for name, x in reversed(own)}
        self._written: set[str] = set()
        self._put: list[tuple[int, int, list[torch.Tensor]]] = []
        """(event, storage, the tensors put into it) of each x[...] = y between layers."""
        self.written_parts: list[tuple[int, int]] = []
        """(event, storage) of each other write into part of a tensor between layers, such as x[...].add_(y)."""
        self.written_inside: dict[tuple[int, int], None] = {}
        """(event, storage) of each write of a layer into a tensor that was made between layers."""
        self.ran: list[str] = []
        self.loss_from = 0
        self.returned: list[torch.Tensor] = []
        self.read_before_loss: set[str] = set()
        self.read_back: set[str] = set()
        """Parameters that autograd.grad reads to differentiate what was computed with them."""
        self.inputs = Inputs(fake.module, units.names)
        self._outputs = recording_outputs(fake.module, units.names, self.cursor, self.shapes)
        self._inputs = self.inputs.watched()

    def __enter__(self) -> "ChainWatch":
        self._outputs.__enter__()
        self._inputs.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inputs.__exit__(*error)
        self._outputs.__exit__(*error)

    def written(self) -> set[str]:
        """Parameters and buffers that anything has written into, or has given other numbers by setting their .data."""
        return self._written | {n for n, (p, held) in self._held.items() if p.untyped_storage()._cdata != held._cdata}

    @contextmanager
    def noting_repeated(self) -> Iterator[None]:
        """While it lasts, notes the events that the model itself repeats in backward, by calling checkpoint."""
        begun: list[int] = []

        def begins(in_contexts: bool) -> None:
            self.inputs.selective |= in_contexts
            begun.append(self.cursor.index + self.cursor.ended)

        def ends() -> None:
            first = begun.pop()
            if self.producers.depth == 0 and first < self.cursor.index:
                self.inputs.repeats.append((first, self.cursor.index))

        with noting_repeated(begins, ends):
            yield

    @property
    def running(self) -> str:
        """What runs now, the forward or the loss, in words."""
        return "the loss" if self.loss_from else FORWARD

    @contextmanager
    def reading_back(self) -> Iterator[None]:
        """While it lasts, parameters that are read count as read for a derivative (`read_back`), unless the event had
        read them before."""
        first = max(len(self.events) - 1, 0)
        before = {name for event in self.events[first:] for name in event.parameters}
        yield
        self.read_back |= {name for event in self.events[first:] for name in event.parameters} - before

    def start_loss(self, returned: list[torch.Tensor]) -> None:
        """Note that the module has returned these tensors, and that the loss begins."""
        self.returned = returned
        self._start(*LOSS)
        self.loss_from = self.cursor.index
        self.read_before_loss = set(self.events[-1].parameters)

    def is_of_numbers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on parameters, on random draws or on the batch, and not on sizes alone."""
        number = self.storages.number(tensor)
        return number in self.from_parameters or number in self.from_batch

    def graph(self) -> nx.DiGraph:
        """A graph of the events, by number, and of the tensors that are read after the event that made them; `storage`
        of such a node is the number of its storage. Tensors that depend on no parameter are left out: every stage makes
        them itself."""
        self._read_what_is_put()
        found = {}
        for number, made in self.storage_made.items():
            readers = {event for event in self.storage_reads.get(number, ()) if event > made}
            if readers and number in self.from_parameters:
                size = self.storages.sizes.get(number, NOTHING)
                found[number] = made, readers, 2 * size.elements + size.other_bytes
        graph = wired(len(self.events), found.values())
        nx.set_node_attributes(graph, {("tensor", i): number for i, number in enumerate(found)}, "storage")
        return graph

    def _read_what_is_put(self) -> None:
        """Make whoever reads a tensor after x[...] = y between layers a reader of y, too. Every stage repeats that
        assignment, and no function returns the result, so the right numbers can only be set in y."""
        for event, storage, what in reversed(self._put):
            readers = {reader for reader in self.storage_reads[storage] if reader > event}
            for tensor in what:
                number = self.storages.number(tensor)
                if number in self._parameters:
                    for reader in readers:
                        self.events[reader].parameters.add(self._parameters[number])
                if number in self.storage_made:  # not what the batch has given
                    self.storage_reads[number] |= readers
                if id(tensor) in self.made:
                    self.reads[id(tensor)] |= readers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := device_of(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        out = self.run(func, args, kwargs)
        if func.namespace == "prim" or not self.events:
            return out
        event = self.events[-1]
        here = self.cursor.index
        shapes = []
        tainted = draws(func)  # other stages would draw other numbers
        given = False
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            made = self.storage_made.get(self.storages.number(args[0]), here)
            self.inputs.overwrites |= made < here
            if (number := self.storages.number(args[0])) in self._named:
                self._written.add(self._named[number])
        if func._schema.is_mutable and event.key[0] == "glue":
            into, *what = tensors_in((args, kwargs))
            storage = self.storages.number(into)
            if event.key[1].endswith("__setitem__"):
                self._put.append((here, storage, what))
                if self.written_parts and self.written_parts[-1][1] in map(self.storages.number, what):
                    self.written_parts.pop()  # x[...] += y puts what it has written
            elif into.numel() * into.itemsize < into.untyped_storage().nbytes():
                self.written_parts.append((here, storage))
        elif func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            storage = self.storages.number(args[0])
            if self.events[self.storage_made.get(storage, here)].key[0] == "glue":
                self.written_inside[here, storage] = None
        for tensor in tensors_in((args, kwargs)):
            number = self.storages.number(tensor)
            shapes.append(tensor.shape)
            if number in self._parameters:
                event.parameters.add(self._parameters[number])
                tainted = True
                continue
            if func._overloadpacket.__name__ not in _OF_SIZES:
                tainted |= number in self.from_parameters
                given |= number in self.from_batch
            if number in self.storage_made:
                self.storage_reads[number].add(here)
            if id(tensor) in self.made:
                self.reads[id(tensor)].add(here)
        for tensor in tensors_in(out):
            number = self.storages.number(tensor, made=True)
            shapes.append(tensor.shape)
            if number not in self._parameters:
                self.storage_made.setdefault(number, here)
                if tainted:
                    self.from_parameters.add(number)
                if given:
                    self.from_batch.add(number)
        event.operators.append((func, tuple(shapes)))
        kind, name, _ = event.key
        self._check_loop(len(event.operators), name if kind == "module" else "")
        return out

    def _check_loop(self, number: int, module: str = "") -> None:
        if self._most_operators is not None and number >= self._most_operators:
            raise TokenByTokenError(module)

    def _start(self, kind: str, name: str, call: int) -> None:
        self._check_loop(call)
        if kind == "module" and name not in self.ran:
            self.ran.append(name)
        self.cursor.start(kind, name, call)
        if self.cursor.index == len(self.events):
            self.events.append(CallEvent(self.cursor.key))
        self.events[-1].key = self.cursor.key

    def _produced(self, producer: Producer, tensor: torch.Tensor) -> None:
        self.cursor.end()
        here = self.cursor.index
        if id(tensor) in self.made:
            self.reads[id(tensor)].add(here)  # handed on unchanged
        self.made[id(tensor)].append((producer, here))
        self.tensors[id(tensor)] = tensor
        self.shapes.tensors[producer] = TensorSpec.of(tensor)
        if producer.kind == "module":
            self.from_parameters.add(self.storages.number(tensor))
