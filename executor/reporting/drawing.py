"""Elements of HTML and SVG as text: escaping, palettes, axis ticks, and the few marks that the charts are made of."""

import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 1000.0
"""Of every picture of a report, in units of its view box."""

CAUSE_COLOURS = {
    "compute": "blue",
    "recompute": "violet",
    "tensor": "orange",
    "context": "gold",
    "expert": "cyan",
    "launch": "ink2",
    "data": "rose",
    "pipeline": "slate",
    "optimizer": "green",
}
"""Item of an estimate's breakdown -> colour, the same in every chart."""

ITEM_COLOURS = {
    "parameters": "blue",
    "gradients": "rose",
    "optimizer": "green",
    "gathered": "gold",
    "activations": "violet",
    "transient": "orange",
    "fragmentation": "slate",
    "context": "ink2",
}
"""Item of a stage's memory -> colour."""

_SPARE = ("cyan", "blue", "green", "gold", "violet", "rose", "orange", "slate")

_STAGE_ANCHORS = ((67, 86, 190), (32, 113, 178), (16, 121, 111), (70, 123, 46), (146, 104, 14), (190, 78, 47))
"""Along the pipeline: blue to red through green; neighbours differ in lightness, too."""


def colour_of(name: str, colours: dict[str, str], names: Sequence[str]) -> str:
    """CSS colour of an item; those that have none of their own take the spare ones in turn."""
    if name in colours:
        return f"var(--{colours[name]})"
    unknown = [n for n in names if n not in colours]
    return f"var(--{_SPARE[unknown.index(name) % len(_SPARE)]})"


def stage_colour(stage: int, num_stages: int) -> str:
    """Colour of a stage along the chain, as #rrggbb; dark enough for white text."""
    if num_stages == 1:
        return "#3f6fd1"
    place = stage / (num_stages - 1) * (len(_STAGE_ANCHORS) - 1)
    low = min(int(place), len(_STAGE_ANCHORS) - 2)
    share = place - low
    pairs = zip(_STAGE_ANCHORS[low], _STAGE_ANCHORS[low + 1], strict=True)
    shade = 1.0 if stage % 2 == 0 else 0.86
    return "#" + "".join(f"{round(shade * (a + share * (b - a))):02x}" for a, b in pairs)


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; underscores in attribute names are hyphens, a trailing one is dropped, None leaves one out.

    `content` is markup: escape text first.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = _short(value) if isinstance(value, float) else escape(str(value), quote=True)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    head = " ".join(words)
    return f"<{head}>{content}</{name}>" if content or name not in _EMPTY else f"<{head}/>"


_EMPTY = ("rect", "line", "path", "circle", "polyline", "polygon", "use")


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def rect(x: float, y: float, width: float, height: float, **attributes: object) -> str:
    """A rectangle, at least as wide as can be seen."""
    return tag("rect", x=float(x), y=float(y), width=max(0.4, float(width)), height=float(height), **attributes)


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """A line of text."""
    return tag("text", escape(words), x=float(x), y=float(y), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def figure(
    name: str, title: str, description: str, width: float, height: float, marks: Iterable[str], **attributes: str
) -> str:
    """An SVG that scales with its column, with a title and a description for screen readers."""
    labels = f"{name}-t {name}-d"
    head = tag("title", escape(title), id=f"{name}-t") + tag("desc", escape(description), id=f"{name}-d")
    common = {"viewBox": f"0 0 {_short(float(width))} {_short(float(height))}", "role": "img", **attributes}
    content = head + "".join(marks)
    return tag("svg", content, xmlns="http://www.w3.org/2000/svg", aria_labelledby=labels, **common)


def ticks(largest: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to the first at or beyond `largest`."""
    step = nice_step(largest, about)
    return [i * step for i in range(math.ceil(largest / step - 1e-9) + 1)]


def nice_step(span: float, about: int = 5) -> float:
    """A step of 1, 2, 2.5 or 5 times a power of ten that divides a span into about so many."""
    rough = max(span, 1e-12) / about
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """HTML list of (name, CSS colour) as a row of swatches."""
    items = (
        tag("li", tag("span", class_="swatch", style=f"background:{colour}") + escape(name)) for name, colour in entries
    )
    return tag("ul", "".join(items), class_="legend")


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric_from: int = 1,
    caption: str = "",
    words_from: int | None = None,
) -> str:
    """HTML table of text; columns from `numeric_from` on, up to `words_from`, are aligned to the right."""
    last = len(headings) if words_from is None else words_from
    head = "".join(
        tag("th", escape(name), scope="col", class_="n" if numeric_from <= i < last else None)
        for i, name in enumerate(headings)
    )
    body = "".join(
        tag(
            "tr",
            "".join(
                tag("td", escape(cell), class_="n" if numeric_from <= i < last else None) for i, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    shown = tag("caption", escape(caption)) if caption else ""
    return tag("div", tag("table", shown + tag("thead", tag("tr", head)) + tag("tbody", body)), class_="scroll")


def cut(words: str, length: int) -> str:
    """Words of so many letters at most."""
    return words if len(words) <= length else words[: length - 1] + "…"
