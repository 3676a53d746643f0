"""The least step of a pipeline if its layers could be divided: a linear program over all cuts and all options.

    minimise    T
    subject to  (cover)    sum_{s,o} n[s,r,o] = N_r                                        each run r of equal layers
                (order)    A[r,s] >= A[r+1,s],  A[r,s] = sum_{t<=s,o} n[t,r,o] / N_r       each run but the last, stage
                (holds)    sum_{r,o} n[s,r,o] >= 1                                         each stage s
                (memory)   sum_{s on q, r, o} bytes[s,r,o] n[s,r,o] <= room[q]             each rank q
                (path)     T >= sum_{s,r,o} seconds of P [s,r,o] n[s,r,o] + waits of P     each path P found so far

n[s,r,o] >= 0 is how many layers of run r stage s holds with option o (recompute and the like). A path P goes through
the schedule's table (simulate.CriticalPath): its passes take at least that long in any step of that schedule, so T is
below the simulated step of every plan of the shape, for all cuts and all options, as long as bytes, seconds and waits
are no more than the plan's and rooms no less. Paths are added until the step of the solution is no longer than T, or T
has reached what is asked for. At first a search stops a program once further paths raise T little; later it solves
those to their end whose shapes leave a gap. Paths depend on schedule, ranks and micro-batches alone: a program begins
with those that had a price in the last program of the same table. Runs are `Chain.alike`: neighbours of one kind are
one run.

Where kinds of layers take turns (three layers of one attention, then one of another), runs are as many as layers. The
program without (order), and all layers of a kind as one run, says nearly as much, and takes a hundredth of the time on
the longest: it comes first.

Where ranks hold several stages, what whole layers of a run on a rank run again at least (whole_ranks.py) is known for
each number n of them. It is no less than the sides of its convex hull a + b n, in a second program. And room[q] is for
the least of what is there in some layer's turn; what is there in the largest is no less than a mean over the layers of
the rank, weighted by their share of a step that is to be below T':

    (again)    sum_{s on q, o} again[o] n[s,r,o] >= a + b sum_{s on q, o} n[s,r,o]              each rank q, run r, side
    (turn)     sum (bytes[s,r,o] + (turn[q,r,o] - least[q]) m seconds[r,o] / T') n[s,r,o] <= room[q]         each rank q

The integer program asks for whole layers: first on every rank, which says most of it and is quick, then in every stage
with every option; and a rank leaves room for the turn of each option that one of its layers has.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import highspy
import numpy as np

from ..arrays import Floats, Ints
from ..cost.simulate import CriticalPath, critical_paths
from ..plan.schedules import ZERO_BUBBLE
from .path_prices import PathPrices, num_waits_of
from .solver import silence_highs
from .table import Table, paths_of_ranks
from .whole_ranks import LayerTurns, hull, least_again_s

TIGHT = 3e-4
"""Relative excess of the solution's step over T up to which no further paths are needed."""

MOST_ROUNDS = 100
"""Most times that paths are looked for in one program, unless it is solved to its end."""

STALLED = 10
"""Rounds after each of which a program is stopped if it is not likely to reach what is asked for."""

SHARES = (0.1, 0.3, 1.0)
"""Points, from the amounts with the shortest step (0) to the solution (1), at which paths are looked for, one after the
other. Tried with 126 layers in 80 stages: 4.7 CPU s to the end of the program, 5.9 with 0.2 and 0.5 instead, 8.0 with a
half alone."""

MANY_IDLE = 0.4
"""Least share of a program's paths that is dropped at a time, because each time HiGHS factorises anew."""

IDLE_ROUNDS = 5
"""Rounds without a price after which a path may be dropped; if it is missed it is found again."""

NO_PRICE = 1e-12
"""Duals up to this count as 0, being rounding."""


@dataclass(frozen=True)
class Layers:
    """Lower bounds on the costs of the layers of one run. [option] -> seconds of forward, of backward and, as a part of
    that, of gradients of weights, for one micro-batch; [stage][option] -> bytes that a layer holds there. count: number
    of layers. once_s: seconds of each at the end of a step. With stages on unequal devices seconds are [stage][option],
    and once_s is [stage]."""

    count: float
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    bytes: Floats
    once_s: float | Floats

    def of_each(self, seconds: Floats) -> Floats:
        """[stage][option] -> seconds, from seconds by option, or by stage and option."""
        each: Floats = np.broadcast_to(seconds, self.bytes.shape)
        return each

    def cost_as_much_as(self, others: "Layers") -> bool:
        """Whether single layers of both cost the same in every respect."""
        mine, theirs = ((e.forward_s, e.backward_s, e.weight_s, e.bytes) for e in (self, others))
        return np.array_equal(self.once_s, others.once_s) and all(map(np.array_equal, mine, theirs))


def united(runs: Sequence[Layers], neighbours_only: bool) -> tuple[list[Layers], list[int]]:
    """(runs, with those joined whose layers cost the same; [run] -> index of the joined run). neighbours_only: join
    only neighbours. A single layer at either end of the chain stays a run of its own, because its place is fixed."""
    found: list[Layers] = []
    united_of: list[int] = []
    for r, layers in enumerate(runs):
        at_end = layers.count == 1 and r in (0, len(runs) - 1)
        first = 1 if runs[0].count == 1 else 0
        others = range(max(first, len(found) - 1) if neighbours_only else first, len(found))
        same = None if at_end else next((u for u in others if layers.cost_as_much_as(found[u])), None)
        if same is None:
            found.append(layers)
        else:
            found[same] = replace(found[same], count=found[same].count + layers.count)
        united_of.append(len(found) - 1 if same is None else same)
    return found, united_of


class FluidProgram:
    """The program above, with what HiGHS has of it. Arrays (stage, run, rank, option, seconds, ...) have a number for
    each of its n."""

    def __init__(
        self,
        table: Table,
        each: Sequence[Layers],
        rooms: Sequence[float],
        waits_s: Floats | float,
        least_end_s: float,
        in_order: bool = True,
    ) -> None:
        runs, self._united_of = united(each, neighbours_only=in_order)
        self.table, self.runs, self.least_end_s = table, runs, least_end_s
        self.waits_s = np.broadcast_to(waits_s, table.num_stages - 1)
        places = self._columns()
        self.stage, self.run, self.option = (np.array(each) for each in zip(*places, strict=True))
        self.rank = np.array(table.rank_of)[self.stage]
        self.num = len(places)
        split = table.schedule in ZERO_BUBBLE
        self.seconds, self.once_s, self.held = np.zeros((3, self.num)), np.zeros(self.num), np.zeros(self.num)
        for r, layers in enumerate(runs):
            here = self.run == r
            at = self.stage[here], self.option[here]
            forward_s, backward_s, weight_s = (
                layers.of_each(each)[at] for each in (layers.forward_s, layers.backward_s, split * layers.weight_s)
            )
            self.seconds[:, here] = forward_s, backward_s - weight_s, weight_s
            self.once_s[here] = np.broadcast_to(layers.once_s, table.num_stages)[at[0]]
            self.held[here] = layers.bytes[at]
        self.unit_s = sum(layers.count * float((layers.forward_s + layers.backward_s).min()) for layers in runs)
        self.unit_s = self.unit_s * table.num_microbatches / table.num_ranks or 1.0
        self._order: list[tuple[int, int]] = []
        self._scales: list[float] = []
        self._paths: list[CriticalPath] = []
        self._idle_rounds: list[int] = []
        silence_highs()
        self._model = highspy.Highs()
        self._model.setOptionValue("output_flag", False)
        self._model.setOptionValue("threads", 1)
        self._add_rows(rooms, in_order)
        self.amounts: Floats = np.zeros(self.num)
        self.deadline_s = float("inf")
        self.is_solved = False

    def _columns(self) -> list[tuple[int, int, int]]:
        """(stage, run, option) of every n; a single layer at either end lies in its own stage."""
        found = []
        for r, layers in enumerate(self.runs):
            first = r == 0 and layers.count == 1
            last = r == len(self.runs) - 1 and layers.count == 1
            stages = [0] if first else [self.table.num_stages - 1] if last else range(self.table.num_stages)
            found += [(s, r, o) for s in stages for o in range(layers.bytes.shape[1])]
        return found

    def _add_rows(self, rooms: Sequence[float], in_order: bool) -> None:
        """The columns, T as the last one, and all rows but those of paths, in the order that `prices` takes apart."""
        runs, num_stages, inf = self.runs, self.table.num_stages, highspy.kHighsInf
        columns = np.arange(self.num, dtype=np.int32)
        for _ in range(self.num + 1):
            self._model.addVar(0.0, inf)
        self._model.changeColCost(self.num, 1.0)
        for r, layers in enumerate(runs):  # (cover)
            here = columns[self.run == r]
            self._model.addRow(layers.count, layers.count, len(here), here, np.ones(len(here)))
        for s in range(num_stages):  # (holds)
            here = columns[self.stage == s]
            self._model.addRow(1.0, inf, len(here), here, np.ones(len(here)))
        for r, s in product(range(len(runs) - 1 if in_order else 0), range(num_stages - 1)):  # (order)
            here = columns[((self.run == r) | (self.run == r + 1)) & (self.stage <= s)]
            share = np.where(self.run[here] == r, 1 / runs[r].count, -1 / runs[r + 1].count)
            if (share < 0).any():
                self._model.addRow(0.0, inf, len(here), here, share)
                self._order.append((r, s))
        for q, room in enumerate(rooms):  # (memory)
            self._scales.append(self._hold(np.where(self.rank == q, self.held, 0.0), room, room))

    def _of_own_runs(self, turns: Sequence[LayerTurns]) -> Iterator[tuple[int, LayerTurns]]:
        """(run of the program, turns of its layers), for runs that are not joined with others."""
        runs = ((self._united_of[each.run], each) for each in turns)
        return ((run, each) for run, each in runs if self._united_of.count(run) == 1)

    def _most(self, run: int, seconds: float, below_s: float) -> float:
        """Most layers of a run that a rank can hold in steps below `below_s`, if each takes `seconds` for a
        micro-batch."""
        busy_s = self.table.num_microbatches * seconds
        return self.runs[run].count if busy_s <= 0 else min(self.runs[run].count, below_s / busy_s)

    def keep_options_whole(self, turns: Sequence[LayerTurns], rooms: Sequence[float], below_s: float) -> None:
        """Add constraints: ranks recompute at least what whole layers of these runs must, and no rank holds more of
        these layers than a step below `below_s` allows."""
        rank_of, last, inf = np.array(self.table.rank_of), self.table.num_stages - 1, highspy.kHighsInf
        ends = {s: self.runs[r] for s, r in ((0, 0), (last, len(self.runs) - 1)) if self.runs[r].count == 1}
        held = {s: float(end.bytes[s].min()) for s, end in ends.items()}
        for (run, each), (rank, room) in product(self._of_own_runs(turns), enumerate(rooms)):
            layers, stages = self.runs[run], np.flatnonzero(rank_of == rank)
            seconds = layers.forward_s + layers.backward_s
            again_s = seconds - seconds.min()
            unit_s = float(again_s.max()) or 1.0
            certain = range(each.ahead, self.table.num_stages - each.after)  # stages with a layer of the run
            own = [layers.bytes[stage] for stage in stages if stage in certain]
            most = min(layers.count - (len(certain) - len(own)), self._most(run, float(seconds.min()), below_s) + 1)
            least_s = least_again_s(
                own,
                layers.bytes[stages].min(axis=0),
                again_s,
                each.alone,
                each.paired,
                len(stages),
                room + float(each.left[rank]) - sum(held.get(int(stage), 0.0) for stage in stages),
                max(int(most), len(own)),
            )
            here = np.flatnonzero((self.run == run) & (self.rank == rank)).astype(np.int32)
            fitting = len(own) - 1 + np.isfinite(least_s).sum()
            self._model.addRow(0.0, float(fitting), len(here), here, np.ones(len(here)))
            for start_s, slope_s in hull(len(own), least_s):
                values = (again_s[self.option[here]] - slope_s) / unit_s
                self._model.addRow(start_s / unit_s, inf, len(here), here, values)

    def leave_turns(self, turns: Sequence[LayerTurns], rooms: Sequence[float], below_s: float) -> None:
        """Add constraints: every rank leaves room for the turns of its layers, in steps below `below_s`.

        What is there in the largest turn is no less than a mean over all turns, weighted by the seconds that the layers
        of an option take; their sum is no more than the step. Of the layers of a run in a stage all but one have
        another one after them.
        """
        rank_of = np.array(self.table.rank_of)
        shares = self.table.num_microbatches * self.seconds.sum(axis=0) / below_s
        for rank, room in enumerate(rooms):
            extra, less = np.zeros((2, self.num)), 0.0
            for run, each in self._of_own_runs(turns):
                here = np.flatnonzero((self.run == run) & (self.rank == rank))
                if not len(here):
                    continue
                sizes = np.maximum(0.0, np.array([each.alone, each.paired]) - each.left[rank])
                extra[:, here] = shares[here] * sizes[:, self.option[here]]
                most = min(self.runs[run].count, float((rank_of == rank).sum()))
                less += most * max(0.0, float((extra[1, here] - extra[0, here]).max()))
            own = self.rank == rank
            for added, beside in zip(extra, (0.0, less), strict=True):
                self._hold(np.where(own, self.held + added, 0.0), room, room + beside)

    def keep_turns_whole(self, turns: Sequence[LayerTurns], rooms: Sequence[float], below_s: float) -> None:
        """Add constraints: every rank leaves room for the largest turn of its layers, in steps below `below_s`. That is
        the turn of any option that some layer has; with another layer after it, if more layers have the option than
        there are stages."""
        rank_of, inf = np.array(self.table.rank_of), highspy.kHighsInf
        seconds = self.seconds.sum(axis=0)
        for (run, each), (rank, room) in product(self._of_own_runs(turns), enumerate(rooms)):
            number = float((rank_of == rank).sum())
            for option, (alone, paired) in enumerate(zip(each.alone, each.paired, strict=True)):
                here = np.flatnonzero((self.run == run) & (self.rank == rank) & (self.option == option))
                for without, size in ((0.0, alone), (number, paired)) if len(here) else ():
                    most, beside = self._most(run, float(seconds[here].min()), below_s), float(size - each.left[rank])
                    if most <= without or beside <= 0:
                        continue
                    self._model.addVar(0.0, 1.0)
                    takes = self._model.getNumCol() - 1
                    self._model.changeColIntegrality(takes, highspy.HighsVarType.kInteger)
                    where = np.append(here, takes).astype(np.int32)
                    self._model.addRow(-inf, without, len(where), where, np.append(np.ones(len(here)), without - most))
                    self._hold(np.where(self.rank == rank, self.held, 0.0), room, room, {takes: beside})

    def _hold(self, each: Floats, room: float, most: float, beside: Mapping[int, float] | None = None) -> float:
        """Add a row: the columns in `each`, and those in `beside`, hold at most `most` bytes. Returns the value of a
        byte in that row, whose unit is the room of the rank."""
        where = np.flatnonzero(each > 0)
        columns = np.append(where, list(beside or ())).astype(np.int32)
        scale = 1.0 / max(1.0, abs(room))
        values = np.append(each[where], list((beside or {}).values())) * scale
        self._model.addRow(-highspy.kHighsInf, most * scale, len(columns), columns, values)
        return scale

    def add(self, paths: Sequence[CriticalPath]) -> None:
        """Add paths: the step is no shorter than any of them."""
        self._paths += paths
        self._idle_rounds += [0] * len(paths)
        for path in paths:
            self._add(path)

    def _add(self, path: CriticalPath) -> None:
        passes = path.passes
        each = (passes[:, self.stage] * self.seconds).sum(axis=0) + np.where(self.rank == path.rank, self.once_s, 0.0)
        waits = float(num_waits_of(passes) @ self.waits_s) + self.least_end_s
        where = np.append(np.flatnonzero(each), self.num).astype(np.int32)
        values = np.append(-each[where[:-1]], self.unit_s) / self.unit_s
        self._model.addRow(waits / self.unit_s, highspy.kHighsInf, len(where), where, values)

    def _drop_idle(self) -> None:
        """Drop paths that have had no price for some rounds, but not those of ranks. With all paths that were ever
        found a round would take ten times as long."""
        before = self._model.getNumRow() - len(self._paths)
        priced = np.abs(np.array(self._model.getSolution().row_dual)[before:]) > NO_PRICE
        self._idle_rounds = [0 if p else idle + 1 for p, idle in zip(priced, self._idle_rounds, strict=True)]
        basis = self._model.getBasis()
        status = list(basis.row_status)
        own, basic = len(paths_of_ranks(self.table)), highspy.HighsBasisStatus.kBasic
        idle = [
            i
            for i, rounds in enumerate(self._idle_rounds)
            if i >= own and rounds > IDLE_ROUNDS and status[before + i] == basic
        ]
        if len(idle) < MANY_IDLE * len(self._paths):
            return
        self._model.deleteRows(len(idle), np.array(idle, dtype=np.int32) + before)
        dropped = set(idle)
        left = highspy.HighsBasis()
        left.valid, left.col_status = True, basis.col_status
        left.row_status = [each for row, each in enumerate(status) if row - before not in dropped]
        self._model.setBasis(left)  # as it was: rows of no price are no part of it
        self._paths = [path for i, path in enumerate(self._paths) if i not in dropped]
        self._idle_rounds = [rounds for i, rounds in enumerate(self._idle_rounds) if i not in dropped]

    def solve(self) -> float | None:
        """Least T; None if the layers cannot be held, 0 if it was not found in time."""
        if self.deadline_s < float("inf"):
            left_s = max(0.0, self.deadline_s - time.monotonic())
            self._model.setOptionValue("time_limit", self._model.getRunTime() + left_s)
        self._model.run()
        status = self._model.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        self.is_solved = status == highspy.HighsModelStatus.kOptimal
        if not self.is_solved:
            return 0.0
        values = np.array(self._model.getSolution().col_value)
        self.amounts = values[: self.num]
        return float(values[self.num] * self.unit_s)

    def keep_whole_on_ranks(self, below_s: float) -> None:
        """Add constraints: every rank holds a whole number of layers of each run, and the step is at most `below_s`."""
        for number, layers in enumerate(self.runs):
            for rank in range(self.table.num_ranks):
                here = np.flatnonzero((self.run == number) & (self.rank == rank))
                if not len(here):
                    continue
                self._model.addVar(0.0, layers.count)
                sum_of = self._model.getNumCol() - 1
                self._model.changeColIntegrality(sum_of, highspy.HighsVarType.kInteger)
                where = np.append(here, sum_of).astype(np.int32)
                self._model.addRow(0.0, 0.0, len(where), where, np.append(np.ones(len(here)), -1.0))
        self._model.changeColBounds(self.num, 0.0, below_s / self.unit_s)

    def keep_whole(self, below_s: float) -> None:
        """Add constraints: every stage holds whole numbers of layers with each option, and the step is at most
        `below_s`."""
        for column in range(self.num):
            self._model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        self._model.changeColBounds(self.num, 0.0, below_s / self.unit_s)

    def solve_whole(self, seconds: float) -> tuple[float | None, float]:
        """(T of a solution with whole layers, None if none was found; lower bound on T in seconds, infinite if there is
        no solution)."""
        self._model.setOptionValue("time_limit", self._model.getRunTime() + max(0.05, seconds))
        self._model.run()
        if self._model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None, float("inf")
        info = self._model.getInfo()
        bound_s = info.mip_dual_bound * self.unit_s if np.isfinite(info.mip_dual_bound) else 0.0
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None, bound_s
        values = np.array(self._model.getSolution().col_value)
        self.amounts = values[: self.num]
        return float(values[self.num] * self.unit_s), bound_s

    @property
    def layers(self) -> Floats:
        """[stage] -> number of layers in the solution."""
        return _sums(self.stage, self.amounts, self.table.num_stages)

    def durations(self) -> tuple[Floats, Floats]:
        """([forward, backward, weight][stage] -> seconds with transfers, [rank] -> seconds at the end of the step) in
        the solution."""
        num_stages = self.table.num_stages
        seconds = np.array([_sums(self.stage, self.amounts * each, num_stages) for each in self.seconds])
        seconds[0, 1:] += self.waits_s
        seconds[1, :-1] += self.waits_s
        return seconds, _sums(self.rank, self.amounts * self.once_s, self.table.num_ranks) + self.least_end_s

    def solve_with_paths(self, enough_s: float, until_s: float | None = None) -> float:
        """Least T with all paths that are found; infinite if the layers cannot be held. It ends once T reaches
        `enough_s`, once it is not likely to, or once amounts are known whose step is shorter than `enough_s`; if
        `until_s` is given, at that time instead of the last two."""
        least_s, gained_s = 0.0, 0.0
        center, shortest_s = None, float("inf")
        number = 0
        while True:
            found_s = self.solve()
            if found_s is None:
                return float("inf")
            if not self.is_solved:
                break
            number += 1
            least_s = max(least_s, found_s)
            longer_than_s = least_s * (1 + TIGHT)
            if least_s >= enough_s or shortest_s <= longer_than_s:
                break
            if until_s is not None:
                if time.monotonic() >= until_s:
                    break
            elif shortest_s < enough_s < float("inf") or number == MOST_ROUNDS:
                break
            elif number % STALLED == 0:
                to_gain_s = TIGHT * least_s if enough_s == float("inf") else enough_s - least_s
                if least_s - gained_s < to_gain_s / STALLED:
                    break
                gained_s = least_s
            fresh, center, shortest_s = self.cuts_towards(center, shortest_s, longer_than_s)
            if not fresh:
                break
            self._drop_idle()
            self.add(fresh)
        return least_s

    def cuts_towards(
        self, center: Floats | None, shortest_s: float, longer_than_s: float
    ) -> tuple[list[CriticalPath], Floats, float]:
        """(paths that are longer than `longer_than_s` with the solution's layers, amounts of the shortest step so far,
        that step). Paths are looked for between these amounts and the solution, because those of extreme solutions,
        while programs know few paths, say little (the in-out separation of Ben-Ameur and Neto, 2007)."""
        solution = self.amounts
        at_solution = self.durations()
        center = solution if center is None else center
        for share in SHARES:
            self.amounts = share * solution + (1 - share) * center
            paths = self.longer_paths(longer_than_s)
            at = self.durations()
            step_s = max((path.length_s(*at) for path in paths), default=longer_than_s)
            if step_s < shortest_s:
                center, shortest_s = self.amounts, step_s
            self.amounts = solution
            paths = [path for path in paths if path.length_s(*at_solution) > longer_than_s]
            if paths:
                break
        return paths, center, shortest_s

    def longer_paths(self, longer_than_s: float) -> list[CriticalPath]:
        """Paths that are longer than `longer_than_s` with the solution's layers, the longest first."""
        (forward, backward, weight), once_s = self.durations()
        return critical_paths(
            self.table.schedule, forward.tolist(), (backward + weight).tolist(), once_s.tolist(),
            self.table.num_microbatches, weight.tolist(), longer_than_s,
        )  # fmt: skip

    def prices(self) -> tuple[PathPrices, list[CriticalPath]]:
        """(the dual of the solution, paths that have a price in it, without those of ranks)."""
        table, num_stages, num_runs = self.table, self.table.num_stages, len(self.runs)
        duals = np.array(self._model.getSolution().row_dual)
        starts = np.cumsum([0, num_runs, num_stages, len(self._order), table.num_ranks, len(self._paths)])
        _, holds, order, memory, paths = (duals[a:b] for a, b in pairwise(starts))
        weights = np.maximum(0.0, paths)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(paths), 1 / len(paths))
        ends = _sums(np.array([path.rank for path in self._paths]), weights, table.num_ranks)
        passes = np.tensordot(weights, np.array([path.passes for path in self._paths]), 1)
        given = np.tile(np.maximum(0.0, holds) * self.unit_s, (num_runs, 1))
        given_s = float(given[0].sum())
        for (r, s), dual in zip(self._order, np.maximum(0.0, order) * self.unit_s, strict=True):
            given[r, : s + 1] += dual / self.runs[r].count
            given[r + 1, : s + 1] -= dual / self.runs[r + 1].count
        per_byte_s = np.maximum(0.0, -memory) * np.array(self._scales) * self.unit_s
        given = given[self._united_of]
        own = len(paths_of_ranks(table))
        priced = [path for path, weight in zip(self._paths[own:], weights[own:].tolist(), strict=True) if weight > 0]
        return PathPrices(passes, ends, per_byte_s, given, given_s), priced


def _sums(places: Ints, amounts: Floats, number: int) -> Floats:
    """[place] -> sum of the amounts at it."""
    found: Floats = np.bincount(places, amounts, number).astype(np.float64)
    return found
