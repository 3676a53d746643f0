"""Wall time, CPU time and memory of `plan` from the shell on three models, beside their targets; prints Markdown.

python -m benchmarks.planning_time
"""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True)
class Case:
    """One call of `plan`, and the wall seconds it may take."""

    name: str
    arguments: tuple[str, ...]
    target_s: float


CASES = (
    Case("GPT-2-sized model.py, 8 GPUs", (str(MODELS / "gpt.py"), "--gpus", "8"), 5.0),
    Case("Llama-3-8B config.json, 8 H100", (str(MODELS / "llama3_8b" / "config.json"), "--gpus", "8"), 8.0),
    Case(
        "Llama-3.1-405B, 16,384 H100",
        (
            str(MODELS / "llama31_405b" / "config.json"),
            *("--gpus", "16384", "--global-batch", "2048", "--seq-len", "8192"),
        ),
        20.0,
    ),
)


def run(case: Case) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, peak GiB) of one run of `plan` as a process of its own."""
    command = shutil.which("plan")
    if command is None:
        raise SystemExit("no `plan` on PATH: pip install -e . first")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        arguments = [command, *case.arguments, "--device", "h100-80gb", "-o", f"{folder}/plan.json"]
        start = time.monotonic()
        actions = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), stream) for stream in (1, 2)]
        environment = {**os.environ, "MESHWRIGHT_CACHE": "off"}  # what a first call takes
        process = os.posix_spawn(command, arguments, environment, file_actions=actions)
        _, status, usage = os.wait4(process, 0)
        wall_s = time.monotonic() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"failed: {' '.join(arguments)}")
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    """Best of three runs of every case."""
    print("| case | wall s | CPU s | peak GiB | target s |")
    print("|---|---|---|---|---|")
    for case in CASES:
        wall_s, cpu_s, peak_gib = min(run(case) for _ in range(3))
        print(f"| {case.name} | {wall_s:.1f} | {cpu_s:.1f} | {peak_gib:.2f} | {case.target_s:.0f} |")


if __name__ == "__main__":
    main()
