"""Every plan resumes what every other one saved: 8 x 8 plans on 2, 4 and 8 ranks, five steps each.

    python -m benchmarks.faults.resume

Once for a GPT, once for a mixture of experts, and 4 x 4 in bf16. Writes the table. --plans: only plans whose names
hold one of these words; writes nothing.
"""

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

import torch

from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.planner.plan.document import Plan

from . import runs

RESULTS = Path(__file__).parent / "results"
BEFORE, AFTER = 3, 5
TIMEOUT_S = 300.0


def train(job: runs.Job, plan: Plan, steps: int, source: Path | None = None, target: Path | None = None) -> list[float]:
    """Losses of some steps, from one folder's last checkpoint, and saved to another."""
    trainer = parallelize(job.model, plan, runs.optimizer, loss=runs.loss, seed=runs.SEED)
    if source is not None:
        trainer.resume(source)
    shares = trainer.loader(runs.samples((BEFORE + AFTER) * runs.GLOBAL_BATCH))
    losses = [trainer.step(share).loss for _, share in zip(range(steps), shares, strict=False)]
    if target is not None:
        trainer.save(target)
    return losses


def resume_all(job: runs.Job, plan: Plan, folders: list[Path]) -> list[list[float]]:
    """[folder] -> losses of the steps after its checkpoint."""
    return [train(job, plan, AFTER, source=folder) for folder in folders]


def undisturbed(job: runs.Job, plan: Plan) -> list[float]:
    """Losses after the checkpoint of a run that needs none: of one process, or where rounding differs of the plan."""
    if job.precision == "fp32":
        return train(job, job.plan("one"), BEFORE + AFTER)[BEFORE:]
    found = run_local_ranks(train, plan.degrees.num_devices, job, plan, BEFORE + AFTER, timeout_s=TIMEOUT_S)
    return found[0][BEFORE:]


def matrix(job: runs.Job, names: tuple[str, ...], folder: Path) -> dict[tuple[str, str], float]:
    """(saved by, resumed by) -> largest relative difference of a loss from a run without a stop."""
    folders = [folder / name.replace(" ", "_") for name in names]
    for name, target in zip(names, folders, strict=True):
        plan = job.plan(name)
        run_local_ranks(train, plan.degrees.num_devices, job, plan, BEFORE, None, target, timeout_s=TIMEOUT_S)
    found = {}
    for name in names:
        plan = job.plan(name)
        expected = undisturbed(job, plan)
        losses = run_local_ranks(resume_all, plan.degrees.num_devices, job, plan, folders, timeout_s=TIMEOUT_S)[0]
        for saved_by, own in zip(names, losses, strict=True):
            found[saved_by, name] = max(abs(a / b - 1) for a, b in zip(own, expected, strict=True))
    return found


def allowed(job: runs.Job, saved_by: str, resumed_by: str) -> float:
    """How much losses may differ: a plan that goes on with what is its own does not round otherwise."""
    return runs.LOSS if saved_by == resumed_by else job.tolerance


def _table(model: str, names: tuple[str, ...], found: dict[tuple[str, str], float]) -> list[str]:
    rows = [f"| {saved_by} | {' | '.join(f'{found[saved_by, n]:.0e}' for n in names)} |" for saved_by in names]
    return [f"| {model}, saved by | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}", *rows, ""]


def main() -> int:
    """Write the matrices; 1 if a difference is larger than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", metavar="WORD")
    words = parser.parse_args().plans
    tables, summaries, failed = [], [], False
    for model, job in runs.JOBS.items():
        names = tuple(n for n in job.shapes if n != "one" and (words is None or any(word in n for word in words)))
        if not names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = matrix(job, names, Path(folder))
        tables += _table(model, names, found)
        print(*_table(model, names, found), sep="\n", flush=True)
        failed |= any(difference > allowed(job, *pair) for pair, difference in found.items())
        own = max(difference for (saved_by, name), difference in found.items() if saved_by == name)
        summaries.append(
            f"{model}: {len(found)} pairs, largest difference {max(found.values()):.1e} (allowed {job.tolerance:.1e}), "
            f"of plans that resume their own {own:.1e} (allowed {runs.LOSS:g})"
        )
    print(*summaries, sep="\n")
    if words is None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        head = [
            f"`python -m benchmarks.faults.resume`, {date}, torch {torch.__version__}",
            "",
            f"Largest relative difference of the {AFTER} losses after a checkpoint of step {BEFORE} from those of a "
            "run without a stop: of one process, in bf16 of the plan that resumes. Columns: resumed by.",
            "",
            *(f"- {line}" for line in summaries),
            "",
        ]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "resume.md").write_text("\n".join([*head, *tables[:-1]]) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
