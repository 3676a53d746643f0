"""Hugging Face's Trainer, Lightning and Accelerate with a plan's steps: the page of the documentation that shows it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.build import DOCS, blocks_of

PAGE = DOCS / "tutorials" / "frameworks.md"


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["pp=2 mb=2", "tp=2 mb=4"])
@pytest.mark.parametrize("framework", ["trainer", "lightning", "accelerate"])
def test_losses_are_those_of_the_framework_alone(framework: str, setup: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning" if framework == "lightning" else "accelerate")
    for block in blocks_of(PAGE.read_text()):
        if (name := block.option("file")) is not None:
            (tmp_path / name).write_text(block.content)

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("meshwright", "job.py", "--gpus", "2", "--device", "cpu", "--setup", setup, "-o", "plan.json", "-q")
    run("same", framework)
    said = run("torch.distributed.run", "--nproc-per-node", "2", "same.py", framework)

    assert re.search(rf"{framework}: \d+ steps, losses alike to 1e-6: True", said)


def test_each_loop_is_thin() -> None:
    sizes = {block.option("file"): block.content.count("\n") for block in blocks_of(PAGE.read_text())}

    assert max(size for name, size in sizes.items() if name is not None) < 200
