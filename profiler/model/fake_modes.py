"""Fake tensors without what torch does around each operator for its compiler and its logs.

Layers are run dozens of times, and nearly all operators of a run have been seen: torch keeps what each of them returns,
but takes longer to look that up, and to make a tensor of it, than a layer's own Python takes. Here both are lean; what
may be kept, and how outputs alias inputs, is torch's answer as before.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@cache
def begin_autograd() -> None:
    """Let autograd's engine see which devices there are. Where there is no GPU, a torch with CUDA shows it one that is
    not there as soon as fake tensors are made, and with a device of its own the engine refuses to run in processes that
    are forked from this one (torch 2.11)."""
    torch.ones((), requires_grad=True, device="cpu").backward()


def fake_mode() -> FakeTensorMode:
    """torch's mode for fake tensors, beside which real ones may be used."""
    begin_autograd()
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def without_log() -> Iterator[None]:
    """What torch's fake tensors refuse is raised, and not printed beside that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


class LeanFakeMode(FakeTensorMode):
    """A fake mode that answers by itself what torch's has answered before, and may keep."""

    def __init__(self) -> None:
        begin_autograd()
        super().__init__(allow_non_fake_inputs=True)
        self._answers: dict[tuple[Any, ...], Any] = {}
        self._entry: Any = None
        """What torch keeps of the operator that has just run; None if it does not."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._describe(args, key) or (kwargs and not self._describe(kwargs.items(), key)):
            return self.dispatch(func, types, args, kwargs)
        asked = tuple(key)
        entry = self._answers.get(asked)
        if entry is not None:
            return self._output(entry, args)
        self._entry = None
        output = self.dispatch(func, types, args, kwargs)
        if self._entry is not None and not any(_is_lazy(info.metadata) for info in self._entry.output_infos):
            self._answers[asked] = self._entry
        return output

    def _describe(self, values: Collection[Any], key: list[Any]) -> bool:
        """Whether all that an answer may depend on could be added to the key."""
        key.append(len(values))
        for value in values:
            kind = type(value)
            if isinstance(value, FakeTensor):
                if value.fake_mode is not self or value.constant is not None or value.layout is not torch.strided:
                    return False
                storage = value.untyped_storage()
                key += (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    storage.nbytes(),
                    value.dtype,
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind in _CONTAINERS:
                key.append(kind)
                if not self._describe(value, key):
                    return False
            else:
                return False
        return True

    def _output(self, entry: Any, args: Sequence[Any]) -> Any:
        made = [self._made(info, args) for info in entry.output_infos]
        return tuple(made) if entry.is_output_tuple else made[0]

    def _made(self, info: Any, args: Sequence[Any]) -> Any:
        if info.inplace_idx is not None:
            return args[info.inplace_idx]
        like = info.metadata
        if like is None:
            return info.constant_value
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            inner = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
            if info.view_idx is not None:
                inner.set_(args[info.view_idx].untyped_storage(), like.storage_offset, like.shape, like.stride)
            made = torch.Tensor._make_subclass(
                FakeTensor, inner, like.requires_grad, dispatch_device=True, device_for_backend_keys=like.device
            )
        torch._C._set_throw_on_mutable_data_ptr(made)
        if like.device not in self._attributes:
            self._attributes[like.device] = dict(vars(FakeTensor(self, inner, like.device)))
        vars(made).update(self._attributes[like.device])
        return made

    def _dispatch_impl(self, *args: Any) -> Any:
        output = super()._dispatch_impl(*args)
        self._entry = None
        return output

    def _make_cache_entry(self, *args: Any) -> Any:
        entry = None
        try:
            entry = super()._make_cache_entry(*args)
            return entry
        finally:
            self._entry = entry

    def _output_from_cache_entry(self, state: Any, entry: Any, *args: Any) -> Any:
        self._entry = entry
        return super()._output_from_cache_entry(state, entry, *args)


def _is_lazy(metadata: Any) -> bool:
    """Whether a tensor is a conjugate or negative that has not been computed yet."""
    return metadata is not None and (metadata.is_conj or metadata.is_neg)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (list, tuple)
