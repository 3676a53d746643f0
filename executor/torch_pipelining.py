"""torch's pipeline stages and schedules as plans need them; what is private or differs between versions has its place
here, as other calls have theirs in torch_compat.py."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

_TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

_EXPECTS_EVERY_GRADIENT = _TORCH < (2, 13)
"""Whether torch's stages wait for a gradient of every tensor that they have sent, and send none where there is none."""

_MARKS_BUFFERS = _TORCH < (2, 12)
"""Whether what stages receive takes gradients because its buffer does, and every buffer does, be it of integers."""


class LeanPipelineStage(PipelineStage):
    """torch's pipeline stage, with receive buffers only for micro-batches in flight, and a call before each backward.

    The stock stage allocates buffers for every micro-batch of a step before the first (seen in 2.13: 64 micro-batches
    of 128 MiB are 8 GiB). Here a buffer is a meta tensor except from its receive to the end of its backward.

    before_backward: called with whether it is the step's last. before_weights, after_weights: around a backward for
    weights, with whether it is the last. after_some_weights: within one that autograd's hooks are not told of, with
    parameters whose gradients are there by then, and whether it is the last.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        input_args: tuple[torch.Tensor, ...],
        before_backward: Callable[[bool], None],
        before_weights: Callable[[bool], None],
        after_some_weights: Callable[[list[torch.nn.Parameter], bool], None],
        after_weights: Callable[[bool], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, input_args=input_args, **kwargs)
        self._take_gradients = [given.requires_grad for given in input_args]
        self._before_backward = before_backward
        self._before_weights = before_weights
        self._after_some_weights = after_some_weights
        self._after_weights = after_weights

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        if not _MARKS_BUFFERS:
            return self._on_meta(super()._prepare_forward_infra, *args, **kwargs)
        has_backward, self.has_backward = self.has_backward, False  # which take gradients is said at their receive
        try:
            return self._on_meta(super()._prepare_forward_infra, *args, **kwargs)
        finally:
            self.has_backward = has_backward

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_meta(super()._prepare_backward_infra, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Receives of a micro-batch's activations."""
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        if _MARKS_BUFFERS and not self.is_first:
            infos = cast(Sequence[Any], self.args_recv_info[fwd_chunk_id])
            for info, takes_gradient in zip(infos, self._take_gradients, strict=True):
                info.buffer.requires_grad_(takes_gradient)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Receives of a micro-batch's gradients."""
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """First messages to the stages beside this one, but to those on this rank (torch 2.12 sends them, too)."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Activations from the stage before, which is on this rank."""
        if not _MARKS_BUFFERS:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)
            return
        given = (prev_stage_outputs,) if isinstance(prev_stage_outputs, torch.Tensor) else prev_stage_outputs
        infos = cast(Sequence[Any], self.args_recv_info[mb_index])
        for info, tensor, takes_gradient in zip(infos, given, self._take_gradients, strict=True):
            info.buffer = tensor.detach().requires_grad_(takes_gradient)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Compare outputs with those announced (torch 2.11); a loss, which goes nowhere, may be of any dtype."""
        if not self.is_last:
            cast(Any, super())._validate_fwd_outputs(outputs)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of a micro-batch. Raises what the model raised; torch wraps it in a list of argument shapes."""
        with _as_raised():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of a micro-batch, or its part for inputs, after which its buffers are given back. Raises what the
        model's backward raised, out of memory too, as the forward does."""
        self._before_backward(last_backward)
        if not full_backward and not self.is_first:
            self._backward_past_inputs(bwd_chunk_id, loss)
        with _as_raised():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        grads = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(None if grad is None else grad.contiguous() for grad in grads)
        for infos in (self.args_recv_info[bwd_chunk_id], self.grad_recv_info.get(bwd_chunk_id, ())):
            _move_buffers(infos, torch.device("meta"))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Backward of a micro-batch or a part of it. Before 2.13 torch's backward for inputs fails for an output that
        has no gradient, and for an input that takes none or that no output comes from."""
        if backward_type != "input" or not _EXPECTS_EVERY_GRADIENT:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        outputs, inputs, grads = (bwd_kwargs[name] for name in ("stage_output", "input_values", "output_grads"))
        pairs = list(zip(outputs, grads or [None] * len(outputs), strict=True))
        taken = [(output, grad) for output, grad in pairs if output.requires_grad]
        nodes = [_node(output) for output, _ in taken]
        found: list[torch.Tensor | None] = [None] * len(inputs)
        reached = [
            place
            for place, given in enumerate(inputs)
            if isinstance(given, torch.Tensor)
            and given.requires_grad
            and any(_reaches(node, {_node(given)}) for node in nodes)
        ]
        if not reached:
            return tuple(found), []
        given = {
            "stage_output": tuple(output for output, _ in taken),
            "output_grads": None if grads is None else tuple(grad for _, grad in taken),
            "input_values": [inputs[place] for place in reached],
        }
        made, groups = super().backward_maybe_with_nosync(backward_type, given, last_backward)
        for place, grad in zip(reached, made, strict=True):
            found[place] = grad
        return tuple(found), groups

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Backward of a micro-batch for weights, which its backward for inputs has put off.

        torch goes from one group of parameters to the next, and frees the graph after each, though a parameter that
        several layers read (seen in 2.13: the position bias of T5) leads through it once more, and may be in two groups
        and be counted twice.
        """
        self._before_weights(last_backward)
        if self.is_first:  # nobody waits for the gradients of its inputs
            with _as_raised():
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        else:
            _, groups, _, _ = self.backward_state.pop(bwd_chunk_id)
            groups = _without_overlap(groups or [])
            besides = _besides(groups) if self.device.type == "cpu" else [set[Any]() for _ in groups]
            told = self._told(groups, besides, last_backward)
            weights = *self.submod.parameters(), *(_Besides(node) for nodes in besides for node in nodes)
            # torch asks for a list of groups, and goes through it once
            stage_backward_weight(cast(Any, iter(weights)), cast(Any, told), retain_graph=True)
        self._after_weights(last_backward)

    def _told(
        self, groups: list[dict[str, Any]], besides: list[set[Any]], last_backward: bool
    ) -> Iterator[dict[str, Any]]:
        """The groups, one after another, each of which is done when the next one is asked for. besides: what torch is
        to ask for with the parameters of each."""
        for group, nodes in zip(groups, besides, strict=True):
            parameters = [node.variable for node in group["params"]]
            group["params"] |= nodes
            without = [parameter for parameter in parameters if parameter.grad is None]
            passing = [grad for grads in group["grads"] for grad in grads if grad is not None]
            yield group
            _own_gradients(without, passing)
            self._after_some_weights(parameters, last_backward)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Sends of a micro-batch's gradients, zeros where there are none."""
        if _EXPECTS_EVERY_GRADIENT and not self.is_first:
            infos = cast(Sequence[Any], self.args_recv_info[bwd_chunk_id])
            pairs = zip(self.bwd_cache[bwd_chunk_id], infos, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(info.buffer, device=self.device) if grad is None else grad for grad, info in pairs
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients from the next stage, which is on this rank; where there is none, zeros on the device."""
        given, infos = list(next_stage_bwd_outputs), cast(Sequence[Any], self.grad_recv_info[mb_index])
        for place, info in enumerate(infos):
            if given[place] is None:
                _move_buffers([info], self.device)
                if _EXPECTS_EVERY_GRADIENT:
                    given[place] = torch.zeros_like(info.buffer)
        super().set_local_bwd_input(tuple(given), mb_index)

    def _backward_past_inputs(self, chunk: int, loss: torch.Tensor | None) -> None:
        """Whole backward of those outputs that come from no input of the stage.

        torch puts off only gradients that branch off on the way from an output to an input, and never computes others
        (seen in 2.13: the parameters of a decoder's embedding on a stage that hands on the encoder's output).
        """
        outputs, inputs = self.fwd_cache[chunk]
        grads = [None] if self.is_last else self._retrieve_recv_grads(chunk)
        outputs = [loss] if self.is_last else outputs
        ends = {_node(x) for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad}
        apart = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output.requires_grad and not _reaches(_node(output), ends)
        ]
        if apart:
            torch.autograd.backward([output for output, _ in apart], [grad for _, grad in apart], retain_graph=True)

    def _on_meta(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device


def custom_schedule(
    stages: Sequence[PipelineStage], order: Sequence[Sequence[tuple[int, str, int]]], num_microbatches: int, loss: Any
) -> Any:
    """torch's runtime for any order of passes; it finds the sends and receives by itself.

    stages: of this rank. order: [rank] -> (stage, "F" | "B" | "I" | "W", micro-batch). loss: of (output, target).
    """
    schedule = _PipelineScheduleRuntime(list(stages), num_microbatches, loss_fn=loss, scale_grads=False)
    schedule._prepare_schedule_with_comms(
        {
            rank: [_Action(stage, _ComputationType(letter), i) for stage, letter, i in passes]
            for rank, passes in enumerate(order)
        }
    )
    return schedule


@contextmanager
def _as_raised() -> Iterator[None]:
    """torch's stages wrap what a model raises in one more error."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


def _without_overlap(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of a backward for weights, those joined that have a parameter in common."""
    joined: list[tuple[set[Any], dict[Any, Any]]] = []
    for group in groups:
        if "grads" in group:
            parameters = set(group["params"])
            grads = dict(zip(group["intermediates"], group["grads"], strict=True))
            apart = [other for other in joined if not other[0] & parameters]
            for others, their_grads in (other for other in joined if other[0] & parameters):
                parameters, grads = parameters | others, grads | their_grads
            joined = [*apart, (parameters, grads)]
    return [{"params": p, "intermediates": list(grads), "grads": list(grads.values())} for p, grads in joined]


def _own_gradients(parameters: Sequence[nn.Parameter], passing: Sequence[torch.Tensor]) -> None:
    """Let each parameter have its first gradient in memory of its own, as autograd does where it adds one up. torch's
    backward for weights takes what comes, which two parameters may have in common (x + a + b), or which is one of those
    that pass through (`passing`), or one number spread over all elements; later micro-batches are added into it."""
    held = {grad.untyped_storage()._cdata for grad in passing}
    for parameter in parameters:
        if (grad := parameter.grad) is None:
            continue
        place = grad.untyped_storage()._cdata
        if place in held or 0 in grad.stride():
            parameter.grad = grad.clone(memory_format=torch.contiguous_format)
        held.add(place)


class _Besides:
    """What a node of autograd's graph makes a gradient of, as torch asks for parameters."""

    requires_grad, grad = True, None

    def __init__(self, node: Any) -> None:
        self.grad_fn = node


def _besides(groups: list[dict[str, Any]]) -> list[set[Any]]:
    """[group] -> the nodes that make what group norms are given, but parameters: on CPUs torch's group norm over
    channels that lie last in memory ends the process when it is asked for the gradients of its weights alone (seen in
    2.13)."""
    parameters = set[Any]().union(*(group["params"] for group in groups))

    def given(group: dict[str, Any]) -> Iterator[Any]:
        for norm in group["intermediates"]:
            if norm.name() == "NativeGroupNormBackward0":
                node, number = norm.next_functions[0]
                if node is not None and number == 0:
                    yield node

    return [set(given(group)) - parameters for group in groups]


def _node(tensor: torch.Tensor) -> Any:
    """The node of autograd's graph that makes a tensor, or that adds up its gradient."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _reaches(start: Any, ends: set[Any]) -> bool:
    """Whether autograd's way back from a node meets one of `ends`."""
    seen: set[Any] = {None}
    nodes = [start]
    while nodes:
        node = nodes.pop()
        if node in ends:
            return True
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


def _move_buffers(infos: Iterable[Any], device: torch.device) -> None:
    """Empty buffers on a device in place of those of a micro-batch's receives (root arguments have none)."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            like = info.buffer
            info.buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
