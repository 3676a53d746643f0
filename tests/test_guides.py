"""Plans are never more than 1% slower than what the guides of frameworks and the rules of thumb lead to."""

import time

import pytest

from meshwright.planner.answers.guidance import named_rules, rules_of_thumb
from meshwright.planner.answers.search import search
from meshwright.planner.answers.why_not import followed
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.zoo import zoo_profile

MOST_SLOWER = 1.01

SECONDS = 60.0


@pytest.mark.parametrize(
    ("name", "device", "gpus", "batch"),
    [
        ("mlp.py", "a100-40gb", 2, 64),
        pytest.param("gpt.py", "h100-80gb", 8, 64, marks=pytest.mark.slow),
        pytest.param("resnet50.py", "a100-40gb", 16, 512, marks=pytest.mark.slow),
        pytest.param("unet.py", "rtx-4090", 4, 64, marks=pytest.mark.slow),
        pytest.param("vit_large", "a100-40gb", 16, 256, marks=pytest.mark.slow),
        pytest.param("lstm.py", "v100-32gb", 4, 64, marks=pytest.mark.slow),
        pytest.param("t5_small", "v100-32gb", 8, 64, marks=pytest.mark.slow),
        pytest.param("dlrm.py", "a100-80gb", 8, 4096, marks=pytest.mark.slow),
        pytest.param("whisper_large_v3", "a100-40gb", 16, 256, marks=pytest.mark.slow),
        pytest.param("dit_xl2.py", "h100-80gb", 32, 512, marks=pytest.mark.slow),
        pytest.param("llama3_8b", "h100-80gb", 8, 128, marks=pytest.mark.slow),
        pytest.param("mixtral_8x7b", "h100-80gb", 64, 512, marks=pytest.mark.slow),
    ],
)
def test_no_guide_and_no_rule_of_thumb_is_faster_by_more_than_a_percent(
    name: str, device: str, gpus: int, batch: int
) -> None:
    profile, machine = zoo_profile(name), cluster_of(load_device(device), gpus)
    training = TrainingSpec(global_batch=batch, seq_len=profile.seq_len)
    explorer = Explorer(profile, machine, training)
    rules = (*named_rules(machine, profile), *rules_of_thumb(machine, training))

    plan = search(profile, machine, training, time_limit_s=SECONDS)

    led_to = {rule.name: followed(explorer, rule, time.monotonic() + SECONDS).estimate for rule in rules}
    times_s = {rule: found.step_time_s for rule, found in led_to.items() if found is not None}
    assert times_s
    assert plan.estimate.step_time_s <= MOST_SLOWER * min(times_s.values()), times_s
