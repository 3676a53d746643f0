"""What every HTML page is made of: the document around it, its sections, and the lines that pages share."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from ...planner.answers.candidate import Candidate
from ...planner.plan.document import Plan
from ...profiler.machine.units import format_count
from .drawing import tag


def page(title: str, head: str, links: Iterable[tuple[str, str]], sections: Iterable[str]) -> str:
    """A whole document around its head and sections, with style and script inside."""
    here = Path(__file__).parent
    style, script = ((here / f"html_report.{kind}").read_text() for kind in ("css", "js"))
    shown = "".join(tag("a", escape(name), href=f"#{anchor}") for anchor, name in links)
    button = '<button id="theme" type="button">Dark</button>'
    body = (
        f'<main><header class="top"><div>{head.partition("</h1>")[0]}</h1></div>{button}</header>'
        + head.partition("</h1>")[2]
        + (tag("nav", shown, aria_label="sections") if shown else "")
        + "".join(sections)
        + "<footer>Made by Meshwright. All times and sizes are predictions of its cost model unless marked as "
        "measured.</footer></main>"
    )
    return (
        '<!doctype html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>{body}"
        f'<div id="tip" role="presentation"></div><script>{script}</script></body></html>\n'
    )


def section(anchor: str, heading: str, below: str, content: str) -> str:
    """A section under its heading, with a line below that."""
    words = tag("p", escape(below), class_="sub") if below else ""
    return tag("section", tag("h2", escape(heading)) + words + content, id=anchor)


def wide(picture: str) -> str:
    """A picture in a frame that scrolls where the screen is narrow."""
    return tag("div", picture, class_="wide")


def folded(summary: str, content: str) -> str:
    """What opens at a click."""
    return tag("details", tag("summary", escape(summary)) + content)


def job_in_words(plan: Plan) -> str:
    """The model, the job and how it is trained, in a line."""
    training = plan.training
    batch = f"global batch {training.global_batch:,}"
    batch += f" × {training.seq_len:,} tokens" if training.seq_len is not None else " samples"
    parts = [
        f"{format_count(plan.model.num_parameters)} parameters",
        batch,
        training.precision,
        training.optimizer,
        training.software,
    ]
    return " · ".join(parts)


def verdict_rows(
    candidates: Sequence[Candidate], words: Callable[[Candidate], str] = lambda c: str(c.verdict)
) -> list[tuple[str, str, str]]:
    """(set-up, layout, verdict) of each. words: what is said of one."""
    return [
        (c.name, "–" if c.plan is None else f"{c.plan.label}, micro-batch {c.plan.micro_batch}", words(c))
        for c in candidates
    ]
