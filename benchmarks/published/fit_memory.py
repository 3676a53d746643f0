"""Fits the few free constants of memory: `python -m benchmarks.published.fit_memory`; prints and writes the table."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

from meshwright.planner.cost import software
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.model_profile import ModelProfile

from .clusters import place
from .metrics import Spread, spread
from .pricing import Pricer, memory_by_metric
from .rows import DATA, Row, read_folders
from .settings import CannotPriceError, setting_of
from .single_modules import estimate_of

OUT = Path(__file__).parent / "fitted" / "memory.md"

GIB = 2.0**30

STEPS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.4, 2.0)
"""Factors that a constant is tried at, around its best so far."""

ROUNDS = 4

PRIOR = 0.02
"""Weight of a constant's distance from its value without data, in units of its spread, beside the mean error."""


@dataclass(frozen=True)
class Share:
    """One free constant of memory: of the tables of stacks, or of what a variant changes.

    before: its value without any data. spread: standard deviation of its logarithm that is taken for likely then.
    """

    of: tuple[str, ...]
    field: str
    before: float
    spread: float
    reason: str

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{', '.join(self.of)}: {self.field}"

    def applies(self, stack: str) -> bool:
        """Whether memory under a stack, with its variants, depends on it."""
        return any(name in stack.split("+") for name in self.of)


SHARES = (
    Share(("torchtitan",), "selective", 0.59, 0.2, "q, v, gate and down of a Llama block"),
    Share(("compiled-selective",), "selective", 0.59, 0.2, "the same"),
    Share(("megatron-2021",), "fragmentation", 0.06, 1.0, "the device's"),
    Share(("deepspeed",), "context", 4 * GIB, 0.5, "1.5 GiB, and four buckets of 1 GB"),
    Share(("flat-optimizer",), "context", 4 * GIB, 0.5, "as DeepSpeed's"),
    Share(("megatron-core",), "low_precision", 0.75, 0.2, "half of a Llama block's is inputs of matmuls"),
)


@dataclass(frozen=True)
class Case:
    """A row with measured memory and the plan that runs it."""

    row: Row
    plan: Plan
    profile: ModelProfile
    weight: float
    repeated: tuple[str, ...] = ()
    """Single modules that run again, see single_modules.py."""

    @property
    def stack(self) -> str:
        """Name of its software."""
        return self.plan.training.software


@contextmanager
def tried(values: Mapping[str, float]) -> Iterator[None]:
    """While inside, the constants have these values, by name."""
    stacks = dict(software.all_software())
    variants = {name: dict(changes) for name, changes in software.MEMORY_VARIANTS.items()}
    for share in SHARES:
        value = values[share.name]
        for name in share.of:
            if name in variants:
                variants[name][share.field] = value
            else:
                memory = stacks[name].memory.model_copy(update={share.field: value})
                stacks[name] = stacks[name].model_copy(update={"memory": memory})
    with patch.object(software, "all_software", lambda: stacks), patch.object(software, "MEMORY_VARIANTS", variants):
        yield


class Errors:
    """Signed log errors of cases under values of the constants; each found once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], float] = {}

    def of(self, case: Case, values: Mapping[str, float]) -> float:
        """log(predicted / measured) of the peak, by the metric that was measured."""
        key = (case.row.id, *(values[share.name] for share in SHARES if share.applies(case.stack)))
        if key not in self._known:
            with tried(values):
                found = estimate_of(case.plan, case.profile, case.repeated)
            peak = memory_by_metric(found, case.row)[case.row.memory_metric]
            self._known[key] = math.log(peak / (case.row.memory_bytes or math.nan))
        return self._known[key]

    def objective(self, cases: Sequence[Case], values: Mapping[str, float]) -> float:
        """Weighted mean of the absolute errors, and a little for constants far from where they were."""
        total = sum(case.weight for case in cases)
        mean = sum(case.weight * abs(self.of(case, values)) for case in cases) / total
        far = sum((math.log(values[share.name] / share.before) / share.spread) ** 2 for share in SHARES)
        return mean + PRIOR * far / len(SHARES)


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """Rows with measured memory that can be priced. A file with n of them weighs as the square root of n."""
    rows = [row for row in rows if row.scoring["score_memory"] and row.memory_bytes is not None]
    counts = {row.file: sum(other.weight for other in rows if other.file == row.file) for row in rows}
    pricer, cases = Pricer(), []
    for row in rows:
        try:
            setting = setting_of(row)
            _, plan = pricer.estimate(setting, place(row).cluster)
        except CannotPriceError:
            continue
        profile = pricer.profile(setting)
        cases.append(Case(row, plan, profile, row.weight / math.sqrt(counts[row.file]), setting.repeated))
    return cases


def fit(cases: Sequence[Case], errors: Errors, start: Mapping[str, float]) -> dict[str, float]:
    """Values of all constants with the least objective, one after the other, steps getting smaller."""
    values, scale = dict(start), 1.0
    for _ in range(ROUNDS):
        for share in SHARES:
            touched = [case for case in cases if share.applies(case.stack)]
            if not touched:
                values[share.name] = share.before
                continue
            tries = [values[share.name] * step**scale for step in STEPS]
            values[share.name] = min(tries, key=lambda v: errors.objective(touched, {**values, share.name: v}))
        scale *= 0.6
    return values


def held_out(cases: Sequence[Case], errors: Errors) -> dict[str, list[tuple[float, float]]]:
    """File -> (error, weight) of its rows under constants fitted to the other files alone."""
    found = {}
    for file in sorted({case.row.file for case in cases}):
        values = fit([c for c in cases if c.row.file != file], errors, {s.name: s.before for s in SHARES})
        found[file] = [(errors.of(c, values), c.row.weight) for c in cases if c.row.file == file]
    return found


def summed(errors: Sequence[tuple[float, float]]) -> Spread:
    """Spread of (error, weight) pairs."""
    found = spread([error for error, _ in errors], [weight for _, weight in errors])
    assert found is not None
    return found


Found: TypeAlias = Mapping[str, list[tuple[float, float]]]
"""File -> (error, weight) of its rows."""


def everything(found: Found) -> list[tuple[float, float]]:
    """(error, weight) of the rows of all files."""
    return [error for part in found.values() for error in part]


def page(values: Mapping[str, float], inside: Found, outside: Found) -> str:
    """The table as Markdown."""
    lines = [
        "# Constants of memory",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, `python -m benchmarks.published.fit_memory`: {len(SHARES)} constants by "
        "coordinate descent on the weighted mean of |log(predicted / measured)|; a file of n rows weighs as the square "
        "root of n. They are in `planner/cost/software.toml` (stacks) and `planner/cost/software.py` (variants).",
        "",
        "| constant | fitted | without data |",
        "|---|---|---|",
    ]
    for share in SHARES:
        unit, name = (GIB, " GiB") if share.field == "context" else (1.0, "")
        fitted, before = (f"{value / unit:.3g}{name}" for value in (values[share.name], share.before))
        lines.append(f"| {share.name} | {fitted} | {before}, {share.reason} |")
    lines += ["", "| file | rows | median | p90 | bias | left out: median | p90 |", "|---|---|---|---|---|---|---|"]
    for file in [*inside, "all"]:
        near, far = (summed(found[file] if file in found else everything(found)) for found in (inside, outside))
        spreads = f"{near.median:.1%} | {near.p90:.1%} | {near.bias:+.1%} | {far.median:.1%} | {far.p90:.1%}"
        lines.append(f"| {file} | {near.n} | {spreads} |")
    lines += [
        "",
        "Left out: the constants fitted without the file; one that no other file tells keeps its value without data.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Fits, cross-validates by file, prints and writes."""
    cases, errors = cases_of(read_folders([DATA])), Errors()
    values = fit(cases, errors, {share.name: share.before for share in SHARES})
    inside: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        inside.setdefault(case.row.file, []).append((errors.of(case, values), case.row.weight))
    outside = held_out(cases, errors)
    told = page(values, dict(sorted(inside.items())), outside)
    print(told)
    OUT.write_text(told)
    spreads = {"in-sample": asdict(summed(everything(inside))), "left out": asdict(summed(everything(outside)))}
    document = {"constants": {name: float(f"{value:.4g}") for name, value in values.items()}, "errors": spreads}
    OUT.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
