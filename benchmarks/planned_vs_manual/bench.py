"""Planned against manual set-ups: calibrates the emulated cluster, plans on that, and runs plans and set-ups."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planned_vs_manual.figures import Result, Row
from benchmarks.planned_vs_manual.hosts import Host, emulated
from benchmarks.planned_vs_manual.jobs import Job, Task, at_speed, run
from benchmarks.planned_vs_manual.models import REFERENCES, Case
from meshwright.executor.measuring.compare import compare, read_setups
from meshwright.planner.answers.search import price_setup
from meshwright.planner.cost.refit import MeasuredStep, refit
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, Device, HostGroup, load_device
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

DEVICE = Path(__file__).with_name("device.toml")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Topology:
    """Hosts, devices in each, the rate of a host's link in bytes per second, and how fast devices are declared to be,
    relative to the device file: the more ranks share this machine, the slower. shaped: whether links can be shaped
    here; if not, all devices are in one host."""

    hosts: int
    devices_per_host: int
    rate: float
    speed: float
    shaped: bool = True

    @property
    def name(self) -> str:
        """As in tables."""
        if not self.shaped:
            return f"1 host x {self.ranks}, links not shaped"
        return f"{self.hosts} hosts x {self.devices_per_host}, {self.rate / 1e6:.0f} MB/s"

    @property
    def folder(self) -> str:
        """As in file names."""
        return f"{self.hosts}x{self.devices_per_host}" if self.shaped else f"1x{self.ranks}_not_shaped"

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host


TOPOLOGIES = (Topology(2, 2, 25e6, 1.0), Topology(2, 4, 25e6, 0.3))

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

COMMUNICATION = (
    "link bandwidth",
    "link latency",
    "network bandwidth",
    "network latency",
    "replica overlap",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "p2p",
)
"""Constants that the reference steps are to tell; those of compute are declared."""

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
class Residual:
    """One step of a reference model: predicted before and after the fit, and measured, in seconds."""

    label: str
    before_s: float
    after_s: float
    measured_s: float
    work: float


@dataclass(frozen=True)
class Calibrated:
    """The device fitted to the emulated cluster, the factors of the fit, and what it was fitted to."""

    device: Device
    factors: dict[str, float]
    residuals: tuple[Residual, ...]


@contextmanager
def hosts_of(topology: Topology) -> Iterator[list[Host]]:
    """The hosts, if links can be shaped; else none: all ranks are on this host."""
    with emulated(topology.hosts, topology.rate) if topology.shaped else nullcontext([]) as hosts:
        yield hosts


def cluster_of(device: Device, topology: Topology) -> ClusterSpec:
    """The cluster as the planner sees it."""
    hosts, each = (topology.hosts, topology.devices_per_host) if topology.shaped else (1, topology.ranks)
    group = HostGroup(count=hosts, devices_per_host=each, device=device, link=device.link)
    return ClusterSpec(name=topology.name, hosts=(group,), network=device.network)


def declared_device(topology: Topology) -> Device:
    """The device whose speed layers are padded to, behind links of the topology."""
    device = at_speed(load_device(str(DEVICE)), topology.speed)
    network = device.network.model_copy(update={"bandwidth": topology.rate})
    return device.model_copy(update={"network": network})


def calibrate(topology: Topology, hosts: Sequence[Host], steps: int, say: Say) -> Calibrated:
    """Run the reference models under every set-up and fit the device to their steps."""
    device = declared_device(topology)
    cluster = cluster_of(device, topology)
    measured, works = [], []
    for case in REFERENCES:
        loaded, profile, training = job_of(case)
        plans: dict[str, Plan] = {}
        for text in REFERENCE_SETUPS:
            words = text.replace("N", str(topology.ranks))
            setup = parse_setup(words, topology.ranks, cluster.devices_per_host)
            candidate = price_setup(setup, profile, cluster, training)
            if candidate.plan is not None:
                plans[words] = candidate.plan
        say(f"{topology.name}: {case.name}, {len(plans)} set-ups")
        for words, job in run(plans, Task(loaded, profile, device, hosts), steps, say).items():
            if isinstance(job, Job):
                measured.append(MeasuredStep(f"{case.name}, {words}", plans[words], profile, job.step_s))
                works.append(job.work)
    found = refit(device, measured, COMMUNICATION)
    residuals = tuple(
        Residual(run.label, run.step_s * math.exp(before), run.step_s * math.exp(after), run.step_s, work)
        for run, before, after, work in zip(found.runs, found.before, found.after, works, strict=True)
    )
    return Calibrated(found.device, found.factors, residuals)


def compare_case(
    case: Case, topology: Topology, calibrated: Device, hosts: Sequence[Host], steps: int, say: Say
) -> Result:
    """The plan and every manual set-up of a model, priced by the calibrated device and run on the declared one."""
    loaded, profile, training = job_of(case)
    declared = declared_device(topology)
    cluster = cluster_of(calibrated.model_copy(update={"memory": case.memory}), topology)
    asked = read_setups([text.replace("N", str(topology.ranks)) for text in MANUAL], cluster)
    comparison = compare(profile, cluster, training, asked)
    plans = comparison.plans
    distinct = _distinct(plans)
    different = {label: plans[label] for label in dict.fromkeys(distinct.values())}
    say(f"{topology.name}: {case.name}, {len(different)} different plans of {len(comparison.candidates)} set-ups")
    jobs = run(different, Task(loaded, profile, declared, hosts), steps, say)
    rows = []
    for candidate in comparison.candidates:
        if candidate.plan is None or candidate.estimate is None:
            rows.append(Row(candidate.label, "", None, None, None, None, str(candidate.verdict), None))
            continue
        first = distinct[candidate.label]
        job, same = jobs[first], None if first == candidate.label else first
        layout = f"{shape_of(candidate.plan).label}, micro-batch {candidate.plan.micro_batch}"
        predicted_s = candidate.estimate.step_time_s
        if isinstance(job, str):
            rows.append(Row(candidate.label, layout, predicted_s, None, None, None, job, same))
        else:
            rows.append(Row(candidate.label, layout, predicted_s, job.step_s, job.spread, job.work, "", same))
    return Result(case.name, topology.name, tuple(rows))


def _distinct(plans: dict[str, Plan]) -> dict[str, str]:
    """Label -> first label with the same plan, which is run once."""
    seen: dict[str, str] = {}
    found = {}
    for label, plan in plans.items():
        key = plan.model_copy(update={"certificate": None, "prediction": None, "alternatives": ()}).model_dump_json()
        found[label] = seen.setdefault(key, label)
    return found


def job_of(case: Case) -> tuple[LoadedModel, ModelProfile, TrainingSpec]:
    """A model, its profile and its job."""
    loaded = case.loaded()
    profile = trace(loaded)
    training = TrainingSpec(global_batch=case.samples, seq_len=profile.seq_len, precision="fp32", memory_margin=0.0)
    return loaded, profile, training
