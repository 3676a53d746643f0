"""Tuned against everything measured, on emulated clusters whose constants the planner is told wrong."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planned_vs_manual.bench import COMMUNICATION, DEVICE, MANUAL, job_of
from benchmarks.planned_vs_manual.hosts import Host, emulated
from benchmarks.planned_vs_manual.jobs import Job as Ran
from benchmarks.planned_vs_manual.jobs import Task, run
from benchmarks.planned_vs_manual.models import Case
from benchmarks.tuning.track import EmulatedTrack
from meshwright.executor.tuning.entrants import key_of, on_cluster, priced_layouts
from meshwright.executor.tuning.record import LapLine
from meshwright.executor.tuning.rounds import Job, Tuning
from meshwright.executor.tuning.sitting import Venue, header_of, open_record
from meshwright.planner.answers.guidance import NAMED_RULES
from meshwright.planner.answers.search import search
from meshwright.planner.cost.refit import turned
from meshwright.planner.plan.document import Plan
from meshwright.profiler.machine.cluster import ClusterSpec, Device, HostGroup, load_device

Say = Callable[[str], None]

WRONG = {
    "matmul": 1.25,
    "launch": 0.5,
    "memory traffic": 1.3,
    "link bandwidth": 1.5,
    "link latency": 0.25,
    "network bandwidth": 1.6,
    "network latency": 0.2,
}
"""What the planner is told, over what is declared: everything faster than it is, as presets are."""

KNOBS = (*COMMUNICATION, "matmul", "memory traffic", "optimizer", "launch")
"""Constants that the race may learn; attention is small in all models, and is left as it is."""

MOST_PLANS = 20


@dataclass(frozen=True)
class Cluster:
    """An emulated cluster: hosts x devices, the rate of each host's link, and of each host's devices the speed. The
    planner is told neither the rates nor the speeds where they differ."""

    name: str
    hosts: int
    devices_per_host: int
    rates: tuple[float, ...] = (25e6,)
    speeds: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host

    @contextmanager
    def up(self, shaped: bool) -> Iterator[list[Host]]:
        """Its hosts, if links can be shaped."""
        with emulated(self.hosts, *self.rates) if shaped else nullcontext([]) as hosts:
            yield hosts


CLUSTERS = (
    Cluster("2 hosts x 2", 2, 2),
    Cluster("2 hosts x 2, one host slower by a third", 2, 2, speeds=(1.0, 2 / 3)),
    Cluster("4 hosts x 1, links unequal", 4, 1, rates=(25e6, 25e6, 12.5e6, 12.5e6)),
    Cluster("1 host x 4", 1, 4),
)


def true_device() -> Device:
    """What layers are padded to."""
    device = load_device(str(DEVICE))
    return device.model_copy(update={"network": device.network.model_copy(update={"bandwidth": 25e6})})


def announced(cluster: Cluster, memory: int) -> ClusterSpec:
    """The cluster as the planner is told of it."""
    device = turned(true_device(), WRONG).model_copy(update={"memory": memory, "collective_factors": {}})
    group = HostGroup(count=cluster.hosts, devices_per_host=cluster.devices_per_host, device=device, link=device.link)
    return ClusterSpec(name=cluster.name, hosts=(group,), network=device.network)


def run_case(case: Case, cluster: Cluster, hosts: list[Host], budget_s: float, steps: int, say: Say) -> dict[str, Any]:
    """Tune a model, then measure everything: what was tuned, and the set-ups that people use."""
    loaded, profile, training = job_of(case)
    spec = announced(cluster, case.memory)
    chosen = search(profile, spec, training, time_limit_s=20.0)
    task = Task(loaded, profile, true_device(), hosts, cluster.speeds)
    with tempfile.TemporaryDirectory() as folder:
        record = open_record(
            Venue(Path(folder) / "plan.json"), header_of(case.name, profile.fingerprint, chosen.plan, spec, None)
        )
        job = Job(profile, spec, training, budget_s=budget_s, search_s=10.0, knobs=KNOBS)
        before = time.monotonic()
        tuned = Tuning(job, EmulatedTrack(task, cluster.ranks), record, say).run(chosen)
        took_s = time.monotonic() - before
    spent = [line for line in record.lines if isinstance(line, LapLine)]
    plans: dict[str, Plan] = {"tuned": tuned.plan, "predicted": chosen.plan}
    for each in tuned.standings:
        plans[each.label] = each.plan
    words = [text.replace("N", str(cluster.ranks)) for text in MANUAL if text not in NAMED_RULES]
    for text, plan in priced_layouts(words, profile, spec, training):
        plans[text] = plan
    truth, shared = _measured(plans, task, steps, say)
    true_s = {label: truth[shared[label]] for label in plans if shared[label] in truth}
    best = min(truth, key=lambda label: truth[label])
    tried = {shared[each.label] for each in tuned.standings if each.measured is not None}
    fitted = tuned.plan.cluster
    errors = {
        label: {
            "tried": label in tried,
            "before": on_cluster(plans[label], spec, profile)[1].step_time_s / seconds - 1,
            "after": on_cluster(plans[label], fitted, profile)[1].step_time_s / seconds - 1,
        }
        for label, seconds in truth.items()
    }
    return {
        "case": case.name,
        "cluster": cluster.name,
        "best": best,
        "best_s": truth[best],
        "tuned": tuned.label,
        "tuned_over_best": true_s["tuned"] / truth[best] if "tuned" in true_s else None,
        "predicted_over_best": true_s["predicted"] / truth[best] if "predicted" in true_s else None,
        "agreed": tuned.agreed,
        "reason": tuned.reason,
        "rounds": tuned.rounds,
        "tried": len(tried),
        "plans": len(truth),
        "tune_s": took_s,
        "tune_laps_s": sum(lap.started_s + sum(lap.steps_s) for lap in spent),
        "all_laps_s": _everything_s(truth, spent),
        "factors": tuned.factors,
        "errors": errors,
        "truth": truth,
        "raced": {each.label: each.measured.step_time_s for each in tuned.standings if each.measured is not None},
        "outcomes": {each.label: each.outcome for each in tuned.standings},
        "load": Path("/proc/loadavg").read_text().split()[0],
    }


def _everything_s(truth: Mapping[str, float], spent: list[LapLine]) -> float:
    """Seconds of measuring all plans as long as the race measured the one that it ran most: start and laps."""
    starts = sorted(lap.started_s for lap in spent if lap.started_s)
    start_s = starts[len(starts) // 2] if starts else 0.0
    by_label: dict[str, list[LapLine]] = {}
    for lap in spent:
        by_label.setdefault(lap.label, []).append(lap)
    most = max(by_label.values(), key=len, default=[])
    return sum(start_s + sum(len(lap.steps_s) for lap in most) * seconds for seconds in truth.values())


def _measured(plans: Mapping[str, Plan], task: Task, steps: int, say: Say) -> tuple[dict[str, float], dict[str, str]]:
    """(label -> median step of every different plan, all in turns; label -> the label whose plan is the same)."""
    first: dict[str, str] = {}
    shared = {label: first.setdefault(key_of(plan), label) for label, plan in plans.items()}
    different = {label: plans[label] for label in list(first.values())[:MOST_PLANS]}
    say(f"the truth: {len(different)} different plans, {steps} steps each, in turns")
    found = run(different, task, steps, say)
    return {label: job.step_s for label, job in found.items() if isinstance(job, Ran)}, shared
