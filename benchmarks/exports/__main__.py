"""`python -m benchmarks.exports`: every exporter on plans of every zoo model; parsed by the target, or refused."""

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.accuracy import cases
from benchmarks.exports import targets
from benchmarks.exports.rows import Row, row_of
from meshwright.planner.answers.search import InfeasibleError, SolverError, price_setup, search
from meshwright.planner.exchange.targets import TARGETS
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile

RESULTS = Path(__file__).with_name("results")
DEVICE = "h100-80gb"
GPUS = (8, 64, 512, 2048)
"""Each model is planned for the first of these on which it fits."""

SETUPS = (
    "ddp",
    "fsdp",
    "hsdp:2",
    "zero=1",
    "zero=2",
    "tp=2",
    "tp=2 fsdp",
    "pp=2 schedule=1f1b",
    "pp=2 schedule=gpipe",
    "pp=2 schedule=interleaved v=2",
    "tp=2 pp=2 schedule=1f1b fsdp",
    "tp=2 pp=4 schedule=interleaved v=2 zero=1",
    "pp=2 schedule=zb-h1",
    "pp=2 schedule=zb-v",
    "fsdp recompute=full",
    "fsdp recompute=selective",
    "fsdp recompute=attention",
    "cp=2 fsdp",
    "cp=2 cp_kind=all_to_all zero=1",
    "cp=2 cp_kind=all_gather fsdp",
    "tp=2 sp=on cp=2 pp=2 schedule=1f1b zero=1",
    "ep=8 fsdp",
    "ep=8 zero=1",
    "tp=2 sp=on ep=8 zero=1",
    "cp=2 ep=4 pp=2 schedule=1f1b zero=1",
)
PINNED = Pins(pipeline=4, schedule="1f1b")
"""Beside the search's own choice, the best of these, whose stages are cut unevenly where that is faster."""

MOST_S = 120.0
"""Seconds for a search: any plan will do here, proven or not."""

STATE_BYTES = 16
"""Of a parameter and its optimizer state, at least: fewer GPUs than hold that are not tried."""


def plans_of(name: str, profile: ModelProfile) -> Iterator[tuple[str, Plan]]:
    """The search's plan, and what people set up by hand, as far as it fits."""
    device = load_device(DEVICE)
    for count in GPUS:
        if STATE_BYTES * profile.num_parameters > count * device.memory:
            continue
        cluster = cluster_of(device, count)
        training = TrainingSpec(global_batch=4 * count, seq_len=profile.seq_len)
        try:
            found = search(profile, cluster, training, time_limit_s=MOST_S)
        except (InfeasibleError, SolverError):
            continue
        yield f"planned, {count} GPUs: {found.plan.label}", found.plan
        with contextlib.suppress(InfeasibleError, SolverError, ValueError):  # too few layers for four stages
            pinned = search(profile, cluster, training, pins=PINNED, time_limit_s=MOST_S)
            yield f"planned in stages, {count} GPUs: {pinned.plan.label}", pinned.plan
        for words in SETUPS:
            setup = parse_setup(words, count, cluster.devices_per_host)
            candidate = price_setup(setup, profile, cluster, training)
            if candidate.plan is not None:
                yield f"{words}, {count} GPUs: {candidate.plan.label}", candidate.plan
        return


def markdown(rows: list[Row]) -> str:
    """The table: outcomes by model and target, then every reason to refuse."""
    versions = ", ".join(
        f"{name} {targets.version(target) or 'not installed'}" for target, name in targets.PACKAGES.items()
    )
    lines = [
        "# Every exporter on plans of every model of the zoo",
        "",
        f"By `python -m benchmarks.exports`. Parsers of the targets: {versions}. Every option is held against the "
        "documented ones of the version that the export names; what is installed parses what it is given, too "
        "(Megatron's core: degrees, recompute and the layout of stages; its arguments are no package).",
        "same: read back, it is the plan again; said: what the target cannot say is in the export's notes.",
        "",
        f"{len(rows)} exports: "
        + ", ".join(f"{number} {outcome}" for outcome, number in sorted(Counter(row.outcome for row in rows).items()))
        + ".",
        "",
        "| model | plans | " + " | ".join(TARGETS) + " |",
        "|---|---:|" + "---|" * len(TARGETS),
    ]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        cells = []
        for target in TARGETS:
            count = Counter(row.outcome for row in own if row.target == target)
            cells.append(", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items())))
        lines.append(f"| {model} | {len({row.plan for row in own})} | " + " | ".join(cells) + " |")
    lines += ["", "## Why plans are refused", "", "| target | number | reason, of the first |", "|---|---:|---|"]
    reasons: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.outcome not in ("same", "said"):
            reasons.setdefault((row.target, _kind(row.note)), []).append(row)
    for (target, _), found in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        lines.append(f"| {target} | {len(found)} | {found[0].note.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _kind(note: str) -> str:
    return " ".join(word for word in note.split()[:6] if not any(c.isdigit() for c in word))


def main() -> int:
    """Write the table; 1 if something is lost silently or not parsed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exports", description=__doc__)
    parser.add_argument(
        "--models", nargs="*", help="names; the table keeps its rows of others (default: all of the zoo)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    table = arguments.output / "exports.json"
    known = [Row(**row) for row in json.loads(table.read_text())] if arguments.models and table.exists() else []
    rows: list[Row] = []
    without = []
    for source in cases.sources():
        name = cases.name_of(source)
        if arguments.models and name not in arguments.models:
            rows += [row for row in known if row.model == name]
            continue
        started = time.process_time()
        profile = cases.profile_of(cases.whole(source))
        plans = list(plans_of(name, profile))
        without += [name] * (not plans)
        rows += [row_of(name, label, plan, profile, target) for label, plan in plans for target in TARGETS]
        print(f"{name}: {len(plans)} plans, {time.process_time() - started:.0f} s of CPU", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    table.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    (arguments.output / "exports.md").write_text(markdown(rows))
    defects = [row for row in rows if row.outcome in ("silent", "not parsed")]
    for defect in (*defects, *(f"{name}: no plan was found" for name in without)):
        print(defect)
    print(f"{len(rows)} exports: {dict(Counter(row.outcome for row in rows))}")
    return 1 if defects or without else 0


if __name__ == "__main__":
    raise SystemExit(main())
