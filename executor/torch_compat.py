"""The few torch calls that are private or differ between versions, so that each has one place to be mended."""

import atexit
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import Function
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.tensor import debug
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from .processes import let_rest

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather_single(output, input, group=...); torch before 2.13 calls it all_gather_into_tensor."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""reduce_scatter_single(output, input, group=...); torch before 2.13 calls it reduce_scatter_tensor."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with what torch's allocator on GPUs is told; the second is the older one."""

_GROWING = "expandable_segments:True"


def grow_segments() -> None:
    """Let torch's allocator on NVIDIA GPUs grow the pieces that it takes from the driver, instead of taking others.

    Of a step's peak, 1% to 25% more had to be free without this on an H100, 1% to 3% with it (GPT-2 and BERT under FSDP
    and HSDP; benchmarks/one_gpu/results/memory.md). Where CUDA is in use already, as after torch.cuda.set_device, it
    holds for what is taken from then on (seen on an H100, torch 2.11). What the user has said of the allocator stays.
    """
    if not torch.version.cuda or any(name in os.environ for name in _ALLOCATOR):
        return
    os.environ[_ALLOCATOR[0]] = _GROWING
    if torch.cuda.is_initialized():
        torch._C._accelerator_setAllocatorSettings(_GROWING)


_GLOO_THREADS, _LAST_WORDS_S = "pt_gloo_runloop", 5.0
"""What the system calls gloo's threads, and how long they may be waited for."""


def end_after_gloo() -> None:
    """From now on, at this process's end, wait for gloo's threads before Python goes.

    A collective returns before the thread that ran it has let go of its tensors. If that thread needs Python for the
    last of them, and Python has gone meanwhile, the process aborts ("terminate called without an active exception",
    torch 2.13; seen in one of 56 jobs on a busy machine, after the last step). destroy_process_group does not wait for
    these threads while anything, such as a DeviceMesh, holds a group.
    """
    atexit.unregister(let_gloo_rest)
    atexit.register(let_gloo_rest)


def let_gloo_rest() -> None:
    """Wait until gloo's threads have let go of the tensors of collectives that are done."""
    let_rest(_GLOO_THREADS, _LAST_WORDS_S)


def forget_groups() -> None:
    """Call it after process groups are gone: what torch keeps of operators on DTensors it finds again under any mesh
    that is equal, in forked processes too, and it names the old groups ("Could not resolve the process group", seen in
    2.13)."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None) or debug._clear_python_sharding_prop_cache
    clear()


def default_store() -> Store:
    """The store of torch.distributed, which runs."""
    return _get_default_store()


def own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The one of these groups of processes, no two of which share one, that this process is in; None if it is in none.

    All processes must call it, with the same groups. NCCL that knows its device splits off all of them at once;
    elsewhere each takes one call of every process. (new_group's use_local_synchronization, by which members alone make
    a group, names it by how many groups the process holds already: members that hold different numbers of them wait
    for each other forever.)
    """
    assert dist.group.WORLD is not None
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        return dist.split_group(split_ranks=[sorted(group) for group in groups])  # all ranks of NCCL must take part
    made = [(group, dist.new_group(sorted(group))) for group in groups]
    return next((handle for group, handle in made if dist.get_rank() in group), None)


def data_parallel(
    module: nn.Module, group: dist.ProcessGroup | None, unread: Iterable[str] = ()
) -> DistributedDataParallel:
    """Replicas with averaged gradients, all of which hold equal values already; buffers stay each rank's own.

    unread: parameters that get no gradient, so must not be waited for. (The public find_unused_parameters walks the
    graph in every step, and warns where it finds nothing.) torch 2.13 renamed broadcast_buffers to
    forward_sync_buffers.
    """
    wrap: Any = DistributedDataParallel
    names = list(unread)
    # What its reducer is made from names a parameter after its module and a dot, one of the model itself ".scale".
    wrap._set_params_and_buffers_to_ignore_for_model(module, [*names, *(f".{n}" for n in names if "." not in n)])
    renamed = "forward_sync_buffers" in inspect.signature(wrap.__init__).parameters
    replicas: DistributedDataParallel = wrap(
        module,
        process_group=group,
        gradient_as_bucket_view=True,
        init_sync=False,
        **{"forward_sync_buffers" if renamed else "broadcast_buffers": False},
    )
    return replicas


def remove_replication(replicas: DistributedDataParallel) -> None:
    """Let a model be without replicas again: no gradient is averaged, or waited for, any more."""
    replicas._remove_autograd_hooks()
    for parameter in replicas.module.parameters():
        parameter.grad = None  # a view of its buckets


@contextmanager
def replaced_truncated_normal(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, trunc_normal_ is what `replace` makes of it, whoever calls it.

    Since torch 2.13 it draws again until it likes the numbers, which fake tensors do not have.
    """
    original = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = replace(original)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def accelerator() -> torch.device:
    """Type of the devices that ranks compute on: cuda where there is one, else cpu."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def detached(x: torch.Tensor) -> torch.Tensor:
    """x.detach() that still knows how often x is written into; inside of a dispatch mode it otherwise does not."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group of that group_name, as an operator can be given it."""
    found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return found


def joined_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """One axis of several neighbouring ones; the first call for a mesh makes its process group."""
    return mesh[axes]._flatten("_x_".join(axes))


def side_by_side(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """A mesh of two axes that are parts of one mesh, joined ones included."""
    return DeviceMesh._concatenate([outer, inner])


def solid(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of x that autograd does not take for a view of another."""
    return _Solid.apply(x) if x._is_view() else x


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether something was registered to run before an optimizer's steps."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def before_steps(optimizer: Optimizer, hook: Callable[..., None]) -> None:
    """Call `hook` before each step of an optimizer; not where its class has left out what torch gives optimizers for
    that (some that wrap others do), or has plain dicts there, to which torch cannot refer weakly."""
    if isinstance(getattr(optimizer, "_optimizer_step_pre_hooks", None), OrderedDict):
        optimizer.register_step_pre_hook(hook)


def source_of(x: torch.Tensor) -> tuple[Node, int]:
    """(what made a tensor that has a gradient, which of its results that is), before `solid` made it no view."""
    node, number = get_gradient_edge(x)[:2]
    while isinstance(node, _Solid._backward_cls):
        node, number = cast(tuple[Node, int], node.next_functions[0])
    return node, number


def alias(x: torch.Tensor) -> torch.Tensor:
    """Another tensor over the memory of x, no view for autograd: it may be detached in place, which neither a view may
    be nor a tensor that a layer has saved for its backward (a ReLU's result)."""
    if x.requires_grad:
        return cast(torch.Tensor, _Solid.apply(x))
    return _over(x) if x._is_view() else x  # a part of the batch that a layer hands on


def _over(x: torch.Tensor) -> torch.Tensor:
    # Not from x's storage: fake tensors never let go of a storage that was an argument.
    made: torch.Tensor = x.new_empty(0).set_(x.detach())  # type: ignore[call-overload]
    return made


class _Solid(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _over(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


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


@contextmanager
def _as_raised() -> Iterator[None]:
    """torch's stages wrap what a model raises in one more error."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


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


def reduce_gradients(root: FSDPModule) -> None:
    """What fully_shard does after the last backward of a step; after a backward for weights nothing else calls it.

    A unit's gradients get one dtype before. Where the backward for inputs has made some of them already (see
    LeanPipelineStage._backward_past_inputs), fully_shard has put those by in the dtype that they are summed in, and
    would raise at the others, which are in the parameters' (seen in 2.13 on T5 with one micro-batch). And where the
    backward of a parameter leads through a unit's input, fully_shard takes the unit for done, and would leave out what
    gradients it got after that (seen in 2.13 on a stage that makes one of two tensors which its first unit reads).
    """
    units = (unit for unit in cast(nn.Module, root).modules() if isinstance(unit, FSDPModule))
    for group in (group for unit in units for group in _parameter_groups(unit)):
        group._training_state = type(group._training_state).IDLE
        gathered = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        without = [p for p in gathered if p.unsharded_accumulated_grad is None]
        if len(without) < len(gathered):
            for parameter in without:
                parameter.to_accumulated_grad_if_needed()
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def unit_of(module: FSDPModule) -> int:
    """A number that is the same for all modules that fully_shard was given as one unit."""
    return id(fully_shard.state(module))  # type: ignore[attr-defined]


def gather_before_any_backward(unit: FSDPModule, modules: Iterable[nn.Module]) -> None:
    """Let a unit of several modules be whole for the backward of each of them.

    fully_shard waits for the gradient of what the last of them put out in the forward (seen in 2.13). The others may
    have their backward first; and that output may get no gradient at all, where its parameters are frozen.
    """
    register = fully_shard.state(unit)._register_pre_backward_hook  # type: ignore[attr-defined]
    for module in modules:
        module.register_forward_hook(lambda module, args, output: register(output))


def hide_from_selective_recompute(unit: FSDPModule) -> None:
    """Let selective recompute not see what fully_shard's hooks on a unit inside of a recomputed layer do.

    It counts operators, and raises where the repetition has more of one kind than the forward had (seen in 2.13). A
    unit that is still gathered in the forward, and is gathered anew for the repetition, has.
    """
    module: Any = unit
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            hooks[key] = partial(_unseen, hook)


def _unseen(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        with _pop_mode_temporarily():
            return hook(*args, **kwargs)
    return hook(*args, **kwargs)


def forward_with_hooks(module: nn.Module) -> Callable[..., Any]:
    """A module's forward together with the hooks that it has by now, which are taken off it."""
    forward = module.forward
    before = [(hook, key in module._forward_pre_hooks_with_kwargs) for key, hook in module._forward_pre_hooks.items()]
    behind = [(hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items()]
    if not before and not behind:
        return forward
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.clear()

    def run(*args: Any, **kwargs: Any) -> Any:
        for hook, takes_kwargs in before:
            given = hook(module, args, kwargs) if takes_kwargs else hook(module, args)
            if given is not None and takes_kwargs:
                args, kwargs = given
            elif given is not None:
                args = given if isinstance(given, tuple) else (given,)
        output = forward(*args, **kwargs)
        for hook, takes_kwargs in behind:
            changed = hook(module, args, kwargs, output) if takes_kwargs else hook(module, args, output)
            output = output if changed is None else changed
        return output

    return run


def kept_by(keeping: Any) -> list[torch.Tensor]:
    """What the first context of torch's create_selective_checkpoint_contexts has kept so far. (Its policy is not told
    of what an operator returns before torch 2.12.)"""
    wrapped = tree_leaves(keeping.storage)
    return [x for leaf in wrapped if isinstance(x := getattr(leaf, "val", None), torch.Tensor)]


def in_backward() -> bool:
    """Whether autograd is at work on this thread: a forward that runs now is a repetition."""
    return torch._C._current_graph_task_id() != -1


def set_gradient_divisor(unit: FSDPModule, divisor: int, num_shards: int) -> None:
    """Let a unit of fully_shard over `num_shards` ranks divide its gradients by `divisor`, not by its ranks.

    Summed first, because gloo has no reduction that multiplies before. A single shard is not reduced at all, and would
    be divided twice then (seen in 2.13).
    """
    unit.set_gradient_divide_factor(float(divisor))
    if num_shards > 1:
        unit.set_force_sum_reduction_for_comms(True)


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
