"""Pipeline stages of any model: its own forward on every stage, of which each stage owns and computes only its part.

A stage keeps the model's whole structure, so that its forward runs unchanged, but
- layer modules of other stages return placeholders, and their parameters are gone;
- tensors that cross the cut into the stage replace what their producers return (see profiler/producers.py);
- the run ends as soon as all that the next stage needs has been produced.
What depends on no parameter (masks, positions, rotary tables) every stage computes for itself from the batch, which is
therefore given to all stages alike.
"""

import copy
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..planner.plan import Plan, stage_of
from ..planner.simulate import ZERO_BUBBLE, table
from ..profiler.held_tokens import Mark, mark_of, own_shape, set_mark
from ..profiler.model_profile import CrossingTensor, Producer
from ..profiler.producers import Producers
from .context import ContextParallel
from .tensor import crosses_sliced
from .torch_compat import LeanPipelineStage, custom_schedule, reduce_gradients, solid

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of a stage is given; scale: the weight of its loss in the step's gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    scale: float


class StageModule(nn.Module):
    """The part of a model that one pipeline stage owns; parameters keep their names, under `model.`.

    forward() returns the crossing tensors that the next stage needs, or on the last stage the loss, times the
    micro-batch's scale. Its inputs do not come as arguments, where fully_shard would cast them: the micro-batches from
    `begin`, because all stages are given the same ones, and what crosses the cut from `receive`.
    What wraps the whole stage (fully_shard) must wrap this module and not `.model`, whose forward is left early.

    loss: mean loss of (output, micro-batch); None if the model returns its own. context: this rank's tokens, where
    sequences are split; what crosses the cuts then holds these.
    Changes `model` in place. Raises ValueError if the plan's stages cannot be cut out of it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        stage: int,
        loss: Loss | None = None,
        context: ContextParallel | None = None,
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
        self._rehearsal: _Rehearsal | None = _Rehearsal(model, plan, foreign)
        self._stubs: dict[tuple[str, int], _Stub] = {}
        self._tensors: dict[Producer, _Like] = {}
        self._writes_batch = False
        self._calls: Counter[str] = Counter()
        self._queue: deque[MicroBatch] = deque()
        self._received: tuple[torch.Tensor, ...] = ()
        self._exchange = _NOTHING
        self._autocast: torch.autocast | nullcontext[None] = nullcontext()
        self._placeholders = _strip(model, parameters_of_stages(model, plan)[stage], foreign)
        for name in foreign:
            model.get_submodule(name).forward = partial(self._stub, name)
        self.model = model

    def begin(self, micro_batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Give the micro-batches of the next forwards, which run in this order."""
        self._queue = deque(micro_batches)
        self.losses = []
        if self._rehearsal is not None:
            mixed = self._plan.training.precision == "bf16"
            sharded = any(isinstance(module, FSDPModule) for module in self.modules())
            if mixed and not sharded:
                self._autocast = torch.autocast(device.type, torch.bfloat16)
            crossing = {tensor.producer for tensor in (*self.incoming, *self.outgoing)}
            self._stubs, self._tensors, self._writes_batch = self._rehearsal.run(
                micro_batches[0], crossing, device, self._autocast, mixed and sharded, self._context
            )
            self._rehearsal = None
            self._placeholders.move(device)
        if self._writes_batch:
            self._queue = deque(_own_copy(micro_batch) for micro_batch in micro_batches)

    def on_wire(self, crossing: CrossingTensor) -> torch.Tensor:
        """Meta tensor like that which one rank sends. After `begin`."""
        if crossing.producer not in self._tensors:
            raise RuntimeError(f"the model does not make {_words(crossing.producer)}: {_STALE}")
        like = self._tensors[crossing.producer]
        shape = list(like.shape)
        if crosses_sliced(crossing, self._plan):
            shape[crossing.dims.index("sequence")] //= self._plan.degrees.tensor
        return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=crossing.requires_grad)

    def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Give the tensors that cross the cut, in the plan's order, for the next forward."""
        self._received = tensors

    def forward(self) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Crossing tensors for the next stage, or the scaled loss on the last one."""
        micro_batch = self._queue.popleft()
        self._calls.clear()
        exchange = self._exchange = _Exchange(
            arrived={
                crossing.producer: self._arrived(crossing, tensor)
                for crossing, tensor in zip(self.incoming, self._received, strict=True)
            },
            wanted=tuple(crossing.producer for crossing in self.outgoing),
            shapes={producer: like.shape for producer, like in self._tensors.items()},
        )
        self._received = ()
        try:
            with self._tokens(), self._autocast:
                with self._producers:
                    output = self.model(*micro_batch.args, **micro_batch.kwargs)
                loss = self._loss_of(output, micro_batch.batch) if self.is_last else None
        except _CompleteError:
            return self._checked(exchange)
        finally:
            self._exchange = _NOTHING
        exchange.check_all_seen()
        if loss is None:
            missing = next(p for p in exchange.wanted if p not in exchange.made)
            raise RuntimeError(f"stage {self.stage} ran to its end without making {_words(missing)}: {_STALE}")
        self.losses.append(loss.detach())
        return loss * micro_batch.scale

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
        return Producers(self.model, self._plan.model.layer_modules, replace=self._replace, only=crossing)

    def _replace(self, producer: Producer, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange.replace(producer, tensor)

    @cached_property
    def fsdp_units(self) -> list[tuple[FSDPModule, bool]]:
        """FSDP modules in the order of their forward (what is inside of another one before it), each with whether it
        gives parameters back (not the root). To be asked for once the stage is sharded."""
        modules: list[tuple[nn.Module, bool]] = [
            (module, layer.reshard)
            for layer in self._plan.stages[self.stage].layers
            for name in layer.modules
            for module in reversed(list(self.model.get_submodule(name).modules()))
        ]
        inner = {module for module, _ in modules}
        modules += [(module, False) for module in self.modules() if module not in inner]
        return [(module, reshard) for module, reshard in modules if isinstance(module, FSDPModule)]

    def _stub(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call = self._calls[name]
        self._calls[name] += 1
        if (name, call) not in self._stubs:
            raise RuntimeError(f"module {name} is called more often than when the stage was set up: {_STALE}")
        return self._stubs[name, call].output()

    def _checked(self, exchange: "_Exchange") -> tuple[torch.Tensor, ...]:
        exchange.check_all_seen()
        outputs = tuple(exchange.made[producer].contiguous() for producer in exchange.wanted)
        if self._plan.schedule in ZERO_BUBBLE:  # torch detaches what it sent in place, which no view can be
            outputs = tuple(solid(output) for output in outputs)
        for crossing, output in zip(self.outgoing, outputs, strict=True):
            like = self.on_wire(crossing)
            if output.shape != like.shape or output.dtype != like.dtype:
                raise RuntimeError(
                    f"stage {self.stage} made {_words(crossing.producer)} as {output.dtype} of {tuple(output.shape)}, "
                    f"but {like.dtype} of {tuple(like.shape)} was expected: {_STALE}"
                )
        return outputs


_SCALAR = torch.empty((), device="meta")

_STALE = "the model is not the one the plan was made for; make the plan again"


class Chunks(nn.Module):
    """Several stages of one rank, in the plan's order of its chunks; parameters and buffers keep the model's names."""

    def __init__(self, stages: Sequence[StageModule]) -> None:
        super().__init__()
        for i, stage in enumerate(stages):
            self.add_module(str(i), stage)

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
        """What the stages' own hold, by name in the model."""
        return {name: value for stage in self.stages for name, value in stage.model.state_dict(*args, **kwargs).items()}


def stages_in(module: nn.Module) -> list[StageModule]:
    """The stages of a rank's module: its own, those of its chunks, or none where there is no pipeline."""
    if isinstance(module, Chunks):
        return module.stages
    return [module] if isinstance(module, StageModule) else []


class PipelineRunner:
    """Runs the micro-batches of a step through this rank's stages, forward and backward, by the plan's schedule.

    stages: StageModules in the order of the rank's chunks, or what fully_shard made of them.
    mesh: has the plan's axis "pipeline"; torch sorts the ranks of its group, whatever their order in the pipeline.
    Gradients that fully_shard reduces are reduced as the plan's gradient_sync says: after the last micro-batch, or
    after each.
    """

    def __init__(self, stages: Sequence[StageModule], plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
        self._plan = plan
        self._stages = list(stages)
        self._group = mesh.get_group("pipeline")
        processes = mesh["pipeline"].mesh.tolist()
        self._group_ranks = [sorted(processes).index(process) for process in processes]
        self._device = device
        self._splits = plan.schedule in ZERO_BUBBLE
        self._schedule: Any = None

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, scales: Sequence[float] | None = None
    ) -> list[torch.Tensor]:
        """Losses of the micro-batches on the rank of the last stage, [] elsewhere; gradients are added to the
        parameters'.

        args, kwargs: the model's inputs for all micro-batches of this data rank, the same on every stage.
        batch: the same, as the loss function takes it.
        scales: weight of each micro-batch's loss in the gradient; 1 / num_microbatches each, if not given.
        """
        count = self._plan.num_microbatches
        parts = split_micro_batches((args, kwargs, batch), count, self._plan.micro_batch * count)
        weights = scales if scales is not None else [1 / count] * count
        micro_batches = [
            MicroBatch(args, kwargs, batch, scale) for (args, kwargs, batch), scale in zip(parts, weights, strict=True)
        ]
        for stage in self._stages:
            stage.begin(micro_batches, self._device)
        if self._schedule is None:
            self._schedule = self._make_schedule()
        last = next((stage for stage in self._stages if stage.is_last), None)
        self._schedule.step(target=None if last is None else torch.zeros(count), return_outputs=False)
        for stage in self._stages:
            for unit, _ in stage.fsdp_units:
                unit.reshard()  # a stage whose outputs want no gradient has had no backward to do it
        return [] if last is None else last.losses

    def _make_schedule(self) -> Any:
        plan, stages = self._plan, [self._torch_stage(stage) for stage in self._stages]
        count, ranks = plan.num_microbatches, plan.degrees.pipeline
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
            after_weights=partial(self._after_weights, module),
        )

    def _before_backward(self, stage: StageModule, last: bool) -> None:
        """Kept parameters stay gathered until gradients are reduced, which weights to be done later put off."""
        now = not self._splits and (last or self._plan.gradient_sync == "every")
        _set_sync(stage, reduce=now, release=now)
        if self._splits and stage.stage > 0:
            self._before_weights(stage)

    def _before_weights(self, stage: StageModule) -> None:
        """torch does a backward for weights past fully_shard's hooks, which would gather parameters; and the parameters
        that it looks for beforehand are the gathered ones."""
        for unit, _ in stage.fsdp_units:
            unit.unshard()

    def _after_weights(self, stage: StageModule, last: bool) -> None:
        """And which would reduce gradients."""
        if isinstance(stage, FSDPModule):
            _set_sync(stage, reduce=last or self._plan.gradient_sync == "every", release=last)
            reduce_gradients(stage)


def _set_sync(stage: StageModule, reduce: bool, release: bool) -> None:
    """Whether a backward reduces gradients, and gives back those parameters, too, that the plan keeps."""
    for module, gives_back in stage.fsdp_units:
        module.set_requires_gradient_sync(reduce, recurse=False)
        module.set_is_last_backward(reduce)
        module.set_reshard_after_backward(release or gives_back, recurse=False)


def crossing_into(plan: Plan, stage: int) -> tuple[CrossingTensor, ...]:
    """Tensors that cross the cut before a stage, in the plan's order; none before the first and after the last."""
    if stage in (0, len(plan.stages)):
        return ()
    first = sum(len(s.layers) for s in plan.stages[:stage])
    return tuple(t for t in plan.model.tensors if t.made_by < first <= t.last_used_by)


def parameters_of_stages(model: nn.Module, plan: Plan) -> list[set[str]]:
    """[stage] -> full names of the parameters it owns; those that no layer reads go with the module they are in."""
    stages = [{name for layer in stage.layers for name in layer.parameters} for stage in plan.stages]
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name in names for names in stages):
            stages[_stage_around(name, plan)].add(name)
    return stages


def check_partition(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError unless the stages' parameters are together the model's, and none is on two stages."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stages = parameters_of_stages(model, plan)
    unknown = sorted(set().union(*stages) - names)
    if unknown:
        raise ValueError(f"the plan names the parameter {unknown[0]}, which the model does not have: {_STALE}")
    for first, own in enumerate(stages):
        for second in range(first + 1, len(stages)):
            shared = sorted(own & stages[second])
            if shared:
                raise ValueError(
                    f"{shared[0]} is used by layers on the stages {first} and {second}; layers that share a module "
                    "must be on one stage"
                )
    modules = Counter(name for stage in plan.stages for name in {m for layer in stage.layers for m in layer.modules})
    twice = [name for name, count in modules.items() if count > 1]
    if twice:
        raise ValueError(f"module {twice[0]} runs on {modules[twice[0]]} stages; its layers must be on one")


def split_micro_batches(tree: Any, count: int, samples: int) -> list[Any]:
    """`count` equal parts of every tensor whose first dim is `samples`; everything else is in every part.

    Raises ValueError when no tensor has that many samples.
    """
    leaves, spec = tree_flatten(tree)
    batched = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples for leaf in leaves]
    if not any(batched):
        sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0})
        raise ValueError(
            f"this rank's batch must hold {samples} samples (micro_batch x num_microbatches), found tensors of "
            f"{', '.join(map(str, sizes)) or 'no'} samples"
        )
    size = samples // count
    return [
        tree_unflatten(
            [leaf[i * size : (i + 1) * size] if cut else leaf for leaf, cut in zip(leaves, batched, strict=True)], spec
        )
        for i in range(count)
    ]


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned that computes its own: .loss, ["loss"], or the first single number."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad:
            return leaf.reshape(())
    raise ValueError("the module returned no loss; give a loss(output, batch), or targets in the batch")


def _own_copy(micro_batch: MicroBatch) -> MicroBatch:
    """With tensors of its own: all micro-batches are parts of one batch, and writing into one would tell autograd that
    the others have changed, too. What inputs and targets share they go on sharing."""
    copies: dict[Any, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copies.setdefault((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype), leaf.clone())

    args, kwargs, batch = tree_map(copied, (micro_batch.args, micro_batch.kwargs, micro_batch.batch))
    return replace(micro_batch, args=args, kwargs=kwargs, batch=batch)


class _CompleteError(Exception):
    """All that the next stage needs has been produced."""


class _Exchange:
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
                    f"{_STALE}"
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
                raise RuntimeError(f"{_words(producer)} arrived, which the model never made: {_STALE}")


_NOTHING = _Exchange({}, (), {})


@dataclass(frozen=True)
class _Like:
    """What a tensor of the whole model is like; written: it is written into after it was made. mark: which tokens it
    holds, where ranks hold parts of a sequence."""

    shape: torch.Size
    dtype: torch.dtype
    written: bool
    mark: Mark | None = None

    def placeholder(self, device: torch.device) -> torch.Tensor:
        """Zeros; without memory unless they will be written into."""
        made = torch.zeros(self.shape if self.written else (), dtype=self.dtype, device=device)
        return set_mark(made if self.written else made.expand(self.shape), self.mark)


@dataclass(frozen=True)
class _Stub:
    """What a foreign module returns instead of computing."""

    leaves: tuple[Any, ...]
    tree: TreeSpec
    device: torch.device

    def output(self) -> Any:
        """Placeholders in the structure of the module's own output."""
        made = [leaf.placeholder(self.device) if isinstance(leaf, _Like) else leaf for leaf in self.leaves]
        return tree_unflatten(made, self.tree)


class _Rehearsal:
    """One forward of the whole model on fake tensors: what other stages' modules return, and what crosses the cuts."""

    def __init__(self, model: nn.Module, plan: Plan, foreign: tuple[str, ...]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._layer_modules = plan.model.layer_modules
        self._expert_modules = plan.model.expert_modules
        self._foreign = foreign
        with torch.device("meta"):
            self._model = _copied(model, lambda tensor: torch.empty_like(tensor, device="meta"))

    def run(
        self,
        micro_batch: MicroBatch,
        crossing: set[Producer],
        device: torch.device,
        autocast: AbstractContextManager[Any],
        bf16_layers: bool,
        context: ContextParallel | None,
    ) -> tuple[dict[tuple[str, int], _Stub], dict[Producer, _Like], bool]:
        """(stubs by module and call, crossing tensors, whether the model writes into its batch).

        bf16_layers: as under fully_shard's mixed precision, parameters and what enters a layer module are bfloat16.
        context: what this rank holds of the sequences, if not all.
        """
        try:
            with _without_log("torch._subclasses.fake_tensor"):
                seen = self._run(micro_batch, crossing, device, autocast, bf16_layers, context)
        except (RuntimeError, ValueError, TypeError):
            # Some operators exist on fake CPU tensors in bfloat16 only (grouped_mm), so the profiler runs in it, too.
            seen = self._run(micro_batch, crossing, device, nullcontext(), True, context)
            seen = seen.recast(torch.bfloat16, torch.bfloat16 if bf16_layers else torch.float32)
        stubs = {key: _Stub(leaves, tree, device) for key, (leaves, tree) in seen.outputs.items()}
        return stubs, seen.tensors, seen.writes_batch

    def _run(
        self,
        micro_batch: MicroBatch,
        crossing: set[Producer],
        device: torch.device,
        autocast: AbstractContextManager[Any],
        bf16_layers: bool,
        context: ContextParallel | None,
    ) -> "_Seen":
        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            cast_too = bf16_layers and isinstance(leaf, nn.Parameter)
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            return cast(made) if cast_too else made

        def cast(leaf: Any) -> Any:
            return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        notes = _Notes(crossing)
        with self._mode, torch.no_grad():
            model = _copied(self._model, fake)
            for name in self._layer_modules:
                if bf16_layers:
                    model.get_submodule(name).register_forward_pre_hook(
                        lambda module, args, kwargs: tree_map(cast, (args, kwargs)), with_kwargs=True
                    )
            for name in self._foreign:
                model.get_submodule(name).register_forward_hook(partial(notes.output, name))
            args, kwargs = tree_map(fake, (micro_batch.args, micro_batch.kwargs))
            tokens: AbstractContextManager[Any] = nullcontext()
            if context is not None:
                context.leave_alone(model, self._expert_modules)
                tokens = context.rehearsal()
            with tokens, autocast, Producers(model, self._layer_modules, on_produced=notes.tensor):
                model(*args, **kwargs)
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return replace(notes.seen(), writes_batch=any(leaf._version > 0 for leaf in given))


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Torch logs a traceback for an operator without a fake version; here it is no error yet."""
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@dataclass(frozen=True)
class _Seen:
    """What a rehearsal showed."""

    outputs: dict[tuple[str, int], tuple[tuple[Any, ...], TreeSpec]]
    tensors: dict[Producer, _Like]
    writes_batch: bool = False

    def recast(self, found: torch.dtype, instead: torch.dtype) -> "_Seen":
        """The same with another dtype in place of one."""

        def recast(leaf: Any) -> Any:
            return replace(leaf, dtype=instead) if isinstance(leaf, _Like) and leaf.dtype == found else leaf

        return replace(
            self,
            outputs={key: (tuple(map(recast, leaves)), tree) for key, (leaves, tree) in self.outputs.items()},
            tensors={producer: recast(like) for producer, like in self.tensors.items()},
        )


class _Notes:
    """Collects a rehearsal's tensors, with the version they had when they were made."""

    def __init__(self, crossing: set[Producer]) -> None:
        self._crossing = crossing
        self._calls: Counter[str] = Counter()
        self._outputs: dict[tuple[str, int], tuple[list[Any], list[int], TreeSpec]] = {}
        self._tensors: dict[Producer, tuple[torch.Tensor, int]] = {}

    def output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """A foreign module has returned."""
        leaves, tree = tree_flatten(output)
        versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        self._outputs[name, self._calls[name]] = (leaves, versions, tree)
        self._calls[name] += 1

    def tensor(self, producer: Producer, tensor: torch.Tensor) -> None:
        """A tensor has been produced."""
        if producer in self._crossing:
            self._tensors[producer] = (tensor, tensor._version)

    def seen(self) -> _Seen:
        """What was collected, at the end of the run."""

        def like(leaf: Any, version: int) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return _Like(leaf.shape, leaf.dtype, leaf._version != version, mark_of(leaf))

        return _Seen(
            {key: (tuple(map(like, leaves, made)), tree) for key, (leaves, made, tree) in self._outputs.items()},
            {producer: like(*made) for producer, made in self._tensors.items()},
        )


def _copied(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy whose tensors are made anew; ties stay."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, module.__dict__):
            for value in tensors.values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    made = make(value)
                    is_parameter = isinstance(value, nn.Parameter)
                    memo[id(value)] = nn.Parameter(made, value.requires_grad) if is_parameter else made
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


class _Placeholders:
    """Attributes that stand where parameters and buffers of other stages were; they take no memory."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []

    def put(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Take the parameter or buffer `name` out of a module, and leave something of its shape."""
        self._places.append((module, name, torch.empty_like(tensor, device="meta", requires_grad=False)))
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.__dict__[name] = self._places[-1][2]

    def move(self, device: torch.device) -> None:
        """Make them on a device."""
        for module, name, like in self._places:
            module.__dict__[name] = torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)

    def answer_for(self, module: nn.Module) -> None:
        """Let a module that lost all its parameters still tell its dtype and device, as models ask themselves."""
        names = {place: name for place, name, _ in self._places}
        inside = next(m for m in module.modules() if m in names)
        module.__dict__["parameters"] = lambda recurse=True: iter([inside.__dict__[names[inside]]])


def _strip(model: nn.Module, own: set[str], foreign: tuple[str, ...]) -> _Placeholders:
    """Take everything out of the model that belongs to other stages."""
    placeholders = _Placeholders()
    had_parameters = [module for module in model.modules() if next(module.parameters(), None) is not None]
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (f"{prefix}.{name}" if prefix else name) not in own:
                placeholders.put(module, name, parameter)
        if any(prefix == f or prefix.startswith(f + ".") for f in foreign):
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    placeholders.put(module, name, buffer)
    for module in had_parameters:
        if next(module.parameters(), None) is None:
            placeholders.answer_for(module)
    return placeholders


class _Hidden(nn.Module):
    """Keeps torch's pipeline stage from driving FSDP: it knows neither gradient_sync nor reshard per layer."""

    def __init__(self, module: StageModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *received: torch.Tensor) -> Any:
        """Run the stage."""
        self.module.receive(received)
        return self.module()


def _stage_around(name: str, plan: Plan) -> int:
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if any(name.startswith(module + ".") for module in layer.modules):
                return index
    return 0


def _first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The stage's output is its loss already."""
    return output


def _words(producer: Producer) -> str:
    if producer.kind == "module":
        return f"output {producer.leaf} of call {producer.call} of module {producer.name}"
    return f"result {producer.leaf} of call {producer.call} of {producer.name} between the layers"
