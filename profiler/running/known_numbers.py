"""Fake tensors whose numbers are known: those of a batch, and what is computed of nothing else. A model that splits its
batch by the sizes of the pictures in it, or looks for where they stand, does so on fake tensors as on real ones. Where
asked to, choices of the largest scores are known, too: as even as a router is trained to make them, or all the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from ..model.loaded import Choices
from .fake_modes import LeanFakeMode
from .gpu_kernel_emulation import Mode

MOST_KNOWN = 1 << 24
"""Most numbers of a tensor that are computed: 2,000 by 2,000 pixels in each of four samples."""


MOST_FRACTIONS = 1 << 16
"""Most floating-point numbers that are computed by an operator without input: a mask over the tokens of a few
samples."""


@contextmanager
def knowing_numbers(mode: FakeTensorMode, choices: Choices = "") -> Iterator[None]:
    """While it lasts, operators on known numbers give known numbers in this fake mode. choices: then top-k and argmax
    of unknown numbers do, too: they choose every index equally often ("even"), or always the first ones ("first")."""
    limit = patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_KNOWN)
    lists = patch.object(FakeTensor, "tolist", _tolist)
    chosen = _KnownChoices(mode, choices == "even") if choices else nullcontext()
    computed = (
        patch.object(mode, "computed", partial(_computed, mode)) if isinstance(mode, LeanFakeMode) else nullcontext()
    )
    with limit, lists, mode, computed, _KnownRanges(mode), chosen, _KnownLists(mode):
        yield


def known(mode: FakeTensorMode, real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fake tensor that knows the numbers of a real one; in dtype `dtype` if one is given."""
    with no_dispatch():
        own = real.detach().to(dtype or real.dtype, copy=True)
    made: torch.Tensor = mode.fake_tensor_converter.from_real_tensor(mode, own, make_constant=True)
    return made


_number_by_number = FakeTensor.tolist


def _tolist(tensor: FakeTensor) -> Any:
    """The numbers of a tensor as lists, all at once if they are known. Torch's own way (seen in 2.13) asks for one
    number after another, which takes 400 s for the token types of one batch of Qwen2-VL."""
    if tensor.constant is None:
        return _number_by_number(tensor)
    with no_dispatch():
        return tensor.constant.tolist()


def _computed(mode: LeanFakeMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator whose tensors all have known numbers. NotImplemented if torch has to be asked, which
    takes much longer."""
    if not _is_lean(func):
        return NotImplemented
    sources: dict[int, FakeTensor] = {}
    try:
        given = _numbers_of(mode, args, sources)
        named = {name: _numbers_of(mode, (value,), sources)[0] for name, value in kwargs.items()}
    except _UnknownError:
        return NotImplemented
    if not sources or _is_in_vain(func, tuple(args)):
        return NotImplemented
    with no_dispatch():
        out = func(*given, **named)
    if type(out) is not torch.Tensor or out.numel() > MOST_KNOWN or out.layout is not torch.strided:
        return NotImplemented
    return _with_numbers(mode, out, sources)


@cache
def _is_lean(func: Any) -> bool:
    """Whether an operator returns one new tensor that depends on its arguments alone, and does nothing else."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func in _OTHERWISE:
        return False
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    returns = [str(each.type) for each in func._schema.returns]
    return not func._schema.is_mutable and not tags & set(func.tags) and returns == ["Tensor"]


_OTHERWISE = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operators for which a fake mode does more than compute their result."""


class _UnknownError(Exception):
    """Some number is not known, or a tensor is not on the CPU."""


def _numbers_of(mode: LeanFakeMode, values: Sequence[Any], sources: dict[int, FakeTensor]) -> list[Any]:
    """The values with real tensors in place of fake ones. sources: storage of a real tensor -> the fake one that has
    it."""
    given = list[Any]()
    for value in values:
        if isinstance(value, FakeTensor):
            real = value.constant if value.fake_mode is mode else None
            if type(real) is not torch.Tensor or real.device.type != "cpu" or value.fake_device.type != "cpu":
                raise _UnknownError
            sources.setdefault(real.untyped_storage()._cdata, value)
            given.append(real)
        elif isinstance(value, list | tuple):
            given.append(type(value)(_numbers_of(mode, value, sources)))
        elif isinstance(value, torch.Tensor) or (isinstance(value, torch.device) and value.type != "cpu"):
            raise _UnknownError
        else:
            given.append(value)
    return given


def _with_numbers(mode: LeanFakeMode, real: torch.Tensor, sources: dict[int, FakeTensor]) -> Any:
    """The fake tensor for a real one that was just made; it shares a storage with the fake tensor that it is a view of.
    NotImplemented if it cannot be said which part of a storage it is."""
    converter, storage = mode.fake_tensor_converter, real.untyped_storage()
    source = sources.get(storage._cdata)
    if real.is_conj() or real.is_neg():
        return NotImplemented
    if source is None:
        made = mode.like_real(real, None)
        if made.untyped_storage().nbytes() != storage.nbytes():
            return NotImplemented
    else:
        own = source.constant
        if own is None or source.storage_offset() != own.storage_offset() or source.dtype != real.dtype:
            return NotImplemented
        made = mode.like_real(real, source)
    made.constant = real
    converter.set_tensor_memo(real, made)  # where torch looks for what it has made, as for views of it
    memo, describer = converter.meta_converter.storage_memo, converter.meta_converter.describer
    memo.setdefault(describer.get_storage_id(storage), made.untyped_storage())
    converter.add_constant_storage_mapping(made)
    return made


class _KnownLists(TorchFunctionMode):
    """Lets torch.tensor read the numbers of tensors in a list, where fake tensors have none. And if a mask is expanded
    over the last dims of x to more numbers than are known, x[mask] is computed with the mask before that."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            numbers = tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x, args[0])
            args = (numbers, *args[1:])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], FakeTensor):
            mask = _before_expanding(self._mode, args[1])
            if mask is not None:
                return func(args[0], mask).flatten(0, args[1].dim() - mask.dim())
        return func(*args, **(kwargs or {}))


def _before_expanding(mode: FakeTensorMode, mask: FakeTensor) -> torch.Tensor | None:
    """The known mask that was expanded to this one, which repeats each of its numbers along its last dims; None if this
    one was not expanded so."""
    real, own = getattr(mask, _EXPANDED, None), mask.dim()
    while own and mask.stride(own - 1) == 0:
        own -= 1
    if real is None or own in (0, mask.dim()):
        return None
    with no_dispatch():
        real = real[(..., *(0,) * (mask.dim() - own))]
    return known(mode, real) if real.numel() <= MOST_KNOWN else None


_EXPANDED = "known_when_expanded"
"""Attribute of an expanded fake tensor with more numbers than are computed: the real tensor."""


class _KnownRanges(Mode):
    """While it lasts, the numbers that operators make without input (positions, zeros) are known, too, and expanded
    masks know what they repeat."""

    _MAKE = ("arange", "zeros", "ones", "full", "scalar_tensor")

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def changes(self, func: Any) -> bool:
        """Whether it may change what an operator returns. (An operator on tensors without known numbers is not
        changed.)"""
        return func.overloadpacket.__name__ in self._MAKE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_in_vain(func, args):
            with _forgotten(args):
                return func(*args, **(kwargs or {}))
        before = args[0].constant if func is torch.ops.aten.expand.default and isinstance(args[0], FakeTensor) else None
        made = func(*args, **(kwargs or {}))
        if before is not None and made.constant is None and before.dtype == torch.bool:
            with no_dispatch():
                setattr(made, _EXPANDED, before.expand(args[1]))
            return made
        is_made = func.overloadpacket.__name__ in self._MAKE and made.device.type != "meta"
        if not is_made or made.numel() > (MOST_FRACTIONS if made.is_floating_point() else MOST_KNOWN):
            return made
        with no_dispatch():
            real = func(*args, **(kwargs or {}))
        return known(self._mode, real)


_INTERPOLATING = ("grid_sampler_2d", "grid_sampler_3d", "upsample_bicubic2d", "upsample_bilinear2d")
"""Operators that torch computes by many others; those on places alone would be computed again for every channel."""


def _is_in_vain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator would compute numbers for nothing: places in a tensor whose numbers are not known, or more
    numbers than are kept."""
    fakes = [x for x in args[:3] if isinstance(x, FakeTensor)]
    if func.overloadpacket.__name__ in _INTERPOLATING:
        return any(x.constant is None for x in fakes)
    if len(fakes) < 2 or torch.Tag.pointwise not in func.tags or any(x.constant is None for x in fakes):
        return False
    numbers: int = torch.broadcast_shapes(*(x.shape for x in fakes)).numel()
    return numbers > MOST_KNOWN


@contextmanager
def _forgotten(args: tuple[Any, ...]) -> Iterator[None]:
    """While it lasts, the numbers of these tensors are not known."""
    held = [(x, x.constant) for x in args if isinstance(x, FakeTensor)]
    for x, _ in held:
        x.constant = None
    try:
        yield
    finally:
        for x, constant in held:
            x.constant = constant


class _KnownChoices(Mode):
    """Makes indices of the largest scores known although the scores are not: one after another in turn, or always the
    first ones. No row has an index twice."""

    def __init__(self, mode: FakeTensorMode, in_turn: bool) -> None:
        super().__init__()
        self._mode = mode
        self._in_turn = in_turn

    def changes(self, func: Any) -> bool:
        """Whether an operator is top-k or argmax: no other is changed."""
        return func is _TOPK or func is _ARGMAX

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        dim = args[2 if func is _TOPK else 1] if len(args) > (2 if func is _TOPK else 1) else None
        if func is _TOPK:
            values, indices = made
            return values, self._known(indices, args[0].shape, -1 if dim is None else dim, args[1])
        if func is _ARGMAX and dim is not None:
            return self._known(made, args[0].shape, dim, 1)
        return made

    def _known(self, indices: torch.Tensor, scores: torch.Size, dim: int, chosen: int) -> torch.Tensor:
        """`indices`, with known numbers. scores: shape of the scores. dim: the dim of scores and indices that is chosen
        along. chosen: how many indices of each row; for a single one the dim may be gone."""
        if not 0 < indices.numel() <= MOST_KNOWN:
            return indices
        shape = torch.empty(scores, device="meta").transpose(dim, -1).shape[:-1]
        with no_dispatch():
            row = torch.arange(indices.numel()).remainder(scores[dim] if self._in_turn else chosen)
            numbers = row.view(*shape, chosen).transpose(dim, -1).reshape(indices.shape)
        return known(self._mode, numbers)


_TOPK, _ARGMAX = torch.ops.aten.topk.default, torch.ops.aten.argmax.default
