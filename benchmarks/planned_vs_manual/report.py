"""Table of planned against manual set-ups."""

from collections.abc import Mapping, Sequence

from benchmarks.planned_vs_manual.bench import Calibrated, Topology
from benchmarks.planned_vs_manual.figures import Result, Row, figures
from benchmarks.planned_vs_manual.store import Taken, seconds_of


def told(what: object, of: object) -> str:
    """A calibration (of a topology), or a result (and when it was taken), as lines for the terminal."""
    if isinstance(what, Topology) and isinstance(of, Calibrated):
        lines = [f"{what.name}: factors " + ", ".join(f"{name} {value:.2f}" for name, value in of.factors.items())]
        lines += [
            f"    {r.label}: {r.before_s:.3f} -> {r.after_s:.3f}, measured {r.measured_s:.3f} s "
            f"({r.after_s / r.measured_s - 1:+.1%}), work {r.work:.0%}"
            for r in of.residuals
        ]
        return "\n".join(lines)
    assert isinstance(what, Result)
    assert isinstance(of, Taken)
    ratio = "not run" if what.ratio is None else f"{what.ratio:.3f} of the best manual set-up"
    tau = "" if what.tau is None else f", tau {what.tau:.2f}"
    lines = [f"{what.topology}: {what.case}: planned {ratio}{tau}, {of.seconds} s"]
    return "\n".join(lines + [f"    {_line(row)}" for row in what.rows])


def _line(row: Row) -> str:
    if row.measured_s is None or row.predicted_s is None or row.error is None:
        return f"{row.label}: {row.note}"
    same = f", the same plan as {row.same_as}" if row.same_as else ""
    return (
        f"{row.label} ({row.layout}): {row.predicted_s:.3f}, measured {row.measured_s:.3f} s ({row.error:+.1%}), "
        f"spread {row.spread:.1%}, work {row.work:.0%}{same}"
    )


def markdown(results: Sequence[Result], calibrations: Mapping[str, Calibrated], taken: Sequence[Taken]) -> str:
    """The outcome as a Markdown page."""
    dates = sorted({each.date for each in taken})
    lines = [
        "# Planned against manual set-ups on an emulated cluster",
        "",
        f"Taken {' and '.join(dates)}, {seconds_of(taken) / 60:.0f} minutes in all, by "
        "`python -m benchmarks.planned_vs_manual`. "
        "Hosts are network namespaces behind links of the rate in the cluster's name; collectives, schedules and "
        "numbers are real, the compute time of every layer and of the optimizer is a declared one (padded). So search, "
        "schedules and communication are validated here, not the times of kernels.",
        "",
        "| figure | found |",
        "|---|---|",
        *(f"| {name} | {shown(name, value)} |" for name, value in figures(results).items()),
        "",
        "| model | cluster | plan | step, s | best manual | step, s | planned / best manual | tau | plans run |",
        "|---|---|---|---:|---|---:|---:|---:|---:|",
    ]
    lines += [_summary(result) for result in results]
    for result in results:
        lines += ["", f"## {result.case}, {result.topology}", ""]
        lines += [
            "| set-up | layout | predicted, s | measured, s | spread | error | |",
            "|---|---|---:|---:|---:|---:|---|",
        ]
        for row in result.rows:
            note = f"the same plan as {row.same_as}" if row.same_as else row.note.replace("|", "/")
            cells = [
                _number(row.predicted_s, ".3f"),
                _number(row.measured_s, ".3f"),
                _number(row.spread, ".1%"),
                _number(row.error, "+.1%"),
            ]
            lines.append(f"| {row.label} | {row.layout} | {' | '.join(cells)} | {note} |")
    for name, found in calibrations.items():
        lines += ["", f"## Calibration, {name}", ""]
        lines += ["Factors on the device file: " + ", ".join(f"{k} {v:.2f}" for k, v in found.factors.items()), ""]
        lines += ["| reference step | before, s | fitted, s | measured, s | error |", "|---|---:|---:|---:|---:|"]
        for r in found.residuals:
            error = r.after_s / r.measured_s - 1
            lines.append(f"| {r.label} | {r.before_s:.3f} | {r.after_s:.3f} | {r.measured_s:.3f} | {error:+.1%} |")
    return "\n".join(lines) + "\n"


def _summary(result: Result) -> str:
    planned = result.rows[0]
    manual = [row for row in result.rows[1:] if row.measured_s is not None]
    best = min(manual, key=lambda row: row.measured_s or 0.0, default=planned)
    cells = [
        f"{result.case} | {result.topology} | {planned.layout}",
        _number(planned.measured_s, ".3f"),
        f"{best.label}: {best.layout}",
        _number(best.measured_s, ".3f"),
        _number(result.ratio, ".3f"),
        _number(result.tau, ".2f"),
        str(len(result.distinct)),
    ]
    return f"| {' | '.join(cells)} |"


def shown(name: str, value: float) -> str:
    """A figure as people read it: errors and shares in percent, counts whole."""
    if "error" in name or "percentile" in name or "within" in name:
        return f"{value:.1%}"
    return f"{value:.0f}" if value == int(value) and value > 1 else f"{value:.3f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
