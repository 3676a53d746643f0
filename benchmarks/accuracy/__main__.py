"""All checks of accuracy in one process, so that every model is profiled once; 1 if one misses its target.

python -m benchmarks.accuracy
"""

import sys

from . import cases, counts, flops, interpolation, memory, recompute, speed
from .report import publish


def main() -> int:
    """Run them and write their tables."""
    models, missing = cases.small_models()
    codes = [
        publish([counts.check(cases.whole_models())]),
        publish(flops.checks()),
        publish([*memory.checks(models, missing), memory.resident(models)]),
        publish([recompute.check(models, missing)]),
        publish([interpolation.check(models, missing)]),
        publish([speed.check(cases.sources())]),
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
