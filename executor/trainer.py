"""Train by a plan: a Trainer, whose steps do what one device would do, only faster."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from ..planner.plan.document import Plan
from ..profiler.running.held_tensors import gradient_hooks
from .agreement import (
    check_lengths,
    check_marks,
    check_optimizers,
    check_parameters,
    check_shares,
    check_total_weight,
    check_weights,
    mark_of_count,
    mark_of_options,
    mark_of_share,
)
from .apply import AppliedModel
from .bookmarks import Bookmark, Bookmarks
from .evaluation import Means, Metric
from .export_weights import export_model
from .faults import (
    NonFiniteError,
    check_finite,
    held_memory,
    out_of_host_memory_message,
    out_of_memory_message,
    raise_spoiled,
    ran_out_of_memory,
    tell_step_hooks,
)
from .parallel.checked_loss import CheckedLoss
from .parallel.flat_gradients import local_gradient, local_gradients
from .parallel.gradients import Gradients, forget_gradients
from .parallel.mesh import RankMesh
from .parallel.micro_batches import Loss, Scale, share_of_batch
from .parallel.norms import norms_of
from .parallel.optimizers import MakeOptimizer, check_added, sizes_of_groups
from .parallel.random_numbers import RandomNumbers
from .parallel.shared_gradients import SharedGradients
from .parallel.stage_module import stages_in
from .parallel.whole_matrices import WholeMatrices, prepare_optimizer, whole_tensor
from .passes import RankPasses
from .sample_loader import Padded, Padding, Samples, shares
from .state.checkpoint import Checkpoints
from .state.checkpoint_folder import Progress
from .state.extra_state import Stateful
from .state.run_state import State
from .state.weight_files import WeightFormat
from .telemetry import ComputedSeconds, Telemetry
from .torch_compat import before_steps, forget_groups
from .watch import Watch


@dataclass(frozen=True)
class Metrics:
    """One optimizer step, over all ranks: mean loss, gradient norm before clipping, and speed.

    totals: [loss, squared gradient norm, ...] on the device, which are read, and waited for, when they are asked for.
    Speed is that of the host where nothing was waited for (`check_every`): right over several steps.
    """

    totals: torch.Tensor
    tokens_per_s: float
    step_time_s: float

    def __repr__(self) -> str:
        numbers = {name: getattr(self, name) for name in ("loss", "grad_norm", "tokens_per_s", "step_time_s")}
        return f"Metrics({', '.join(f'{name}={number:.6g}' for name, number in numbers.items())})"

    @cached_property
    def found(self) -> tuple[float, ...]:
        """The totals, as numbers."""
        return tuple(self.totals.tolist())

    @property
    def loss(self) -> float:
        """Mean loss of all ranks."""
        return self.found[0]

    @property
    def grad_norm(self) -> float:
        """Of the whole gradient, before clipping."""
        return math.sqrt(self.found[1]) if self.found[1] >= 0 else math.nan


def computed_seconds(trainer: "Trainer") -> ComputedSeconds:
    """Let a trainer without telemetry tell what this rank computes in each step. To be asked for before the first."""
    trainer._telemetry = found = ComputedSeconds(trainer.mesh)
    return found


class Trainer:
    """Steps of one rank. data_rank, data_size: which share of every global batch it takes.

    model: this rank's part of the model, with sharded parameters.
    """

    def __init__(
        self,
        model: AppliedModel,
        plan: Plan,
        mesh: RankMesh,
        optimizer: MakeOptimizer,
        loss: Loss | None,
        weight: Callable[[Any], torch.Tensor] | None,
        max_grad_norm: float | None,
        owns_process_group: bool,
        random_numbers: RandomNumbers,
        whole_matrices: bool | None,
        watch: Watch | None,
        check_every: int,
        telemetry: Path | None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.model = model.module
        self.data_rank = mesh.data_rank
        self.data_size = mesh.data_size
        self.optimizer, self._stepped = prepare_optimizer(optimizer, model, plan, mesh, whole_matrices)
        shard = mesh.shard_mesh.get_local_rank() if model.mechanism == "fsdp" else 0
        self._shard = mesh.rank if isinstance(self._stepped, WholeMatrices) else shard  # each steps what it owns
        check_optimizers(mesh, self.optimizer)
        tell_step_hooks(self.optimizer, plan, mesh.rank, owned=isinstance(self._stepped, WholeMatrices))
        before_steps(self.optimizer, self._only_in_steps)
        self._steps_now = False
        self._applied = model
        self._loss = loss
        self._weight = weight
        self._max_grad_norm = max_grad_norm
        self._owns_process_group = owns_process_group and dist.is_initialized()
        self._seed = random_numbers.seed
        self._random = random_numbers
        self._random.watch(model.model, stages_in(model.module))
        self._gradients = Gradients(model, plan, mesh)
        self._passes = RankPasses(model, plan, mesh, loss, random_numbers, self._gradients, self._see_replicas)
        self._first_step: AbstractContextManager[Any] | None = None
        self._state = State(model, plan, mesh, self.optimizer, self._stepped)
        self._checkpoints: Checkpoints | None = None
        self.progress = Progress()
        self._bookmarks = Bookmarks()  # how far each `loader` is ahead
        self._watch = watch
        self._norms: torch.Tensor | None = None  # of each parameter, after the last step
        self._check_every = check_every
        self._unchecked: list[tuple[int, Metrics]] = []  # steps whose numbers nobody has looked at
        self._given: list[tuple[list[torch.Tensor], list[Scale]]] = []  # (losses, scales) since the last optimizer step
        self._started = 0.0
        self._dealt = ""  # how `loader` was called last, in words
        self._begun: Any = None  # the first sample of the iterable that it was given
        self._looks = True  # whether ranks agree, before the next step
        self._left: torch.Tensor | None = None  # what tells gradients and parameters after forward_backward
        self._moved: torch.Tensor | None = None  # how far parameters were from that before the next one
        self._marks: list[torch.Tensor] = []  # of the shares since the last optimizer step
        self._stepped_groups = sizes_of_groups(self.optimizer)
        self._trained = {name: p.requires_grad for name, p in model.parameters.items()}
        self._dtypes = {name: p.dtype for name, p in model.parameters.items()}
        self._hooks = {name: len(gradient_hooks(p)) for name, p in model.parameters.items()}
        if plan.degrees.tensor > 1:
            self._first_step = SharedGradients(model.model, model.layout)
        else:
            self._compile()
        self._telemetry: Telemetry | ComputedSeconds | None = None
        if telemetry is not None:
            self._telemetry = Telemetry(telemetry, plan, mesh)

    @property
    def samples_per_step(self) -> int:
        """Samples that this rank's `step` takes."""
        return self.plan.micro_batch * self.plan.num_microbatches

    def step(self, batch: Any) -> Metrics:
        """One optimizer step on this rank's share of the global batch: samples_per_step samples, or fewer by whole
        micro-batches, where the plan's schedule can run so many, as many on all data ranks.

        Ranks that differ only in their tensor, context or pipeline coordinate must give the same share (`loader` does).
        Afterwards the gradients, clipped, stay until the next step. Raises NonFiniteError, on every rank, when the loss
        or a gradient is no number any more, or a parameter has not been since the step before.
        """
        if self._given:
            raise ValueError("step() after forward_backward(): call optimizer_step() first, which ends that step")
        with self._in_step("after"):
            self._accumulate(batch, 1.0, None, ends_step=True)
            return self._finish_step()

    def forward_backward(self, batch: Any, scale: float = 1.0, loss: Loss | None = None) -> torch.Tensor:
        """Add the gradients of scale * loss on this rank's share of a batch to those since the last optimizer step;
        returns the mean loss over all ranks, unscaled, on the device, so that nothing waits for it before it is read.

        As often as the loop wants (several batches, several losses of one batch), then optimizer_step(): the gradient
        is the sum, as where loss.backward() is called several times. loss: instead of parallelize's. All ranks must
        call it alike.
        """
        with self._in_step("within"):
            if loss is not None and self._loss is None:
                raise ValueError("forward_backward(loss=...) of a model that returns its own loss: give none")
            if self._left is not None:
                moved = (self._left - self._own_norms())[1].abs()
                self._moved = moved if self._moved is None else self._moved + moved
            losses, scales = self._accumulate(batch, scale, None if loss is None else CheckedLoss(loss))
            self._left = self._own_norms() if self._has_parts_of_gradients else None
            found = self._loss_share(losses, scales)
            if self.mesh.device_mesh is not None:
                dist.all_reduce(found)
            return found / scale if scale else torch.zeros_like(found)

    def optimizer_step(self) -> Metrics:
        """The optimizer's step on what forward_backward() has added up: clips as `step` does, and returns the same; its
        loss is the sum of the scaled ones. Raises ValueError if there was no forward_backward() since the last one."""
        if not self._given:
            raise ValueError("optimizer_step() without gradients: call forward_backward(batch) first, or step(batch)")
        with self._in_step("after"):
            return self._finish_step()

    @property
    def _has_parts_of_gradients(self) -> bool:
        """Whether what a rank has after forward_backward are neither the gradients of the whole job nor shards of them
        that know it."""
        return self.plan.degrees.tensor * self.plan.degrees.pipeline > 1 or self._gradients.averaged_after

    def _own_norms(self) -> torch.Tensor:
        """[of gradients, of parameters]: numbers that tell whether this rank's were written to."""
        gradients = local_gradients(self._applied.parameters.values())
        return torch.stack([norms_of(own, self.mesh.device).sum() for own in (gradients, self._local_parameters())])

    def _accumulate(
        self, batch: Any, scale: float, loss: Loss | None, ends_step: bool = False
    ) -> tuple[list[torch.Tensor], list[Scale]]:
        """(losses of the micro-batches on the last stage, their factors). ends_step: no more gradients come before the
        optimizer's step."""
        if not torch.is_grad_enabled():
            raise ValueError("a step under torch.no_grad() or inference_mode(): take it outside, or call evaluate()")
        self._look(batch)
        if not self._given:
            if self._telemetry is not None:
                self._telemetry.begin()
            self._started = time.perf_counter()
            # DDP's gradients are views of its buckets: without them one that is not reduced would make others.
            self.optimizer.zero_grad(set_to_none=self._passes.replicas is None)
            self._see_groups()
            if self._stepped is not None:
                forget_gradients(self._applied.parameters.values(), set_to_none=self._passes.replicas is None)
        batch = tree_map(self._to_device, batch)
        scales = [own * scale for own in self._scales(batch)]
        share, count = mark_of_share(self.mesh, batch, scale), mark_of_count(self.mesh, len(scales))
        self._marks.append(torch.stack([share, count]))
        drawn = self._random.step(self.progress.steps + 1, len(self._given), len(scales))
        with self._first_step or nullcontext(), drawn, self._applied.computing():
            losses = self._passes.backward(batch, scales, loss, ends_step)
        if self._first_step is not None:
            self._first_step = None
            self._compile()
        self._given.append((losses, scales))
        return losses, scales

    def _look(self, batch: Any) -> None:
        """Raise ValueError, on every rank, if ranks do not agree, or what is trained has changed in a way that the plan
        does not allow."""
        if not self._given:
            self._see_frozen()
        if not self._looks:
            return
        check_parameters(self.mesh, self._applied, self._dtypes, self._hooks)
        check_shares(self.mesh, batch, self.progress.steps + 1, self._dealt, self._begun)
        self._begun = None
        self._looks = False

    def _see_frozen(self) -> None:
        """Follow parameters that were frozen, or are trained again, since the last step."""
        now = {name: p.requires_grad for name, p in self._applied.parameters.items()}
        if now == self._trained:
            return
        degrees = self.plan.degrees
        thawed = next((name for name, is_trained in now.items() if is_trained and not self._trained[name]), None)
        if thawed is not None and degrees.tensor * degrees.pipeline > 1:
            raise ValueError(
                f"{thawed} was frozen and is to be trained now, but tensor parallelism and pipelines are set up for "
                "what is trained: save(), let the function that builds the model set requires_grad, and resume()"
            )
        self._trained = now
        self._passes.forget_replicas()

    def _see_groups(self) -> None:
        """Follow parameter groups that the optimizer has got since the last step."""
        now = sizes_of_groups(self.optimizer)
        if now != self._stepped_groups:
            trained = self._applied.parameters
            check_added(self.optimizer, trained if self._stepped is None else self._stepped.parameters, trained)
            self._stepped_groups = now

    def _see_replicas(self, replicas: DistributedDataParallel) -> None:
        if self._telemetry is not None:
            self._telemetry.replicated(replicas)

    def _only_in_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._steps_now:
            raise ValueError(
                "trainer.optimizer.step() was called by hand, on gradients that are not those of the whole job: call "
                "trainer.step(batch), or forward_backward(batch) and optimizer_step()"
            )

    def _finish_step(self) -> Metrics:
        step = self.progress.steps + 1
        given, self._given = self._given, []
        left, self._left = self._left, None
        moved, self._moved = self._moved, None
        # Now parameters may be written to (SAM puts them back); before, it was by gradients of which a rank has parts.
        touched = [] if left is None else [(left - self._own_norms())[0].abs()]
        touched += [] if moved is None else [moved]
        self._gradients.reduce()
        totals = self._totals(given, touched)
        norm = totals[1].sqrt()
        if self._max_grad_norm is not None:
            # What is not finite stays as it is, so that it can be found.
            self._gradients.clip(self._max_grad_norm, norm.nan_to_num(0.0, posinf=0.0))
        if self._stepped is not None:
            self._stepped.gather()
        self._steps_now = True
        try:
            with self._random.update(step, self._shard, self._gradients.tied):
                self.optimizer.step()
        finally:
            self._steps_now = False
        if self._stepped is not None:
            self._stepped.scatter()
        before, self._norms = self._norms, norms_of(self._local_parameters(), self.mesh.device)
        seconds = time.perf_counter() - self._started
        samples = sum(len(scales) for _, scales in given) * self.plan.micro_batch * self.data_size
        tokens = samples * (self.plan.training.seq_len or 1)
        metrics = Metrics(totals, tokens / seconds, seconds)
        self._unchecked.append((step, metrics))
        is_checked = step % self._check_every == 0
        if is_checked:
            self._check([loss for losses, _ in given for loss in losses], before)
            seconds = time.perf_counter() - self._started  # now the device has finished, too
            metrics = Metrics(totals, tokens / seconds, seconds)
        self.progress = self._bookmarks.progress(step)
        if self._telemetry is not None:
            self._telemetry.end(step, metrics)
            if is_checked:
                self._telemetry.flush()
        return metrics

    def _check(self, losses: list[torch.Tensor], norms: torch.Tensor | None) -> None:
        """Raise NonFiniteError on every rank for the first of the last steps that has numbers which are none.

        losses: of the last one's micro-batches. norms: of the parameters before it.
        """
        steps, self._unchecked = self._unchecked, []
        last = steps[-1][0]
        for step, metrics in steps:
            check_marks(self.mesh, step, metrics.found[3:])
            spoiled = not math.isfinite(metrics.found[2])
            if not spoiled and math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm):
                continue
            if step < last:
                what = "the parameters before it are" if spoiled else "its loss or its gradients are"
                raise NonFiniteError(
                    f"step {step}: {what} not finite, seen after step {last} (check_every={self._check_every}). Go on "
                    "from the last checkpoint with a smaller learning rate or max_grad_norm, or with check_every=1, "
                    "which names the ranks and tensors"
                )
            if spoiled and norms is not None:
                raise_spoiled(self.mesh, step - 1, list(self._applied.parameters), norms)
            parameters = self._applied.parameters
            grads = {n: g for n, p in parameters.items() if (g := local_gradient(p)) is not None}
            check_finite(self.mesh, step, losses, grads)

    def evaluate(self, batches: Iterable[Any], metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Mean loss over the batches of all data ranks, as "loss", in evaluation mode and without gradients.

        batches: this rank's shares, samples_per_step samples each (or fewer, as `step` takes them), as
        `loader(..., training=False)` gives them; as many on every rank. metrics: name -> function of (output,
        micro-batch) whose mean is wanted, too; it is called where the output is, with all of it. The mean is over
        samples, or by what `weight` says. All ranks must call it.
        """
        chosen = metrics or {}
        means = Means(self.mesh, ["loss", *chosen])
        with self._between_steps("evaluate", meets=True):
            for batch in batches:
                batch = tree_map(self._to_device, batch)
                parts = self._passes.parts(batch)

                def look(output: Any, part: Any) -> dict[str, Any]:
                    return {name: metric(output, part) for name, metric in chosen.items()}

                found = self._passes.forward(parts, True, look if chosen else None)
                seen = found.outputs or [{}] * len(found.losses)
                for (*_, part), loss, values in zip(parts, found.losses, seen, strict=False):
                    weight = self.plan.micro_batch if self._weight is None else self._weight(part)
                    means.add({"loss": loss, **values}, torch.as_tensor(weight, device=self.mesh.device).double())
            return means.over_ranks(counts=self._passes.ends_here and self.mesh.coordinates["tensor"] == 0)

    def forward(self, batch: Any) -> Any:
        """The model's output for this rank's share of a batch, samples_per_step samples, in evaluation mode and without
        gradients: whole on all ranks that have the share. All ranks must call it.

        What the model returns for each micro-batch is joined along the first dim where that counts samples; other
        leaves are those of the first micro-batch.
        """
        with self._between_steps("forward", meets=self._divides):
            return self._passes.output(self._passes.parts(tree_map(self._to_device, batch)))

    def loader(
        self,
        samples: Samples,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = False,
        workers: int = 0,
        training: bool = True,
        pad: Padding | None = None,
        lengths: Sequence[int] | None = None,
        global_batch: Callable[[int], int] | None = None,
    ) -> Iterator[Any]:
        """This rank's share of every global batch of `samples`, collated; the last, incomplete batch is left out.

        samples: in the order that one device would read them: anything with __getitem__ and __len__, of which a rank
        reads no samples but its own; an iterable, or a function that gives one, of which it has to read all; or a
        function of (shard, number of shards), which gives the samples of one data rank. Batch k of the job is samples
        k * global_batch .. (k + 1) * global_batch under every plan (of shards, the k-th parts of each). One call is
        one epoch, also if the loop leaves it early; after `resume` the first goes on where the checkpoint was saved.
        Loaders that are read in turns go on each at its own place, if they begin in the same order (or have other
        numbers of samples).

        collate: makes a batch of a list of samples (pads it, say); None: as torch does. shuffle: by the trainer's seed
        and the epoch, alike on all ranks. workers: processes that read ahead. training: False for data to evaluate on,
        which does not count as progress. pad: fill up sequences to the plan's length, each with its value, as in
        pad={"input_ids": 0, "labels": -100}, or {0: 0, 1: -100} of tuples; let `weight` count what is none of it.
        lengths: of every sample, so that those of similar length come in one batch, shuffled or not; `pad` then fills
        up to the longest of the batch (one of 64 lengths), or to the plan's where ranks hold parts of a sequence.
        global_batch: samples of the batch of a step, by the number of steps before it, for batches that grow:
        lambda steps: 64 if steps < 1000 else 256; no more than the plan's, and whole micro-batches on each data rank.
        Raises ValueError if samples without numbers are to be shuffled, or one is longer than the plan's.
        """
        plan, steps = self.plan, self.progress.steps
        length = plan.training.seq_len
        if pad is not None and length is None:
            raise ValueError("pad=... needs a length of sequences, but the plan's model has none: pad in collate=...")
        if lengths is not None:
            lengths = [int(n) for n in lengths]
            check_lengths(self.mesh, lengths)
        splits = plan.sequence_parallel or plan.degrees.context > 1

        def share_of(number: int) -> int:
            if global_batch is None:
                return self.samples_per_step
            return share_of_batch(plan, global_batch(steps + number), f"global_batch=... of {steps + number} steps")

        mark = Bookmark()
        if training:
            count = f"{len(samples)} samples" if isinstance(samples, Sized) else "samples without a length"
            self._dealt, self._begun = f"{count}, shuffle={bool(shuffle)}", None
            mark = self._bookmarks.begin(self._dealt)
        taken = mark.samples

        def begins(sample: Any) -> None:
            self._begun = sample if training and self._looks else self._begun

        found = shares(
            samples,
            share=self.samples_per_step,
            rank=self.data_rank,
            num_ranks=self.data_size,
            taken=taken,
            epoch=mark.epoch,
            collate=collate,
            shuffle=self._seed if shuffle else None,
            workers=workers,
            pinned=self.mesh.device.type == "cuda",
            pad=None if pad is None or length is None else Padded(length, pad, always=splits),
            lengths=lengths,
            share_of=share_of,
            begins=begins,
        )
        try:
            for number, batch in enumerate(found):
                taken += share_of(number) * self.data_size
                mark.took(taken)
                yield batch
            mark.end()
        except BaseException:
            mark.leave()
            raise

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = None, **stateful: Stateful) -> None:
        """Write a checkpoint into a run's folder, which all ranks must see: parameters, optimizer, random states,
        number of steps and place in the data. All ranks must call it. Raises NonFiniteError if a parameter is not
        finite.

        It appears as `step-<number>` once it is complete, so that a process that dies at any moment leaves the last
        complete one. wait: False returns when the numbers are copied, and writes beside the following steps; an error
        is raised by the next save or by close. keep: how many checkpoints to keep; None: all. stateful: what else
        (scheduler=..., ema=...) to save: tensors that are named and shaped like parameters of `model` by rank, so that
        any plan can take them over, and the rest once; of a StatefulDataLoader of torchdata the state of each data
        rank, for plans with as many (where `loader` stands is saved in any case). Raises ValueError if the rest is not
        alike on all ranks.
        """
        with self._between_steps("save", meets=True):
            self._check_parameters()
            self._writer().save(Path(folder), self.progress, stateful, wait, keep)

    def resume(self, folder: str | Path, *, missing_ok: bool = False, **stateful: Stateful) -> int:
        """Take over the last complete checkpoint of a run's folder; returns the number of steps it has behind it.

        The checkpoint may come from another plan, on another number of ranks. All ranks must call it. missing_ok: where
        there is no checkpoint yet return 0 (else raise ValueError). stateful: what was given to `save`. Raises
        DamagedError for a checkpoint that is not what was saved, which names the last one that is, and ValueError where
        another job writes to the folder; it is this job's until `close`.
        """
        began_s = time.monotonic()
        with self._task("in resume", "after resume", meets=True):
            writer = self._writer()
            writer.lock(Path(folder), make=missing_ok)
            found = writer.latest(Path(folder))
            if found is None:
                if missing_ok:
                    return 0
                raise ValueError(f"no checkpoint in {folder}: train with trainer.save({str(folder)!r}) first")
            self.progress = writer.load(found, stateful)
            if self._telemetry is not None:
                self._telemetry.restarted(found, self.progress.steps, began_s)
        self._bookmarks = Bookmarks(self.progress)
        self._norms = None
        self._looks = True
        self._unchecked.clear()
        return self.progress.steps

    def save_pretrained(
        self, folder: str | Path, *, format: WeightFormat = "safetensors", dtype: torch.dtype | None = None
    ) -> None:
        """Write the weights as Hugging Face stores them: safetensors with an index (or PyTorch state_dicts), and the
        model's config if it has one that can save itself. All ranks must call it; all must see the folder.

        Names are those of the model's own state_dict, tied parameters under their first. Ranks write a file each, and
        hold some rows of a tensor at a time (format="torch": one file). dtype: of what holds real numbers; None: as
        trained.
        """
        with self._between_steps("save_pretrained", meets=True):
            self._check_parameters()
            export_model(self._applied, self.plan, self.mesh, self._writer(), Path(folder), format, dtype)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers of the whole model, on the CPU of rank 0; {} on the others. All must call it.

        Names are those of model_fn()'s own state_dict().
        """
        with self._between_steps("full_state_dict", meets=self._divides):
            return self._gathered({n: p.detach() for n, p in self._applied.parameters.items()}, buffers=True)

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of the last step, as the optimizer saw them, like full_state_dict. All ranks must call it."""
        grads = {n: p.grad for n, p in self._applied.parameters.items()}
        with self._between_steps("named_gradients", meets=self._divides):
            return self._gathered({n: g for n, g in grads.items() if g is not None}, buffers=False)

    def close(self) -> None:
        """End what is still being written, and torch.distributed if parallelize began it."""
        if self._checkpoints is not None:
            with self._task("in close", "after close"):
                self._checkpoints.close()
        if self._telemetry is not None:
            with self._task("in close", "after close"):
                self._telemetry.flush()
            self._telemetry.close()
        if self._watch is not None:
            self._watch.close()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            forget_groups()

    def _task(self, inside: str, after: str, meets: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.task(inside, after, meets=meets)

    def _between_steps(self, name: str, meets: bool) -> AbstractContextManager[None]:
        """Tell the watch that this rank is in a function of this name, and when it has left it."""
        after = f"after step {self.progress.steps}"
        return self._task(f"in {name} {after}", after, meets)

    @contextmanager
    def _in_step(self, then: str) -> Iterator[None]:
        """Tell the watch that this rank is in the next step, and where it is then ("after" or "within" it); say on
        which rank and for what memory does not do."""
        step = self.progress.steps + 1
        with nullcontext() if self._watch is None else self._watch.step(f"in step {step}", f"{then} step {step}"):
            try:
                yield
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                raise torch.OutOfMemoryError(self._out_of_memory(error)) from error

    @cached_property
    def _divides(self) -> bool:
        """Whether a rank has only a part of the model."""
        return self.plan.degrees.pipeline > 1 or self._applied.is_divided

    def _compile(self) -> None:
        """From now on layers that are to be compiled are. (The first step of tensor parallelism watches functions.)"""
        for forward in self._applied.compiled:
            forward.on = True

    def _out_of_memory(self, error: RuntimeError) -> str:
        if self.mesh.device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError):
            return out_of_host_memory_message(self.plan, self.mesh.rank, error)
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

    def _scales(self, batch: Any) -> Sequence[Scale]:
        """Factor of each micro-batch's loss, such that the mean over data ranks of their sums is the job's loss."""
        count = self._passes.count(batch)
        if self._weight is None:
            return [1 / count] * count
        parts = self._passes.split(batch, batch, count)
        weights = torch.stack([torch.as_tensor(self._weight(part)).double() for part in parts]).to(self.mesh.device)
        check_weights(weights, first=self.progress.steps == 0)
        total = weights.sum()
        if self.mesh.device_mesh is not None:
            dist.all_reduce(total)
        if self.progress.steps == 0:  # later, reading it would wait for the device
            check_total_weight(float(total))
        degrees = self.plan.degrees
        total /= degrees.tensor * degrees.pipeline * degrees.context  # each share was counted by every rank that has it
        return (weights * degrees.data / total).unbind()  # on the device, for reading them would wait for it

    def _totals(
        self, given: list[tuple[list[torch.Tensor], list[Scale]]], touched: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """[loss, squared gradient norm, what is finite unless the last step left parameters that are not, 0 where
        ranks of a share had the same samples, 0 where data ranks had as many micro-batches, 0 where ranks of a stage
        step alike, 0 where gradients were left alone, 0 where parameters were] of the whole job, with one small
        all-reduce."""
        loss = torch.stack([self._loss_share(losses, scales) for losses, scales in given]).sum()
        marks, self._marks = torch.stack(self._marks).sum(0), []
        totals = torch.stack(
            [
                loss,
                self._gradients.squared_norm(),
                self._spoiled(),
                *marks,
                mark_of_options(self.mesh, self.optimizer),
                *touched,
            ]
        )
        if self.mesh.device_mesh is not None:
            dist.all_reduce(totals)
        return totals

    def _loss_share(self, losses: list[torch.Tensor], scales: list[Scale]) -> torch.Tensor:
        """What this rank adds to the job's loss."""
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.coordinates["tensor"] == 0:  # on earlier stages there are no losses
            for found, scale in zip(losses, scales, strict=False):
                loss += found.double() * scale / (self.data_size * self.plan.degrees.context)
        return loss

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
        keep = self.mesh.is_first_of_stage
        state: dict[str, torch.Tensor] = {}
        elsewhere = self._writer().buffers_elsewhere() if buffers and self.plan.degrees.pipeline > 1 else set()
        for name, tensor in tensors.items():
            whole = whole_tensor(self._applied, self.mesh, name, tensor)
            if keep:
                state[name] = _own_copy(whole)
        if keep and buffers:
            present = self.model.state_dict().keys()
            for name, buffer in self.model.named_buffers():
                if name in present and name.removeprefix(self._applied.prefix) not in elsewhere:
                    state[name.removeprefix(self._applied.prefix)] = _own_copy(buffer)
        if self.plan.degrees.pipeline > 1:
            state = {name: t for part in self._writer().gathered(state) for name, t in part.items()}
        if self.mesh.rank != 0:
            return {}
        for names in self.plan.model.ties:
            known = next((state[n] for n in names if n in state), None)
            if known is not None:
                state |= {name: known.clone() for name in names}  # or writing into one would change the others
        return state


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that shares memory with none that is trained."""
    return tensor.detach().to("cpu", copy=True)
