"""Schedules against torch's own order, the closed forms of equal stages, and the rules that any schedule obeys."""

import itertools
import random
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.planner.cost.simulate import Event, critical_paths, least_step_s, simulate, simulated_step_s
from meshwright.planner.plan.schedules import (
    ZERO_BUBBLE,
    Schedule,
    held_at_peak,
    rank_and_chunk,
    rank_in_flight,
    stage_of,
    table,
)

Pass = tuple[int, str, int]
"""Stage, F or B, micro-batch."""

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}

TORCH_SCHEDULES: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
VIRTUAL = ("interleaved", "zb-h1", "zb-v")
"""Schedules that torch gives several stages of a rank."""

SIMPLE: tuple[Schedule, ...] = ("gpipe", "1f1b")

RANKS_AND_MICROBATCHES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 6, 9, 12, 13)]


# --- torch's order ---------------------------------------------------------------------------------------------------


class RecordingStage:
    """A stage that computes nothing and writes down what torch's schedule asks of it."""

    def __init__(self, num_stages: int, index: int) -> None:
        self.num_stages = num_stages
        self.stage_index = index
        self.is_last = index == num_stages - 1
        self.passes: list[Pass] = []

    def no_transfers(self, microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.passes.append((self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.passes.append((self.stage_index, "B", microbatch))

    def perform_reduce_grad(self, scale: int) -> None:
        """Reduces nothing."""


def run_by_torch(schedule: Schedule, num_ranks: int, num_microbatches: int) -> list[list[Pass]]:
    """[rank] -> passes in the order in which torch's step really runs them."""
    order = []
    for rank in range(num_ranks):
        stage = RecordingStage(num_ranks, rank)
        runner = (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(stage, num_microbatches)  # type: ignore[arg-type]
        runner._initialize_stage = lambda *_: None  # type: ignore[method-assign]
        runner._step_microbatches()
        order.append(stage.passes)
    return order


def drawn_by_torch(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int = 1) -> list[list[Pass]]:
    """[rank] -> passes in torch's `pipeline_order`, waiting and reductions left out."""
    indices = [0, 2 * num_ranks - 1] if schedule == "zb-v" else [num_ranks * chunk for chunk in range(virtual)]
    stages = [
        SimpleNamespace(num_stages=num_ranks * virtual, group_size=num_ranks, group_rank=0, stage_index=i, submod=None)
        for i in indices
    ]
    kind = TORCH_SCHEDULES[schedule]
    runner = kind(stages if schedule in VIRTUAL else stages[0], num_microbatches)  # type: ignore[arg-type]
    return [
        [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in runner.pipeline_order[rank]  # type: ignore[attr-defined]
            if action is not None and action.is_compute_op
        ]
        for rank in range(num_ranks)
    ]


def ours(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int = 1) -> list[list[Pass]]:
    """[rank] -> passes in our table; torch calls a backward for inputs only I."""
    letters = LETTERS | ({"backward": "I"} if schedule in ZERO_BUBBLE else {})
    return [
        [(stage_of(schedule, rank, a.chunk, num_ranks), letters[a.kind], a.microbatch) for a in actions]
        for rank, actions in enumerate(table(schedule, num_ranks, num_microbatches, virtual))
    ]


@pytest.mark.parametrize(("ranks", "microbatches"), RANKS_AND_MICROBATCHES)
def test_gpipe_table_is_torchs_pipeline_order_and_what_torch_runs(ranks: int, microbatches: int) -> None:
    found = ours("gpipe", ranks, microbatches)

    assert found == drawn_by_torch("gpipe", ranks, microbatches)
    assert found == run_by_torch("gpipe", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p, m in RANKS_AND_MICROBATCHES if m >= p])
def test_1f1b_table_is_what_torch_runs(ranks: int, microbatches: int) -> None:
    found = ours("1f1b", ranks, microbatches)

    assert found == run_by_torch("1f1b", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p, m in RANKS_AND_MICROBATCHES if m >= p])
def test_1f1b_table_is_torchs_pipeline_order_but_for_the_last_ranks_forwards(ranks: int, microbatches: int) -> None:
    """torch 2.13 draws the last rank's forwards as micro-batches 1 to m, and runs 0 to m - 1 like everybody."""
    found, drawn = ours("1f1b", ranks, microbatches), drawn_by_torch("1f1b", ranks, microbatches)

    late = [(stage, kind, i + 1 if kind == "F" else i) for stage, kind, i in found[-1]]
    assert found[:-1] == drawn[:-1]
    assert drawn[-1] == late


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_interleaved_table_is_torchs_pipeline_order(ranks: int, virtual: int) -> None:
    """Wherever torch takes the number of micro-batches: a multiple of the number of rounds."""
    taken = [m for m in range(1, 26) if m % max(1, m // ranks) == 0]

    for microbatches in taken:
        expected = drawn_by_torch("interleaved", ranks, microbatches, virtual)
        assert ours("interleaved", ranks, microbatches, virtual) == expected


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_zb_h1_table_is_torchs_pipeline_order(ranks: int, virtual: int) -> None:
    taken = [m for m in range(1, 20) if m % max(1, m // ranks) == 0]

    for microbatches in taken:
        assert ours("zb-h1", ranks, microbatches, virtual) == drawn_by_torch("zb-h1", ranks, microbatches, virtual)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_zb_v_table_is_torchs_pipeline_order(ranks: int) -> None:
    for microbatches in range(1, 20):
        assert ours("zb-v", ranks, microbatches, 2) == drawn_by_torch("zb-v", ranks, microbatches, 2)


# --- rules of any schedule -------------------------------------------------------------------------------------------


def chunks_of(schedule: Schedule) -> tuple[int, ...]:
    """Numbers of stages per rank to try."""
    return {"interleaved": (1, 2, 3), "zb-h1": (1, 2, 3), "zb-h2": (1, 2), "zb-v": (2,)}.get(schedule, (1,))


def fewest_chunks(schedule: Schedule) -> int:
    """Two for ZB-V, else one."""
    return chunks_of(schedule)[0]


ANY: list[tuple[Schedule, int, int, int]] = [
    (schedule, ranks, virtual, microbatches)
    for schedule in (*SIMPLE, "interleaved", *ZERO_BUBBLE)
    for virtual in chunks_of(schedule)
    for ranks in (1, 2, 3, 4)
    for microbatches in (1, 2, 3, 4, 5, 7, 8, 9, 12)
]


def random_seconds(num_stages: int, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Unequal (forward, backward, weight part of the backward) of every stage."""
    draw = random.Random(seed)
    weight = [draw.uniform(0.2, 1.0) for _ in range(num_stages)]
    return [draw.uniform(0.5, 2.0) for _ in weight], [part + draw.uniform(0.5, 2.0) for part in weight], weight


def unequal_events(schedule: Schedule, ranks: int, virtual: int, microbatches: int) -> list[Event]:
    forward, backward, weight = random_seconds(ranks * virtual, seed=microbatches)
    return simulate(schedule, forward, backward, microbatches, weight, ranks)


def by_pass(schedule: Schedule, events: list[Event], ranks: int) -> dict[tuple[int, str, int], Event]:
    """(stage, kind, micro-batch) -> its event. An action that happens twice is an assertion."""
    found = {(stage_of(schedule, e.rank, e.action.chunk, ranks), e.action.kind, e.action.microbatch): e for e in events}
    assert len(found) == len(events)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "microbatches"), ANY)
def test_every_micro_batch_passes_every_stage_once_in_order_and_ranks_do_one_thing_at_a_time(
    schedule: Schedule, ranks: int, virtual: int, microbatches: int
) -> None:
    stages = ranks * virtual

    events = unequal_events(schedule, ranks, virtual, microbatches)

    found = by_pass(schedule, events, ranks)
    kinds = ("forward", "backward", "weight") if schedule in ZERO_BUBBLE else ("forward", "backward")
    assert set(found) == set(itertools.product(range(stages), kinds, range(microbatches)))
    for (stage, kind, i), event in found.items():
        assert rank_and_chunk(schedule, stage, ranks) == (event.rank, event.action.chunk)
        needs = {
            "forward": [(stage - 1, "forward", i)],
            "backward": [(stage, "forward", i), (stage + 1, "backward", i)],
            "weight": [(stage, "backward", i)],
        }[kind]
        assert all(event.start_s >= found[need].end_s for need in needs if 0 <= need[0] < stages)
    for rank in range(ranks):
        own = sorted((e.start_s, e.end_s) for e in events if e.rank == rank)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "microbatches"),
    [case for case in ANY if case[0] != "gpipe" or case[3] <= 4 * case[1]],
)
def test_in_flight_counts_are_those_of_the_events(
    schedule: Schedule, ranks: int, virtual: int, microbatches: int
) -> None:
    equal = [1.0] * (ranks * virtual)

    said = rank_in_flight(schedule, ranks, microbatches, virtual)

    events = simulate(schedule, equal, [2.0] * len(equal), microbatches, equal, ranks)
    in_order = [[e.action for e in events if e.rank == rank] for rank in range(ranks)]
    assert said == tuple(held_at_peak(actions) for actions in in_order)


def test_gpipe_holds_every_micro_batch() -> None:
    assert rank_in_flight("gpipe", 2, 10, 1) == ((10,), (10,))


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_in_flight_of_many_micro_batches_is_never_understated(ranks: int, virtual: int) -> None:
    for microbatches in (*range(4 * ranks, 7 * ranks), 50, 61):
        said = rank_in_flight("interleaved", ranks, microbatches, virtual)

        counted = [held_at_peak(actions) for actions in table("interleaved", ranks, microbatches, virtual)]
        assert all(sum(held) >= sum(true) for held, true in zip(said, counted, strict=True))


def test_a_rank_of_1f1b_holds_as_many_as_stages_follow_and_zero_bubbles_no_more_than_they_say() -> None:
    ranks, microbatches = 4, 20

    held = {
        s: [sum(h) for h in rank_in_flight(s, ranks, microbatches, fewest_chunks(s))] for s in ("1f1b", *ZERO_BUBBLE)
    }

    assert held["1f1b"] == [4, 3, 2, 1]
    assert max(held["zb-h1"]) == ranks
    assert max(held["zb-h2"]) <= 2 * ranks - 1
    assert max(held["zb-v"]) <= 2 * ranks, "of chunks half as large"


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SIMPLE)
@pytest.mark.parametrize(("ranks", "microbatches"), RANKS_AND_MICROBATCHES)
def test_equal_stages_take_m_plus_p_minus_1_passes(schedule: Schedule, ranks: int, microbatches: int) -> None:
    step_s = simulated_step_s(schedule, [1.25] * ranks, [2.5] * ranks, [0.0] * ranks, microbatches)

    assert step_s == pytest.approx((microbatches + ranks - 1) * 3.75)


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rounds", [1, 2, 5, 11])
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, virtual: int, rounds: int) -> None:
    stages, microbatches = ranks * virtual, ranks * rounds

    step_s = simulated_step_s(
        "interleaved", [1.25 / virtual] * stages, [2.5 / virtual] * stages, [0.0] * ranks, microbatches
    )

    assert step_s == pytest.approx((microbatches + (ranks - 1) / virtual) * 3.75)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 2), ("zb-v", 2)])
def test_a_long_step_of_nearly_equal_ranks_is_no_shorter_than_what_each_has_to_do(
    schedule: Schedule, virtual: int
) -> None:
    forward_s, backward_s = ([x, *([1.0] * (2 * virtual - 1))] for x in (1.03, 1.03))
    passes = schedule, forward_s, backward_s, [1.0, 0.0], 64

    step_s = simulated_step_s(*passes, [0.5] * len(forward_s))

    ends = [e.end_s for e in simulate(schedule, forward_s, backward_s, 64, [0.5] * len(forward_s), 2) if e.rank == 0]
    assert 64 * (2.06 + 2 * (virtual - 1)) + 1.0 <= least_step_s(*passes) * (1 + 1e-12) <= step_s * (1 + 2e-12)
    assert step_s == pytest.approx(max(ends) + 1.0, rel=1e-3)


PASSES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.5), (2.0, 1.0, 1.0)]
"""Seconds of forward, of backward for inputs and for weights, of all that a rank holds."""


def zero_bubble_s(schedule: Schedule, ranks: int, microbatches: int, seconds: tuple[float, float, float]) -> float:
    """Step of equal ranks, whose stages share `seconds`."""
    chunks = fewest_chunks(schedule)
    forward, inputs, weight = ([part / chunks] * (ranks * chunks) for part in seconds)
    backward = [i + w for i, w in zip(inputs, weight, strict=True)]
    return simulated_step_s(schedule, forward, backward, [0.0] * ranks, microbatches, weight)


@pytest.mark.parametrize("seconds", PASSES)
@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_zero_bubble_schedules_are_faster_than_1f1b_and_no_faster_than_work_after_warm_up(
    schedule: Schedule, seconds: tuple[float, float, float]
) -> None:
    """The last rank to start has waited for a forward of every rank before it, and has all its work left."""
    warm_up = seconds[0] / fewest_chunks(schedule)

    for ranks, microbatches in ((2, 5), (2, 8), (3, 9), (4, 8), (4, 17), (6, 18)):
        step_s = zero_bubble_s(schedule, ranks, microbatches, seconds)

        assert step_s < (microbatches + ranks - 1) * sum(seconds) - 1e-9
        assert step_s >= microbatches * sum(seconds) + (ranks - 1) * warm_up - 1e-9


@pytest.mark.parametrize("seconds", [*PASSES, (1.0, 2.0, 1.0)])
def test_zb_h2_leaves_no_bubble_but_the_warm_up_and_zb_h1_does_where_inputs_take_longer_than_weights(
    seconds: tuple[float, float, float],
) -> None:
    for ranks, microbatches in ((2, 6), (4, 8), (4, 16), (8, 16)):
        h1, h2 = (zero_bubble_s(schedule, ranks, microbatches, seconds) for schedule in ("zb-h1", "zb-h2"))

        assert h2 == pytest.approx(microbatches * sum(seconds) + (ranks - 1) * seconds[0])
        assert (h1 > h2 + 1e-9) == (seconds[1] > seconds[2] and seconds[0] < sum(seconds[1:]))


def whole_step_s(
    schedule: Schedule,
    passes: tuple[list[float], list[float], list[float]],
    once: list[float],
    microbatches: int,
) -> float:
    """The step with every event simulated."""
    forward, backward, weight = passes
    events = simulate(schedule, forward, backward, microbatches, weight, len(once))
    return max(max(e.end_s for e in events if e.rank == rank) + once[rank] for rank in range(len(once)))


def assert_long_steps_are_exact(schedule: Schedule, equal: bool, multiple: bool) -> None:
    """More than 6 micro-batches per rank, against the simulation of all of them."""
    draw = random.Random(7)
    for _ in range(12):
        ranks, virtual = draw.randint(2, 5), draw.choice(chunks_of(schedule))
        stages = ranks * virtual
        passes = (
            ([1.0] * stages, [2.0] * stages, [0.8] * stages) if equal else random_seconds(stages, draw.randrange(99))
        )
        once = [draw.uniform(0.0, 1.0) for _ in range(ranks)]
        microbatches = draw.randint(6 * ranks + 1, 14 * ranks)
        microbatches += -microbatches % ranks if multiple else int(microbatches % ranks == 0)

        step_s = simulated_step_s(schedule, passes[0], passes[1], once, microbatches, passes[2])

        whole_s = whole_step_s(schedule, passes, once, microbatches)
        assert step_s == pytest.approx(whole_s, rel=1e-9), (schedule, ranks, virtual, microbatches)


@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("schedule", SIMPLE)
def test_long_steps_of_gpipe_and_1f1b_are_as_if_all_were_simulated(
    schedule: Schedule, equal: bool, multiple: bool
) -> None:
    assert_long_steps_are_exact(schedule, equal, multiple)


def test_long_steps_of_equal_interleaved_stages_are_as_if_all_were_simulated() -> None:
    assert_long_steps_are_exact("interleaved", equal=True, multiple=True)


@pytest.mark.slow
def test_long_steps_of_unequal_interleaved_stages_are_as_if_all_were_simulated() -> None:
    assert_long_steps_are_exact("interleaved", equal=False, multiple=True)


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_long_zero_bubble_steps_are_as_if_all_were_simulated(schedule: Schedule) -> None:
    assert_long_steps_are_exact(schedule, equal=False, multiple=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", *ZERO_BUBBLE])
def test_a_critical_path_is_as_long_as_its_step_and_no_longer_than_any_other(schedule: Schedule) -> None:
    draw, split = random.Random(11), schedule in ZERO_BUBBLE
    for _ in range(20):
        ranks, virtual = draw.randint(2, 5), draw.choice(chunks_of(schedule))
        microbatches = ranks * draw.randint(1, 9)
        mine, other = (random_seconds(ranks * virtual, draw.randrange(99)) for _ in range(2))
        once, later = ([draw.uniform(0.0, 1.0) for _ in range(ranks)] for _ in range(2))

        path = critical_paths(schedule, mine[0], mine[1], once, microbatches, mine[2])[0]

        whole_s = whole_step_s(schedule, mine, once, microbatches)
        mine_s, other_s = (
            path.length_s(
                np.array([forward, np.subtract(backward, weight) if split else backward, weight]), np.array(end)
            )
            for (forward, backward, weight), end in ((mine, once), (other, later))
        )
        if virtual == 1 or microbatches <= 5 * ranks:
            assert mine_s == pytest.approx(whole_s)
        assert mine_s <= whole_s * (1 + 1e-9)
        assert other_s <= whole_step_s(schedule, other, later, microbatches) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_many_steps_at_once_are_those_one_by_one(schedule: Schedule) -> None:
    virtual, many = (2 if schedule in ("interleaved", "zb-v") else 1), 5
    draw = np.random.default_rng(8)
    for ranks, microbatches in ((2, 4), (3, 9), (4, 64)):
        forward, backward, weight = draw.uniform(0.5, 2.0, (3, ranks * virtual, many))
        once = draw.uniform(0.0, 5.0, (ranks, many))
        backward = backward + weight

        found = simulated_step_s(schedule, [*forward], [*backward], [*once], microbatches, [*weight])

        for i in range(many):
            each = (table_row[:, i].tolist() for table_row in (forward, backward, once))
            expected = simulated_step_s(schedule, *each, microbatches, weight[:, i].tolist())
            assert found[i] == pytest.approx(expected, rel=1e-12)
