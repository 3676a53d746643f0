"""Set-ups side by side as one HTML file, and as a notebook's cell."""

from collections.abc import Sequence
from html import escape

from ...planner.answers.candidate import Candidate
from ...planner.plan.document import Plan
from .choice_charts import loss_bars
from .drawing import table, tag
from .html_page import job_in_words, page, section, verdict_rows, wide
from .measured_report import MeasuredTable
from .report import comparison_rows, loss_rows, stack_of


def comparison_page(
    candidates: Sequence[Candidate], job: Plan, price_per_hour: float | None, measured: MeasuredTable | None = None
) -> str:
    """Set-ups side by side: one step of each by cause, the numbers, and what was measured."""
    title = f"{job.model.name} on {job.cluster.devices.replace(' x ', ' × ')}"
    head = f'<p class="kicker">Planned beside manual set-ups</p><h1>{escape(title)}</h1>'
    head += tag(
        "p",
        escape(f"{job_in_words(job)}. All at the same global batch, with {stack_of(job)}, by the same cost model."),
        class_="sub",
    )
    picture, names = loss_bars(candidates)
    unit, headings, rows = loss_rows(candidates)
    sections = [
        section(
            "losses",
            "One step by cause",
            "Where each set-up spends its step; shorter is better.",
            names + wide(picture),
        ),
        *([] if measured is None else [_measured_section(measured)]),
        section("numbers", "Numbers", "", table(*comparison_rows(candidates, price_per_hour), numeric_from=1)),
        section("causes", f"The step by cause, {unit}", "", table(headings, rows)),
        section(
            "verdicts", "Verdicts", "", table(["set-up", "layout", "verdict"], verdict_rows(candidates), numeric_from=3)
        ),
    ]
    return page(f"Compared: {title}", head, [], sections)


def _measured_section(found: MeasuredTable) -> str:
    said = tag("ul", "".join(tag("li", escape(sentence)) for sentence in found.sentences), class_="sub")
    return section("measured", "Measured", "", (table(found.headings, found.rows) if found.rows else "") + said)


def comparison_fragment(candidates: Sequence[Candidate]) -> str:
    """The tables of a comparison for a notebook's cell."""
    unit, headings, rows = loss_rows(candidates)
    return (
        table(*comparison_rows(candidates, None))
        + table(headings, rows, caption=f"Where the step goes, {unit}")
        + table(["set-up", "layout", "verdict"], verdict_rows(candidates), numeric_from=3)
    )
