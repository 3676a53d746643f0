"""Event simulation of a pipeline schedule: every forward and backward at its place in the schedule's own table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .plan import Schedule


@dataclass(frozen=True)
class Action:
    """One forward or backward of one micro-batch on one stage."""

    kind: Literal["forward", "backward"]
    microbatch: int


@dataclass(frozen=True)
class Event:
    """An action with its time."""

    stage: int
    action: Action
    start_s: float
    end_s: float


def table(schedule: Schedule, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """[stage] -> its actions in order. 1F1B: as many forwards ahead as stages follow, then in turn (Narayanan et al.,
    SC21, section 2.2). GPipe and a single stage: all forwards first, or forward and backward in turn."""
    order = []
    for stage in range(num_stages):
        ahead = num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)
        actions = [Action("forward", i) for i in range(ahead)]
        for i in range(num_microbatches):
            actions.append(Action("backward", i))
            if ahead + i < num_microbatches:
                actions.append(Action("forward", ahead + i))
        order.append(actions)
    return order


def in_flight(actions: Sequence[Action]) -> int:
    """Largest number of micro-batches whose activations a stage holds at once."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def simulate(
    schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int
) -> list[Event]:
    """Start and end of every action; an action starts when its stage is free and its input has arrived.

    forward_s, backward_s: per stage, waiting for transfers included.
    """
    num_stages = len(forward_s)
    order = table(schedule, num_stages, num_microbatches)
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * num_stages
    position = [0] * num_stages
    events: list[Event] = []
    while len(events) < 2 * num_stages * num_microbatches:
        progressed = False
        for stage in range(num_stages):
            while position[stage] < len(order[stage]):
                action = order[stage][position[stage]]
                ready = _ready(action, stage, num_stages, done)
                if ready is None:
                    break
                start = max(free[stage], ready)
                end = start + (forward_s if action.kind == "forward" else backward_s)[stage]
                done[stage, action.kind, action.microbatch] = free[stage] = end
                events.append(Event(stage, action, start, end))
                position[stage] += 1
                progressed = True
        assert progressed, "the schedule's table deadlocks"
    return events


def _ready(action: Action, stage: int, num_stages: int, done: dict[tuple[int, str, int], float]) -> float | None:
    """When an action's input is there, or None if it is not yet known."""
    if action.kind == "forward":
        return 0.0 if stage == 0 else done.get((stage - 1, "forward", action.microbatch))
    if stage == num_stages - 1:
        return done.get((stage, "forward", action.microbatch))
    return done.get((stage + 1, "backward", action.microbatch))


def simulated_step_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    once_s: Sequence[float],
    num_microbatches: int,
) -> float:
    """Seconds of one step: each stage ends its step `once_s` after its last backward.

    Long steps are periodic once the pipeline is full: beyond 6 micro-batches per stage the last period is continued.
    """
    num_stages = len(forward_s)
    simulated = 6 * num_stages
    if num_microbatches > simulated:
        shorter, longer = (
            simulated_step_s(schedule, forward_s, backward_s, once_s, count)
            for count in (simulated - num_stages, simulated)
        )
        return longer + (num_microbatches - simulated) * (longer - shorter) / num_stages
    ends = [0.0] * num_stages
    for event in simulate(schedule, forward_s, backward_s, num_microbatches):
        ends[event.stage] = max(ends[event.stage], event.end_s)
    return max(end + once for end, once in zip(ends, once_s, strict=True))
