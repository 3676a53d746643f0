"""What the host takes: constants of planner/cost/host_cost.py, fitted to ranks that were measured on one GPU.

    python -m benchmarks.one_gpu.host          # minutes, without a GPU

Every row of results/host.json.gz is one rank of a set-up, without peers: at full size, and with 32 tokens for a sample,
where kernels are next to nothing. Steps are priced by the planner's own formulas. The fit minimises the absolute
logarithm of predicted over measured, with a weak pull to where it began; each model is also predicted by the others.
"""

import gzip
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

from benchmarks.accuracy import cases
from benchmarks.one_gpu.prepared import loaded_model
from meshwright.planner.cost import compute_cost, host_cost
from meshwright.planner.cost.alone import kernels_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.profiler.machine.cluster import cluster_of
from meshwright.profiler.model.model_profile import ModelProfile

RESULTS = Path(__file__).with_name("results")
STARTS = {
    "dispatch": 40e-6,
    "SHARDED_UNIT": 50.0,
    "WHOLE_UNIT": 30.0,
    "AUTOCAST": 0.2,
    "EXCHANGE": 3.0,
    "CONTEXT_FORWARD": 30.0,
    "CONTEXT_BACKWARD": 20.0,
    "RECOMPUTED": 30.0,
    "PARAMETER": 1.0,
    "STEP": 100.0,
}
"""Where the fit begins: what a profile of a CPU's steps shows, in operators; seconds of one."""

_PULL = 0.2
"""Weight of the squared logarithm of a constant over where it began, beside the sum of all rows' errors."""

_STEPS = (0.4, 0.2, 0.1, 0.05)
"""Logarithmic steps by which one constant after the other is moved while that helps."""


@dataclass(frozen=True)
class Rank:
    """A rank that was measured. tokens: of a sample; None: the model's own length. plan: which of the file's."""

    model: str
    setup: str
    tokens: int | None
    plan: int
    rank: int
    stage: int
    step_s: float
    busy_s: float


@cache
def profile_of(model: str, tokens: int | None) -> ModelProfile:
    """The profile of a model of the zoo at a length."""
    return cases.profile_of(loaded_model(model, False), tokens)


def ratio(rank: Rank, constants: Mapping[str, float], plan: Plan) -> float:
    """Predicted over measured."""
    profile, device = profile_of(rank.model, rank.tokens), plan.cluster.device
    device = device.model_copy(update={"dispatch": constants["dispatch"]})
    plan = plan.model_copy(update={"cluster": cluster_of(device, plan.cluster.num_devices)})
    with ExitStack() as stack:
        for name, value in constants.items():
            if name != "dispatch":
                stack.enter_context(mock.patch.object(host_cost, name, value))
        stack.enter_context(mock.patch.object(compute_cost, "RECOMPUTED", constants["RECOMPUTED"]))
        return kernels_s(plan, profile, estimate(plan, profile), rank.stage) / rank.step_s


def fitted(ranks: Sequence[Rank], plans: Sequence[Plan]) -> dict[str, float]:
    """The constants that these rows say."""

    def cost(constants: Mapping[str, float]) -> float:
        errors = sum(abs(math.log(ratio(rank, constants, plans[rank.plan]))) for rank in ranks)
        return errors + _PULL * sum(math.log(constants[name] / start) ** 2 for name, start in STARTS.items())

    best, least = dict(STARTS), cost(STARTS)
    for step, name, sign in itertools.product(_STEPS, STARTS, (1.0, -1.0)):
        while (found := cost(moved := {**best, name: best[name] * math.exp(sign * step)})) < least:
            best, least = moved, found
    return best


def main() -> int:
    """Fit, and write what was found beside what was measured."""
    told = json.loads(gzip.decompress((RESULTS / "host.json.gz").read_bytes()))
    ranks, plans = [Rank(**row) for row in told["ranks"]], [Plan.model_validate(plan) for plan in told["plans"]]
    constants = fitted(ranks, plans)
    without = {"dispatch": 0.0, **{name: 0.0 for name in STARTS if name != "dispatch"}}
    left_out: dict[Rank, float] = {}
    for model in dict.fromkeys(rank.model for rank in ranks):
        by_others = fitted([rank for rank in ranks if rank.model != model], plans)
        left_out |= {rank: ratio(rank, by_others, plans[rank.plan]) for rank in ranks if rank.model == model}
    lines = [
        f"`python -m benchmarks.one_gpu.host`, ranks measured {told['where']}",
        "",
        "One rank of jobs of 8 GPUs, without peers. Device alone: what is predicted without the host; fitted: with it, "
        "by all rows; by others: by the rows of the other models. Predicted over measured.",
        "",
        "| constant | fitted |",
        "|---|---:|",
        f"| dispatch | {1e6 * constants['dispatch']:.1f} us |",
        *(f"| {name} | {value:.3g} operators |" for name, value in constants.items() if name != "dispatch"),
        "",
        "| rows | ranks | device alone: median, 90th percentile of the error | fitted | by others |",
        "|---|---:|---:|---:|---:|",
    ]
    alone = {rank: ratio(rank, without, plans[rank.plan]) for rank in ranks}
    inside = {rank: ratio(rank, constants, plans[rank.plan]) for rank in ranks}
    for name, some in (
        ("full size", [rank for rank in ranks if rank.tokens is None]),
        ("32 tokens a sample", [rank for rank in ranks if rank.tokens is not None]),
        *((model, [rank for rank in ranks if rank.model == model]) for model in dict.fromkeys(r.model for r in ranks)),
        ("all", ranks),
    ):
        cells = [_spread([found[rank] for rank in some]) for found in (alone, inside, left_out)]
        lines.append(f"| {name} | {len(some)} | {' | '.join(cells)} |")
    lines += ["", "| model | set-up | tokens | rank | step | busy | device alone | fitted | by others |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for rank in ranks:
        lines.append(
            f"| {rank.model} | {rank.setup} | {rank.tokens or 'all'} | {rank.rank} | {1e3 * rank.step_s:.1f} ms "
            f"| {rank.busy_s / rank.step_s:.0%} | {alone[rank]:.2f} | {inside[rank]:.2f} | {left_out[rank]:.2f} |"
        )
    (RESULTS / "host.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


def _spread(ratios: Sequence[float]) -> str:
    errors = [abs(each - 1.0) for each in ratios]
    return f"{median(errors):.0%}, {quantiles(errors, n=10, method='inclusive')[-1]:.0%}"


if __name__ == "__main__":
    raise SystemExit(main())
