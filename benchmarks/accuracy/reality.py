"""What a model really does on this machine: storages saved and alive, and FLOPs, of one forward and backward.

Nothing here is the profiler's: real tensors, a log of the life of every storage, and torch's own FLOP counter. On a CPU
two operators are others than on a GPU; they are replaced by what a GPU runs (see as_on_gpu).
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.profiler.model.loaded import Batch, LoadedModel, split_inputs

aten = torch.ops.aten


def build(loaded: LoadedModel, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The model on the CPU with real numbers, in training mode, all of `dtype`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = loaded.build().to(dtype).train()
        return module


def batch_of(loaded: LoadedModel, size: int, dtype: torch.dtype) -> Batch:
    """A micro-batch whose floating-point tensors have `dtype`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = loaded.batch(size)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    cast_batch: Batch = tree_map(cast, made)
    return cast_batch


def loss_of(loaded: LoadedModel, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of one forward; nothing else of the output stays."""
    args, kwargs = split_inputs(module, batch, loaded.loss is not None)
    output = module(*args, **kwargs)
    loss: torch.Tensor
    if loaded.loss is not None:
        loss = loaded.loss(output, batch)
    else:
        loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
    return loss


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Dropout keeps its mask as bytes (CPU: as numbers of the compute dtype), and attention has none (with dropout the
    CPU falls back to a matrix of all pairs, which no GPU kernel keeps)."""
    attention = functional.scaled_dot_product_attention

    def without_dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        return attention(**given | {"dropout_p": 0.0})

    with (
        patch.object(functional, "scaled_dot_product_attention", without_dropout),
        patch.object(functional, "dropout", _dropout),
    ):
        yield


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


class Life(TorchDispatchMode):
    """Writes down when every storage that an operator makes is born and dies."""

    def __init__(self, ignored: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.log: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        self.numbers: dict[int, int] = {}
        self._ignored = {t.untyped_storage()._cdata for t in ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and follow what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._follow(tensor)
        return result

    def number(self, tensor: torch.Tensor) -> int | None:
        """Number of the tensor's storage in order of birth; None for those that were there before."""
        return self.numbers.get(tensor.untyped_storage()._cdata)

    def peak(self, start: int, end: int, without: set[int]) -> int:
        """Most bytes that lived at once between two positions of the log."""
        live = most = 0
        for i, (number, sign) in enumerate(self.log[:end]):
            live += 0 if number in without else sign * self.sizes[number]
            if i >= start - 1:
                most = max(most, live)
        return most

    def alive(self, end: int) -> int:
        """Bytes that live at a position of the log."""
        return sum(sign * self.sizes[number] for number, sign in self.log[:end])

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._ignored or place in self.numbers or not storage.nbytes():
            return
        number = self.numbers[place] = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self.log.append((number, 1))
        weakref.finalize(storage, self._died, place)

    def _died(self, place: int) -> None:
        self.log.append((self.numbers.pop(place), -1))


@dataclass
class Real:
    """Bytes of one forward and backward; parameters, their gradients and the batch are not counted.

    kept: alive at the end of the forward. saved: of tensors that autograd was given to save. by_module: of these, those
    that were made within a module and are not its outputs; modules that are called more than once, or are given what
    code between modules has made, are left out: their layers are more than one call of the module.
    """

    kept: int = 0
    saved: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    by_module: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.forward_peak, self.backward_peak)


def run(
    loaded: LoadedModel, module: nn.Module, batch: Batch, watched: Sequence[str] = (), producers: Sequence[str] = ()
) -> Real:
    """One forward and backward. watched: modules whose saved bytes are asked for; producers: modules whose outputs
    layers pass to each other."""
    real = Real()
    there = [*module.parameters(), *module.buffers(), *_tensors(batch)]
    life = Life(there)
    saved: set[int] = set()
    order: list[int] = []
    gradients: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        number = life.number(tensor)
        if number is not None:
            saved.add(number)
            order.append(number)
        return tensor

    def got_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        number = life.number(parameter.grad)
        if number is not None:
            gradients.add(number)

    handles = [p.register_post_accumulate_grad_hook(got_gradient) for p in module.parameters() if p.requires_grad]
    passed: set[int | None] = set()
    calls: Counter[str] = Counter()
    for name in watched:
        handles += _watch(module.get_submodule(name), name, life, order, passed, calls, real.by_module)
    handles += [module.get_submodule(name).register_forward_hook(_note_outputs(life, passed)) for name in producers]
    with as_on_gpu(), life:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(loaded, module, batch)
        forward_end = len(life.log)
        loss.backward()
        del loss
    end = len(life.log)
    for handle in handles:
        handle.remove()
    for parameter in module.parameters():
        parameter.grad = None
    real.saved = sum(life.sizes[number] for number in saved)
    real.kept = life.alive(forward_end)
    real.forward_peak = life.peak(0, forward_end, set())
    real.backward_peak = life.peak(forward_end, end, gradients)
    return real


def _watch(
    module: nn.Module,
    name: str,
    life: Life,
    order: list[int],
    passed: set[int | None],
    calls: Counter[str],
    found: dict[str, int],
) -> list[Any]:
    start: list[tuple[int, int, bool]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = {life.number(t) for t in _tensors((args, kwargs)) if t.requires_grad}
        start.append((len(life.sizes), len(order), given <= passed))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        born, packed, alone = start.pop()
        own = {number for number in order[packed:] if number >= born} - {life.number(t) for t in _tensors(output)}
        calls[name] += 1
        if alone and calls[name] == 1:
            found[name] = sum(life.sizes[number] for number in own)
        elif calls[name] > 1:
            found.pop(name, None)

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _note_outputs(life: Life, passed: set[int | None]) -> Callable[..., None]:
    return lambda module, args, output: passed.update(life.number(t) for t in _tensors(output))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def flops(loaded: LoadedModel, module: nn.Module, batch: Batch) -> tuple[float, float]:
    """(forward, backward) FLOPs as torch counts them. A run of its own: the counter holds on to gradients."""
    forward, backward = _flop_counter(), _flop_counter()
    with as_on_gpu():
        with forward:
            loss = loss_of(loaded, module, batch)
        with backward:
            loss.backward()
    return float(forward.get_total_flops()), float(backward.get_total_flops())


def _flop_counter() -> FlopCounterMode:
    """torch's own counter, with what its registry leaves out on a CPU; causal attention counts half.

    Its formula for the backward of convolutions takes no account of groups, so that is replaced, too.
    """
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
            aten._grouped_mm: lambda a, b, *_, **__: 2 * math.prod(a) * b[-1],
            aten.convolution_backward: _convolution_backward,
            aten.mkldnn_rnn_layer: _recurrent,
            aten.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _recurrent(*args, **kwargs),
        },
    )


def _attention(q: Any, k: Any, v: Any, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> float:
    return float(sdpa_flop_count(q, k, v)) / (2 if is_causal else 1)


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dropout: float, is_causal: bool, **_: Any
) -> float:
    return float(sdpa_backward_flop_count(grad, q, k, v)) / (2 if is_causal else 1)


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """As much as the forward for each of two gradients: of the input, and of the weight."""
    transposed, wanted = rest[4], rest[7]
    positions = int(math.prod((x if transposed else grad)[2:]))
    return 2 * int(x[0]) * positions * int(math.prod(weight)) * sum(map(bool, wanted[:2]))


def _recurrent(x: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    weights = math.prod(input_weight) + math.prod(hidden_weight)
    return 2 * int(x[0]) * int(x[1]) * int(weights)
