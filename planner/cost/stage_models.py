"""Which kind of device each stage of a pipeline runs on, and the cost model of that kind."""

from itertools import groupby

from ...profiler.machine.cluster import ClusterSpec
from ..plan.shape import Shape
from .layer_cost import CostModel


def stage_kinds(cluster: ClusterSpec, shape: Shape) -> tuple[int, ...] | None:
    """[pipeline coordinate] -> number of the kind of its devices; None if all devices are equal, or some stage would
    have devices of several kinds."""
    cluster = cluster.in_order(shape.kind_order)
    kinds = cluster.kinds
    if len(kinds) == 1 or shape.pipeline == 1 or shape.stride("pipeline") * shape.pipeline != cluster.num_devices:
        return None
    of_group = [next(k for k, kind in enumerate(kinds) if kind.hosts[0].is_like(group)) for group in cluster.hosts]
    each = zip(of_group, cluster.hosts, strict=True)
    found: list[int] = []
    for kind, run in groupby(each, key=lambda pair: pair[0]):
        stages, rest = divmod(sum(g.count * g.devices_per_host for _, g in run), shape.stride("pipeline"))
        if rest:
            return None
        found += [kind] * stages
    return tuple(found)


def stage_models(model: CostModel, shape: Shape) -> list[CostModel]:
    """[pipeline coordinate] -> cost model of its devices. model: that of the whole cluster."""
    kinds = stage_kinds(model.cluster, shape)
    if kinds is None:
        return [model] * shape.pipeline
    parts = model.cluster.in_order(shape.kind_order).kinds
    models = [CostModel(model.profile, part, model.training, model.cluster) for part in parts]
    return [models[kind] for kind in kinds]


def peak_flops_per_s(cluster: ClusterSpec, precision: str) -> float:
    """FLOP/s of all devices together, at their dense peak."""
    return sum(group.count * group.devices_per_host * group.device.flops[precision] for group in cluster.hosts)
