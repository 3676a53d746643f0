"""Numbers for a stage that was built on the meta device: the same under every plan, one device included."""

import functools
import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...planner.cost.sharding import kept_rows
from ...profiler.model.building import parameters_on_meta
from ...profiler.running.fake_modes import fake_mode
from ...profiler.running.held_tensors import HeldTensors, keep_hooks
from ...profiler.running.kept_results import fakes_forgotten
from ..parallel.expert import HeldExperts
from ..parallel.tensor_layout import ParameterCut
from ..parallel.without_dims import read_without_dims
from ..torch_compat import replaced_truncated_normal

BUILD_LIMIT_BYTES = 4 * 2**30
"""A model up to this size, counted in fp32, is built whole on the CPU of every rank."""

BLOCK_ELEMENTS = 2**18
"""Parameters of large models with more elements are made in blocks of whole rows, about so many elements (1 MiB in
fp32) each, with a seed for each block: a rank makes only blocks of which it holds rows."""

_ALIKE = ("normal_", "uniform_", "fill_", "zero_", "mul_", "add_", "sub_", "div_", "clamp_", "_no_grad_trunc_normal_")
_MAKERS = ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn")
"""Functions that make all elements alike, so that a block of rows can be made by itself."""


@dataclass
class Values:
    """Initial values of a model by original names. Every rank can ask for any of them, and gets the same.

    attributes: place -> tensor, for what else a model holds (see HeldTensors).

    blocks: a range of a parameter's rows, in order, in tensors that need not all be in memory at once; None: they are
    slices of the whole parameter.
    """

    parameter: Callable[[str], torch.Tensor]
    buffer: Callable[[str], torch.Tensor]
    attributes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    blocks: Callable[[str, range], Iterator[torch.Tensor]] | None = None

    def rows(self, name: str, rows: range) -> Iterator[torch.Tensor]:
        """These rows of a parameter, in order, in blocks."""
        if self.blocks is not None:
            yield from self.blocks(name, rows)
        else:
            yield self.parameter(name)[rows.start : rows.stop]


def initial_values(model_fn: Callable[[], nn.Module], is_large: bool, seed: int) -> Values:
    """Values that `torch.manual_seed(seed); model_fn()` gives on one CPU, unless the model is large.

    Every rank builds the model for itself, so nothing is sent, and every rank's random state is afterwards the one
    that a single process would have. Large models are never whole: what the constructor does to a parameter is
    recorded on fake tensors, and repeated for one parameter at a time with a seed made of `seed` and its name (see
    Recording). Their numbers have the same distribution, and are the same under every plan and on one device, but are
    not those of the plain constructor.
    """
    if not is_large:
        torch.manual_seed(seed)
        with torch.device("cpu"):
            model = model_fn()
        values = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return Values(values.__getitem__, buffers.__getitem__, _attributes(model))
    recording = OpRecording()
    # Not on the meta device, where torch.nn.init leaves much out because "sampling is a no-op".
    with (
        fakes_forgotten(),
        fake_mode(),
        recording,
        replaced_truncated_normal(lambda original: functools.partial(recording.note_in_place, original)),
    ):
        try:
            model = model_fn()
        except DataDependentOutputException as error:
            raise ValueError(
                f"the constructor of a model above {BUILD_LIMIT_BYTES / 2**30:.0f} GiB may not look at the numbers it "
                f"makes, as they are made later: {error}"
            ) from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): n for n, p in model.named_parameters()}
    buffers, attributes = _without_parameters(model_fn)
    recorded = _attributes(model)
    attributes |= {at: recording.repeat(recorded[at], seed, at) for at, made in attributes.items() if made.is_meta}
    torch.manual_seed(seed)
    return Values(
        lambda n: recording.repeat(parameters[n], seed, first[id(parameters[n])]),
        buffers.__getitem__,
        attributes,
        lambda n, rows: recording.blocks(parameters[n], seed, first[id(parameters[n])], rows),
    )


def empty_values(model_fn: Callable[[], nn.Module], model: nn.Module, loaded: set[str], seed: int) -> Values:
    """Values for a model that is not built whole: memory without numbers for parameters that will be loaded, and for
    others the initial values of a large model.

    model: on the meta device. loaded: names of parameters.
    """
    buffers, attributes = _without_parameters(model_fn)
    if any(made.is_meta for made in attributes.values()):  # those of unregistered modules are not loaded
        others = initial_values(model_fn, model_bytes(model) > BUILD_LIMIT_BYTES, seed)
    elif loaded.issuperset(n for n, _ in model.named_parameters(remove_duplicate=False)):
        torch.manual_seed(seed)
        others = Values(lambda n: torch.empty(0), buffers.__getitem__, attributes)
    else:
        others = initial_values(model_fn, True, seed)
    likes = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False) if n in loaded}

    def parameter(name: str) -> torch.Tensor:
        return torch.empty_like(likes[name], device="cpu") if name in likes else others.parameter(name)

    def blocks(name: str, rows: range) -> Iterator[torch.Tensor]:
        if name in likes:
            yield torch.empty_like(likes[name][rows.start : rows.stop], device="cpu")
        else:
            yield from others.rows(name, rows)

    return Values(parameter, others.buffer, others.attributes, blocks)


def _without_parameters(model_fn: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(buffers, attributes) of a model built without memory for its parameters, also those of modules that it has not
    registered."""
    with parameters_on_meta(), torch.device("cpu"):
        model = model_fn()
    return dict(model.named_buffers(remove_duplicate=False)), _attributes(model)


def _attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Place -> tensor, for what a model holds besides parameters and buffers (see HeldTensors)."""
    named = {id(t) for t in chain(model.parameters(), model.buffers())}
    found: dict[str, torch.Tensor] = {}

    def note(place: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in named:
            found[place] = tensor.detach()
        return tensor

    HeldTensors(note).enter(model)
    return found


@dataclass(frozen=True)
class _StorageView:
    """A tensor, as a view of a storage."""

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _WritingCall:
    """An operator call that wrote into storages. Fake tensors among its arguments are recorded as views."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: frozenset[int]
    written: frozenset[int]
    outputs: tuple[_StorageView, ...]


class OpRecording(TorchDispatchMode):
    """Records what is done to fake tensors, so that it can be repeated with real numbers for any one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_WritingCall] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._storages: dict[int, Any] = {}

    def note_in_place(
        self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Record a function that fills a tensor as one call, in place of its operators."""
        view = self._view(tensor)
        storage = frozenset([view.storage])
        self._note(_WritingCall(function, (view, *args), kwargs, storage, storage, (view,)))
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record it if it makes or changes a storage (views do neither)."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = {self._view(x).storage for x in _tensors((args, kwargs))}
        outputs = tuple(self._view(x) for x in _tensors(output))
        written = {view.storage for view in outputs} - given
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {self._view(x).storage for x in _tensors(value)}
        if written:
            saved_args, saved_kwargs = tree_map(self._saved, (args, kwargs))
            self._note(_WritingCall(func, saved_args, saved_kwargs, frozenset(given), frozenset(written), outputs))
        return output

    def _note(self, call: _WritingCall) -> None:
        for storage in call.written:
            self._writers[storage].append(len(self._calls))
        self._calls.append(call)

    def repeat(self, tensor: torch.Tensor, seed: int, name: str) -> torch.Tensor:
        """The tensor with real numbers, on the CPU. Raises ValueError if no recorded call gave it any."""
        calls = self._calls_that_made(tensor, name)
        if not self._can_be_cut(tensor, calls):
            return self._play(calls, self._view(tensor), f"{seed} {name}")
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        _fill(whole, self.blocks(tensor, seed, name, range(len(tensor))))
        return whole

    def blocks(self, tensor: torch.Tensor, seed: int, name: str, rows: range) -> Iterator[torch.Tensor]:
        """A range of rows of what `repeat` would return, in order. Of a large tensor one block at a time is made."""
        if not rows:
            yield torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
            return
        calls = self._calls_that_made(tensor, name)
        if not self._can_be_cut(tensor, calls):
            yield self.repeat(tensor, seed, name)[rows.start : rows.stop]
            return
        size = max(1, BLOCK_ELEMENTS // tensor.stride(0))
        for first in range(rows.start // size * size, rows.stop, size):
            block = range(first, min(first + size, len(tensor)))
            own = [call for call in (_of_rows(call, tensor, block) for call in calls) if call is not None]
            made = self._play(own, _with_rows(self._view(tensor), len(block)), f"{seed} {name} {first // size}")
            yield made[max(0, rows.start - first) : rows.stop - first]

    def _calls_that_made(self, tensor: torch.Tensor, name: str) -> list[_WritingCall]:
        """The recorded calls on which a tensor's numbers depend, in order."""
        own = self._view(tensor).storage
        needed, found = {own}, set[int]()
        waiting = [-number for number in self._writers[own]]  # the last call first
        heapq.heapify(waiting)
        while waiting:
            number = -heapq.heappop(waiting)
            found.add(number)
            for storage in self._calls[number].read - needed:
                needed.add(storage)
                for earlier in self._writers[storage]:
                    if earlier < number and earlier not in found:
                        heapq.heappush(waiting, -earlier)
        calls = [self._calls[number] for number in sorted(found)]
        if all(call.function.__name__.startswith(("empty", "new_empty")) for call in calls):
            raise ValueError(
                f"{name} gets no numbers when the model is built on fake tensors, as models above "
                f"{BUILD_LIMIT_BYTES / 2**30:.0f} GiB are; initialise it in the constructor, by torch functions"
            )
        return calls

    def _can_be_cut(self, tensor: torch.Tensor, calls: list[_WritingCall]) -> bool:
        """Whether a tensor can be made in blocks: it is large, and every call fills all of its elements alike, or
        elements of one row."""
        whole, (made, *fills) = self._view(tensor), calls
        if tensor.numel() <= BLOCK_ELEMENTS or not tensor.is_contiguous() or made.outputs != (whole,) or made.read:
            return False
        return _plain_name(made) in _MAKERS and all(
            _plain_name(call) in _ALIKE
            and [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, _StorageView)] == [call.args[0]]
            and (call.args[0] == whole or _row_of(call.args[0], whole) is not None)
            for call in fills
        )

    def _play(self, calls: list[_WritingCall], wanted: _StorageView, seed: str) -> torch.Tensor:
        """The wanted tensor, made by repeating calls. seed: determines the random numbers."""
        made: dict[int, torch.Tensor] = {}

        def real(x: Any) -> Any:
            if isinstance(x, _StorageView):
                return made[x.storage].as_strided(x.shape, x.stride, x.offset)
            if isinstance(x, torch.Tensor):
                return x.clone()  # or what is done to it here would be done to the next that is made of it
            return torch.device("cpu") if isinstance(x, torch.device) else x

        number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1
        with torch.random.fork_rng([]), torch.no_grad():
            torch.default_generator.manual_seed(number)  # not torch.manual_seed, which seeds accelerators, too
            for call in calls:
                args, kwargs = tree_map(real, (call.args, call.kwargs))
                output = call.function(*args, **kwargs)
                for view, x in zip(call.outputs, _tensors(output), strict=True):
                    if view.storage not in made:
                        made[view.storage] = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            found: torch.Tensor = real(wanted)
            return found if found.numel() == made[wanted.storage].numel() else found.clone()

    def _view(self, tensor: torch.Tensor) -> _StorageView:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # kept, so that no other gets its number
        return _StorageView(storage._cdata, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _saved(self, x: Any) -> Any:
        """What to record of an argument: a fake tensor's view. Real tensors (torch.tensor(0.07)) have numbers, and
        stay."""
        return self._view(x) if isinstance(x, FakeTensor) else x


def _plain_name(call: _WritingCall) -> str:
    name: str = call.function.__name__
    return name.partition(".")[0]


def _row_of(part: _StorageView, whole: _StorageView) -> int | None:
    """Number of the row of a contiguous tensor that a view lies in; None if it reaches over several."""
    last = part.offset + sum((n - 1) * step for n, step in zip(part.shape, part.stride, strict=True))
    row = part.offset // whole.stride[0]
    return row if last // whole.stride[0] == row else None


def _with_rows(view: _StorageView, num_rows: int) -> _StorageView:
    return replace(view, shape=torch.Size([num_rows, *view.shape[1:]]))


def _of_rows(call: _WritingCall, tensor: torch.Tensor, rows: range) -> _WritingCall | None:
    """The call for a block of rows that is made as a tensor of its own; None if the call does nothing to these rows."""
    view = call.outputs[0]
    if view.shape == tensor.shape:
        own = _with_rows(view, len(rows))
        given = own if call.read else list(own.shape)
        return replace(call, args=(given, *call.args[1:]), outputs=(own,))
    if view.offset // tensor.stride(0) not in rows:
        return None
    own = replace(view, offset=view.offset - rows.start * tensor.stride(0))
    return replace(call, args=(own, *call.args[1:]), outputs=(own,))


def _fill(out: torch.Tensor, blocks: Iterable[torch.Tensor]) -> None:
    """Copy blocks of rows into a tensor, one after another."""
    start = 0
    for block in blocks:
        out[start : start + len(block)].copy_(block)
        start += len(block)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]


def _within(ranges: Iterable[range], places: range) -> list[range]:
    """For each of these ranges the part that lies at `places`, if they are laid end to end; parts may be empty."""
    found, before = [], 0
    for rows in ranges:
        found.append(rows[max(0, places.start - before) : max(0, places.stop - before)])
        before += len(rows)
    return found


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters in fp32; a tied parameter counts once."""
    return sum(4 * p.numel() for p in model.parameters())


class Materialiser:
    """Gives the modules of a stage their numbers; each parameter becomes what this rank holds before it is sharded."""

    def __init__(
        self,
        stage: nn.Module,
        values: Values,
        cuts: dict[str, ParameterCut],
        tensor_rank: int,
        device: torch.device,
        experts: Mapping[str, HeldExperts] = MappingProxyType({}),
    ) -> None:
        self._experts = experts
        self._names = {id(p): n for n, p in stage.named_parameters()}
        self._buffer_names = {id(b): n for n, b in stage.named_buffers()}
        self._values = values
        self._cuts = cuts
        self._tensor_rank = tensor_rank
        self._device = device
        self._made: dict[int, torch.Tensor] = {}
        self._meta: list[torch.Tensor] = []
        HeldTensors(self._held).enter(stage)

    def __call__(self, modules: Iterable[nn.Module], mesh: DeviceMesh | None = None) -> None:
        """Give numbers to what is on the meta device in these modules; parameters that were one object stay one.

        mesh: what fully_shard gets next with these modules. Rows that it will not leave on this rank get memory without
        numbers, and parameters without dims become tensors of one element (see without_dims.py).
        """
        # What fully_shard divides must be freed then, and no other call asks for it.
        made = self._made if mesh is None else {}
        for module in modules:
            for submodule in module.modules():
                self._parameters(submodule, mesh, made)
                self._buffers(submodule)

    def _parameters(self, module: nn.Module, mesh: DeviceMesh | None, made: dict[int, torch.Tensor]) -> None:
        given_dims: list[str] = []
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                own = self._once(parameter, lambda p: self._make(p, mesh), made)
                module._parameters[name] = own  # type: ignore[assignment]
                if own.dim() > parameter.dim():
                    given_dims.append(name)
        if given_dims:
            read_without_dims(module, given_dims)

    def _once(
        self, tensor: torch.Tensor, make: Callable[[Any], torch.Tensor], made: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        if id(tensor) not in made:
            self._meta.append(tensor)  # keeps the id from being given to another object
            made[id(tensor)] = make(tensor)
        return made[id(tensor)]

    def _make(self, parameter: nn.Parameter, mesh: DeviceMesh | None = None) -> nn.Parameter:
        name = self._names[id(parameter)]
        if parameter.dim():
            made = self._own_rows(name, parameter, mesh)
        else:
            made = self._on_device(self._values.parameter(name))
            made = made if mesh is None else made.view(1)
        made = nn.Parameter(made, requires_grad=parameter.requires_grad)
        keep_hooks(parameter, made)
        return made

    def _own_rows(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh | None) -> torch.Tensor:
        """This rank's part of a parameter, with numbers in the rows that it keeps. If values come in blocks, only one
        block is in memory beside it."""
        cut, held = self._cuts.get(name), self._experts.get(name)
        if held is not None:
            ranges = [range(held.first, held.first + held.count // held.parts)]
        elif cut is not None and cut.dim == 0:
            ranges = cut.rows(self._tensor_rank)
        else:
            ranges = [range(parameter.shape[0])]
        shape = [sum(map(len, ranges)), *parameter.shape[1:]]
        if cut is not None and cut.dim > 0:
            shape[cut.dim] = sum(cut.parts) // cut.degree
        kept = range(shape[0])
        if mesh is not None:
            kept = kept_rows(tuple(shape), mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
        blocks = (block for rows in _within(ranges, kept) for block in self._values.rows(name, rows))
        if cut is not None and cut.dim > 0:
            blocks = (cut.local(block, self._tensor_rank) for block in blocks)
        first = next(blocks)
        if len(first) == shape[0]:
            return self._on_device(first)
        made = first.new_empty(shape, device=self._device)
        _fill(made[kept.start : kept.stop], chain([first], blocks))
        return made

    def _on_device(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(device=self._device, copy=True, memory_format=torch.contiguous_format)

    def _buffers(self, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = self._once(buffer, self._buffer, self._made)

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._values.buffer(self._buffer_names[id(buffer)]).to(self._device, copy=True)

    def _held(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for a place that holds one besides parameters and buffers: the parameter or buffer that it is, or
        a copy of what the constructor has made there. A parameter of another stage is left as it is."""
        if id(tensor) in self._names:
            return self._once(tensor, self._make, self._made)
        if id(tensor) in self._buffer_names:
            return self._once(tensor, self._buffer, self._made)
        made = self._values.attributes.get(place)
        if made is None or made.is_meta:
            return tensor
        return self._once(tensor, lambda held: self._like(held, self._on_device(made)), self._made)

    @staticmethod
    def _like(held: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(made, held.requires_grad) if isinstance(held, nn.Parameter) else made
