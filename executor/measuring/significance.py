"""Which of several measured set-ups is faster, and which cannot be told apart from the noise.

Measurements that took turns (A B C, A B C, ...) are compared pair by pair, turn by turn. One observation is the
logarithm of the ratio of two set-ups' median steps in one turn: what slows the machine for a while slows both, and
steps of one run, which are alike, count once. The ratio is the geometric mean over the turns, its interval is Student's
(two-sided, 95% for all pairs together: Bonferroni). Two set-ups tie where the interval holds 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .measurement import Measurement, quantile

CONFIDENCE = 0.95
"""Chance that all intervals of a comparison hold their true ratios, if noise is normal in the logarithm."""


@dataclass(frozen=True)
class Apart:
    """How many times as long the step of `label` takes as that of `other`: the ratio, and an interval around it."""

    label: str
    other: str
    ratio: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """Whether the noise is as large as the difference."""
        return self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class Standing:
    """fastest: the set-up with the smallest geometric mean. ties: those that cannot be told apart from it. against:
    every other set-up compared with the reference, in the order of the measurements."""

    fastest: str
    ties: tuple[str, ...]
    reference: str
    against: tuple[Apart, ...]


def standing(found: Mapping[str, Measurement], reference: str) -> Standing | None:
    """Which set-up is fastest, and how each compares with `reference` (with the fastest, if that was not measured).

    None for fewer than two measurements, or if they have different numbers of repetitions and so did not take turns.
    """
    if len(found) < 2 or len({len(one.steps_s) for one in found.values()}) > 1:
        return None
    pairs = len(found) * (len(found) - 1) // 2
    medians = {label: [math.log(quantile(run, 0.5)) for run in one.steps_s] for label, one in found.items()}
    fastest = min(medians, key=lambda label: sum(medians[label]))
    beside = reference if reference in found else fastest
    return Standing(
        fastest=fastest,
        ties=tuple(x for x in found if x != fastest and _apart(x, fastest, medians, pairs).tie),
        reference=beside,
        against=tuple(_apart(x, beside, medians, pairs) for x in found if x != beside),
    )


def _apart(label: str, other: str, medians: Mapping[str, Sequence[float]], pairs: int) -> Apart:
    logs = [one - two for one, two in zip(medians[label], medians[other], strict=True)]
    return Apart(label, other, *ratio_of(logs, pairs))


def ratio_of(logs: Sequence[float], ratios: int) -> tuple[float, float, float]:
    """(geometric mean of observed ratios, low, high): Student's interval, so wide that this number of such intervals
    hold together. logs: logarithms of the observed ratios."""
    mean = sum(logs) / len(logs)
    half = _half_width(logs, (1.0 - CONFIDENCE) / ratios)
    return math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0))


def means_of_alike(ratios: Mapping[int, float], noise: float) -> dict[int, float]:
    """The ratios by number; those that differ by no more than the noise are replaced by their mean."""
    left, found = sorted(ratios, key=lambda number: ratios[number]), dict[int, float]()
    while left:
        alike = [number for number in left if ratios[number] <= ratios[left[0]] * (1 + noise)]
        left = left[len(alike) :]
        found |= dict.fromkeys(alike, sum(ratios[number] for number in alike) / len(alike))
    return found


def paired(medians: Mapping[str, Mapping[int, float]], leader: str) -> dict[str, Apart]:
    """Label -> how it compares with the leader, over the turns that both took part in; labels without such turns are
    left out.

    medians: label -> turn -> median seconds of a step in that turn. A few turns tell little of the noise of one pair,
    so the variance of all pairs is pooled: an interval takes the larger of the pair's own and the pooled variance, with
    the degrees of freedom of all. All intervals hold together at one look (Bonferroni over the pairs with the leader).
    """
    own = medians[leader]
    logs = {
        label: [math.log(times[turn] / own[turn]) for turn in sorted(times.keys() & own.keys())]
        for label, times in medians.items()
        if label != leader and times.keys() & own.keys()
    }
    means = {label: sum(values) / len(values) for label, values in logs.items()}
    squares = {label: sum((value - means[label]) ** 2 for value in values) for label, values in logs.items()}
    freedom = sum(len(values) - 1 for values in logs.values())
    found = {}
    for label, values in logs.items():
        half = math.inf
        if freedom:
            variance = sum(squares.values()) / freedom
            if len(values) > 1:
                variance = max(variance, squares[label] / (len(values) - 1))
            chance = (1.0 - CONFIDENCE) / len(logs)
            half = student_quantile(1.0 - chance, freedom) * math.sqrt(variance / len(values))
        mean = means[label]
        found[label] = Apart(label, leader, math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0)))
    return found


def _half_width(values: Sequence[float], chance: float) -> float:
    """Half the width of Student's interval around the mean of values; it misses the true mean with probability
    `chance`. Infinite for a single value, which tells nothing of the noise."""
    count = len(values)
    if count == 1:
        return math.inf
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return student_quantile(1.0 - chance, count - 1) * deviation / math.sqrt(count)


def student_share(t: float, freedom: int) -> float:
    """Probability that Student's t with `freedom` degrees lies between -t and t.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4, exact for whole degrees.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for step in range(freedom // 2):
        total += term
        upper, lower = (2 * step + 2, 2 * step + 3) if freedom % 2 else (2 * step + 1, 2 * step + 2)
        term *= cosine**2 * upper / lower
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def student_quantile(share: float, freedom: int) -> float:
    """t so that Student's t lies between -t and t with probability `share`, to nine digits."""
    high = 1.0
    while student_share(high, freedom) < share:
        high *= 2.0
    low = 0.0
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, freedom) < share else (low, middle)
    return high
