"""What is said of why a plan is what it is: printed, and as a document."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ...planner.plan.document import Plan
from . import terminal
from .report import alternatives_document

if TYPE_CHECKING:
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.decision_path import Step
    from ...planner.answers.guidance import NoCandidate
    from ...planner.answers.stacks import OnStack
    from ...planner.answers.tutorial import Lesson
    from ...planner.answers.why_not import Answer
    from ...planner.cost.estimate import Estimate

_STYLES = {
    "illegal": "red",
    "does not fit": "red",
    "not found": "yellow",
    "slower": "yellow",
    "as fast": "green",
    "faster": "green",
    "the plan": "green",
}

_MOST_RULES = 8
"""Rules that are listed with the shapes they exclude."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """A priced plan with answers to what was asked about it, or, where nothing was, all there is to say."""

    plan: Plan
    found: "Estimate"
    answers: "tuple[Answer, ...]" = ()
    steps: "tuple[Step, ...]" = ()
    lessons: "tuple[Lesson, ...]" = ()
    excluded: "tuple[NoCandidate, ...]" = ()
    alternatives: "tuple[Candidate, ...]" = ()
    stacks: "tuple[OnStack, ...]" = ()

    @property
    def rejected(self) -> dict[str, int]:
        """Rule -> shapes that the search excluded by it."""
        return {} if self.plan.certificate is None else self.plan.certificate.rejected

    def __str__(self) -> str:
        return terminal.as_text(lambda console: print_explanation(console, self))

    __repr__ = __str__


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """The explanation as a document for JSON."""
    return {
        "plan": {"layout": explanation.plan.label, "step_time_s": explanation.found.step_time_s},
        "why_not": [
            {
                "asked": answer.asked,
                "kind": answer.kind,
                "sentence": answer.sentence,
                "step_time_s": None if answer.estimate is None else answer.estimate.step_time_s,
                "breakdown": None if answer.estimate is None else answer.estimate.breakdown,
            }
            for answer in explanation.answers
        ],
        "questions": [asdict(step) for step in explanation.steps],
        "lessons": [
            {"split": lesson.name, "sentence": lesson.sentence, "step_time_s": lesson.estimate.step_time_s}
            for lesson in explanation.lessons
        ],
        "alternatives": alternatives_document(explanation.alternatives, explanation.plan, explanation.found),
        "software": [asdict(each) for each in explanation.stacks],
        "rejected": explanation.rejected,
        "no_candidates": [asdict(each) for each in explanation.excluded],
    }


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The plan, then the answers; without any, questions, lessons, excluded rules and what is no candidate at all."""
    terminal.print_job(console, explanation.plan)
    terminal.print_choice(console, explanation.plan, None)
    for answer in explanation.answers:
        console.print()
        console.print(terminal.hanging(answer.kind, Text(answer.sentence), _STYLES[answer.kind]))
    if explanation.answers:
        return
    for step in explanation.steps:
        console.print()
        _print_step(console, step)
    for lesson in explanation.lessons:
        console.print()
        console.print(terminal.hanging("lesson", Text(lesson.sentence), "cyan"))
    terminal.print_alternatives(console, explanation.plan, explanation.found, explanation.alternatives)
    if explanation.stacks:
        console.print()
        console.print(Text("The same layout under software that could run it", style="bold"))
        for stack in explanation.stacks:
            told = Text(stack.in_words(explanation.found.step_time_s))
            console.print(terminal.hanging(stack.software, told, "cyan", width=14))
    _print_rejected(console, explanation.rejected)
    console.print()
    for each in explanation.excluded:
        console.print(terminal.hanging("never", Text(f"{each.name}: {each.reason}"), "dim"))


def _print_step(console: Console, step: "Step") -> None:
    """A question, its answer in numbers and, where that is yes, what is advised and whether the plan does it."""
    console.print(terminal.hanging("ask", Text(step.question.asks, style="bold"), "cyan"))
    console.print(terminal.hanging("yes" if step.yes else "no", Text(step.numbers), "cyan"))
    if step.yes:
        style = "green" if step.agrees else "yellow"
        console.print(terminal.hanging("advice", Text(step.question.advice), "dim"))
        console.print(terminal.hanging("plan", Text(step.verdict, style=style), "cyan"))


def _print_rejected(console: Console, rejected: dict[str, int]) -> None:
    """What the search excluded by rule, most shapes first."""
    if rejected:
        ranked = sorted(rejected.items(), key=lambda item: -item[1])[:_MOST_RULES]
        rows = [(rule, f"{count:,}") for rule, count in ranked]
        terminal.print_rows(console, "Excluded by rule", ("rule", "shapes"), rows)
