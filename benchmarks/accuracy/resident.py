"""Prints by how many bytes this process grows over a forward and backward of a small version in fp32.

python -m benchmarks.accuracy.resident MODEL SAMPLES
"""

import ctypes
import gc
import sys
from pathlib import Path

import torch

from . import cases, reality


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def main(source: Path, size: int) -> None:
    """Measure the second micro-batch of a step: gradients are there, and code has been loaded by a smaller one."""
    torch.set_num_threads(1)
    loaded = cases.small(source)
    module = reality.build(loaded, torch.float32)
    batch, smallest = (reality.batch_of(loaded, n, torch.float32) for n in (size, 1))
    with reality.as_on_gpu():
        reality.loss_of(loaded, module, smallest).backward()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        reality.loss_of(loaded, module, batch).backward()
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
