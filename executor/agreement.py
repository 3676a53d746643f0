"""What ranks must agree on: how they were called, parameters, and who trains on what. All of it is looked at before the
first step, and by marks, which are added up with the loss, in every other.

Each of these goes unnoticed otherwise: replicas that begin with other values, or learn at other rates, drift apart; and
a pipeline whose stages are given different samples trains on what nobody meant.
"""

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ..profiler.running.held_tensors import gradient_hooks
from .apply import AppliedModel
from .parallel.mesh import RankMesh
from .parallel.norms import norms_of

_log = logging.getLogger("meshwright")

_ALIKE = 1e-5
"""Relative difference of a parameter's norms on two replicas that kernels of two kinds of devices may make."""

_MARKS = 1 << 24
"""Marks of batches are below this, so that sums of so many, times ranks of a share, are exact in float64."""


def check_optimizers(mesh: RankMesh, optimizer: Optimizer) -> None:
    """Raise ValueError, on every rank, if ranks that hold the same parameters would step them differently."""
    if not peers_answer(mesh):
        return
    found = mesh.on_all((mesh.coordinates["pipeline"], mesh.rank, type(optimizer).__name__, _options(optimizer)))
    firsts: dict[int, Any] = {}
    for stage, rank, kind, options in sorted(found, key=lambda each: int(each[1])):
        _, first, kind_there, options_there = firsts.setdefault(stage, (stage, rank, kind, options))
        if kind != kind_there or len(options) != len(options_there):
            raise ValueError(
                f"optimizer=... made {kind} of {len(options)} parameter groups on rank {rank} and {kind_there} of "
                f"{len(options_there)} on rank {first}: these ranks hold copies or shards of the same parameters, so "
                "it must make the same on both"
            )
        for a, b in zip(options, options_there, strict=True):
            for name in a.keys() | b.keys():
                if a.get(name) != b.get(name):
                    raise ValueError(
                        f"optimizer=... made a parameter group with {name}={a.get(name)} on rank {rank} and with "
                        f"{name}={b.get(name)} on rank {first}: these ranks hold copies or shards of the same "
                        "parameters, so it must make the same on both"
                    )


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """How each parameter group is stepped, as far as numbers and words say it."""
    return [{k: v for k, v in g.items() if isinstance(v, str | Number | tuple)} for g in optimizer.param_groups]


def check_parameters(
    mesh: RankMesh, model: AppliedModel, dtypes: Mapping[str, torch.dtype], hooks: Mapping[str, int]
) -> None:
    """Raise ValueError, on every rank, if parameters are not those that were built, or copies of one are not alike.

    dtypes, hooks: by name, of what was built; hooks: how many each calls with its gradient. Every rank must call it.
    """
    problem = _exchanged(model, dtypes) or _hooked(mesh, model, hooks)
    if not peers_answer(mesh):
        if problem:
            raise ValueError(problem)
        return
    names = [name for name in model.parameters if name not in model.experts]
    uncut = [name for name in names if model.cut(name) is None]
    for axis, copied in (("data_replicate", names), ("tensor", uncut)):
        group = mesh.group(axis)  # type: ignore[arg-type]
        if group is None or problem:
            continue
        norms = norms_of([_local(model.parameters[name]) for name in copied], mesh.device)
        every = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, norms, group=group)
        for other, theirs in zip(dist.get_process_group_ranks(group), every, strict=True):
            apart = (theirs - norms).abs() > _ALIKE * torch.maximum(theirs, norms)
            if bool(apart.any()):
                name = copied[int(apart.nonzero()[0])]
                problem = (
                    f"{name} is another one on rank {mesh.rank} than on rank {mesh.processes.index(other)}, which hold "
                    "copies of it: build the model, and load what it begins with, alike on all ranks "
                    "(parallelize(weights=...) or resume read a file for all)"
                )
                break
    told = next(filter(None, mesh.on_all(problem)), "")
    if told:
        raise ValueError(told)


def _exchanged(model: AppliedModel, dtypes: Mapping[str, torch.dtype]) -> str:
    """What was done to parameters since parallelize; "" if nothing."""
    now = {name.removeprefix(model.prefix): p for name, p in model.module.named_parameters()}
    for name, parameter in now.items():
        before = model.parameters.get(name)
        if before is None:
            return f"{name} was added to the model after parallelize, and would not be trained: {_WAY_OUT}"
        if before is not parameter:
            return f"{name} is another parameter than that which parallelize made, and would not be trained: {_WAY_OUT}"
        if parameter.dtype != dtypes[name]:
            return (
                f"{name} was {str(dtypes[name]).removeprefix('torch.')} and is "
                f"{str(parameter.dtype).removeprefix('torch.')} now: the plan says the precision, plan --precision bf16"
            )
    missing = model.parameters.keys() - now.keys()
    return f"{min(missing)} was taken out of the model after parallelize: {_WAY_OUT}" if missing else ""


def _hooked(mesh: RankMesh, model: AppliedModel, hooks: Mapping[str, int]) -> str:
    """What was hooked to gradients since parallelize and is never called; "" if nothing. Warns, on the first rank,
    where it is called with a part of the gradient."""
    speaks = mesh.rank == 0 and mesh.plan.degrees.num_devices * mesh.plan.num_microbatches > 1
    late = next((name for name, p in model.parameters.items() if p._post_accumulate_grad_hooks), None)
    if late is not None and speaks:
        _log.warning(
            "%s was given a hook for when its gradient has been added up (register_post_accumulate_grad_hook) after "
            "parallelize, which is called after each micro-batch with what this rank has of the gradient: change "
            "gradients between forward_backward() and optimizer_step(), or read them after step()",
            late,
        )
    name = next((name for name, p in model.parameters.items() if len(gradient_hooks(p)) > hooks[name]), None)
    if name is None:
        return ""
    if model.mechanism == "fsdp":
        return (
            f"{name} was given a hook (register_hook) after parallelize, which sharded gradients never call: {_WAY_OUT}"
        )
    if speaks:
        _log.warning(
            "%s was given a hook (register_hook) after parallelize, which is called with the gradient of one "
            "micro-batch of one rank: if it changes gradients, %s",
            name,
            _WAY_OUT,
        )
    return ""


_WAY_OUT = "let the function that builds the model do that, and plan that model"


def peers_answer(mesh: RankMesh) -> bool:
    """Whether there are other ranks, and they say what is theirs: those of a fake process group, in which one rank runs
    alone, do not."""
    return mesh.device_mesh is not None and dist.get_backend() != "fake"


def check_shares(mesh: RankMesh, batch: Any, step: int, read: str, begun: Any = None) -> None:
    """Raise ValueError, on every rank, if ranks that work on the same samples were given different ones, or deal out
    samples differently; warn, on the first rank, where all data ranks were given the same ones, or each read others of
    what all should read. read: how this rank called loader, in words; begun: with which sample the iterable that it was
    given began. Every rank must call it."""
    if not peers_answer(mesh):
        return
    found = mesh.on_all((mesh.data_rank, mesh.rank, _fingerprint(batch), read, _fingerprint(begun)))
    firsts: dict[int, Any] = {}
    in_order = sorted(found, key=lambda each: int(each[1]))
    for _, rank, _, their_read, _ in in_order:
        if their_read != in_order[0][3]:
            raise ValueError(
                f"step {step}: rank {rank} called loader with {their_read or 'nothing'}, rank 0 with "
                f"{in_order[0][3] or 'nothing'}, so that some samples would be trained on twice and others never: give "
                "all ranks the same samples, whole, of which each takes its share"
            )
    for share, rank, tensors, _, _ in in_order:
        _, first, expected = firsts.setdefault(share, (share, rank, tensors))
        if tensors != expected:
            raise ValueError(
                f"step {step}: ranks {first} and {rank} work on the same samples, but "
                f"{_difference(first, expected, rank, tensors)}. trainer.loader gives every rank its share; a loader "
                "of your own must give the share of trainer.data_rank, of trainer.data_size, in the same order on all "
                "ranks that have it (one seed)"
            )
    prints = [tensors for _, _, tensors in firsts.values()]
    if mesh.rank == 0 and len(prints) > 1 and all(other == prints[0] for other in prints):
        _log.warning(
            "step %d: all %d data ranks were given the same samples, so that each counts %d times: trainer.loader "
            "gives every rank its own share",
            step,
            len(prints),
            len(prints),
        )
    apart = next((rank for _, rank, _, _, their_begun in in_order if their_begun != in_order[0][4]), None)
    if mesh.rank == 0 and apart is not None:
        _log.warning(
            "step %d: the iterable that loader was given begins with another sample on rank %d than on rank 0, and "
            "each takes its share of what it reads: if it splits itself by rank, most samples are never trained on; "
            "give all of them, or a function of (shard, number of shards). "
            "(Samples that each rank draws anew do no harm.)",
            step,
            apart,
        )


Fingerprint = list[tuple[str, tuple[int, ...], str, int]]


def _fingerprint(batch: Any) -> Fingerprint:
    return [
        (keystr(path), tuple(leaf.shape), str(leaf.dtype), _checksum(leaf))
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor)
    ]


def _checksum(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else 0


def _difference(first: int, one: Fingerprint, rank: int, other: Fingerprint) -> str:
    for (path, shape, dtype, checksum), (path_there, shape_there, dtype_there, there) in zip(one, other, strict=False):
        if (path, shape, dtype) != (path_there, shape_there, dtype_there):
            return (
                f"batch{path} is {dtype} of {shape} on rank {first} and batch{path_there} {dtype_there} of "
                f"{shape_there} on rank {rank}"
            )
        if checksum != there:
            return f"batch{path} holds other numbers on one than on the other"
    return f"the batch has {len(one)} tensors on rank {first} and {len(other)} on rank {rank}"


def mark_of_share(mesh: RankMesh, batch: Any, scale: float) -> torch.Tensor:
    """A float64 scalar on the device, whose sum over all ranks is 0 where ranks that work on the same samples were
    given the same ones, to be scaled alike. Nothing is read from the device."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    degrees = mesh.plan.degrees
    size = degrees.tensor * degrees.context * degrees.pipeline
    if size == 1:
        return total
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel() and not leaf.is_complex():
            total += _bits(leaf).sum(dtype=torch.int64).remainder(_MARKS)
    total += zlib.crc32(repr(scale).encode()) % _MARKS
    at = mesh.coordinates
    place = (at["tensor"] * degrees.context + at["context"]) * degrees.pipeline + at["pipeline"]
    return total.remainder(_MARKS) * (1 - size if place == 0 else 1)


def mark_of_count(mesh: RankMesh, num_microbatches: int) -> torch.Tensor:
    """A float64 scalar on the device, whose sum over all ranks is 0 where all were given as many micro-batches."""
    scattered = num_microbatches * 2_654_435_761 % _MARKS  # so that one more here and one fewer there do not cancel
    size = mesh.plan.degrees.num_devices
    mark = scattered * (1 - size if mesh.rank == 0 else 1)
    return torch.full((), mark, dtype=torch.float64, device=mesh.device)


def mark_of_options(mesh: RankMesh, optimizer: Optimizer) -> torch.Tensor:
    """A float64 scalar on the device, whose sum over all ranks is 0 where those of a stage step alike."""
    degrees = mesh.plan.degrees
    mark = zlib.crc32(repr(_options(optimizer)).encode()) % _MARKS
    mark *= 1 - degrees.num_devices // degrees.pipeline if mesh.is_first_of_stage else 1
    return torch.full((), mark, dtype=torch.float64, device=mesh.device)


def check_marks(mesh: RankMesh, step: int, marks: Sequence[float]) -> None:
    """Raise ValueError, on every rank, if ranks did not agree in a step, or took parts of gradients for all of them.

    marks: sums over all ranks, each 0 where all is well: of shares, of counts of micro-batches, of the optimizer's
    options, and, where a rank has only its part of the gradients, of whether they, and parameters, were left alone.
    """
    shares, counts, options, *written = marks
    if peers_answer(mesh) and shares:
        raise ValueError(
            f"step {step}: ranks that work on the same samples were given different ones, which they were not "
            "in the first step, or another scale=: trainer.loader gives every rank its share; a loader of your "
            "own must go through the samples alike on all ranks that have a share (one seed, nothing skipped "
            "by one rank)"
        )
    if peers_answer(mesh) and counts:
        raise ValueError(
            f"step {step}: data ranks were given different numbers of samples, which would count differently "
            "then: give all of them the same number (trainer.loader does)"
        )
    if peers_answer(mesh) and options:
        raise ValueError(
            f"step {step}: the optimizer's options (lr, weight_decay, ...) are not those of other ranks any "
            "more, which hold copies or shards of the same parameters: change them alike on all ranks; a "
            "scheduler that looks at a loss must be given that of the job (metrics.loss, or evaluate's)"
        )
    way = "" if mesh.plan.model.decides_by_values else ", or plan with --pin tensor=1 --pin pipeline=1"
    if any(written[1:]):
        raise ValueError(
            "parameters were written to between forward_backward() and the next one (as SAM ascends by the "
            "norm of all gradients), where a rank has only its part of the gradients under this plan, so that "
            f"each would go by another norm: change them after optimizer_step(){way}"
        )
    if any(written[:1]):
        raise ValueError(
            "gradients were written to between forward_backward() and optimizer_step(), where a rank has only "
            "its part of them under this plan (clip_grad_norm_ would clip each rank by another norm): give "
            f"parallelize(max_grad_norm=...){way}"
        )


def check_lengths(mesh: RankMesh, lengths: Sequence[int]) -> None:
    """Raise ValueError, on every rank, if ranks were given different lengths of samples, by which each sorts them."""
    if not peers_answer(mesh):
        return
    found = mesh.on_all((len(lengths), zlib.crc32(repr(list(lengths)).encode())))
    other = next((process for process, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        raise ValueError(
            f"lengths= is another one on process {other} ({found[other][0]} numbers) than on process 0 ({found[0][0]}),"
            " so that ranks would put samples into other batches: give all ranks the lengths of the same samples"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def _local(parameter: nn.Parameter) -> torch.Tensor:
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def check_weights(weights: torch.Tensor, first: bool) -> None:
    """Raise ValueError unless a `weight` of micro-batches is one number each, and, where that may be read (first), none
    is negative."""
    if weights.dim() != 1:
        raise ValueError(
            f"weight=... returned a tensor of shape {tuple(weights.shape[1:])}: it must return one number, how much "
            "the micro-batch counts (its valid tokens, say)"
        )
    if first and bool((weights < 0).any()):
        lowest = min(weights.tolist())
        raise ValueError(f"weight=... returned {lowest:g}: how much a micro-batch counts is at least 0")


def check_total_weight(total: float) -> None:
    """Raise ValueError if no micro-batch of a step counts."""
    if not total:
        raise ValueError(
            "weight=... returned 0 for each micro-batch of the step, so that none counts in the mean loss: give "
            "batches of which some part counts, or leave such steps out"
        )


def check_numbers(max_grad_norm: float | None, check_every: int, timeout_s: float, seed: object) -> None:
    """Raise ValueError if arguments of parallelize are none that can be."""
    if check_every < 1:
        raise ValueError(f"check_every is {check_every}; it counts steps, for example check_every=10")
    if max_grad_norm is not None and not (max_grad_norm > 0 and math.isfinite(max_grad_norm)):
        raise ValueError(f"max_grad_norm is {max_grad_norm}; give a norm above 0, or None for no clipping")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}; give the seconds that a step may take, for example timeout_s=300")
    if not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}; give a whole number, the same on all ranks")
