"""Questions to the planner about a mixture of experts, which random instances do not hold."""

from benchmarks.planning_time.instances import Instance
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.exported import PROFILE
from support.synthetic import with_experts


def mixture_on(dispatch_s: float, software: str, pins: Pins) -> Instance:
    """Eight blocks with eight experts each, in bf16, on 4 devices. dispatch_s: what a host takes for one operator."""
    embedding, block, head = PROFILE.classes
    profile = PROFILE.model_copy(update={"classes": (embedding, with_experts(block, 8), head)})
    device = load_device("h100-80gb").model_copy(update={"dispatch": dispatch_s})
    training = TrainingSpec(global_batch=8, seq_len=1024, precision="bf16", software=software)
    return Instance(0, profile, cluster_of(device, 4, 2), training, pins)
