"""Context parallelism of a model: its forward runs on this rank's tokens, also inside of what wraps its layers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves

from ...planner.plan.document import Plan
from ...profiler.running.repeated_forwards import repeating_as
from ...profiler.semantics.token_marks import Held, Mark, divided, mark_of, set_mark
from ...profiler.semantics.token_slices import TokenSlices, run_token_by_token
from ...profiler.tensor_cuts.context_trial import rehearsed_attention
from .context_attention import ContextAttention
from .mesh import RankMesh

Hook = Callable[[nn.Module, Any, Any], Any]


class ContextParallel:
    """A rank's tokens of every sequence. What runs within `running` sees whole sequences and works on these tokens."""

    def __init__(self, plan: Plan, mesh: RankMesh) -> None:
        group, length = mesh.group("context"), plan.training.seq_len
        assert group is not None
        if length is None:
            raise ValueError("the plan splits sequences over context ranks, but its model has none; plan it again")
        self.length = length
        attend = ContextAttention(plan.context_kind, group)
        self.spans = attend.spans(length)
        self.num_ranks = plan.degrees.context
        self._tensor_rank, self._num_slices = mesh.coordinates["tensor"], plan.degrees.tensor
        self._mode = TokenSlices(length, self.spans, self.num_ranks, attend)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it lasts, tensors that hold tokens are followed. If it is entered again inside, that does nothing."""
        if self._mode in _get_current_function_mode_stack():
            yield
            return
        with self._mode, repeating_as(self._again):
            yield

    def _again(self, forward: Callable[..., Any], given: Any) -> Callable[..., Any]:
        """A forward that the model hands to checkpoint, so that backward can repeat it: its arguments, which have lost
        their marks by then, are marked again."""
        marks = [mark_of(tensor) for tensor in _tensors_in(given)]

        def again(*args: Any, **kwargs: Any) -> Any:
            _mark_all(_tensors_in((args, kwargs)), marks)
            with self.running():
                return forward(*args, **kwargs)

        return again

    @contextmanager
    def whole_forward(self) -> Iterator[None]:
        """While it lasts (the forward and loss of a model), tensors that hold tokens are followed. Raises ValueError if
        no sequence of the plan's length was seen."""
        self._mode.started = False
        with self.running():
            yield
        if not self._mode.started:
            raise self.other_length()

    def other_length(self) -> ValueError:
        """The error to raise if no sequence of the plan's length was seen."""
        return ValueError(
            f"the plan splits sequences of {self.length} tokens over {self.num_ranks} ranks, but the batch has "
            "none of this length; feed the length that was planned for, or plan again with --seq-len"
        )

    def slice_of(self, mark: Mark | None) -> Mark | None:
        """The mark of a tensor of which this rank has the slice that sequence parallelism gives it."""
        return divided(mark, self._tensor_rank, self._num_slices) if isinstance(mark, Held) else mark

    def rehearsal(self) -> TokenSlices:
        """A mode for fake tensors, with attention that sends nothing."""
        return TokenSlices(self.length, self.spans, self.num_ranks, rehearsed_attention)

    def pass_through(self, module: nn.Module) -> "Passage":
        """What keeps marks on the inputs of a layer's module although wrappers give it new tensors. It must be told
        when the module is wrapped."""
        return Passage(self, module)

    def leave_alone(self, stage: nn.Module, modules: Iterable[str]) -> None:
        """Do not follow tokens inside these banks of experts, which treat each token by itself."""
        for name in modules:
            module = stage.get_submodule(name)
            module.forward = partial(run_token_by_token, module.forward)


class Passage:
    """Keeps marks on the inputs of a module: they are attributes of tensor objects, and both fully_shard and
    checkpointing give the module new objects.

    Call `inside` before the module is wrapped for recompute, `outside` after that. Where fully_shard wraps it, call
    `below` before and `around` after.
    """

    def __init__(self, context: ContextParallel, module: nn.Module) -> None:
        self._context = context
        self._module = module
        self._given: dict[tuple[Any, ...], list[Mark | None]] = {}
        self._entering: list[Mark | None] = []

    def inside(self) -> None:
        """Have the module's forward find marks on what it is given again, in backward, too."""
        self._module.forward = partial(self._run, self._module.forward)

    def outside(self) -> None:
        """Note marks on what is handed to the forward."""
        self._module.forward = partial(self._note, self._module.forward)

    def below(self) -> None:
        """Have the module's other hooks find marks again."""
        self._module.register_forward_pre_hook(self._restore, prepend=True, with_kwargs=True)

    def around(self) -> None:
        """Note marks before any hook."""
        self._module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._entering = [mark_of(leaf) for leaf in tree_leaves((args, kwargs))]

    def _restore(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        _mark_all(tree_leaves((args, kwargs)), self._entering)

    def _note(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        self._given[_shapes(leaves)] = [mark_of(leaf) for leaf in leaves]
        return forward(*args, **kwargs)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        _mark_all(leaves, self._given[_shapes(leaves)])
        with self._context.running():
            return forward(*args, **kwargs)


def _tensors_in(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _mark_all(leaves: Sequence[Any], marks: list[Mark | None]) -> None:
    for leaf, mark in zip(leaves, marks, strict=True):
        if mark is not None and mark_of(leaf) is None:
            set_mark(leaf, mark)


def _shapes(leaves: list[Any]) -> tuple[Any, ...]:
    """The shapes of tensors among these leaves, by which calls of a module are told apart."""
    with torch._C.DisableTorchFunction():
        return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
