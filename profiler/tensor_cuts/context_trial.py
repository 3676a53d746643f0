"""Whether a model runs on a part of its sequence, as context-parallel ranks run it; tried on fake tensors."""

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..model.layer_run import Observation
from ..model.model_profile import ModelProfile
from ..running.fake import FakeModel
from ..semantics.token_marks import Held, mark_of, own_shape, set_mark
from ..semantics.token_slices import MixedTokensError, TokenSlices, run_token_by_token
from .tensor_trial import may_join

_RANKS = 2

_SAMPLES = 2
"""Samples in the trial. With a single one, samples joined to one row, or placed behind their tokens, would look like a
sequence."""


def context_problem(fake: FakeModel, profile: ModelProfile, repeats_reentrantly: bool) -> str:
    """Why the model does not run on a part of its sequence, in a few words; '' if it does, or has no sequence.

    Of layers of one class that are given similar tensors only the first one runs.
    """
    length = fake.loaded.seq_len
    if length is None:
        return ""
    if repeats_reentrantly:  # its backward gives the forward that it repeats new tensors, without marks
        return (
            "a reentrant checkpoint repeats a forward in backward, where it is not known which tokens are here "
            "(checkpoint(..., use_reentrant=False) is followed)"
        )
    if fake.mode is None:
        return "it decides by the values of tensors, of which each rank would have others"
    size = max(1, length // (2 * _RANKS))
    attention = _RehearsedAttention()
    tokens = TokenSlices(length, ((0, size), (length - size, length)), _RANKS, attention)
    unseen = _NotFollowed(tokens)
    batch = fake.batch(_SAMPLES, None)
    try:
        with ExitStack() as stack:
            for name in profile.expert_modules:
                module = fake.module.get_submodule(name)
                stack.enter_context(patch.object(module, "forward", partial(_run_bank, module, name, module.forward)))
            known: dict[Hashable, Any] = {}
            for layer in profile.layers:
                if layer.root and layer.modules == (layer.root,):
                    module = fake.module.get_submodule(layer.root)
                    once = partial(_run_once, module.forward, known, layer.layer_class)
                    stack.enter_context(patch.object(module, "forward", once))
            stack.enter_context(fake.running())
            stack.enter_context(tokens)
            stack.enter_context(unseen)
            loss = fake.loss(batch)
            kept = next((name for name, buffer in fake.module.named_buffers() if mark_of(buffer) is not None), "")
    except ValueError as error:
        return unseen.problem or str(error.__cause__ or error).partition("\n")[0]
    if not tokens.started:
        return (
            "no ids of its sequence are looked up in a table as (samples, tokens), and no features of it meet a weight "
            "as (samples, tokens, features)"
        )
    if profile.attention_modules and not attention.shared:
        return "attention goes over whole sequences, before ids or features of them are seen as (samples, tokens, ...)"
    if kept:
        return f"buffer {kept} keeps what is made of tokens, of which each rank has its own"
    return "its loss is not a mean over tokens" if isinstance(mark_of(loss), Held) else ""


def backward_problem(runs: Iterable[Observation], length: int | None) -> str:
    """What may join tokens in the backward of these runs, in functions of the model's own; "" if nothing may. (Hooks on
    gradients are followed by the trial itself.)"""
    own = (op for run in runs for op in run.ops if op.own == "function")
    joining = next((op for op in own if length is not None and may_join(op, length)), None)
    if joining is None:
        return ""
    return f"{joining.name} in a backward of the model's own ({joining.module or 'between modules'}) may join tokens"


class _NotFollowed(TorchDispatchMode):
    """Raises MixedTokensError if an operator is given tokens out of sight of the mode that follows them: its result
    would have no mark, and be taken for whole."""

    def __init__(self, tokens: TokenSlices) -> None:
        super().__init__()
        self._tokens = tokens
        self.problem = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        follows = self._tokens in _get_current_function_mode_stack() and not torch._C._is_torch_function_all_disabled()
        if (
            follows
            and func.namespace != "prim"
            and any(mark_of(leaf) is not None for leaf in tree_leaves((args, kwargs)))
        ):
            self.problem = (
                f"{func._overloadpacket.__name__} is called by what torch's functions do not show (torch.jit.script, "
                "for one)"
            )
            raise MixedTokensError(self.problem)
        return func(*args, **(kwargs or {}))


def _run_bank(module: nn.Module, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a bank of experts, which treats each token by itself. Raises MixedTokensError if the bank keeps a
    tensor in an attribute, as for a loss."""
    before = dict(vars(module))
    output = run_token_by_token(forward, *args, **kwargs)
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor) and value is not before.get(key):
            raise MixedTokensError(f"{name} keeps {key} aside, as of a loss, which would be of the tokens of one rank")
    return output


def _run_once(
    forward: Callable[..., Any], known: dict[Hashable, Any], layer_class: int, *args: Any, **kwargs: Any
) -> Any:
    """The output of a layer; that of a layer of the same class, if one was given similar tensors before."""
    leaves, spec = tree_flatten((args, kwargs))
    if not all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves):
        return forward(*args, **kwargs)
    key = layer_class, str(spec), tuple(_outside(leaf) for leaf in leaves)
    if key not in known:
        known[key] = forward(*args, **kwargs)
        return known[key]
    return tree_map(_like, known[key])


def _outside(leaf: Any) -> Hashable:
    """What arguments of layers are compared by: of tensors all but their numbers."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return tuple(own_shape(leaf)), leaf.dtype, leaf.requires_grad, mark_of(leaf)


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C.DisableTorchFunction():
        made = torch.empty_like(leaf).requires_grad_(leaf.requires_grad)
    return set_mark(made, mark_of(leaf))


class _RehearsedAttention:
    """Attention that returns an empty tensor (see rehearsed_attention). shared: whether it was called, so that ranks
    would share the work."""

    def __init__(self) -> None:
        self.shared = False

    def __call__(self, *given: Any, **named: Any) -> torch.Tensor:
        self.shared = True
        return rehearsed_attention(*given, **named)


def rehearsed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """An empty tensor with the shape and dtype that attention would return."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
