"""Verdicts on set-ups, as data for code and as words for people."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class VerdictKind(StrEnum):
    """How a set-up compares with the plan, or why it cannot be compared."""

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
    """The verdict on a set-up, with the numbers behind it; `str` puts it into words.

    detail: the rule that excludes it; what exceeds its budget; what costs most, if it is slower; or why it is not the
    plan, if it is faster. ratio: its step over the plan's, less one. stage, over_bytes: the stage that exceeds its
    budget most, and by how much. note: words to put after the others.
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
        """How the step compares with the plan's: "3.1% slower"; from twice as long on "2.4 times as long"."""
        if self.is_times_as_long:
            return f"{1 + self.ratio:.1f} times as long"
        return f"{abs(self.ratio):.1%} {'slower' if self.ratio > 0 else 'faster'}"

    @property
    def is_times_as_long(self) -> bool:
        """Whether the step takes at least twice the plan's."""
        return self.ratio >= 1

    def noted(self, note: str) -> "Verdict":
        """This verdict with more words after it."""
        return replace(self, note=self.note + note)


FITS = Verdict(VerdictKind.FITS)
CUT_SHORT = "; the best of it that was found in time"
"""Note for a set-up whose search for the best plan ended before it was complete."""
LATE = Verdict(VerdictKind.NOT_FOUND, note=" in the time there was; it may fit")
THE_PLAN = Verdict(VerdictKind.PLAN)


def not_legal(rule: str) -> Verdict:
    """The verdict on what a rule excludes."""
    return Verdict(VerdictKind.ILLEGAL, rule)


def nearest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict to show for several attempts that all failed: the first that is legal, or else the first."""
    found = list(verdicts)
    return next((verdict for verdict in found if verdict.kind is not VerdictKind.ILLEGAL), found[0])
