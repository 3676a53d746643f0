"""Which part of the experts a rank holds, and which ranks share the experts."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.document import Axis, Plan


@dataclass(frozen=True)
class ExpertPlace:
    """Place of a rank among the ranks of its stage that hold different tokens.

    expert: number of the part of every bank of experts that it holds. shard: its number among the ranks that hold the
    same part.
    """

    expert: int
    shard: int


def expert_place(plan: Plan, coordinates: Mapping[Axis, int]) -> ExpertPlace:
    """The place of a rank with these coordinates: neighbours hold different experts."""
    number = 0
    for axis in plan.token_axes:
        number = number * plan.degrees.of(axis) + coordinates[axis]
    shard, expert = divmod(number, plan.degrees.expert)
    return ExpertPlace(expert, shard)


def expert_group(plan: Plan) -> list[int]:
    """Ranks that share the experts with rank 0, in the order of the parts that they hold, rank 0 included."""
    ranks = []
    for number in range(plan.degrees.expert):
        rank, rest = 0, number
        for axis in reversed(plan.token_axes):
            rest, coordinate = divmod(rest, plan.degrees.of(axis))
            rank += coordinate * plan.stride(axis)
        ranks.append(rank)
    return ranks
