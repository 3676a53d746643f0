"""The least steps of pipelines whose layers could be divided, or are whole, by programs over all cuts and all options
(fluid_program.py); paths and prices that a program found are kept for the next ones of its table.
"""

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..arrays import Floats
from ..cost.simulate import CriticalPath
from .fluid_program import FluidProgram, Layers
from .path_prices import PathPrices
from .table import Table, paths_of_ranks
from .whole_ranks import LayerTurns

TO_THE_END_S = 4.0
"""Seconds for a program that is solved to its end. Tried with Llama-3.1-405B on 16,384 GPUs, 16 ranks of five stages:
stopped once ten rounds of paths raise it little it gives 7.60 s after 0.4 s, after four seconds 7.85 s."""

MOST_PRICES = 6
"""Number of the latest duals that are kept for each table."""


class FluidPipelines:
    """Solves such programs; keeps the latest prices for each table, and the paths that had prices in its last
    program."""

    def __init__(self) -> None:
        self._paths: dict[Table, list[CriticalPath]] = {}
        self.prices: dict[Table, list[PathPrices]] = {}
        self.num_prices: Counter[Table] = Counter()
        self.deadline_s = float("inf")
        """time.monotonic() at which programs are stopped, with the bound that they have by then."""

    def least_s(
        self,
        table: Table,
        runs: Sequence[Layers],
        rooms: Sequence[float],
        waits_s: Floats | float,
        least_end_s: float = 0.0,
        enough_s: float = float("inf"),
        turns: Sequence[LayerTurns] = (),
        in_order: bool = True,
        until_s: float | None = None,
    ) -> tuple[float, Floats]:
        """(lower bound in seconds for all steps, or `enough_s` as soon as the bound is known to reach that, [stage] ->
        layers that it holds in the solution); infinite if the layers cannot be held. The bound is not always the
        highest that the program has, unless `until_s` leaves time to find that.

        rooms: [rank] -> bytes; waits_s: [stage but the last] -> that it and the next one each wait at least for what
        crosses between them; least_end_s: seconds that a step takes after the last pass of any rank, beyond those of
        layers (negative where they count weights twice); turns: where whole layers on ranks are to count; in_order:
        whether layers stay in their order, or those of a kind may be in any stages.
        """
        program = self._program(table, runs, rooms, waits_s, least_end_s, in_order=in_order)
        least_s = program.solve_with_paths(enough_s, until_s)
        if np.isinf(least_s) or not program.is_solved:
            return least_s, program.layers
        prices, self._paths[table] = program.prices()
        self.prices.setdefault(table, []).append(prices)
        del self.prices[table][:-MOST_PRICES]
        self.num_prices[table] += 1
        if turns and in_order and least_s < enough_s < float("inf"):
            program = self._program(table, runs, rooms, waits_s, least_end_s, turns, enough_s)
            least_s = max(least_s, min(program.solve_with_paths(enough_s, until_s), enough_s))
        return least_s, program.layers

    def _program(
        self,
        table: Table,
        runs: Sequence[Layers],
        rooms: Sequence[float],
        waits_s: Floats | float,
        least_end_s: float,
        turns: Sequence[LayerTurns] = (),
        below_s: float = float("inf"),
        in_order: bool = True,
    ) -> FluidProgram:
        """The program with the paths that are known. With `turns` it also has room for turns of layers, and holds for
        steps below `below_s` only."""
        program = FluidProgram(table, runs, rooms, waits_s, least_end_s, in_order)
        if turns:
            program.leave_turns(turns, rooms, below_s)
            program.keep_options_whole(turns, rooms, below_s)
        program.add([*paths_of_ranks(table), *self._paths.get(table, [])])
        program.deadline_s = self.deadline_s
        return program

    def whole(
        self,
        table: Table,
        runs: Sequence[Layers],
        rooms: Sequence[float],
        waits_s: Floats | float,
        least_end_s: float,
        below_s: float,
        seconds: float,
        turns: Sequence[LayerTurns] = (),
    ) -> tuple[float, Floats | None]:
        """(lower bound in seconds for all steps with whole layers, [stage] -> layers that it holds in a solution below
        `below_s`, None if none was found). The linear program is solved to its end, then the integer program, for
        `seconds`: first with whole layers on every rank, which gives most of the bound, then in every stage with every
        option. The bound is `below_s` if there is no solution."""
        end_s = min(time.monotonic() + TO_THE_END_S, self.deadline_s)
        least_s, _ = self.least_s(table, runs, rooms, waits_s, least_end_s, below_s, turns, until_s=end_s)
        if least_s >= below_s:
            return below_s, None
        until_s = min(time.monotonic() + seconds, self.deadline_s)
        program = self._program(table, runs, rooms, waits_s, least_end_s, turns, below_s)
        program.deadline_s = until_s
        least_s = max(least_s, min(program.solve_with_paths(below_s, until_s), below_s))
        if least_s >= below_s:
            return below_s, None
        program.keep_turns_whole(turns, rooms, below_s)
        for keep_whole in (program.keep_whole_on_ranks, program.keep_whole):
            keep_whole(below_s)
            while True:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return least_s, None
                found_s, bound_s = program.solve_whole(left_s)
                least_s = max(least_s, min(bound_s, below_s))
                if found_s is None or least_s >= below_s:
                    return least_s, None
                fresh = program.longer_paths(below_s)
                if not fresh:
                    break
                program.add(fresh)
        return least_s, program.layers
