"""The GPUs in this machine, by nvidia-smi (so without torch), and the presets for them."""

import re
import shutil
import subprocess

_PRESETS = (
    (re.compile(r"H200"), 0, "h200"),
    (re.compile(r"H100"), 0, "h100-80gb"),
    (re.compile(r"A100|A800"), 60_000, "a100-80gb"),
    (re.compile(r"A100|A800"), 0, "a100-40gb"),
    (re.compile(r"V100"), 30_000, "v100-32gb"),
    (re.compile(r"RTX 4090"), 0, "rtx-4090"),
    (re.compile(r"RTX 5090"), 0, "rtx-5090"),
    (re.compile(r"RTX PRO 6000"), 0, "rtx-pro-6000"),
    (re.compile(r"RTX 6000 Ada"), 0, "rtx-6000-ada"),
    (re.compile(r"L40S"), 0, "l40s"),
    (re.compile(r"A10G"), 0, "a10g"),
)
"""(pattern in a GPU's name, at least so many MiB, preset); the first that matches counts."""


def local_gpus() -> list[tuple[str, float]]:
    """(name, memory in MiB) of every NVIDIA GPU here; empty where there is none, or no driver that answers."""
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return []
    query = [executable, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = []
    for line in answer.stdout.splitlines() if answer.returncode == 0 else []:
        name, _, memory = line.rpartition(",")
        if memory.strip().isdecimal():
            gpus.append((name.strip(), float(memory)))
    return gpus


def preset_of(name: str, memory_mib: float) -> str | None:
    """The preset for a GPU that nvidia-smi calls `name`; None if there is none."""
    for pattern, least_mib, preset in _PRESETS:
        if pattern.search(name) and memory_mib >= least_mib:
            return preset
    return None
