"""Every picture that is committed, drawn from what is committed beside it.

    python -m benchmarks.pictures            # draws all of them
    python -m benchmarks.pictures --check    # draws nothing: exit code 1 names those that are not current

Three are charts as SVG text, drawn from the JSON of their runs; they are current where the text is the same. The fourth
is the terminal's own output of the command that stands under it, which is run; it is current where its words are the
same, but for how long the search took.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path

from meshwright.executor.reporting.drawing import figure, line, nice_step, rect, tag, text

HERE = Path(__file__).parent
TERMINAL = HERE / "plan.svg"
SHOWN = ("benchmarks/models/gpt.py", "--gpus", "8", "--device", "h100-80gb")
"""What the terminal's picture is of."""

_BLUE, _ORANGE, _INK, _PALE = "#3f6fd1", "#b45d0e", "#3a4256", "#d9dee8"
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1d2433}"
    ".n{text-anchor:end}.m{text-anchor:middle}.s{font-size:12px;fill:#55607a}.h{font-size:15px;font-weight:600}"
)
_WIDTH = 900.0


def main() -> int:
    """Draw, or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a picture is not current")
    given = parser.parse_args()
    if not given.check:
        for path, drawn in CHARTS.items():
            path.write_text(drawn())
    found = stale()
    if not given.check and TERMINAL in found:
        draw_terminal(TERMINAL)
        found.remove(TERMINAL)
    for path in found:
        print(f"{path}: not current: run python -m benchmarks.pictures", file=sys.stderr)
    return int(bool(found))


def stale() -> list[Path]:
    """Committed pictures that are not what would be drawn now, or that nothing here draws."""
    found = stale_charts()
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.svg"
        draw_terminal(now)
        return found + [TERMINAL] * (words_of(now) != words_of(TERMINAL))


def stale_charts() -> list[Path]:
    """Those of the charts, and pictures that nothing here draws."""
    here = {path for kind in ("png", "svg") for path in HERE.rglob(f"*.{kind}")}
    stray = sorted(here - set(CHARTS) - {TERMINAL})
    return [path for path, drawn in CHARTS.items() if not path.exists() or path.read_text() != drawn()] + stray


# ---- the terminal


def draw_terminal(path: Path) -> None:
    """What the command prints, in a folder of its own."""
    environment = {**os.environ, "COLUMNS": "100"}
    words = [sys.executable, "-m", "meshwright", *SHOWN, "--svg", str(path.resolve())]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "benchmarks").symlink_to(HERE)
        subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def words_of(picture: Path) -> str:
    """What a picture of a terminal says, but for how long the search took."""
    said = "".join(re.findall(r">([^<>]+)</text>", picture.read_text()))
    return re.sub(r"in\s?\d[\d.]*\s?m?s\)", "", unescape(said).replace("\xa0", " "))


# ---- charts


def scores() -> str:
    """Predicted over measured step time of published runs, a row for each source: its runs from the shortest step
    (above) to the longest."""
    points = json.loads((HERE / "published" / "results" / "points.json").read_text())
    rows: dict[str, list[tuple[float, float, bool]]] = {}
    for file, measured_s, predicted_s, exact in points:
        rows.setdefault(file, []).append((measured_s, predicted_s / measured_s, exact))
    height, left, top, each = 112.0 + 30.0 * len(rows), 215.0, 66.0, 30.0
    bottom = top + each * len(rows)
    ratios = [ratio for runs in rows.values() for _, ratio, _ in runs]
    place = _log(0.97 * min(0.7, *ratios), 1.03 * max(1.5, *ratios), left, _WIDTH - 30)
    how = "A row is a source; in it, runs from the shortest step (above) to the longest."
    if not all(exact for *_, exact in points):
        how += " Hollow: nearest setting that can be expressed."
    marks = [
        text(0, 18, "Predicted over measured step time of published runs", class_="h"),
        text(0, 40, how, class_="s"),
        rect(place(0.9), top, place(1.1) - place(0.9), bottom - top, fill="#eef2fa"),
    ]  # fmt: skip
    for value in (each for each in (0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 2.0) if left <= place(each) <= _WIDTH - 30):
        marks.append(line(place(value), top, place(value), bottom, stroke=_INK if value == 1 else _PALE))
        marks.append(text(place(value), bottom + 18, f"{value:g}", class_="m s"))
    marks.append(text((left + _WIDTH - 30) / 2, bottom + 38, "predicted / measured (band: within 10%)", class_="m s"))
    ranked = sorted(rows.items(), key=lambda item: _median([abs(math.log(ratio)) for _, ratio, _ in item[1]]))
    for i, (file, runs) in enumerate(ranked):
        middle = top + each * (i + 0.5)
        error = _median([abs(math.log(ratio)) for _, ratio, _ in runs])
        marks.append(text(left - 12, middle - 1, file, class_="n"))
        note = f"{len(runs)} run{'s' if len(runs) > 1 else ''}, median {error:.1%} off"
        marks.append(text(left - 12, middle + 12, note, class_="n s", style="font-size:10.5px"))
        marks.append(line(left, top + each * i, _WIDTH - 30, top + each * i, stroke=_PALE))
        for j, (_, ratio, exact) in enumerate(sorted(runs)):
            y = middle + 20.0 * ((j + 0.5) / len(runs) - 0.5)
            marks.append(_dot(place(ratio), y, _BLUE, exact))
    said = "; ".join(f"{file}: {len(runs)} runs" for file, runs in ranked)
    return _picture("scores", "Predicted over measured step time", said, height, marks)


def scaling() -> str:
    """Search time over GPUs, of the runs in planning_time.json."""
    from benchmarks.planning_time.cases import SCALES

    taken = json.loads((HERE / "planning_time" / "results" / "planning_time.json").read_text())["scales"]
    points = [
        (case.gpus, each["search_s"]) for case, each in zip(SCALES, taken, strict=True) if each["search_s"] is not None
    ]
    left, top, bottom, right = 60.0, 50.0, 330.0, _WIDTH - 30
    across = _log(points[0][0], points[-1][0], left + 20, right - 20)
    step = nice_step(max(seconds for _, seconds in points))
    most = step * math.ceil(max(seconds for _, seconds in points) / step)
    marks = [text(0, 18, "Seconds a search takes: Llama-3-8B, eight samples per GPU", class_="h")]
    for i in range(round(most / step) + 1):
        y = bottom - (bottom - top) * i * step / most
        marks += [line(left, y, right, y, stroke=_PALE), text(left - 8, y + 4, f"{i * step:g}", class_="n s")]
    marks.append(text(left - 8, top - 14, "s", class_="n s"))
    marks += [text(across(gpus), bottom + 20, f"{gpus:,}", class_="m s") for gpus, _ in points]
    marks.append(text((left + right) / 2, bottom + 42, "GPUs", class_="m s"))
    places = [(across(gpus), bottom - (bottom - top) * seconds / most) for gpus, seconds in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks.append(tag("polyline", points=path, fill="none", stroke=_BLUE, stroke_width=2))
    marks += [_dot(x, y, _BLUE, True) for x, y in places]
    said = "; ".join(f"{gpus:,} GPUs: {seconds:.2f} s" for gpus, seconds in points)
    return _picture("scaling", "Search time over GPUs", said, bottom + 55, marks)


def planned_vs_manual() -> str:
    """Predicted against measured of all set-ups, and every set-up's step relative to the plan's."""
    from benchmarks.planned_vs_manual.figures import Result
    from benchmarks.planned_vs_manual.store import Store

    results: Sequence[Result] = Store(HERE / "planned_vs_manual" / "results").everything()[0]
    rows = [result for result in results if result.ratio is not None]
    topologies = list(dict.fromkeys(result.topology for result in rows))
    colours: Mapping[str, str] = dict(zip(topologies, (_BLUE, _ORANGE), strict=False))
    side, top, each = 380.0, 84.0, 28.0
    bottom = top + side
    times = [row.measured_s for result in rows for row in result.distinct if row.measured_s is not None]
    ends = 0.9 * min(times), 1.1 * max(times)
    across, up = _log(*ends, 50.0, 50.0 + side), _log(*ends, bottom, top)
    marks = [
        text(0, 18, "Predicted against measured step, seconds", class_="h"),
        text(0, 36, "Every set-up is a point; the band is within 10%", class_="s"),
        *_legend(topologies, colours, 0.0, 58.0),
    ]
    band = [(ends[0], 0.9), (ends[1], 0.9), (ends[1], 1.1), (ends[0], 1.1)]
    corners = " ".join(f"{across(at):.1f},{up(at * share):.1f}" for at, share in band)
    marks.append(tag("polygon", points=corners, fill="#e6ebf5"))
    marks.append(line(across(ends[0]), up(ends[0]), across(ends[1]), up(ends[1]), stroke=_INK))
    for value in (0.3, 0.5, 1, 2, 3, 5):
        marks += [line(across(value), bottom, across(value), bottom + 5, stroke=_INK),
                  text(across(value), bottom + 20, f"{value:g}", class_="m s"),
                  line(45, up(value), 50, up(value), stroke=_INK),
                  text(41, up(value) + 4, f"{value:g}", class_="n s")]  # fmt: skip
    marks.append(text(50 + side / 2, bottom + 40, "measured", class_="m s"))
    marks.append(text(56, top + 10, "predicted", class_="s"))
    for result in rows:
        for row in result.distinct:
            if row.measured_s is not None and row.predicted_s is not None:
                marks.append(_dot(across(row.measured_s), up(row.predicted_s), colours[result.topology], True))
    below = bottom + 75.0
    marks += [
        text(0, below, "Step of every manual set-up over the plan's", class_="h"),
        text(0, below + 18, "1: as fast as the plan; right of it: slower", class_="s"),
    ]
    start, left = below + 34.0, 235.0
    end = start + each * len(rows)
    ratios = [r.measured_s / _planned_s(result) for result in rows for r in result.distinct if r.measured_s is not None]
    place = _log(0.93, 1.06 * max(ratios), left, _WIDTH - 25)
    for value in (1.0, 1.2, 1.5, 2.0, 3.0, 5.0):
        marks.append(line(place(value), start, place(value), end, stroke=_INK if value == 1 else _PALE))
        marks.append(text(place(value), end + 18, f"{value:g}", class_="m s"))
    for i, result in enumerate(rows):
        y = start + each * (i + 0.5)
        marks.append(text(left - 14, y + 4, f"{result.case}, {result.topology.split(',')[0]}", class_="n"))
        for row in result.distinct[1:]:
            if row.measured_s is not None:
                marks.append(_dot(place(row.measured_s / _planned_s(result)), y, colours[result.topology], True))
    said = "; ".join(f"{r.case}, {r.topology}: best manual over plan {1 / (r.ratio or 1):.2f}" for r in rows)
    return _picture("results", "Planned against manual set-ups", said, end + 30, marks)


def _planned_s(result: "object") -> float:
    rows = result.rows  # type: ignore[attr-defined]
    return float(rows[0].measured_s or 1.0)


def _legend(names: Sequence[str], colours: Mapping[str, str], left: float, y: float) -> Iterator[str]:
    for name in names:
        yield _dot(left + 5, y, colours[name], True)
        yield text(left + 14, y + 4, name, class_="s")
        left += 24 + 6.6 * len(name)


def _dot(x: float, y: float, colour: str, filled: bool) -> str:
    face = {"fill": colour, "fill_opacity": "0.6"} if filled else {"fill": "none"}
    return tag("circle", cx=float(x), cy=float(y), r=3.2, stroke=colour, stroke_width="0.8", **face)


def _log(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Where a value lies between two ends of a logarithmic axis."""
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / span


def _median(values: Sequence[float]) -> float:
    ranked = sorted(values)
    half = len(ranked) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def _picture(name: str, title: str, said: str, height: float, marks: Sequence[str]) -> str:
    """A picture of its own, on white, one element a line."""
    back = rect(-20, -10, _WIDTH + 40, height + 20, fill="#ffffff")
    content = [tag("style", _STYLE), back, *marks]
    box = f"-20 -10 {_WIDTH + 40:g} {height + 20:g}"
    drawn = figure(name, title, said, _WIDTH, height, (f"\n{each}" for each in content))
    return re.sub(r'viewBox="[^"]*"', f'viewBox="{box}"', drawn, count=1).replace("</svg>", "\n</svg>\n")


CHARTS: Mapping[Path, Callable[[], str]] = {
    HERE / "published" / "results" / "scores.svg": scores,
    HERE / "planning_time" / "results" / "scaling.svg": scaling,
    HERE / "planned_vs_manual" / "results" / "results.svg": planned_vs_manual,
}
"""Where each chart lies -> what draws it."""


if __name__ == "__main__":
    sys.exit(main())
