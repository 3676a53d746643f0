"""How far one process's numbers go when its inputs move by one ulp: what no comparison of plans can stay below.

    python -m benchmarks.execution.kinks resnet50

For small models as they are in the zoo, and as the matrix runs them: some without kinks. Half of the inputs, drawn at
random, are moved.
"""

import argparse
from collections.abc import Sequence

import torch

from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.measuring.one_process import one_process
from meshwright.executor.measuring.verify import VerifyReport, compared
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.loaded import Batch, LoadedModel

from .drawn import GLOBAL_BATCH, draw, small
from .matrix import NUM_STEPS

NUM_MOVES = 8

_TIMEOUT_S = 300.0


def spread(loaded: LoadedModel, plan: Plan) -> dict[str, float]:
    """Largest relative difference of each kind of numbers over all moves. plan: for its micro-batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]
    expected, *others = (
        run_local_ranks(one_process, 1, loaded, plan, moved, timeout_s=_TIMEOUT_S)[0]
        for moved in (batches, *([_moved(batch, seed) for batch in batches] for seed in range(NUM_MOVES)))
    )
    reports = [compared(VerifyReport("", (), {}), expected, other) for other in others]
    return {kind: max(report.largest[kind].relative for report in reports) for kind in reports[0].largest}


def _moved(batch: Batch, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def one(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        above = torch.nextafter(x, torch.full_like(x, torch.inf))
        return torch.where(torch.rand(x.shape, generator=generator) < 0.5, above, x)

    return tuple(one(x) for x in batch)


def _line(spreads: dict[str, float]) -> str:
    return ", ".join(f"{kind} {relative:.1e}" for kind, relative in spreads.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names of the zoo, whose batches are tuples of tensors")
    for model in parser.parse_args(arguments).models:
        plan = draw(model, 2, 1)[0].plan
        for what, kinked in {"in the zoo": True, "in the matrix": False}.items():
            print(f"{model} {what}: {_line(spread(small(model, kinked=kinked), plan))}", flush=True)


if __name__ == "__main__":
    main()
