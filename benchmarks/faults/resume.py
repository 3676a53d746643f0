"""Every plan resumes what every other one saved: 8 x 8 plans on 2, 4 and 8 ranks, five steps each; prints Markdown.

    python -m benchmarks.faults.resume

Once for a GPT, once for a mixture of experts. --plans: only plans whose names hold one of these words.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.planner.plan import Plan

from . import runs

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


def matrix(job: runs.Job, names: tuple[str, ...], folder: Path) -> dict[tuple[str, str], float]:
    """(saved by, resumed by) -> largest relative difference of a loss from a run of one process without a stop."""
    undisturbed = train(job, job.plan("one"), BEFORE + AFTER)[BEFORE:]
    folders = [folder / name.replace(" ", "_") for name in names]
    for name, target in zip(names, folders, strict=True):
        plan = job.plan(name)
        run_local_ranks(train, plan.degrees.num_devices, job, plan, BEFORE, None, target, timeout_s=TIMEOUT_S)
    found = {}
    for name in names:
        plan = job.plan(name)
        losses = run_local_ranks(resume_all, plan.degrees.num_devices, job, plan, folders, timeout_s=TIMEOUT_S)[0]
        for saved_by, own in zip(names, losses, strict=True):
            found[saved_by, name] = max(abs(a / b - 1) for a, b in zip(own, undisturbed, strict=True))
    return found


def main() -> int:
    """Print the matrices; 1 if a difference is larger than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=[""], metavar="WORD")
    words = parser.parse_args().plans
    worst, count = 0.0, 0
    for model, job in runs.JOBS.items():
        names = tuple(name for name in job.shapes if name != "one" and any(word in name for word in words))
        with tempfile.TemporaryDirectory() as folder:
            found = matrix(job, names, Path(folder))
        print(f"| {model}, saved by | {' | '.join(names)} |")
        print(f"|---|{'---|' * len(names)}")
        for saved_by in names:
            print(f"| {saved_by} | {' | '.join(f'{found[saved_by, name]:.0e}' for name in names)} |")
        print(flush=True)
        worst, count = max(worst, *found.values()), count + len(found)
    print(f"{count} pairs, largest difference {worst:.1e}, allowed {runs.LOSS:g}")
    return int(worst > runs.LOSS)


if __name__ == "__main__":
    sys.exit(main())
