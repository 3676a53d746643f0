"""Pipeline schedules: which rank holds which stage, and the table of what each rank does in which order."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"]


def stage_of(schedule: Schedule, rank: int, chunk: int, num_ranks: int) -> int:
    """Number of the stage that a chunk of a rank is. Chunks go round the ranks; in ZB-V they go there and back."""
    if schedule == "zb-v" and chunk == 1:
        return 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def rank_and_chunk(schedule: Schedule, stage: int, num_ranks: int) -> tuple[int, int]:
    """(rank, chunk) of a stage."""
    chunk, rank = divmod(stage, num_ranks)
    return (num_ranks - 1 - rank if schedule == "zb-v" and chunk == 1 else rank), chunk


ZERO_BUBBLE: tuple[Schedule, ...] = ("zb-h1", "zb-h2", "zb-v")
"""Schedules whose backward is in two parts, for inputs and for weights."""


def is_chunked(schedule: Schedule) -> bool:
    """Whether ranks hold several stages or split their backward. Then there is no closed form, and only the simulation
    gives the step time."""
    return schedule == "interleaved" or schedule in ZERO_BUBBLE


PassKind = Literal["forward", "backward", "weight"]

_KINDS: tuple[PassKind, ...] = ("forward", "backward", "weight")


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk. chunk: number of the stage among those of its rank. In zero-bubble
    schedules "backward" is the backward for inputs only."""

    kind: PassKind
    microbatch: int
    chunk: int = 0


@lru_cache(maxsize=64)
def table(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int = 1) -> tuple[list[Action], ...]:
    """[rank] -> its actions in order, which are both run and priced.

    1F1B: one forward ahead for each stage that follows and one more, then backward and forward in turn (Narayanan et
    al., SC21, section 2.2). Interleaved: the same with chunks, and with micro-batches in rounds of about as many as
    there are ranks (section 2.2.2 there; unequal rounds as in torch.distributed.pipelining). GPipe: all forwards first.
    A single stage: forward and backward in turn. Zero bubbles: see _zero_bubble and _there_and_back.
    """
    ranks = range(num_ranks)
    if schedule == "interleaved":
        return tuple(_interleaved(rank, num_ranks, num_microbatches, virtual) for rank in ranks)
    if schedule in ("zb-h1", "zb-h2"):
        return tuple(_zero_bubble(schedule, rank, num_ranks, num_microbatches, virtual) for rank in ranks)
    if schedule == "zb-v":
        return tuple(_there_and_back(rank, num_ranks, num_microbatches) for rank in ranks)
    order = []
    forwards = [Action("forward", i) for i in range(num_microbatches)]
    backwards = [Action("backward", i) for i in range(num_microbatches)]
    for rank in ranks:
        ahead = num_microbatches if schedule == "gpipe" else min(num_microbatches, num_ranks - rank)
        order.append(_in_turn(forwards, backwards, ahead))
    return tuple(order)


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> list[Action]:
    forwards, backwards = _in_rounds(num_ranks, num_microbatches, virtual)
    ahead, _ = _ahead("interleaved", rank, num_ranks, num_microbatches, virtual)
    return _in_turn(forwards, backwards, ahead)


def _ahead(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> tuple[int, int]:
    """(forwards before the first backward, backwards before the first one for weights) of a rank, under schedules in
    rounds; a table with fewer passes has all of them first."""
    hops = 1 if schedule == "zb-h1" else 2
    behind = hops * rank if schedule in ZERO_BUBBLE else 0
    chunks = (virtual - 1) * microbatches_in_round(num_ranks, num_microbatches)
    return chunks + hops * (num_ranks - 1 - rank) + 1, behind


def first_forwards(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int) -> int:
    """Number of forwards, on a rank with one stage, before its first backward."""
    if schedule in ("zb-h1", "zb-h2"):
        return min(num_microbatches, _ahead(schedule, rank, num_ranks, num_microbatches, 1)[0])
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_ranks - rank)


def microbatches_in_round(num_ranks: int, num_microbatches: int) -> int:
    """Number of micro-batches in a round: about as many as there are ranks."""
    return -(-num_microbatches // max(1, num_microbatches // num_ranks))


def num_microbatches_rule(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int) -> str | None:
    """The rule that excludes this number of micro-batches under a schedule; None if it runs them."""
    if schedule == "1f1b" and num_microbatches < num_ranks:
        return (
            f"1F1B needs at least as many micro-batches as stages: {num_microbatches} < {num_ranks}; use gpipe or a "
            "smaller micro_batch"
        )
    rounds = max(1, num_microbatches // num_ranks)
    in_rounds = schedule == "interleaved" or (schedule in ("zb-h1", "zb-h2") and virtual > 1)
    if in_rounds and num_microbatches % rounds:
        return (
            f"an interleaved schedule takes micro-batches in equal rounds of about pipeline={num_ranks}; "
            f"{num_microbatches} do not make {rounds} such rounds: use a multiple of {num_ranks}"
        )
    return None


@lru_cache(maxsize=4)
def _in_rounds(num_ranks: int, num_microbatches: int, virtual: int) -> tuple[list[Action], list[Action]]:
    """(forwards, backwards) of a rank, in an order that is the same for all ranks: each round goes through all chunks
    before the next round begins."""
    in_round = microbatches_in_round(num_ranks, num_microbatches)
    forwards, backwards = [], []
    for first in range(0, num_microbatches, in_round):
        microbatches = range(first, min(first + in_round, num_microbatches))
        for chunk in range(virtual):
            forwards += [Action("forward", i, chunk) for i in microbatches]
            backwards += [Action("backward", i, virtual - 1 - chunk) for i in microbatches]
    return forwards, backwards


def _zero_bubble(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> list[Action]:
    """Actions of a rank under ZB-H1 or ZB-H2. It does one forward ahead (ZB-H2: two) for each rank after it, and its
    backward for weights one micro-batch (ZB-H2: two) late for each rank before it.

    ZB-H1 holds no more than 1F1B's first rank, ZB-H2 nearly twice as much (Qi et al., Zero Bubble Pipeline Parallelism,
    ICLR 2024, section 2). The order of ZB-H1 is that of torch's ScheduleInterleavedZeroBubble, with its chunks.
    """
    forwards, backwards = _in_rounds(num_ranks, num_microbatches, virtual)
    ahead, behind = _ahead(schedule, rank, num_ranks, num_microbatches, virtual)
    order = list(forwards[:ahead])
    weights = [Action("weight", action.microbatch, action.chunk) for action in backwards]
    for i, backward in enumerate(backwards):
        order.append(backward)
        order += weights[i - behind : i - behind + 1] if i >= behind else []
        order += forwards[ahead + i : ahead + i + 1]
    return order + weights[max(0, len(weights) - behind) :]


def _there_and_back(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Actions of a rank under ZB-V: chunk 0 goes down the ranks and chunk 1 back up (Qi et al., Pipeline Parallelism
    with Controllable Memory, NeurIPS 2024). The order is that of torch's ScheduleZBVZeroBubble. It is made for at least
    2p - 1 micro-batches; with fewer, the actions of missing ones are left out."""
    count = max(2 * num_ranks - 1, num_microbatches)
    down, up = (tuple(iter(_of_each(kind, chunk, count)) for kind in _KINDS) for chunk in (0, 1))
    early = 2 * num_ranks - 1 - rank
    turns = [down[0]] * (early - rank) + [up[0], down[0]] * rank + [*up] * (num_ranks - rank)
    turns += [*down, *up] * (count - early) + [*down[1:], *up] * (early - num_ranks)
    turns += [down[1], up[1]] * rank + [*down[1:]] * (num_ranks - rank) + [up[2]] * rank + [down[2]] * rank
    order = [next(upcoming) for upcoming in turns]
    return [action for action in order if action.microbatch < num_microbatches]


@lru_cache(maxsize=8)
def _of_each(kind: PassKind, chunk: int, num_microbatches: int) -> tuple[Action, ...]:
    """Passes of this kind through a chunk, one for every micro-batch."""
    return tuple(Action(kind, i, chunk) for i in range(num_microbatches))


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then backwards and forwards in turn."""
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
    """[chunk] -> micro-batches whose activations a rank holds when it holds most in all. Zero-bubble schedules hold
    them until the backward for weights."""
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
    """[rank][chunk] -> micro-batches in flight at the peak, counted without making the table: forwards before the first
    backward, and where the backward for weights comes last, those until its first; after that as many end as begin."""
    if schedule == "gpipe":
        return ((num_microbatches,),) * num_ranks
    ahead: list[tuple[int, ...]]
    if schedule == "1f1b":
        ahead = [(num_ranks - rank,) for rank in range(num_ranks)]
    elif schedule == "zb-v":
        ahead = [(2 * num_ranks - 1 - rank, rank + 1) for rank in range(num_ranks)]
    else:
        of_rank = [_ahead(schedule, rank, num_ranks, num_microbatches, virtual) for rank in range(num_ranks)]
        return tuple(_first_in_rounds(sum(passes), num_ranks, num_microbatches, virtual) for passes in of_rank)
    return tuple(tuple(min(num_microbatches, count) for count in counts) for counts in ahead)


_STEADY = 4
"""Micro-batches per rank from which on more of them no longer change what a rank holds at its peak."""


@cache
def rank_put_off(
    schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int
) -> tuple[tuple[int, ...], ...]:
    """[rank][chunk] -> micro-batches that wait for their backward for weights, under a zero-bubble schedule, when the
    rank holds most and begins the next backward for inputs."""
    few = min(num_microbatches, _STEADY * num_ranks)
    return tuple(_put_off_at_peak(actions, virtual) for actions in table(schedule, num_ranks, few, virtual))


def _put_off_at_peak(actions: Sequence[Action], virtual: int) -> tuple[int, ...]:
    """[chunk] -> micro-batches that wait for their backward for weights when a rank holds most. A waiting one counts
    twice, as if its waiting gradients were as large as what is kept."""
    held, waiting, most, found = 0, [0] * virtual, 0, (0,) * virtual
    for action in actions:
        if action.kind == "backward":
            if held + sum(waiting) > most:
                most, found = held + sum(waiting), tuple(waiting)
            waiting[action.chunk] += 1
        elif action.kind == "weight":
            held -= 1
            waiting[action.chunk] -= 1
        else:
            held += 1
    return found


def _first_in_rounds(passes: int, num_ranks: int, num_microbatches: int, virtual: int) -> tuple[int, ...]:
    """[chunk] -> how many of a rank's first `passes` forwards go through it."""
    in_round = microbatches_in_round(num_ranks, num_microbatches)
    rounds, rest = divmod(min(passes, num_microbatches * virtual), in_round * virtual)
    last = min(in_round, num_microbatches - rounds * in_round)
    return tuple(rounds * in_round + min(last, max(0, rest - chunk * last)) for chunk in range(virtual))


SCHEDULE_NAMES: dict[Schedule, str] = {
    "none": "",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
}
