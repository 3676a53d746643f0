"""Train by a plan: parallelize() gives a Trainer, whose steps do what one device would do, only faster."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, default_collate

from ..planner.plan.document import Plan, load_plan
from ..planner.plan.not_run import not_run
from ..profiler.model.load import split_inputs
from .apply import AppliedModel, Loss, apply_plan, build_on_meta
from .faults import check_devices, check_finite, check_own_device, held_memory, out_of_memory_message, raise_spoiled
from .parallel.compiled import backend_of
from .parallel.gradients import Gradients, local_gradient
from .parallel.mesh import RankMesh, check_world_size, connect
from .parallel.micro_batches import loss_of, split_micro_batches
from .parallel.norms import norms_of
from .parallel.pipeline import PipelineRunner
from .parallel.shared_gradients import SharedGradients
from .parallel.stage_module import stages_in
from .state.checkpoint import Checkpoints
from .state.checkpoint_folder import Progress
from .state.initialise import empty_values
from .state.run_state import ModelState, State, Stateful
from .state.weights import Loading, Weights
from .telemetry import Telemetry
from .torch_compat import accelerator, data_parallel
from .watch import HANG_S, LONGER, Watch, watched


@dataclass(frozen=True)
class Metrics:
    """One optimizer step, over all ranks: mean loss, gradient norm before clipping, and speed."""

    loss: float
    grad_norm: float
    tokens_per_s: float
    step_time_s: float


@runtime_checkable
class OfPlan(Protocol):
    """What holds a plan document, as the answer of `meshwright.plan` does."""

    @property
    def document(self) -> Plan:
        """The plan."""


def parallelize(
    model_fn: Callable[[], nn.Module],
    plan: Plan | OfPlan | str | Path,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    loss: Loss | None = None,
    weight: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    weights: Weights | str | Path | None = None,
    telemetry: str | Path | None = None,
    timeout_s: float = HANG_S,
    compile: bool | str | None = None,
) -> "Trainer":
    """A trainer that runs this process as one rank of the plan.

    model_fn: builds the model; called on the meta device and on the CPU.
    plan: a plan, its file, or what meshwright.plan and meshwright.load give.
    optimizer: called with this rank's shards of the parameters. Optimizers that look at single elements (SGD, AdamW,
        ...) do what they would do on one device. Make the same parameter groups on every rank, empty ones included, if
        a scheduler is to be saved and resumed by another plan.
    loss: mean loss of (output, micro-batch); None if the model returns its own.
    weight: how much a micro-batch counts in the mean loss (its valid tokens, say); None: by samples.
    seed: of the initial values, which are those of `torch.manual_seed(seed); model_fn()` on one CPU under every plan.
    max_grad_norm: clip the total gradient norm to this.
    device: default is this rank's GPU, or the CPU without one.
    weights: where the parameters are read from instead of their initial values: safetensors as Hugging Face stores
        them, or a checkpoint of any plan. Each rank reads only its shards.
    telemetry: file to which the first rank appends a line of JSON per step; `plan report PLAN --run FILE` reads it.
    timeout_s: a step that takes longer is taken for a hang, and ends the job with a message that names the rank;
        start-up, save and resume may take three times as long.
    compile: every layer by torch.compile, or by the compiler of this name; None: if the plan's software has it
        (`plan ... --software fsdp2-compile`).

    Runs under torchrun, or without any launcher if the plan is for one device. Raises ValueError, before ranks wait for
    each other, if the job has not as many ranks as the plan, the model is not the one that was planned, or the
    executor does not run all of the plan.
    """
    if isinstance(plan, OfPlan):
        plan = plan.document
    plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    priced_only = not_run(plan)
    if priced_only:
        raise ValueError(
            f"the plan has {', '.join(priced_only)}, which is priced, not run yet: plan again without --space full and "
            "without --pin of these"
        )
    check_world_size(plan)
    backend = backend_of(compile, plan)
    was_running = dist.is_initialized()
    watch = watched(plan, timeout_s)
    with nullcontext() if watch is None else watch.task("in its start-up", "after its start-up"):
        whole = build_on_meta(model_fn, plan)
        loading, values = None, None
        if weights is not None:
            weights = weights if isinstance(weights, Weights) else Weights(weights)
            loading = Loading(weights, whole, plan.model.ties)
            values = empty_values(model_fn, whole, loading.parameters, seed)
        check_devices(plan, torch.device(device) if device is not None else accelerator())
        mesh = connect(plan, device)
        if watch is not None:
            watch.see_exceptions()
        check_own_device(mesh)
        model = apply_plan(whole, model_fn, plan, mesh, loss, seed, values, backend)
        if loading is not None:
            loading.fill(ModelState(model, plan, mesh).model_boxes())
        trainer = Trainer(model, plan, mesh, optimizer, loss, weight, max_grad_norm, owns_process_group=not was_running)
        trainer._watch = watch
        if telemetry is not None:
            trainer._telemetry = Telemetry(Path(telemetry), plan, mesh)
    return trainer


class Trainer:
    """Steps of one rank. data_rank, data_size: which share of every global batch it takes.

    model: this rank's part of the model, with sharded parameters.
    """

    def __init__(
        self,
        model: AppliedModel,
        plan: Plan,
        mesh: RankMesh,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        loss: Loss | None,
        weight: Callable[[Any], torch.Tensor] | None,
        max_grad_norm: float | None,
        owns_process_group: bool,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.model = model.module
        self.data_rank = mesh.data_rank
        self.data_size = mesh.data_size
        self.optimizer = optimizer(list(model.parameters.values()))
        self._applied = model
        self._loss = loss
        self._weight = weight
        self._max_grad_norm = max_grad_norm
        self._owns_process_group = owns_process_group and dist.is_initialized()
        self._gradients = Gradients(model, plan, mesh)
        self._runner: PipelineRunner | None = None
        if plan.degrees.pipeline > 1:
            assert mesh.device_mesh is not None
            self._runner = PipelineRunner(stages_in(model.module), plan, mesh.device_mesh, mesh.device)
        self._replicas: DistributedDataParallel | None = None
        self._reduces: bool | None = None  # what units of fully_shard were told last
        self._first_step: AbstractContextManager[Any] | None = None
        self._state = State(model, plan, mesh, self.optimizer)
        self._checkpoints: Checkpoints | None = None
        self.progress = Progress()
        self._read = Progress()  # how far `loader` is ahead
        self._watch: Watch | None = None
        self._telemetry: Telemetry | None = None
        self._norms: torch.Tensor | None = None  # of each parameter, after the last step
        self._skip = 0  # samples that the next `loader` leaves out
        if plan.degrees.tensor > 1:
            self._first_step = SharedGradients(model.model, model.layout)
        else:
            self._compile()

    @property
    def samples_per_step(self) -> int:
        """Samples that this rank's `step` takes."""
        return self.plan.micro_batch * self.plan.num_microbatches

    def step(self, batch: Any) -> Metrics:
        """One optimizer step on this rank's share of the global batch: samples_per_step samples.

        Ranks that differ only in their tensor, context or pipeline coordinate must give the same share (`loader` does).
        Afterwards the gradients, clipped, stay until the next step. Raises NonFiniteError, on every rank, when the loss
        or a gradient is no number any more, or a parameter has not been since the step before.
        """
        step = self.progress.steps + 1
        with self._task(f"in step {step}", f"after step {step}", times=1.0):
            if self._telemetry is not None:
                self._telemetry.begin()
            try:
                metrics = self._step(batch, step)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(self._out_of_memory()) from error
            if self._telemetry is not None:
                self._telemetry.end(step, metrics.loss, metrics.grad_norm, metrics.step_time_s)
        return metrics

    def _step(self, batch: Any, step: int) -> Metrics:
        started = time.perf_counter()
        # DDP's gradients are views of its buckets: without them a micro-batch that is not reduced would make others.
        self.optimizer.zero_grad(set_to_none=self._replicas is None)
        batch = tree_map(self._to_device, batch)
        scales = self._scales(batch)
        with self._first_step or nullcontext():
            losses = self._forward_backward(batch, scales)
        if self._first_step is not None:
            self._first_step = None
            self._compile()
        self._gradients.reduce()
        totals = self._totals(losses, scales)
        norm = totals[1].sqrt()
        if self._max_grad_norm is not None:
            # What is not finite stays as it is, so that it can be found.
            self._gradients.clip(self._max_grad_norm, norm.nan_to_num(0.0, posinf=0.0))
        self.optimizer.step()
        before, self._norms = self._norms, norms_of(self._local_parameters(), self.mesh.device)
        found_loss, squared_norm, spoiled = totals.tolist()
        found_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        if not math.isfinite(spoiled) and before is not None:
            raise_spoiled(self.mesh, step - 1, list(self._applied.parameters), before)
        if not (math.isfinite(found_loss) and math.isfinite(found_norm)):
            parameters = self._applied.parameters
            grads = {n: g for n, p in parameters.items() if (g := local_gradient(p)) is not None}
            check_finite(self.mesh, step, losses, grads)
        self.progress = self._read.model_copy(update={"steps": step})
        seconds = time.perf_counter() - started
        tokens = self.plan.training.global_batch * (self.plan.training.seq_len or 1)
        return Metrics(found_loss, found_norm, tokens / seconds, seconds)

    def loader(self, samples: Iterable[Any] | Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """This rank's share of every global batch of `samples`, collated; the last, incomplete batch is left out.

        samples: in the order that one device would read them (so shuffle with a fixed seed), or a function that gives
        them. Batch k of the job is samples k * global_batch .. (k + 1) * global_batch under every plan. One call is
        one epoch; after `resume` the first goes on where the checkpoint was saved.
        """
        share, total = self.samples_per_step, self.plan.training.global_batch
        first = self.data_rank * share
        taken, self._skip = self._skip, 0
        own: list[Any] = []
        for index, sample in enumerate(_from(samples() if callable(samples) else samples, taken)):
            place = index % total
            if first <= place < first + share:
                own.append(sample)
            if place == total - 1:
                self._read = self._read.model_copy(update={"samples": taken + index + 1})
                yield default_collate(own)
                own = []
        self._read = self._read.model_copy(update={"epoch": self._read.epoch + 1, "samples": 0})

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = None, **stateful: Stateful) -> None:
        """Write a checkpoint into a run's folder, which all ranks must see: parameters, optimizer, random states,
        number of steps and place in the data. All ranks must call it. Raises NonFiniteError if a parameter is not
        finite.

        It appears as `step-<number>` once it is complete, so that a process that dies at any moment leaves the last
        complete one. wait: False returns when the numbers are copied, and writes beside the following steps; an error
        is raised by the next save or by close. keep: how many checkpoints to keep; None: all. stateful: what else
        (scheduler=...) to save, as the first rank has it.
        """
        behind = f"after step {self.progress.steps}"
        with self._task(f"in save {behind}", behind):
            self._check_parameters()
            self._writer().save(Path(folder), self.progress, stateful, wait, keep)

    def resume(self, folder: str | Path, *, missing_ok: bool = False, **stateful: Stateful) -> int:
        """Take over the last complete checkpoint of a run's folder; returns the number of steps it has behind it.

        The checkpoint may come from another plan, on another number of ranks. All ranks must call it. missing_ok: where
        there is no checkpoint yet return 0 (else raise ValueError). stateful: what was given to `save`.
        """
        with self._task("in resume", "after resume"):
            writer = self._writer()
            found = writer.latest(Path(folder))
            if found is None:
                if missing_ok:
                    return 0
                raise ValueError(f"no checkpoint in {folder}: train with trainer.save({str(folder)!r}) first")
            self.progress = self._read = writer.load(found, stateful)
        self._skip = self.progress.samples
        self._norms = None
        return self.progress.steps

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers of the whole model, on the CPU of rank 0; {} on the others. All must call it.

        Names are those of model_fn()'s own state_dict().
        """
        return self._gathered({n: p.detach() for n, p in self._applied.parameters.items()}, buffers=True)

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of the last step, as the optimizer saw them, like full_state_dict. All ranks must call it."""
        grads = {n: p.grad for n, p in self._applied.parameters.items()}
        return self._gathered({n: g for n, g in grads.items() if g is not None}, buffers=False)

    def close(self) -> None:
        """End what is still being written, and torch.distributed if parallelize began it."""
        if self._checkpoints is not None:
            with self._task("in close", "after close"):
                self._checkpoints.wait()
        if self._telemetry is not None:
            self._telemetry.close()
        if self._watch is not None:
            self._watch.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def _task(self, inside: str, behind: str, times: float = LONGER) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.task(inside, behind, times)

    def _compile(self) -> None:
        """From now on layers that are to be compiled are. (The first step of tensor parallelism watches functions.)"""
        for forward in self._applied.compiled:
            forward.on = True

    def _out_of_memory(self) -> str:
        parameters = self._applied.parameters
        elements = sum(p.numel() for p in parameters.values())
        held = held_memory(list(parameters.values()), self.optimizer, self.mesh.device)
        return out_of_memory_message(self.plan, self.mesh.rank, elements, held)

    def _writer(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._state, self.plan, self.mesh, self._watch)
        return self._checkpoints

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self.mesh.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def _scales(self, batch: Any) -> list[float]:
        """Factor of each micro-batch's loss, such that the mean over data ranks of their sums is the job's loss."""
        count = self.plan.num_microbatches
        if self._weight is None:
            return [1 / count] * count
        parts = split_micro_batches(batch, count, self.samples_per_step)
        weights = torch.stack([torch.as_tensor(self._weight(part)).double() for part in parts]).to(self.mesh.device)
        total = weights.sum()
        if self.mesh.device_mesh is not None:
            dist.all_reduce(total)
        degrees = self.plan.degrees
        total /= degrees.tensor * degrees.pipeline * degrees.context  # each share was counted by every rank that has it
        return (weights * degrees.data / total).tolist()

    def _forward_backward(self, batch: Any, scales: list[float]) -> list[torch.Tensor]:
        """Losses of the micro-batches (on the last stage); gradients are left on the parameters, averaged."""
        if self._runner is not None:
            args, kwargs = split_inputs(stages_in(self.model)[0].model, batch, self._loss is not None)
            return self._runner.step(args, kwargs, batch, scales)
        losses = []
        whole = (*split_inputs(self.model, batch, self._loss is not None), batch)
        parts = split_micro_batches(whole, self.plan.num_microbatches, self.samples_per_step)
        if self._applied.mechanism == "ddp" and self._replicas is None:
            self._replicate(*parts[0])
        for i, (part, scale) in enumerate(zip(parts, scales, strict=True)):
            with self._synchronised(is_last=i == len(parts) - 1):
                with self._autocast():
                    loss = self._loss_of(*part)
                self._applied.begin_backward()
                (loss * scale).backward()
            losses.append(loss.detach())
        return losses

    def _loss_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> torch.Tensor:
        context = self._applied.context
        with context.whole_forward() if context is not None else nullcontext():
            output = (self._replicas or self.model)(*args, **kwargs)
            return loss_of(output) if self._loss is None else self._loss(output, batch)

    def _replicate(self, *part: Any) -> None:
        """Wrap the model in DDP. One forward shows what reads no parameter, so that DDP does not wait for it; what it
        wrote into buffers is undone, and into the batch not done."""
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        before = [buffer.clone() for buffer in self.model.buffers()]
        with torch.random.fork_rng(devices), self._autocast():
            read = _parameters_behind(self._loss_of(*tree_map(_cloned, part)))
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)
        unread = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in read]
        self._replicas = data_parallel(self.model, self.mesh.group("data_replicate"), unread)
        if self._telemetry is not None:
            self._telemetry.replicated(self._replicas)

    def _autocast(self) -> AbstractContextManager[Any]:
        """bf16 where fully_shard, which has its own mixed precision, is not used."""
        if self.plan.training.precision == "bf16" and self._applied.mechanism != "fsdp":
            return torch.autocast(self.mesh.device.type, torch.bfloat16)
        return nullcontext()

    def _synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients in this micro-batch's backward if the plan says so.

        Kept parameters stay gathered until the last micro-batch where gradients are reduced only then.
        """
        now = is_last or self.plan.gradient_sync == "every"
        if now != self._reduces:
            for unit, reshard in self._applied.units:
                unit.set_requires_gradient_sync(now, recurse=False)
                unit.set_is_last_backward(now)
                unit.set_reshard_after_backward(now or reshard, recurse=False)
            self._reduces = now
        return self._replicas.no_sync() if self._replicas is not None and not now else nullcontext()

    def _totals(self, losses: list[torch.Tensor], scales: list[float]) -> torch.Tensor:
        """[loss, squared gradient norm, what is finite unless the last step left parameters that are not] of the whole
        job, with one small all-reduce."""
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.coordinates["tensor"] == 0:  # on earlier stages there are no losses
            for found, scale in zip(losses, scales, strict=False):
                loss += found.double() * scale / (self.data_size * self.plan.degrees.context)
        totals = torch.stack([loss, self._gradients.squared_norm(), self._spoiled()])
        if self.mesh.device_mesh is not None:
            dist.all_reduce(totals)
        return totals

    def _spoiled(self) -> torch.Tensor:
        """0, or NaN if a parameter of this rank is not finite."""
        if self._norms is None:
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return (self._norms * 0.0).sum()

    @torch.no_grad()  # DTensors then give their local tensors without a node for autograd
    def _local_parameters(self) -> list[torch.Tensor]:
        return [p.to_local() if isinstance(p, DTensor) else p for p in self._applied.parameters.values()]

    def _check_parameters(self) -> None:
        """Raise NonFiniteError on every rank if parameters are not finite; what was just trained was not looked at."""
        spoiled = self._spoiled()
        if self.mesh.device_mesh is not None:
            dist.all_reduce(spoiled)
        if not math.isfinite(spoiled.item()) and self._norms is not None:
            raise_spoiled(self.mesh, self.progress.steps, list(self._applied.parameters), self._norms)

    def _gathered(self, tensors: dict[str, torch.Tensor], buffers: bool) -> dict[str, torch.Tensor]:
        keep = all(at == 0 for axis, at in self.mesh.coordinates.items() if axis != "pipeline")
        state: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            whole = self._whole(name, tensor)
            if keep:
                state[name] = whole.cpu()
        if keep and buffers:
            present = self.model.state_dict().keys()
            for name, buffer in self.model.named_buffers():
                if name in present:
                    state[name.removeprefix(self._applied.prefix)] = buffer.cpu()
        group = self.mesh.group("pipeline")
        if group is not None and keep:
            first = self.mesh.coordinates["pipeline"] == 0
            stages: list[Any] | None = [None] * self.plan.degrees.pipeline if first else None
            dist.gather_object(state, stages, group=group, dst=self.mesh.processes[0])
            state = {name: t for part in stages or [] for name, t in part.items()}
        if self.mesh.rank != 0:
            return {}
        for names in self.plan.model.ties:
            known = next((state[n] for n in names if n in state), None)
            if known is not None:
                state.update(dict.fromkeys(names, known))
        return state

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter or gradient of which ranks hold shards."""
        if name in self._applied.experts:
            assert isinstance(tensor, DTensor)
            return self._applied.experts[name].whole(tensor.full_tensor(), self.mesh.expert_mesh.get_group("expert"))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        cut = self._applied.cut(name)
        if cut is None:
            return tensor
        shards = [torch.empty_like(tensor) for _ in range(cut.degree)]
        dist.all_gather(shards, tensor.contiguous(), group=self.mesh.group("tensor"))
        return cut.full(shards)


def _from(samples: Iterable[Any], start: int) -> Iterator[Any]:
    """The samples without the first ones, which are not even read where samples have indices."""
    indexed: Any = samples
    if hasattr(indexed, "__getitem__") and hasattr(indexed, "__len__") and not isinstance(indexed, IterableDataset):
        return (indexed[i] for i in range(start, len(indexed)))
    return itertools.islice(samples, start, None)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _parameters_behind(loss: torch.Tensor) -> set[int]:
    """Ids of the parameters that a loss was computed from."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found
