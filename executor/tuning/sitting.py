"""One sitting of `plan tune`: what is checked before anything is launched, the jobs, the race, and what it leaves."""

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...planner.cost.bands import is_cpu
from ...planner.plan.document import Plan
from ...profiler.machine.cluster import ClusterSpec, cluster_of
from ...profiler.machine.local import local_gpus
from ..measuring.measurement import MAX_CPU_RANKS
from .cut_down import fewer_hosts
from .jobs import LaunchedTrack, read_launcher
from .record import Record, TuneHeader, load_record
from .rounds import LAP_S, start_s_of

PROBE_S = 180.0
"""Seconds until every rank has said what it sees: a scheduler may make a job wait."""

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Venue:
    """Where a race is run and kept. plan: its document, beside which the record, reports and logs lie. hosts: that
    candidates are cut down to; None: all. one_gpu: one rank of each stage of a candidate runs, without its peers."""

    plan: Path
    launcher: str | None = None
    resume: bool = False
    timeout_s: float | None = None
    hosts: int | None = None
    one_gpu: bool = False

    @property
    def record(self) -> Path:
        """The record of the race."""
        return self.plan.with_suffix(".tune.jsonl")

    @property
    def folder(self) -> Path:
        """Plans and output of the jobs."""
        return self.plan.with_suffix(".tune")


def read_budget(text: str) -> float:
    """Seconds of a budget: "90s", "10m", "1.5h", or a plain number of seconds. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip().lower())
    if found is None or float(found.group(1)) <= 0:
        raise ValueError(f"--budget {text}: give a time, as in 90s, 10m or 1h")
    return float(found.group(1)) * _UNITS[found.group(2) or ""]


def check_budget(budget_s: float, plan: Plan) -> None:
    """Raises ValueError where a budget is too short for one candidate."""
    step_s = 0.0 if plan.prediction is None else plan.prediction.step_time_s
    needed_s = start_s_of(step_s) + max(LAP_S, 2 * step_s)
    if budget_s < needed_s:
        raise ValueError(
            f"--budget {budget_s:g}s is too short for one candidate: its ranks take some {start_s_of(step_s):.0f} s to "
            f"start and warm up, and its steps {step_s:.2g} s each: give at least {math.ceil(needed_s)}s, better 10m"
        )


def check_here(cluster: ClusterSpec, launcher: str | None) -> None:
    """Raises ValueError where this machine is smaller than the cluster, and no launcher reaches another."""
    if launcher is not None:
        return
    ranks, name = cluster.num_devices, cluster.device.name
    if on_cpu(cluster):
        if ranks > MAX_CPU_RANKS:
            raise ValueError(
                f"{ranks} ranks on the CPU of this machine are more than {MAX_CPU_RANKS}, and would measure its "
                "scheduler: give fewer --gpus, or a --launcher that reaches more machines"
            )
        return
    here = len(local_gpus())
    if here == 0:
        raise ValueError(
            f"{ranks} x {name} are announced, and this machine has 0 GPUs: run this on one that has some, or give a "
            "--launcher that starts the ranks of the cluster, or --device cpu for processes here"
        )
    if here < ranks:
        raise ValueError(
            f"{ranks} x {name} are announced, and this machine has {here} GPU{'' if here == 1 else 's'}: give "
            f"--gpus {here}, a --launcher that starts the ranks of the cluster, or --device cpu for processes here"
        )


def on_cpu(cluster: ClusterSpec) -> bool:
    """Whether a cluster's ranks are CPU processes."""
    return is_cpu(cluster.device.name)


def memory_for_jobs(cluster: ClusterSpec) -> float:
    """Bytes of a device that jobs may have together, those that wait for their turn included: on the CPU half of what
    is free here, for ranks share it."""
    if not on_cpu(cluster):
        return cluster.device.memory
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free / 2 / cluster.num_devices


def open_record(place: Venue, header: TuneHeader) -> Record:
    """A new record, or the one that is gone on with. Raises ValueError where that is of another job."""
    if not place.resume:
        record = Record(place.record, header)
        record.begin()
        return record
    record = load_record(place.record)
    if record.header.job != header.job:
        raise ValueError(
            f"{place.record} is of another job: {_difference(record.header, header)}; give what it was begun with, or "
            "leave --resume out and choose another -o"
        )
    return record


def _difference(before: TuneHeader, now: TuneHeader) -> str:
    if before.fingerprint != now.fingerprint:
        return f"its model is {before.model} ({before.fingerprint[:12]}), this one {now.model} ({now.fingerprint[:12]})"
    if before.training != now.training:
        own, other = before.training.model_dump(), now.training.model_dump()
        name = next(name for name in own if own[name] != other[name])
        return f"its {name} is {own[name]}, this one {other[name]}"
    if before.hosts != now.hosts:
        return f"it ran {_ran_on(before.hosts)}, this one is to run {_ran_on(now.hosts)}"
    return f"its cluster is {before.cluster.devices} ({before.cluster.name}), this one {now.cluster.devices}"


def _ran_on(hosts: int | None) -> str:
    if hosts is None:
        return "on all hosts"
    return "on one GPU (--one-gpu)" if hosts == 0 else f"on {hosts} of them (--hosts {hosts})"


def track_of(place: Venue, cluster: ClusterSpec, model: str, budget_bytes: float) -> LaunchedTrack:
    """Jobs of a venue's launcher. budget_bytes: of a device, which jobs that wait share with the one that runs.

    Raises ValueError for a launcher that is none, and where the folder for its jobs cannot be made.
    """
    words = read_launcher(place.launcher, cluster.num_devices)
    try:
        place.folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"{place.folder} cannot be made: {error.strerror or error}; choose another -o") from None
    source = str(Path(model).resolve()) if Path(model).exists() else model
    return LaunchedTrack(
        words,
        source,
        place.folder,
        on_cpu=on_cpu(cluster),
        keeps=place.launcher is None,
        budget_bytes=budget_bytes,
        timeout_s=place.timeout_s,
    )


def check_cluster(found: Sequence[dict[str, Any]], cluster: ClusterSpec) -> list[str]:
    """Notes on what the ranks of a launcher see. Raises ValueError where they are not the cluster that was announced,
    or do not see the same files."""
    wanted, ranks = cluster.num_devices, len({each["rank"] for each in found})
    told = {each["ranks"] for each in found}
    if told == {1} and wanted > 1:
        raise ValueError(
            f"the launcher starts processes that know of no others (WORLD_SIZE is 1 or not set), and {wanted} ranks "
            "are announced: let it start torchrun, which numbers them"
        )
    if told != {wanted} or ranks != wanted:
        raise ValueError(
            f"the launcher starts {max(told)} ranks, {ranks} of which answered, and {wanted} are announced: give "
            f"--gpus {max(told)}, or let the launcher start {wanted}"
        )
    for what, words in (
        ("plan", "the plan's file"),
        ("model", "the model's file"),
        ("meshwright", "the code of meshwright"),
    ):
        seen: dict[str, int] = {}
        for each in sorted(found, key=lambda each: int(each["rank"])):
            seen.setdefault(each[what], each["rank"])
        if "" in seen:
            host = next(each["host"] for each in found if each["rank"] == seen[""])
            raise ValueError(
                f"rank {seen['']} on {host} does not see {words}: give -o and MODEL on a file system that all hosts "
                "share"
            )
        if len(seen) > 1:
            first, other = list(seen.values())[:2]
            raise ValueError(
                f"ranks {first} and {other} see different files for {words}: bring all hosts to the same version, or "
                "use a file system that they share"
            )
    hosts = len({each["host"] for each in found})
    if hosts < cluster.num_hosts:
        return [f"the ranks are on {hosts} host{'' if hosts == 1 else 's'}, the cluster has {cluster.num_hosts}"]
    return []


def header_of(
    model: str, fingerprint: str, plan: Plan, cluster: ClusterSpec, launcher: str | None, hosts: int | None = None
) -> TuneHeader:
    """What a record begins with. hosts: as the header says it."""
    return TuneHeader(
        model=model, fingerprint=fingerprint, cluster=cluster, training=plan.training, launcher=launcher, hosts=hosts
    )


def running_hosts(place: Venue, cluster: ClusterSpec) -> ClusterSpec:
    """The ranks that jobs are launched on: the cluster's, those of fewer hosts, or one. Raises ValueError."""
    if place.hosts is not None and place.one_gpu:
        raise ValueError("--hosts and --one-gpu go about it differently: give one of them")
    if place.hosts is not None:
        return fewer_hosts(cluster, place.hosts)
    if not place.one_gpu:
        return cluster
    if len(cluster.kinds) > 1:
        raise ValueError(
            f"--one-gpu: the job is for devices of {len(cluster.kinds)} kinds, and one of each would have to be seen; "
            "give a cluster of one kind"
        )
    return cluster_of(cluster.device, 1)


def forget(place: Venue) -> None:
    """Take away what a sitting that could not begin has made."""
    with suppress(OSError):
        place.record.unlink()
