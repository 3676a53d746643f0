"""Predicted seconds of the kernels of one rank, and the step of a whole job made of measured kernels and predicted
communication."""

from collections.abc import Mapping

from ...profiler.model.model_profile import ModelProfile
from ..plan.document import Plan
from .estimate import Estimate, priced_stages, stages_by
from .layer_cost import CostModel
from .simulate import simulate


def kernels_s(plan: Plan, profile: ModelProfile, found: Estimate, position: int) -> float:
    """Seconds that the rank at this pipeline coordinate computes in a step: forwards, backwards, recompute, and the
    optimizer (that of the busiest stage). Communication and waiting are left out."""
    return all_kernels_s(CostModel(profile, plan.cluster, plan.training), plan, found)[position]


def all_kernels_s(model: CostModel, plan: Plan, found: Estimate) -> tuple[float, ...]:
    """[pipeline coordinate] -> seconds as `kernels_s` gives them. model: the cost model of the plan's cluster and
    job."""
    stages = stages_by(model, plan)
    kernels = []
    for position in range(plan.degrees.pipeline):
        layers = [layer for stage in plan.stages_of(position) for layer in stages[stage][1]]
        passes_s = sum(layer.forward_s + layer.backward_s + layer.recompute_s for layer in layers)
        kernels.append(plan.num_microbatches * passes_s + found.breakdown["optimizer"])
    return tuple(kernels)


def composed_step_s(plan: Plan, profile: ModelProfile, found: Estimate, ratios: Mapping[int, float]) -> float | None:
    """Seconds of the whole job's step, if on each pipeline coordinate kernels take `ratios` times what is predicted and
    communication takes what is predicted; None if a coordinate has no ratio."""
    if set(ratios) < set(range(plan.degrees.pipeline)):
        return None
    if plan.degrees.pipeline == 1:
        return found.step_time_s + (ratios[0] - 1) * kernels_s(plan, profile, found, 0)
    return found.step_time_s * _passes_s(plan, profile, ratios) / _passes_s(plan, profile, dict.fromkeys(ratios, 1.0))


def _passes_s(plan: Plan, profile: ModelProfile, ratios: Mapping[int, float]) -> float:
    """Seconds that the schedule takes if the compute of every stage takes its ratio times what is predicted."""
    forward, backward, weight = [], [], []
    for stage, (cost, layers) in enumerate(priced_stages(plan, profile)):
        more = ratios[plan.position_of(stage)] - 1.0
        again_s = sum(layer.backward_s + layer.recompute_s for layer in layers)
        forward.append(cost.forward_s + more * sum(layer.forward_s for layer in layers))
        backward.append(cost.backward_s + more * (again_s - cost.weight_s))
        weight.append(cost.weight_s * (1.0 + more))
    ranks = plan.degrees.pipeline
    return max(
        event.end_s for event in simulate(plan.schedule, forward, backward, plan.num_microbatches, weight, ranks)
    )
