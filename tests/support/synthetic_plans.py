"""Plans of models made of plain numbers."""

from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from support.synthetic import cluster, layer_class, profile


def plan_by(software: str, num_microbatches: int = 1, tensor: int = 1) -> Plan:
    """Four equal blocks on one device, or cut by tensor parallelism, under a training stack."""
    model = profile([layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6, heads=8)], [0] * 4)
    shape = Shape(1, 1, tensor, 1, micro_batch=1, num_microbatches=num_microbatches)
    training = TrainingSpec(global_batch=num_microbatches, seq_len=64, software=software)
    return make_plan(model, cluster(per_host=tensor), training, shape, [[LayerOption()] * 4])


def plan_on(hosts: int, per_host: int) -> Plan:
    """Tensor parallel inside a host, replicas across."""
    model = profile([layer_class("block", 1e12, 10, 1e6, 1e6, heads=8)], [0])
    shape = Shape(hosts, 1, per_host, 1, micro_batch=1, num_microbatches=1)
    training = TrainingSpec(global_batch=hosts, seq_len=64)
    return make_plan(model, cluster(hosts, per_host), training, shape, [[LayerOption()]])
