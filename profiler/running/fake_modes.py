"""Fake tensors without what torch does around each operator for its compiler and its logs.

Layers are run dozens of times, and nearly all operators of a run have been seen: torch keeps what each of them returns,
but takes longer to look that up, and to make a tensor of it, than a layer's own Python takes. Here both are lean; what
may be kept, and how outputs alias inputs, is torch's answer as before.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from .kept_results import note_run


@cache
def begin_autograd() -> None:
    """Run a first backward, so that autograd's engine sees which devices there are. A torch with CUDA on a machine
    without a GPU shows the engine one as soon as fake tensors are made, and with such a device it refuses to run in
    processes that are forked from this one (torch 2.11)."""
    torch.ones((), requires_grad=True, device="cpu").backward()


def fake_mode() -> FakeTensorMode:
    """torch's mode for fake tensors, beside which real ones may be used."""
    begin_autograd()
    return _FakeMode(allow_non_fake_inputs=True)


class _FakeMode(FakeTensorMode):
    """Torch's fake mode, with three answers of its own.

    Torch knows grouped products in bfloat16 only; here they have any dtype, as on a CPU. For the size of what CTC
    keeps, torch would ask for the number of the longest target; here it is as large as for targets that use all their
    letters. And if a tensor with known numbers is looked up by unknown indices, torch would take whatever is in the
    memory of the result for known numbers; here they are unknown.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """The result of an operator; it has known numbers only if all fake tensors among its arguments have."""
        if func in _CTC:
            with self:
                return _ctc_like(args[0], args[1])
        if func is _GROUPED and args[0].dtype is not torch.bfloat16:
            with self:
                return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).to(args[0].dtype)
        output = super().dispatch(func, types, args, kwargs or {})
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, FakeTensor) and leaf.constant is not None]
        if made and any(leaf.constant is None for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)):
            for leaf in made:
                leaf.constant = None
        return output


_GROUPED = torch.ops.aten._grouped_mm.default

_CTC = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)


def _ctc_like(log_probabilities: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each sample, what CTC keeps for backward: a number for each frame and each place of the target, with
    blanks between)."""
    rows, samples, _ = log_probabilities.shape
    kept = log_probabilities.new_empty(samples, rows, 2 * targets.shape[-1] + 1)
    return log_probabilities.new_empty(samples), kept


@contextmanager
def without_log() -> Iterator[None]:
    """While it lasts, torch's fake tensors do not log what they refuse; they still raise it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


class LeanFakeMode(_FakeMode):
    """A fake mode that answers by itself what torch's has answered before, and may keep.

    Where in its storage a tensor begins makes no difference to what is made of it, so the answer for one part of a
    tensor (a window of a picture, a piece of a sequence) is that for all parts of its shape.
    """

    def __init__(self) -> None:
        begin_autograd()
        super().__init__(allow_non_fake_inputs=True)
        self._answers: dict[tuple[Any, ...], _Returned | None] = {}
        """None: it depends on where the tensors begin, and the answer is kept with that."""
        self.cache_enabled = False  # torch's own
        self._attributes: dict[torch.device | None, dict[str, Any]] = {}
        self.computed: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] = _not_computed
        """Computes the result of an operator if the numbers of its tensors are known (known_numbers.py)."""

    def __enter__(self) -> Self:
        note_run()
        super().__enter__()
        return self

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operator, from what it returned before; NotImplemented if torch has to be asked."""
        key, begins = self._question(func, args, kwargs)
        return self._known(key, begins, args) if key else self.computed(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key, begins = self._question(func, args, kwargs)
        if not key:
            made = self.computed(func, args, kwargs)
            return self.dispatch(func, types, args, kwargs) if made is NotImplemented else made
        known = self._known(key, begins, args)
        if known is not NotImplemented:
            return known
        output = self.dispatch(func, types, args, kwargs)
        found = self._found(func, args, kwargs, output)
        if found is not None:
            by_place = any(argument.name == "storage_offset" for argument in func._schema.arguments)
            if by_place or any(made.casts(args) for made in found.outputs):
                self._answers[key] = None
                key += begins
            self._answers[key] = found
        return output

    def _question(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """(all that a result may depend on, without where tensors begin in their storages; where they begin). The first
        is empty if the result may depend on more."""
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        begins: list[int] = []
        known: list[bool] = []
        given = self._describe(args, key, begins, known)
        if not given or (kwargs and not self._describe(kwargs.items(), key, begins, known)):
            return (), ()
        if known:
            chosen = _rows_chosen(args[1]) if func is _INDEX else () if _is_by_shapes(func) else None
            if len(known) == len(begins) or chosen is None:
                return (), ()
            key += chosen
        return tuple(key), tuple(begins)

    def _describe(self, values: Collection[Any], key: list[Any], begins: list[int], known: list[bool]) -> bool:
        """Add to the key all of these values that a result may depend on. Returns False if that cannot be told. known:
        gets an entry for each tensor with known numbers, on which the result must not depend."""
        key.append(len(values))
        for value in values:
            kind = type(value)
            if isinstance(value, FakeTensor):
                if value.fake_mode is not self or value.layout is not torch.strided:
                    return False
                if value.constant is not None:
                    known.append(True)
                key += (
                    value.shape,
                    value.stride(),
                    value.untyped_storage().nbytes(),
                    value.dtype,
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
                begins.append(int(value.storage_offset()))
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind in _CONTAINERS:
                key.append(kind)
                if not self._describe(value, key, begins, known):
                    return False
            else:
                return False
        return True

    def _known(self, key: tuple[Any, ...], begins: tuple[int, ...], args: Sequence[Any]) -> Any:
        found: Any = self._answers.get(key, NotImplemented)
        if found is None:
            found = self._answers.get(key + begins, NotImplemented)
        if found is NotImplemented:
            return NotImplemented
        outputs = [self._made(output, args) for output in found.outputs]
        return outputs[0] if found.container is None else found.container(outputs)

    def _made(self, like: "_Output", args: Sequence[Any]) -> Any:
        given = None if like.given is None else args[like.given]
        if like.shape is None:
            return like.constant if given is None else given
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            inner = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
            if given is not None:
                inner.set_(given.untyped_storage(), given.storage_offset() + like.begin, like.shape, like.stride)
            made = torch.Tensor._make_subclass(
                FakeTensor, inner, like.requires_grad, dispatch_device=True, device_for_backend_keys=like.device
            )
        torch._C._set_throw_on_mutable_data_ptr(made)
        if like.device not in self._attributes:
            self._attributes[like.device] = dict(vars(FakeTensor(self, inner, like.device)))
        vars(made).update(self._attributes[like.device])
        return made

    def like_real(self, real: torch.Tensor, within: FakeTensor | None) -> FakeTensor:
        """A fake tensor with the layout of a real one. within: the tensor whose storage it shares; None: it has one of
        its own."""
        shape, stride, begin = tuple(real.shape), real.stride(), int(real.storage_offset())
        given = None if within is None else 0
        begin -= 0 if within is None else int(within.storage_offset())
        made: FakeTensor = self._made(_Output(given, shape, stride, begin, real.dtype, real.device), (within,))
        return made

    def _found(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> "_Returned | None":
        """What to keep of an operator's result, if the same arguments always give the same; else None."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        views = func in _VIEWS_OF_FIRST
        if not views and func is not _INDEX:  # if masks are known, the key has the number of rows
            try:
                self._validate_cache_key(func, args, kwargs)
            except _BypassDispatchCache:
                return None
        container = next((kind for kind in _CONTAINERS if isinstance(output, kind)), None)  # or named, as of a norm
        if container is list and not views and len(output) != len(func._schema.returns):
            return None
        found = []
        for made in (output,) if container is None else output:
            like = self._like(func, args, kwargs, made, views)
            if like is None:
                return None
            found.append(like)
        return _Returned(tuple(found), container)

    def _like(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, views: bool
    ) -> "_Output | None":
        if made is None or isinstance(made, int):
            return _Output(None, constant=made)
        is_plain = isinstance(made, FakeTensor) and made.constant is None and made.layout is torch.strided
        if not is_plain or made.is_conj() or made.is_neg() or any(made is value for value in kwargs.values()):
            return None
        itself = next((i for i, value in enumerate(args) if value is made), None)
        if itself is not None:
            return _Output(itself)
        given = None
        if views or func.is_view:
            (given,) = (i for i, value in enumerate(args) if isinstance(value, torch.Tensor))
            if made.untyped_storage()._cdata != args[given].untyped_storage()._cdata:
                return None
        like = _Output.of(made, given, args)
        is_like = torch._C._dispatch_key_set(self._made(like, args)) == torch._C._dispatch_key_set(made)
        return like if is_like else None


def _not_computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return NotImplemented


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor in the result of an operator. given: place of the argument that it is a view of, or that it is itself if
    `shape` is None. begin: elements between its start and that of this argument, or of its own storage."""

    given: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    begin: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    constant: Any = None
    """The value, if it is not a tensor."""

    @classmethod
    def of(cls, made: FakeTensor, given: int | None, args: Sequence[Any]) -> "_Output":
        """A tensor as it was made."""
        begin = int(made.storage_offset()) - (0 if given is None else int(args[given].storage_offset()))
        return cls(given, tuple(made.shape), made.stride(), begin, made.dtype, made.fake_device, made.requires_grad)

    def casts(self, args: Sequence[Any]) -> bool:
        """Whether it is a view of its argument in another dtype, so that places are counted in other units."""
        return self.given is not None and self.shape is not None and self.dtype != args[self.given].dtype


@dataclass(frozen=True, slots=True)
class _Returned:
    """What an operator returned: one, or a container of several."""

    outputs: tuple[_Output, ...]
    container: type[list[Any]] | type[tuple[Any, ...]] | None = None


_aten = torch.ops.aten
_VIEWS_OF_FIRST = frozenset(
    {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten._unsafe_view.default}
)
"""Operators that return views of their first argument (all of them, or none), as the storages tell."""

_BY_SHAPES = frozenset(
    {
        _aten.embedding.default,
        _aten.embedding_dense_backward.default,
        _aten.nll_loss_forward.default,
        _aten.nll_loss_backward.default,
    }
)


@cache
def _is_by_shapes(func: Any) -> bool:
    """Whether an operator gives the same fake tensors whatever the numbers of its inputs are: it works element by
    element or looks rows up, and writes into none of them."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return False
    return func in _BY_SHAPES or torch.Tag.pointwise in func.tags


_INDEX = _aten.index.Tensor


def _rows_chosen(indices: Sequence[Any]) -> tuple[int, ...] | None:
    """Numbers of rows that the masks in x[indices] choose; None if these are not known."""
    masks = [each for each in indices if each is not None and each.dtype not in (torch.int64, torch.int32)]
    if any(each.dtype is not torch.bool or each.constant is None for each in masks):
        return None
    with no_dispatch():
        return tuple(int(each.constant.count_nonzero()) for each in masks)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (list, tuple)
