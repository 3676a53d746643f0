"""Shows a stage, in one forward of the whole model on fake tensors, what other stages' modules return and what
crosses."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from ...planner.plan.document import Plan
from ...profiler.model.building import in_evaluation, replace_tensors
from ...profiler.model.loaded import Choices
from ...profiler.model.model_profile import Producer
from ...profiler.running.fake_modes import fake_mode
from ...profiler.running.forward_state import undone, version_of
from ...profiler.running.kept_results import fakes_forgotten
from ...profiler.running.known_numbers import MOST_KNOWN, knowing_numbers, known
from ...profiler.semantics.distributions import unvalidated
from ...profiler.semantics.producers import Producers
from ...profiler.semantics.token_marks import Mark, mark_of, set_mark
from ...profiler.semantics.token_slices import TokenSlices
from .context import ContextParallel
from .micro_batches import MicroBatch, shapes_in
from .shared_gradients import out_of_sight
from .synced_norms import normalise_here, synced_norms


@dataclass(frozen=True)
class Like:
    """What is known of a tensor of the whole model. written: whether it is written into after it was made. mark: which
    tokens it holds, if ranks hold parts of a sequence. changed: whether a hook on its module has replaced it or written
    into it. alike: places in the output that hold this same tensor, if there are several."""

    shape: torch.Size
    dtype: torch.dtype
    written: bool
    mark: Mark | None = None
    changed: bool = False
    alike: tuple[int, ...] = ()

    def placeholder(self, device: torch.device) -> torch.Tensor:
        """A tensor of zeros in its place; without memory unless it is written into."""
        made = torch.zeros(self.shape if self.written else (), dtype=self.dtype, device=device)
        return set_mark(made if self.written else made.expand(self.shape), self.mark)


@dataclass(frozen=True)
class Stub:
    """What a foreign module returns instead of computing."""

    leaves: tuple[Any, ...]
    tree: TreeSpec
    device: torch.device

    def output(self, arrived: Mapping[int, torch.Tensor]) -> Any:
        """The output of the module with placeholders for its tensors. Tensors that have arrived are put in themselves,
        so that hooks of the user's which keep the output see them; and if one tensor is in several places, so is the
        placeholder. (What a hook has changed is replaced after that hook.)"""
        made: list[Any] = []
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Like) and leaf.alike and leaf.alike[0] < place:
                made.append(made[leaf.alike[0]])
            else:
                made.append(self._leaf(place, leaf, arrived))
        return tree_unflatten(made, self.tree)

    def _leaf(self, place: int, leaf: Any, arrived: Mapping[int, torch.Tensor]) -> Any:
        if not isinstance(leaf, Like):
            return leaf
        found = next((arrived[i] for i in leaf.alike or (place,) if i in arrived), None)
        return leaf.placeholder(self.device) if found is None or leaf.changed else found


class Rehearsal:
    """One forward of the whole model on fake tensors: what layer modules return, and what crosses the cuts.

    The stages of a rank may share one: it runs once for inputs of the same shapes in training, and once in evaluation,
    where a dropout hands on what it is given, and what writes into its result writes into a layer's output. is_own: the
    model is for it alone; else it makes a copy, whose hooks write into the original if they are closures over it.
    """

    def __init__(self, model: nn.Module, plan: Plan, is_own: bool = False) -> None:
        self._mode = fake_mode()
        self._layer_modules = plan.model.layer_modules
        self._expert_modules = plan.model.expert_modules
        self._crossing = {tensor.producer for tensor in plan.model.tensors}
        self._knows_batch = False
        self._choices: Choices = ""
        self._found: dict[tuple[Any, ...], tuple[dict[tuple[str, int], Stub], dict[Producer, Like], bool]] = {}
        self._model = model
        for norm in synced_norms(model) if is_own else ():
            normalise_here(norm)
        if not is_own:
            with torch.device("meta"):
                self._model = copied(model, lambda tensor: torch.empty_like(tensor, device="meta"))

    def run(
        self,
        micro_batch: MicroBatch,
        device: torch.device,
        autocast: AbstractContextManager[Any],
        bf16_layers: bool,
        context: ContextParallel | None,
        training: bool = True,
    ) -> tuple[dict[tuple[str, int], Stub], dict[Producer, Like], bool]:
        """(stubs by module and call, tensors that any cut crosses, whether the model writes into its batch).

        bf16_layers: as under fully_shard's mixed precision, parameters and what enters a layer module are bfloat16.
        context: what this rank holds of the sequences, if not all. training: else in evaluation mode.
        """
        key = (training, *shapes_in(micro_batch))
        if key in self._found:
            return self._found[key]
        evaluating = nullcontext() if training else in_evaluation(self._model)
        with out_of_sight(), fakes_forgotten(), undone(self._model), evaluating:
            seen = self._deciding(micro_batch, device, autocast, bf16_layers, context)
        stubs = {key: Stub(leaves, tree, device) for key, (leaves, tree) in seen.outputs.items()}
        self._found[key] = stubs, seen.tensors, seen.writes_batch
        return self._found[key]

    def _deciding(self, *args: Any) -> "_Seen":
        """What a run shows. If the model decides by numbers of its batch, the run knows these; if by those of a router,
        the router's choices are taken to be even, which makes no difference to what crosses."""
        try:
            return self._run(*args)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if self._choices:
                raise
            self._choices = "even" if self._knows_batch else ""
            self._knows_batch = True
        return self._deciding(*args)

    def _run(
        self,
        micro_batch: MicroBatch,
        device: torch.device,
        autocast: AbstractContextManager[Any],
        bf16_layers: bool,
        context: ContextParallel | None,
    ) -> "_Seen":
        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            cast_too = bf16_layers and isinstance(leaf, nn.Parameter)
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            return cast(made) if cast_too else made

        def cast(leaf: Any) -> Any:
            return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        def given_as(leaf: Any) -> Any:
            is_known = self._knows_batch and isinstance(leaf, torch.Tensor) and leaf.numel() <= MOST_KNOWN
            return known(self._mode, leaf) if is_known else fake(leaf)

        notes = _Notes(self._crossing)
        mode = knowing_numbers(self._mode, self._choices) if self._knows_batch else self._mode
        with ExitStack() as hooks, mode, torch.no_grad():
            model = self._model
            replace_tensors(model, fake)
            for name in self._layer_modules:
                module = model.get_submodule(name)
                if bf16_layers:
                    hooks.enter_context(
                        module.register_forward_pre_hook(
                            lambda module, args, kwargs: tree_map(cast, (args, kwargs)), with_kwargs=True
                        )
                    )
                hooks.enter_context(module.register_forward_hook(partial(notes.made, name), prepend=True))
                hooks.enter_context(module.register_forward_hook(partial(notes.output, name)))
            args, kwargs = tree_map(given_as, (micro_batch.args, micro_batch.kwargs))
            tokens: AbstractContextManager[Any] = nullcontext()
            if context is not None:
                context.leave_alone(model, self._expert_modules)
                tokens = context.rehearsal()
            with (
                tokens,
                autocast,
                unvalidated(),
                _WithoutGradients(),
                Producers(model, self._layer_modules, on_produced=notes.tensor),
            ):
                model(*args, **kwargs)
            if context is not None and isinstance(tokens, TokenSlices) and not tokens.started:
                raise context.other_length()
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return replace(notes.seen(), writes_batch=any(version_of(leaf) > 0 for leaf in given))


class _WithoutGradients(TorchFunctionMode):
    """While it lasts, hooks on gradients are not registered: tensors that require no gradient would refuse them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        return None if func is torch.Tensor.retain_grad else func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Seen:
    """What a rehearsal showed."""

    outputs: dict[tuple[str, int], tuple[tuple[Any, ...], TreeSpec]]
    tensors: dict[Producer, Like]
    writes_batch: bool = False


class _Notes:
    """Notes the tensors of a rehearsal, and how often each had been written into when it was made."""

    def __init__(self, crossing: set[Producer]) -> None:
        self._crossing = crossing
        self._calls: Counter[str] = Counter()
        self._made: dict[str, list[tuple[int, int]]] = {}
        self._outputs: dict[tuple[str, int], tuple[list[Any], list[int], TreeSpec, list[bool]]] = {}
        self._tensors: dict[Producer, tuple[torch.Tensor, int]] = {}

    def made(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a module's forward has returned, before its hooks run."""
        self._made[name] = _states(tree_leaves(output))

    def output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a module has returned after its hooks have run."""
        leaves, tree = tree_flatten(output)
        states, before = _states(leaves), self._made[name]
        changed = [i >= len(before) or before[i] != state for i, state in enumerate(states)]
        first = dict(before)  # what a hook writes into is written into, too
        versions = [first.get(tensor, version) for tensor, version in states]
        self._outputs[name, self._calls[name]] = (leaves, versions, tree, changed)
        self._calls[name] += 1

    def tensor(self, producer: Producer, tensor: torch.Tensor) -> None:
        """Note a tensor that crosses a cut."""
        if producer in self._crossing:
            self._tensors[producer] = (tensor, version_of(tensor))

    def seen(self) -> _Seen:
        """What was collected, at the end of the run."""

        def like(leaf: Any, version: int, changed: bool = False, alike: tuple[int, ...] = ()) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return Like(leaf.shape, leaf.dtype, version_of(leaf) != version, mark_of(leaf), changed, alike)

        return _Seen(
            {
                key: (tuple(map(like, leaves, made, changed, _alike(leaves))), tree)
                for key, (leaves, made, tree, changed) in self._outputs.items()
            },
            {producer: like(*made) for producer, made in self._tensors.items()},
        )


def _states(leaves: list[Any]) -> list[tuple[int, int]]:
    """For each leaf (id of the object, how often it was written into)."""
    return [(id(leaf), version_of(leaf)) if isinstance(leaf, torch.Tensor) else (id(leaf), 0) for leaf in leaves]


def _alike(leaves: list[Any]) -> list[tuple[int, ...]]:
    """[leaf] -> the places of all that are the same object; () where it is the only one."""
    places: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault(id(leaf), []).append(place)
    return [tuple(places[id(leaf)]) if len(places[id(leaf)]) > 1 else () for leaf in leaves]


def copied(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy whose tensors are made anew; ties stay."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, module.__dict__):
            for value in tensors.values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    made = make(value)
                    is_parameter = isinstance(value, nn.Parameter)
                    memo[id(value)] = nn.Parameter(made, value.requires_grad) if is_parameter else made
    found: nn.Module = copy.deepcopy(model, memo)
    return found
