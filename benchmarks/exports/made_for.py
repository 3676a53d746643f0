"""`python -m benchmarks.exports.made_for`: plans made for each framework, every zoo model on 8, 64 and 1,024 GPUs."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accuracy import cases
from benchmarks.exports import targets
from benchmarks.exports.rows import row_of
from meshwright.planner.answers.search import InfeasibleError, SolverError, search
from meshwright.planner.plan.frameworks import FRAMEWORKS, TARGETS, Framework
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile

RESULTS = Path(__file__).with_name("results")
DEVICE = "h100-80gb"
GPUS = (8, 64, 1024)
SAMPLES_PER_GPU = 4

EXPORTED = ("same", "said")
AT_PLANNING = ("cannot run", "does not fit")
"""Outcomes without a plan, which planning says."""


@dataclass(frozen=True)
class MadeFor:
    """A plan made for a framework. outcome: of its export as in rows.py, or what planning said; gap: of the certificate
    among the framework's plans; seconds: of CPU for the search."""

    model: str
    gpus: int
    target: str
    outcome: str
    plan: str
    gap: float | None
    parsed: bool
    note: str
    seconds: float


def made_for(framework: Framework, name: str, profile: ModelProfile, count: int, time_limit_s: float) -> MadeFor:
    """The plan of a model for a framework on so many GPUs, and its export; what is asked of `plan --for`."""
    started = time.process_time()
    training = TrainingSpec(global_batch=SAMPLES_PER_GPU * count, seq_len=profile.seq_len, software=framework.software)
    cluster = cluster_of(load_device(DEVICE), count)

    def row(outcome: str, plan: str = "", gap: float | None = None, parsed: bool = False, note: str = "") -> MadeFor:
        seconds = round(time.process_time() - started, 1)
        return MadeFor(name, count, framework.target, outcome, plan, gap, parsed, note, seconds)

    try:
        pins = Pins(framework=framework)
        found = search(profile, cluster, training, pins=pins, time_limit_s=time_limit_s, beside_open=False)
    except InfeasibleError as error:
        return row("does not fit", note=str(error).split(". ")[0])
    except SolverError as error:
        return row("not found", note=str(error))
    except ValueError as error:
        return row("cannot run", note=str(error))
    label = f"{found.plan.label}, micro-batch {found.plan.micro_batch}"
    exported = row_of(name, label, found.plan, profile, framework.target)
    return row(exported.outcome, label, round(found.certificate.gap, 4), exported.parsed, exported.note)


def markdown(rows: Sequence[MadeFor]) -> str:
    """The table: outcomes by framework and number of GPUs, then each plan."""
    versions = ", ".join(
        f"{name} {targets.version(target) or 'not installed'}" for target, name in targets.PACKAGES.items()
    )
    planned = [row for row in rows if row.outcome not in AT_PLANNING]
    exported = [row for row in planned if row.outcome in EXPORTED]
    lines = [
        "# Plans made for a framework",
        "",
        f"By `python -m benchmarks.exports.made_for`: {DEVICE}, {SAMPLES_PER_GPU} samples per GPU, the "
        f"software of each framework. Parsers of the targets: {versions}.",
        "",
        f"Of {len(planned)} plans {len(exported)} export. What planning said instead of a plan: "
        + ", ".join(f"{n} {outcome}" for outcome, n in sorted(_count(rows, AT_PLANNING).items()))
        + ".",
        "",
        "| framework | GPUs | exported | of plans | cannot run | does not fit |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for target in TARGETS:
        for count in sorted({row.gpus for row in rows}):
            own = [row for row in rows if (row.target, row.gpus) == (target, count)]
            without = _count(own, AT_PLANNING)
            done = sum(row.outcome in EXPORTED for row in own)
            numbers = done, len(own) - without.total(), without["cannot run"], without["does not fit"]
            lines.append(f"| {target} | {count:,} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "| model | GPUs | framework | plan | gap | export |", "|---|---:|---|---|---:|---|"]
    for row in rows:
        gap = "" if row.gap is None else f"{row.gap:.1%}"
        lines.append(f"| {row.model} | {row.gpus:,} | {row.target} | {row.plan} | {gap} | {row.outcome} |")
    lines += ["", "## What planning said", "", "| number | sentence, of the first |", "|---:|---|"]
    sentences: dict[tuple[str, str], list[MadeFor]] = {}
    for row in rows:
        if row.outcome in AT_PLANNING:
            sentences.setdefault((row.target, row.outcome), []).append(row)
    lines += [f"| {len(found)} | {found[0].note.replace('|', '/')} |" for found in sentences.values()]
    return "\n".join(lines) + "\n"


def _count(rows: Iterable[MadeFor], outcomes: Sequence[str]) -> Counter[str]:
    return Counter(row.outcome for row in rows if row.outcome in outcomes)


def main() -> int:
    """Write the table; 1 if a plan does not export."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exports.made_for", description=__doc__)
    parser.add_argument("--models", nargs="*", help="names; the table keeps its rows of others (default: the zoo)")
    parser.add_argument("--gpus", nargs="*", type=int, default=GPUS)
    parser.add_argument("--frameworks", nargs="*", choices=TARGETS, default=TARGETS)
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    table = arguments.output / "made_for.json"
    rows = {_key(row): row for row in map(_read, json.loads(table.read_text()) if table.exists() else [])}
    names = [cases.name_of(source) for source in cases.sources()]
    for source, name in zip(cases.sources(), names, strict=True):
        if arguments.models and name not in arguments.models:
            continue
        profile = cases.profile_of(cases.whole(source))
        for count in arguments.gpus:
            for framework in (FRAMEWORKS[target] for target in arguments.frameworks):
                found = made_for(framework, name, profile, count, arguments.time_limit)
                rows[_key(found)] = found
                print(f"{name}, {count} GPUs, {found.target}: {found.outcome} {found.plan}", flush=True)
        write(arguments.output, rows.values())
    defects = [row for row in rows.values() if row.outcome not in (*EXPORTED, *AT_PLANNING)]
    for defect in defects:
        print(defect)
    return 1 if defects else 0


def write(folder: Path, rows: Iterable[MadeFor]) -> None:
    """Both tables into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(rows, key=lambda row: (row.model, row.gpus, TARGETS.index(row.target)))
    (folder / "made_for.json").write_text(json.dumps([asdict(row) for row in ordered], indent=1) + "\n")
    (folder / "made_for.md").write_text(markdown(ordered))


def _read(row: dict[str, object]) -> MadeFor:
    return MadeFor(**row)  # type: ignore[arg-type]


def _key(row: MadeFor) -> tuple[str, int, str]:
    return row.model, row.gpus, row.target


if __name__ == "__main__":
    raise SystemExit(main())
