"""Activations that wait for backward in the host's memory: what a layer keeps is brought there, and back in time.

What a layer's forward has saved leaves the device when the layer ends: one copy of each piece of memory, however many
tensors look into it (query, key and value may be three views of one). On a GPU copies run on a stream of their own,
beside the next layer; at that layer's end the device's memory is given back. In backward the first tensor that is asked
for brings all of its layer back, and begins with those of the layer before. So the device holds two layers of them at
most, which is what the plan counts. Those of the last layer are asked for at once, and are still there.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..torch_compat import detached

_ALIGNED = 16
"""Bytes. The numbers of every type begin at a multiple of their size, which divides this."""


def offload(layers: list[list[nn.Module]], device: torch.device) -> None:
    """From now on what these modules keep for backward waits on the host; parameters and buffers stay.

    layers: in the order of forward, of each the modules that are called. Forwards are replaced; call it after recompute
    is set up, so that of a layer that is recomputed the inputs are sent.
    """
    link = _HostLink(device)
    for number, modules in enumerate(layers):
        for module in modules:
            module.forward = _sent_away(module, module.forward, link, number)


def _sent_away(module: nn.Module, forward: Callable[..., Any], link: "_HostLink", number: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kept = _Kept(link, number, module)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            output = forward(*args, **kwargs)
        link.follow(kept)
        return output

    return run


@dataclass(eq=False)
class _Memory:
    """A piece of memory that backward reads: bytes `first` to `last` of a storage.

    here: these bytes on the device, while they are there. away: their copy on the host.
    """

    storage: torch.UntypedStorage | None
    first: int
    last: int
    here: torch.Tensor | None = None
    away: torch.Tensor | None = None


@dataclass(eq=False)
class _Part:
    """What autograd holds in place of a saved tensor. tensor: the tensor itself, until its memory leaves the device.
    version: how often it had been written into when it was saved."""

    memory: _Memory
    tensor: torch.Tensor | None
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_spoiled: bool = False


class _HostLink:
    """Copies between a device and its host; of one layer at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: weakref.ref[_Kept] | None = None  # held by the backward that needs it

    def follow(self, kept: "_Kept") -> None:
        """Note that a layer has ended: free the device's memory of the layer before it, and begin to copy this one."""
        before = None if self._last is None else self._last()
        self._last = weakref.ref(kept)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if before is not None:
                before.leave()
                if before.number < kept.number:  # of the same micro-batch
                    kept.before = weakref.ref(before)
            kept.send()

    def copy(self, given: torch.Tensor, to: torch.Tensor) -> Any:
        """Begin a copy. Returns what to give to `wait` before the copy is read or the source is written into."""
        if self._stream is None:
            to.copy_(given)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            to.copy_(given, non_blocking=True)
        for tensor in (given, to):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Make later work of the device wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


class _Kept:
    """What one forward of a layer keeps for backward. before: the same of the layer before it, which backward needs
    next."""

    def __init__(self, link: _HostLink, number: int, module: nn.Module) -> None:
        self.number = number
        self.before: weakref.ref[_Kept] | None = None
        self._link = link
        self._memories: dict[int, _Memory] = {}
        self._parts: list[_Part] = []
        self._is_away = False
        self._copied: Any = None
        self._stays = {x.untyped_storage()._cdata for x in (*module.parameters(), *module.buffers())}
        self._parameters = {id(p) for p in module.parameters()}

    def pack(self, x: torch.Tensor) -> torch.Tensor | _Part:
        """What autograd keeps of a tensor."""
        if not self._may_leave(x):
            return x
        storage = x.untyped_storage()
        size, begin = x.element_size(), int(x.storage_offset())
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        first, last = begin * size // _ALIGNED * _ALIGNED, (begin + span) * size
        memory = self._memories.setdefault(storage._cdata, _Memory(storage, first, last))
        memory.first, memory.last = min(first, memory.first), max(last, memory.last)
        part = _Part(memory, detached(x), x._version, x.dtype, x.shape, x.stride(), begin)
        self._parts.append(part)
        return part

    def unpack(self, kept: torch.Tensor | _Part) -> torch.Tensor:
        """A saved tensor. The first that is asked for brings back all of the layer, and begins with the layer
        before."""
        if not isinstance(kept, _Part):
            return kept
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._look()
            if kept.is_spoiled:
                raise RuntimeError(
                    f"a tensor of shape {list(kept.shape)} that backward needs was written into after the layer that "
                    "saved it had read it; write x + y for x += y"
                )
            self.come()
            before = None if self.before is None else self.before()
            if before is not None:
                before.come()
            if kept.tensor is not None:
                return kept.tensor
            self._link.wait(self._copied)
            here = kept.memory.here
            assert here is not None
            offset = kept.offset - kept.memory.first // kept.dtype.itemsize
            found = torch.empty(0, dtype=kept.dtype, device=here.device)
            return found.set_(here.untyped_storage(), offset, kept.shape, kept.stride)

    def send(self) -> None:
        """Begin to copy everything to the host."""
        for memory in self._memories.values():
            size = memory.last - memory.first
            assert memory.storage is not None
            given = torch.empty(0, dtype=torch.uint8, device=self._link.device)
            given.set_(memory.storage, memory.first, (size,), (1,))
            memory.away = torch.empty(size, dtype=torch.uint8, pin_memory=given.is_cuda)
            self._copied = self._link.copy(given, memory.away)

    def leave(self) -> None:
        """Give the device's memory back."""
        self._look()
        self._link.wait(self._copied)
        for part in self._parts:
            part.tensor = None
        for memory in self._memories.values():
            memory.storage = None
        self._is_away = True

    def come(self) -> None:
        """Begin to bring everything back, if it has left."""
        if not self._is_away:
            return
        self._is_away = False
        for memory in self._memories.values():
            assert memory.away is not None
            memory.here = torch.empty_like(memory.away, device=self._link.device)
            self._copied = self._link.copy(memory.away, memory.here)

    def _look(self) -> None:
        """Note which tensors were written into since they were saved."""
        for part in self._parts:
            part.is_spoiled |= part.tensor is not None and part.tensor._version != part.version

    def _may_leave(self, x: torch.Tensor) -> bool:
        if type(x) is not torch.Tensor or x.layout != torch.strided or x.device != self._link.device:
            return False
        if x.numel() == 0 or x.is_quantized or x.is_conj() or x.is_neg():
            return False
        return x.untyped_storage()._cdata not in self._stays and not self._is_parameters(x)

    def _is_parameters(self, x: torch.Tensor) -> bool:
        """Whether a tensor is computed from a single parameter and nothing else, as a cast or a transpose is."""
        node = x.grad_fn
        while node is not None:
            following = [n for n, _ in node.next_functions if n is not None]
            if len(following) != 1:
                return False
            node = following[0]
            if hasattr(node, "variable"):
                return id(node.variable) in self._parameters
        return False
