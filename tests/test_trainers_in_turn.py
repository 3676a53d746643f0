"""A process that has ended one trainer may begin another, of the same plan or of another, whatever launched it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.launched import launch
from meshwright.executor import parallelize
from meshwright.planner.plan.document import Plan
from support.tied_net import TiedNet, adamw, loss, plan_of, samples, tied_profile


def train_in_turn(file: Path, plans: list[Plan]) -> None:
    """Two steps of each plan; rank 0 adds the last loss to the file."""
    for plan in plans:
        trainer = parallelize(TiedNet, plan, adamw, loss=loss)
        shares = iter(trainer.loader(samples))
        metrics = [trainer.step(next(shares)) for _ in range(2)][-1]
        trainer.close()
        if trainer.mesh.rank == 0:
            with file.open("a") as stream:
                stream.write(f"{metrics.loss}\n")


def three_plans() -> list[Plan]:
    profile = tied_profile()
    return [plan_of(profile, shard=2), plan_of(profile, shard=2), plan_of(profile, tensor=2)]


def check(file: Path) -> None:
    first, same, other = map(float, file.read_text().split())
    assert first == same == pytest.approx(other, abs=1e-6)


@pytest.mark.slow
def test_ranks_with_their_addresses_in_the_environment(tmp_path: Path) -> None:
    endings = launch(train_in_turn, 2, tmp_path, tmp_path / "losses", three_plans(), timeout_s=120.0)

    assert [ending.exit_code for ending in endings] == [0, 0], endings[0].stderr
    check(tmp_path / "losses")


SCRIPT = """
import sys
from pathlib import Path
from test_trainers_in_turn import three_plans, train_in_turn

train_in_turn(Path(sys.argv[1]), three_plans())
"""


@pytest.mark.slow
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])

    ended = subprocess.run(
        [
            *f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2".split(),
            script,
            tmp_path / "losses",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )

    assert ended.returncode == 0, ended.stderr[-2000:]
    check(tmp_path / "losses")
