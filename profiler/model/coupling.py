"""Whether the samples of a batch see each other, in the loss or in the gradients that hooks and functions of the model
make of it: then a micro-batch is part of what is trained, not only how."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

_DRAWS = 3
"""Batches that small models are given, as the halves of one may have as many labels of each kind by chance."""

_SCALES = (2.0**-10, 2.0**10)
"""Factors of the loss that its gradients are to follow: exact in floating point, and far enough to meet a bound."""

_IN_PROPORTION = 1e-3
"""Relative difference of gradients that may be rounding."""

_MOST_PARAMETERS = 50_000_000
_MOST_FLOPS = 20e9
_SHORT = 16
"""What is run with real numbers: at most so many parameters and FLOPs, sequences of so many tokens where these do."""


@dataclass(frozen=True)
class Coupling:
    """How the loss of a sample was seen to depend on others, in words; much: so far that it is what is trained."""

    words: str
    much: bool


@dataclass(frozen=True)
class Samples:
    """What was seen of a batch and its parts. gradients: which do not follow the loss in proportion, in words."""

    coupling: Coupling | None = None
    gradients: str = ""


def samples_of(loaded: LoadedModel, profile: ModelProfile, sizes: RunSizes) -> Samples:
    """Whether the loss of a batch is not the mean of its parts' losses, nor its gradients theirs, batch norms apart,
    which are told elsewhere.

    Small models (or the small version of the model file) are run with real numbers; of all others tensors are looked
    at that hold a number for each pair of samples.
    """
    if profile.batch_problem:
        return Samples()
    found = _by_numbers(loaded, profile)
    return found if found.coupling else replace(found, coupling=_by_shapes(sizes))


def _by_shapes(sizes: RunSizes) -> Coupling | None:
    for producer, one in sizes.one.tensors.items():
        two = sizes.two.tensors.get(producer)
        if two is None or not two.requires_grad or len(two.shape) != len(one.shape):
            continue
        if sum(b == 2 * a for a, b in zip(one.shape, two.shape, strict=True)) > 1:
            name = producer.name.rpartition(".")[2] or producer.name
            return Coupling(f"{name} makes {list(two.shape)} of 2 samples, a number for each pair of them", much=True)
    return None


def _by_numbers(loaded: LoadedModel, profile: ModelProfile) -> Samples:
    if profile.num_parameters > _MOST_PARAMETERS and loaded.small is not None:
        loaded = loaded.small()
    elif profile.num_parameters > _MOST_PARAMETERS:
        return Samples()
    flops = 2 * SAMPLES * profile.flops_per_sample()
    tries = [loaded] if flops <= _MOST_FLOPS else []
    if loaded.seq_len is not None and loaded.seq_len > _SHORT:
        tries.insert(0, loaded.with_seq_len(_SHORT))
    for each in tries:
        try:
            return _seen(each, _DRAWS if _DRAWS * flops <= _MOST_FLOPS else 1)
        except Exception:  # it runs at one length only, or needs what a CPU has not: nothing is seen then
            continue
    return Samples()


def _seen(loaded: LoadedModel, draws: int) -> Samples:
    """What real numbers show, of so many batches."""
    gradients = ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = in_training(upcast(loaded.build()))
        drawn = dice()
        for _ in range(draws):
            with torch.no_grad():
                batch = tree_map(as_float, loaded.batch(SAMPLES))
                parts = [_half(batch, loaded, i) for i in range(2)]
                weights = [1.0 if loaded.weight is None else float(loaded.weight(part)) for part in parts]
            shares = [weight / sum(weights) for weight in weights]
            with SameDraws(), dice_apart(), _batch_norms_apart(), one_thread():
                runs = [_RealRun(module, loaded, each, drawn) for each in (batch, *parts)]
            whole, mean = runs[0].loss, sum(share * run.loss for share, run in zip(shares, runs[1:], strict=True))
            if not math.isfinite(whole + mean):
                break
            difference = abs(whole - mean) / max(abs(whole), abs(mean), 1e-12)
            gradients = next((run.out_of_proportion for run in runs if run.out_of_proportion), gradients)
            if difference >= _ROUNDING:
                words = f"the loss of {SAMPLES} samples is {whole:.5g}, the mean of its halves' {mean:.5g}"
                return Samples(Coupling(words, difference >= _MUCH), gradients)
            if runs[0].gradients and not gradients:
                own, others = runs[0].gradients, [run.gradients for run in runs[1:]]
                means = {n: shares[0] * others[0][n] + shares[1] * others[1][n] for n in own}
                name, difference = _furthest(own, means)
                if difference >= _MUCH:
                    words = f"the gradient of {name} in {SAMPLES} samples is not the mean of its halves'"
                    return Samples(Coupling(words, much=True), gradients)
    return Samples(gradients=gradients)


class _RealRun:
    """One forward with real numbers, of which nothing is left in the model, and its backward where that may be other
    than what autograd makes of the forward: where the model has hooks on gradients, or functions of its own.

    gradients: by name, then; out_of_proportion: which of them does not follow a factor of the loss, in words.
    """

    def __init__(self, module: nn.Module, loaded: LoadedModel, given: Batch, drawn: Any) -> None:
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.gradients: dict[str, torch.Tensor] = {}
        self.out_of_proportion = ""
        hooked = any(p._backward_hooks for p in self._parameters.values())

        def hook(*args: Any, **kwargs: Any) -> Any:
            nonlocal hooked
            hooked = True
            return register(*args, **kwargs)

        register = torch.Tensor.register_hook
        alone = with_own_loss(loaded)
        args, kwargs = split_inputs(module, tree_map(_own, given), loaded.loss is not None)
        put_dice_back(drawn)
        with undone(module), torch.enable_grad(), patch.object(torch.Tensor, "register_hook", hook):
            output = module(*args, **kwargs)
            found = scalar(output, loaded) if alone.loss is None else alone.loss(output, given)
            self.loss = float(found.detach())
            if hooked or _has_own_backward(found, module):
                with suppress(Exception):  # a function of the model's that runs once only: nothing is seen then
                    self._run_backward(found)

    def _run_backward(self, loss: torch.Tensor) -> None:
        self.gradients = self._gradients(loss, 1.0)
        for scale in _SCALES:
            name, difference = _furthest(self.gradients, self._gradients(loss, scale))
            if difference >= _IN_PROPORTION:
                self.out_of_proportion = f"the gradient of {name} does not follow a factor of the loss"
                return

    def _gradients(self, loss: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        """Those of the loss times a factor, divided by that; zeros where there are none."""
        before = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        (loss * scale).backward(retain_graph=True)
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach() / scale
            for name, p in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            parameter.grad = before[name]
        return found


def _has_own_backward(loss: torch.Tensor, module: nn.Module) -> bool:
    """Whether a backward goes through functions that are not torch's, or counts what is in the batch."""
    if any(getattr(part, "scale_grad_by_freq", False) for part in module.modules()):
        return True
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def _furthest(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> tuple[str, float]:
    """(name, relative difference) of the gradients that are furthest apart."""
    apart = {
        name: float((own - others[name]).norm() / (own.norm() + others[name].norm() + 1e-12))
        for name, own in some.items()
    }
    return max(apart.items(), key=lambda item: item[1], default=("", 0.0))


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
