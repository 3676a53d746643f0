"""Compute activations again in backward instead of keeping them: of a layer, of parts of it, or the cheap ones."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...planner.plan.document import LayerPlan, Recompute, parts_of
from ...profiler.model.model_profile import SELECTIVELY_KEPT
from ...profiler.running.forward_state import Changeable, Taken, changed, places_of, put_back, random_draws, taken
from ...profiler.running.meters import op_kind
from ..torch_compat import detached, forward_with_hooks, kept_by
from .context import ContextParallel

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def recompute(module: nn.Module, mode: Recompute = "full", context: ContextParallel | None = None) -> None:
    """From now on `module` keeps less for backward. full: its inputs and nothing else. selective: also what matmuls
    and attention return, so that these are not repeated. attention: all but what unfused attention makes between the
    scores and its output. parts: of each of these submodules its inputs and nothing else, of the rest everything.

    Forwards are replaced, not modules, so parameter names stay; hooks on the module itself (FSDP's gathering, the
    slicing of sequence parallelism) run once, outside of what is repeated. Those that a part has by now are repeated
    with it, so that where slices of the sequence are gathered for a part only its own slice is kept. What the first
    forward leaves behind (running statistics, attributes of modules and classes, globals of its file, lists that it
    fills, a dict that it is given, random numbers of Python's and numpy's) is changed once by each forward: the
    repetition finds it as the forward did, and leaves no trace. context: where ranks hold parts of
    sequences, for what is known of a part's inputs.
    """
    if mode == "attention":
        module.forward = _with_attention_repeated(module, module.forward)
    elif mode in ("full", "selective"):
        module.forward = _repeated(module, module.forward, selective=mode == "selective")
    for part in dict.fromkeys(module.get_submodule(name) for name in parts_of(mode)):
        part.forward = forward_with_hooks(part)
        passage = None if context is None else context.pass_through(part)
        if passage is not None:
            passage.inside()
        part.forward = _repeated(part, part.forward, selective=False)
        if passage is not None:
            passage.outside()


def check_recompute(layer: LayerPlan, model: nn.Module) -> None:
    """Raise ValueError if a plan asks to recompute what has no forward to repeat: a layer that is not one module, or
    parts that it does not have. model: has the layer under its original names."""
    if layer.recompute != "none" and len(layer.modules) != 1:
        raise ValueError(
            f"layer {layer.name} consists of {len(layer.modules)} modules ({', '.join(layer.modules) or 'none'}); "
            'only a layer that is one module can be recomputed. Give it recompute="none"'
        )
    for part in parts_of(layer.recompute):
        root = model.get_submodule(layer.modules[0])
        found = dict(root.named_modules(remove_duplicate=False))
        if part not in found or isinstance(found[part], _CONTAINERS):
            able = [name for name, child in root.named_children() if not isinstance(child, _CONTAINERS)]
            what = "calls its items, not it" if part in found else "has no such submodule"
            raise ValueError(
                f"recompute={layer.recompute!r} of layer {layer.name} names {part}, but {type(root).__name__} {what}; "
                f"name submodules that run as a whole ({', '.join(able) or 'there are none'}), or give it "
                'recompute="full"'
            )


def _repeated(module: nn.Module, forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    """forward, of which backward finds nothing but its inputs (and what selective recompute keeps)."""
    places: list[Changeable] | None = None
    steps = _StepsOnHost(module) if selective else None

    def repeated(*args: Any, **kwargs: Any) -> Any:
        nonlocal places
        before = taken([*places_of(module), random_draws()] if places is None else places)
        left: Taken = []

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if steps is None:
                return nullcontext(), _Anew(lambda: _as_before(left))
            keep = _Keep(module, steps)
            keep.by, kept = create_selective_checkpoint_contexts(keep)
            return keep.by, _Anew(_once(lambda: _both(_as_before(left), kept), module))

        given = [(args, kwargs)]

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = given.pop() if given else _in_new_containers((args, kwargs))
            return forward(*args, **kwargs)

        args, kwargs = _in_new_containers((args, kwargs))
        output = checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        torch.clear_autocast_cache()  # else it would hold the casts of all layers' weights until the forward ends
        left += changed(before)
        if places is None:
            places = [place for place, _ in left]
        return output

    return repeated


def _in_new_containers(given: Any) -> Any:
    """The same tensors in new lists and dicts, which nobody else can change."""
    return tree_map(lambda leaf: leaf, given)


class _StepsOnHost:
    """Whether what runs now is a step of a recurrent module on the CPU, which makes it of products and writes into what
    they return, where a GPU has one kernel for it."""

    def __init__(self, module: nn.Module) -> None:
        self._is_itself = isinstance(module, _RECURRENT)
        self._depth = 0
        for inner in module.modules():
            if inner is not module and isinstance(inner, _RECURRENT):
                inner.register_forward_pre_hook(lambda *_: self._go(1))
                inner.register_forward_hook(lambda *_: self._go(-1), always_call=True)

    def _go(self, down: int) -> None:
        self._depth += down

    def __call__(self, args: Any) -> bool:
        """args: of an operator."""
        on_host = (x.device.type == "cpu" for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        return (self._is_itself or self._depth > 0) and any(on_host)


class _Keep:
    """torch's policy for selective recompute: keep the results of operators that are costly to run again, but not
    within steps on the host."""

    by: AbstractContextManager[Any]
    """The context, made by torch for this policy, that keeps the results."""

    def __init__(self, module: nn.Module, is_step_on_host: Callable[[Any], bool]) -> None:
        self._module, self._is_step_on_host = type(module).__name__, is_step_on_host

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if self._is_step_on_host(args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        for argument, value in zip(func._schema.arguments, () if context.is_recompute else args, strict=False):
            if argument.is_write and isinstance(value, torch.Tensor) and self._keeps(value):
                raise ValueError(
                    f"{self._module} writes by {func} into what a matmul or attention returned, which selective "
                    "recompute would keep for backward; plan it with recompute=full, or write x + y for x += y"
                )
        return CheckpointPolicy.MUST_SAVE if op_kind(func) in SELECTIVELY_KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, value: torch.Tensor) -> bool:
        return any(_storage(kept)._cdata == _storage(value)._cdata for kept in kept_by(self.by))


class _Anew(AbstractContextManager[None]):
    """A context that is made anew each time it is entered. A backward may repeat a forward several times, if hooks on
    gradients call torch.autograd.grad."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._now = self._make()
        self._now.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._now.__exit__(*error)


def _once(make: Callable[[], AbstractContextManager[None]], module: nn.Module) -> Callable[..., Any]:
    """`make`, which raises ValueError when it is called a second time: what selective recompute has kept can be taken
    only once."""
    makes = [make]

    def made() -> AbstractContextManager[None]:
        if not makes:
            raise ValueError(
                f"a hook on gradients in {type(module).__name__} asks for gradients of its own (torch.autograd.grad), "
                "for which its forward would be repeated twice, and what selective recompute keeps can be taken once; "
                "plan it with recompute=full"
            )
        return makes.pop()()

    return made


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


@contextmanager
def _as_before(left: Taken) -> Iterator[None]:
    """While it lasts, what a forward has changed has its value from before that forward again; afterwards, that of
    now."""
    after = taken(place for place, _ in left)
    put_back(left)
    try:
        yield
    finally:
        put_back(after)


def _with_attention_repeated(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, which keeps nothing for backward of what unfused attention makes between the scores and its output."""

    def repeated(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        core = _AttentionCore(module)
        with torch.autograd.graph.saved_tensors_hooks(core.pack, core.unpack), core:
            output = forward(*args, **kwargs)
        core.forget()
        return output

    return repeated


@dataclass(frozen=True)
class _Made:
    """Refers to a tensor that a step of the core made: result `leaf` of step `step`."""

    step: int
    leaf: int


@dataclass(frozen=True)
class _RemadePart:
    """What autograd holds in place of a saved tensor: a part of the memory that a step of the core made."""

    made: _Made
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _CoreOp:
    """An operator of the core, with its arguments; `_Made` stands for tensors that earlier steps made. state: that of
    the random numbers before it, if it draws."""

    func: Any
    args: Any
    kwargs: Any
    state: tuple[torch.device, torch.Tensor] | None


class _AttentionCore(TorchDispatchMode):
    """Notes what makes the scores of unfused attention, and what follows from them up to its output, to do it again.

    The same operators as the profiler finds: scores are a batched product of activations, and what reads them is of the
    core up to the next such product.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
        self._weights = {_storage(p)._cdata for p in locals_}
        self._module = type(module).__name__
        self._steps: list[_CoreOp] = []
        self._given: list[tuple[torch.Tensor, int]] = []
        self._made: dict[int, tuple[_Made, torch.Tensor]] = {}
        self._given_back = 0
        self._packed = 0
        self._again: list[list[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if it is one of the core."""
        kwargs = kwargs or {}
        read = {_storage(x)._cdata for x in _tensors((args, kwargs))}
        product = func._overloadpacket.__name__ in ("bmm", "baddbmm") and not read & self._weights
        follows = not read.isdisjoint(self._made)
        if product == follows:
            return func(*args, **kwargs)
        state = _random_state(args) if torch.Tag.nondeterministic_seeded in func.tags else None
        noted_args, noted_kwargs = tree_map(self._noted, (args, kwargs))
        step = _CoreOp(func, noted_args, noted_kwargs, state)
        output = func(*args, **kwargs)
        for leaf, x in enumerate(_tensors(output)):
            self._made[_storage(x)._cdata] = _Made(len(self._steps), leaf), x
        self._steps.append(step)
        return output

    def pack(self, x: torch.Tensor) -> torch.Tensor | _RemadePart:
        """What to keep of a tensor that backward will ask for."""
        known = self._made.get(_storage(x)._cdata) if not isinstance(x, DTensor) else None
        if known is None:
            return x
        self._packed += 1
        return _RemadePart(known[0], x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, kept: torch.Tensor | _RemadePart) -> torch.Tensor:
        """A saved tensor. The first that is asked for runs the core again; the results stay until the last one was
        taken."""
        if not isinstance(kept, _RemadePart):
            return kept
        if not self._again:
            self._repeat()
        made = self._again[kept.made.step][kept.made.leaf]
        self._given_back += 1
        if self._given_back % self._packed == 0:
            self._again = []
        return made.as_strided(kept.shape, kept.stride, kept.offset)

    def forget(self) -> None:
        """Let go of the tensors themselves."""
        self._made.clear()

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and _storage(leaf)._cdata in self._made:
            made, _ = self._made[_storage(leaf)._cdata]
            return _RemadePart(made, leaf.shape, leaf.stride(), int(leaf.storage_offset()))
        if isinstance(leaf, torch.Tensor):
            self._given.append((detached(leaf), leaf._version))
            return self._given[-1][0]
        return leaf

    def _repeat(self) -> None:
        if any(x._version != version for x, version in self._given):
            raise RuntimeError(
                f"a {self._module} has given attention a mask, or something else, that was written into before "
                "backward; plan it with recompute=full"
            )

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, _RemadePart):
                return leaf
            return self._again[leaf.made.step][leaf.made.leaf].as_strided(leaf.shape, leaf.stride, leaf.offset)

        with torch.no_grad():
            for step in self._steps:
                with _with_random_state(step.state):
                    args, kwargs = tree_map(real, (step.args, step.kwargs))
                    self._again.append(_tensors(step.func(*args, **kwargs)))


def _random_state(args: Any) -> tuple[torch.device, torch.Tensor]:
    """State of the random numbers of the device that the tensors are on."""
    device = _tensors(args)[0].device
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return device, state


@contextmanager
def _with_random_state(state: tuple[torch.device, torch.Tensor] | None) -> Iterator[None]:
    """Draw the random numbers again that followed a state."""
    with ExitStack() as stack:
        if state is not None:
            device, numbers = state
            on_cpu = device.type == "cpu"
            stack.enter_context(torch.random.fork_rng([] if on_cpu else [device], device_type=device.type))
            if on_cpu:
                torch.set_rng_state(numbers)
            else:
                torch.get_device_module(device).set_rng_state(numbers, device)
        yield


def _storage(x: torch.Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
