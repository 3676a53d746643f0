"""torchrun --max-restarts: a rank that is killed costs one restart, after which the run goes on from its checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
from meshwright.executor import parallelize
from support.tied_net import TiedNet, adamw, loss, plan_of, samples, tied_profile

folder, victim = sys.argv[1], int(sys.argv[2])


def tell(line):
    os.write(1, f"{line}\\n".encode())  # whole, whatever the other rank writes


trainer = parallelize(TiedNet, plan_of(tied_profile(), shard=2), adamw, loss=loss)
tell(f"from step {trainer.resume(folder, missing_ok=True)}")
for share in trainer.loader(samples):
    if trainer.progress.steps == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    if trainer.progress.steps == 8:
        break
    trainer.step(share)
    if trainer.progress.steps % 2 == 0:
        trainer.save(folder)
tell(f"done {trainer.progress.steps}")
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_one_restart(victim: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    port = 20000 + os.getpid() % 10000 + victim
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])

    ended = subprocess.run(
        [*launcher, "--master-port", str(port), str(script), str(tmp_path / "run"), str(victim)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )

    assert ended.returncode == 0, [line for line in ended.stderr.splitlines() if "Error" in line]
    assert ended.stdout.splitlines().count("from step 4") == 2
    assert ended.stdout.splitlines().count("done 8") == 2
