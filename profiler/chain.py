"""The chain of layers of a model, and the tensors that cross from one to a later one, seen in one forward run.

Layers follow the elements of the outermost ModuleLists, ModuleDicts and Sequentials; what runs before, between and
after them makes a layer per gap. An element that itself holds several blocks of one type (a stage of a ResNet or Swin,
a level of a U-Net) is opened, unless more bytes cross between its blocks than around it (the experts of a mixture).
Without any container every child with parameters is a layer. Code between layer modules ("glue") joins a neighbour,
where the fewest bytes cross.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from .as_on_gpu import Mode
from .fake import FakeModel
from .load import Batch
from .meters import Storages
from .model_profile import Producer
from .positions import Positions
from .producers import Producers

Key = tuple[str, str, int]
"""(kind, name, call) of something that ran: a layer module, a glue function, or the loss."""

_MORE_BYTES = 1.1
"""Cutting between the blocks of an opened element may carry this many times what is carried around it."""

LOSS: Key = ("loss", "loss", 0)


@dataclass(frozen=True)
class Units:
    """Outermost modules that are never cut (they have parameters), and which of them are layers on their own."""

    names: tuple[str, ...]
    elements: frozenset[str]
    opened: tuple[str, ...] = ()
    """Elements of a container that hold blocks of their own, so that these are the units."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorSpec:
    """What is needed to make a tensor like another one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] = ()
    """Of a tensor without gaps or overlaps; () for others, which are made anew without."""
    numbers: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """Of a real tensor (see real_model); None for fake ones."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """Spec of a tensor."""
        numbers = None
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                numbers = tensor.detach().clone()
        strides = tensor.stride() if _is_dense(tensor) else ()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, strides, numbers)

    def blank(self) -> torch.Tensor:
        """A new tensor of this layout and dtype (and of these numbers, where there are any) without a gradient."""
        if self.numbers is not None:
            return self.numbers.clone()
        if not self.strides:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)

    def one_more(self, less: "TensorSpec") -> "TensorSpec":
        """At one sample more; less: at one fewer. Every dim grows evenly, and their order in memory stays."""
        shape = tuple(2 * size - before for size, before in zip(self.shape, less.shape, strict=True))
        strides = [0] * len(self.strides)
        expected = 1
        for stride, size, dim in sorted(zip(self.strides, self.shape, range(len(shape)), strict=False)):
            strides[dim] = stride if size == shape[dim] == 1 else expected
            expected *= shape[dim]
        return TensorSpec(shape, self.dtype, self.requires_grad, tuple(strides))

    def empty(self) -> torch.Tensor:
        """A new tensor of this spec, like one that a module made: no leaf, so it may be changed in place."""
        return self.blank().requires_grad_(self.requires_grad).clone()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, each once, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class OutputSpec:
    """What a layer module returned: its structure, with specs in place of tensors."""

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(cls, output: Any) -> "OutputSpec":
        """Spec of an output."""
        leaves, tree = tree_flatten(output)
        return cls(tuple(TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves), tree)

    def one_more(self, less: "OutputSpec") -> "OutputSpec":
        """At one sample more; less: at one fewer."""
        pairs = zip(self.leaves, less.leaves, strict=True)
        leaves = (x.one_more(before) if isinstance(x, TensorSpec) else x for x, before in pairs)
        return OutputSpec(tuple(leaves), self.tree)

    def empty(self) -> Any:
        """A new output of this spec."""
        return tree_unflatten([x.empty() if isinstance(x, TensorSpec) else x for x in self.leaves], self.tree)


@dataclass
class Shapes:
    """What one run at one batch size and length produced."""

    outputs: dict[tuple[str, int], OutputSpec] = field(default_factory=dict)
    tensors: dict[Producer, TensorSpec] = field(default_factory=dict)
    refused: bool = False
    """Whether something in the model refuses a batch like this one (see as_on_gpu)."""
    furthest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of tables that are read by position: rows, and the highest that is read (see positions)."""
    _stand_ins: dict[tuple[str, int], Any] = field(default_factory=dict)

    def one_more(self, less: "Shapes") -> "Shapes":
        """What a run with one sample more would produce, from this one and one with one fewer; for fake tensors."""
        return Shapes(
            outputs={key: output.one_more(less.outputs[key]) for key, output in self.outputs.items()},
            tensors={key: spec.one_more(less.tensors[key]) for key, spec in self.tensors.items()},
        )

    def stand_in(self, name: str, call: int) -> Any:
        """What may pass for the output of a layer module that does not run: always the same one, to save time."""
        if (name, call) not in self._stand_ins:
            self._stand_ins[name, call] = self.outputs[name, call].empty()
        return self._stand_ins[name, call]


@dataclass
class Event:
    """One layer module call, glue function call, or the loss."""

    key: Key
    operators: list[Any] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Crossing:
    """A tensor that is made in one layer and read in a later one."""

    producer: Producer
    made_by: int
    last_used_by: int
    used_by: frozenset[int]
    spec: TensorSpec
    storage: int


@dataclass(frozen=True)
class Layer:
    """One layer: events first .. last of the run."""

    name: str
    root: str
    units: tuple[str, ...]
    calls: tuple[tuple[str, int], ...]
    parameters: tuple[str, ...]
    first: int
    last: int
    last_key: Key
    writes_input: bool
    input_overwritten: bool


@dataclass(frozen=True)
class Chain:
    """The layers of a model in the order in which they run."""

    units: Units
    layers: tuple[Layer, ...]
    crossings: tuple[Crossing, ...]
    signatures: tuple[Any, ...]
    shapes: Shapes
    notes: tuple[str, ...]

    def representatives(self) -> tuple[int, ...]:
        """For each layer the first layer of its class."""
        first: dict[Any, int] = {}
        return tuple(first.setdefault(signature, i) for i, signature in enumerate(self.signatures))


class Cursor:
    """Which event is running, and in which layer of a chain.

    Events are found again by their key, not by counting: at another batch size a helper may run that is not needed
    at this one.
    """

    def __init__(self, layers: Sequence["Layer"] = ()) -> None:
        self.index = -1
        self.key: Key = ("start", "", 0)
        self.layer = 0
        self._ended = True
        self._after = {layer.last_key: i + 1 for i, layer in enumerate(layers)}

    def start(self, kind: str, name: str, call: int) -> None:
        """Go on to the next event, unless the last one was a function that returned no tensor."""
        if self._ended:
            self.index += 1
            self.layer = self._after.get(self.key, self.layer)
        self.key = (kind, name, call)
        self._ended = False

    def end(self) -> None:
        """The running event has produced a tensor."""
        self._ended = True


def find_units(root: nn.Module, closed: frozenset[str] = frozenset()) -> Units:
    """Where the model may be cut, read off its module tree. closed: elements not to be opened."""
    containers = _containers(root, closed) or _containers(root, closed, fewest=1)
    notes: tuple[str, ...] = ()
    if not containers:
        containers = [_branching(root)]
    opened = {""} | {".".join(name.split(".")[:i]) for name in containers for i in range(1, name.count(".") + 2)}
    names: list[str] = []
    _collect_units(root, "", opened, names, set())
    elements = {name for name in names if name.rpartition(".")[0] in containers}
    elements |= _repeated_types(root, [name for name in names if name not in elements])
    if len(names) < 2:
        notes = (f"{type(root).__name__} is one module without parts that could be cut, so it is a single layer",)
    held = tuple(name for name in sorted(opened) if name.rpartition(".")[0] in containers)
    return Units(tuple(names), frozenset(elements), held, notes)


def observe(fake: FakeModel, size: int, seq_len: int | None) -> Chain:
    """Run the whole model forward (once, and once more if stages were opened in vain) and read off its chain."""
    units = find_units(fake.module)
    buffers = {name: (buffer, buffer._version) for name, buffer in fake.module.named_buffers()}
    parameters = {name: (parameter, parameter._version) for name, parameter in fake.module.named_parameters()}
    chain = _observe(fake, units, size, seq_len)
    if closed := _opened_in_vain(fake, chain):
        units = find_units(fake.module, closed)
        chain = _observe(fake, units, size, seq_len)
    written = [name for name, (buffer, version) in buffers.items() if buffer._version != version]
    for name, (parameter, version) in parameters.items():
        if parameter._version != version:
            raise ValueError(
                f"the forward writes into the parameter {name}, which under sharding is not there as a whole; change "
                "parameters between steps, in the training loop"
            )
    return replace(chain, notes=(*chain.notes, *_stateful(fake.module, written)))


def _observe(fake: FakeModel, units: Units, size: int, seq_len: int | None) -> Chain:
    batch = fake.batch(size, seq_len)
    with fake.running():
        watch = _Watch(fake, units)
        with watch, watch.producers:
            fake.loss(batch, before_loss=watch.start_loss)
    return _build_chain(fake.module, units, watch)


def _opened_in_vain(fake: FakeModel, chain: Chain) -> frozenset[str]:
    """Opened elements of containers within which every cut carries more bytes than those around them."""
    crossing = [0.0] * (len(chain.layers) + 1)
    for tensor in chain.crossings:
        size = torch.Size(tensor.spec.shape).numel() * tensor.spec.dtype.itemsize
        for layer in range(tensor.made_by + 1, tensor.last_used_by + 1):
            crossing[layer] += size
    in_vain = set()
    blocks = [{u for u in layer.units if u in chain.units.elements} for layer in chain.layers]
    for name in chain.units.opened:
        inside = [i for i, layer in enumerate(chain.layers) if any(u.startswith(f"{name}.") for u in layer.units)]
        first, last = min(inside, default=0), max(inside, default=0)
        within = [crossing[i] for i in range(first + 1, last + 1) if blocks[i - 1] and blocks[i]]
        if not within or min(within) > _MORE_BYTES * max(crossing[first], crossing[last + 1]):
            in_vain.add(name)
    return frozenset(in_vain)


def _stateful(root: nn.Module, written: list[str]) -> tuple[str, ...]:
    """A note on buffers that the forward writes into; those of batch norms, which it does not read, are told apart."""
    owners = {name: root.get_submodule(name.rpartition(".")[0]) for name in written}
    names = [name for name, owner in owners.items() if not isinstance(owner, nn.modules.batchnorm._NormBase)]
    if not names:
        return ()
    return (
        f"{names[0]} (and {len(names) - 1} more buffers) is written in every forward, on each data rank by its own, so "
        "the numbers may change with data parallelism, as in any framework",
    )


def shapes_at(fake: FakeModel, chain: Chain, size: int, seq_len: int | None) -> Shapes:
    """Shapes at another batch size or length; of each class only the first layer really runs."""
    positions = Positions(fake.module)
    shapes = run_first_of_each_class(fake, chain, fake.batch(size, seq_len), positions)
    shapes.furthest = positions.furthest
    return shapes


def run_first_of_each_class(
    fake: FakeModel, chain: Chain, batch: Batch, watch: AbstractContextManager[Any] | None = None
) -> Shapes:
    """What one forward of `batch` produces, under `watch`; other layers return what the first of their class did."""
    shapes = Shapes()
    cursor = Cursor()
    stand_ins = {}
    for i, first in enumerate(chain.representatives()):
        if i != first:
            pairs = zip(chain.layers[i].calls, chain.layers[first].calls, strict=True)
            stand_ins.update({call: like for call, like in pairs if call != like})

    def produced(producer: Producer, tensor: torch.Tensor) -> None:
        cursor.end()
        shapes.tensors[producer] = TensorSpec.of(tensor)

    producers = Producers(fake.module, chain.units.names, on_produced=produced, on_start=cursor.start)

    def stub(name: str, call: int) -> Any:
        like = stand_ins.get((name, call))
        return None if like is None else shapes.outputs[like].empty()

    with (
        fake.running() as refusals,
        watch or nullcontext(),
        _recording_outputs(fake.module, chain.units.names, cursor, shapes),
        stubbed(fake.module, {name for name, _ in stand_ins}, producers, stub),
        producers,
    ):
        fake.loss(batch)
    shapes.refused = bool(refusals)
    return shapes


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
def _recording_outputs(root: nn.Module, names: tuple[str, ...], cursor: Cursor, shapes: Shapes) -> Iterator[None]:
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


class _Inputs:
    """Notes which modules write into a tensor they are given, and whose tensors anything writes into afterwards."""

    def __init__(self, root: nn.Module, names: tuple[str, ...]) -> None:
        self._modules = {name: root.get_submodule(name) for name in names}
        self._given: list[tuple[str, torch.Tensor, int]] = []
        self._running: list[int] = []
        self.writers: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the model runs."""
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
        """Modules of which some input is no longer what it was when they began."""
        return {name for name, tensor, version in self._given if tensor._version != version}

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(len(self._given))
        self._given += [(name, x, x._version) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if any(x._version != version for own, x, version in self._given[self._running.pop() :] if own == name):
            self.writers.add(name)


class _Watch(Mode):
    """Notes, per event, what is read and made while the whole model runs once."""

    def __init__(self, fake: FakeModel, units: Units) -> None:
        super().__init__()
        self.cursor = Cursor()
        self.events: list[Event] = []
        self.shapes = Shapes()
        self.storages = Storages(fake.dtype)
        self.made: dict[int, list[tuple[Producer, int]]] = defaultdict(list)
        self.tensors: dict[int, torch.Tensor] = {}
        self.reads: dict[int, set[int]] = defaultdict(set)
        self.storage_made: dict[int, int] = {}
        self.storage_reads: dict[int, set[int]] = defaultdict(set)
        self.from_parameters: set[int] = set()
        self.producers = Producers(fake.module, units.names, on_produced=self._produced, on_start=self._start)
        self._parameters = {self.storages.number(p): name for name, p in reversed(list(fake.module.named_parameters()))}
        self.inputs = _Inputs(fake.module, units.names)
        self._outputs = _recording_outputs(fake.module, units.names, self.cursor, self.shapes)
        self._inputs = self.inputs.watched()

    def __enter__(self) -> "_Watch":
        self._outputs.__enter__()
        self._inputs.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inputs.__exit__(*error)
        self._outputs.__exit__(*error)

    def start_loss(self) -> None:
        """The module has returned; what follows is the loss."""
        self._start(*LOSS)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim" or not self.events:
            return out
        event = self.events[-1]
        here = self.cursor.index
        shapes = []
        tainted = False
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                number = self.storages.number(tensor)
                shapes.append(tensor.shape)
                if number in self._parameters:
                    event.parameters.add(self._parameters[number])
                    tainted = True
                    continue
                tainted |= number in self.from_parameters
                if number in self.storage_made:
                    self.storage_reads[number].add(here)
                if id(tensor) in self.made:
                    self.reads[id(tensor)].add(here)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                number = self.storages.number(tensor, made=True)
                shapes.append(tensor.shape)
                if number not in self._parameters:
                    self.storage_made.setdefault(number, here)
                    if tainted:
                        self.from_parameters.add(number)
        event.operators.append((func, tuple(shapes)))
        return out

    def _start(self, kind: str, name: str, call: int) -> None:
        self.cursor.start(kind, name, call)
        if self.cursor.index == len(self.events):
            self.events.append(Event(self.cursor.key))
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


def _containers(root: nn.Module, closed: frozenset[str], fewest: int = 2) -> list[str]:
    """Outermost containers of layers; inside a Sequential root also the containers of blocks that it holds, and inside
    their elements those of blocks of one type."""
    found: list[str] = []
    for name, module in root.named_modules():
        outer = [c for c in found if c == "" or name == c or name.startswith(c + ".")]
        element = max(outer, key=len, default="")
        element = ".".join(name.split(".")[: element.count(".") + 2]) if element else name.partition(".")[0]
        if outer and element in closed:
            continue
        if outer and not (outer == [""] and _holds_blocks(module)) and not (name != element and _holds_alike(module)):
            continue
        deep_mlp = name.count(".") > 0 and isinstance(module, nn.Sequential) and not _holds_blocks(module)
        if _is_container(module, fewest) and not deep_mlp:
            found.append(name)
    return found


def _holds_alike(module: nn.Module) -> bool:
    """Whether a container holds blocks of which several are of one type, as layers are; parts of a layer differ."""
    types = [type(child) for _, child in _with_parameters(module)]
    return _holds_blocks(module) and len(set(types)) < len(types)


def _is_container(module: nn.Module, fewest: int = 2) -> bool:
    """fewest: elements with parameters; a model whose one block runs many times (ALBERT) holds one."""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    return container and len(_with_parameters(module)) >= fewest


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a container's elements are themselves made of modules, unlike the linear layers of an MLP."""
    children = _with_parameters(module)
    return _is_container(module) and all(_with_parameters(child) for _, child in children)


def _with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, child) for n, child in module.named_children() if next(child.parameters(), None) is not None]


def _branching(root: nn.Module) -> str:
    """The outermost module with several children that have parameters."""
    name, module = "", root
    while len(children := _with_parameters(module)) == 1 and _with_parameters(children[0][1]):
        child_name, module = children[0]
        name = f"{name}.{child_name}" if name else child_name
    return name


def _collect_units(module: nn.Module, name: str, opened: set[str], names: list[str], seen: set[int]) -> None:
    for child_name, child in _with_parameters(module):
        full = f"{name}.{child_name}" if name else child_name
        if full in opened:
            _collect_units(child, full, opened, names, seen)
        elif id(child) not in seen:
            seen.add(id(child))
            names.append(full)


def _repeated_types(root: nn.Module, names: list[str]) -> set[str]:
    """Loose modules made of modules, of which there are several of one type: blocks written as attributes."""
    by_type: dict[type, list[str]] = defaultdict(list)
    for name in names:
        module = root.get_submodule(name)
        if _with_parameters(module):
            by_type[type(module)].append(name)
    return {name for group in by_type.values() if len(group) >= 2 for name in group}


def _build_chain(root: nn.Module, units: Units, watch: _Watch) -> Chain:
    events = watch.events
    spans = _spans(units, watch)
    notes = list(units.notes)
    spans = _collapse_repeats(units, events, spans, notes)
    spans = _collapse_leaks(watch, spans, notes)
    crossings = _crossings(watch, spans)
    layers = _layers(root, units, watch, spans, notes)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    signatures = tuple(_signature(root, parameters, events, layer, i, crossings) for i, layer in enumerate(layers))
    return Chain(units, layers, crossings, signatures, watch.shapes, tuple(notes))


def _spans(units: Units, watch: _Watch) -> list[tuple[int, int]]:
    """(first, last) event of each layer, before any have to be joined."""
    groups: list[tuple[str, int, int]] = []
    for i, event in enumerate(watch.events):
        kind, name, _ = event.key
        if kind != "module":
            continue
        slot = name if name in units.elements else ""
        if groups and groups[-1][0] == slot:
            groups[-1] = (slot, groups[-1][1], i)
        else:
            groups.append((slot, i, i))
    if not groups:
        return [(0, len(watch.events) - 1)]
    lasts = [
        _cheapest_cut(watch, before[2], after[1], early=before[0] != "" and after[0] == "")
        for before, after in pairwise(groups)
    ] + [len(watch.events) - 1]
    firsts = [0] + [last + 1 for last in lasts[:-1]]
    return list(zip(firsts, lasts, strict=True))


def _cheapest_cut(watch: _Watch, before: int, after: int, early: bool) -> int:
    """Last event of the earlier layer, between the two layer modules at `before` and `after`: fewest bytes cross."""
    if after == before + 1:
        return before
    crossing = [0.0] * (after - before)
    for number, made in watch.storage_made.items():
        if number in watch.from_parameters and made < after:
            last_read = max(watch.storage_reads.get(number, ()), default=-1)
            size = watch.storages.sizes.get(number)
            for cut in range(max(made, before), min(last_read, after)):
                crossing[cut - before] += size.elements * 2 + size.other_bytes if size else 0.0
    least = min(crossing)
    cuts = [before + i for i, size in enumerate(crossing) if size == least]
    return cuts[0] if early else cuts[-1]


def _collapse_repeats(
    units: Units, events: list[Event], spans: list[tuple[int, int]], notes: list[str]
) -> list[tuple[int, int]]:
    """An element that runs again later cannot be in two places of the chain: join all from its first to last run."""
    runs: dict[str, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        kind, name, _ = event.key
        if kind == "module" and name in units.elements:
            runs[name].append(i)
    for name, places in runs.items():
        if _span_of(spans, places[0]) != _span_of(spans, places[-1]):
            spans = _joined(spans, places[0], places[-1])
            notes.append(f"{name} runs {len(places)} times, so all from its first to its last run is one layer")
    return spans


def _collapse_leaks(watch: _Watch, spans: list[tuple[int, int]], notes: list[str]) -> list[tuple[int, int]]:
    """A tensor kept aside inside a layer module and read in a later layer cannot be sent: join the layers."""
    visible = {watch.storages.number(t) for t in watch.tensors.values()}
    for number, made in watch.storage_made.items():
        if number in visible or number not in watch.from_parameters:
            continue
        last = max(watch.storage_reads.get(number, ()), default=made)
        if _span_of(spans, made) != _span_of(spans, last):
            spans = _joined(spans, made, last)
            notes.append(
                f"{watch.events[made].key[1]} keeps a tensor aside that {watch.events[last].key[1]} reads, "
                "so all between them is one layer"
            )
    return spans


def _span_of(spans: list[tuple[int, int]], event: int) -> int:
    return next(i for i, (first, last) in enumerate(spans) if first <= event <= last)


def _joined(spans: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    start, end = _span_of(spans, first), _span_of(spans, last)
    return [*spans[:start], (spans[start][0], spans[end][1]), *spans[end + 1 :]]


def _crossings(watch: _Watch, spans: list[tuple[int, int]]) -> tuple[Crossing, ...]:
    layer_of = [i for i, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
    used: dict[Producer, set[int]] = defaultdict(set)
    made_by: dict[Producer, int] = {}
    covered: set[tuple[int, int]] = set()
    by_storage: dict[int, list[tuple[Producer, int]]] = defaultdict(list)
    for key, made in watch.made.items():
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
    specs = watch.shapes.tensors
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
    """Book a read on the last producer in an earlier layer; none, if it was made again in the reading layer."""
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
    root: nn.Module, units: Units, watch: _Watch, spans: list[tuple[int, int]], notes: list[str]
) -> tuple[Layer, ...]:
    names = dict(root.named_parameters(remove_duplicate=False))
    canonical = {id(p): name for name, p in root.named_parameters()}
    read_anywhere: set[int] = set()
    lost = watch.inputs.overwritten()
    layers = []
    for first, last in spans:
        span = watch.events[first : last + 1]
        calls = tuple((e.key[1], e.key[2]) for e in span if e.key[0] == "module")
        own = tuple(dict.fromkeys(name for name, _ in calls))
        parameters = {n: p for unit in own for n, p in names.items() if n.startswith(unit + ".")}
        present = {id(p) for p in parameters.values()}
        for event in span:
            for name in event.parameters:
                if id(names[name]) not in present:
                    parameters[canonical[id(names[name])]] = names[name]
        read_anywhere |= {id(p) for p in parameters.values()}
        single = len(own) == 1 and all(n.startswith(own[0] + ".") for n in parameters)
        root_name = own[0] if single else ""
        read = tuple(n for n in names if n in parameters)
        writes, overwritten = (not names.isdisjoint(own) for names in (watch.inputs.writers, lost))
        layers.append(Layer("", root_name, own, calls, read, first, last, span[-1].key, writes, overwritten))
    unread = tuple(name for name, p in names.items() if id(p) not in read_anywhere)
    if unread:
        notes.append(f"never used by the forward, kept with the last layer: {', '.join(unread)}")
        layers[-1] = replace(layers[-1], root="", parameters=(*layers[-1].parameters, *unread))
    return tuple(replace(layer, name=_name(layer, i, len(layers), units, root)) for i, layer in enumerate(layers))


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
    root: nn.Module,
    parameters: dict[str, nn.Parameter],
    events: list[Event],
    layer: Layer,
    index: int,
    crossings: tuple[Crossing, ...],
) -> tuple[Any, ...]:
    """What two layers of one class have in common."""
    prefix = layer.root + "." if layer.root else ""
    arriving = tuple(c.spec for c in crossings if index in c.used_by)
    leaving = tuple(c.spec for c in crossings if c.made_by == index)
    return (
        tuple(type(root.get_submodule(unit)) for unit in layer.units),
        tuple(tuple(e.operators) for e in events[layer.first : layer.last + 1]),
        tuple((n.removeprefix(prefix), parameters[n].shape, parameters[n].requires_grad) for n in layer.parameters),
        arriving,
        leaving,
        layer.writes_input,
        layer.input_overwritten,
    )
