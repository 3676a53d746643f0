"""Runs a step's micro-batches through the pipeline stages of this rank, in the order of the plan's schedule."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from ...planner.plan.document import Plan
from ...planner.plan.schedules import ZERO_BUBBLE, stage_of, table
from ..torch_compat import reduce_gradients
from ..torch_pipelining import LeanPipelineStage, custom_schedule
from .micro_batches import MicroBatch, Scale, shapes_in, split_micro_batches
from .stage_module import StageModule
from .stage_replicas import StageReplicas

_SCALAR = torch.empty((), device="meta")


class PipelineRunner:
    """Runs the micro-batches of a step through this rank's stages, forward and backward, by the plan's schedule.

    stages: StageModules in the order of the rank's chunks, or what fully_shard made of them.
    mesh: has the plan's axis "pipeline"; torch sorts the ranks of its group, whatever their order in the pipeline.
    Gradients that fully_shard reduces are reduced as the plan's gradient_sync says: after the last micro-batch, or
    after each. replicas: average those of replicas of these stages; None: somebody else does.

    On the CPU parameters that the plan keeps gathered are gathered as a step begins, on all stages at once: fully_shard
    by itself begins when a stage has its first input, so that stages would gather one after another. Reductions would
    be as much in a row, for each ends before the backward that it belongs to, and gradients are sent only then; they
    wait for the end of the schedule, if gradients of several micro-batches lie there whole anyway. (On GPUs reductions
    run beside the backward; and gathers at once would leave the allocator with a second copy of the parameters, in
    blocks of another stream.)
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        plan: Plan,
        mesh: DeviceMesh,
        device: torch.device,
        replicas: StageReplicas | None = None,
    ) -> None:
        self._plan = plan
        self._stages = list(stages)
        self._group = mesh.get_group("pipeline")
        processes = mesh["pipeline"].mesh.tolist()
        self._group_ranks = [sorted(processes).index(process) for process in processes]
        self._device = device
        self._replicas = replicas
        self._splits = plan.schedule in ZERO_BUBBLE
        self._on_cpu = device.type == "cpu"
        whole = plan.gradient_sync == "last" and plan.num_microbatches > 1
        self._reduces_late = self._on_cpu and whole and not self._splits
        self._has_run = False
        self._schedules: dict[tuple[Any, ...], Any] = {}  # by the shapes of inputs, and how many micro-batches

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        scales: Sequence[Scale] | None = None,
        ends_step: bool = False,
    ) -> list[torch.Tensor]:
        """Losses of the micro-batches on the rank of the last stage, [] elsewhere; gradients are added to the
        parameters'.

        args, kwargs: the model's inputs for all micro-batches of this data rank, the same on every stage.
        batch: the same, as the loss function takes it.
        scales: weight of each micro-batch's loss in the gradient, as many as there are micro-batches; None: the plan's
        number of them, 1 / num_microbatches each. Shapes may be others in every step. ends_step: no more gradients come
        before the optimizer's step, so that replicas may begin to average what there is.
        """
        count = self._plan.num_microbatches if scales is None else len(scales)
        samples, planned = self._plan.micro_batch * count, self._plan.model.batch
        parts = split_micro_batches((args, kwargs, batch), count, samples, planned, batch)
        weights = scales if scales is not None else [1 / count] * count
        micro_batches = [
            MicroBatch(args, kwargs, batch, scale) for (args, kwargs, batch), scale in zip(parts, weights, strict=True)
        ]
        if self._replicas is not None:
            self._replicas.begin(ends_step)
        for stage in self._stages:
            stage.begin(micro_batches, self._device)
        if self._on_cpu and self._has_run:  # before that, fully_shard is not set up yet
            for unit in self._kept():
                unit.unshard(async_op=True)
        key = (count, *shapes_in(micro_batches[0]))
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(count)
        last = next((stage for stage in self._stages if stage.is_last), None)
        try:
            with _without_its_table():
                self._schedules[key].step(target=None if last is None else torch.zeros(count), return_outputs=False)
        except RuntimeError as error:
            if self._splits and nn.modules.module._has_any_global_hook():
                raise ValueError(
                    f"a hook is set on all modules, as FlopCounterMode does, and {self._plan.schedule}, which runs the "
                    "backward of a layer in two parts, cannot run through it: leave it off in trainer.step, or plan "
                    "with --pin schedule=1f1b"
                ) from error
            raise
        self._has_run = True
        for stage in self._stages:
            if self._reduces_late:
                _reduce(stage, last=True)
            for unit, _ in stage.fsdp_units:
                unit.reshard()  # a stage whose outputs want no gradient has had no backward to do it
        return [] if last is None else last.losses

    def _kept(self) -> Iterator[FSDPModule]:
        """FSDP units whose parameters stay gathered from the first forward to the last backward, in order."""
        for stage in self._stages:
            yield from (unit for unit, gives_back in stage.fsdp_units if not gives_back)

    def _make_schedule(self, count: int) -> Any:
        plan, stages = self._plan, [self._torch_stage(stage) for stage in self._stages]
        ranks = plan.degrees.pipeline
        if plan.schedule in ("1f1b", "gpipe"):
            kind = Schedule1F1B if plan.schedule == "1f1b" else ScheduleGPipe
            stages[0].stage_index_to_group_rank = dict(enumerate(self._group_ranks))
            return kind(stages[0], count, loss_fn=_first, scale_grads=False)
        letters = {"forward": "F", "backward": "I" if self._splits else "B", "weight": "W"}
        order = [
            [(stage_of(plan.schedule, rank, a.chunk, ranks), letters[a.kind], a.microbatch) for a in actions]
            for rank, actions in enumerate(table(plan.schedule, ranks, count, plan.degrees.virtual_stages))
        ]
        by_group_rank = [order[self._group_ranks.index(rank)] for rank in range(ranks)]
        return custom_schedule(stages, by_group_rank, count, _first)

    def _torch_stage(self, module: StageModule) -> LeanPipelineStage:
        before = None
        for unit, _ in module.fsdp_units:
            # FSDP guesses by the order of all forwards so far: the first unit, and the root whenever one of its outputs
            # gets its gradient, would gather the last unit once more. What prefetches itself gathers nothing.
            unit.set_modules_to_backward_prefetch([unit if before is None or isinstance(unit, StageModule) else before])
            before = unit
        return LeanPipelineStage(
            _Hidden(module),
            module.stage,
            len(self._plan.stages),
            self._device,
            input_args=tuple(module.on_wire(tensor) for tensor in module.incoming),
            output_args=tuple(module.on_wire(tensor) for tensor in module.outgoing) or (_SCALAR,),
            group=self._group,
            before_backward=partial(self._before_backward, module),
            before_weights=partial(self._before_weights, module),
            after_some_weights=partial(self._after_some, module),
            after_weights=partial(self._after_weights, module),
        )

    def _before_backward(self, stage: StageModule, last: bool) -> None:
        """Keep parameters gathered until gradients are reduced, which is later where the backward for weights is a pass
        of its own."""
        now = not self._splits and (last or self._plan.gradient_sync == "every")
        for unit, gives_back in stage.fsdp_units:
            ends_here = now and (gives_back or not self._reduces_late)
            _set_sync(unit, reduce=ends_here, gives_back=gives_back or ends_here)
        if self._splits and stage.stage > 0:
            self._gather(stage)
        if last and not self._splits and self._replicas is not None:
            self._replicas.before_last(self._stages.index(stage))

    def _before_weights(self, stage: StageModule, last: bool) -> None:
        if stage.stage > 0:
            self._gather(stage)
        if last and self._replicas is not None:
            self._replicas.before_last(self._stages.index(stage))

    def _gather(self, stage: StageModule) -> None:
        """Gather the parameters of a stage for its backward for weights. Torch runs that past fully_shard's hooks,
        which would gather them, and looks for gradients on the gathered parameters. They stay gathered until all groups
        are done, for a backward that goes through a unit's input would give them back before the next (seen on
        whisper's decoder)."""
        for unit, _ in stage.fsdp_units:
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()

    def _after_some(self, stage: StageModule, parameters: Iterable[nn.Parameter], last: bool) -> None:
        if last and self._replicas is not None:
            self._replicas.arrived(self._stages.index(stage), parameters)

    def _after_weights(self, stage: StageModule, last: bool) -> None:
        """Reduce gradients after a backward for weights, which bypasses the hooks that would."""
        _reduce(stage, last, self._plan.gradient_sync == "every")


@contextmanager
def _without_its_table() -> Iterator[None]:
    """While it lasts, torch does not print its table of the schedule with an error. The error is still raised."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    log.addFilter(_below_error)
    try:
        yield
    finally:
        log.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _reduce(stage: StageModule, last: bool, every: bool = False) -> None:
    """Reduce what gradients there are, after the last backward or after every one."""
    if isinstance(stage, FSDPModule):
        for unit, gives_back in stage.fsdp_units:
            _set_sync(unit, reduce=last or every, gives_back=last or gives_back)
        reduce_gradients(stage)


def _set_sync(unit: FSDPModule, reduce: bool, gives_back: bool) -> None:
    """Set whether a unit's backward reduces gradients, and whether it gives parameters back."""
    unit.set_requires_gradient_sync(reduce, recurse=False)
    unit.set_is_last_backward(reduce)
    unit.set_reshard_after_backward(gives_back, recurse=False)


class _Hidden(nn.Module):
    """Hides FSDP from torch's pipeline stage, which would drive it without regard to gradient_sync and to each layer's
    reshard."""

    def __init__(self, module: StageModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *received: torch.Tensor) -> Any:
        """Run the stage."""
        self.module.receive(received)
        return self.module.run()


def _first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss function for torch's schedule: the output of the last stage is the loss already."""
    return output
