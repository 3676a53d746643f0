"""Whether the samples of a batch see each other, in the loss or in the gradients that hooks and functions of the model
make of it: then the size of a micro-batch changes what is trained, and not only how."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from ..running.fake import scalar
from ..running.forward_state import undone
from ..running.own_backward import has_own_backward
from ..semantics.draws import SameDraws, dice, dice_apart, put_dice_back
from ..threads import one_thread
from .batches import named_tensors
from .building import in_training
from .failures import called
from .loaded import Batch, LoadedModel, split_inputs
from .model_profile import ModelProfile
from .run_sizes import RunSizes

SAMPLES = 4
"""Samples in the batch whose loss is compared with the mean of the losses of its two halves."""

_ROUNDING = 1e-4
"""Relative difference of two losses in fp32 that may be rounding."""

_MUCH = 0.01
"""Relative difference from which samples that see each other are taken to be what is trained, and no side effect; of
the loss, and of gradients that the model's own functions or hooks make."""

_MUCH_APART = 0.2
"""The same for gradients that autograd makes of a loss. Seen: 0.2 to 0.57 for losses over the worst half of a batch,
for two losses that are scaled to each other, and for a mean over the batch that is subtracted."""

_EXPLAINED = 0.05
"""A cause explains a difference if no more than this share of it is left: chosen, as rounding leaves a thousandth."""

_DRAWS = 3
"""Batches that small models are given: in a single one both halves may happen to have as many labels of each kind."""

_SCALES = (2.0**-10, 2.0**10)
"""Factors of the loss, which its gradients should follow: exact in floating point, and large enough to meet a bound."""

_IN_PROPORTION = 1e-3
"""Relative difference of gradients that may come from rounding."""

_FLOOR = 5e-3
"""A gradient below this share of the model's largest gradient is compared relative to that share: one that is zero by
mathematics (of an attention key's bias) is nothing but rounding."""

_LOOKED_AT = 1_000_000
"""Elements of the parameters whose gradients are compared if autograd makes all gradients, the smallest parameters
first: 0.1 s of CPU more for 40 M parameters (measured)."""

_MOST_PARAMETERS = 50_000_000
_MOST_FLOPS = 20e9
_SHORT = 16
"""Limits for runs with real numbers: so many parameters and FLOPs, and sequences of so many tokens if the model takes
them."""


@dataclass(frozen=True)
class Coupling:
    """How the loss of a sample was seen to depend on others, in words. much: so strongly that the dependence is part of
    what is trained. weighs: samples only have different weights."""

    words: str
    much: bool
    weighs: bool = False


@dataclass(frozen=True)
class Samples:
    """What runs with real numbers showed of a batch and its parts. gradients: which of them does not grow in proportion
    to the loss, in words.

    bank: name of a bank of experts whose result for a token depends on the other tokens.
    """

    coupling: Coupling | None = None
    gradients: str = ""
    bank: str = ""


def samples_of(loaded: LoadedModel, profile: ModelProfile, sizes: RunSizes) -> Samples:
    """Whether the loss or the gradients of a batch are not the mean of those of its parts. Batch norms, which are told
    of elsewhere, do not count.

    Small models (or the small version in the model file) are run with real numbers. Others are searched for tensors
    that hold a number for each pair of samples.
    """
    _check_weight(loaded)
    if profile.batch_problem:
        return Samples()
    found = _by_numbers(loaded, profile)
    return found if found.coupling else replace(found, coupling=_by_shapes(sizes))


def _check_weight(loaded: LoadedModel) -> None:
    """Raises ValueError if weight(batch) of the model file fails, or returns anything but a number from 0 up."""
    weight = loaded.weight
    if weight is None:
        return
    with torch.random.fork_rng(devices=[]), dice_apart(), torch.no_grad():
        batch, what = loaded.batch(2), f"weight(batch) of {loaded.source}"
        given = called(lambda: weight(batch), what)
    numbers = given.flatten().tolist() if isinstance(given, torch.Tensor) else [given]
    one = numbers[0] if len(numbers) == 1 else None
    if not isinstance(one, int | float) or not 0 <= one < math.inf:
        found = f"a tensor of {list(given.shape)}" if isinstance(given, torch.Tensor) and one is None else f"{one!r}"
        raise ValueError(
            f"{what} gives {found}; it must give one number, how much a micro-batch counts in the mean loss (its valid "
            "tokens, say)"
        )


def _by_shapes(sizes: RunSizes) -> Coupling | None:
    for producer, one in sizes.one.tensors.items():
        two = sizes.two.tensors.get(producer)
        if two is None or not two.requires_grad or len(two.shape) != len(one.shape):
            continue
        if sum(b == 2 * a for a, b in zip(one.shape, two.shape, strict=True)) > 1:
            name = producer.name.rpartition(".")[2] or producer.name
            return Coupling(f"{name} makes {list(two.shape)} of 2 samples, a number for each pair of them", much=True)
    return None


def small_enough(loaded: LoadedModel, profile: ModelProfile) -> LoadedModel | None:
    """The model, if it is small enough to be run with real numbers, else its small version; None if it has none."""
    if profile.num_parameters <= _MOST_PARAMETERS:
        return loaded
    return None if loaded.small is None else loaded.small()


def _by_numbers(loaded: LoadedModel, profile: ModelProfile) -> Samples:
    small = small_enough(loaded, profile)
    if small is None:
        return Samples()
    loaded = small
    flops = 2 * SAMPLES * profile.flops_per_sample()
    tries = [loaded] if flops <= _MOST_FLOPS else []
    if loaded.seq_len is not None and loaded.seq_len > _SHORT:
        tries.insert(0, loaded.with_seq_len(_SHORT))
    for each in tries:
        try:
            draws = _DRAWS if _DRAWS * flops <= _MOST_FLOPS else 1
            return _seen(each, draws, profile.expert_modules, profile.smallest_micro_batch == 1)
        except Exception:  # it runs at one length only, or not on a CPU: nothing is seen
            continue
    return Samples()


def _seen(loaded: LoadedModel, draws: int, banks: Iterable[str], takes_one: bool) -> Samples:
    """What runs of so many batches with real numbers show; of several findings the strongest. takes_one: whether the
    model may be given one sample."""
    coupling: Coupling | None = None
    gradients = bank = ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = in_training(upcast(loaded.build()))
        drawn = dice()
        for _ in range(draws):
            with torch.no_grad():
                batch = tree_map(as_float, loaded.batch(SAMPLES))
                parts = [_half(batch, loaded, i) for i in range(2)]
            shares = _shares(loaded, parts)
            with SameDraws(), dice_apart(), _BatchNormsApart() as norms, one_thread():
                with _calls_of(banks, module) as differing:
                    runs = [_RealRun(module, loaded, batch, drawn)]
                for part in parts:
                    norms.begin_again()
                    runs.append(_RealRun(module, loaded, part, drawn))
                alone, own = [], list[float]()
                with suppress(Exception), torch.random.fork_rng(devices=[]):  # what it cannot do with one sample
                    each = [_half(parts[0], loaded, i) for i in range(2)] if takes_one else []
                    own = _shares(loaded, each)
                    for part in each if own else []:
                        norms.begin_again()
                        alone.append(_RealRun(module, loaded, part, drawn))
            bank = bank or next(iter(differing), "")
            if not all(math.isfinite(run.loss) for run in runs):
                break
            gradients = next((run.out_of_proportion for run in runs if run.out_of_proportion), gradients)
            found = _between(runs, shares, not gradients) or _in_pairs(runs[1], alone, own)
            coupling = found if coupling is None or (found is not None and found.much) else coupling
            if coupling is not None and (coupling.much or coupling.weighs):
                break
    return Samples(coupling, gradients, bank)


@contextmanager
def _calls_of(banks: Iterable[str], module: nn.Module) -> Iterator[list[str]]:
    """Yields a list that fills, while it lasts, with the names of those banks of experts that return something else for
    the first half of their tokens when they are given no others: their experts choose among all tokens, or have room
    for only so many."""
    differing: list[str] = []

    def look(name: str, bank: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tokens = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim() > 1), None)
        if tokens is None or name in differing:
            return
        count = tokens.shape[-2]

        def first(leaf: Any) -> Any:
            is_of_tokens = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[-2] == count
            return leaf[..., : count // 2, :] if is_of_tokens else leaf

        try:
            with undone(bank), torch.no_grad(), dice_apart():
                alone = tree_leaves(bank.forward(*tree_map(first, args), **tree_map(first, kwargs)))
        except Exception:  # it takes this number of tokens only
            differing.append(name)
            return
        expected = tree_leaves(tree_map(first, output))
        pairs = [(a, b) for a, b in zip(alone, expected, strict=False) if isinstance(a, torch.Tensor)]
        if len(alone) != len(expected) or not all(_is_alike(a, b) for a, b in pairs):
            differing.append(name)

    handles = [
        module.get_submodule(name).register_forward_hook(partial(look, name), with_kwargs=True) for name in banks
    ]
    try:
        yield differing
    finally:
        for handle in handles:
            handle.remove()


def _is_alike(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results have the same shape and, for floating-point numbers, equal elements but for rounding."""
    if own.shape != other.shape or not own.is_floating_point() or not own.numel():
        return own.shape == other.shape
    return bool((own - other).abs().max() <= _IN_PROPORTION * other.abs().max())


def _between(runs: "list[_RealRun]", shares: list[float], in_proportion: bool) -> Coupling | None:
    """How the loss or the gradients of a batch differ from the mean of its halves'; None if they do not. runs: of the
    batch and of each half. shares: weight of each half in the mean. in_proportion: whether gradients follow a factor of
    the loss; else they are not compared."""
    whole, mean = runs[0].loss, sum(share * run.loss for share, run in zip(shares, runs[1:], strict=True))
    difference = abs(whole - mean) / max(abs(whole), abs(mean), 1e-12)
    name, apart, counted = "", 0.0, None
    if in_proportion and all(run.gradients for run in runs):
        own, first, second = (run.gradients for run in runs)
        name, apart = _furthest(own, {n: shares[0] * first[n] + shares[1] * second[n] for n in own}, _FLOOR)
        counted = _share_of_first(own, first, second, shares[0]) if apart >= _IN_PROPORTION else None
    if difference < _ROUNDING and apart < _MUCH:
        return None
    by_loss = f"the loss of {SAMPLES} samples is {whole:.5g}, the mean of its halves' {mean:.5g}"
    by_gradient = f"the gradient of {name} in {SAMPLES} samples is not the mean of its halves'"
    if counted is not None:
        words = (
            f"the first half of {SAMPLES} samples has {counted:.0%} of the weight in their loss and {shares[0]:.0%} as "
            "a micro-batch, as where a loss is the mean over what counts in a batch (labels that are not ignored); "
            "weight(batch) in the model file, how much counts, makes up for that"
        )
        return Coupling(words, difference >= _MUCH, weighs=True)
    added = sum(run.loss for run in runs[1:])
    if difference >= _MUCH and abs(whole - added) < _ROUNDING * abs(whole):
        words = (
            f"the loss of {SAMPLES} samples, {whole:.5g}, is the sum of its halves' and not their mean; let the loss "
            'be a mean over samples, as reduction="mean" makes it'
        )
        return Coupling(words, much=True)
    if difference >= _MUCH:
        return Coupling(by_loss, much=True)
    has_own = any(run.has_own_backward for run in runs)
    if apart >= (_MUCH if has_own and difference < _ROUNDING else _MUCH_APART):
        return Coupling(by_gradient, much=True)
    return Coupling(by_loss if difference >= _ROUNDING else by_gradient, much=False)


def _shares(loaded: LoadedModel, parts: "list[Batch]") -> list[float]:
    """Weight of each part of a batch in the mean of their losses; [] if all have a weight of 0."""
    with torch.no_grad():
        weights = [1.0 if loaded.weight is None else float(loaded.weight(part)) for part in parts]
    return [weight / sum(weights) for weight in weights] if any(weights) else []


def _in_pairs(two: "_RealRun", alone: "list[_RealRun]", shares: list[float]) -> Coupling | None:
    """How the loss of two neighbouring samples differs from the mean of theirs alone, as in a loss that compares every
    other sample with the next; None if it does not. alone: runs of each of the two, or fewer if they do not run.
    shares: weight of each in the mean."""
    if len(alone) < 2:
        return None
    mean = sum(share * run.loss for share, run in zip(shares, alone, strict=True))
    if abs(two.loss - mean) <= _MUCH * max(abs(two.loss), abs(mean), 1e-12):  # false if one is NaN
        return None
    own, first, second = (run.gradients for run in (two, *alone))
    if own and first and second and _share_of_first(own, first, second, shares[0]) is not None:
        return None  # they have different weights, as labels may
    return Coupling(f"the loss of 2 samples is {two.loss:.5g}, the mean of each one's alone {mean:.5g}", much=True)


def _share_of_first(
    own: dict[str, torch.Tensor], first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], expected: float
) -> float | None:
    """Share of the first half, if the gradient of a batch is a weighted mean of those of its halves, but not with the
    expected share; None if it is no such mean."""
    whole, a, b = (torch.cat([each[name].flatten() for name in own]) for each in (own, first, second))
    apart = float((a - b).norm())
    if not apart:
        return None
    share = float((whole - b) @ (a - b)) / apart**2
    left = float((whole - share * a - (1 - share) * b).norm())
    return share if 0 <= share <= 1 and left < _EXPLAINED * abs(share - expected) * apart else None


class _RealRun:
    """One forward with real numbers, which leaves nothing behind in the model; and its backward if hooks on gradients
    or functions of the model's own may change that.

    gradients: by name; of all parameters with such a backward, else of some. has_own_backward: whether there are such
    hooks or functions. out_of_proportion: a gradient that does not grow in proportion to the loss, in words.
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
        args, kwargs = split_inputs(module, tree_map(_own, given), loaded.loss is not None)
        put_dice_back(drawn)
        with (
            undone(module, loaded.loss),
            torch.enable_grad(),
            patch.object(torch.Tensor, "register_hook", hook),
        ):
            output = module(*args, **kwargs)
            found = scalar(output, loaded) if loaded.loss is None else loaded.loss(output, given)
            self.loss = float(found.detach())
            counts = any(getattr(part, "scale_grad_by_freq", False) for part in module.modules())
            self.has_own_backward = hooked or counts or has_own_backward([found])
            with suppress(Exception):  # a function of the model's may run only once: nothing is seen
                if self.has_own_backward:
                    self._run_backward(found)
                else:
                    self.gradients = self._some_gradients(found)

    def _run_backward(self, loss: torch.Tensor) -> None:
        self.gradients = self._gradients(loss, 1.0)
        for scale in _SCALES:
            name, difference = _furthest(self.gradients, self._gradients(loss, scale))
            if difference >= _IN_PROPORTION:
                self.out_of_proportion = f"the gradient of {name} does not follow a factor of the loss"
                return

    def _some_gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of the smallest parameters, by name; zeros for parameters without a gradient."""
        some, left = dict[str, nn.Parameter](), _LOOKED_AT
        for name, parameter in sorted(self._parameters.items(), key=lambda item: item[1].numel()):
            left -= parameter.numel()
            if left >= 0 or not some:
                some[name] = parameter
        found = torch.autograd.grad(loss, list(some.values()), materialize_grads=True, allow_unused=True)
        return dict(zip(some, found, strict=True))

    def _gradients(self, loss: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        """Gradients of the loss times `scale`, divided by `scale`, by name; zeros for parameters without a gradient."""
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


def _furthest(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor], floor: float = 0.0) -> tuple[str, float]:
    """(name, relative difference) of the two gradients of one name that differ most. floor: smaller gradients than this
    share of the largest are compared relative to that share."""
    sizes = {name: float(own.norm() + others[name].norm()) for name, own in some.items()}
    least = floor * max(sizes.values(), default=0.0) + 1e-12
    apart = {name: float((own - others[name]).norm()) / max(sizes[name], least) for name, own in some.items()}
    return max(apart.items(), key=lambda item: item[1], default=("", 0.0))


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


class _BatchNormsApart:
    """While it lasts, batch norms normalise every run by the statistics of the first run, call by call. So samples no
    longer see each other in them, and later layers get numbers as large as in training."""

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0
        self._patch = patch.object(functional, "batch_norm", partial(self._fixed, functional.batch_norm))

    def __enter__(self) -> "_BatchNormsApart":
        self._patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)

    def begin_again(self) -> None:
        """Let the next run use the statistics of the first one from its first batch norm on."""
        self._next = 0

    def _fixed(
        self, original: Callable[..., torch.Tensor], input: torch.Tensor, running_mean: Any, running_var: Any,
        weight: Any = None, bias: Any = None, *more: Any, **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        self._next += 1
        if self._next > len(self._seen):
            variance, mean = torch.var_mean(input.detach(), [0, *range(2, input.dim())], correction=0)
            self._seen.append((mean, variance))
        mean, variance = self._seen[self._next - 1]
        return original(input, mean, variance, weight, bias, training=False, eps=named.get("eps", 1e-5))


_HALF = (torch.float16, torch.bfloat16)


def as_float(leaf: Any) -> Any:
    """A tensor of half precision in fp32; anything else as it is."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF else leaf


def upcast(module: nn.Module) -> nn.Module:
    """The module with its half-precision tensors in fp32; those of double precision stay."""
    module._apply(as_float)
    return module
