"""Seconds of a step's communication by mesh axis, whether it is hidden behind compute or not: the clock of a run is
compared with them."""

from ...profiler.model.model_profile import ModelProfile
from ..plan.document import GroupAxis, Plan
from ..plan.making import shape_of
from ..plan.shape import Shape
from .comm_cost import GroupLinks, collective_s
from .estimate import estimate
from .layer_cost import CostModel


def axis_seconds(plan: Plan, profile: ModelProfile) -> dict[GroupAxis, float]:
    """Mesh axis -> seconds that all its collectives take in a step if they run one after the other and never wait for a
    peer; for each kind of collective, of the rank with most of it."""
    model, shape = CostModel(profile, plan.cluster, plan.training), shape_of(plan)
    found: dict[GroupAxis, float] = {}
    for item in estimate(plan, profile).collectives:
        each_s = collective_s(item.kind, item.bytes / item.calls, _links(model, shape, item.axis))
        found[item.axis] = found.get(item.axis, 0.0) + item.calls * each_s
    return found


def _links(model: CostModel, shape: Shape, axis: GroupAxis) -> GroupLinks:
    if axis == "expert":
        return model.links(shape.expert, shape.expert_stride)
    if axis == "data_shard":
        return model.shard_links(shape)
    return model.axis_links(shape, axis)
