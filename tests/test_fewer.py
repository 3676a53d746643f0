"""The note on fewer GPUs: what it says is there to be had, and it is silent where it would not be true."""

import pytest

from meshwright.planner.answers.fewer import NEARLY, Fewer, fewer_gpus
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile
from support.synthetic import layer_class, profile

_H100 = load_device("h100-80gb")


def _network(flops: float) -> ModelProfile:
    """Four equal layers of 6 M parameters."""
    return profile([layer_class("linear", flops, 6_000_000, saved=1e4, inputs=1e4)], [0] * 4, crossing=1e4)


def _planned(flops: float, cluster: ClusterSpec, pins: Pins | None = None) -> tuple[SearchResult, Fewer | None]:
    model, training = _network(flops), TrainingSpec(global_batch=64, seq_len=64)
    result = search(model, cluster, training, pins=pins)
    return result, fewer_gpus(result.plan, result.estimate, model, pins or Pins())


def test_where_ranks_mostly_wait_fewer_of_them_nearly_do() -> None:
    result, fewer = _planned(1e6, cluster_of(_H100, 8))

    assert fewer is not None
    assert fewer.num_devices in (1, 2, 4)
    assert fewer.step_time_s <= NEARLY * result.estimate.step_time_s
    there = search(_network(1e6), cluster_of(_H100, fewer.num_devices, 8 if fewer.num_devices == 8 else None),
                   result.plan.training)  # fmt: skip
    assert there.certificate.fastest_s == pytest.approx(fewer.step_time_s, rel=1e-3)
    assert f"{fewer.num_devices} of the 8 GPUs" in str(fewer)
    assert str(fewer).endswith(f"(--gpus {fewer.num_devices} --global-batch 64)")
    of_a_file = cluster_of(_H100, 8).model_copy(update={"name": "cluster"})
    assert str(_planned(1e6, of_a_file)[1]).endswith("less GPU time a sample")


@pytest.mark.slow
def test_where_ranks_mostly_compute_there_is_no_note_and_half_of_them_would_indeed_take_longer() -> None:
    result, fewer = _planned(1e12, cluster_of(_H100, 4))

    assert fewer is None
    there = search(_network(1e12), cluster_of(_H100, 2), result.plan.training)
    assert there.certificate.fastest_s > NEARLY * result.estimate.step_time_s


def test_pinned_degrees_that_need_all_gpus_leave_none_out() -> None:
    assert _planned(1e6, cluster_of(_H100, 8), Pins(data_shard=8))[1] is None


def test_one_gpu_has_no_fewer() -> None:
    assert _planned(1e6, cluster_of(_H100, 1))[1] is None


def test_a_note_says_by_how_much_less_gpu_time_a_sample_takes() -> None:
    assert "12.0% longer, with FSDP 4, and 44% less GPU time" in str(Fewer(4, 8, "FSDP 4", 0.112, 0.12))
    assert "and over 99% less GPU time" in str(Fewer(4, 1024, "DDP 4", 0.0954, -0.046))
    assert "would do as well: 100 ms a step, as long, with DDP 4, and 50% less" in str(Fewer(4, 8, "DDP 4", 0.1, 0.0))
    assert "4 of the 8 GPUs would do as well" in str(Fewer(4, 8, "DDP 4", 0.09, -0.1))
