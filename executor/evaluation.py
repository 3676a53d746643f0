"""Forwards without backward under any plan: a model's outputs and its mean loss, in evaluation mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..planner.plan.document import Plan
from ..profiler.model.building import in_evaluation
from ..profiler.semantics.logit_shards import LogitShards
from ..profiler.semantics.token_marks import Held, Share, mark_of
from .apply import AppliedModel
from .parallel.context_attention import own_spans
from .parallel.mesh import RankMesh
from .parallel.micro_batches import Loss, MicroBatch, counted, loss_of
from .parallel.stage_module import StageModule, stages_in

Metric = Callable[[Any, Any], torch.Tensor | float]
"""Of (output, micro-batch): a mean over the samples, or tokens, that count."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While it lasts the model is in evaluation mode, and no gradients are kept; then modes are as they were."""
    with in_evaluation(model), torch.no_grad():
        yield


@contextmanager
def with_loss(stages: Sequence[StageModule], loss: Loss | None) -> Iterator[None]:
    """While it lasts the last stage, if it is among these, computes this loss."""
    before = [(stage, stage._loss) for stage in stages]
    for stage in stages:
        stage._loss = loss
    try:
        yield
    finally:
        for stage, own in before:
            stage._loss = own


@dataclass
class ForwardResults:
    """What forwards of one rank gave, per micro-batch: on the last stage, [] elsewhere."""

    outputs: list[Any] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


class Forwards:
    """Runs micro-batches through the model, or this rank's stages of it, forward only.

    Stages take micro-batches one after the other; a rank goes on with the next as soon as it has sent.
    """

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh, loss: Loss | None) -> None:
        self._model, self._plan, self._mesh, self._loss = model, plan, mesh, loss
        self._stages = sorted(stages_in(model.module), key=lambda stage: stage.stage)

    def run(
        self,
        parts: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]],
        begins: Callable[[int], None],
        wants_loss: bool,
        look: Callable[[Any, Any], Any] | None,
    ) -> ForwardResults:
        """parts: (args, kwargs, batch) of each micro-batch. begins: told which micro-batch comes, where there is no
        pipeline. look: what to keep of (output, micro-batch); None: nothing."""
        found = ForwardResults()
        if self._stages:
            self._through_stages(parts, found, wants_loss, look)
            return found
        context = self._model.context
        for i, (args, kwargs, batch) in enumerate(parts):
            begins(i)
            with context.whole_forward() if context is not None else nullcontext():
                self._finish(self._model.module(*args, **kwargs), batch, found, wants_loss, look)
        _give_back(self._model.module)
        return found

    def _finish(
        self, output: Any, batch: Any, found: ForwardResults, wants_loss: bool, look: Callable[[Any, Any], Any] | None
    ) -> torch.Tensor:
        loss = torch.zeros((), device=self._mesh.device)
        if wants_loss:
            loss = loss_of(output) if self._loss is None else self._loss(output, batch)
            found.losses.append(loss.detach())
        if look is not None:
            found.outputs.append(look(self.whole(output), batch))
        return loss

    def _through_stages(
        self, parts: Sequence[Any], found: ForwardResults, wants_loss: bool, look: Callable[[Any, Any], Any] | None
    ) -> None:
        group = self._mesh.group("pipeline")
        processes = self._processes()
        count = len(self._plan.stages)
        handed: dict[int, tuple[torch.Tensor, ...]] = {}
        sent: list[Any] = []
        for stage in self._stages:
            stage.begin([MicroBatch(args, kwargs, batch, 1.0) for args, kwargs, batch in parts], self._mesh.device)
            if stage.is_last:
                stage.__dict__["_loss_of"] = lambda output, batch: self._finish(output, batch, found, wants_loss, look)
        here = {stage.stage for stage in self._stages}
        try:
            for _ in parts:
                for stage in self._stages:
                    if stage.stage - 1 in here:
                        stage.receive(handed.pop(stage.stage))
                    elif stage.stage:
                        stage.receive(self._received(stage, processes[stage.stage - 1], group))
                    output = stage.run()
                    if stage.stage + 1 in here:
                        handed[stage.stage + 1] = tuple(output)  # no loss, for there is a next stage
                    elif stage.stage + 1 < count:
                        for tensor in output:
                            sent.append((dist.isend(tensor, processes[stage.stage + 1], group=group), tensor))
        finally:
            for stage in self._stages:
                stage.__dict__.pop("_loss_of", None)
        for work, _ in sent:
            work.wait()
        _give_back(self._model.module)

    def _received(self, stage: StageModule, source: int, group: Any) -> tuple[torch.Tensor, ...]:
        made = []
        for crossing in stage.incoming:
            tensor = torch.empty_like(stage.on_wire(crossing), device=self._mesh.device, requires_grad=False)
            dist.recv(tensor, source, group=group)
            made.append(tensor)
        return tuple(made)

    def _processes(self) -> list[int]:
        """[stage] -> the process that has it and this rank's samples."""
        plan, own = self._plan, self._mesh.rank
        base = own - self._mesh.coordinates["pipeline"] * plan.stride("pipeline")
        return [
            self._mesh.processes[base + plan.position_of(stage) * plan.stride("pipeline")]
            for stage in range(len(plan.stages))
        ]

    def to_all_stages(self, found: list[Any]) -> list[Any]:
        """What the last stage has found, on all ranks with the same samples."""
        group = self._mesh.group("pipeline")
        if group is None:
            return found
        source = self._processes()[-1]
        leaves, tree = tree_flatten(found)
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        head: list[Any] = [(kinds, rest, tree)]
        dist.broadcast_object_list(head, source, group=group, device=self._mesh.device)
        kinds, made, tree = head[0]
        assert isinstance(made, list)
        for i, kind in enumerate(kinds):
            if kind is not None:
                made[i] = torch.empty(kind[0], dtype=kind[1], device=self._mesh.device)
                if dist.get_rank() == source:
                    made[i].copy_(leaves[i])
                dist.broadcast(made[i], source, group=group)
        return list(tree_unflatten(made, tree))

    def whole(self, output: Any) -> Any:
        """An output with all classes and all tokens, where ranks hold some of them."""
        return tree_map(self._whole_leaf, output)

    def _whole_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        mark = mark_of(leaf)
        if isinstance(leaf, LogitShards):
            leaf = torch.cat([leaf])  # is given the classes of all ranks
        group = self._mesh.group("context")
        if mark is None or group is None:
            return leaf
        with torch._C.DisableTorchFunction():
            size = self._plan.degrees.context
            parts = [torch.empty_like(leaf) for _ in range(size)]
            dist.all_gather(parts, leaf.contiguous(), group=group)
            if isinstance(mark, Share):
                return torch.stack(parts).mean(0)
            return self._joined(parts, mark)

    def _joined(self, parts: list[torch.Tensor], mark: Held) -> torch.Tensor:
        """A tensor of all tokens, from those of each context rank."""
        sizes = (mark.before, -1, mark.after)
        found = [part.unflatten(mark.dim, sizes) for part in parts]
        shape = list(found[0].shape)
        shape[mark.dim + 1] = mark.length
        whole = parts[0].new_empty(shape)
        for rank, part in enumerate(found):
            start = 0
            for first, end in own_spans(self._plan.context_kind, mark.length, rank, len(parts)):
                whole.narrow(mark.dim + 1, first, end - first).copy_(part.narrow(mark.dim + 1, start, end - first))
                start += end - first
        return whole.flatten(mark.dim, mark.dim + 2)


def _give_back(module: nn.Module) -> None:
    """Parameters that a backward would have given back."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def joined_samples(outputs: list[Any], micro_batch: int) -> Any:
    """One output from those of the micro-batches."""
    leaves = [tree_flatten(output) for output in outputs]

    def joined(own: tuple[Any, ...]) -> Any:
        first = own[0]
        if isinstance(first, torch.Tensor) and first.dim() and first.shape[0] == micro_batch:
            return torch.cat(own)
        return first

    return tree_unflatten([joined(own) for own in zip(*(flat for flat, _ in leaves), strict=True)], leaves[0][1])


class Means:
    """Weighted means over all batches and data ranks."""

    def __init__(self, mesh: RankMesh, names: Sequence[str]) -> None:
        self._mesh, self._names = mesh, list(names)
        self._sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=mesh.device)

    def add(self, values: Mapping[str, torch.Tensor | float], weight: torch.Tensor | float) -> None:
        """Count the means of a micro-batch so often; where that is not at all, they may be no numbers."""
        for i, name in enumerate(self._names):
            value = torch.as_tensor(values[name]).double().to(self._mesh.device)
            self._sums[i] += counted(value, weight) * weight
        self._sums[-1] += weight

    def over_ranks(self, counts: bool) -> dict[str, float]:
        """Name -> mean. All ranks must call it; counts: whether this one's sums are to be."""
        sums = self._sums if counts else torch.zeros_like(self._sums)
        if self._mesh.device_mesh is not None:
            dist.all_reduce(sums)
        *found, weight = sums.tolist()
        if not weight:
            raise ValueError(
                "evaluate() was given no batches, or only such as weight= counts as nothing: a loader leaves out what "
                "does not fill a global batch"
            )
        return {name: value / weight for name, value in zip(self._names, found, strict=True)}
