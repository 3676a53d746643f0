"""One forward run of a whole model, watched: what it does that decides how it is cut, or that no plan allows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import stateless
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from ..machine.units import first_of
from ..running.asked_sizes import asked_sizes
from ..running.fake import DecidesByDrawsError, FakeModel
from ..running.forward_state import Reached
from ..semantics.producers import is_wrapped
from .chain import LayerChain
from .chain_layers import build_chain
from .chain_watch import ChainWatch
from .layer_graph import bytes_over
from .layer_units import Units, find_units
from .loaded import Batch

_MORE_BYTES = 1.1
"""An element of a container stays opened if cutting between its blocks carries at most so many times the bytes that
cutting around it does."""

_THROWS = 4
"""Forwards that are compared with the first to see whether a draw by Python's or numpy's random changes which layers
run: of models with two equally likely ways, 15 of 16 show it."""

_LONG_THROWS = 8
"""Forwards from which the longest is profiled, where they differ: if each of four layers is left out with a chance of
30%, one of the 8 runs all of them in 9 of 10 models."""


def observe(fake: FakeModel, size: int, seq_len: int | None, most_operators: int | None = None) -> LayerChain:
    """Run the whole model forward (once, and again while stages were opened in vain) and read off its chain.

    most_operators: Raises TokenByTokenError when one module has run so many.
    """
    units = find_units(fake.module)
    buffers = {name: (buffer, buffer._version) for name, buffer in fake.module.named_buffers()}
    parameters = {name: (parameter, parameter._version) for name, parameter in fake.module.named_parameters()}
    every = dict(fake.module.named_parameters(remove_duplicate=False))
    chain = _observe(fake, units, size, seq_len, most_operators)
    throws_dice = fake.throws_dice
    made = [name for name, _ in fake.module.named_parameters() if name not in parameters]
    if made:
        raise ValueError(
            f"the first forward of {fake.loaded.source} makes parameters, {made[0]} for one, which an optimizer made "
            "before it does not train; make them in __init__, or use torch's lazy modules (nn.LazyLinear)"
        )
    now = dict(fake.module.named_parameters(remove_duplicate=False))
    if replaced := [name for name, parameter in every.items() if now.get(name) is not parameter]:
        raise ValueError(
            f"the forward of {fake.loaded.source} puts another tensor in the place of the parameter {replaced[0]}, "
            "which an optimizer made before it does not know; do that in __init__ (head.weight = embedding.weight), or "
            "compute with the other tensor and leave the parameter where it is"
        )
    throws = range(_THROWS) if throws_dice and fake.mode is not None else ()  # real tensors take one of the ways
    if any(_thrown(fake, units, size, seq_len, number) != chain.signatures for number in throws):
        raise DecidesByDrawsError("random", f"a draw of Python's or numpy's in {fake.loaded.source}")
    closed = frozenset[str]()
    while in_vain := _opened_in_vain(chain) - closed:
        closed |= in_vain
        units = find_units(fake.module, closed)
        chain = _observe(fake, units, size, seq_len)
    written = [name for name, (x, version) in buffers.items() if x._version != version or name in chain.written]
    for name, (parameter, version) in parameters.items():
        if parameter._version != version or name in chain.written:
            raise ValueError(
                f"the forward writes into the parameter {name}, which under sharding is not there as a whole; change "
                "parameters between steps, in the training loop"
            )
    return replace(chain, told=(*chain.told, *_stateful(fake.module, written), *_left(chain.read_again)))


def _thrown(fake: FakeModel, units: Units, size: int, seq_len: int | None, number: int) -> tuple[Any, ...]:
    """What tells the layers of a forward apart, if Python's and numpy's random numbers begin from `number`."""
    return _observe(replace(fake, dice=number), units, size, seq_len).signatures


def longest_throw(fake: FakeModel, seq_len: int | None) -> int:
    """Of some seeds for Python's and numpy's random numbers the one with which a forward runs most operators."""
    units = find_units(fake.module)

    def operators(number: int) -> int:
        return sum(len(of_call) for _, calls, *_ in _thrown(fake, units, 2, seq_len, number) for of_call in calls)

    return max(range(_LONG_THROWS), key=operators)


def _observe(
    fake: FakeModel, units: Units, size: int, seq_len: int | None, most_operators: int | None = None
) -> LayerChain:
    saved: list[tuple[torch.Tensor, int]] = []

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        saved.append((tensor, tensor._version))
        return saved[-1]

    def watched(hooks: AbstractContextManager[Any], saves: bool) -> LayerChain:
        batch = fake.batch(size, seq_len)
        with fake.running(), hooks:
            watch = ChainWatch(fake, units, most_operators)
            swaps = patch.object(stateless, "_functional_call", _noting_swaps(stateless._functional_call, watch))
            grads = patch.object(torch.autograd, "grad", _noting(torch.autograd.grad, watch))
            watch.from_batch = {
                watch.storages.number(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)
            }
            repeats = patch.object(CheckpointFunction, "apply", _noting_reentrant(watch))
            hooked, repeated, sizes = _noting_hooks(watch), watch.noting_repeated(), asked_sizes(fake.module, 3)
            with watch, watch.producers, grads, swaps, repeats, hooked, repeated, sizes as asked:
                loss = fake.loss(batch, before_loss=watch.start_loss, note_left=True)
                _check_loss(fake, watch)
            own = _trained_by_loss(fake, watch, batch, loss) if fake.loaded.loss is not None else ()
            if watch.inputs.overwrites and (not saves or any(x._version != version for x, version in saved)):
                _check_backward(fake, loss)
        if fake.left:
            batches = fake.batch(size, seq_len), fake.batch(size, seq_len)  # here: in fake mode they had no numbers
            with fake.running():
                again = fake.read_again(batches)
            watch.inputs.read_again = [
                place for place, renewed in again.items() if renewed or watch.is_of_numbers(fake.left[place])
            ]
        if fake.left or watch.inputs.gives_objects:
            with fake.running():
                watch.inputs.read_aside = fake.read_aside(units.names, fake.batch(size, seq_len))
        if fake.changed or Reached(fake.module).iterators:
            with fake.running():
                watch.inputs.changed_by_several = fake.changed_by_several(units.names, fake.batch(size, seq_len))
        chain = build_chain(fake, units, watch)
        return replace(chain, told=own, asked=frozenset(asked))

    try:
        return watched(saved_tensors_hooks(pack, partial(_as_saved, fake)), True)
    except ValueError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return replace(watched(nullcontext(), False), hookless=True)


def _check_loss(fake: FakeModel, watch: ChainWatch) -> None:
    """Raises ValueError where the loss reads parameters that it holds by itself: under a plan the model is another
    object."""
    given = {watch.storages.number(tensor) for tensor in watch.returned}
    named = {name: watch.storages.number(parameter) for name, parameter in fake.module.named_parameters()}
    read = {name for event in watch.events[watch.loss_from :] for name in event.parameters}
    for name in sorted(read - watch.read_before_loss - watch.read_back):
        if fake.loaded.loss is not None and named[name] not in given:
            raise ValueError(
                f"loss(output, batch) of {fake.loaded.source} reads {name}, which is not in the output, from a model "
                "that it holds by itself; a plan trains a model that it builds anew: let forward return what the loss "
                "needs"
            )


def _trained_by_loss(fake: FakeModel, watch: ChainWatch, batch: Batch, loss: torch.Tensor) -> tuple[str, ...]:
    """A note on what the loss would train beside the model's parameters."""
    known = {id(x) for x in (*fake.module.parameters(), *watch.returned, *tree_leaves(batch))}
    nodes, seen = [loss.grad_fn], {tensor.grad_fn for tensor in watch.returned}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = getattr(node, "variable", None)
        if found is not None and id(found) not in known:
            return (
                f"the loss would train a tensor of {list(found.shape)} of its own, which is none of the model's "
                "parameters: no plan averages its gradients or steps it; let forward return what the loss makes of it, "
                "or freeze it (requires_grad_(False))",
            )
        nodes += [following for following, _ in node.next_functions]
    return ()


def _check_backward(fake: FakeModel, loss: torch.Tensor) -> None:
    """Run the backward of the whole model. It raises ValueError if it needs a tensor that was written into since; runs
    of single layers would not show that of a tensor which one layer saves and another writes into."""
    loss.backward()
    for parameter in fake.module.parameters():
        parameter.grad = None


def _as_saved(fake: FakeModel, saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    check_unwritten(tensor, version, f"{fake.loaded.source} does not train on one device either:")
    return tensor


def check_unwritten(tensor: torch.Tensor, version: int, whose: str) -> None:
    """Raises ValueError if a tensor was written into after it was saved. Autograd itself raises then, but not where
    hooks on saved tensors are in use."""
    if tensor._version != version:
        raise ValueError(
            f"{whose} a tensor of {list(tensor.shape)} that the backward needs is written into after an operator has "
            "saved it; let what writes in place (relu_, x += y, x[:] = y) make a new tensor there"
        )


def _noting(grad: Callable[..., Any], watch: ChainWatch) -> Callable[..., Any]:
    """torch.autograd.grad, which also tells the watch that the model has called it."""

    @wraps(grad)
    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.inputs.transforms = watch.inputs.transforms or watch.running
        if not any(map(is_wrapped, tree_leaves((args, kwargs)))):
            watch.inputs.differentiates = watch.inputs.differentiates or watch.running
        with watch.reading_back():
            return grad(*args, **kwargs)

    return noted


def _noting_swaps(call: Callable[..., Any], watch: ChainWatch) -> Callable[..., Any]:
    """torch.func.functional_call, which also tells the watch that the model has called it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.inputs.swaps = True
        return call(*args, **kwargs)

    return noted


def _noting_reentrant(watch: ChainWatch) -> Callable[..., Any]:
    """What a reentrant checkpoint calls: it also tells the watch that the model has such a checkpoint, and is seen like
    any other function between layers."""

    def noted(*args: Any) -> Any:
        watch.inputs.reentrant = True
        return super(CheckpointFunction, CheckpointFunction).apply(*args)

    return noted


@contextmanager
def _noting_hooks(watch: ChainWatch) -> Iterator[None]:
    """Tensor.register_hook and .retain_grad, noted as acts of the model: inside a layer or between layers."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: torch.Tensor, *args: Any) -> Any:
            if watch.producers.depth:
                watch.inputs.hooks_inside |= bool(args)
            else:
                watch.inputs.hooks_between = True
            return original(tensor, *args)

        return noted

    with (
        patch.object(torch.Tensor, "register_hook", noting(torch.Tensor.register_hook)),
        patch.object(torch.Tensor, "retain_grad", noting(torch.Tensor.retain_grad)),
    ):
        yield


def _opened_in_vain(chain: LayerChain) -> frozenset[str]:
    """Opened elements of containers within which every cut carries more bytes than those around them; of those inside
    of each other the innermost, as others have other cuts once these are closed."""
    crossing = bytes_over(chain.graph)
    in_vain = set()
    blocks = [{u for u in layer.units if u in chain.units.elements} for layer in chain.layers]
    for name in chain.units.opened:
        inside = [i for i, layer in enumerate(chain.layers) if any(u.startswith(f"{name}.") for u in layer.units)]
        first, last = min(inside, default=0), max(inside, default=0)
        within = [crossing[i] for i in range(first + 1, last + 1) if blocks[i - 1] and blocks[i]]
        if not within or min(within) > _MORE_BYTES * max(crossing[first], crossing[last + 1]):
            in_vain.add(name)
    return frozenset(name for name in in_vain if not any(other.startswith(f"{name}.") for other in in_vain))


def _stateful(root: nn.Module, written: list[str]) -> tuple[str, ...]:
    """A note on buffers that the forward writes into, without those of batch norms, which it does not read."""
    owners = {name: root.get_submodule(name.rpartition(".")[0]) for name in written}
    names = [name for name, owner in owners.items() if not isinstance(owner, nn.modules.batchnorm._NormBase)]
    return _left(names)


def _left(names: Sequence[str]) -> tuple[str, ...]:
    """A note on what a forward leaves behind for the next one: under data parallelism each rank has its own."""
    if not names:
        return ()
    return (
        f"{first_of(names)} is written in every forward, on each data rank by its own, so "
        "the numbers may change with data parallelism, as in any framework",
    )
