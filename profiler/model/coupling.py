"""Whether the samples of a batch see each other: then a micro-batch is part of what is trained, not only how."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ..semantics.draws import SameDraws, dice, dice_apart, put_dice_back
from ..threads import one_thread
from .batches import named_tensors
from .building import in_training
from .fake import scalar
from .forward_state import undone
from .loaded import Batch, LoadedModel, split_inputs
from .model_profile import ModelProfile
from .run_sizes import RunSizes

SAMPLES = 4
"""Samples whose loss is held against the mean of the losses of its two halves."""

_ROUNDING = 1e-4
"""Relative difference of two losses in fp32 that may be rounding."""

_MUCH = 0.01
"""Relative difference of the loss from which the samples that see each other are what is trained."""

_MOST_PARAMETERS = 50_000_000
_MOST_FLOPS = 20e9
_SHORT = 16
"""What is run with real numbers: at most so many parameters and FLOPs, sequences of so many tokens where these do."""


@dataclass(frozen=True)
class Coupling:
    """How the loss of a sample was seen to depend on others, in words; much: so far that it is what is trained."""

    words: str
    much: bool


def coupling_of(loaded: LoadedModel, profile: ModelProfile, sizes: RunSizes) -> Coupling | None:
    """Whether the loss of a batch is not the mean of its parts' losses, batch norms apart, which are told elsewhere.

    Small models (or the small version of the model file) are run with real numbers; of all others tensors are looked
    at that hold a number for each pair of samples.
    """
    if profile.batch_problem:
        return None
    found = _by_numbers(loaded, profile)
    return found or _by_shapes(sizes)


def _by_shapes(sizes: RunSizes) -> Coupling | None:
    for producer, one in sizes.one.tensors.items():
        two = sizes.two.tensors.get(producer)
        if two is None or not two.requires_grad or len(two.shape) != len(one.shape):
            continue
        if sum(b == 2 * a for a, b in zip(one.shape, two.shape, strict=True)) > 1:
            name = producer.name.rpartition(".")[2] or producer.name
            return Coupling(f"{name} makes {list(two.shape)} of 2 samples, a number for each pair of them", much=True)
    return None


def _by_numbers(loaded: LoadedModel, profile: ModelProfile) -> Coupling | None:
    if profile.num_parameters > _MOST_PARAMETERS and loaded.small is not None:
        loaded = loaded.small()
    elif profile.num_parameters > _MOST_PARAMETERS:
        return None
    flops = 2 * SAMPLES * profile.flops_per_sample()
    tries = [loaded] if flops <= _MOST_FLOPS else []
    if loaded.seq_len is not None and loaded.seq_len > _SHORT:
        tries.insert(0, loaded.with_seq_len(_SHORT))
    for each in tries:
        try:
            whole, parts = _losses(each)
        except Exception:  # it runs at one length only, or needs what a CPU has not: nothing is seen then
            continue
        if not math.isfinite(whole + parts):
            return None
        difference = abs(whole - parts) / max(abs(whole), abs(parts), 1e-12)
        if difference < _ROUNDING:
            return None
        words = f"the loss of {SAMPLES} samples is {whole:.4g}, the mean of its halves' {parts:.4g}"
        return Coupling(words, difference >= _MUCH)
    return None


def _losses(loaded: LoadedModel) -> tuple[float, float]:
    """(loss of a batch, mean of the losses of its halves), with real numbers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = in_training(upcast(loaded.build()))
        batch = tree_map(as_float, loaded.batch(SAMPLES))
        halves = [_half(batch, loaded, i) for i in range(2)]

        drawn = dice()

        def loss(given: Batch) -> float:
            alone = with_own_loss(loaded)
            args, kwargs = split_inputs(module, tree_map(_own, given), loaded.loss is not None)
            put_dice_back(drawn)
            with undone(module), torch.enable_grad():
                output = module(*args, **kwargs)
                found = scalar(output, loaded) if alone.loss is None else alone.loss(output, given)
            return float(found)

        with SameDraws(), dice_apart(), _batch_norms_apart(), one_thread():
            whole, parts = loss(batch), [loss(half) for half in halves]
        weights = [1.0 if loaded.weight is None else float(loaded.weight(half)) for half in halves]
    return whole, sum(w * p for w, p in zip(weights, parts, strict=True)) / sum(weights)


def with_own_loss(loaded: LoadedModel) -> LoadedModel:
    """The model with a loss of its own where that is an object, which may count its calls: others' do not add to it."""
    if loaded.loss is None or isinstance(loaded.loss, FunctionType | MethodType):
        return loaded
    return replace(loaded, loss=copy.deepcopy(loaded.loss))


def _half(batch: Batch, loaded: LoadedModel, which: int) -> Batch:
    """Half of a batch: along the dims that grow with samples."""
    one, two = named_tensors(loaded.batch(1)), named_tensors(loaded.batch(2))
    dims = {
        id(tensor): next((d for d, (a, b) in enumerate(zip(one[n].shape, two[n].shape, strict=True)) if a != b), None)
        for n, tensor in named_tensors(batch).items()
    }

    def half(leaf: Any) -> Any:
        dim = dims.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf
        size = leaf.shape[dim] // 2
        return leaf.narrow(dim, which * size, size).contiguous()

    made: Batch = tree_map(half, batch)
    return made


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _batch_norms_apart() -> Iterator[None]:
    """Batch norms normalise every sample alike, by no statistics of the batch."""
    original: Callable[..., torch.Tensor] = functional.batch_norm

    def fixed(
        input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, *more: Any,
        **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        mean, variance = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
        return original(input, mean, variance, weight, bias, training=False, eps=named.get("eps", 1e-5))

    with patch.object(functional, "batch_norm", fixed):
        yield


_HALF = (torch.float16, torch.bfloat16)


def as_float(leaf: Any) -> Any:
    """A tensor of half precision in fp32; anything else as it is."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF else leaf


def upcast(module: nn.Module) -> nn.Module:
    """The module with its half-precision tensors in fp32; those of double precision stay."""
    module._apply(as_float)
    return module
