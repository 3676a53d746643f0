"""Whatever the planner may emit runs, and gives the numbers of one process: random legal plans of small models.

`pytest -m slow` has more of them, `pytest -m sweep tests/test_random_plans.py` many more.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from meshwright.planner.answers.check import check
from meshwright.planner.cost.chain import Chain
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.space import Space
from support.small_models import GLOBAL_BATCH, MAKERS, small_profile, verified
from support.synthetic import cluster

BF16_TOLERANCE = 0.05
"""Of loss and gradient norm, where a plan computes in bf16 and the one process in fp32."""

STATEFUL = ("spectral norm",)
"""Each forward changes what the next one computes, so data ranks that share a batch cannot agree with one process."""

SEEDS = (*range(10), 37, 110)
"""37: T5 in bf16, a zero-bubble schedule and one micro-batch, whose dtypes were mixed; 110: a stage that makes one of
two tensors which its first unit of fully_shard reads, whose gradients were left out."""
SWEEP = [seed for seed in range(210) if seed not in SEEDS]


@dataclass(frozen=True)
class Sample:
    """A plan for one of the small models."""

    model: str
    plan: Plan

    def __str__(self) -> str:
        stages = " | ".join(
            " ".join("rn"[o.recompute == "none"] + "kg"[o.reshard] for o in s.layers) for s in self.plan.stages
        )
        return f"{self.model}, {self.plan.training.precision}: {shape_of(self.plan)}; {stages}"


def sample(seed: int) -> Sample:
    """A random plan that the planner's space holds. Models take turns, so that a few samples meet many of them."""
    names = [name for name in sorted(MAKERS) if name not in STATEFUL]
    return sample_of(names[seed * 7 % len(names)], seed)


def sample_of(model: str, seed: int) -> Sample:
    """A random plan for one model."""
    draw = random.Random(seed)
    profile = small_profile(model)
    num_devices = draw.choice((2, 2, 4, 4, 8))
    hosts = draw.choice((1, 1, 2))
    machines = cluster(hosts, num_devices // hosts)
    precision = draw.choice(("fp32", "fp32", "bf16"))
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision=precision)
    space = Space(profile, machines, training, Pins())
    families = list(space.families())
    degrees = draw.choice(sorted({(f.tensor, f.pipeline, f.schedule) for f in families}))
    family = draw.choice([f for f in families if (f.tensor, f.pipeline, f.schedule) == degrees])
    shape = draw.choice(list(space.shapes(family)))
    costs = CostModel(profile, machines, training)
    stages = _stages(draw, costs, shape)
    if stages is None:  # so many stages do not fit between the places where none may end
        return sample_of(model, seed + 1_000)
    return Sample(model, make_plan(profile, machines, training, shape, stages))


def _stages(draw: random.Random, costs: CostModel, shape: Shape) -> list[list[LayerOption]] | None:
    chain = Chain(costs)
    places = chain.places[1:-1]
    num_stages = shape.pipeline * shape.virtual_stages
    if len(places) < num_stages - 1:
        return None
    ends = [0, *sorted(draw.sample(places, num_stages - 1)), chain.num_layers]
    recompute: Recompute | None = "none" if shape.schedule in ZERO_BUBBLE else None
    stages = []
    for first, last in pairwise(ends):
        stage: list[LayerOption] = []
        for run in chain.runs:
            layers = range(max(first, run.start), min(last, run.start + run.length))
            options = [draw.choice(costs.options(costs.kinds[run.start], shape, recompute)) for _ in layers]
            stage += sorted(options, key=lambda option: option.recompute != "full")
        stages.append(stage)
    return stages


def complaints(seed: int) -> list[str]:
    """What is wrong with a sample; empty if nothing is."""
    found = sample(seed)
    violated = check(found.plan, small_profile(found.model))
    if violated:
        return [str(found), *violated]
    report = verified(found.model, found.plan, str(found))
    if found.plan.training.precision == "fp32":
        return [] if report.ok else [*report.lines, report.detail]
    worst = max((report.largest[kind].relative for kind in ("loss", "gradient norm") if report.largest), default=1.0)
    return [] if report.failure is None and worst < BF16_TOLERANCE else [*report.lines, report.detail]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_gives_the_numbers_of_one_process(seed: int) -> None:
    assert complaints(seed) == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SWEEP)
def test_a_random_plan_of_the_sweep_gives_the_numbers_of_one_process(seed: int) -> None:
    assert complaints(seed) == []
