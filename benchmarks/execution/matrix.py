"""Plans at random of the whole zoo, each beside one process: loss, gradient norm, every gradient and parameter.

    python -m benchmarks.execution.matrix --plans 150

Small versions of the models on 2, 4 and 8 gloo ranks, five AdamW steps in fp32. What has been run is kept in
results/matrix.json, so that a run that was broken off goes on; --again begins anew.
"""

import argparse
import datetime
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.measuring.verify import TOLERANCE, VerifyReport, beside_one_process

from .drawn import GLOBAL_BATCH, Drawn, draw, names, small

RESULTS = Path(__file__).parent / "results"
RANKS = (2, 4, 8)
NUM_STEPS = 5

_TIMEOUT_S = 300.0

Row = dict[str, Any]


def chosen(num_plans: int) -> list[Drawn]:
    """At least so many plans, as many of each model on each number of ranks."""
    count = math.ceil(num_plans / len(names()) / len(RANKS))
    return [plan for name in names() for ranks in RANKS for plan in draw(name, ranks, count)]


def run(drawn: Drawn) -> Row:
    """What became of one plan: largest difference of each kind, the tensor that differs first, or why it did not
    run."""
    started = time.perf_counter()
    loaded = small(drawn.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]
    report = beside_one_process(VerifyReport(drawn.label, (), {}), drawn.plan, loaded, batches, _TIMEOUT_S)
    worst = max(report.largest.values(), key=lambda d: d.relative, default=None)
    return {
        "model": drawn.model,
        "plan": drawn.label,
        "ranks": drawn.plan.degrees.num_devices,
        "worst": None if worst is None else worst.relative,
        "where": None if worst is None else worst.what,
        "failure": report.failure or (None if report.first is None else report.lines[-1]),
        "seconds": round(time.perf_counter() - started, 2),
        "key": key_of(drawn),
    }


def key_of(drawn: Drawn) -> str:
    """What tells a plan from all others."""
    return hashlib.sha256(f"{drawn.model} {drawn.plan.model_dump_json()}".encode()).hexdigest()[:16]


def run_all(plans: Iterable[Drawn], file: Path) -> Iterator[Row]:
    """Rows in order; those that `file` has already are not run again, others are put there at once."""
    known: dict[str, Row] = {}
    if file.exists():
        known = {row["key"]: row for row in json.loads(file.read_text())["rows"] if row["failure"] is None}
    rows = []
    for drawn in plans:
        rows.append(known.get(key_of(drawn)) or run(drawn))
        head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "torch": torch.__version__}
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({**head, "tolerance": TOLERANCE, "rows": rows}, indent=1) + "\n")
        yield rows[-1]


def summary(rows: list[Row]) -> str:
    """How all stand, in a sentence."""
    good = sum(row["failure"] is None for row in rows)
    worst = max((row["worst"] for row in rows if row["worst"] is not None), default=0.0)
    of_models, of_ranks = len({row["model"] for row in rows}), sorted({row["ranks"] for row in rows})
    return (
        f"{good} of {len(rows)} plans of {of_models} models on {', '.join(map(str, of_ranks))} ranks give the numbers "
        f"of one process after {NUM_STEPS} AdamW steps (largest difference {worst:.1e}, allowed {TOLERANCE:g})"
    )


def _markdown(rows: list[Row], num_plans: int) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.execution.matrix --plans {num_plans}`, {date}, torch {torch.__version__}",
        "",
        f"{summary(rows)}.",
        "",
        "Letters stand for the layers of the stages: recompute none, full, selective or attention; gathered parameters "
        "kept or given back.",
        "",
        "| model | ranks | plan | largest difference |",
        "|---|---:|---|---:|",
    ]
    for row in rows:
        found = row["failure"] or f"{row['worst']:.1e}"
        lines.append(f"| {row['model']} | {row['ranks']} | {row['plan'].replace('|', '/')} | {found} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run them, and write the table; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=150, help="at least so many")
    parser.add_argument("--again", action="store_true", help="run all, known or not")
    arguments = parser.parse_args()
    file = RESULTS / "matrix.json"
    if arguments.again:
        file.unlink(missing_ok=True)
    plans = chosen(arguments.plans)
    rows = []
    for row in run_all(plans, file):
        rows.append(row)
        found = row["failure"] or f"{row['worst']:.1e}"
        print(
            f"{len(rows):4d}/{len(plans)}  {row['seconds']:5.1f} s  {row['model']}: {row['plan']}: {found}", flush=True
        )
    (RESULTS / "matrix.md").write_text(_markdown(rows, arguments.plans))
    print(summary(rows))
    return int(any(row["failure"] is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
