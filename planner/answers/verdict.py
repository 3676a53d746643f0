"""What became of a set-up: as data that code decides by, and as the words that people read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class VerdictKind(StrEnum):
    """What became of a set-up, beside the plan."""

    PLAN = "the plan"
    FITS = "fits"
    AS_FAST = "as fast"
    SLOWER = "slower"
    FASTER = "faster"
    DOES_NOT_FIT = "does not fit"
    ILLEGAL = "illegal"
    NOT_RUN = "not run"
    NOT_FOUND = "not found"


@dataclass(frozen=True)
class Verdict:
    """What became of a set-up, with the numbers it comes from; `str` puts it in words.

    detail: which rule excludes it, what is over its budget, what costs most where it is slower, or why one that is
    faster is not the plan. ratio: its step over the plan's, less one. stage, over_bytes: the stage that is most over
    its budget, and by how much. note: what is said after the words.
    """

    kind: VerdictKind
    detail: str = ""
    ratio: float = 0.0
    stage: int | None = None
    over_bytes: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        return f"{self._words}{self.note}"

    @property
    def _words(self) -> str:
        match self.kind:
            case VerdictKind.SLOWER:
                return f"{self.pace}: {self.detail}"
            case VerdictKind.FASTER:
                return f"{self.pace}, but {self.detail}"
            case VerdictKind.AS_FAST:
                return "as fast as the plan"
            case VerdictKind.ILLEGAL:
                return f"not legal: {self.detail}"
            case VerdictKind.NOT_RUN:
                return f"priced, not run yet: {self.detail}"
            case VerdictKind.DOES_NOT_FIT:
                return f"does not fit: {self.detail}"
            case _:
                return self.kind.value

    @property
    def pace(self) -> str:
        """The step beside the plan's: "3.1% slower", or from twice as long on "2.4 times as long"."""
        if self.is_times_as_long:
            return f"{1 + self.ratio:.1f} times as long"
        return f"{abs(self.ratio):.1%} {'slower' if self.ratio > 0 else 'faster'}"

    @property
    def is_times_as_long(self) -> bool:
        """Whether the step takes at least twice the plan's."""
        return self.ratio >= 1

    def noted(self, note: str) -> "Verdict":
        """This verdict with something more said after it."""
        return replace(self, note=self.note + note)


FITS = Verdict(VerdictKind.FITS)
CUT_SHORT = "; the best of it that was found in time"
"""Noted where the search for the best of a set-up was not brought to its end."""
LATE = Verdict(VerdictKind.NOT_FOUND, note=" in the time there was; it may fit")
THE_PLAN = Verdict(VerdictKind.PLAN)


def not_legal(rule: str) -> Verdict:
    """The verdict on what a rule excludes."""
    return Verdict(VerdictKind.ILLEGAL, rule)


def nearest(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what became of several attempts that all failed: the first that is legal, or the first."""
    found = list(verdicts)
    return next((verdict for verdict in found if verdict.kind is not VerdictKind.ILLEGAL), found[0])
