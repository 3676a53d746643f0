"""Best-first branch and bound over the tree of nodes.py: the plans that are found, and a lower bound for all others."""

import heapq
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..arrays import Ints
from ..cost.chain import Chain
from ..cost.layer_cost import CostModel
from ..plan.document import Plan, Recompute
from ..plan.frameworks import Framework
from ..plan.making import make_plan
from ..plan.pins import Pins
from ..plan.schedules import is_chunked
from ..plan.shape import NO_EXTRAS, Offered, Shape
from ..plan.training import TrainingSpec
from .bounds import Bounds
from .chunked import best_chunking
from .columns import ROUNDING, StagePrices
from .ilp import solve_master
from .nodes import Node, ShapeNode, ShapesNode, Solved, SplitNode, expired
from .polish import MANY_CUTS, are_few, best_of_all, best_of_likely, evened, num_cuts, polished
from .scan import Assignment, scan, simulated_s
from .solver import OutOfTimeError
from .space import Family, Space, Split
from .tensor_choice import CutChoice
from .unequal import Kinds, UnequalPrices

WINDOW = 0.03
"""Shapes that may be slower than the best by at most this share are solved, too, for runners-up and for simpler
plans."""

SIMPLE = 0.01
"""Of plans that are slower than the best by at most this share, the simplest is chosen."""

MAX_NEAR = 40
"""Most shapes that are solved within the window once no shape can be better: enough for runners-up, in seconds."""

ALTERNATIVES = 5
"""Other layouts to show beside the plan, if so many are legal and fit."""

MAX_SLOW = 60
"""Most shapes outside the window that are solved to have enough alternatives."""

SLOWEST = 4.0
"""Layouts that take at least so many times as long as the best are no alternatives."""

EAGER = 0.95
"""Until there is a plan, the seconds of a node are multiplied by this once for each node above it in the tree, so that
nodes which are nearly plans are finished first. Tried with DeepSeek-V3 on 2,048 GPUs: 1, 0.95 and 0.9 give the first
plan after 6.7, 3.3 and 2.2 s of looking, and end the search after 16.9, 16.7 and 18.9 s."""

TIE = 0.001
"""A plan whose bound is below it by at most this share counts as optimal."""

PROVEN = 0.9 * TIE
"""Gap down to which bounds are raised; a little less than TIE, so that rounding does not undo the proof."""

CLOSER = 1.2
"""Closed forms of 1F1B are at most so many times their simulated steps (stage_cost.closed_form_s)."""

COUNTED = 0.5
"""Share of the time limit in which the space may be counted. What is left out then is not searched (on clusters whose
number of devices has hundreds of divisors)."""

PATIENCE = 1 / 6
"""Share of the time limit for which a search goes on without a better plan or progress of the proof; after it better
cuts of the shapes that were found are looked for."""

PROOF = 1 / 20
"""Share of the time limit that a proof has at least, however long before it the best plan was found. Tried on a busy
machine, on which DeepSeek-V3 on 2,048 GPUs had its plan more than PATIENCE before the search for better ones ended: a
gap of 6.5% without this, 4.4% with it."""

SOME = 3
"""Number of solved shapes of a family from which the guesses of the others are corrected. Tried with RWKV-7B on 64
GPUs: 4,143 shapes were solved without correction, 510 with one, 673 with three; with one, a random chain got a plan
that was 0.3% slower."""

WIDE = 0.1
"""As long as the gap is wider than this, a proof gets more time whenever it has narrowed the gap by HELPS. Tried with
less: from 2% on, DeepSeek-V3 on 2,048 GPUs took 12 s longer for 0.02 points, Llama-3.1-405B on 16,384 13 s for 1.2;
gaps of 20 to 80% of short chains close with either."""

FIRST_GAPS = (0.05, 0.035, 0.025, 0.015)
"""Gaps to which the bounds of all shapes are brought, one after the other, before NARROW: time may end before all are.
Tried, without them and with: DeepSeek-V3 on 2,048 GPUs 3.7 and 2.5% in 60 CPU s, T5-3B on 64 7.5 and 4.8% in 30; six
gaps from 6% on instead leave Llama-3.1-405B on 16,384 the same."""

NARROW = 0.99 * 0.005
"""Gap below which bounds are raised further only if that takes little time."""

WHOLE_S = (0.3, 1.2, 4.8)
"""Seconds of the integer program of a shape whose bound leaves a wide gap: the next number is tried as long as the last
one helped. Tried with 11 searches for Hugging Face models, the first alone beside 0.3 and 1.5 s whether that helps or
not: gaps at most 0.15 points wider but for one (7.4 instead of 5.9%), and 109 instead of 127 CPU s in all."""

HELPS = 0.1
"""Share of the gap by which an integer program or a proof has to narrow it to count as helping."""

NARROW_WHOLE_S = (0.5,)
"""Seconds of the integer program of a shape whose bound leaves a narrow gap."""

STUCK_S = 1.0
"""Seconds for which better plans are still looked for, once nothing raises the bound of the shape that leaves the gap:
in 22 searches for Hugging Face models neither one nor two seconds found any."""

LAST_S = 1.0
"""Seconds in which narrow gaps of all shapes together are closed."""

PROGRAM_S = 4.0
"""Seconds of the integer program that chooses cuts and options of the best shape again."""

CUTS_S, ALL_CUTS_S = 0.3, 2.0
"""Seconds for looking at more cuts of the best shape if nothing is to be proven: at some of them, or at all there
are."""


TOLD_EVERY_S = 0.1
"""Least seconds between two reports of progress."""

LOOKING, PROVING = (0.0, 0.5), (0.5, 0.95)
"""Parts of the progress bar (begin, end): for looking for the best plan, and for proving it."""

Progress = Callable[[str, float], None]


@dataclass
class Outcome:
    """What a search over a space has found and proven. bound: lower bound in seconds for all plans of the space."""

    solved: list[Solved] = field(default_factory=list)
    bound: float = float("inf")
    complete: bool = True
    total: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    pruned: int = 0
    num_solved: int = 0

    @property
    def best(self) -> Solved | None:
        """The solved shape with the shortest simulated step; None if none was solved."""
        return min(self.solved, key=lambda s: s.seconds, default=None)

    @property
    def nothing_fits(self) -> bool:
        """Whether it is proven that no plan of the space fits, which is more than that none was found."""
        return self.complete and not self.solved and math.isinf(self.bound)


class Explorer:
    """Searches spaces for one model, cluster and job; caches what all of them share."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        training: TrainingSpec,
        framework: Framework | None = None,
    ) -> None:
        """framework: the one of all pins that are explored, None if they have none."""
        self.profile = profile
        self.cluster = cluster
        self.training = training
        self.framework = framework
        self.model = CostModel(profile, cluster, training, framework=framework)
        self.chain = Chain(self.model)
        self.kinds = Kinds(self.model) if len(cluster.kinds) > 1 else None
        self.choice = CutChoice(self.model)
        self.bounds = Bounds(self.chain, self.kinds)
        self._on_one: dict[tuple[object, ...], tuple[float, Solved | None]] = {}

    def explore(
        self,
        pins: Pins,
        deadline_s: float,
        near: int = MAX_NEAR,
        progress: Progress | None = None,
        cutoff_s: float = float("inf"),
        any_will_do: bool = False,
    ) -> Outcome:
        """Solve every shape that could be the best, then up to `near` more within the window, and then (unless near is
        0) as many as are needed for enough alternatives, even slower ones.

        deadline_s: time.monotonic() at which to stop. The outcome then says that it is not complete; its bound is 0 if
        not even all splits were counted. cutoff_s: the step of a known plan; with near=0 only faster ones are looked
        for. any_will_do: stop at the first plan that fits; if the outcome is complete and has none, none fits.
        """
        return _Search(self, pins, deadline_s, near, progress, cutoff_s, any_will_do).outcome()

    def priced(
        self, shape: Shape, recompute: Recompute | None, reshard: bool | None = None, offered: Offered = NO_EXTRAS
    ) -> StagePrices | UnequalPrices:
        """Prices of a shape's stages; on unequal devices each stage has its own."""
        if shape.kind_order and self.kinds is not None:
            return self.kinds.priced(shape, recompute, reshard, offered)
        return StagePrices(self.chain, shape, recompute, reshard, offered)

    def solved(
        self,
        prices: StagePrices | UnequalPrices,
        family: Family,
        near: Ints | None,
        cutoff_s: float,
        deadline_s: float,
        least_s: float = 0.0,
    ) -> Solved | None:
        """The best plan of a shape that was found in the time there is, if it is faster than `cutoff_s`; else None.
        near: cuts whose step may come near the shape's bound `least_s`, if any are known."""
        shape = prices.shape
        with self.until(deadline_s):
            if shape.pipeline == 1 and isinstance(prices, StagePrices):
                return self._on_one_stage(prices, cutoff_s, deadline_s)
            if is_chunked(shape.schedule):
                tried = self._cuts_of(prices, family) + ([] if near is None else [near])
                chunked = best_chunking(prices, tried, cutoff_s)
                if num_cuts(prices) <= MANY_CUTS:
                    chunked = best_of_likely(prices, cutoff_s if chunked is None else chunked.seconds) or chunked
                return None if chunked is None else Solved(shape, prices, chunked, chunked.seconds)
            best = None
            for found in self._unchunked(prices, near, cutoff_s):
                seconds = simulated_s(prices, found)
                if seconds < cutoff_s:
                    best, cutoff_s = Solved(shape, prices, found, seconds), seconds
                if seconds <= least_s * (1 + TIE):
                    break
            return best

    def _on_one_stage(self, prices: StagePrices, cutoff_s: float, deadline_s: float) -> Solved | None:
        """The best options of a shape with one stage, if they are faster than `cutoff_s`. They are cached, because
        rules of thumb often lead to shapes that are solved already."""
        key = prices.shape, *prices.pinned
        below_s, solved = self._on_one.get(key, (0.0, None))
        if solved is None and cutoff_s > below_s:
            found = scan(prices, cutoff_s)
            solved = None if found is None else Solved(prices.shape, prices, found, found.seconds)
            if not expired(deadline_s):
                self._on_one[key] = cutoff_s, solved
        return solved if solved is not None and solved.seconds < cutoff_s else None

    def _unchunked(
        self, prices: StagePrices | UnequalPrices, near: Ints | None, cutoff_s: float
    ) -> Iterator[Assignment]:
        """Plans of a 1F1B or GPipe pipeline that may be the best: with the cuts `near`, and with those of least closed
        form."""
        found = None if near is None else _at(prices, near)
        if found is not None:
            yield found
        found = scan(prices, CLOSER * cutoff_s)
        if found is not None:
            yield found

    def closer(
        self, prices: StagePrices | UnequalPrices, found: Solved | None, below_s: float, deadline_s: float
    ) -> tuple[Solved | None, float]:
        """(the shape with better cuts, if any are faster than `found`, or than `below_s` if that is None; else `found`;
        lower bound in seconds for all plans of the shape, 0 if not all cuts were looked at)."""
        shape = prices.shape
        below_s = below_s if found is None else found.seconds
        better, least_s = None, below_s if shape.pipeline == 1 else 0.0
        if are_few(prices, deadline_s - time.monotonic()):
            better, least_s = best_of_all(prices, below_s, deadline_s)
        elif found is not None and is_chunked(shape.schedule):
            better = polished(prices, found.assignment, deadline_s)
        if better is None or better.seconds >= below_s:
            return found, least_s
        return Solved(shape, prices, better, better.seconds), least_s

    def at(self, prices: StagePrices | UnequalPrices, cuts: Ints, cutoff_s: float) -> Solved | None:
        """The shape with these cuts; None if it is not faster than `cutoff_s`."""
        found = best_chunking(prices, [cuts], cutoff_s) if is_chunked(prices.shape.schedule) else _at(prices, cuts)
        seconds = math.inf if found is None else simulated_s(prices, found)
        return Solved(prices.shape, prices, found, seconds) if found is not None and seconds < cutoff_s else None

    def by_program(self, solved: Solved, seconds: float) -> Solved:
        """A 1F1B or GPipe pipeline, or one stage, with cuts and options chosen again by the integer program over
        columns (ilp.py), at exact prices and within `seconds`; what was given, if that is not faster."""
        prices, shape = solved.prices, solved.shape
        if is_chunked(shape.schedule):
            return solved
        try:
            with self.until(time.monotonic() + seconds):
                found = solve_master([prices], CLOSER * solved.seconds, seconds)
        except OutOfTimeError:
            return solved
        if found is None or found[0].status == "infeasible":
            return solved
        step_s = simulated_s(prices, found[2])
        return Solved(shape, prices, found[2], step_s) if step_s < solved.seconds * (1 - ROUNDING) else solved

    def _cuts_of(self, prices: StagePrices | UnequalPrices, family: Family) -> list[Ints]:
        """The cuts of a chunked shape that are tried first: [stage] -> number of the place."""
        tried = self.bounds.tried(family, fitting=True)
        found: list[Ints] = [np.searchsorted(self.chain.places, cuts.places) for cuts in tried]
        return found + evened(prices, tried) if isinstance(prices, UnequalPrices) else found

    @contextmanager
    def until(self, deadline_s: float) -> Iterator[None]:
        """Within this context the best options are looked for until `deadline_s`, and after it any that fit."""
        for chain in self._chains:
            chain.deadline_s = deadline_s
        try:
            yield
        finally:
            for chain in self._chains:
                chain.deadline_s = float("inf")

    @property
    def _chains(self) -> list[Chain]:
        """The chain with prices for all devices, and one for each kind of device."""
        return [self.chain, *(self.kinds.chains if self.kinds is not None else [])]

    def plan_of(self, solved: Solved) -> Plan:
        """The plan of a solved shape. Equal layers take their options in the order of the choice."""
        stages = [
            [option for _, option, count in choice.parts for _ in range(count)] for choice in solved.assignment.choices
        ]
        return make_plan(self.profile, self.cluster, self.training, solved.shape, stages)


class _Search:
    """One search of one space."""

    def __init__(
        self,
        explorer: Explorer,
        pins: Pins,
        deadline_s: float,
        near: int,
        progress: Progress | None,
        cutoff_s: float,
        any_will_do: bool,
    ) -> None:
        self.explorer, self.pins, self.bounds = explorer, pins, explorer.bounds
        self._deadline_s, self._near, self._progress = deadline_s, near, progress
        self._cutoff_s, self._any_will_do = cutoff_s, any_will_do
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Node]] = []
        self._depths: dict[int, int] | None = {} if math.isinf(cutoff_s) else None
        self._rest: list[Node] = []
        self._layouts: set[tuple[object, ...]] = set()
        self._slower: defaultdict[Family, list[float]] = defaultdict(list)
        self._best, self._extra = cutoff_s, 0
        self._patience_s = PATIENCE * (deadline_s - time.monotonic())
        self._proof_s = PROOF * (deadline_s - time.monotonic())
        self._patient_until_s = deadline_s
        self._out = Outcome()
        self._told_s, self._shown = 0.0, 0.0

    def _tell(self, what: str, part: tuple[float, float], share: float) -> None:
        """Report what is being done, and which share of that part is done. The bar never goes back."""
        now_s = time.monotonic()
        if self._progress is None or now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = now_s
        self._shown = max(self._shown, part[0] + (part[1] - part[0]) * min(1.0, max(0.0, share)))
        self._progress(f"{what}, {self._out.num_solved:,} layouts solved", self._shown)

    def outcome(self) -> Outcome:
        """Run the search: what it finds, and a lower bound for all plans."""
        self._begin(time.monotonic())
        self._look()
        out = self._out
        if (self._near > 0 and not self._any_will_do) or (not out.solved and math.isinf(self._cutoff_s)):
            self._prove()
        self._improve()
        out.pruned = out.total - sum(out.rejected.values()) - out.num_solved
        left = [node.bound for node in self._rest] + [node.bound for _, _, node in self._heap]
        out.bound = min([out.bound, *left, *(s.seconds for s in out.solved)])
        return out

    def _improve(self) -> None:
        """Look for other cuts and options of the best shape that was found: by the integer program, or, if nothing is
        to be proven, by a short look at more cuts."""
        best, left_s = self._out.best, self._deadline_s - time.monotonic()
        if best is None or left_s <= 0 or self._any_will_do:
            return
        if self._near > 0:
            better: Solved | None = self.explorer.by_program(best, min(PROGRAM_S, left_s))
        else:
            look_s = ALL_CUTS_S if are_few(best.prices, ALL_CUTS_S) else CUTS_S
            until_s = time.monotonic() + min(look_s, left_s)
            better, _ = self.explorer.closer(best.prices, best, best.seconds, until_s)
        self._out.solved = [better if each is best and better is not None else each for each in self._out.solved]

    def _begin(self, started_s: float) -> None:
        """Count the shapes of the space, and put its splits on the heap."""
        explorer, out = self.explorer, self._out
        space = Space(
            explorer.profile,
            explorer.cluster,
            explorer.training,
            self.pins,
            explorer.choice.worth_trying,
            anywhere=self._any_will_do,
        )
        until_s = started_s + COUNTED * (self._deadline_s - started_s)
        splits: list[Split] = []
        for split in space.splits():
            if expired(until_s):
                out.complete, out.bound = False, 0.0
                break
            out.total += space.num_shapes_of(split)
            splits.append(split)
        for split, bound in zip(splits, self.bounds.of_splits(splits, space), strict=True):
            self._put(SplitNode(bound, split, space, explorer), float("inf"))
        out.rejected = dict(space.rejected)
        out.total += sum(space.rejected.values())

    def _look(self) -> None:
        """Replace the node with the least guess by its children, and solve it if it is a shape, until no node is likely
        to hold a better plan."""
        window = WINDOW if self._near > 0 else 0.0
        first = self._heap[0][0] if self._heap else 0.0
        started_s = time.monotonic()
        while self._heap:
            if math.isfinite(self._best):
                self._take_time()
            likely = self._heap[0][0]
            nearer = (
                (likely - first) / (self._best - first) if math.isfinite(self._best) and self._best > first else 0.0
            )
            slower = (time.monotonic() - started_s) / max(1e-9, self._deadline_s - started_s)
            self._tell("looking for the best plan", LOOKING, max(nearer, slower))
            few = self._near > 0 and self._extra < MAX_NEAR + MAX_SLOW and len(self._layouts) <= ALTERNATIVES
            best = self._best
            if not few and (likely >= best * (1 + window) or (likely >= best and self._extra >= self._near)):
                return
            if expired(self._deadline_s):
                self._out.complete = False
                return
            cutoff = best * (SLOWEST if few else 1 + window)
            _, order, node = heapq.heappop(self._heap)
            depth = 0 if self._depths is None else self._depths.pop(order)
            if isinstance(node, ShapeNode | ShapesNode) and self._guess_again(node):
                self._put(node, cutoff, depth)
                continue
            if isinstance(node, ShapeNode):
                self._extra += likely >= best
                self._solve(node, cutoff)
                if self._any_will_do and self._out.solved:
                    return
                continue
            for child in node.children(cutoff, cutoff):
                child.bound = max(child.bound, node.bound)
                if child.bound < cutoff:
                    self._put(child, cutoff, depth + 1)

    def _take_time(self) -> None:
        """Order the heap without EAGER from now on, because there is a plan."""
        if self._depths is not None:
            self._depths = None
            self._heap = [(max(node.guess, node.bound), order, node) for _, order, node in self._heap]
            heapq.heapify(self._heap)

    def _put(self, node: Node, cutoff_s: float, depth: int = 0) -> None:
        """Put a node on the heap of the search, or with those that are left for the proof if its guess is `cutoff_s` or
        more. depth: number of nodes above it in the tree."""
        if node.guess >= cutoff_s:
            self._rest.append(node)
            return
        likely, order = max(node.guess, node.bound), next(self._order)
        if self._depths is not None:
            self._depths[order] = depth
            likely *= EAGER**depth
        heapq.heappush(self._heap, (likely, order, node))

    def _guess_again(self, node: ShapeNode | ShapesNode) -> bool:
        """Raise the guess of these shapes, once SOME shapes of their family are solved, by the least factor by which
        those took longer than their own guesses. (Guesses leave out what whole layers and the order of passes cost.)
        Whether it was raised."""
        seen = self._slower[node.family if isinstance(node, ShapeNode) else node.family.family]
        longer = min(seen) if len(seen) >= SOME else 1.0
        if longer <= node.slower:
            return False
        node.guess *= longer / node.slower
        node.slower = longer
        return True

    def _solve(self, node: ShapeNode, cutoff: float) -> None:
        """Find the best plan of a shape, and keep the shape for the proof."""
        out = self._out
        out.num_solved += not node.asked
        node.asked = True
        if is_chunked(node.shape.schedule):
            node.look_at_cuts(cutoff)
        else:
            node.bound = max(node.bound, node.by_ranks_s(cutoff))
        found = node.solve(cutoff, self._deadline_s) if node.bound < cutoff else None
        is_late = expired(self._deadline_s)  # it may have been left half solved
        if is_late:
            out.complete = False
        elif is_chunked(node.shape.schedule) and math.isfinite(cutoff):
            took_s = cutoff if found is None else found.seconds
            self._slower[node.family].append(took_s / node.guess * node.slower)
        if node.shape.pipeline > 1 or is_late:  # else what was found of it is the best of it
            self._rest.append(node)
        if found is None or (node.found is not None and found.seconds >= node.found.seconds):
            return
        out.solved = [each for each in out.solved if each is not node.found] + [found]
        node.found = found
        self._layouts.add(node.shape.layout)
        if found.seconds < self._best:
            self._best = found.seconds
            self._patient_until_s = time.monotonic() + self._patience_s

    def _prove(self) -> None:
        """Raise the least bounds of the nodes that are left: first until the gap to the best plan is no longer wide,
        then until it is as narrow as it gets in little time. Then look for more cuts of shapes whose bounds leave a
        gap. Ends early if no better plan was found for long. The bounds that are left then bound the space."""
        self._patient_until_s = max(self._patient_until_s, time.monotonic() + self._proof_s)
        rest, self._rest = [*self._rest, *(node for _, _, node in self._heap)], []
        self._heap = [(node.bound, next(self._order), node) for node in rest]
        heapq.heapify(self._heap)
        if all(self._raise(gap, gap, WHOLE_S, math.inf) for gap in (*FIRST_GAPS, NARROW)):
            self._raise(PROVEN, 0.0, NARROW_WHOLE_S, time.monotonic() + LAST_S)
        for node in self._open():
            if expired(self._until_s):
                break
            self._settle(node, self._until_s)
        self.bounds.pipelines.deadline_s = math.inf

    @property
    def _until_s(self) -> float:
        """time.monotonic() at which the proof ends."""
        patient = self._out.solved or self._any_will_do
        return min(self._patient_until_s, self._deadline_s) if patient else self._deadline_s

    def _raise(self, gap: float, left_gap: float, whole_s: Sequence[float], deadline_s: float) -> bool:
        """Raise bounds until none is further below the best plan than the gap; whether that was reached. The node with
        the least bound is replaced by its children. If it is a shape whose bound knows all cuts and options, and
        nothing raises it, this gap cannot be closed, and better plans are only looked for during STUCK_S. left_gap: gap
        up to which slow bounds are raised; whole_s: see `_try`."""
        first = here = self._heap[0][0] if self._heap else 0.0
        started_s, closed = time.monotonic(), True
        tries: Counter[ShapeNode] = Counter()
        while self._heap and self._heap[0][0] < self._best * (1 - gap) * (1 - 2 * ROUNDING):
            if WIDE * self._best < self._best - self._heap[0][0] < (1 - HELPS) * (self._best - here):
                here = self._heap[0][0]
                self._patient_until_s = max(self._patient_until_s, time.monotonic() + self._patience_s)
            until_s = min(deadline_s, self._until_s)
            if expired(until_s) or (self._any_will_do and self._out.solved):
                return False
            nearer = (self._heap[0][0] - first) / (self._best - first)
            later = (time.monotonic() - started_s) / max(1e-9, until_s - started_s)
            self._tell(f"proving: at most {1 - self._heap[0][0] / self._best:.1%} faster", PROVING, max(nearer, later))
            _, _, node = heapq.heappop(self._heap)
            self.bounds.pipelines.deadline_s = until_s
            if not isinstance(node, ShapeNode) or not node.raised:
                for child in node.children(self._best, self._best * (1 - left_gap)):
                    child.bound = max(child.bound, node.bound)
                    self._keep(child)
            elif node.learn() or self._try(node, tries, whole_s, gap, until_s):
                self._keep(node)
            else:
                self._rest.append(node)
                closed = False
                if self._out.solved or self._any_will_do:  # that nothing fits can no longer be shown
                    self._patient_until_s = min(self._patient_until_s, time.monotonic() + STUCK_S)
        return closed

    def _try(
        self, node: ShapeNode, tries: Counter[ShapeNode], whole_s: Sequence[float], gap: float, until_s: float
    ) -> bool:
        """Try to raise the bound of a shape that knows all cuts and options, or to find a better plan of it, by the
        integer program: for the next of `whole_s` seconds each time, as long as that helps. The second time its best
        plan and more cuts are looked for instead. Whether anything was left to try."""
        if tries[node] and not node.settled:
            self._solve(node, self._best)
            if not expired(until_s):
                self._settle(node, until_s)
            return True
        if tries[node] >= len(whole_s):
            return False
        helped_s = node.bound + HELPS * (self._best - node.bound)
        left_s = min(whole_s[tries[node]], until_s - time.monotonic())
        least_s, cuts = self.bounds.of_whole_layers(node.prices, self._best * (1 - gap), left_s)
        node.bound = max(node.bound, least_s)
        if cuts is not None:
            self._replace(node, self.explorer.at(node.prices, cuts, self._best))
        tries[node] = tries[node] + 1 if node.bound >= helped_s else len(whole_s)
        return True

    def _keep(self, node: Node) -> None:
        """Put a node on the heap of the proof, if some plan of it may be better than the best."""
        if node.bound < self._best:
            heapq.heappush(self._heap, (node.bound, next(self._order), node))

    def _settle(self, node: ShapeNode, deadline_s: float) -> None:
        """Look at more cuts of a shape, at all of them if they are not many."""
        node.settled = True
        self.bounds.pipelines.deadline_s = deadline_s
        better, least_s = self.explorer.closer(node.prices, node.found, self._best, deadline_s)
        node.bound = max(node.bound, least_s * (1 - ROUNDING))
        if node.has_few_cuts and node.bound < self._best * (1 - PROVEN):
            node.bound = max(node.bound, self.bounds.of_prices(node.prices, self._best * (1 - PROVEN))[0])
        self._replace(node, better)

    def _open(self) -> list[ShapeNode]:
        """Solved shapes whose bounds leave a gap, the least bounds first."""
        left = {id(node): node for node in [*self._rest, *(node for _, _, node in self._heap)]}
        solved = [node for node in left.values() if isinstance(node, ShapeNode) and node.asked and not node.settled]
        open_s = self._best * (1 - PROVEN) * (1 - 2 * ROUNDING)
        return sorted((node for node in solved if node.bound < open_s), key=lambda node: node.bound)

    def _replace(self, node: ShapeNode, found: Solved | None) -> None:
        """Keep a plan of a shape if it is better than the one that was found before."""
        if found is not None and (node.found is None or found.seconds < node.found.seconds):
            self._out.solved = [each for each in self._out.solved if each is not node.found] + [found]
            node.found = found
            self._best = min(self._best, found.seconds)


def _at(prices: StagePrices | UnequalPrices, cuts: Ints) -> Assignment | None:
    """The plan whose stages begin at these places, at their best options; None if they do not fit."""
    table, shape = prices.chain.composition_of, prices.shape
    compositions = [int(table[a, b]) for a, b in itertools.pairwise(cuts)]
    if not all(math.isfinite(prices.on(stage).exact_s(c, stage)) for stage, c in enumerate(compositions)):
        return None
    choices = tuple(prices.on(s).choice(c, shape.flights(s)) for s, c in enumerate(compositions))
    return Assignment(math.nan, tuple(compositions), choices)
