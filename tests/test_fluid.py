"""Programs over all cuts and options: below every step there is, and their prices bound other shapes."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.cost.simulate import alone_s, even_step_s, simulated_step_s
from meshwright.planner.plan.schedules import ZERO_BUBBLE, Schedule
from meshwright.planner.solve import fluid_program
from meshwright.planner.solve.fluid import FluidPipelines
from meshwright.planner.solve.fluid_program import FluidProgram, Layers, united
from meshwright.planner.solve.path_prices import ManyLayers, least_of_many_s
from meshwright.planner.solve.rank_bounds import OnDevice, least_of_ranks_s
from meshwright.planner.solve.table import Table
from meshwright.planner.solve.whole_ranks import LayerTurns, hull, least_again_s
from support import slow

TABLES = (
    Table("1f1b", 3, 7, 1),
    Table("gpipe", 3, 2, 1),
    Table("interleaved", 2, 4, 2),
    Table("zb-h1", 3, 6, 1),
    Table("zb-h2", 2, 5, 1),
    Table("zb-v", 2, 6, 2),
)


def chain_of(draw: random.Random, table: Table) -> list[Layers]:
    """One or two layers, some equal ones, and one or three others; all but zero bubbles may recompute, in two ways."""
    split, flights = table.schedule in ZERO_BUBBLE, np.array([draw.uniform(1, 4) for _ in range(table.num_stages)])
    runs = []
    for count in (draw.choice((1.0, 2.0)), float(table.num_stages + draw.randint(0, 2)), draw.choice((1.0, 3.0))):
        forward, weight = draw.choice((0.3, 1.0, 3.0)) * draw.uniform(1, 2), draw.uniform(0.1, 0.3) if split else 0.0
        again = np.zeros(1) if split else np.array([0.0, 0.4, 1.0]) * forward
        kept = draw.uniform(0.5, 1.5) * (np.ones(1) if split else np.array([1.0, 0.5, 0.05]))
        backward = 2 * forward * draw.uniform(0.8, 1.2) + again
        held = flights[:, None] * kept + draw.uniform(0, 1)
        each = np.full(len(again), forward), backward, np.full(len(again), weight), held
        runs.append(Layers(count, *each, draw.uniform(0, 1)))
    return runs


def waits_of(draw: random.Random, runs: list[Layers]) -> list[float]:
    """[layer but the last] -> seconds that stages wait for what crosses after it: none, the same, or not."""
    number = sum(int(run.count) for run in runs) - 1
    return draw.choice(([0.0] * number, [0.1] * number, [draw.choice((0.0, 0.1, 0.5, 2.0)) for _ in range(number)]))


def least_waits(waits_s: list[float], num_stages: int) -> np.ndarray:
    """[stage but the last] -> the least of those where it may end."""
    ends = itertools.combinations(waits_s, num_stages - 1)
    return np.min([*ends], axis=0)


def steps_of(table: Table, runs: list[Layers], room: float, waits_s: list[float]) -> list[float]:
    """Simulated steps of all cuts whose layers all take one option that fits."""
    order = [r for r, layers in enumerate(runs) for _ in range(int(layers.count))]
    rank_of, found = table.rank_of, []
    for inner in itertools.combinations(range(1, len(order)), table.num_stages - 1):
        stages = [order[a:b] for a, b in itertools.pairwise((0, *inner, len(order)))]
        for o in range(len(runs[0].forward_s)):
            held = [0.0] * table.num_ranks
            once = [0.0] * table.num_ranks
            for s, stage in enumerate(stages):
                held[rank_of[s]] += sum(runs[r].bytes[s, o] for r in stage)
                once[rank_of[s]] += sum(runs[r].once_s for r in stage)
            if max(held) > room:
                continue
            forward, backward, weight = (
                [sum(getattr(runs[r], name)[o] for r in stage) for stage in stages]
                for name in ("forward_s", "backward_s", "weight_s")
            )
            waits = [waits_s[end - 1] for end in inner]
            forward = [seconds + wait for seconds, wait in zip(forward, [0.0, *waits], strict=True)]
            backward = [seconds + wait for seconds, wait in zip(backward, [*waits, 0.0], strict=True)]
            found.append(simulated_step_s(table.schedule, forward, backward, once, table.num_microbatches, weight))
    return found


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.schedule)
@pytest.mark.parametrize("room", slow.but_first([12.0, 1e9], 1))
def test_no_step_is_shorter_than_the_program_and_whole_layers_come_nearer(table: Table, room: float) -> None:
    draw = random.Random(table.schedule + str(room))
    for _ in range(4):
        runs, pipelines = chain_of(draw, table), FluidPipelines()
        rooms, waits_s = [room] * table.num_ranks, waits_of(draw, runs)
        steps, least_waits_s = steps_of(table, runs, room, waits_s), least_waits(waits_s, table.num_stages)

        least_s, layers = pipelines.least_s(table, runs, rooms, least_waits_s)
        if not steps:
            continue
        whole_s, _ = pipelines.whole(table, runs, rooms, least_waits_s, 0.0, min(steps) * (1 - 1e-6), 10.0)

        assert 0.5 * min(steps) < least_s <= min(steps) * (1 + 1e-9)
        assert least_s * (1 - 1e-3) <= max(whole_s, least_s) <= min(steps) * (1 + 1e-9)
        assert layers.sum() == pytest.approx(sum(run.count for run in runs))
        assert (layers > 1 - 1e-6).all()


def test_a_program_that_drops_idle_paths_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    table, draw = Table("interleaved", 4, 8, 3), random.Random(3)
    runs = chain_of(draw, table)
    known, dropped = [], []
    drop = FluidProgram._drop_idle

    def noted(program: FluidProgram) -> None:
        before = len(program._paths)
        drop(program)
        dropped.append(before - len(program._paths))

    monkeypatch.setattr(FluidProgram, "_drop_idle", noted)
    for share in (2.0, 0.0):
        monkeypatch.setattr(fluid_program, "MANY_IDLE", share)
        known.append(FluidPipelines().least_s(table, runs, [60.0] * 4, 0.1)[0])
        assert any(dropped) == (share == 0.0)

    assert known[1] == pytest.approx(known[0], rel=2 * fluid_program.TIGHT)


def test_whole_layers_are_bounded_by_the_best_of_all_cuts() -> None:
    table, draw = Table("zb-h1", 3, 6, 1), random.Random(4)
    runs = chain_of(draw, table)
    best_s = min(steps_of(table, runs, 1e9, [0.0] * 20))

    below_s, none = FluidPipelines().whole(table, runs, [1e9] * 3, 0.0, 0.0, best_s * (1 - 1e-4), 30.0)
    above_s, found = FluidPipelines().whole(table, runs, [1e9] * 3, 0.0, 0.0, best_s * (1 + 1e-4), 30.0)

    assert none is None
    assert below_s == pytest.approx(best_s * (1 - 1e-4))
    assert found is not None
    assert above_s <= best_s * (1 + 1e-9)


def many_of(runs: list[Layers], table: Table) -> tuple[list[ManyLayers], np.ndarray]:
    """The layers as one of many shapes, and micro-batches in flight, which are 1 everywhere."""
    split = table.schedule in ZERO_BUBBLE
    many = [
        ManyLayers(
            run.count,
            run.forward_s[:1],
            run.forward_s[:1] + run.backward_s[:1],
            float(run.weight_s[0]) if split else 0.0,
            np.zeros(1),
            run.backward_s - run.backward_s[0],
            run.bytes[0].copy(),
            np.array([run.once_s]),
            np.zeros(1),
        )
        for run in runs
    ]
    return many, np.ones(table.num_stages)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.schedule)
@pytest.mark.parametrize("room", slow.but_first([7.0, 12.0, 1e9], 1))
def test_no_step_is_shorter_than_whole_layers_on_ranks_allow(table: Table, room: float) -> None:
    draw, tight = random.Random(table.schedule + str(room)), []
    for _ in range(12):
        runs = chain_of(draw, table)
        waits_s = waits_of(draw, runs)
        many, _ = many_of(runs, table)
        flights = np.array([draw.choice((1.0, 1.0, 2.0, 5.0)) for _ in range(table.num_stages)])
        for run in runs:  # what a micro-batch keeps is alike on all stages, as of many shapes
            run.bytes[:] = flights[:, None] * run.bytes[0]
        steps = steps_of(table, runs, room, waits_s)

        rooms = np.full((table.num_ranks, 1), room)
        on = OnDevice(many, rooms, least_waits(waits_s, table.num_stages)[:, None], np.zeros(1))
        bound = float(least_of_ranks_s(table, [on], flights)[0])

        assert bound <= min(steps, default=float("inf")) * (1 + 1e-9)
        if steps:
            tight.append(bound / min(steps))
    assert not tight or max(tight) > 0.5


def test_whole_layers_on_ranks_are_told_from_divided_ones() -> None:
    table = Table("interleaved", 4, 64, 2)
    one, kept = np.ones(1), np.zeros(1)

    def layers(count: float, seconds: float) -> ManyLayers:
        each = one * seconds / 3, one * seconds, 0.0, np.zeros(1), np.zeros(1), kept, np.zeros(1), np.zeros(1)
        return ManyLayers(count, *each)

    runs = [layers(1, 0.1), layers(8, 1.0), layers(1, 1.0)]
    on = OnDevice(runs, np.ones((4, 1)), np.zeros((7, 1)), np.zeros(1))
    bound = float(least_of_ranks_s(table, [on], np.ones(8))[0])

    # 9.1 seconds of layers for four ranks: 2.275 each if divided, but one has three of 1 s or two with another's 1 s
    assert bound == pytest.approx(64 * 3.0, rel=0.05)


@pytest.mark.parametrize(("flights", "paired", "again_s"), [(2.0, 0.0, 0.0), (10.0, 0.0, 0.6), (2.0, 4.0, 1.0)])
def test_layers_on_ranks_hold_what_each_stage_has_in_flight_and_in_a_turn_of_two(
    flights: float, paired: float, again_s: float
) -> None:
    table, one = Table("interleaved", 2, 400, 2), np.ones(1)
    layers = ManyLayers(
        6.0, one / 3, one, 0.0, np.zeros(1), np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.zeros(1), paired * one
    )
    in_flight = np.array([flights, flights, 2.0, 2.0])

    on = OnDevice([layers], np.full((2, 1), 8.0), np.zeros((3, 1)), np.zeros(1))
    bound = float(least_of_ranks_s(table, [on], in_flight)[0])

    # each rank has three layers, one of them at least in its first stage, and keeps 8 bytes: it runs a part of the
    # activations again that has `again_s` of a layer's seconds, the cheapest first
    assert bound == pytest.approx(400 * (3 + again_s), rel=0.01)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.schedule)
@pytest.mark.parametrize("scale", [0.0, 0.7, 1.0, 1.5])
def test_prices_of_one_shape_bound_itself_exactly_and_others_from_below(table: Table, scale: float) -> None:
    draw = random.Random(table.schedule)
    for _ in range(4):
        pipelines, room = FluidPipelines(), draw.uniform(8, 30)
        both = [chain_of(draw, table) for _ in range(2)]
        for runs in both:  # bytes alike on all stages, as of many shapes
            for run in runs:
                run.bytes[:] = run.bytes[0]
        waits_s = np.array([draw.choice((0.0, 0.05, 0.5)) for _ in range(table.num_stages - 1)])
        seconds = [pipelines.least_s(table, runs, [room] * table.num_ranks, waits_s)[0] for runs in both]
        if not all(map(np.isfinite, seconds)):
            continue
        prices = pipelines.prices[table][-1]  # of the second

        bounds = []
        for runs in both:
            many, flights = many_of(runs, table)
            rooms = np.full((table.num_ranks, 1), room)
            bound = least_of_many_s(table, [prices], many, flights, rooms, waits_s[:, None], np.zeros(1), [scale])
            bounds.append(float(bound[0]))

        assert bounds[0] <= seconds[0] * (1 + 1e-3)
        assert bounds[1] <= seconds[1] * (1 + 1e-6)
        if scale == 1.0:
            assert bounds[1] == pytest.approx(seconds[1], rel=1e-4)


def in_turn(draw: random.Random, table: Table) -> list[Layers]:
    """A first layer, two kinds that take turns, and a last layer."""
    first, kind, last = (replace(run, count=1.0) for run in chain_of(draw, table))
    other = replace(chain_of(draw, table)[1], count=1.0)
    return [first, *[kind, other] * (table.num_stages // 2 + 1), last]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.schedule)
def test_kinds_in_any_order_take_no_longer_than_in_theirs_and_nearly_as_long(table: Table) -> None:
    draw = random.Random(table.schedule)
    for _ in range(4):
        runs, room = in_turn(draw, table), draw.uniform(10, 40)
        steps, rooms = steps_of(table, runs, room, [0.05] * len(runs)), [room] * table.num_ranks
        ordered, free = FluidPipelines(), FluidPipelines()

        ordered_s, _ = ordered.least_s(table, runs, rooms, 0.05)
        free_s, layers = free.least_s(table, runs, rooms, 0.05, in_order=False)

        assert free_s <= ordered_s * (1 + 1e-3)
        assert free_s == pytest.approx(ordered_s, rel=0.1)
        assert ordered_s <= min(steps, default=math.inf) * (1 + 1e-9)
        assert layers.sum() == pytest.approx(len(runs))
        if np.isfinite(free_s):
            many, flights = many_of([replace(run, bytes=run.bytes[:1]) for run in runs], table)
            shape_rooms = np.full((table.num_ranks, 1), room)
            prices = free.prices[table][-1]
            waits_s = np.full((table.num_stages - 1, 1), 0.05)
            bound = least_of_many_s(table, [prices], many, flights, shape_rooms, waits_s, np.zeros(1), [0.0])
            assert float(bound[0]) <= free_s * (1 + 1e-6)


def test_equal_layers_become_one_run_and_single_ones_at_the_ends_stay() -> None:
    one, other = (Layers(1.0, *[np.full(1, x)] * 3, np.full((2, 1), x), 0.0) for x in (1.0, 2.0))
    two = replace(one, count=2.0)
    names = ("forward_s", "backward_s", "weight_s", "bytes", "once_s")
    unlike = [replace(one, **{name: getattr(one, name) + 0.5}) for name in names]
    for each in unlike:
        assert united([other, one, each, other], neighbours_only=False)[1] == [0, 1, 2, 3]

    assert [run.count for run in united([one, one, other, two, other, one], neighbours_only=False)[0]] == [1, 3, 2, 1]
    assert united([one, one, other, two, other, one], neighbours_only=False)[1] == [0, 1, 2, 1, 2, 3]
    assert united([one, one, two, other, two, one], neighbours_only=True)[1] == [0, 1, 1, 2, 3, 4]
    assert united([two, one, one, two], neighbours_only=True)[1] == [0, 0, 0, 0]


def test_layers_that_no_rank_can_hold_have_no_step() -> None:
    table = Table("interleaved", 2, 4, 2)

    assert FluidPipelines().least_s(table, chain_of(random.Random(1), table), [1.0, 1.0], 0.0)[0] == float("inf")


def test_as_soon_as_enough_is_known_no_more_is_looked_for() -> None:
    table = Table("interleaved", 4, 8, 2)
    runs, rooms = chain_of(random.Random(2), table), [1e9] * 4
    whole_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0)

    some_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0, enough_s=0.9 * whole_s)

    assert 0.9 * whole_s <= some_s <= whole_s * (1 + 1e-9)


def test_a_program_that_is_brought_to_its_end_says_more_and_holds() -> None:
    draw, table = random.Random(0), Table("interleaved", 8, 8, 4)
    stages, once_s = table.num_stages, [0.0] * table.num_ranks
    of_one = np.array([1.0]), np.array([2.0]), np.array([0.0]), np.zeros((stages, 1))
    runs, rooms = [Layers(56.0, *of_one, 0.0)], [1e9] * table.num_ranks

    early_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0)
    end_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0, until_s=math.inf)

    assert end_s > 1.05 * early_s
    for _ in range(100):
        layers = np.array([1.0] * stages)
        np.add.at(layers, [draw.randrange(stages) for _ in range(56 - stages)], 1.0)
        forward, backward = layers.tolist(), (2 * layers).tolist()
        step_s = simulated_step_s(table.schedule, forward, backward, once_s, table.num_microbatches)
        assert step_s >= end_s * (1 - 1e-9)


@pytest.mark.parametrize("schedule", slow.but_first(["1f1b", "zb-h1", "gpipe", "zb-h2"], 2))
def test_no_step_is_shorter_than_what_one_rank_waits_for_and_does(schedule: Schedule) -> None:
    draw = random.Random(schedule)
    for _ in range(200):
        ranks = draw.randint(2, 6)
        count = draw.randint(ranks if schedule == "1f1b" else 1, 5 * ranks)
        spread = draw.choice((0.0, 0.3, 2.0))
        forward = [1 + draw.random() * spread for _ in range(ranks)]
        backward = [seconds * draw.uniform(0.5, 3) for seconds in forward]
        weight = [seconds * draw.uniform(0, 0.6) for seconds in backward]
        once = [draw.random() for _ in range(ranks)]
        split = schedule in ZERO_BUBBLE
        step_s = simulated_step_s(schedule, forward, backward, once, count, weight if split else None)

        for rank in range(ranks):
            after = sum(forward[rank + 1 :]) + sum(backward[rank + 1 :]) - (sum(weight[rank + 1 :]) if split else 0.0)
            busy_s = alone_s(schedule, rank, ranks, count, forward[rank], backward[rank], after)
            assert sum(forward[:rank]) + busy_s + once[rank] <= step_s * (1 + 1e-12)
            if not split:
                assert sum(forward[:rank]) + sum(backward[:rank]) + busy_s + once[0] <= step_s * (1 + 1e-12)
        if not split:
            slowest = max(f + b for f, b in zip(forward, backward, strict=True))
            assert even_step_s(schedule, ranks, count, slowest, sum(forward) + sum(backward)) <= step_s * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_ranks_take_what_their_bounds_say(schedule: Schedule) -> None:
    count = 8 if schedule == "1f1b" else 3
    step_s = simulated_step_s(schedule, [1.0] * 4, [2.0] * 4, [0.0] * 4, count)

    assert even_step_s(schedule, 4, count, 3.0, 12.0) == pytest.approx(step_s)
    assert 3 * 3 + alone_s(schedule, 3, 4, count, 1.0, 2.0, 0.0) == pytest.approx(step_s)


@pytest.mark.parametrize("seed", range(6))
def test_whole_layers_run_again_no_more_than_the_best_of_all_their_options(seed: int) -> None:
    draw = random.Random(seed)
    own = [draw.choice((1.0, 2.0, 5.0)) * np.array([1.0, 0.6, 0.1]) for _ in range(2)]
    further, again_s = min(own, key=lambda sizes: float(sizes.sum())), np.array([0.0, 0.4, 1.0])
    alone, paired = np.array([0.1, 0.3, draw.uniform(0, 2)]), np.array([0.5, draw.uniform(0, 2), 1.0])
    room, most = draw.uniform(1, 8), 5

    found = least_again_s(own, further, again_s, alone, paired, 2, room, most)

    for number in range(2, most + 1):
        each, least_s = [*own, *[further] * (number - 2)], float("inf")
        for options in itertools.product(range(3), repeat=number):
            turn = max([alone[o] for o in options] + ([min(paired[o] for o in options)] if number > 2 else []))
            if sum(sizes[o] for sizes, o in zip(each, options, strict=True)) + turn <= room:
                least_s = min(least_s, sum(again_s[o] for o in options))
        if number == 2:
            assert found[0] == pytest.approx(least_s)
        assert found[number - 2] <= least_s


def test_the_sides_of_a_hull_are_below_all_numbers_and_meet_some() -> None:
    seconds = np.array([0.0, 1.0, 1.5, 4.0, 4.5, np.inf])

    lines = hull(3, seconds)

    below = np.max([start + slope * np.arange(3, 8) for start, slope in lines], axis=0)
    assert below == pytest.approx([0.0, 0.75, 1.5, 3.0, 4.5])


def test_whole_options_on_ranks_bring_the_program_nearer() -> None:
    table, one = Table("interleaved", 2, 8, 2), np.ones(1)
    flights = np.array([3.0, 2.0, 2.0, 1.0])
    options = np.full(2, 1.0), np.array([2.0, 3.0]), np.zeros(2), flights[:, None] * np.array([1.0, 0.0])
    end = Layers(1.0, 0.1 * one, 0.1 * one, 0 * one, np.zeros((4, 1)), 0.0)
    runs, rooms = [end, Layers(4.0, *options, 0.0), end], [3.5, 3.5]
    turns = LayerTurns(1, 1, 1, np.zeros(2), np.zeros(2), np.zeros(2))

    divided_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0, enough_s=100.0)
    whole_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0, enough_s=100.0, turns=[turns])

    assert whole_s > 1.01 * divided_s


def steps_with_turns(table: Table, runs: list[Layers], turns: list[LayerTurns], room: float) -> list[float]:
    """Simulated steps of all cuts and all options of every layer that fit with the largest turn of each rank."""
    order = [r for r, layers in enumerate(runs) for _ in range(int(layers.count))]
    turn_of = {each.run: each for each in turns}
    found = []
    for inner in itertools.combinations(range(1, len(order)), table.num_stages - 1):
        edges = [*itertools.pairwise((0, *inner, len(order)))]
        for options in itertools.product(*(range(runs[r].bytes.shape[1]) for r in order)):
            held, most = [0.0] * table.num_ranks, [0.0] * table.num_ranks
            forward, backward = [0.0] * table.num_stages, [0.0] * table.num_stages
            for s, (a, b) in enumerate(edges):
                rank = table.rank_of[s]
                for place in range(a, b):
                    r, o = order[place], options[place]
                    held[rank] += runs[r].bytes[s, o]
                    forward[s] += runs[r].forward_s[o]
                    backward[s] += runs[r].backward_s[o]
                    if r in turn_of:
                        followed = place + 1 < b and order[place + 1] == r
                        size = turn_of[r].paired if followed else turn_of[r].alone
                        most[rank] = max(most[rank], float(size[o]))
            if max(h + m for h, m in zip(held, most, strict=True)) <= room:
                ends = [0.0] * table.num_ranks
                found.append(float(simulated_step_s(table.schedule, forward, backward, ends, table.num_microbatches)))
    return found


@pytest.mark.parametrize("seed", slow.but_first(range(8), 3))
def test_no_step_is_shorter_than_programs_that_leave_room_for_turns(seed: int) -> None:
    draw = random.Random(seed)
    table = Table("interleaved", 2, 12, 2)
    flights = np.array([3.0, 2.0, 2.0, 1.0])
    runs, turns, counts = [], [], draw.choice(([1, 4, 1], [2, 3, 1], [1, 2, 3], [3, 3, 0]))
    for run, count in enumerate(filter(None, counts)):
        again = np.array([0.0, draw.uniform(0.1, 0.6)]) if count > 1 else np.zeros(1)
        kept = draw.uniform(0.5, 1.5) * np.array([1.0, 0.1])[: len(again)]
        forward = draw.uniform(0.5, 1.5)
        seconds = np.full(len(again), forward), 2 * forward + again, 0 * again
        runs.append(Layers(float(count), *seconds, flights[:, None] * kept, 0.0))
        if count > 1:
            alone = np.array([draw.uniform(0, 2), draw.uniform(1, 8)])
            paired = alone + draw.uniform(0, 4)
            turns.append(LayerTurns(run, sum(counts[:run]), sum(counts[run + 1 :]), alone, paired, np.zeros(2)))
    known = 0
    for room in (4.0, 6.0, 8.0, 10.0, 13.0):
        best_s = min(steps_with_turns(table, runs, turns, room), default=float("inf"))
        for enough_s in (0.9 * best_s, 1.0005 * best_s) if math.isfinite(best_s) else (150.0,):
            rooms = [room] * 2
            divided_s, _ = FluidPipelines().least_s(table, runs, rooms, 0.0, enough_s=enough_s, turns=turns)
            whole_s, cuts = FluidPipelines().whole(table, runs, rooms, 0.0, 0.0, enough_s, 10.0, turns)

            assert min(divided_s, enough_s) <= best_s * (1 + 1e-9)
            assert whole_s <= best_s * (1 + 1e-9) if enough_s > best_s else whole_s <= enough_s
            known += cuts is None and enough_s <= best_s
    assert known


def test_a_turn_of_one_option_that_leaves_no_room_is_told_by_whole_turns() -> None:
    table, one = Table("interleaved", 2, 4, 2), np.ones(1)
    end = Layers(1.0, 0.1 * one, 0.1 * one, 0 * one, np.zeros((4, 1)), 0.0)
    options = np.ones(2), np.array([2.0, 3.0]), np.zeros(2), np.tile([3.0, 0.5], (4, 1))
    runs, none = [end, Layers(6.0, *options, 0.0), end], np.zeros(2)
    turns = [LayerTurns(1, 1, 1, np.array([0.0, 3.0]), np.array([0.0, 5.0]), none)]

    for room, fits in ((6.6, True), (6.4, False)):  # three layers that run again, one after another: 1.5 + 5
        steps = steps_with_turns(table, runs, turns, room)
        whole_s, _ = FluidPipelines().whole(table, runs, [room] * 2, 0.0, 0.0, 60.0, 10.0, turns)

        assert bool(steps) == fits
        assert (whole_s < 60.0) == fits


def test_layers_that_take_no_time_may_all_be_on_one_rank() -> None:
    table, one = Table("interleaved", 2, 4, 2), np.ones(1)
    end = Layers(1.0, one, one, 0 * one, np.zeros((4, 1)), 0.0)
    idle = Layers(6.0, np.zeros(2), np.zeros(2), np.zeros(2), np.tile([1.0, 0.5], (4, 1)), 0.0)
    turns = [LayerTurns(1, 1, 1, np.array([0.0, 1.0]), np.array([0.0, 2.0]), np.zeros(2))]

    whole_s, cuts = FluidPipelines().whole(table, [end, idle, end], [7.0] * 2, 0.0, 0.0, 60.0, 10.0, turns)

    assert whole_s < 60.0
    assert cuts is not None
