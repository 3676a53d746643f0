"""torchrun --max-restarts: a rank of a GPT is killed at a random moment, and the job goes on by itself.

    python -m benchmarks.faults.restarts --times 20

Each time the losses of all steps, however often they were run, are those of a run that nobody disturbed. Writes the
table.
"""

import argparse
import datetime
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from meshwright.executor import parallelize

from . import runs

RESULTS = Path(__file__).parent / "results"
JOB, LAYOUTS = runs.JOBS["gpt"], ("fsdp 2", "pp 2", "ddp 2", "tp 2")
STEPS = 8
_TIMEOUT_S = 240.0
_FIRST_PORT = 21000


def train(layout: str, folder: Path, victim: int, moment: float) -> None:
    """As one rank under torchrun. moment: steps behind the first at which the victim of the first attempt dies."""
    first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    trainer = parallelize(JOB.model, JOB.plan(layout), runs.optimizer, loss=runs.loss, seed=runs.SEED)
    trainer.resume(folder / "checkpoints", missing_ok=True)
    if first_attempt and trainer.mesh.rank == victim:
        _die_later(moment)
    for share in trainer.loader(runs.samples((STEPS + 1) * runs.GLOBAL_BATCH)):
        if trainer.progress.steps >= STEPS:
            break
        loss = trainer.step(share).loss
        if trainer.mesh.rank == 0:
            with (folder / "losses.txt").open("a") as log:
                print(os.environ["TORCHELASTIC_RESTART_COUNT"], trainer.progress.steps, repr(loss), file=log)
        if trainer.progress.steps % 2 == 0:
            trainer.save(folder / "checkpoints", wait=trainer.progress.steps % 4 == 0, keep=2)
        if first_attempt:
            time.sleep(0.05)  # so that the victim dies before the end
    trainer.close()


def _die_later(seconds: float) -> None:
    """kill -9 of this process after so many seconds, wherever it is then."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds:.3f}; kill -9 {os.getpid()}"])


def outcome(layout: str, number: int, chance: random.Random, folder: Path, expected: list[float]) -> str:
    """What went wrong in one job; "" if it came to its end after one restart with the right losses."""
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--max-restarts", "1", "--master-port", str(_FIRST_PORT + number % 1000)]
    words += [
        "-m",
        "benchmarks.faults.restarts",
        "--rank-of",
        layout,
        str(folder),
        str(chance.randrange(2)),
        str(chance.uniform(0.0, 0.4)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    if ended.returncode:
        return f"torchrun ended with {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]}"
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    attempts = {int(attempt) for attempt, *_ in lines}
    if 1 not in attempts:
        return "nobody was killed in time"
    wrong = [
        (int(step), loss)
        for _, step, loss in lines
        if not math.isclose(float(loss), expected[int(step) - 1], rel_tol=JOB.tolerance)
    ]
    if wrong or int(lines[-1][1]) != STEPS:
        return f"loss of step {wrong[0][0]}: {wrong[0][1]}" if wrong else f"ended after step {lines[-1][1]}"
    return ""


def main() -> int:
    """Run them; 1 if one did not recover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-of", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        layout, folder, victim, moment = arguments.rank_of
        train(layout, Path(folder), int(victim), float(moment))
        return 0
    trainer = parallelize(JOB.model, JOB.plan("one"), runs.optimizer, loss=runs.loss, seed=runs.SEED)
    expected = [trainer.step(share).loss for share in trainer.loader(runs.samples(STEPS * runs.GLOBAL_BATCH))]
    chance, problems = random.Random(arguments.seed), []
    for number in range(arguments.times):
        with tempfile.TemporaryDirectory() as folder:
            layout = LAYOUTS[number % len(LAYOUTS)]
            problem = outcome(layout, number, chance, Path(folder), expected)
        print(f"{number + 1}/{arguments.times} {layout}: {problem or 'recovered'}", flush=True)
        problems += [f"{layout}: {problem}"] if problem else []
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.faults.restarts --times {arguments.times}`, {date}, torch {torch.__version__}",
        "",
        f"{arguments.times - len(problems)} of {arguments.times} jobs of two ranks under `torchrun --max-restarts 1` "
        f"({', '.join(LAYOUTS)}), of which one rank was killed with SIGKILL at a random moment, came to their end by "
        "themselves, all losses as undisturbed.",
        *(f"- {problem}" for problem in problems),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "restarts.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
