"""The time that a schedule's table takes, by event simulation, and the passes on its critical path.

A table fixes which pass waits for which, so a step is the longest path through the table: a maximum of sums of
durations. Each single path is a lower bound on every step with the same schedule, whatever its stages hold. The search
proves its plans by such paths.

Tables of very many micro-batches are cut in their steady state, and micro-batches are left out there. A path that
crosses the cut on some rank also crosses it in the whole table, where that rank has all its passes of the omitted
micro-batches to do. So the step of the shorter table, with the time of these passes added on each rank, is the length
of a path of the whole table, and never more than its step. For 1F1B, GPipe and zero-bubble tables it was exactly the
step in each of 25,000 random tables (tests/test_simulate.py has some). Tables in rounds, in which ranks can set the
pace together, are played whole as long as MOST_PASSES allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..arrays import Floats
from ..plan.schedules import ZERO_BUBBLE, Action, Schedule, first_forwards, microbatches_in_round, stage_of, table
from .elementwise import Values, most

Numbers = float | Floats

STEADY = 4
"""Micro-batches per rank, or rounds of an interleaved table, that are played of a longer table; filling the pipeline
takes up to two, and so does emptying it."""

MOST_PASSES = 40_000
"""Largest number of passes (of micro-batches through stages) with which a table in rounds is played whole."""


@dataclass(frozen=True)
class Event:
    """An action with its start and its end. rank: along the pipeline."""

    rank: int
    action: Action
    start_s: float
    end_s: float


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    weight_s: Sequence[float],
    num_ranks: int,
) -> list[Event]:
    """Start and end of every action. An action starts when its rank is free and its input has arrived.

    forward_s, backward_s, weight_s: [stage], waiting for transfers included. A rank has one or more stages. weight_s is
    the part of backward_s that zero-bubble schedules put off.
    """
    steps, actions = _order(schedule, num_ranks, num_microbatches, len(forward_s) // num_ranks)
    seconds = _durations(schedule, forward_s, backward_s, weight_s)
    ends, free = [0.0] * (len(steps) + 1), [0.0] * num_ranks
    _play(steps, seconds, free, ends, 0)
    free = [0.0] * num_ranks
    events = []
    for (rank, _, waits_for), action, end in zip(steps, actions, ends[1:], strict=True):
        events.append(Event(rank, action, max(free[rank], ends[waits_for]), end))
        free[rank] = end
    return events


TableStep = tuple[int, int, int]
"""(rank, index of its duration, number of the step that it waits for: from 1 on, 0 for none)."""


@lru_cache(maxsize=256)
def _order(
    schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int
) -> tuple[tuple[TableStep, ...], tuple[Action, ...]]:
    """All actions of a table, each after the one that it waits for: a forward waits for that of the stage before, a
    backward for that of the stage after, and a backward for weights for that for inputs. Indices of durations run
    through the stages for each kind of pass in turn."""
    order = table(schedule, num_ranks, num_microbatches, virtual)
    num_stages, last = num_ranks * virtual, num_ranks * virtual - 1
    stages = [[stage_of(schedule, rank, chunk, num_ranks) for chunk in range(virtual)] for rank in range(num_ranks)]
    # [stage][micro-batch] -> number of that step, 0 before it is there
    forward, backward = ([[0] * num_microbatches for _ in range(num_stages)] for _ in range(2))
    position = [0] * num_ranks
    steps: list[TableStep] = []
    actions: list[Action] = []
    while len(steps) < sum(map(len, order)):
        before = len(steps)
        for rank, (todo, held) in enumerate(zip(order, stages, strict=True)):
            while position[rank] < len(todo):
                action = todo[position[rank]]
                kind, microbatch, chunk = action
                stage = held[chunk]
                if kind == "forward":
                    what, done = stage, forward
                    needs = forward[stage - 1][microbatch] if stage else None
                elif kind == "backward":
                    what, done = num_stages + stage, backward
                    needs = forward[last][microbatch] if stage == last else backward[stage + 1][microbatch]
                else:
                    what, done = 2 * num_stages + stage, None
                    needs = backward[stage][microbatch]
                if needs == 0:
                    break
                steps.append((rank, what, needs or 0))
                actions.append(action)
                if done is not None:
                    done[stage][microbatch] = len(steps)
                position[rank] += 1
        assert len(steps) > before, "the schedule's table deadlocks"
    return tuple(steps), tuple(actions)


@dataclass(frozen=True)
class _ShortenedTable:
    """All steps of a table, or the steps before and after a cut through its steady state.

    before, after: steps, numbered consecutively. left_out: number of micro-batches between them. read: [rank] ->
    numbers of its steps before the cut for which some step after it waits. own: [rank] -> indices of the durations of
    its passes of one micro-batch.
    """

    before: tuple[TableStep, ...]
    after: tuple[TableStep, ...]
    left_out: int
    read: tuple[tuple[int, ...], ...]
    own: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def _cut(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int, longest: int) -> _ShortenedTable:
    """The steps of a table, which is cut if it has more than about `longest` micro-batches."""
    num_stages = num_ranks * virtual
    stages = [[stage_of(schedule, rank, chunk, num_ranks) for chunk in range(virtual)] for rank in range(num_ranks)]
    kinds = 3 if schedule in ZERO_BUBBLE else 2
    own = tuple(tuple(kind * num_stages + s for kind in range(kinds) for s in held) for held in stages)
    in_rounds = _is_in_rounds(schedule, virtual)
    period = microbatches_in_round(num_ranks, num_microbatches) if in_rounds else 1
    longest = max(period, longest // period * period)
    short = min(num_microbatches, longest + (num_microbatches - longest) % period)
    alike = not in_rounds or microbatches_in_round(num_ranks, short) == period
    if schedule == "gpipe" or num_microbatches - short <= period or not alike:
        steps, _ = _order(schedule, num_ranks, num_microbatches, virtual)
        return _ShortenedTable(steps, (), 0, ((),) * num_ranks, own)
    passes = kinds * virtual * period
    back = short // period // 2 - (0 if in_rounds else num_ranks)
    tables = (table(schedule, num_ranks, count, virtual) for count in (short, short + period))
    lengths = [_common(one, other) - back * passes for one, other in zip(*tables, strict=True)]
    steps, _ = _order(schedule, num_ranks, short, virtual)
    first, left = {0}, list(lengths)
    for number, (rank, _, waits_for) in enumerate(steps, 1):  # what is before the cut waits for nothing after it
        left[rank] = left[rank] - 1 if waits_for in first else 0
        if left[rank] >= 0 and waits_for in first:
            first.add(number)
    order = sorted(first - {0}) + [number for number in range(1, len(steps) + 1) if number not in first]
    place = {0: 0} | {number: i for i, number in enumerate(order, 1)}
    renumbered = [(rank, what, place[waits]) for rank, what, waits in (steps[n - 1] for n in order)]
    before, after = tuple(renumbered[: len(first) - 1]), tuple(renumbered[len(first) - 1 :])
    crossed = {waits for _, _, waits in after if 0 < waits <= len(before)}
    read = tuple(tuple(n for n in sorted(crossed) if before[n - 1][0] == rank) for rank in range(num_ranks))
    return _ShortenedTable(before, after, num_microbatches - short, read, own)


def _is_in_rounds(schedule: Schedule, virtual: int) -> bool:
    """Whether micro-batches go through a rank's stages in rounds of several."""
    return virtual > 1 and schedule != "zb-v"


def _common(one: Sequence[Action], other: Sequence[Action]) -> int:
    """Number of actions that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _durations(
    schedule: Schedule, forward_s: Sequence[Values], backward_s: Sequence[Values], weight_s: Sequence[Values] | None
) -> list[Values]:
    if schedule not in ZERO_BUBBLE:
        return list(forward_s) + list(backward_s)
    weights: list[Values] = list(weight_s) if weight_s else [0.0 * each for each in forward_s]
    return list(forward_s) + [both - weight for both, weight in zip(backward_s, weights, strict=True)] + weights


def _play(
    steps: Sequence[TableStep], seconds: Sequence[Values], free: list[Values], ends: list[Values], done: int
) -> None:
    """Compute when each step ends. done: number of steps that were played before. free: [rank] -> when its last step so
    far ends; ends: [step number] -> when it ends, 0.0 at index 0. Both are updated."""
    if isinstance(seconds[0], np.ndarray):
        for number, (rank, what, waits_for) in enumerate(steps, done + 1):
            free[rank] = ends[number] = most(free[rank], ends[waits_for]) + seconds[what]
        return
    for number, (rank, what, waits_for) in enumerate(steps, done + 1):
        start, ready = free[rank], ends[waits_for]
        free[rank] = ends[number] = (ready if ready > start else start) + seconds[what]


def simulated_step_s(
    schedule: Schedule,
    forward_s: Sequence[Values],
    backward_s: Sequence[Values],
    once_s: Sequence[Values],
    num_microbatches: int,
    weight_s: Sequence[Values] | None = None,
) -> Values:
    """Seconds of one step, or of many steps at once (tables). Each rank ends its step `once_s` after its last pass.

    forward_s, backward_s, weight_s: [stage]; once_s: [rank].
    """
    num_ranks, num_stages = len(once_s), len(forward_s)
    longest, virtual = STEADY * num_ranks, num_stages // num_ranks
    if _is_in_rounds(schedule, virtual):
        longest = max(2 * longest, MOST_PASSES // (2 * num_stages))
    cut = _cut(schedule, num_ranks, num_microbatches, virtual, longest)
    seconds = _durations(schedule, forward_s, backward_s, weight_s)
    nothing = 0.0 * seconds[0]
    free, ends = [nothing] * num_ranks, [nothing] * (1 + len(cut.before) + len(cut.after))
    _play(cut.before, seconds, free, ends, 0)
    if cut.left_out:
        for rank, own in enumerate(cut.own):
            left_out_s = cut.left_out * sum((seconds[what] for what in own), start=nothing)
            free[rank] = free[rank] + left_out_s
            for number in cut.read[rank]:
                ends[number] = ends[number] + left_out_s
        _play(cut.after, seconds, free, ends, len(cut.before))
    step_s = free[0] + once_s[0]
    for end, once in zip(free[1:], once_s[1:], strict=True):
        step_s = most(step_s, end + once)
    return step_s


@dataclass(frozen=True)
class CriticalPath:
    """A path through a schedule's table. No step is shorter than the passes on it, one after the other, whatever these
    take.

    passes: [forward, backward, weight][stage] -> how many of them are on it; without zero bubbles the backward is
    whole, and the third row is 0. rank: the one on which it ends.
    """

    passes: Floats
    rank: int

    def length_s(self, seconds: Floats, once_s: Floats) -> float:
        """Seconds from the path's first pass to the end of the step on its last rank. seconds: [forward, backward,
        weight][stage]; once_s: [rank]."""
        return float((self.passes * seconds).sum() + once_s[self.rank])


def critical_paths(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    once_s: Sequence[float],
    num_microbatches: int,
    weight_s: Sequence[float],
    longer_than_s: float = 0.0,
) -> list[CriticalPath]:
    """For every rank the longest path that ends on it, if it is longer than `longer_than_s`; the longest first. In long
    tables that run in rounds, only those paths count that stay on one rank between filling and emptying the
    pipeline."""
    num_ranks, num_stages = len(once_s), len(forward_s)
    cut = _cut(schedule, num_ranks, num_microbatches, num_stages // num_ranks, STEADY * num_ranks)
    seconds = _durations(schedule, forward_s, backward_s, weight_s)
    num_before = len(cut.before)
    free, last = [0.0] * num_ranks, [0] * num_ranks
    ends, came_from = [0.0] * (1 + num_before + len(cut.after)), [0] * (1 + num_before + len(cut.after))
    for steps, number in ((cut.before, 0), (cut.after, num_before)):
        for rank, what, waits_for in steps:
            number += 1
            start, ready, came_from[number] = free[rank], ends[waits_for], last[rank]
            if ready > start:
                start, came_from[number] = ready, waits_for
            free[rank] = ends[number] = start + seconds[what]
            last[rank] = number
        if number == num_before and cut.left_out:
            for rank, own in enumerate(cut.own):
                left_out_s = cut.left_out * sum(seconds[what] for what in own)
                free[rank] += left_out_s
                for crossing in cut.read[rank]:
                    ends[crossing] += left_out_s
    every, found = (*cut.before, *cut.after), []
    for end in sorted(range(num_ranks), key=lambda rank: -free[rank] - once_s[rank]):
        if free[end] + once_s[end] <= longer_than_s:
            break
        counts = [0.0] * (3 * num_stages)
        number, crossed = last[end], not cut.left_out
        while number:
            rank, what, _ = every[number - 1]
            if number <= num_before and not crossed:
                crossed = True
                for own_what in cut.own[rank]:
                    counts[own_what] += cut.left_out
            counts[what] += 1
            number = came_from[number]
        found.append(CriticalPath(np.array(counts).reshape(3, num_stages), end))
    return found


def alone_s(
    schedule: Schedule,
    rank: int,
    num_ranks: int,
    num_microbatches: int,
    forward_s: Numbers,
    backward_s: Numbers,
    after_s: Numbers,
) -> Numbers:
    """Lower bound in seconds from when the first micro-batch reaches a rank of one stage until the rank's last pass
    ends: all its passes, its waiting for the first gradient, and in 1F1B and GPipe that for the last one.

    Before the first backward a rank has only as many forwards as its table puts ahead, and after the last forward only
    as many backwards. If the ranks after it take longer than these, it waits. If all forwards come first that is one
    wait, else there are two. forward_s, backward_s: of the rank's stage, numbers or arrays, gradients of weights
    included. after_s: seconds of forward and backward (zero bubbles: for inputs only) of one micro-batch in all stages
    after it.
    """
    ahead = first_forwards(schedule, rank, num_ranks, num_microbatches)
    first, last = after_s - (ahead - 1) * forward_s, after_s - (ahead - 1) * backward_s
    busy_s = num_microbatches * (forward_s + backward_s)
    if schedule in ZERO_BUBBLE:
        return busy_s + np.maximum(0.0, first)
    if ahead == num_microbatches:
        return busy_s + np.maximum(0.0, np.maximum(first, last))
    return busy_s + np.maximum(0.0, first) + np.maximum(0.0, last)


def even_step_s(
    schedule: Schedule, num_ranks: int, num_microbatches: int, slowest_s: Numbers, pass_s: Numbers
) -> Numbers:
    """Lower bound in seconds for the passes of a step, for all cuts of a pipeline with one stage per rank under 1F1B or
    GPipe, or of a single stage. slowest_s, pass_s: lower bounds on the seconds of a micro-batch on the slowest rank,
    and on all ranks together; numbers or arrays.

    GPipe: all forwards pass the slowest rank, then all backwards. 1F1B: let rank r hold w_r. The paths of `alone_s`
    through it take at least prefix_r + m w_r + 2 suffix_r - (p - r - 1) w_r, where m > p - r. Weighted so that all w
    count alike, which takes weights of at least 0 only for m > p, they make (m + p - 1) / p x pass_s; with half the
    wait (any m >= p) still (m + (p - 1) / 2) / p. For the slowest rank alone, what comes after it is shorter than (p -
    r - 1) slowest_s by no more than p slowest_s - pass_s.
    """
    count = num_microbatches
    if schedule == "gpipe" or num_ranks == 1:
        return (count - 1) * slowest_s + pass_s
    bubble = num_ranks - 1 if count > num_ranks else (num_ranks - 1) / 2
    even = (count + bubble) / num_ranks * pass_s
    uneven = 2 * pass_s + (count - 1 - num_ranks) * slowest_s if count > num_ranks else pass_s
    return np.maximum(np.maximum(even, uneven), count * slowest_s)


def least_step_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    once_s: Sequence[float],
    num_microbatches: int,
    busy_s: Sequence[float] | None = None,
) -> float:
    """Lower bound in seconds of one step, for all orders of passes, from what each rank waits for and has to do.
    busy_s: [rank] -> seconds that it computes for a micro-batch, if these are not those of its stages.

    A rank begins when the first micro-batch has passed all ranks before it, and then has all micro-batches of all its
    stages to do. Unless gradients of weights come last, the last backward then still has to pass the ranks before it,
    and the first rank has to end its step.
    """
    num_ranks, step_s, ahead_s, behind_s = len(once_s), 0.0, 0.0, 0.0
    for rank, end_s in enumerate(once_s):
        chunks = range(len(forward_s) // num_ranks)
        stages = [stage_of(schedule, rank, chunk, num_ranks) for chunk in chunks]
        own_s = sum(forward_s[stage] + backward_s[stage] for stage in stages) if busy_s is None else busy_s[rank]
        if schedule not in ZERO_BUBBLE:
            end_s = max(end_s, behind_s + once_s[0])
        step_s = max(step_s, ahead_s + num_microbatches * own_s + end_s)
        ahead_s, behind_s = ahead_s + forward_s[rank], behind_s + backward_s[rank]
    return step_s
