"""kill -9 of a random rank at a random moment, again and again: the run goes on from its last complete checkpoint.

    python -m benchmarks.faults.kill --times 100

Each time the run starts again, by another plan; all losses are those of a run that nobody disturbed. A third of the
kills are of a GPT, a third of a mixture of experts, a third of a GPT in bf16. Two of three fall into steps or saves,
the third into the resume; in every fourth round a second job tries the same folder before, which must be refused.
Adds to the table. --model: only of one of them; --again: begin the table anew.
"""

import argparse
import datetime
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from meshwright.executor import parallelize, watch
from meshwright.executor.state.checkpoint_folder import complete_checkpoints
from meshwright.planner.plan.document import Plan

from . import runs
from .launched import launch, start

PLANS = {
    "gpt": ("hsdp 4", "fsdp 2", "tp x fsdp 4", "pp 2", "one", "pp x ddp x tp 8", "hsdp 4", "ddp 2", "tp x fsdp 4"),
    "mixtral": ("pp x experts 4", "context 2", "context x experts 4", "zb-v 2", "tp x sp x experts 4", "interleaved 2"),
    "gpt in bf16": ("context x tp 4", "fsdp 2", "context x tp 4", "zb-v 2", "one"),
}
RESULTS = Path(__file__).parent / "results"
MOST_STEPS = 1000
END_S = 60.0
"""How long ranks may take to end once one was killed."""


@dataclass
class Outcome:
    """What happened in all rounds. problems: what should not have."""

    kills: int = 0
    in_checkpoint: int = 0
    in_resume: int = 0
    refused: int = 0
    of_ranks: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    slowest_end_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """One line."""
        ranks = ", ".join(f"{count} of {ranks}" for ranks, count in sorted(self.of_ranks.items()))
        return (
            f"{self.kills} kills ({ranks} ranks), {self.in_checkpoint} of them while a checkpoint was being written, "
            f"{self.in_resume} before the resume was done; {self.refused} second jobs refused; "
            f"{self.steps} steps; the others ended within {self.slowest_end_s:.1f} s; {len(self.problems)} problems"
        )


def train(job: runs.Job, plan: Plan, folder: Path, last: int) -> None:
    """Steps until `last`, after every second a checkpoint, by turns beside the next steps; appends to losses.txt."""
    trainer = parallelize(job.model, plan, runs.optimizer, loss=runs.loss, seed=runs.SEED)
    log = (folder / "losses.txt").open("a") if trainer.mesh.rank == 0 else None
    if log is not None:
        print("resuming", 0, file=log, flush=True)
    done = trainer.resume(folder / "checkpoints", missing_ok=True)
    if log is not None:
        print("resumed", done, file=log, flush=True)
    for share in trainer.loader(runs.samples(MOST_STEPS * runs.GLOBAL_BATCH)):
        if trainer.progress.steps >= last:
            break
        metrics = trainer.step(share)
        if log is not None:
            print("step", trainer.progress.steps, repr(metrics.loss), file=log, flush=True)
        if trainer.progress.steps % 2:
            continue
        wait = trainer.progress.steps % 4 == 0
        trainer.save(folder / "checkpoints", wait=wait, keep=3)
        if log is not None and wait:
            print("saved", trainer.progress.steps, file=log, flush=True)
    trainer.close()


def kill_again_and_again(model: str, times: int, folder: Path, seed: int = 0) -> Outcome:
    """Outcome of `times` kills, and of a last round that is left in peace."""
    job = runs.JOBS[model]
    outcome, chance = Outcome(), random.Random(seed)
    for number, name in enumerate(islice(cycle(PLANS[model]), times)):
        _round(job, job.plan(name), folder, chance, outcome, in_resume=number % 3 == 2, second=number % 4 == 1)
    lines = _lines(folder)
    last = max([int(line[1]) for line in lines if line[0] == "step"], default=0) + 2
    ranks = start(train, 1, folder, job, job.plan("one"), folder, last)
    ranks[0].join()
    if ranks[0].exitcode != 0:
        outcome.problems.append("the last round did not end well: " + (folder / "rank0.stderr").read_text()[-500:])
    _compare(job, folder, last, outcome)
    return outcome


def _second_job(job: runs.Job, plan: Plan, folder: Path, outcome: Outcome) -> None:
    """Another job on the folder of one that is running, which must be told so, and leave it alone."""
    apart = folder / "second"
    apart.mkdir(exist_ok=True)
    endings = launch(_resume, plan.degrees.num_devices, apart, job, plan, folder, timeout_s=END_S)
    told = [ending for ending in endings if "is in use by another job" in ending.stderr and ending.exit_code == 1]
    if len(told) == len(endings):
        outcome.refused += 1
    else:
        outcome.problems.append(f"a second job was not refused: {[ending.stderr[-300:] for ending in endings]}")


def _resume(job: runs.Job, plan: Plan, folder: Path) -> None:
    parallelize(job.model, plan, runs.optimizer, loss=runs.loss, seed=runs.SEED).resume(folder / "checkpoints")


def _round(
    job: runs.Job, plan: Plan, folder: Path, chance: random.Random, outcome: Outcome, in_resume: bool, second: bool
) -> None:
    before = len(_lines(folder))
    awaited = 1 if in_resume else 3
    ranks = start(train, plan.degrees.num_devices, folder, job, plan, folder, MOST_STEPS)
    try:
        begun = time.monotonic()
        while len(_lines(folder)) < before + awaited and time.monotonic() - begun < 60:
            if any(process.exitcode is not None for process in ranks):
                break
            time.sleep(0.005)
        if second and not in_resume:
            _second_job(job, plan, folder, outcome)
        time.sleep(chance.uniform(0.0, 0.05 if in_resume else 0.4))
        if any(process.exitcode is not None for process in ranks):
            texts = "\n".join((folder / f"rank{rank}.stderr").read_text()[-500:] for rank in range(len(ranks)))
            outcome.problems.append(f"ranks ended by themselves: {texts}")
            return
        victim = chance.randrange(len(ranks))
        assert ranks[victim].pid is not None
        os.kill(ranks[victim].pid, signal.SIGKILL)
        partial = list((folder / "checkpoints").glob(".partial-*"))
        complete = complete_checkpoints(folder / "checkpoints")
        outcome.kills += 1
        outcome.of_ranks[len(ranks)] += 1
        outcome.in_resume += all(line[0] != "resumed" for line in _lines(folder)[before:])
        outcome.in_checkpoint += bool(partial)
        ended = time.monotonic()
        for process in ranks:
            process.join(END_S)
        outcome.slowest_end_s = max(outcome.slowest_end_s, time.monotonic() - ended)
        codes = [process.exitcode for process in ranks]
        if None in codes or 0 in codes or codes[victim] != -signal.SIGKILL:
            outcome.problems.append(f"kill {outcome.kills}, rank {victim}: ranks ended with {codes}")
        if complete and not any(path.exists() for path in complete):
            outcome.problems.append(f"kill {outcome.kills}: {complete[-1].name} was complete and is gone")
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _lines(folder: Path) -> list[list[str]]:
    path = folder / "losses.txt"
    text = path.read_text() if path.exists() else ""
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _compare(job: runs.Job, folder: Path, last: int, outcome: Outcome) -> None:
    """Every loss, however often its step was run, beside those of one process; and where each round went on."""
    trainer = parallelize(job.model, job.plan("one"), runs.optimizer, loss=runs.loss, seed=runs.SEED)
    shares = trainer.loader(runs.samples(MOST_STEPS * runs.GLOBAL_BATCH))
    expected: dict[int, float] = {}
    for step, share in zip(range(1, last + 1), shares, strict=False):
        expected[step] = trainer.step(share).loss
    saved = 0
    for kind, number, *value in _lines(folder):
        step = int(number)
        if kind == "resumed" and step < saved:
            outcome.problems.append(f"went on from step {step}, though step {saved} had been saved")
        if kind == "saved":
            saved = step
        if kind == "step":
            outcome.steps += 1
            if not math.isclose(float(value[0]), expected[step], rel_tol=job.tolerance):
                outcome.problems.append(f"loss of step {step}: {value[0]}, undisturbed {expected[step]!r}")


def main() -> int:
    """Run it; 1 if there were problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--model", choices=[*runs.JOBS])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    watch.BEAT_S, watch.GRACE_S, watch.SILENT_S = 0.1, 0.5, 20.0  # ranks tell sooner that one is gone
    file = RESULTS / "kill.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() and not arguments.again else []
    failed = False
    for number, model in enumerate(runs.JOBS):
        if arguments.model not in (None, model):
            continue
        times = arguments.times if arguments.model else (arguments.times + number) // len(runs.JOBS)
        with tempfile.TemporaryDirectory() as folder:
            outcome = kill_again_and_again(model, times, Path(folder), arguments.seed)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        words = f"{model}, seed {arguments.seed}, {date}: {outcome.words}"
        rows.append({"kills": outcome.kills, "problems": outcome.problems, "words": words})
        print(words, *outcome.problems[:20], sep="\n", flush=True)
        failed |= bool(outcome.problems)
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")
    total, wrong = sum(row["kills"] for row in rows), sum(len(row["problems"]) for row in rows)
    head = f"`python -m benchmarks.faults.kill`, torch {torch.__version__}: {total} kills, {wrong} problems"
    plans = [f"{model}: {', '.join(dict.fromkeys(names))}" for model, names in PLANS.items()]
    body = [head, "", *(f"- {row['words']}" for row in rows), "", f"Plans by turns: {'; '.join(plans)}."]
    (RESULTS / "kill.md").write_text("\n".join(body) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
