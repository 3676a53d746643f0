"""The time of a schedule's table, by event simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..plan.schedules import ZERO_BUBBLE, Action, Schedule, stage_of, table


@dataclass(frozen=True)
class Event:
    """An action with its time. rank: along the pipeline."""

    rank: int
    action: Action
    start_s: float
    end_s: float


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
    steps, actions = _order(schedule, ranks, num_microbatches, len(forward_s) // ranks)
    seconds = _durations(schedule, forward_s, backward_s, weight_s)
    ends, _ = _times(steps, seconds, ranks)
    free = [0.0] * ranks
    events = []
    for (rank, _, waits_for), action, end in zip(steps, actions, ends[1:], strict=True):
        events.append(Event(rank, action, max(free[rank], ends[waits_for]), end))
        free[rank] = end
    return events


Step = tuple[int, int, int]
"""(rank, index of its duration, what it waits for: number of a step from 1, or 0 for nothing)."""


@lru_cache(maxsize=256)
def _order(
    schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int
) -> tuple[tuple[Step, ...], tuple[Action, ...]]:
    """Every action of a table, each behind the one that it waits for: a forward for that of the stage before, a
    backward for that of the stage behind, weights for their backward. Durations count by kind, then by stage."""
    order = table(schedule, num_ranks, num_microbatches, virtual)
    num_stages, last = num_ranks * virtual, num_ranks * virtual - 1
    stages = [[stage_of(schedule, rank, chunk, num_ranks) for chunk in range(virtual)] for rank in range(num_ranks)]
    # [stage][micro-batch] -> number of that step, 0 before it is there
    forward, backward = ([[0] * num_microbatches for _ in range(num_stages)] for _ in range(2))
    position = [0] * num_ranks
    steps: list[Step] = []
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


def _durations(
    schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float], weight_s: Sequence[float] | None
) -> list[float]:
    if schedule not in ZERO_BUBBLE:
        return [*forward_s, *backward_s]
    weights = weight_s or [0.0] * len(forward_s)
    return [*forward_s, *(b - w for b, w in zip(backward_s, weights, strict=True)), *weights]


def _times(steps: Sequence[Step], seconds: Sequence[float], num_ranks: int) -> tuple[list[float], list[float]]:
    """([step] -> when it ends, behind a 0.0 for what waits for nothing, [rank] -> when it has done all)."""
    free = [0.0] * num_ranks
    ends = [0.0] * (len(steps) + 1)
    for number, (rank, what, waits_for) in enumerate(steps, 1):
        start, ready = free[rank], ends[waits_for]
        free[rank] = ends[number] = (ready if ready > start else start) + seconds[what]
    return ends, free


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
    beyond 6 micro-batches per rank the last period is continued, unless some rank has more to do by itself: where
    ranks are nearly equal, it takes longer until the slowest one sets the pace.
    """
    num_ranks = len(once_s)
    simulated = 6 * num_ranks
    if num_microbatches > simulated:
        shorter, longer = (
            simulated_step_s(schedule, forward_s, backward_s, once_s, count, weight_s)
            for count in (simulated - num_ranks, simulated)
        )
        continued = longer + (num_microbatches - simulated) * (longer - shorter) / num_ranks
        return max(continued, least_step_s(schedule, forward_s, backward_s, once_s, num_microbatches))
    steps, _ = _order(schedule, num_ranks, num_microbatches, len(forward_s) // num_ranks)
    _, last = _times(steps, _durations(schedule, forward_s, backward_s, weight_s), num_ranks)
    return max(end + once for end, once in zip(last, once_s, strict=True))


def least_step_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    once_s: Sequence[float],
    num_microbatches: int,
) -> float:
    """Seconds of one step that no order of passes beats, by what each rank waits for and has to do.

    A rank begins when the first micro-batch has passed all ranks before it, and then has all micro-batches of all its
    stages to do. Unless gradients of weights come last, the last backward has those ranks still before it, and then the
    end of the first one's step.
    """
    num_ranks, most, ahead_s, behind_s = len(once_s), 0.0, 0.0, 0.0
    for rank, end_s in enumerate(once_s):
        chunks = range(len(forward_s) // num_ranks)
        stages = [stage_of(schedule, rank, chunk, num_ranks) for chunk in chunks]
        busy_s = num_microbatches * sum(forward_s[stage] + backward_s[stage] for stage in stages)
        if schedule not in ZERO_BUBBLE:
            end_s = max(end_s, behind_s + once_s[0])
        most = max(most, ahead_s + busy_s + end_s)
        ahead_s, behind_s = ahead_s + forward_s[rank], behind_s + backward_s[rank]
    return most
