"""How far the fit of plan tune gets where its model is right: constants are told wrong, steps are those that the model
itself makes by the true ones, with noise, and what is fitted to the plans of a first round is asked for all others.

    python -m benchmarks.tuning.synthetic              # seven models on two clusters: about five CPU minutes

What it leaves open is what a model that is right cannot tell: whether the model is.
"""

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planned_vs_manual.bench import job_of
from benchmarks.planned_vs_manual.models import CASES, Case
from benchmarks.tuning.bench import CLUSTERS, KNOBS, WRONG, Cluster, announced
from meshwright.executor.tuning.entrants import (
    Pool,
    could_be_best,
    on_cluster,
    priced_layouts,
    usual_layouts,
)
from meshwright.executor.tuning.fit import TURN_NOISE, teachers
from meshwright.planner.answers.search import search
from meshwright.planner.cost.alone import all_kernels_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.refit import MeasuredStep, refit, turned_hosts
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.model.model_profile import ModelProfile

TRUTH = {
    **{name: 1 / factor for name, factor in WRONG.items()},
    "all_reduce": 1.06,
    "all_gather": 1.4,
    "reduce_scatter": 1.5,
    "p2p": 3.7,
}
"""What is true, over what is told: what bench.py tells wrong, and collectives about as gloo has them there."""

LONG_S = 300.0
"""Seconds that searching and pricing may take, so that all of it is done on however slow a machine."""

TRIED = 5
"""Plans of the first round, beside those that teach."""


@dataclass(frozen=True)
class Field:
    """What could be run of a model on a cluster by the constants that are told, and what of it is tried."""

    name: str
    profile: ModelProfile
    told: ClusterSpec
    plans: Mapping[str, Plan]
    tried: Sequence[str]

    def true_s(self, label: str) -> float:
        """Seconds of a plan's step by the true constants."""
        return on_cluster(self.plans[label], turned_hosts(self.told, TRUTH), self.profile)[1].step_time_s

    def errors(self, factors: Mapping[str, float]) -> list[float]:
        """|predicted / true - 1| of the plans that are not tried, by the constants told times factors."""
        fitted = turned_hosts(self.told, factors)
        return [
            abs(on_cluster(plan, fitted, self.profile)[1].step_time_s / self.true_s(label) - 1)
            for label, plan in self.plans.items()
            if label not in self.tried
        ]


def field_of(case: Case, cluster: Cluster) -> Field:
    """The plans that plan tune would know of, and those of its first round."""
    _, profile, training = job_of(case)
    told = announced(cluster, case.memory)
    pool = Pool(profile, Pins())
    pool.add_result(search(profile, told, training, time_limit_s=LONG_S))
    for words, plan in priced_layouts(usual_layouts(told), profile, told, training, LONG_S):
        pool.add(plan, "usual layout", words)
    priced = pool.priced(told)
    first = could_be_best(priced)[:TRIED]
    tried = [each.label for each in (*first, *teachers(priced, first, told, profile, KNOBS))]
    return Field(f"{case.name}, {cluster.name}", profile, told, {each.label: each.plan for each in priced}, tried)


def fitted(field: Field, noise: float, with_compute: bool, seed: int = 0) -> dict[str, float]:
    """Factors on what is told, fitted to the tried plans: to their steps, and to what ranks compute of them. noise: of
    the logarithm of each."""
    draw, truth = random.Random(seed), turned_hosts(field.told, TRUTH)
    device = field.told.device.model_copy(update={"link": field.told.link, "network": field.told.network})
    runs = []
    for label in field.tried:
        moved, _ = on_cluster(field.plans[label], truth, field.profile)
        found = estimate(moved, field.profile)
        step_s = found.step_time_s * draw.lognormvariate(0.0, noise)
        model = CostModel(field.profile, moved.cluster, moved.training)
        computed = all_kernels_s(model, moved, found) if with_compute else ()
        compute_s = tuple(seconds * draw.lognormvariate(0.0, noise) for seconds in computed)
        runs.append(MeasuredStep(label, field.plans[label], field.profile, step_s, compute_s=compute_s))
    return refit(device, runs, KNOBS, noise=TURN_NOISE).factors


def main() -> int:
    """A row for every model, cluster, noise, and what is fitted to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="*", default=[0.01])
    given = parser.parse_args()
    print("| model, cluster | tried of plans | noise | told | fitted to steps | to steps and compute |")
    print("|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        for cluster in (CLUSTERS[0], CLUSTERS[3]):
            field = field_of(case, cluster)
            for noise in given.noise:
                errors = [field.errors({}), *(field.errors(fitted(field, noise, each)) for each in (False, True))]
                cells = (f"{statistics.median(each):.1%}, worst {max(each):.1%}" for each in errors)
                count = f"{len(field.tried)} of {len(field.plans)}"
                print(f"| {field.name} | {count} | {noise:.0%} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
