"""Makes a model on fake CPU tensors keep for backward what a GPU's kernels would, in place of what the CPU's do."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..semantics.distributions import unvalidated
from ..semantics.draws import DROPOUTS
from .fake_modes import LeanFakeMode
from .repeated_forwards import repeating_under

_attention = functional.scaled_dot_product_attention

RNN_SAVED_PER_OUTPUT = 6
"""Elements that a fused LSTM keeps for each element of its output: four gates, the cell and its tanh."""


@contextmanager
def as_on_gpu() -> Iterator[list[str]]:
    """While it lasts, operators on fake tensors keep what a GPU's kernels would. Yields a list of what would refuse a
    batch of one sample (batch norm over a single value)."""
    refusals: list[str] = []
    masking: Any = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        stack.enter_context(_without_checks_of_numbers())
        stack.enter_context(unvalidated())
        stack.enter_context(_Kernels())
        stack.enter_context(repeating_under(_Kernels))
        stack.enter_context(_Results())
        stack.enter_context(patch.object(functional, "_verify_batch_size", _noting(refusals)))
        if masking is not None and hasattr(masking, "find_packed_sequence_indices"):
            # from fake positions transformers cannot see that no sample is packed, and would build T x T masks
            stack.enter_context(patch.object(masking, "find_packed_sequence_indices", lambda position_ids: None))
        yield refusals


@contextmanager
def _without_checks_of_numbers() -> Iterator[None]:
    """While it lasts, an environment variable tells transformers not to check numbers that fake tensors do not have,
    such as those of a picture's tokens in a text. (Only this variable is set: to copy all of them would look like a
    model that reads them all.)"""
    before = os.environ.get(_NO_CHECKS)
    os.environ[_NO_CHECKS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_CHECKS]
        else:
            os.environ[_NO_CHECKS] = before


_NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


class _Kernels(TorchFunctionMode):
    """Attention without its dropout, for which the CPU kernel would fall back to a T x T matrix; dropout whose mask is
    a byte per element, where the CPU's has the compute dtype; LSTMs fused in any dtype; x[mask] = value, which looks
    for the mask's places first, as a choice between value and x at all of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _attention:
            return _without_dropout(*args, **kwargs)
        if func in _DROPOUTS:
            before = _in_dropout.set(True)
            try:
                return _dropout(func, *args, **kwargs)
            finally:
                _in_dropout.reset(before)
        if func is torch.lstm and _can_be_fused(*args):
            return _lstm(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and _is_by_mask(*args):
            tensor, mask, value = args
            where = mask.reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim())).to(tensor.device)
            tensor.copy_(torch.where(where, value, tensor))
            return None
        if func is functional.multi_head_attention_forward:
            # it calls attention where this mode does not see it
            with patch.object(functional, "scaled_dot_product_attention", _without_dropout):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_by_mask(tensor: torch.Tensor, mask: Any, value: Any) -> bool:
    """Whether x[mask] = value gives all places of the mask the same value."""
    if not (isinstance(tensor, FakeTensor) and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool):
        return False
    return not isinstance(value, torch.Tensor) or value.dim() <= tensor.dim() - mask.dim()


def _without_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    if attn_mask is not None and query.dim() - attn_mask.dim() == 1 and attn_mask.dim() > 2:
        attn_mask = attn_mask.unsqueeze(0)  # a mask of heads alone, for which the CPU has no fused kernel
    if query.shape[-1] == value.shape[-1] or not isinstance(query, FakeTensor):
        return _attention(query, key, value, attn_mask, 0.0, is_causal, **more)
    # values of another width (latent attention): a GPU's memory-efficient kernel takes them, no fused one of the CPU
    groups = query.shape[-3] // key.shape[-3] if more.get("enable_gqa") else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = attn_mask if attn_mask is None else attn_mask.to(query.dtype)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    output: torch.Tensor = efficient(query, key, value, bias, True, 0.0, is_causal, scale=more.get("scale"))[0]
    return output


def in_dropout() -> bool:
    """Whether one of torch's dropouts is running, whose masks the executor draws sample by sample."""
    return _in_dropout.get()


_in_dropout = ContextVar("in_dropout", default=False)

_DROPOUTS = (*(getattr(functional, name) for name in DROPOUTS), torch.dropout)


def _dropout(
    func: Callable[..., Any],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **more: Any,
) -> torch.Tensor:
    training = more.get("train", training)
    if inplace or not training or p == 0.0 or func not in (functional.dropout, torch.dropout):
        kept: torch.Tensor = func(input, p, training) if func is torch.dropout else func(input, p, training, inplace)
        return kept
    return torch.native_dropout(input, p, True)[0]


def _can_be_fused(input: torch.Tensor, hx: Any, *more: Any) -> bool:
    """Whether an LSTM can be fused: its input is not a packed sequence (then sizes stand in the place of states), and
    it has no projections."""
    return isinstance(input, FakeTensor) and not isinstance(hx, torch.Tensor) and hx[0].shape == hx[1].shape


def _lstm(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of an LSTM, by one fused call for each layer and direction. CPU libraries have such a call in fp32,
    and in bf16 on processors that can (oneDNN: AVX-512); otherwise torch goes through the sequence step by step, as no
    GPU does."""
    directions, (hidden, cells) = 1 + bidirectional, hx
    each, width = len(weights) // (num_layers * directions), cells.shape[-1]
    layer = (input.transpose(0, 1) if batch_first else input).contiguous()
    last_hidden, last_cells = [], []
    for i in range(num_layers):
        outputs = []
        for number in range(i * directions, (i + 1) * directions):
            own = list(weights[number * each : (number + 1) * each])
            own += [] if has_biases else [own[0].new_zeros(4 * width)] * 2
            output, own_hidden, own_cells, _ = torch.ops.aten.mkldnn_rnn_layer(
                layer, *own, hidden[number], cells[number], number % directions == 1, [], _LSTM, width, num_layers,
                has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            last_hidden.append(own_hidden)
            last_cells.append(own_cells)
        layer = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if i < num_layers - 1:
            layer = _dropout(functional.dropout, layer, dropout, train)
    output = layer.transpose(0, 1) if batch_first else layer
    return output, torch.stack(last_hidden), torch.stack(last_cells)


_LSTM = 2
"""Torch's number for an LSTM among recurrent layers (at::native, mkldnn_rnn_layer)."""


class Mode(TorchDispatchMode):
    """A dispatch mode that torch does not wrap in protection from its compiler, which would cost time at every
    operator."""

    _fakes: LeanFakeMode | None = None
    _between: tuple["Mode", ...] = ()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def changes(self, func: Any) -> bool:
        """Whether this mode does more with an operator than run it. Modes that only note what runs must be on top of
        others."""
        return True

    def __enter__(self) -> Self:
        below = _get_current_dispatch_mode_stack()
        between = tuple(mode for mode in below[1:] if isinstance(mode, Mode))
        fakes = below[0] if len(between) == len(below) - 1 else None
        self._fakes, self._between = fakes if isinstance(fakes, LeanFakeMode) else None, between
        self._changed: dict[Any, bool] = {}
        super().__enter__()
        return self

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator in the modes below this one. If a lean fake mode knows it from before, and no mode
        between changes it, it is returned at once: torch would go through all modes."""
        if (device := device_of(func, args)) is not None:
            return device
        if self._fakes is not None:
            changed = self._changed.get(func)
            if changed is None:
                changed = self._changed[func] = any(mode.changes(func) for mode in self._between)
            if not changed:
                known = self._fakes.answer(func, args, kwargs)
                if known is not NotImplemented:
                    return known
        return func(*args, **kwargs)


def device_of(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """The device of a fake tensor, if that is what torch asks for, as it does several times for each operator; None if
    it asks for something else. Any mode may answer this without asking those below it."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that an operator is given, or returns: by themselves or in lists, tuples and dicts. This is asked of
    every operator of every run, so not of torch's pytrees, which know any container and take longer than the run."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    found = []
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple | dict):
            found += tensors_in(item)
    return found


class _Results(Mode):
    """Puts right what fake kernels return: the workspace of a fused LSTM would have no bytes; a batch norm over one
    value, which training will not meet, would divide by zero; bags of embeddings would be noted as on a CPU; and some
    losses would be new scalars, where real ones keep the memory of all their terms."""

    def changes(self, func: Any) -> bool:
        """Whether an operator is one of these."""
        return func in _CHANGED

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := device_of(func, args)) is not None:
            return device
        if func in _BATCH_NORMS and args[0].numel() == args[0].shape[1]:
            given = args[0]
            return given.new_empty(given.shape), given.new_empty(given.shape[1]), given.new_empty(given.shape[1])
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default and isinstance(args[0], FakeTensor):
            output, hidden, cell, _ = out
            return output, hidden, cell, output.new_empty(RNN_SAVED_PER_OUTPUT * output.numel())
        if func is torch.ops.aten._embedding_bag.default:
            output, _, bag_size, largest = out
            return (
                output,
                args[1].new_empty(args[1].shape),
                bag_size,
                largest if largest.dim() == 2 else args[1].new_empty(0),
            )
        if func in _LOSSES_WITH_TERMS and out.dim() == 0 and isinstance(out, FakeTensor):
            terms = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
            return out.new_empty(terms).as_strided((), ())
        return out


_LOSSES_WITH_TERMS = (
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
)

_BATCH_NORMS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default)

_CHANGED = frozenset(
    {
        *_LOSSES_WITH_TERMS,
        *_BATCH_NORMS,
        torch.ops.aten.mkldnn_rnn_layer.default,
        torch.ops.aten._embedding_bag.default,
    }
)


def _noting(refusals: list[str]) -> Callable[[Any], None]:
    def check(size: Any) -> None:
        values = size[0] * torch.Size(size[2:]).numel()
        if values == 1:
            refusals.append(f"batch norm over {list(size)}")

    return check
