"""The search as a tree: split -> micro-batch -> family -> shapes -> shape, each with a bound of all plans below it.

A node has children, or is a shape that can be solved. Where a better bound costs more it is asked for only when it is
the node's turn by the cheap one: the node then has one child, itself with that bound. Plans are looked for in the order
of guesses, which are no bounds; what is proven rests on the bounds alone.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ..arrays import Ints
from ..plan.document import Recompute
from ..plan.shape import NO_EXTRAS, Offered, Shape
from .bounds import Bounds, recompute_of
from .columns import ROUNDING, StagePrices
from .polish import FEW_CUTS, MANY_CUTS, least_of_cuts_s, num_cuts
from .scan import Assignment, least_by_ranks
from .space import Family, Leaf, Space, Split
from .unequal import UnequalPrices


@dataclass(frozen=True)
class Solved:
    """A shape with cuts and options. seconds: the simulated step, without the time that the software takes once per
    step."""

    shape: Shape
    prices: StagePrices | UnequalPrices
    assignment: Assignment
    seconds: float


class Solver(Protocol):
    """What nodes need from the search."""

    bounds: Bounds

    def priced(
        self, shape: Shape, recompute: Recompute | None, reshard: bool | None = None, offered: Offered = NO_EXTRAS
    ) -> StagePrices | UnequalPrices:
        """The prices of a shape's stages."""

    def solved(
        self,
        prices: StagePrices | UnequalPrices,
        family: Family,
        near: Ints | None,
        cutoff_s: float,
        deadline_s: float,
        least_s: float = 0.0,
    ) -> Solved | None:
        """The best plan of a shape that was found, if it is faster than `cutoff_s`; else None."""


class Node(Protocol):
    """A set of plans. bound: lower bound in seconds for all of them; guess: seconds that the best of them is likely to
    take."""

    bound: float

    @property
    def guess(self) -> float:
        """Seconds that the best plan is likely to take."""

    def children(self, cutoff_s: float, enough_s: float) -> Iterable["Node"]:
        """Nodes that together hold the same plans, except some that take `cutoff_s` or longer. enough_s: slow bounds
        need not be raised beyond it."""


@dataclass
class SplitNode:
    """All micro-batches and schedules of a split."""

    bound: float
    split: Split
    space: Space
    search: Solver

    @property
    def guess(self) -> float:
        """The bound: there is no better guess."""
        return self.bound

    def children(self, cutoff_s: float, enough_s: float) -> Iterator[Node]:
        """One node for each micro-batch."""
        groups: dict[int, list[Family]] = {}
        for family in self.space.families_of(self.split):
            groups.setdefault(family.micro_batch, []).append(family)
        samples = [families[0].frugal.samples for families in groups.values()]
        slowest = self.search.bounds.slowest_s(self.split, self.split.pipeline, samples).tolist()
        for families, slowest_s in zip(groups.values(), slowest, strict=True):
            least_s = families[0].num_microbatches * slowest_s
            if least_s < cutoff_s:
                yield WorkNode(least_s, tuple(families), self.space, self.search)


@dataclass
class WorkNode:
    """Families with one micro-batch. raised: whether the bound takes memory and data ranks' traffic into account."""

    bound: float
    families: tuple[Family, ...]
    space: Space
    search: Solver
    raised: bool = False

    @property
    def guess(self) -> float:
        """The bound: there is no better guess."""
        return self.bound

    def children(self, cutoff_s: float, enough_s: float) -> Iterator[Node]:
        """First itself with a better bound, then one node for each schedule."""
        bounds = self.search.bounds
        if not self.raised:
            least_s = bounds.anywhere_s(self.families[0], self.space)
            yield WorkNode(max(self.bound, least_s), self.families, self.space, self.search, raised=True)
            return
        for family in self.families:
            least_s = bounds.of_family(family)
            if least_s < cutoff_s:
                yield FamilyNode(max(self.bound, least_s), family, self.space, self.search)


@dataclass
class FamilyNode:
    """Shapes that differ in how data is split, in when gradients are reduced, and in the order of axes. raised: whether
    the bound takes into account what the schedule holds."""

    bound: float
    family: Family
    space: Space
    search: Solver
    raised: bool = False

    @property
    def guess(self) -> float:
        """The bound: there is no better guess."""
        return self.bound

    def children(self, cutoff_s: float, enough_s: float) -> Iterator[Node]:
        """First itself with a better bound, then its shapes."""
        bounds = self.search.bounds
        if not self.raised:
            least_s = bounds.held_s(self.family, self.space)
            yield FamilyNode(max(self.bound, least_s), self.family, self.space, self.search, raised=True)
            return
        seconds = np.maximum(self.bound, bounds.of_shapes(self.family, self.space, cutoff_s))
        some = np.flatnonzero(seconds < cutoff_s)
        likely = np.maximum(seconds[some], bounds.guesses(self.family, self.space, some.tolist(), with_memory=False))
        yield from ShapesNode.of(seconds[some].tolist(), likely.tolist(), some.tolist(), self, False)


@dataclass
class ShapesNode:
    """The shapes of a family that are left, with the likely fastest first. raised: whether guesses and bounds take
    memory into account. known: how many prices of their table (fluid.py) the bounds take into account. slower: factor
    by which the first guess has been raised, because other shapes of the family took longer than theirs."""

    bound: float
    guess: float
    shapes: Sequence[tuple[float, float, int]]
    """(guess, bound, index of the shape in its family) of each."""
    family: FamilyNode
    raised: bool = False
    known: int = 0
    slower: float = 1.0

    @classmethod
    def of(
        cls,
        bounds: Iterable[float],
        guesses: Iterable[float],
        some: Iterable[int],
        family: FamilyNode,
        raised: bool,
        known: int = 0,
    ) -> "Iterator[ShapesNode]":
        """One node for these shapes; none if there are none."""
        found = sorted(zip(guesses, bounds, some, strict=True))
        if found:
            yield cls(min(bound for _, bound, _ in found), found[0][0], found, family, raised, known)

    def children(self, cutoff_s: float, enough_s: float) -> Iterator[Node]:
        """First itself with better bounds, then its first shape, and a node for the others."""
        family, space, search = self.family.family, self.family.space, self.family.search
        guesses, bounds = [shape[0] for shape in self.shapes], [shape[1] for shape in self.shapes]
        some, known = [which for _, _, which in self.shapes], search.bounds.num_prices(family)
        if not self.raised:
            better = np.maximum(bounds, search.bounds.with_memory_s(family, space, some, cutoff_s))
            near = np.flatnonzero(better < cutoff_s)
            if not len(near):
                return
            better, some = better[near], np.array(some)[near].tolist()
            likely = np.maximum(better, search.bounds.guesses(family, space, some, with_memory=True))
            likely = np.maximum(np.array(guesses)[near], likely)
            yield from ShapesNode.of(better.tolist(), likely.tolist(), some, self.family, True, known)
            return
        if self.known < known:  # programs of other shapes have found prices since
            better = np.maximum(bounds, search.bounds.by_prices_s(family, space, np.array(some), known - self.known))
            left = better < cutoff_s
            likely = np.maximum(guesses, better)
            some = np.array(some)[left].tolist()
            yield from ShapesNode.of(better[left].tolist(), likely[left].tolist(), some, self.family, True, known)
            return
        shape = family.shape(space.leaves(family).each[some[0]])
        yield ShapeNode(bounds[0], guesses[0], shape, family, space, search)
        yield from ShapesNode.of(bounds[1:], guesses[1:], some[1:], self.family, True, known)


@dataclass(eq=False)
class ShapeNode:
    """One shape: a leaf of the tree.

    The bound holds for all of its plans; what is found may be slower, and the difference is a gap in the proof.
    by_cuts: whether the bound takes each of the shape's cuts into account, if those are not too many. by_kind: whether
    it takes all options into account, but not yet the order of kinds of layers. raised: whether it takes all cuts and
    options into account as well as it can. asked: whether the best plan has been looked for, found or not. settled:
    whether more cuts have been looked at after that. known, slower: see `ShapesNode`.
    """

    bound: float
    guess: float
    shape: Shape
    family: Family
    space: Space
    search: Solver
    by_cuts: bool = False
    by_kind: bool = False
    raised: bool = False
    asked: bool = False
    settled: bool = False
    cuts: Ints | None = None
    found: Solved | None = None
    known: int = 0
    slower: float = 1.0

    @cached_property
    def prices(self) -> StagePrices | UnequalPrices:
        """Prices of its stages."""
        pins = self.space.pins
        return self.search.priced(self.shape, recompute_of(self.family, pins), pins.reshard, self.family.offered)

    @cached_property
    def has_few_cuts(self) -> bool:
        """Whether it is a pipeline with so few cuts that all are looked at instead of making a program."""
        return self.shape.pipeline > 1 and num_cuts(self.prices) <= FEW_CUTS

    def children(self, cutoff_s: float, enough_s: float) -> "Iterator[ShapeNode]":
        """Itself with a bound that takes all options into account, then all cuts; none if the bound reaches
        `cutoff_s`."""
        self.learn()
        self.look_at_cuts(cutoff_s)
        least_s, bounds = self.bound, self.search.bounds
        has_program = self.shape.pipeline > 1 and not self.has_few_cuts
        in_order = self.by_kind or not (has_program and bounds.kinds_take_turns)
        if least_s < enough_s and has_program:
            fluid_s, self.cuts = bounds.of_prices(self.prices, enough_s, in_order)
            least_s = max(least_s, fluid_s)
            if least_s < enough_s and in_order:
                least_s = max(least_s, self.by_ranks_s(cutoff_s))
        self.bound, self.by_kind = least_s, least_s < enough_s
        self.raised = self.by_kind and in_order
        if least_s < cutoff_s:
            yield self

    def learn(self) -> bool:
        """Raise the bound by prices that programs of other shapes have found since. Whether that raised it."""
        found, before = self.search.bounds.num_prices(self.family), self.bound
        if found > self.known:
            which = np.array([self.space.leaves(self.family).each.index(self._leaf)])
            least_s = self.search.bounds.by_prices_s(self.family, self.space, which, found - self.known)
            self.bound, self.known = max(before, float(least_s[0])), found
        return self.bound > before

    @property
    def _leaf(self) -> Leaf:
        shape = self.shape
        return Leaf(
            shape.data_replicate,
            shape.data_shard,
            shape.gradient_sync,
            shape.reshard,
            shape.mesh_axes,
            shape.kind_order,
        )

    def by_ranks_s(self, cutoff_s: float) -> float:
        """Lower bound in seconds from what the shape's ranks take, if each holds one stage; else 0. Stores cuts that
        may come near it."""
        if self.shape.virtual_stages > 1 or self.shape.pipeline == 1:
            return 0.0
        least_s, cuts = least_by_ranks(self.prices, cutoff_s)
        self.cuts = self.cuts if cuts is None else cuts
        return least_s

    def look_at_cuts(self, cutoff_s: float) -> None:
        """Raise the bound of a pipeline by looking at each of its cuts, if these are not too many; only the first
        time."""
        if not self.by_cuts and self.shape.pipeline > 1 and num_cuts(self.prices) <= MANY_CUTS:
            self.bound = max(self.bound, least_of_cuts_s(self.prices, self.bound, cutoff_s) * (1 - ROUNDING))
        self.by_cuts = True

    def solve(self, cutoff_s: float, deadline_s: float) -> Solved | None:
        """The best plan of the shape that was found, if it is faster than `cutoff_s`; else None."""
        return self.search.solved(self.prices, self.family, self.cuts, cutoff_s, deadline_s, self.bound)


def expired(deadline_s: float) -> bool:
    """Whether the deadline of a search has passed."""
    return time.monotonic() > deadline_s
