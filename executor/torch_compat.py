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


def reduce_gradients(root: FSDPModule) -> None:
    """What fully_shard does after the last backward of a step; after a backward for weights nothing else calls it.

    A unit's gradients get one dtype before. Where the backward for inputs has made some of them already (see
    torch_pipelining.LeanPipelineStage), fully_shard has put those by in the dtype that they are summed in, and
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
