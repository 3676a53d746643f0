"""The one evaluator: (Plan, ModelProfile) -> Estimate of step time, memory by stage and item, and traffic."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from ..profiler.model_profile import ModelProfile
from .columns import Chain
from .comm_cost import Collective
from .layer_cost import CostModel, LayerCost
from .memory_cost import state_bytes
from .plan import Axis, Plan
from .simulate import simulated_step_s, stage_of
from .stage_cost import StageCost, budget_bytes, closed_form_s, combine, on_one_rank, outside_bytes
from .strategy import LayerOption, Shape, shape_of

MFU_CONVENTION = (
    "model FLOPs of forward and backward as traced, causal attention at half, recompute not counted, "
    "over the dense peak"
)


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageMemory(_Document):
    """Peak memory of one rank of a stage, in bytes."""

    items: dict[str, float]
    allocated_bytes: float = Field(description="what the allocator has handed out at the peak")
    reserved_bytes: float = Field(description="what it holds, fragmentation included")
    device_bytes: float = Field(description="with context and communicators: what nvidia-smi shows")
    budget_bytes: float

    @property
    def over_bytes(self) -> float:
        """Bytes above the budget; negative where there is room."""
        return self.device_bytes - self.budget_bytes


class AxisTraffic(_Document):
    """What one rank passes to one kind of collective on one mesh axis during a step; full tensors, not shards."""

    axis: Axis
    kind: Collective
    bytes: float
    calls: float


class Estimate(_Document):
    """What a plan is predicted to take and hold."""

    step_time_s: float = Field(description="event simulation of the schedule")
    closed_form_s: float = Field(description="(m - 1) slowest + one pass + slowest end: what the ILP minimises")
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


@dataclass(frozen=True)
class _Stage:
    cost: StageCost
    layers: tuple[LayerCost, ...]
    tie_bytes: float


def estimate(plan: Plan, profile: ModelProfile) -> Estimate:
    """Price a plan. Raises ValueError when the plan is for another model."""
    if plan.model.fingerprint != profile.fingerprint:
        raise ValueError(
            f"the plan was made for {plan.model.name} ({plan.model.fingerprint[:12]}), this is {profile.name} "
            f"({profile.fingerprint[:12]}); make the plan again"
        )
    model = CostModel(profile, plan.cluster, plan.training)
    shape = shape_of(plan)
    stages = _stages(plan, model, shape)
    costs = [stage.cost for stage in stages]
    ranks = _ranks(stages, shape)
    once = [rank.cost.once_s for rank in ranks]
    step_s = simulated_step_s(
        plan.schedule,
        [c.forward_s for c in costs],
        [c.backward_s for c in costs],
        once,
        plan.num_microbatches,
        [c.weight_s for c in costs],
    )
    step_s += model.software.step_s
    peak = plan.cluster.device.flops[plan.training.precision] * plan.cluster.num_devices
    samples_per_s = plan.training.global_batch / step_s
    return Estimate(
        step_time_s=step_s,
        closed_form_s=closed_form_s([rank.cost.microbatch_s for rank in ranks], once, plan.num_microbatches),
        tokens_per_s=samples_per_s * profile.tokens_per_sample,
        samples_per_s=samples_per_s,
        mfu=profile.flops_per_sample() * samples_per_s / peak,
        breakdown=_breakdown(ranks, plan.num_microbatches, step_s),
        stage_forward_s=tuple(rank.cost.forward_s for rank in ranks),
        stage_backward_s=tuple(rank.cost.backward_s for rank in ranks),
        stage_once_s=tuple(once),
        memory=tuple(_memory(rank.cost, shape, model) for rank in ranks),
        collectives=_traffic(ranks, model, shape, plan),
    )


def _ranks(stages: list[_Stage], shape: Shape) -> list[_Stage]:
    """What each rank of the pipeline holds: its one stage, or several as one."""
    if shape.virtual_stages == 1:
        return stages
    ranks = []
    for rank in range(shape.pipeline):
        chunks = range(shape.virtual_stages)
        held = [stages[stage_of(shape.schedule, rank, chunk, shape.pipeline)] for chunk in chunks]
        layers = tuple(layer for stage in held for layer in stage.layers)
        ranks.append(_Stage(on_one_rank([stage.cost for stage in held]), layers, sum(s.tie_bytes for s in held)))
    return ranks


def _stages(plan: Plan, model: CostModel, shape: Shape) -> list[_Stage]:
    shared = Chain(model).shared_weights(shape)
    crossings = model.crossings(shape)
    state = state_bytes(shape, plan.training)
    priced: dict[tuple[object, LayerOption], LayerCost] = {}
    stages, first = [], 0
    for index, stage in enumerate(plan.stages):
        costs: list[LayerCost] = []
        for offset, layer in enumerate(stage.layers):
            key = model.kinds[first + offset], LayerOption(layer.recompute, layer.reshard)
            if key not in priced:
                priced[key] = model.cost(key[0], shape, key[1])
            costs.append(priced[key])
        last = first + len(costs)
        here = [(sum(first <= layer < last for layer in layers), layers, elements) for layers, elements in shared]
        tied = sum(elements for count, layers, elements in here if 0 < count < len(layers))
        total = combine(
            [(cost, 1) for cost in costs],
            shape.in_flight(index),
            crossings[first],
            crossings[last],
            sum(elements * max(0, count - 1) for count, _, elements in here),
            model.tie_s(tied, shape),
            state,
            plan.training,
            model.device,
            shape.data_shard,
        )
        stages.append(_Stage(total, tuple(costs), model.tie_bytes(tied, shape)))
        first = last
    return stages


def _memory(cost: StageCost, shape: Shape, model: CostModel) -> StageMemory:
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
        device_bytes=reserved + outside,
        budget_bytes=budget_bytes(device, model.training),
    )


def _breakdown(stages: list[_Stage], num_microbatches: int, step_s: float) -> dict[str, float]:
    """Where the step goes, on the stage that computes longest; what it waits for others is `pipeline`."""
    slowest = max(stages, key=lambda stage: num_microbatches * stage.cost.microbatch_s + stage.cost.once_s)
    layers = slowest.layers
    per_microbatch = {
        "compute": sum(c.forward_s + c.backward_s for c in layers),
        "recompute": sum(c.recompute_s for c in layers),
        "tensor": sum(c.tensor_forward_s + c.tensor_backward_s for c in layers),
        "data": sum(c.data_forward_s + c.data_backward_s for c in layers),
    }
    parts = {name: num_microbatches * seconds for name, seconds in per_microbatch.items()}
    parts["data"] += slowest.cost.once_s - slowest.cost.optimizer_s
    parts["optimizer"] = slowest.cost.optimizer_s
    parts["pipeline"] = max(0.0, step_s - sum(parts.values()))
    return parts


def _traffic(stages: list[_Stage], model: CostModel, shape: Shape, plan: Plan) -> tuple[AxisTraffic, ...]:
    """Traffic of the rank that passes most, by axis and kind."""
    most: dict[tuple[Axis, Collective], tuple[float, float]] = {}
    for stage in stages:
        total: dict[tuple[Axis, Collective], tuple[float, float]] = {}
        for layer in stage.layers:
            for item in layer.traffic:
                times = item.calls * (1 if item.per_step else plan.num_microbatches)
                num_bytes, calls = total.get((item.axis, item.kind), (0.0, 0.0))
                total[item.axis, item.kind] = num_bytes + item.bytes * times, calls + times
        if stage.tie_bytes:
            total["pipeline", "all_reduce"] = stage.tie_bytes, 1.0
        for key, value in total.items():
            most[key] = max(most.get(key, (0.0, 0.0)), value)
    if shape.pipeline > 1:
        cuts, first = model.crossings(shape), 0
        heaviest = (0.0, 0.0)
        for stage_plan in plan.stages:
            last = first + len(stage_plan.layers)
            ends = [cut.bytes for cut in (cuts[first], cuts[last]) if cut.bytes]
            sent = 2 * plan.num_microbatches
            heaviest = max(heaviest, (sent * sum(ends), float(sent * len(ends))))
            first = last
        most["pipeline", "p2p"] = heaviest
    return tuple(AxisTraffic(axis=a, kind=k, bytes=b, calls=c) for (a, k), (b, c) in sorted(most.items()) if b)
