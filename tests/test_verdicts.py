"""What became of a set-up, as data: kinds and numbers decide, words are for people."""

from dataclasses import replace

import pytest

from meshwright.planner.answers.check import check, violations
from meshwright.planner.answers.explain import compared, does_not_fit, reason
from meshwright.planner.answers.verdict import FITS, THE_PLAN, Verdict, VerdictKind, nearest, not_legal
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from support.cli import small_profile

SHARDED = Shape(1, 2, 1, 1, 4, 4, gradient_sync="every", reshard=True)


def planned(shape: Shape, memory_share: float = 1.0) -> Plan:
    """A plan of the small model on two GPUs with a share of their memory."""
    model = small_profile()
    device = load_device("h100-80gb")
    cluster: ClusterSpec = cluster_of(device.model_copy(update={"memory": device.memory * memory_share}), 2)
    options = [[LayerOption("none", shape.reshard) for _ in model.layers]]
    return make_plan(model, cluster, TrainingSpec(global_batch=32, seq_len=model.seq_len), shape, options)


@pytest.mark.parametrize(
    ("ratio", "kind", "words"),
    [
        (1.0, VerdictKind.AS_FAST, "as fast as the plan"),
        (1.1, VerdictKind.SLOWER, "10.0% slower: "),
        (2.5, VerdictKind.SLOWER, "2.5 times as long: "),
        (0.9, VerdictKind.FASTER, "10.0% faster, but excluded by --pin"),
    ],
)
def test_a_step_beside_the_plan_has_a_kind_and_a_ratio(ratio: float, kind: VerdictKind, words: str) -> None:
    best = estimate(planned(SHARDED), small_profile())

    other = best.model_copy(update={"step_time_s": ratio * best.step_time_s})
    verdict = compared(other, best, "excluded by --pin")

    assert verdict.kind is kind
    assert verdict.ratio == pytest.approx(ratio - 1)
    assert str(verdict).startswith(words)


def test_what_is_over_its_budget_says_by_how_much() -> None:
    plan = planned(SHARDED, memory_share=1e-4)
    found = estimate(plan, small_profile())

    (violated,) = violations(plan, small_profile())

    assert violated == does_not_fit(plan, found)
    assert (violated.kind, violated.stage) == (VerdictKind.DOES_NOT_FIT, 0)
    assert violated.over_bytes == found.memory[0].device_bytes - found.memory[0].budget_bytes
    assert check(plan, small_profile()) == [f"does not fit: {violated.detail}"]


def test_a_broken_limit_is_illegal_whatever_it_says() -> None:
    plan = planned(SHARDED)
    broken = plan.model_copy(update={"micro_batch": plan.micro_batch + 1})

    (violated,) = violations(broken)

    assert violated.kind is VerdictKind.ILLEGAL
    assert check(broken) == [violated.detail]
    assert str(violated) == f"not legal: {violated.detail}"


def test_of_attempts_that_failed_the_first_that_is_legal_counts() -> None:
    attempts = [not_legal("no"), Verdict(VerdictKind.DOES_NOT_FIT, "a"), Verdict(VerdictKind.DOES_NOT_FIT, "b")]

    assert nearest(attempts).detail == "a"
    assert nearest(attempts[:1]).detail == "no"


def test_a_note_follows_the_words_and_changes_nothing_else() -> None:
    assert str(FITS.noted(" (priced, not run yet)")) == "fits (priced, not run yet)"
    assert replace(THE_PLAN.noted("; so"), note="") == THE_PLAN


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        (
            Verdict(VerdictKind.DOES_NOT_FIT, "every GPU needs too much"),
            "replicas (DDP) are out: every GPU needs too much",
        ),
        (
            Verdict(VerdictKind.SLOWER, "1 ms more compute", 0.1),
            "replicas (DDP) would be 10.0% slower: 1 ms more compute",
        ),
        (
            Verdict(VerdictKind.SLOWER, "1 s more compute", 2.0),
            "replicas (DDP) would take 3.0 times as long: 1 s more compute",
        ),
        (Verdict(VerdictKind.FASTER, "that is slower elsewhere", -0.1), "sharding the model state costs no time here"),
    ],
)
def test_why_state_is_sharded_hangs_on_what_became_of_replicas(replicas: Verdict, words: str) -> None:
    plan = planned(SHARDED)

    assert words in reason(plan, estimate(plan, small_profile()), replicas)
