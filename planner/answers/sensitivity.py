"""How the step time of a fixed plan depends on each number of the cluster: where the plan is robust, and which layouts
would overtake it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...profiler.machine.cluster import ClusterSpec, Device, HostGroup, Link
from ...profiler.machine.units import format_flops_per_s, format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate, step_seconds
from ..plan.document import Plan
from .candidate import Candidate

_LATENCY = "latency of links"


@dataclass(frozen=True)
class Overtaking:
    """A layout that would be faster than the plan. factor: by which the number of the cluster is multiplied then."""

    label: str
    factor: float

    @property
    def change(self) -> str:
        """The change of the number in words: "-20%"."""
        return f"{self.factor - 1:+.0%}"

    def __str__(self) -> str:
        return f"{self.label} at {self.change}"


@dataclass(frozen=True)
class Shift:
    """Step time of a fixed plan if one number of the cluster is 20% lower or higher."""

    name: str
    value: str
    lower_s: float
    higher_s: float
    overtaken_by: Overtaking | None = None


def sensitivity(
    plan: Plan, found: Estimate, profile: ModelProfile, others: Sequence[Candidate] = ()
) -> tuple[Shift, ...]:
    """Step time of the plan with each number of its cluster 20% lower and higher, largest effect first, and which of
    the other layouts would then be faster by more than 1%."""
    cluster = plan.cluster
    rates = _numbers(cluster, plan.training.precision)
    rivals = [c for c in others if c.plan is not None and c.seconds < 1.25 * found.step_time_s]
    shifts = []
    for name, value in rates.items():
        seconds: list[float] = []
        overtaken: Overtaking | None = None
        for factor in (0.8, 1.2):
            machine = scaled(cluster, name, factor)
            seconds.append(repriced(plan, machine, profile))
            for rival in rivals:
                assert rival.plan is not None
                overtakes = (
                    rival.seconds >= found.step_time_s and repriced(rival.plan, machine, profile) < 0.99 * seconds[-1]
                )
                if overtakes and not overtaken:
                    overtaken = Overtaking(rival.label, factor)
        shifts.append(Shift(name, value, seconds[0], seconds[1], overtaken))
    return tuple(sorted(shifts, key=lambda shift: -abs(shift.lower_s - shift.higher_s)))


def _numbers(cluster: ClusterSpec, precision: str) -> dict[str, str]:
    """Name -> value with its unit, for each number of a cluster; "smallest to largest" if hosts differ."""

    def values(words: Callable[[float], str], each: Sequence[float]) -> str:
        return " to ".join(dict.fromkeys(words(value) for value in (min(each), max(each)))) if each else ""

    devices = [group.device for group in cluster.hosts]
    flops = [device.flops[precision] for device in devices]
    links = [group.link for group in cluster.hosts if group.devices_per_host > 1]
    networks = [group.network or cluster.network for group in cluster.hosts] if cluster.num_hosts > 1 else []
    found = {
        "compute": values(format_flops_per_s, flops),
        "device memory": values(lambda rate: f"{rate / 1e9:,.0f} GB/s", [device.bandwidth for device in devices]),
        "links in a host": values(lambda rate: f"{rate / 1e9:,.3g} GB/s", [link.bandwidth for link in links]),
        "network": values(lambda rate: f"{rate / 1e9:,.3g} GB/s per host", [link.bandwidth for link in networks]),
        _LATENCY: values(format_seconds, [link.latency for link in (*links, *networks)]),
    }
    return {name: value for name, value in found.items() if value}


def repriced(plan: Plan, cluster: ClusterSpec, profile: ModelProfile) -> float:
    """Seconds of a plan's step on another cluster with as many devices."""
    return step_seconds(plan.model_copy(update={"cluster": cluster}), profile)


def scaled(cluster: ClusterSpec, name: str, factor: float) -> ClusterSpec:
    """The cluster with one number multiplied by a factor, on every device or link."""

    def link(old: Link, changes: str) -> Link:
        if name == _LATENCY:
            return old.model_copy(update={"latency": old.latency * factor})
        return old.model_copy(update={"bandwidth": old.bandwidth * factor}) if name == changes else old

    def device(old: Device) -> Device:
        changes: dict[str, object] = {"link": link(old.link, "links in a host")}
        if name == "compute":
            changes["flops"] = {dtype: rate * factor for dtype, rate in old.flops.items()}
        if name == "device memory":
            changes["bandwidth"] = old.bandwidth * factor
        return old.model_copy(update=changes)

    def group(old: HostGroup) -> HostGroup:
        own = None if old.network is None else link(old.network, "network")
        changes = {"device": device(old.device), "link": link(old.link, "links in a host"), "network": own}
        return old.model_copy(update=changes)

    hosts = tuple(group(old) for old in cluster.hosts)
    return cluster.model_copy(update={"hosts": hosts, "network": link(cluster.network, "network")})
