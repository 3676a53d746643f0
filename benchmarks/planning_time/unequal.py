"""Stages on their own kind of device beside all devices as the slowest, on mixed clusters.

    python -m benchmarks.planning_time.unequal

Three step times by the cost model. "As the slowest": the best plan where every device is the worst of the cluster's.
"That plan really": the same plan on the devices that are there, kinds in the better order, where each of its stages
lies on one kind. "Own kind": the search over the real devices. Seconds of search are CPU seconds of one process.
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.planner.answers.search import InfeasibleError, SearchResult, search
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.unequal import kind_orders
from meshwright.profiler.machine.cluster import ClusterSpec, HostGroup, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

MODELS = Path(__file__).parent.parent / "models"
RESULT = Path(__file__).parent / "results" / "unequal.md"

TIME_LIMIT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A model on hosts of eight of two kinds: hosts of each, and the job's batch."""

    model: str
    kinds: tuple[str, str]
    hosts: int
    global_batch: int


CASES = (
    Case("llama3_8b", ("h100-80gb", "a100-80gb"), 1, 64),
    Case("llama3_8b", ("a100-80gb", "a100-40gb"), 1, 64),
    Case("llama3_8b", ("h100-80gb", "a100-40gb"), 1, 64),
    Case("gpt2_xl", ("h100-80gb", "a100-80gb"), 1, 64),
    Case("gpt2_xl", ("a100-80gb", "a100-40gb"), 1, 64),
    Case("llama3_70b", ("a100-80gb", "a100-40gb"), 2, 256),
    Case("llama3_70b", ("h100-80gb", "a100-80gb"), 4, 256),
    Case("llama3_70b", ("a100-80gb", "a100-40gb"), 4, 256),
)


@cache
def profile_of(model: str) -> ModelProfile:
    """The profile of a zoo model."""
    return trace(load_model(MODELS / model / "config.json"))


def cluster_of_kinds(case: Case) -> ClusterSpec:
    """Hosts of eight of each kind, behind the slower of their usual networks."""
    devices = [load_device(name) for name in case.kinds]
    hosts = tuple(HostGroup(count=case.hosts, devices_per_host=8, device=on, link=on.link) for on in devices)
    network = min((on.network for on in devices), key=lambda link: link.bandwidth)
    return ClusterSpec(name="mixed", hosts=hosts, network=network)


def as_the_slowest(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with as many hosts, each with the slowest device, the least memory and the slowest link of any."""
    worst, link = cluster.device, cluster.link
    hosts = tuple(group.model_copy(update={"device": worst, "link": link}) for group in cluster.hosts)
    return cluster.model_copy(update={"hosts": hosts})


def really_s(plan: Plan, cluster: ClusterSpec, profile: ModelProfile) -> float:
    """Seconds of a plan's step on the devices of a cluster, its kinds in the better order."""
    orders = (cluster.in_order(order) for order in kind_orders(cluster.kinds))
    found = [estimate(plan.model_copy(update={"cluster": on}), profile) for on in orders]
    return min(each.step_time_s for each in found if each.fits)


def layers_in_words(plan: Plan) -> str:
    """Layers of the stages on each kind of device: "a100-80gb 11, h100-80gb 23"."""
    held: dict[str, list[str]] = {}
    for position in range(plan.degrees.pipeline):
        name = plan.cluster.device_of(position * plan.stride("pipeline")).name
        held.setdefault(name, []).append("+".join(str(len(plan.stages[s].layers)) for s in plan.stages_of(position)))
    return ", ".join(f"{name} {' '.join(layers)}" for name, layers in held.items())


def searched(profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec) -> tuple[SearchResult, float]:
    """(what the search finds, its CPU seconds)."""
    start = time.process_time()
    return search(profile, cluster, training, time_limit_s=TIME_LIMIT_S), time.process_time() - start


def row(case: Case) -> str:
    """A line of the table."""
    profile, cluster = profile_of(case.model), cluster_of_kinds(case)
    training = TrainingSpec(global_batch=case.global_batch, seq_len=profile.seq_len)
    own, seconds = searched(profile, cluster, training)
    own_s, certificate = own.estimate.step_time_s, own.certificate
    try:
        plain, _ = searched(profile, as_the_slowest(cluster), training)
    except InfeasibleError:
        plainly, gain = ["-", "does not fit", "does not fit"], "fits"
    else:
        real_s = really_s(plain.plan, cluster, profile)
        plainly = [shape_of(plain.plan).label, f"{plain.estimate.step_time_s:.3f}", f"{real_s:.3f}"]
        gain = f"{real_s / own_s:.2f}x"
    cells = [
        f"{case.model}, batch {case.global_batch}",
        cluster.devices,
        *plainly,
        f"{shape_of(own.plan).label}: {layers_in_words(own.plan)}",
        f"{own_s:.3f}",
        gain,
        f"{certificate.status}, {certificate.shapes['total']:,} shapes",
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, and write it."""
    headings = (
        "model",
        "devices",
        "as the slowest",
        "s",
        "that plan, really, s",
        "own kind",
        "s",
        "gain",
        "proof",
        "CPU s",
    )
    lines = [
        "`python -m benchmarks.planning_time.unequal`",
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        lines.append(row(case))
        print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
