"""ClusterSpec: hosts, devices and links, read from TOML; the link that any group of ranks talks over."""

import difflib
import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError

from ..document import Frozen, check_ends, parsed, rule_of
from .units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds

_Model = TypeVar("_Model", bound=BaseModel)

MOST_DEVICES = 10_000_000
"""Clusters with more devices are refused: a plan's tables number ranks one by one, and no real cluster comes near."""

LEAST_BANDWIDTH = 1e3
"""Least bytes per second of a link: a smaller number is one whose unit was left out."""

HARDWARE_FOLDER = Path(__file__).parent / "hardware"


def _link_rate(text: str | int | float) -> float:
    """Bytes per second of a link. Raises ValueError for a rate that no link can have."""
    rate = parse_bytes_per_s(text)
    if 0 < rate < LEAST_BANDWIDTH:
        raise ValueError(f'{rate:g} bytes per second are no link: give it with its unit, such as "50 GB/s"')
    return rate


_LinkRate = Annotated[float, BeforeValidator(_link_rate), Field(gt=0, le=1e16)]
_Size = Annotated[float, BeforeValidator(parse_bytes), Field(gt=0, le=1e16)]
_Overhead = Annotated[float, BeforeValidator(parse_bytes), Field(ge=0, le=1e16)]
_Rate = Annotated[float, BeforeValidator(parse_bytes_per_s), Field(gt=0, le=1e16)]
_Time = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, le=60)]
_Speed = Annotated[float, BeforeValidator(parse_flops_per_s), Field(gt=0, le=1e20)]
"""The upper limits here are a thousand times what any device has, or more: a number above them has the wrong unit."""

_Share = Annotated[float, Field(gt=0, le=1)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0, le=1e16)]
_Factor = Annotated[float, Field(gt=0, le=1e4)]
_Many = Annotated[int, Field(gt=0, le=1_000_000)]

MatmulSample = tuple[PositiveInt, PositiveInt, PositiveInt, _Share]
"""(rows, inner, columns of a product, share of the peak that it reached)."""


class Link(Frozen):
    """What moves bytes between devices or hosts, in one direction."""

    bandwidth: _LinkRate = Field(description="bytes per second that a large collective really gets, one direction")
    latency: _Time = Field(description="seconds per hop of a small message")


class Device(Frozen):
    """One accelerator (or CPU rank): what it computes, holds and is connected by. Every number has a source."""

    name: str
    memory: _Size = Field(description="bytes a process can allocate on it")
    context: _Overhead = Field(description="bytes outside the allocator: CUDA context, library workspaces")
    communicator: _Overhead = Field(default=0.0, description="bytes outside the allocator per process group")
    communicators: dict[str, _Overhead] = Field(
        default={}, description="the same by mesh axis, with what its collectives keep beside tensors, where measured"
    )
    fragmentation: float = Field(default=0.0, ge=0, le=10, description="reserved over allocated bytes, minus 1")
    flops: dict[str, _Speed] = Field(min_length=1, description="dense peak FLOP/s by dtype: bf16, fp32, ...")
    matmul_efficiency: float = Field(gt=0, le=1, description="share of peak that a large matmul reaches")
    low_precision_efficiency: float = Field(
        default=0.5, gt=0, le=1, description="the same of a large fp8 or fp4 matmul, casts of its operands included"
    )
    matmul_samples: dict[str, tuple[MatmulSample, ...]] = Field(
        default={},
        description="measured share of peak by dtype, at (rows, inner, columns); replaces efficiency and tile",
    )
    tile: tuple[PositiveInt, PositiveInt] = Field(default=(128, 256), description="rows, columns of one matmul tile")
    compute_units: _Many = Field(default=1, description="tiles computed at a time (streaming multiprocessors)")
    kernels: str = Field(
        default="",
        description="family of devices whose products and attention are priced by shape (planner/cost/kernels.toml) "
        "in place of the efficiencies; '': none is known",
    )
    sustained: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the speed of kernels measured alone that they keep in training: power and clocks",
    )
    product_speed: float = Field(
        default=1.0, gt=0, le=10, description="speed of products over that of the family's, beside `sustained`"
    )
    attention_speed: float = Field(
        default=1.0, gt=0, le=10, description="speed of attention over that of the family's kernels, beside `sustained`"
    )
    low_precision_speed: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="speed of fp8 and fp4 products over that of the family's, beside `sustained`",
    )
    casts: float = Field(default=1.0, gt=0, le=10, description="share of the bytes moved by casts to fp8 and fp4")
    attention_efficiency: float = Field(gt=0, le=1, description="share of peak that fused attention reaches")
    attention_backward_efficiency: float | None = Field(
        default=None, gt=0, le=1, description="the same of its backward, where it was measured"
    )
    bandwidth: _Rate = Field(description="bytes per second of device memory")
    bandwidth_efficiency: float = Field(default=1.0, gt=0, le=1)
    kernel_efficiency: dict[str, _Share] = Field(
        default={}, description="share of bandwidth by aten operator, optimizer or kind of operator, where measured"
    )
    size_efficiency: tuple[tuple[_Positive, _Share], ...] = Field(
        default=(), description="(bytes moved, speed of such large kernels over that of usual ones), where measured"
    )
    launch: _Time = Field(description="seconds that the smallest kernel takes")
    dispatch: _Time = Field(
        default=0.0,
        description="seconds that the host takes to issue one operator of a model in eager mode, with the views, casts "
        "and modules around it; 0 where the host itself computes",
    )
    overlap: float = Field(ge=0, le=1, description="share of compute time behind which communication can hide")
    replica_overlap: _Fraction | None = Field(
        default=None, description="the same for gradients of whole replicas (DDP without a pipeline), if it differs"
    )
    contention: float = Field(ge=0, le=1, description="share of hidden communication that compute still pays for")
    collective_factors: dict[str, _Factor] = Field(
        default={}, description="time over the ideal ring by collective: all_reduce, all_gather, reduce_scatter, p2p"
    )
    flat_rings: bool = Field(
        default=False,
        description="its collectives pass a tensor from rank to rank, hosts or not, so that (n - 1) / n of it crosses "
        "between hosts, as gloo's do; else (h - 1) / h of it: first inside each host, then between the h hosts",
    )
    devices_per_host: _Many = Field(description="usual number in one host")
    devices_per_machine: _Many | None = Field(
        default=None,
        description="where hosts are domains of fast links that span several machines, as the 18 trays of an NVL72 "
        "rack: devices of one of these, which launchers call a node; left out: a host is one",
    )
    link: Link = Field(description="between devices of one host, per device")
    network: Link = Field(description="between hosts, per host, usual for this platform")
    host_bandwidth: _Rate = Field(default=25e9, description="bytes per second to or from the host, one direction")
    host_memory_bandwidth: _Rate = Field(
        default=50e9, description="bytes per second of the host's memory, one device's share of it"
    )
    price_per_hour: float | None = Field(default=None, ge=0, le=1e6, description="US dollars, one device")
    sources: dict[str, str] = Field(description="field -> where its number comes from")

    @property
    def computes_bf16(self) -> bool:
        """Whether bf16 is at least as fast as fp32; CPUs without hardware for it emulate it."""
        return self.flops.get("bf16", 0.0) >= self.flops.get("fp32", 0.0)

    def communicator_of(self, axis: str) -> float:
        """Bytes outside of the allocator that the process group of a mesh axis takes."""
        return self.communicators.get(axis, self.communicator)


class HostGroup(Frozen):
    """Equal hosts."""

    count: PositiveInt
    devices_per_host: PositiveInt
    device: Device
    link: Link
    network: Link | None = Field(
        default=None, description="of one host to all others, where it differs from the cluster's"
    )
    first: NonNegativeInt | None = Field(
        default=None, description="number of its first host in the cluster file, where ranks go over hosts otherwise"
    )

    def is_like(self, other: "HostGroup") -> bool:
        """Whether its hosts are of the same kind as the other's: equal devices, links, networks and numbers of
        devices."""
        mine, theirs = (self.device, self.link, self.network), (other.device, other.link, other.network)
        return mine == theirs and self.devices_per_host == other.devices_per_host

    @property
    def devices_per_machine(self) -> int:
        """Devices of what launchers call a node, which is a host or one of its machines."""
        return math.gcd(self.devices_per_host, self.device.devices_per_machine or self.devices_per_host)


class Group(Frozen):
    """Where the ranks of a communication group sit, in the worst case among all groups of a mesh axis."""

    ranks_per_host: PositiveInt
    hosts: PositiveInt

    @property
    def size(self) -> int:
        """Upper bound of the ranks in the group; exact where hosts are evenly filled."""
        return self.ranks_per_host * self.hosts


class ClusterSpec(Frozen):
    """Hosts in rank order, and the network between them."""

    name: str
    hosts: tuple[HostGroup, ...] = Field(min_length=1)
    network: Link = Field(description="of a host whose group has none of its own")
    assumption: str | None = Field(default=None, description="what was assumed because the user did not say it")
    full_hosts: bool = Field(default=False, description="whether the user said how many devices there are in a host")

    @property
    def num_devices(self) -> int:
        """Devices over all hosts."""
        return sum(group.count * group.devices_per_host for group in self.hosts)

    @property
    def num_hosts(self) -> int:
        """Hosts over all groups."""
        return sum(group.count for group in self.hosts)

    @property
    def num_machines(self) -> int:
        """Machines over all hosts: the nodes that are launched."""
        return sum(group.count * group.devices_per_host // group.devices_per_machine for group in self.hosts)

    @property
    def devices_per_machine(self) -> int:
        """Devices of the smallest machine."""
        return min(group.devices_per_machine for group in self.hosts)

    @property
    def devices_per_host(self) -> int:
        """Devices of the smallest host: an axis within it is inside a host everywhere."""
        return min(group.devices_per_host for group in self.hosts)

    @property
    def device(self) -> Device:
        """The device that stands for all: of unequal ones that with the lowest peak (of equal peaks that which reaches
        the smallest share of it), with the least memory of any."""
        slowest = min(
            (group.device for group in self.hosts),
            key=lambda d: (max(d.flops.values()), d.matmul_efficiency * d.product_speed),
        )
        return slowest.model_copy(update={"memory": min(group.device.memory for group in self.hosts)})

    @property
    def devices(self) -> str:
        """Number of devices by name, for people: "8 x h100-80gb + 8 x a100-80gb"."""
        counts: dict[str, int] = {}
        for group in self.hosts:
            counts[group.device.name] = counts.get(group.device.name, 0) + group.count * group.devices_per_host
        return " + ".join(f"{count:,} x {name}" for name, count in counts.items())

    @property
    def price_per_hour(self) -> float | None:
        """US dollars per hour of a device, on average; None if the price of any device is not known."""
        prices = [(group.count * group.devices_per_host, group.device.price_per_hour) for group in self.hosts]
        known = [count * price for count, price in prices if price is not None]
        return sum(known) / self.num_devices if len(known) == len(prices) else None

    @property
    def link(self) -> Link:
        """The slowest link inside a host."""
        return min((group.link for group in self.hosts), key=lambda link: link.bandwidth)

    @property
    def between_hosts(self) -> Link:
        """The network between hosts, at the lowest rate and the longest latency of any host."""
        networks = [group.network or self.network for group in self.hosts]
        return Link(bandwidth=min(n.bandwidth for n in networks), latency=max(n.latency for n in networks))

    @property
    def kinds(self) -> tuple["ClusterSpec", ...]:
        """The hosts of each kind as a cluster of their own, in the order in which the kinds first appear."""
        groups: list[list[HostGroup]] = []
        for group in self._numbered():
            alike = next((found for found in groups if found[0].is_like(group)), None)
            if alike is None:
                groups.append([group])
            else:
                alike.append(group)
        if len(groups) == 1:
            return (self,)
        return tuple(self.model_copy(update={"hosts": tuple(found)}) for found in groups)

    @property
    def kind_names(self) -> tuple[str, ...]:
        """For each of `kinds` the name of its device; if several kinds have the same, also the first host: "cpu of host
        1"."""
        kinds = self.kinds
        names = [kind.hosts[0].device.name for kind in kinds]
        return tuple(
            name if names.count(name) == 1 else f"{name} of host {kind.hosts[0].first}"
            for name, kind in zip(names, kinds, strict=True)
        )

    def in_order(self, kinds: tuple[int, ...]) -> "ClusterSpec":
        """This cluster with its hosts by kind, so that ranks go over one kind after the other. kinds: numbers of the
        kinds in that order; () leaves the hosts as they are."""
        if not kinds:
            return self
        found = self.kinds
        hosts = tuple(group for kind in kinds for group in found[kind].hosts)
        return self if hosts == tuple(self._numbered()) else self.model_copy(update={"hosts": hosts})

    @property
    def first_hosts(self) -> tuple[int, ...]:
        """The number of the first host in each group of hosts; `ordered_by` takes these."""
        return tuple(group.first or 0 for group in self._numbered())

    def ordered_by(self, first_hosts: tuple[int, ...]) -> "ClusterSpec":
        """This cluster with its groups of hosts in another order. first_hosts: number of the first host in each group,
        in that order."""
        groups = dict(zip(self.first_hosts, self._numbered(), strict=True))
        return self.model_copy(update={"hosts": tuple(groups[first] for first in first_hosts)})

    def changed(self, devices: Mapping[int, Device], networks: Mapping[int, Link] | None = None) -> "ClusterSpec":
        """This cluster with other devices or networks in some hosts; ranks stay the same. devices, networks: number of
        a host -> its new device or network."""
        hosts: list[HostGroup] = []
        for group in self._numbered():

            def own_of(number: int, group: HostGroup = group) -> tuple[Device, Link | None]:
                return devices.get(number, group.device), (networks or {}).get(number, group.network)

            numbers = range(group.first or 0, (group.first or 0) + group.count)
            for (device, network), run in groupby(numbers, key=own_of):
                own = list(run)
                changes = {"count": len(own), "device": device, "network": network, "first": own[0]}
                hosts.append(group.model_copy(update=changes))
        return self.model_copy(update={"hosts": tuple(hosts)})

    def without(self, numbers: Collection[int]) -> "ClusterSpec":
        """This cluster without the hosts of these numbers; the others are numbered anew, in the same order. Raises
        ValueError if none is left."""
        hosts = []
        for group in sorted(self._numbered(), key=lambda group: group.first or 0):
            count = sum(group.first <= n < group.first + group.count for n in numbers)  # type: ignore[operator]
            if count < group.count:
                hosts.append(group.model_copy(update={"count": group.count - count, "first": None}))
        name = f"{self.name} without {len(numbers)} of its {self.num_hosts} hosts"
        if not hosts:
            raise ValueError(f"{name} has none left")
        return self.model_copy(update={"name": name, "hosts": tuple(hosts)})

    def _numbered(self) -> Iterator[HostGroup]:
        """The groups of hosts, each with the number of its first host."""
        host = 0
        for group in self.hosts:
            yield group if group.first is not None else group.model_copy(update={"first": host})
            host += group.count

    def host_of(self, rank: int) -> tuple[int, int]:
        """(number of its host in the cluster file, number of its device on that host) of a rank."""
        host = 0
        for group in self.hosts:
            in_group = group.count * group.devices_per_host
            if rank < in_group:
                first = host if group.first is None else group.first
                return first + rank // group.devices_per_host, rank % group.devices_per_host
            rank -= in_group
            host += group.count
        raise ValueError(f"rank {rank} lies outside the {self.num_devices} devices of {self.name}")

    def device_of(self, rank: int) -> Device:
        """The device a rank runs on."""
        for group in self.hosts:
            in_group = group.count * group.devices_per_host
            if rank < in_group:
                return group.device
            rank -= in_group
        raise ValueError(f"rank lies outside the {self.num_devices} devices of {self.name}")

    def group(self, size: int, stride: int) -> Group:
        """Where a group of `size` ranks, `stride` apart, sits in the worst case in the cluster."""
        return _worst_group(size, stride, self.devices_per_host, self.num_devices)


@cache
def _worst_group(size: int, stride: int, devices_per_host: int, num_devices: int) -> Group:
    if stride >= devices_per_host:
        return Group(ranks_per_host=1, hosts=size)
    span = size * stride
    repeat = math.lcm(span, devices_per_host)
    worst = (1, -size)
    for block in range(0, min(repeat, max(num_devices, span)), span):
        for first in range(block, block + stride):
            worst = max(worst, _spread(first, size, stride, devices_per_host))
    hosts, negative_ranks = worst
    return Group(ranks_per_host=-negative_ranks, hosts=hosts)


def _spread(first: int, size: int, stride: int, devices_per_host: int) -> tuple[int, int]:
    """(number of hosts that `size` ranks from `first` on are on, minus the most of them on one host). Only some hosts
    have to be looked at, for numbers of ranks repeat after `stride` hosts."""
    begins, ends = first // devices_per_host, (first + (size - 1) * stride) // devices_per_host

    def before(host: int) -> int:
        return min(size, max(0, -(-(host * devices_per_host - first) // stride)))

    hosts = (*range(begins, min(ends, begins + stride + 1)), ends)
    return ends - begins + 1, -max(before(host + 1) - before(host) for host in hosts)


def device_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(path.stem for path in HARDWARE_FOLDER.glob("*.toml"))


@cache
def load_device(name_or_path: str) -> Device:
    """A preset by name, or a device TOML by path. Raises ValueError that names the nearest presets."""
    path = HARDWARE_FOLDER / f"{name_or_path.lower()}.toml"
    if not path.exists():
        path = Path(name_or_path)
        if path.suffix == ".toml" and not path.exists():
            raise ValueError(f"no such device file: {path}; `plan devices` lists the presets, which go by their names")
        if path.suffix != ".toml":
            wanted, names = name_or_path.lower(), device_names()
            near = [name for name in names if wanted and name.startswith(wanted)]
            near = near or difflib.get_close_matches(wanted, names, n=3, cutoff=0.3)
            meant = f"did you mean {', '.join(near)}? " if near else ""
            raise ValueError(
                f"unknown device {name_or_path!r}: {meant}`plan devices` lists all; a path to a device TOML works too"
            )
    return _validated(Device, _read_toml(path), str(path))


def cluster_of(device: Device, num_devices: int, devices_per_host: int | None = None) -> ClusterSpec:
    """Equal, full hosts of one device.

    Without devices_per_host: the device's usual number, or the largest smaller one that fills every host.
    Raises ValueError when num_devices is no multiple of the devices_per_host asked for.
    """
    if num_devices < 1:
        raise ValueError(f"--gpus {num_devices}: give at least 1")
    _check_number(f"--gpus {num_devices}", num_devices)
    if devices_per_host is not None and devices_per_host < 1:
        raise ValueError(f"--gpus-per-node {devices_per_host}: give at least 1")
    per_host = min(devices_per_host or device.devices_per_host, num_devices)
    count, rest = divmod(num_devices, per_host)
    if rest:
        if devices_per_host is not None:
            raise ValueError(
                f"{num_devices} GPUs do not fill hosts of {per_host}: give a multiple of {per_host}, "
                "another --gpus-per-node, or a --cluster file"
            )
        per_host = max(size for size in range(1, per_host + 1) if num_devices % size == 0)
        count = num_devices // per_host
    hosts = HostGroup(count=count, devices_per_host=per_host, device=device, link=device.link)
    name, said = f"{num_devices} x {device.name}", devices_per_host is not None
    return ClusterSpec(name=name, hosts=(hosts,), network=device.network, full_hosts=said)


def made_by_flags(cluster: ClusterSpec) -> bool:
    """Whether --gpus, --device and --gpus-per-node describe the cluster completely: then `cluster_of` makes the same,
    with the same name. A cluster of a file or of an instance type has a name of its own."""
    first, *others = cluster.hosts
    if others:
        return False
    made = cluster_of(first.device, cluster.num_devices, first.devices_per_host)
    return (cluster.name, cluster.hosts, cluster.network) == (made.name, made.hosts, made.network)


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster TOML.

        [network]                    # optional: the slowest of the devices' usual networks
        bandwidth = "50 GB/s"        # per host, one direction
        latency = "10 us"

        [[hosts]]
        count = 2
        device = "h100-80gb"         # a preset, or the path of a device TOML
        gpus = 8                     # optional: the device's usual number
        link = { bandwidth = "265 GB/s", latency = "8 us" }   # optional
        network = { bandwidth = "25 GB/s", latency = "10 us" }   # optional: where it is not that of [network]

        [[hosts]]                    # hosts of another kind; a job's hosts are taken in this order
        device = "a100-40gb"

    Raises ValueError that says which key is wrong.
    """
    if not path.exists():
        raise ValueError(f"no such file: {path}. A cluster file holds [[hosts]] with count, device and gpus")
    data = _read_toml(path)
    unknown = set(data) - {"name", "network", "hosts"}
    if unknown or not isinstance(data.get("hosts"), list) or not data["hosts"]:
        found = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no [[hosts]]"
        raise ValueError(f"{path}: {found}; a cluster file holds name, [network] and [[hosts]] (count, device, gpus)")
    each = enumerate(data["hosts"], 1)
    hosts = [_host_group(entry, f"{path} [[hosts]] {number} of {len(data['hosts'])}") for number, entry in each]
    usual = min((group.device.network for group in hosts), key=lambda link: link.bandwidth)
    network = _network(data["network"], path) if "network" in data else usual
    name = str(data.get("name", path.stem))
    cluster = ClusterSpec(name=name, hosts=tuple(hosts), network=network, full_hosts=True)
    _check_number(str(path), cluster.num_devices)
    return cluster


def _check_number(where: str, num_devices: int) -> None:
    """Raises ValueError if there are more devices than a plan can have."""
    if num_devices > MOST_DEVICES:
        raise ValueError(f"{where}: {num_devices:,} devices; a plan is for at most {MOST_DEVICES:,}")


def _network(entry: object, path: Path) -> Link:
    """The network in a cluster file. Raises ValueError, also if its bandwidth is 0, so that hosts could not reach each
    other."""
    try:
        return _validated(Link, entry, f"{path} [network]")
    except ValueError as error:
        if "bandwidth: it should be above 0" not in str(error):
            raise
        raise ValueError(
            f"{error}: hosts could not reach each other; give what one host gets in large collectives, in one "
            'direction, such as bandwidth = "50 GB/s"'
        ) from None


def _host_group(entry: dict[str, Any], where: str) -> HostGroup:
    """A [[hosts]] entry. Raises ValueError that says which, and what is wrong with it."""
    unknown = set(entry) - {"count", "device", "gpus", "link", "network"}
    if unknown or "device" not in entry:
        found = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no device"
        raise ValueError(f"{where}: {found}; the keys are count, device, gpus, link, network")
    for key in ("count", "gpus"):
        if key in entry and (isinstance(entry[key], bool) or not isinstance(entry[key], int) or entry[key] < 1):
            raise ValueError(f"{where}: {key} = {entry[key]!r} is no number of at least 1")
    device = load_device(str(entry["device"]))
    fields = {
        "count": entry.get("count", 1),
        "devices_per_host": entry.get("gpus", device.devices_per_host),
        "device": device,
        "link": entry.get("link", device.link),
        "network": entry.get("network"),
    }
    return _validated(HostGroup, fields, where)


def _read_toml(path: Path) -> dict[str, Any]:
    check_ends(path)
    try:
        found: dict[str, Any] = parsed(tomllib.loads, path.read_text())
        return found
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _validated(model: type[_Model], data: object, where: str) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {key}: {rule_of(error, model)} (found {first['input']!r})") from None
