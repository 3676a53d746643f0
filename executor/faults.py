"""What goes wrong in a job, said in the words of its plan: numbers that are none, memory, devices that do not fit."""

import logging
import math
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ..planner.cost.memory_cost import state_bytes
from ..planner.cost.software import load_software
from ..planner.cost.stage_cost import outside_bytes
from ..planner.plan.document import Plan
from ..planner.plan.making import shape_of
from ..profiler.machine.units import GIB
from .parallel.dropout_calls import drops_by_itself
from .parallel.mesh import RankMesh
from .torch_compat import has_step_pre_hooks

_log = logging.getLogger("meshwright")


class NonFiniteError(FloatingPointError):
    """A loss or gradients are not numbers any more; the message says in which step, on which ranks, and where."""


def check_finite(mesh: RankMesh, step: int, losses: list[torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    """Raise NonFiniteError on every rank: say which ranks and stages have losses and gradients that are no numbers.

    Every rank must call it. gradients: of this rank, by name.
    """
    bad_losses = [i for i, value in enumerate(losses) if not bool(torch.isfinite(value).all())]
    bad_gradients = [name for name, grad in gradients.items() if not bool(torch.isfinite(grad).all())]
    found = mesh.on_all((bad_losses, bad_gradients[:1], len(bad_gradients), mesh.rank))
    parts = []
    for micro_batches, first, count, rank in sorted(found, key=lambda f: int(f[3])):
        if micro_batches:
            parts.append(f"the loss of micro-batch {micro_batches[0]} {_seat(mesh.plan, rank)} is not finite")
        if first:
            parts.append(f"{count} gradients {_seat(mesh.plan, rank)} are not finite, the first of {first[0]}")
    more = f" ({len(parts) - 4} more)" if len(parts) > 4 else ""
    what = "; ".join(parts[:4]) + more or "the gradient norm overflows"
    raise NonFiniteError(
        f"step {step}: {what}. Go on from the last checkpoint with a smaller learning rate, max_grad_norm, or without "
        "the samples of this step"
    )


def raise_spoiled(mesh: RankMesh, step: int, names: list[str], norms: torch.Tensor) -> None:
    """Raise NonFiniteError on every rank: say which ranks and stages have parameters that are no numbers.

    Every rank must call it. names, norms: this rank's parameters, and their norms after that step.
    """
    bad = [name for name, value in zip(names, norms.tolist(), strict=True) if not math.isfinite(value)]
    found = mesh.on_all((bad[:1], len(bad), mesh.rank))
    parts = [
        f"{count} parameters {_seat(mesh.plan, rank)}, the first of them {first[0]}"
        for first, count, rank in sorted(found, key=lambda f: int(f[2]))
        if first
    ]
    more = f" ({len(parts) - 4} more)" if len(parts) > 4 else ""
    raise NonFiniteError(
        f"step {step}: loss and gradients are finite, but the optimizer left {'; '.join(parts[:4])}{more} not finite. "
        "Go on from the last checkpoint with a smaller learning rate or a larger eps"
    )


def _seat(plan: Plan, rank: int) -> str:
    stages = plan.stages_of(plan.coordinates(rank)["pipeline"])
    stage = f", stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}" if len(plan.stages) > 1 else ""
    return f"on rank {rank}{stage}"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a rank holds: by torch for model states, allocated and reserved at most, and what the device has."""

    parameters: float
    gradients: float
    optimizer: float
    allocated: float
    reserved: float
    others: float
    total: float


def held_memory(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> DeviceMemory:
    """What this rank's device holds now, and at its peak."""

    def size(tensors: list[torch.Tensor]) -> float:
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return float(sum(t.numel() * t.element_size() for t in local))

    held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    states = [v for v in held if v.device.type == device.type]
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return DeviceMemory(
        parameters=size(parameters),
        gradients=size([p.grad for p in parameters if p.grad is not None]),
        optimizer=size(states),
        allocated=float(torch.cuda.max_memory_allocated(device)),
        reserved=float(reserved),
        others=float(total - free - reserved),
        total=float(total),
    )


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device's memory, or the host's, did not do; of the host's torch says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def out_of_host_memory_message(plan: Plan, rank: int, error: RuntimeError) -> str:
    """Which rank asked its host for more than there is, and what to change."""
    return (
        f"out of memory {_seat(plan, rank)} in the memory of its host, which is that of all its ranks: {error}. Start "
        "fewer ranks on a host, or plan again with --pin recompute=full or a smaller --pin micro_batch=..."
    )


def out_of_memory_message(plan: Plan, rank: int, num_elements: int, held: DeviceMemory) -> str:
    """Which item of the predicted memory was exceeded most, and what to change.

    num_elements: of the parameters that this rank holds, before sharding over data.
    """
    shape, training = shape_of(plan), plan.training
    device = load_software(training.software).on(plan.cluster.device_of(rank), plan.degrees.num_devices)
    outside = outside_bytes(shape, device)
    state = state_bytes(shape, training)
    position = plan.coordinates(rank)["pipeline"]
    predicted_total = plan.prediction.stage_memory_bytes[position] if plan.prediction is not None else None
    predicted = {
        "parameters": num_elements * state.sharded_parameters,
        "gradients": num_elements * state.sharded_gradients,
        "optimizer": num_elements * state.optimizer,
    }
    found = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    if predicted_total is not None:
        inside = (predicted_total - outside) / (1 + device.fragmentation)
        predicted["activations and gathered copies"] = max(0.0, inside - sum(predicted.values()))
        found["activations and gathered copies"] = max(0.0, held.allocated - sum(found.values()))
        predicted["fragmentation"] = inside * device.fragmentation
        found["fragmentation"] = max(0.0, held.reserved - held.allocated)
    predicted["outside of torch"] = outside
    found["outside of torch"] = held.others
    item = max(predicted, key=lambda name: found[name] - predicted[name])
    account = ", ".join(f"{name} {found[name] / GIB:.2f} ({predicted[name] / GIB:.2f})" for name in predicted)
    advice = {
        "parameters": "shard them over more ranks: plan again with more GPUs, or --pin data_shard=...",
        "gradients": "shard them over more ranks: plan again with more GPUs, --pin data_shard=... or more stages",
        "optimizer": f"the plan is for {training.optimizer}: give that optimizer, one with less state, or plan again",
        "activations and gathered copies": "plan again with --pin recompute=full, a smaller --pin micro_batch=..., or "
        "a larger --memory-margin",
        "fragmentation": "set PYTORCH_ALLOC_CONF=expandable_segments:True before CUDA is used, as a trainer does "
        "where it is the first to use it, or plan again with a larger --memory-margin",
        "outside of torch": "another process or library uses this GPU: end it, or plan again with a larger "
        "--memory-margin",
    }[item]
    beyond = (found[item] - predicted[item]) / GIB
    return (
        f"out of memory {_seat(plan, rank)} on a device of {held.total / GIB:.2f} GiB: {item} exceed what was "
        f"predicted by {beyond:.2f} GiB; found (predicted) in GiB: {account}. {advice[0].upper()}{advice[1:]}"
    )


def check_devices(plan: Plan, device: torch.device) -> None:
    """Raise ValueError, before anything is sent, if this host's GPUs cannot be those of the plan."""
    if device.type != "cuda":
        return
    here = torch.cuda.device_count()
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted > here:
        raise ValueError(
            f"{wanted} ranks were started on this host, which has {here} GPU{'s' if here != 1 else ''}: start it with "
            f"--nproc-per-node {here}, or make a plan with --gpus-per-node {here}"
        )
    if plan.prediction is None:
        return
    needed = plan.prediction.stage_memory_bytes
    unequal = len(plan.cluster.kinds) > 1  # which of them this one is shows when hosts are matched
    _check_memory(plan, device, needed.index(min(needed) if unequal else max(needed)), unequal)


def tell_batch_norms(model: nn.Module, plan: Plan, rank: int) -> None:
    """Say once, in the log of the first rank, that batch norms do not see the batch that one device would normalise.

    model: in training mode."""
    if plan.micro_batch == plan.training.global_batch or rank != 0:
        return
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and (module.training or not module.track_running_stats)
    ]
    if found:
        _log.warning(
            "%d batch norms (%s first) take their statistics from micro-batches of %d samples, each rank from its own, "
            "and not from the global batch of %d: plan with a larger micro-batch, or use SyncBatchNorm or GroupNorm",
            len(found),
            found[0],
            plan.micro_batch,
            plan.training.global_batch,
        )


def tell_own_dropout(model: nn.Module, plan: Plan, rank: int) -> None:
    """Say once, in the log of the first rank, that what drops within an operator of torch's draws for a micro-batch."""
    found = drops_by_itself(model)
    if found and rank == 0 and plan.degrees.num_devices * plan.num_microbatches > 1:
        _log.warning(
            "%s drops within an operator of torch's: what it drops is independent on ranks with other samples, but not "
            "that of one device",
            found,
        )


def tell_own_generators(model: nn.Module, plan: Plan, rank: int) -> None:
    """Say once, in the log of the first rank, that what a model draws from generators of its own is the same for the
    samples of all data ranks."""
    found = [
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    ]
    if found and rank == 0 and plan.degrees.data > 1:
        _log.warning(
            "%s is a generator of the model's own, which begins alike on all %d data ranks: their samples get the same "
            "noise. Draw from torch's own generator, from which ranks with other samples draw other numbers",
            found[0],
            plan.degrees.data,
        )


def tell_step_hooks(optimizer: Optimizer, plan: Plan, rank: int, owned: bool = False) -> None:
    """Say once, in the log of the first rank, that what runs before an optimizer's step sees a part of the model.
    owned: whether each rank steps whole parameters of its own."""
    degrees, several = plan.degrees, getattr(optimizer, "optimizers", [optimizer])
    parts = max(degrees.pipeline, degrees.tensor, degrees.expert, degrees.num_devices if owned else 1)
    if rank == 0 and parts > 1 and any(map(has_step_pre_hooks, several)):
        _log.warning(
            "the optimizer has a step pre-hook, which sees the parameters and gradients of one rank, one of %d parts "
            "of the model: what it takes over all of them, such as a norm to clip by, is another on each. Clip with "
            "parallelize(..., max_grad_norm=...), whose norm is that of the whole model",
            parts,
        )


def check_own_device(mesh: RankMesh) -> None:
    """Raise ValueError if this rank's GPU holds less than its stage of a plan for unequal devices needs."""
    if mesh.device.type == "cuda" and mesh.plan.prediction is not None and len(mesh.plan.cluster.kinds) > 1:
        _check_memory(mesh.plan, mesh.device, mesh.coordinates["pipeline"], unequal=True)


def _check_memory(plan: Plan, device: torch.device, position: int, unequal: bool) -> None:
    assert plan.prediction is not None
    found = torch.cuda.get_device_properties(device).total_memory
    needed = plan.prediction.stage_memory_bytes[position]
    if needed > found:
        planned = plan.cluster.device_of(position * plan.stride("pipeline")) if unequal else plan.cluster.device
        where = f"stage {position}" if unequal else "its fullest stage"
        way = "start hosts in the order of the cluster file" if unequal else "make a plan for it with --device"
        raise ValueError(
            f"the plan is for a {planned.name} and needs {needed / GIB:.1f} GiB on {where}; the "
            f"{torch.cuda.get_device_name(device)} here has {found / GIB:.1f} GiB: {way}"
        )
