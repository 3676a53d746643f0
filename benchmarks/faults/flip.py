"""Bytes flipped in checkpoints, and files cut off: each is found and named, and the run goes on from the one before.

    python -m benchmarks.faults.flip --times 500

Four ranks (two data, two tensor) save three checkpoints. Then, again and again, one random byte of a random file of the
last, or every fourth time its length, is changed, and one process resumes: it must be told the file and the checkpoint
before, and, once the damaged one is moved away, hold the very weights that this one was saved with. Writes the table.
"""

import argparse
import datetime
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from meshwright.executor import Trainer, parallelize
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.state.checkpoint_folder import complete_checkpoints
from meshwright.executor.state.checksums import DamagedError
from meshwright.planner.plan.document import Plan

from . import runs

RESULTS = Path(__file__).parent / "results"
JOB = runs.JOBS["gpt"]
LAYOUT = "tp x fsdp 4"


def save_three(plan: Plan, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of each checkpoint."""
    trainer = _trainer(plan)
    weights = []
    for _, share in zip(range(3), trainer.loader(runs.samples(3 * runs.GLOBAL_BATCH)), strict=False):
        trainer.step(share)
        trainer.save(folder)
        weights.append(trainer.full_state_dict())
    trainer.close()
    return weights


def damage(folder: Path, times: int, weights: list[dict[str, torch.Tensor]], seed: int = 0) -> tuple[Counter[str], str]:
    """(what was found how often, the first problem). weights: of each checkpoint of the run in `folder`."""
    chance = random.Random(seed)
    *_, last = complete_checkpoints(folder)
    files = sorted(last.iterdir())
    found: Counter[str] = Counter()
    for number in range(times):
        file = chance.choice(files)
        content = file.read_bytes()
        kind = "cut off" if number % 4 == 3 else "flipped"
        place = chance.randrange(len(content))
        if kind == "cut off":
            file.write_bytes(content[:place])
        else:
            changed = bytearray(content)
            changed[place] ^= chance.randrange(1, 256)
            file.write_bytes(changed)
        problem = _resumed_past(folder, last, file, weights)
        file.write_bytes(content)
        if problem:
            return found, f"{kind} at {place} of {file.name}: {problem}"
        found[f"{kind} in {'a file of boxes' if file.suffix == '.distcp' else file.name}"] += 1
    return found, ""


def _resumed_past(folder: Path, last: Path, file: Path, weights: list[dict[str, torch.Tensor]]) -> str:
    """What went wrong on the way from the damaged checkpoint to the one before; "" if nothing did."""
    trainer = _trainer(JOB.plan("one"))
    try:
        trainer.resume(folder)
        return "resumed without a word"
    except DamagedError as error:
        before = complete_checkpoints(folder)[-2]
        if not str(error).startswith(f"{file} ") or f"The last good checkpoint is {before}:" not in str(error):
            return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    aside = folder.parent / "aside"
    last.rename(aside)
    try:
        trainer = _trainer(JOB.plan("one"))
        if trainer.resume(folder) != len(weights) - 1:
            return "went on from another checkpoint"
        state = trainer.full_state_dict()
        differs = [name for name, tensor in weights[-2].items() if not torch.equal(state[name], tensor)]
        return f"{differs[0]} is not what was saved" if differs else ""
    finally:
        trainer.close()
        aside.rename(last)


def _trainer(plan: Plan) -> Trainer:
    return parallelize(JOB.model, plan, runs.optimizer, loss=runs.loss, seed=runs.SEED)


def main() -> int:
    """Run it; 1 if one was not found, not named, or not got past."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        plan = JOB.plan(LAYOUT)
        weights = run_local_ranks(save_three, plan.degrees.num_devices, plan, folder, timeout_s=300.0)[0]
        found, problem = damage(folder, arguments.times, weights, arguments.seed)
        shutil.rmtree(folder)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.faults.flip --times {arguments.times}`, {date}, torch {torch.__version__}",
        "",
        f"{found.total()} of {arguments.times} found and named by file, each with the last good checkpoint, from which "
        f"the run then went on with the weights that had been saved. {problem}".rstrip(),
        "",
        *(f"- {count} {what}" for what, count in sorted(found.items())),
    ]
    print(*lines, sep="\n")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "flip.md").write_text("\n".join(lines) + "\n")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
