"""Bounds under memory: whole layers take no less, and say more than time; 1F1B holds least of all schedules."""

from itertools import combinations_with_replacement, product

import numpy as np

from meshwright.planner.plan.shape import Shape
from meshwright.planner.solve.chunked import Chunking
from meshwright.planner.solve.relaxed import least_slowest_of_whole_s


def least_of_a_stage_s(number: int, each: float, again: list[float], held: list[float], turn: list[float]) -> float:
    """Seconds of so many layers, over all options of all of them: what they hold, and of the last what passes."""
    ways = range(len(again))
    found = float("inf")
    for last, others in product(ways, combinations_with_replacement(ways, number - 1)):
        if sum(held[way] for way in others) + held[last] + turn[last] <= 1.0:
            found = min(found, number * each + sum(again[way] for way in (*others, last)))
    return found


def least_over_all_cuts_s(count: int, stages: list[list[float]]) -> float:
    """Least seconds of the slowest stage over all ways to share layers out. stages: [stage][layers] -> seconds."""
    shares = (share for share in product(range(count + 1), repeat=len(stages)) if sum(share) == count)
    return min(max(stage[n] for stage, n in zip(stages, share, strict=True)) for share in shares)


def test_whole_layers_take_no_less_than_their_bound_and_often_more_than_their_time() -> None:
    draw = np.random.default_rng(0)
    above_time = 0

    for _ in range(60):
        count, num_stages = int(draw.integers(1, 6)), int(draw.integers(1, 4))
        again, kept = np.sort(draw.random(3)), np.sort(draw.random(3))[::-1] / 2
        passing, fixed, each = draw.random(3) / 2, float(draw.random() / 8), float(draw.random())
        flights = np.sort(draw.integers(1, 4, num_stages).astype(float))[::-1]
        held = [(kept * n + fixed).tolist() for n in flights]
        args = each, again.tolist()
        stages = [[0.0, *(least_of_a_stage_s(n, *args, own, passing.tolist()) for n in range(1, 6))] for own in held]
        true = least_over_all_cuts_s(count, stages)
        columns = np.array([each]), np.array([fixed]), np.ones(1), again, kept, passing[:, None], flights, count
        (bound,) = least_slowest_of_whole_s(*columns)
        assert bound <= true * (1 + 1e-9)
        above_time += bound > (each + again[0]) * -(-count // num_stages) * (1 + 1e-9)

    assert above_time > 15


def test_no_rank_keeps_fewer_micro_batches_in_flight_than_one_of_1f1b() -> None:
    for schedule, virtual in (*((s, 1) for s in ("gpipe", "zb-h1", "zb-h2")), ("interleaved", 3), ("zb-v", 2)):
        for num_ranks, count in product((2, 4, 8), (8, 16, 24)):
            shape = Shape(1, 1, 1, num_ranks, 1, count, schedule=schedule, virtual_stages=virtual)
            frame = Chunking(schedule, num_ranks, virtual)
            fewest = sorted(min(shape.in_flight(stage) for stage in frame.stages(rank)) for rank in range(num_ranks))

            assert all(held >= min(n, count) for n, held in enumerate(fewest, 1))
