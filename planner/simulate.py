"""Pipeline schedules: the table of what each rank does in which order, and its time by event simulation."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from .plan import Schedule

ZERO_BUBBLE: tuple[Schedule, ...] = ("zb-h1", "zb-h2", "zb-v")
"""Schedules whose backward is in two parts, for inputs and for weights."""


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk (the stages of a rank, in order). In zero-bubble schedules
    "backward" is for inputs only."""

    kind: Literal["forward", "backward", "weight"]
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Event:
    """An action with its time. rank: along the pipeline."""

    rank: int
    action: Action
    start_s: float
    end_s: float


def stage_of(schedule: Schedule, rank: int, chunk: int, num_ranks: int) -> int:
    """The stage that a rank's chunk is: chunks go round the ranks, in ZB-V there and back."""
    if schedule == "zb-v" and chunk == 1:
        return 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def rank_and_chunk(schedule: Schedule, stage: int, num_ranks: int) -> tuple[int, int]:
    """(rank, chunk) of a stage."""
    chunk, rank = divmod(stage, num_ranks)
    return (num_ranks - 1 - rank if schedule == "zb-v" and chunk == 1 else rank), chunk


@lru_cache(maxsize=64)
def table(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int = 1) -> tuple[list[Action], ...]:
    """[rank] -> its actions in order; not for zero-bubble schedules, whose order depends on durations.

    1F1B: as many forwards ahead as stages follow, then in turn (Narayanan et al., SC21, section 2.2). Interleaved: the
    same with chunks, micro-batches in rounds of as many as there are ranks (section 2.2.2 there; rounds of unequal
    numbers as in torch.distributed.pipelining). GPipe and a single stage: all forwards first, or in turn.
    """
    if schedule == "interleaved":
        return tuple(_interleaved(rank, num_ranks, num_microbatches, virtual) for rank in range(num_ranks))
    order = []
    forwards = [Action("forward", i) for i in range(num_microbatches)]
    backwards = [Action("backward", i) for i in range(num_microbatches)]
    for rank in range(num_ranks):
        ahead = num_microbatches if schedule == "gpipe" else min(num_microbatches, num_ranks - rank)
        order.append(_in_turn(forwards, backwards, ahead))
    return tuple(order)


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> list[Action]:
    rounds = max(1, num_microbatches // num_ranks)
    in_round = -(-num_microbatches // rounds)
    forwards, backwards = [], []
    for first in range(0, num_microbatches, in_round):
        microbatches = range(first, min(first + in_round, num_microbatches))
        for chunk in range(virtual):
            forwards += [Action("forward", i, chunk) for i in microbatches]
            backwards += [Action("backward", i, virtual - 1 - chunk) for i in microbatches]
    ahead = (virtual - 1) * in_round + 2 * (num_ranks - 1 - rank) + 1
    return _in_turn(forwards, backwards, ahead)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for i, backward in enumerate(backwards):
        order.append(backward)
        order += forwards[ahead + i : ahead + i + 1]
    return order


def in_flight(actions: Sequence[Action]) -> int:
    """Largest number of micro-batches (of any chunk) whose activations a rank holds at once."""
    return sum(held_at_peak(actions))


def held_at_peak(actions: Sequence[Action]) -> tuple[int, ...]:
    """[chunk] -> micro-batches whose activations a rank holds when it holds most. Zero-bubble schedules hold them
    until the weights' backward."""
    frees = "weight" if any(action.kind == "weight" for action in actions) else "backward"
    held = [0] * (1 + max((action.chunk for action in actions), default=0))
    most, total, largest = tuple(held), 0, 0
    for action in actions:
        if action.kind == "forward":
            held[action.chunk] += 1
            total += 1
        elif action.kind == frees:
            held[action.chunk] -= 1
            total -= 1
        if total > largest:
            most, largest = tuple(held), total
    return most


@cache
def rank_in_flight(
    schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int
) -> tuple[tuple[int, ...], ...]:
    """[rank][chunk] -> micro-batches in flight at the peak, counted from the table (zero bubbles: of equal passes)."""
    few = min(num_microbatches, 4 * num_ranks + num_microbatches % num_ranks)
    few = num_microbatches if schedule == "gpipe" else few
    if schedule in ZERO_BUBBLE:
        stages = [1.0] * (num_ranks * virtual)
        events = _zero_bubble(schedule, stages, stages, stages, few, num_ranks)
        return tuple(held_at_peak([e.action for e in events if e.rank == rank]) for rank in range(num_ranks))
    return tuple(held_at_peak(actions) for actions in table(schedule, num_ranks, few, virtual))


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    weight_s: Sequence[float] | None = None,
    num_ranks: int | None = None,
) -> list[Event]:
    """Start and end of every action; an action starts when its rank is free and its input has arrived.

    forward_s, backward_s, weight_s: per stage (of which each rank has one or more), waiting for transfers included;
    weight_s is the part of backward_s that zero-bubble schedules put off.
    """
    ranks = num_ranks or len(forward_s)
    if schedule in ZERO_BUBBLE:
        weights = weight_s or [0.0] * len(forward_s)
        inputs = [b - w for b, w in zip(backward_s, weights, strict=True)]
        return _zero_bubble(schedule, forward_s, inputs, weights, num_microbatches, ranks)
    return _by_table(schedule, forward_s, backward_s, num_microbatches, ranks)


def _by_table(
    schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int, num_ranks: int
) -> list[Event]:
    num_stages = len(forward_s)
    order = table(schedule, num_ranks, num_microbatches, num_stages // num_ranks)
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * num_ranks
    position = [0] * num_ranks
    events: list[Event] = []
    while len(events) < 2 * num_stages * num_microbatches:
        progressed = False
        for rank in range(num_ranks):
            while position[rank] < len(order[rank]):
                action = order[rank][position[rank]]
                stage = stage_of(schedule, rank, action.chunk, num_ranks)
                ready = _ready(action.kind, action.microbatch, stage, num_stages, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + (forward_s if action.kind == "forward" else backward_s)[stage]
                done[stage, action.kind, action.microbatch] = free[rank] = end
                events.append(Event(rank, action, start, end))
                position[rank] += 1
                progressed = True
        assert progressed, "the schedule's table deadlocks"
    return events


def _ready(
    kind: str, microbatch: int, stage: int, num_stages: int, done: dict[tuple[int, str, int], float]
) -> float | None:
    """When an action's input is there, or None if it is not yet known."""
    if kind == "forward":
        return 0.0 if stage == 0 else done.get((stage - 1, "forward", microbatch))
    if stage == num_stages - 1:
        return done.get((stage, "forward", microbatch))
    return done.get((stage + 1, "backward", microbatch))


def _most_held(schedule: Schedule, num_ranks: int) -> int:
    """Activations (of chunks) that a rank may hold: ZB-H1 as many as 1F1B's first rank, ZB-H2 nearly twice, ZB-V (of
    which a rank's chunks are half as large) the same as ZB-H1.

    Sources: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, sections 2 and 3; ZB-V: Qi et al., Pipeline
    Parallelism with Controllable Memory, NeurIPS 2024.
    """
    if schedule == "zb-v":
        return 2 * num_ranks
    return num_ranks if schedule == "zb-h1" else 2 * num_ranks - 1


def _zero_bubble(
    schedule: Schedule,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    num_microbatches: int,
    num_ranks: int,
) -> list[Event]:
    """Each rank takes what is ready: backward for inputs, then a forward if its memory allows, else weights.

    Greedy where the papers solve for the best order, so at most a little slower than they.
    """
    num_stages = len(forward_s)
    chunks = num_stages // num_ranks
    done: dict[tuple[int, str, int], float] = {}
    free, held = [0.0] * num_ranks, [0] * num_ranks
    count: Counter[tuple[int, str, int]] = Counter()
    events: list[Event] = []

    def may_start(rank: int, chunk: int, slack: int) -> bool:
        """Whether memory allows a forward. In ZB-V the way down leaves room for what comes back up."""
        ahead = count[rank, "forward", 0] - count[rank, "forward", 1]
        if schedule == "zb-v" and chunk == 0 and ahead >= 2 * (num_ranks - rank) - 1:
            return False
        return held[rank] < _most_held(schedule, num_ranks) + slack

    def choice(rank: int, slack: int = 0) -> tuple[float, int, Action]:
        found: list[tuple[float, int, Action]] = []
        for chunk in reversed(range(chunks)):
            stage = stage_of(schedule, rank, chunk, num_ranks)
            for order, kind in enumerate(("backward", "forward", "weight")):
                i = count[rank, kind, chunk]
                if i == num_microbatches or (kind == "forward" and not may_start(rank, chunk, slack)):
                    continue
                if kind == "weight":
                    ready = done.get((stage, "backward", i))
                else:
                    ready = _ready(kind, i, stage, num_stages, done)
                if ready is not None:
                    action = Action(kind, i, chunk)  # type: ignore[arg-type]
                    found.append((max(ready, free[rank]), 3 * order + (chunks - 1 - chunk), action))
        return min(found, key=lambda item: item[:2]) if found else idle

    idle = (math.inf, 0, Action("forward", -1))  # nothing is ready
    waiting = [choice(rank) for rank in range(num_ranks)]
    slack = 0
    while len(events) < 3 * num_stages * num_microbatches:
        rank = min(range(num_ranks), key=lambda r: waiting[r][0])
        if waiting[rank] is idle:  # every rank is full and waits for another: one more has to be held
            slack += 1
            assert slack <= num_stages * num_microbatches, "the schedule deadlocks"
            waiting = [choice(rank, slack) for rank in range(num_ranks)]
            continue
        start, _, action = waiting[rank]
        stage = stage_of(schedule, rank, action.chunk, num_ranks)
        seconds = {"forward": forward_s, "backward": input_s, "weight": weight_s}[action.kind][stage]
        free[rank] = done[stage, action.kind, action.microbatch] = start + seconds
        count[rank, action.kind, action.chunk] += 1
        held[rank] += {"forward": 1, "backward": 0, "weight": -1}[action.kind]
        events.append(Event(rank, action, start, start + seconds))
        slack = 0
        touched = {rank}
        for neighbour in (stage - 1, stage + 1):
            if 0 <= neighbour < num_stages:
                touched.add(rank_and_chunk(schedule, neighbour, num_ranks)[0])
        for other in touched:
            waiting[other] = choice(other)
    return events


def simulated_step_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    once_s: Sequence[float],
    num_microbatches: int,
    weight_s: Sequence[float] | None = None,
) -> float:
    """Seconds of one step: each rank ends its step `once_s` after its last pass.

    forward_s, backward_s, weight_s: per stage; once_s: per rank. Long steps are periodic once the pipeline is full:
    beyond 6 micro-batches per rank (9 for zero-bubble ones) the last period is continued.
    """
    num_ranks = len(once_s)
    period = 4 * num_ranks if schedule in ZERO_BUBBLE else num_ranks  # greedy ones settle late
    simulated = 5 * num_ranks + period
    if num_microbatches > simulated:
        shorter, longer = (
            simulated_step_s(schedule, forward_s, backward_s, once_s, count, weight_s)
            for count in (simulated - period, simulated)
        )
        return longer + (num_microbatches - simulated) * (longer - shorter) / period
    ends = [0.0] * num_ranks
    for event in simulate(schedule, forward_s, backward_s, num_microbatches, weight_s, num_ranks):
        ends[event.rank] = max(ends[event.rank], event.end_s)
    return max(end + once for end, once in zip(ends, once_s, strict=True))
