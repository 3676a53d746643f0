"""Ranks that hold parts of the same sequences train as one process does."""

from itertools import pairwise

import pytest
from small_models import GLOBAL_BATCH, small_profile, verified
from synthetic import cluster

from meshwright.planner.plan import Plan, Recompute
from meshwright.planner.strategy import LayerOption, Shape, can_recompute, make_plan
from meshwright.planner.training import Precision, TrainingSpec


def planned(name: str, shape: Shape, recompute: Recompute = "none", precision: Precision = "fp32") -> Plan:
    """A plan for a small model whose stages hold equally many layers, all of one option."""
    profile = small_profile(name)
    count, num_stages = len(profile.layers), shape.pipeline * shape.virtual_stages
    layers = [
        LayerOption(recompute if can_recompute(profile, layer) else "none", shape.reshard) for layer in profile.layers
    ]
    ends = [round(i * count / num_stages) for i in range(num_stages + 1)]
    stages = [layers[first:last] for first, last in pairwise(ends)]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision=precision, optimizer="adamw")
    return make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, stages)


@pytest.mark.parametrize("replicate", [1, 2])
def test_parameters_sharded_over_context_ranks_train_as_one_process_does(replicate: int) -> None:
    shape = Shape(replicate, 1, 1, 1, micro_batch=4, num_microbatches=4 // replicate, context=2)

    report = verified("gpt", planned("gpt", shape))

    assert report.ok, report.lines
