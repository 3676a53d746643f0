"""Planned against manual set-ups: calibrates the emulated cluster, plans on that, and runs plans and set-ups."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.planned_vs_manual.hosts import Host, emulated
from benchmarks.planned_vs_manual.jobs import Job, run
from benchmarks.planned_vs_manual.models import REFERENCES, Case
from meshwright.executor.measuring.compare import compare, read_setups
from meshwright.planner.plan import Plan
from meshwright.planner.refit import MeasuredStep, refit
from meshwright.planner.search import price_setup
from meshwright.planner.setups import parse_setup
from meshwright.planner.strategy import shape_of
from meshwright.planner.training import TrainingSpec
from meshwright.profiler.cluster import ClusterSpec, Device, HostGroup, load_device
from meshwright.profiler.load import LoadedModel
from meshwright.profiler.model_profile import ModelProfile
from meshwright.profiler.trace import trace

DEVICE = Path(__file__).with_name("device.toml")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Topology:
    """Hosts, devices in each, and the rate of a host's link in bytes per second."""

    hosts: int
    devices_per_host: int
    rate: float

    @property
    def name(self) -> str:
        """As in tables."""
        return f"{self.hosts} hosts x {self.devices_per_host}, {self.rate / 1e6:.0f} MB/s"

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host


TOPOLOGIES = (Topology(2, 2, 25e6), Topology(2, 4, 50e6))

REFERENCE_SETUPS = (
    "ddp",
    "fsdp",
    "hsdp:2",
    "zero=1",
    "zero=2 mb=4",
    "pp=2 schedule=1f1b mb=4",
    "pp=2 schedule=gpipe mb=8",
    "pp=2 schedule=zb-h1 mb=4",
    "pp=N schedule=1f1b mb=2",
    "pp=2 schedule=interleaved v=2 mb=4",
    "tp=2",
    "tp=2 pp=2 schedule=1f1b mb=4",
    "tp=2 fsdp",
)
"""What the reference models are run in. N: the number of devices."""

MANUAL = (
    "ddp",
    "fsdp",
    "hsdp:2",
    "zero=1",
    "zero=2",
    "fsdp recompute=full",
    "pp=2 schedule=1f1b",
    "pp=2 schedule=1f1b mb=2",
    "pp=N schedule=1f1b mb=2",
    "pp=2 schedule=1f1b fsdp",
    "pp=2 schedule=zb-h1",
    "tp=2",
    "tp=N",
    "tp=2 fsdp",
    "tp=2 pp=2 schedule=1f1b",
    "pp=2 schedule=interleaved v=2",
    "megatron",
    "torchtitan",
)
"""What people set up by hand; those that a model or its budget does not allow fall out, with the reason."""


@dataclass(frozen=True)
class Row:
    """One set-up of one model: predicted and measured seconds of a step; or why it was not run."""

    label: str
    layout: str
    predicted_s: float | None
    measured_s: float | None
    spread: float | None
    note: str

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Result:
    """All set-ups of one model on one topology, the plan first."""

    case: str
    topology: str
    rows: tuple[Row, ...]

    @property
    def run(self) -> list[Row]:
        """Rows that were run."""
        return [row for row in self.rows if row.measured_s is not None]

    @property
    def ratio(self) -> float:
        """Measured step of the plan over that of the best manual set-up."""
        planned, *manual = self.run
        assert planned.measured_s is not None
        return planned.measured_s / min(row.measured_s for row in manual if row.measured_s is not None)

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted against measured, over pairs whose measured times are more than 1% apart."""
        agree = total = 0
        for a, b in itertools.combinations(self.run, 2):
            measured, predicted = _ratio(a.measured_s, b.measured_s), _ratio(a.predicted_s, b.predicted_s)
            if abs(measured) > 0.01:
                total += 1
                agree += 1 if measured * predicted > 0 else -1
        return agree / total if total else None


def _ratio(a: float | None, b: float | None) -> float:
    assert a is not None
    assert b is not None
    return math.log(a / b)


@dataclass(frozen=True)
class Calibrated:
    """The device fitted to the emulated cluster, the factors of the fit, and its residuals by reference step."""

    device: Device
    factors: dict[str, float]
    residuals: dict[str, float]


@contextmanager
def hosts_of(topology: Topology, shaped: bool) -> Iterator[list[Host]]:
    """The hosts, if links can be shaped; else none: all ranks are on this host."""
    with emulated(topology.hosts, topology.rate) if shaped else nullcontext([]) as hosts:
        yield hosts


def cluster_of(device: Device, topology: Topology, shaped: bool = True) -> ClusterSpec:
    """The cluster as the planner sees it."""
    hosts, each = (topology.hosts, topology.devices_per_host) if shaped else (1, topology.ranks)
    group = HostGroup(count=hosts, devices_per_host=each, device=device, link=device.link)
    return ClusterSpec(name=topology.name, hosts=(group,), network=device.network)


def declared_device(topology: Topology) -> Device:
    """The device whose speed layers are padded to, behind links of the topology."""
    device = load_device(str(DEVICE))
    network = device.network.model_copy(update={"bandwidth": topology.rate})
    return device.model_copy(update={"network": network})


def calibrate(topology: Topology, hosts: Sequence[Host], steps: int, say: Say) -> Calibrated:
    """Run the reference models under every set-up and fit the device to their steps."""
    device = declared_device(topology)
    cluster = cluster_of(device, topology, bool(hosts))
    measured = []
    for case in REFERENCES:
        loaded, profile, training = _job(case)
        plans: dict[str, Plan] = {}
        for text in REFERENCE_SETUPS:
            words = text.replace("N", str(topology.ranks))
            setup = parse_setup(words, topology.ranks, topology.devices_per_host)
            candidate = price_setup(setup, profile, cluster, training)
            if candidate.plan is not None:
                plans[words] = candidate.plan
        say(f"{topology.name}: {case.name}, {len(plans)} set-ups")
        for words, job in run(plans, loaded, profile, device, hosts, steps).items():
            if isinstance(job, Job):
                measured.append(MeasuredStep(f"{case.name}, {words}", plans[words], profile, job.step_s))
            else:
                say(f"  {words}: {job}")
    found = refit(device, measured)
    residuals = {step.label: math.expm1(after) for step, after in zip(found.runs, found.after, strict=True)}
    return Calibrated(found.device, found.factors, residuals)


def compare_case(case: Case, topology: Topology, calibrated: Device, hosts: Sequence[Host], steps: int) -> Result:
    """The plan and every manual set-up of a model, priced by the calibrated device and run on the declared one."""
    loaded, profile, training = _job(case)
    declared = declared_device(topology)
    cluster = cluster_of(calibrated.model_copy(update={"memory": case.memory}), topology, bool(hosts))
    asked = read_setups([text.replace("N", str(topology.ranks)) for text in MANUAL], cluster)
    comparison = compare(profile, cluster, training, asked)
    plans = comparison.plans
    distinct = _distinct(plans)
    jobs = run(
        {label: plans[label] for label in dict.fromkeys(distinct.values())}, loaded, profile, declared, hosts, steps
    )
    rows = []
    for candidate in comparison.candidates:
        if candidate.plan is None or candidate.estimate is None:
            rows.append(Row(candidate.label, "", None, None, None, candidate.verdict))
            continue
        job = jobs[distinct[candidate.label]]
        layout = f"{shape_of(candidate.plan).label}, micro-batch {candidate.plan.micro_batch}"
        if isinstance(job, str):
            rows.append(Row(candidate.label, layout, candidate.estimate.step_time_s, None, None, job))
            continue
        same = distinct[candidate.label]
        note = "" if same == candidate.label else f"the same plan as {same}"
        rows.append(Row(candidate.label, layout, candidate.estimate.step_time_s, job.step_s, job.spread, note))
    return Result(case.name, topology.name, tuple(rows))


def _distinct(plans: dict[str, Plan]) -> dict[str, str]:
    """Label -> first label with the same plan, which is run once."""
    seen: dict[str, str] = {}
    found = {}
    for label, plan in plans.items():
        key = plan.model_copy(update={"certificate": None, "prediction": None}).model_dump_json()
        found[label] = seen.setdefault(key, label)
    return found


def _job(case: Case) -> tuple[LoadedModel, ModelProfile, TrainingSpec]:
    loaded = case.loaded()
    profile = trace(loaded)
    training = TrainingSpec(global_batch=case.samples, seq_len=profile.seq_len, precision="fp32", memory_margin=0.0)
    return loaded, profile, training


def figures(results: Sequence[Result]) -> dict[str, float]:
    """What issue and table name: ratios of planned to best manual, errors, tau, and how often the plan is best."""
    ratios = [result.ratio for result in results]
    errors = sorted(abs(row.error) for result in results for row in result.run if row.error is not None)
    taus = [tau for result in results if (tau := result.tau) is not None]
    return {
        "planned over best manual, median": statistics.median(ratios),
        "planned over best manual, worst": max(ratios),
        "plan is best or within 1%": sum(ratio <= 1.01 for ratio in ratios) / len(ratios),
        "predicted over measured, median error": statistics.median(errors),
        "predicted over measured, worst error": errors[-1],
        "Kendall tau, median": statistics.median(taus),
        "set-ups run": float(len(errors)),
    }


def as_json(
    results: Sequence[Result], calibrations: dict[str, Calibrated], shaped: bool, seconds: float
) -> dict[str, object]:
    """The whole outcome as a document."""
    return {
        "shaped_links": shaped,
        "taken": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "figures": figures(results),
        "calibration": {
            name: {"factors": found.factors, "residuals": found.residuals} for name, found in calibrations.items()
        },
        "results": [asdict(result) | {"ratio": result.ratio, "tau": result.tau} for result in results],
    }
