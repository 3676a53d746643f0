"""Who is still in a race, decided by what was measured: pure functions of laps."""

import math
from collections.abc import Collection, Mapping, Sequence

from ..measuring.significance import Apart, paired

Medians = Mapping[str, Mapping[int, float]]
"""Label -> turn -> median seconds of a step in that turn."""

WITHIN = 0.01
"""A plan that can be no more than this faster than the leader need not be run again."""

FAR = 1.25
"""After one turn, which tells nothing of the noise between turns: a plan is set aside if its fastest step takes so many
times the leader's slowest."""

TURNS = 12
"""After so many turns of a round whoever is left is called a tie."""


def leader_of(medians: Medians) -> str | None:
    """The fastest plan, from one leader to the next: each beats the one before over the turns that both took."""
    if not medians:
        return None
    leader = min(medians, key=lambda label: (-len(medians[label]), label))
    beaten = {leader}
    while True:
        gains = {
            label: _mean_log(times, medians[leader])
            for label, times in medians.items()
            if label not in beaten and times.keys() & medians[leader].keys()
        }
        best = min(gains, key=lambda label: gains[label], default=None)
        if best is None or gains[best] >= 0:
            return leader
        leader = best
        beaten.add(best)


def _mean_log(times: Mapping[int, float], others: Mapping[int, float]) -> float:
    common = sorted(times.keys() & others.keys())
    return sum(math.log(times[turn] / others[turn]) for turn in common) / len(common)


def out_after(medians: Medians, steps: Mapping[str, Sequence[float]], racing: Collection[str]) -> dict[str, str]:
    """Label -> why it need not be run again, of those that race. steps: label -> all steps that it took."""
    measured = {label: medians[label] for label in racing if label in medians}
    leader = leader_of(measured)
    if leader is None:
        return {}
    found = {}
    for label, apart in paired(measured, leader).items():
        if math.isinf(apart.high) or apart.low == 0.0:
            if min(steps[label]) > FAR * max(steps[leader]):
                found[label] = f"{apart.ratio:.2f}x {leader} in its first turn"
        elif apart.low > 1 / (1 + WITHIN):
            found[label] = in_words(apart)
    return found


def in_words(apart: Apart) -> str:
    """How a plan compares with the leader, with the interval where there is one."""
    if apart.low == 0.0:
        return f"{apart.ratio:.2f}x {apart.other}"
    how = f"{apart.ratio:.3f}x {apart.other} ({apart.low:.3f}-{apart.high:.3f})"
    if apart.low > 1.0:
        return how
    return f"{how}: at most {WITHIN:.0%} faster" if apart.low > 1 / (1 + WITHIN) else f"{how}: not told apart"


def lap_steps(step_s: float, lap_s: float) -> int:
    """Steps of a lap that is to take about so long; at least two, for one may be odd, and no more than 20."""
    return max(2, min(20, round(lap_s / step_s)))
