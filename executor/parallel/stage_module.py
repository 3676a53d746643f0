"""Pipeline stages of any model: its own forward on every stage, of which each stage owns and computes only its part.

A stage keeps the model's whole structure, so that its forward runs unchanged, but
- layer modules of other stages return placeholders, and their parameters are gone;
- tensors that cross the cut into the stage replace what their producers return (see profiler/semantics/producers.py);
- the run ends as soon as all that the next stage needs has been produced.
What depends on no parameter (masks, positions, rotary tables) every stage computes for itself from the batch, which is
therefore given to all stages alike.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...planner.plan.document import Plan
from ...planner.plan.schedules import ZERO_BUBBLE
from ...profiler.model.model_profile import CrossingTensor, Producer
from ...profiler.semantics.distributions import unvalidated
from ...profiler.semantics.producers import Producers
from ...profiler.semantics.token_marks import own_shape, set_mark
from ..torch_compat import alias, unit_of
from .context import ContextParallel
from .copies import numbers_of
from .micro_batches import Loss, MicroBatch, counted, guarded, loss_of, own_copy, scaled, shapes_in
from .partition import STALE, check_partition, crossing_into, parameters_of_stages, strip
from .rehearsal import Like, Rehearsal, Stub
from .tensor import crosses_sliced


class StageModule(nn.Module):
    """The part of a model that one pipeline stage owns; parameters keep their names, under `model.`.

    forward() returns the crossing tensors that the next stage needs, or on the last stage the loss, times the
    micro-batch's scale. Its inputs do not come as arguments, where fully_shard would cast them: the micro-batches from
    `begin`, because all stages are given the same ones, and what crosses the cut from `receive`.
    What wraps the whole stage (fully_shard) must wrap this module and not `.model`, whose forward is left early.

    loss: mean loss of (output, micro-batch); None if the model returns its own. context: this rank's tokens, where
    sequences are split; what crosses the cuts then holds these. rehearsal: of the same model, if another stage of this
    rank has one.
    Changes `model` in place. Raises ValueError if the plan's stages cannot be cut out of it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        stage: int,
        loss: Loss | None = None,
        context: ContextParallel | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        super().__init__()
        check_partition(model, plan)
        self.stage = stage
        self.incoming = crossing_into(plan, stage)
        self.outgoing = crossing_into(plan, stage + 1)
        self.losses: list[torch.Tensor] = []
        self._plan = plan
        self._loss = loss
        self._context = context
        self.is_last = stage == len(plan.stages) - 1
        own_modules = {name for layer in plan.stages[stage].layers for name in layer.modules}
        foreign = tuple(name for name in plan.model.layer_modules if name not in own_modules)
        self._rehearsal = rehearsal or Rehearsal(model, plan)
        self._stubs: dict[tuple[str, int], Stub] = {}
        self._tensors: dict[Producer, Like] = {}
        self._sent: tuple[torch.Tensor, ...] = ()
        self._writes_batch = False
        self._shapes: list[torch.Size] | None = None
        self._rehearsed: tuple[list[torch.Size], bool] | None = None
        self._calls: Counter[str] = Counter()
        self._queue: deque[MicroBatch] = deque()
        self._received: tuple[torch.Tensor, ...] = ()
        self._exchange = _NOTHING
        self._autocast: torch.autocast | nullcontext[None] = nullcontext()
        self._bf16_layers = False
        self._placeholders = strip(model, parameters_of_stages(model, plan)[stage], foreign)
        for name in foreign:
            model.get_submodule(name).forward = partial(self._stub, name)
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Its parameters and buffers under their names, as averages of weights keep them; a copy runs nothing."""
        return numbers_of(self, memo)

    def begin(self, micro_batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Give the micro-batches of the next forwards, which run in this order, and are all of the same shapes."""
        self._queue = deque(micro_batches)
        self.losses = []
        shapes = shapes_in(micro_batches[0])
        if self._shapes is None:
            mixed = self._plan.training.is_mixed
            sharded = any(isinstance(module, FSDPModule) for module in self.modules())
            if mixed and not sharded:
                self._autocast = torch.autocast(device.type, torch.bfloat16)
            self._bf16_layers = mixed and sharded
            self._placeholders.move(device)
        elif self._context is not None and shapes != self._shapes:
            raise self._context.other_length()
        if (shapes, self.training) != self._rehearsed:
            crossing = {tensor.producer for tensor in (*self.incoming, *self.outgoing)}
            self._stubs, tensors, self._writes_batch = self._rehearsal.run(
                micro_batches[0], device, self._autocast, self._bf16_layers, self._context, self.training
            )
            self._tensors = {producer: like for producer, like in tensors.items() if producer in crossing}
            self._sent = tuple(self.on_wire(crossing) for crossing in self.outgoing)
            self._shapes, self._rehearsed = shapes, (shapes, self.training)
        if self._writes_batch:
            self._queue = deque(own_copy(micro_batch) for micro_batch in micro_batches)

    def on_wire(self, crossing: CrossingTensor) -> torch.Tensor:
        """Meta tensor of the shape and dtype that one rank sends. To be called after `begin`."""
        if crossing.producer not in self._tensors:
            raise RuntimeError(f"the model does not make {_words(crossing.producer)}: {STALE}")
        like = self._tensors[crossing.producer]
        shape = list(like.shape)
        if crosses_sliced(crossing, self._plan):
            shape[crossing.dims.index("sequence")] //= self._plan.degrees.tensor
        return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=crossing.requires_grad)

    def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Set the tensors that have crossed the cut, in the plan's order, for the next forward."""
        self._received = tensors

    def run(self) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Crossing tensors for the next stage, or the scaled loss on the last one.

        It is called with something: on GPUs fully_shard's hook fails for a module that is called with nothing (seen in
        torch 2.11)."""
        output: tuple[torch.Tensor, ...] | torch.Tensor = self(_QUEUED)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Run the stage, for `run` alone. Raises TypeError for others, as a loop that calls `trainer.model`."""
        if len(args) != 1 or args[0] is not _QUEUED or kwargs:
            raise TypeError(
                "trainer.model is a stage of a pipeline, which cannot be called by itself: call trainer.step, "
                "forward_backward, forward or evaluate on all ranks"
            )
        micro_batch = self._queue.popleft()
        self._calls.clear()
        exchange = self._exchange = _BoundaryTensors(
            arrived={
                crossing.producer: self._arrived(crossing, tensor)
                for crossing, tensor in zip(self.incoming, self._received, strict=True)
            },
            wanted=tuple(crossing.producer for crossing in self.outgoing),
            shapes={producer: like.shape for producer, like in self._tensors.items()},
        )
        self._received = ()
        try:
            with self._tokens(), self._autocast, unvalidated():
                with self._producers:
                    output = self.model(*micro_batch.args, **micro_batch.kwargs)
                if self.is_last:
                    output = guarded(output, micro_batch.scale)
                loss = self._loss_of(output, micro_batch.batch) if self.is_last else None
        except _CompleteError:
            return self._checked(exchange)
        finally:
            self._exchange = _NOTHING
        exchange.check_all_seen()
        if loss is None:
            missing = next(p for p in exchange.wanted if p not in exchange.made)
            raise RuntimeError(f"stage {self.stage} ran to its end without making {_words(missing)}: {STALE}")
        loss = counted(loss, micro_batch.scale)
        self.losses.append(loss.detach())
        return scaled(loss, micro_batch.scale)

    def _arrived(self, crossing: CrossingTensor, tensor: torch.Tensor) -> torch.Tensor:
        like = self._tensors[crossing.producer]
        mark = like.mark
        if self._context is not None and crosses_sliced(crossing, self._plan):
            mark = self._context.slice_of(mark)
        return set_mark(tensor.clone() if like.written else tensor, mark)

    def _tokens(self) -> AbstractContextManager[None]:
        return nullcontext() if self._context is None else self._context.running()

    def _loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        return loss_of(output) if self._loss is None else self._loss(output, batch)

    @cached_property
    def _producers(self) -> Producers:
        crossing = {tensor.producer for tensor in (*self.incoming, *self.outgoing)}
        return Producers(self.model, self._plan.model.layer_modules, replace=self._replace, only=crossing, stays=True)

    def _replace(self, producer: Producer, tensor: torch.Tensor) -> torch.Tensor:
        found = self._exchange.replace(producer, tensor)
        stub = self._stubs.get((producer.name, producer.call)) if producer.kind == "module" else None
        if found is tensor or stub is None or not stub.leaves[producer.leaf].written or tensor._is_view():
            return found
        return tensor.detach_().copy_(found)  # a hook that wrote into it may have kept it, too

    @cached_property
    def fsdp_units(self) -> list[tuple[FSDPModule, bool]]:
        """FSDP modules in the order of their forwards, inner ones before the one around them; each with whether it
        gives its parameters back after forward (the root does not). Of a unit of several modules it is the first. To be
        asked for after the stage is sharded."""
        modules: list[tuple[nn.Module, bool]] = [
            (module, layer.reshard)
            for layer in self._plan.stages[self.stage].layers
            for name in layer.modules
            for module in reversed(list(self.model.get_submodule(name).modules()))
        ]
        inner = {module for module, _ in modules}
        modules += [(module, False) for module in self.modules() if module not in inner]
        units: dict[int, tuple[FSDPModule, bool]] = {}
        for module, reshard in modules:
            if isinstance(module, FSDPModule):
                units.setdefault(unit_of(module), (module, reshard))
        return list(units.values())

    def _stub(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call = self._calls[name]
        self._calls[name] += 1
        if (name, call) not in self._stubs:
            raise RuntimeError(f"module {name} is called more often than when the stage was set up: {STALE}")
        own = ("module", name, call)
        arrived = {p.leaf: x for p, x in self._exchange.arrived.items() if (p.kind, p.name, p.call) == own}
        return self._stubs[name, call].output(arrived)

    def _checked(self, exchange: "_BoundaryTensors") -> tuple[torch.Tensor, ...]:
        exchange.check_all_seen()
        outputs = tuple(exchange.made[producer].contiguous() for producer in exchange.wanted)
        if self._plan.schedule in ZERO_BUBBLE:  # torch detaches in place what it sent
            outputs = tuple(alias(output) for output in outputs)
        for crossing, output, like in zip(self.outgoing, outputs, self._sent, strict=True):
            if output.shape != like.shape or output.dtype != like.dtype:
                raise RuntimeError(
                    f"stage {self.stage} made {_words(crossing.producer)} as {output.dtype} of {tuple(output.shape)}, "
                    f"but {like.dtype} of {tuple(like.shape)} was expected: {STALE}"
                )
        return outputs


class Chunks(nn.Module):
    """Several stages of one rank, in the plan's order of its chunks; parameters and buffers keep the model's names."""

    def __init__(self, stages: Sequence[StageModule]) -> None:
        super().__init__()
        for i, stage in enumerate(stages):
            self.add_module(str(i), stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: its stages are run one by one."""
        return self.stages[0](*args, **kwargs)

    @property
    def stages(self) -> list[StageModule]:
        """The stages."""
        return list(self._modules.values())  # type: ignore[arg-type]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the model, parameter) of all stages."""
        for stage in self.stages:
            yield from stage.model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the model, buffer) of all stages; buffers outside of the layers are on each of them."""
        for stage in self.stages:
            yield from stage.model.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The stages' entries, named as in the whole model."""
        return {name: value for stage in self.stages for name, value in stage.model.state_dict(*args, **kwargs).items()}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Give what `state_dict` names by the model to the stages, which are asked next, by where they are here."""
        unknown: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unknown, errors)
        for i, stage in enumerate(self.stages):
            for name in stage.model.state_dict():
                if prefix + name in state_dict:
                    state_dict[f"{prefix}{i}.model.{name}"] = state_dict[prefix + name]
        unexpected += [name for name in unknown if name.removeprefix(prefix) not in self.state_dict()]


def stages_in(module: nn.Module) -> list[StageModule]:
    """The stages in a rank's module: one, several in `Chunks`, or none without a pipeline."""
    if isinstance(module, Chunks):
        return module.stages
    return [module] if isinstance(module, StageModule) else []


class _CompleteError(Exception):
    """Ends a forward early: all that the next stage needs has been produced."""


class _BoundaryTensors:
    """Puts arrived tensors in their producers' places, and collects the wanted ones until all are there."""

    def __init__(
        self,
        arrived: dict[Producer, torch.Tensor],
        wanted: tuple[Producer, ...],
        shapes: dict[Producer, torch.Size],
    ) -> None:
        self.arrived = arrived
        self.wanted = wanted
        self._shapes = shapes
        self.made = {producer: arrived[producer] for producer in wanted if producer in arrived}
        self._seen: set[Producer] = set()

    def replace(self, producer: Producer, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to go on with. Raises RuntimeError if it would take the place of one of another shape."""
        if producer in self.arrived:
            self._seen.add(producer)
            found, made = own_shape(tensor), own_shape(self.arrived[producer])
            if found not in (self._shapes[producer], made):
                raise RuntimeError(
                    f"{_words(producer)} is of {tuple(found)} on this stage and of {tuple(made)} where it was made: "
                    f"{STALE}"
                )
            tensor = self.arrived[producer]
        elif producer in self.wanted:
            self.made[producer] = tensor
            if len(self.made) == len(self.wanted):
                raise _CompleteError
        return tensor

    def check_all_seen(self) -> None:
        """Raises RuntimeError if an arrived tensor found no producer to replace: placeholders would be used instead."""
        for producer in self.arrived:
            if producer not in self._seen:
                raise RuntimeError(f"{_words(producer)} arrived, which the model never made: {STALE}")


_NOTHING = _BoundaryTensors({}, (), {})

_QUEUED = object()
"""The argument of a stage's call, which takes its real input from those that it was given before."""


def _words(producer: Producer) -> str:
    if producer.kind == "module":
        return f"output {producer.leaf} of call {producer.call} of module {producer.name}"
    return f"result {producer.leaf} of call {producer.call} of {producer.name} between the layers"
