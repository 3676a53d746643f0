"""The one evaluator: (Plan, ModelProfile) -> Estimate of step time, memory by stage and item, and traffic."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from ...profiler.document import Frozen
from ...profiler.machine.units import format_bytes, format_count, format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..plan.display import Shown
from ..plan.document import GroupAxis, LayerPlan, Plan, Recompute
from ..plan.making import shape_of
from ..plan.schedules import is_chunked, rank_and_chunk, stage_of
from ..plan.shape import LayerOption, Shape
from .chain import Chain
from .comm_cost import CollectiveKind
from .kept import kept
from .layer_cost import CostModel
from .memory_cost import state_bytes
from .priced_layer import LayerCost
from .simulate import simulated_step_s
from .stage_cost import StageCost, budget_bytes, closed_form_s, combine, on_one_rank, outside_bytes
from .stage_models import peak_flops_per_s, stage_models
from .traffic import add_layers, rank_tallies

MFU_CONVENTION = (
    "model FLOPs of forward and backward as traced, causal attention at half, recompute not counted, "
    "over the dense peak"
)


class StageMemory(Frozen):
    """Peak memory of one rank of a stage, in bytes."""

    items: dict[str, float]
    allocated_bytes: float = Field(description="what the allocator has handed out at the peak")
    reserved_bytes: float = Field(description="what it has to hold, fragmentation included")
    max_reserved_bytes: float = Field(
        description="what it holds where memory is to spare: torch.cuda.max_memory_reserved"
    )
    device_bytes: float = Field(description="with context and communicators: what nvidia-smi shows")
    budget_bytes: float
    device: str = Field(default="", description="name of the rank's device, where devices are unequal")

    @property
    def over_bytes(self) -> float:
        """Bytes above the budget; negative where there is room."""
        return self.device_bytes - self.budget_bytes


class AxisTraffic(Frozen):
    """What one rank transfers through one kind of collective on one mesh axis in a step; bytes are those of full
    tensors, not of shards."""

    axis: GroupAxis
    kind: CollectiveKind
    bytes: float
    calls: float


class Estimate(Frozen):
    """Predicted time, memory and traffic of a plan."""

    step_time_s: float = Field(description="event simulation of the schedule")
    closed_form_s: float = Field(
        description="(m - 1) slowest + one pass + slowest end, which scan and ILP minimise; if chunked, the simulation"
    )
    tokens_per_s: float
    samples_per_s: float
    mfu: float
    mfu_convention: str = MFU_CONVENTION
    breakdown: dict[str, float] = Field(description="seconds of the slowest stage's step by cause; adds up to the step")
    stage_forward_s: tuple[float, ...]
    stage_backward_s: tuple[float, ...]
    stage_once_s: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    collectives: tuple[AxisTraffic, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage stays within its budget."""
        return all(stage.over_bytes <= 0 for stage in self.memory)

    @property
    def peak_device_bytes(self) -> float:
        """Peak memory of the fullest GPU, with context and communicators."""
        return max(stage.device_bytes for stage in self.memory)

    def __rich__(self) -> object:
        """A table for rich's print."""
        return self._table().rich()

    def _repr_html_(self) -> str:
        """A table for a notebook's cell."""
        return self._table().html()

    def _table(self) -> Shown:
        """Parts of a step, and memory of the fullest rank."""
        title = (
            f"{format_seconds(self.step_time_s)} a step, {format_count(self.tokens_per_s)} tokens/s, MFU {self.mfu:.1%}"
        )
        fullest = max(self.memory, key=lambda stage: stage.device_bytes / stage.budget_bytes)
        times = [
            (f"time: {name}", format_seconds(seconds), f"{seconds / self.step_time_s:.1%}")
            for name, seconds in self.breakdown.items()
            if seconds > 0
        ]
        sizes = [
            (f"memory: {name}", format_bytes(size), f"{size / fullest.budget_bytes:.1%}")
            for name, size in fullest.items.items()
        ]
        total = (
            "memory: fullest GPU",
            format_bytes(fullest.device_bytes),
            f"{fullest.device_bytes / fullest.budget_bytes:.1%}",
        )
        return Shown(title, ("", "", "of step or budget"), (*times, *sizes, total))


@dataclass(frozen=True)
class _PricedStage:
    cost: StageCost
    layers: tuple[LayerCost, ...]


def estimate(plan: Plan, profile: ModelProfile) -> Estimate:
    """Price a plan. Raises ValueError when the plan is for another model."""
    check_model_of(plan, profile)
    return priced_by(CostModel(profile, plan.cluster, plan.training), plan)


def check_model_of(plan: Plan, profile: ModelProfile) -> None:
    """Raise ValueError when a plan is for another model."""
    if plan.model.fingerprint != profile.fingerprint:
        raise ValueError(
            f"the plan was made for {plan.model.name} ({plan.model.fingerprint[:12]}), this is {profile.name} "
            f"({profile.fingerprint[:12]}); make the plan again"
        )


def priced_by(model: CostModel, plan: Plan) -> Estimate:
    """Price a plan by a cost model that was made for its profile, cluster and job."""
    profile, shape = model.profile, shape_of(plan)
    models = stage_models(model, shape)
    stages = _stages(_options_of(plan), models, shape)
    ranks = _ranks(stages, shape)
    once = [rank.cost.once_s for rank in ranks]
    step_s = _step_s(plan, model, stages, ranks)
    peak = peak_flops_per_s(plan.cluster, plan.training.precision)
    samples_per_s = plan.training.global_batch / step_s
    return Estimate(
        step_time_s=step_s,
        closed_form_s=step_s - model.software.step_s
        if is_chunked(plan.schedule)
        else closed_form_s([rank.cost.microbatch_s for rank in ranks], once, plan.num_microbatches),
        tokens_per_s=samples_per_s * profile.tokens_per_sample,
        samples_per_s=samples_per_s,
        mfu=_model_flops(profile) * samples_per_s / peak,
        breakdown=_breakdown(ranks, plan.num_microbatches, step_s, model.software.step_s),
        stage_forward_s=tuple(rank.cost.forward_s for rank in ranks),
        stage_backward_s=tuple(rank.cost.backward_s for rank in ranks),
        stage_once_s=tuple(once),
        memory=_memory_of(ranks, models, shape),
        collectives=_traffic(ranks, model, shape, plan),
    )


def memory_by(model: CostModel, shape: Shape, stages: Sequence[Sequence[LayerOption]]) -> tuple[StageMemory, ...]:
    """[rank of the pipeline] -> its memory, as `priced_by` gives it for a plan with these options. stages:
    [stage][layer]."""
    models = stage_models(model, shape)
    return _memory_of(_ranks(_stages(stages, models, shape), shape), models, shape)


def step_seconds(plan: Plan, profile: ModelProfile) -> float:
    """Seconds of one step, as `estimate` gives them."""
    model, shape = CostModel(profile, plan.cluster, plan.training), shape_of(plan)
    stages = _stages(_options_of(plan), stage_models(model, shape), shape)
    return _step_s(plan, model, stages, _ranks(stages, shape))


def _step_s(plan: Plan, model: CostModel, stages: list[_PricedStage], ranks: list[_PricedStage]) -> float:
    costs = [stage.cost for stage in stages]
    simulated_s = simulated_step_s(
        plan.schedule,
        [c.forward_s for c in costs],
        [c.backward_s for c in costs],
        [rank.cost.once_s for rank in ranks],
        plan.num_microbatches,
        [c.weight_s for c in costs],
    )
    return simulated_s + model.software.step_s


@kept
def _model_flops(profile: ModelProfile) -> float:
    return profile.flops_per_sample()


def _ranks(stages: list[_PricedStage], shape: Shape) -> list[_PricedStage]:
    """[rank of the pipeline] -> what it holds: its one stage, or all of its stages joined into one."""
    if shape.virtual_stages == 1:
        return stages
    ranks = []
    for rank in range(shape.pipeline):
        chunks = range(shape.virtual_stages)
        held = [stages[stage_of(shape.schedule, rank, chunk, shape.pipeline)] for chunk in chunks]
        layers = tuple(layer for stage in held for layer in stage.layers)
        ranks.append(_PricedStage(on_one_rank([stage.cost for stage in held]), layers))
    return ranks


def _options_of(plan: Plan) -> list[tuple[LayerPlan, ...]]:
    """[stage][layer] -> the plan's choices for it."""
    return [stage.layers for stage in plan.stages]


def _stages(
    options: Sequence[Sequence[LayerOption | LayerPlan]], models: Sequence[CostModel], shape: Shape
) -> list[_PricedStage]:
    """[stage] -> its cost and those of its layers. options: [stage][layer]; models: [pipeline coordinate] -> cost model
    of its devices."""
    model, chain = models[0], Chain(models[0])
    shared, waiting = chain.shared_weights(shape), chain.waiting_bytes(shape)
    ends = np.cumsum([len(stage) for stage in options])
    arrivals = model.arrivals(shape, ends - [len(stage) for stage in options], ends)
    state = state_bytes(shape, model.training)
    priced: dict[tuple[int, int, Recompute, bool, bool, float], LayerCost] = {}
    stages, first = [], 0
    for index, stage in enumerate(options):
        costs: list[LayerCost] = []
        model = models[rank_and_chunk(shape.schedule, index, shape.pipeline)[0]]
        crossings = model.crossings(shape)
        for offset, layer in enumerate(stage):
            kind = model.kinds[first + offset]
            passes = waiting[chain.run_of[first + offset]]
            key = id(model), id(kind), layer.recompute, layer.reshard, layer.offload, passes
            if key not in priced:
                option = LayerOption(layer.recompute, layer.reshard, layer.offload)
                priced[key] = model.cost(kind, shape, option).with_waiting(passes)
            costs.append(priced[key])
        last = first + len(costs)
        here = [(sum(first <= layer < last for layer in layers), layers, elements) for layers, elements in shared]
        tied = sum(elements for count, layers, elements in here if 0 < count < len(layers))
        total = combine(
            _in_order(costs),
            shape.flights(index),
            crossings[first],
            crossings[last],
            arrivals.at(index),
            sum(elements * max(0, count - 1) for count, _, elements in here),
            model.tie_s(tied, shape),
            state,
            model.training,
            model.device,
            shape,
            model.batch_bytes(shape),
            model.buffer_bytes(shape),
        )
        stages.append(_PricedStage(total, tuple(costs)))
        first = last
    return stages


def _in_order(layers: Sequence[LayerCost]) -> list[tuple[LayerCost, int]]:
    """(cost, number of layers) for each row of neighbouring layers that have one cost object."""
    runs = [list(same) for _, same in itertools.groupby(layers, key=id)]
    return [(same[0], len(same)) for same in runs]


def _counted(layers: Sequence[LayerCost]) -> list[tuple[LayerCost, int]]:
    """(cost, number of layers that have this object) for each cost object, in the order in which they first occur."""
    counts: dict[int, int] = {}
    for layer in layers:
        counts[id(layer)] = counts.get(id(layer), 0) + 1
    return [(layer, counts.pop(id(layer))) for layer in layers if id(layer) in counts]


def _memory_of(ranks: Sequence[_PricedStage], models: Sequence[CostModel], shape: Shape) -> tuple[StageMemory, ...]:
    is_mixed = len(models[0].job.kinds) > 1
    return tuple(_memory(rank.cost, shape, model, is_mixed) for rank, model in zip(ranks, models, strict=True))


def _memory(cost: StageCost, shape: Shape, model: CostModel, is_mixed: bool) -> StageMemory:
    """Peak memory of a stage on one rank. is_mixed: devices are unequal, so that each stage names its own."""
    device = model.device
    allocated = cost.allocated_bytes
    reserved = allocated * (1.0 + device.fragmentation)
    outside = outside_bytes(shape, device)
    items = dict(cost.items)
    items["fragmentation"] = reserved - allocated
    items["context"] = outside
    return StageMemory(
        items=items,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        max_reserved_bytes=max(reserved, min(_at_ease_bytes(cost, model), device.memory - outside)),
        device_bytes=reserved + outside,
        budget_bytes=budget_bytes(device, model.training),
        device=device.name if is_mixed else "",
    )


def _at_ease_bytes(cost: StageCost, model: CostModel) -> float:
    """Bytes that torch's allocator has reserved in the end if no lack of memory makes it give blocks back. It keeps
    blocks by stream (PyTorch's notes on CUDA semantics), and fully_shard reduces gradients on a stream of its own:
    these lie beside all that the compute stream has ever held, though most of that is free by then. If segments cannot
    grow, what stays from one step to the next splits the blocks of the largest transient, which is then reserved a
    second time (gpt under FSDP: benchmarks/one_gpu/results/memory.md)."""
    again = cost.items["transient"] if model.software.memory.fixed_segments else 0.0
    return (cost.allocated_bytes + cost.reduced_later + again) * (1.0 + model.device.fragmentation)


_ROUNDING = 1e-9
"""Share of a step below which what is left over by its parts is rounding, and not waiting in the pipeline."""


def _breakdown(stages: list[_PricedStage], num_microbatches: int, step_s: float, fixed_s: float) -> dict[str, float]:
    """Cause -> seconds of a step, on the rank that is busy longest. `pipeline` is the time that it waits for other
    ranks. fixed_s: seconds that the host adds to every step."""
    slowest = max(stages, key=lambda stage: num_microbatches * stage.cost.microbatch_s + stage.cost.once_s)
    layers = slowest.layers
    per_microbatch = {
        "compute": sum(c.forward_s + c.backward_s - c.host_s for c in layers),
        "recompute": sum(c.recompute_s for c in layers),
        "tensor": sum(c.tensor_forward_s + c.tensor_backward_s for c in layers),
        "data": sum(c.data_forward_s + c.data_backward_s for c in layers),
    }
    per_microbatch |= {
        name: seconds
        for name, seconds in {
            "context": sum(c.context_forward_s + c.context_backward_s for c in layers),
            "expert": sum(c.expert_forward_s + c.expert_backward_s for c in layers),
            "offload": sum(c.offload_forward_s + c.offload_backward_s for c in layers),
            "launch": sum(c.host_s for c in layers),
        }.items()
        if seconds
    }
    parts = {name: num_microbatches * seconds for name, seconds in per_microbatch.items()}
    parts["data"] += slowest.cost.once_s - slowest.cost.optimizer_s
    parts["optimizer"] = slowest.cost.optimizer_s
    if fixed_s:
        parts["fixed"] = fixed_s
    left_s = step_s - sum(parts.values())
    parts["pipeline"] = left_s if left_s > _ROUNDING * step_s else 0.0
    return parts


def _traffic(ranks: list[_PricedStage], model: CostModel, shape: Shape, plan: Plan) -> tuple[AxisTraffic, ...]:
    """Traffic for each axis and kind of collective, of the rank that has most of it."""
    most: dict[tuple[GroupAxis, CollectiveKind], tuple[float, float]] = {}
    for rank, total in zip(ranks, rank_tallies(plan, model, shape), strict=True):
        add_layers(total, _counted(rank.layers), plan.num_microbatches)
        for key, value in total.passed.items():
            most[key] = max(most.get(key, (0.0, 0.0)), value)
    return tuple(AxisTraffic(axis=a, kind=k, bytes=b, calls=c) for (a, k), (b, c) in sorted(most.items()) if b)


def priced_stages(plan: Plan, profile: ModelProfile) -> list[tuple[StageCost, tuple[LayerCost, ...]]]:
    """[stage] -> (its cost, the costs of its layers), from which the plan's schedule is simulated."""
    return stages_by(CostModel(profile, plan.cluster, plan.training), plan)


def stages_by(model: CostModel, plan: Plan) -> list[tuple[StageCost, tuple[LayerCost, ...]]]:
    """[stage] -> the same as `priced_stages`, by a cost model that exists already."""
    shape = shape_of(plan)
    return [(stage.cost, stage.layers) for stage in _stages(_options_of(plan), stage_models(model, shape), shape)]
