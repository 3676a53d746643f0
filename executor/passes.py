"""From a batch to losses and gradients: the micro-batches of a rank, forward and backward, or forward alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from ..planner.plan.document import Plan
from ..profiler.model.loaded import split_inputs
from ..profiler.running.forward_state import undone
from .apply import AppliedModel
from .evaluation import ForwardResults, Forwards, evaluating, joined_samples, with_loss
from .parallel.checked_loss import uncounted
from .parallel.gradients import Gradients
from .parallel.mesh import RankMesh
from .parallel.micro_batches import (
    Loss,
    Scale,
    check_length,
    counted,
    guarded,
    loss_of,
    num_microbatches,
    num_samples,
    scaled,
    split_micro_batches,
)
from .parallel.pipeline import PipelineRunner
from .parallel.random_numbers import RandomNumbers
from .parallel.stage_module import stages_in
from .torch_compat import data_parallel, remove_replication

Part = tuple[tuple[Any, ...], dict[str, Any], Any]
"""(args, kwargs, batch) of a micro-batch."""


class RankPasses:
    """Runs the micro-batches of this rank: through the whole model, or through its stages by the plan's schedule.

    replicas: the model in DDP, once there is a first step; None under other plans. replicated: called with it.
    """

    def __init__(
        self,
        model: AppliedModel,
        plan: Plan,
        mesh: RankMesh,
        loss: Loss | None,
        random_numbers: RandomNumbers,
        gradients: Gradients,
        replicated: Callable[[DistributedDataParallel], None],
    ) -> None:
        self.replicas: DistributedDataParallel | None = None
        self._model, self._plan, self._mesh, self._loss = model, plan, mesh, loss
        self._random, self._gradients, self._replicated = random_numbers, gradients, replicated
        self._forwards = Forwards(model, plan, mesh, loss)
        self._stages = stages_in(model.module)
        self._runner: PipelineRunner | None = None
        if plan.degrees.pipeline > 1:
            assert mesh.device_mesh is not None
            self._runner = PipelineRunner(self._stages, plan, mesh.device_mesh, mesh.device, gradients.replicas)
        self._reduces: bool | None = None  # what units of fully_shard were told last

    @property
    def ends_here(self) -> bool:
        """Whether this rank has the model's output."""
        return self._runner is None or any(stage.is_last for stage in self._stages)

    def count(self, batch: Any) -> int:
        """Micro-batches in a batch of this rank. Raises ValueError for what the plan cannot run."""
        if self._plan.sequence_parallel:
            check_length(self._plan, batch)
        samples = self._plan.micro_batch * self._plan.num_microbatches
        return num_microbatches(self._plan, num_samples(batch, samples, self._plan.model.batch))

    def split(self, tree: Any, batch: Any, count: int) -> list[Any]:
        """What is said of a batch, or the batch itself, for each micro-batch."""
        return split_micro_batches(tree, count, self._plan.micro_batch * count, self._plan.model.batch, batch)

    def parts(self, batch: Any) -> list[Part]:
        """The micro-batches of a batch."""
        module = self._stages[0].model if self._runner is not None else self._model.module
        whole = (*split_inputs(module, batch, self._loss is not None), batch)
        return self.split(whole, batch, self.count(batch))

    def backward(
        self, batch: Any, scales: list[Scale], loss: Loss | None = None, ends_step: bool = False
    ) -> list[torch.Tensor]:
        """Losses of the micro-batches (on the last stage); gradients are left on the parameters, averaged.

        scales: factors of their losses. loss: instead of the trainer's. ends_step: no more gradients come before the
        optimizer's step.
        """
        loss = loss or self._loss
        if self._runner is not None:
            args, kwargs = split_inputs(self._stages[0].model, batch, self._loss is not None)
            given = self.split((args, kwargs), batch, len(scales))
            self._random.rehearse(*given[0])
            with with_loss(self._stages, loss):
                return self._runner.step(args, kwargs, batch, scales, ends_step)
        losses = []
        whole = (*split_inputs(self._model.module, batch, self._loss is not None), batch)
        parts = self.split(whole, batch, len(scales))
        self._random.rehearse(*parts[0][:2])
        if self._model.mechanism == "ddp" and self.replicas is None:
            self._replicate(parts[0], loss)
        for i, (part, scale) in enumerate(zip(parts, scales, strict=True)):
            with self._synchronised(is_last=i == len(parts) - 1):
                self._random.micro_batch(i)
                with self._autocast():
                    found = counted(self._loss_of(part, loss, scale), scale)
                self._model.begin_backward()
                scaled(found, scale).backward()
            losses.append(found.detach())
        return losses

    def forward(self, parts: list[Part], wants_loss: bool, look: Callable[[Any, Any], Any] | None) -> ForwardResults:
        """What micro-batches give in evaluation mode, without gradients. look: what to keep of (output, batch)."""
        with evaluating(self._model.module), self._random.step(0), self._autocast(), self._model.computing():
            return self._forwards.run(parts, self._random.micro_batch, wants_loss, look)

    def output(self, parts: list[Part]) -> Any:
        """The output for these micro-batches, joined, on all ranks that have them."""
        found = self.forward(parts, False, lambda output, part: output).outputs
        return joined_samples(self._forwards.to_all_stages(found), self._plan.micro_batch)

    def forget_replicas(self) -> None:
        """Other parameters are trained from now on: DDP waits for those gradients, and averages those, that it was made
        for, so it is made again."""
        if self.replicas is not None:
            remove_replication(self.replicas)
            self.replicas = None

    def _loss_of(self, part: Part, loss: Loss | None, scale: Scale) -> torch.Tensor:
        args, kwargs, batch = part
        context = self._model.context
        with context.whole_forward() if context is not None else nullcontext():
            output = guarded((self.replicas or self._model.module)(*args, **kwargs), scale)
            return loss_of(output) if loss is None else loss(output, batch)

    def _replicate(self, part: Part, loss: Loss | None) -> None:
        """Wrap the model in DDP. One forward shows what reads no parameter, so that DDP does not wait for it; what it
        leaves behind is undone, and what it writes into the batch not done."""
        model = self._model.module
        devices = [self._mesh.device] if self._mesh.device.type == "cuda" else []
        self._random.micro_batch(0)
        with undone(model), uncounted(loss), torch.random.fork_rng(devices), self._autocast():
            read = _parameters_behind(self._loss_of(tree_map(_cloned, part), loss, 1.0), model)
        unread = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in read}
        self.replicas = data_parallel(model, self._mesh.group("data_replicate"), unread)
        self._gradients.leave_to_reduce(list(unread.values()))  # where a later forward reads them
        self._replicated(self.replicas)

    def _autocast(self) -> AbstractContextManager[Any]:
        """bf16 where parameters are not cast by themselves."""
        if self._plan.training.is_mixed and self._model.mechanism not in ("fsdp", "cast"):
            return torch.autocast(self._mesh.device.type, torch.bfloat16)
        return nullcontext()

    def _synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients in this micro-batch's backward if the plan says so.

        Kept parameters stay gathered until the last micro-batch where gradients are reduced only then.
        """
        now = is_last or self._plan.gradient_sync == "every"
        if now != self._reduces:
            for unit, reshard in self._model.units:
                unit.set_requires_gradient_sync(now, recurse=False)
                unit.set_is_last_backward(now)
                unit.set_reshard_after_backward(now or reshard, recurse=False)
            self._reduces = now
        return self.replicas.no_sync() if self.replicas is not None and not now else nullcontext()


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _taken_off(parameter: nn.Parameter) -> bool:
    """Whether a parameter had a gradient, which it has no more."""
    had, parameter.grad = parameter.grad is not None, None
    return had


def _parameters_behind(loss: torch.Tensor, model: nn.Module) -> set[int]:
    """Ids of the model's parameters that a loss was computed from. Of what a function of its own recomputes (torch's
    reentrant checkpoints), only the backward tells."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, CheckpointFunction._backward_cls):
            loss.backward()
            return {id(p) for p in model.parameters() if _taken_off(p)}
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found
