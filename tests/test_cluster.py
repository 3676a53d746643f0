"""Presets, clusters from flags and from TOML, and where the groups of a mesh axis sit."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshwright.planner.answers.sensitivity import scaled
from meshwright.planner.cost.refit import hosts_with, turned_hosts
from meshwright.profiler.document import rule_of
from meshwright.profiler.machine.cluster import (
    HARDWARE_FOLDER,
    ClusterSpec,
    Device,
    cluster_of,
    device_names,
    load_cluster,
    load_device,
)
from meshwright.profiler.machine.local import preset_of

PROMISED = {"v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "rtx-4090", "cpu"}
PROMISED |= {"mi300x", "mi325x", "mi355x", "l40s", "a10g", "rtx-5090", "rtx-pro-6000", "rtx-6000-ada"}


def test_the_promised_presets_are_there() -> None:
    assert set(device_names()) >= PROMISED


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    data = tomllib.loads((HARDWARE_FOLDER / f"{name}.toml").read_text())
    sources = data.pop("sources")
    numbers = set(data) - {"name", "link", "network"}
    numbers |= {f"{link}.{key}" for link in ("link", "network") for key in data[link]}

    assert set(sources) == numbers
    assert all(len(text) > 5 for text in sources.values())


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_preset_is_named_like_its_file_and_is_plausible(name: str) -> None:
    device = load_device(name)

    assert device.name == name
    assert {"bf16", "fp32"} <= set(device.flops)
    assert 1e8 < device.network.bandwidth <= device.devices_per_host * device.link.bandwidth * 1.4
    assert device.link.latency <= device.network.latency
    assert 2**31 < device.memory < 2**39


def test_dense_peaks_are_not_the_sparse_ones() -> None:
    assert load_device("h100-80gb").flops["bf16"] == pytest.approx(989.4e12)
    assert load_device("a100-80gb").flops["bf16"] == pytest.approx(312e12)


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'h100': did you mean .*h100-80gb"):
        load_device("h100")


def test_a_device_can_be_a_file_of_ones_own(tmp_path: Path) -> None:
    text = (HARDWARE_FOLDER / "a100-80gb.toml").read_text().replace('"79.15 GiB"', '"70 GiB"')
    (tmp_path / "mine.toml").write_text(text)

    assert load_device(str(tmp_path / "mine.toml")).memory == 70 * 2**30


def test_a_wrong_number_in_a_device_file_is_named(tmp_path: Path) -> None:
    text = (HARDWARE_FOLDER / "a100-80gb.toml").read_text().replace('"79.15 GiB"', '"lots"')
    (tmp_path / "mine.toml").write_text(text)

    with pytest.raises(ValueError, match=r"mine.toml: memory: .*cannot read 'lots'"):
        load_device(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("num_devices", "per_host", "expected"),
    [(8, None, (1, 8)), (16, None, (2, 8)), (6, None, (1, 6)), (12, None, (2, 6)), (8, 4, (2, 4)), (1, None, (1, 1))],
)
def test_equal_hosts_are_full(num_devices: int, per_host: int | None, expected: tuple[int, int]) -> None:
    cluster = cluster_of(load_device("h100-80gb"), num_devices, per_host)

    assert (cluster.num_hosts, cluster.devices_per_host) == expected
    assert cluster.num_devices == num_devices


@pytest.mark.parametrize(("num_devices", "per_host"), [(0, None), (-1, None), (8, 0), (8, 3)])
def test_impossible_counts_are_refused(num_devices: int, per_host: int | None) -> None:
    with pytest.raises(ValueError, match="give"):
        cluster_of(load_device("cpu"), num_devices, per_host)


CLUSTER = """
name = "two kinds"
[network]
bandwidth = "50 GB/s"
latency = "10 us"
[[hosts]]
count = 2
device = "h100-80gb"
gpus = 8
[[hosts]]
device = "a100-40gb"
gpus = 4
link = { bandwidth = "20 GB/s", latency = "9 us" }
"""


def cluster_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_cluster_file_gives_hosts_links_and_devices(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_file(tmp_path, CLUSTER))

    assert (cluster.name, cluster.num_devices, cluster.num_hosts, cluster.devices_per_host) == ("two kinds", 20, 3, 4)
    assert cluster.network.bandwidth == 50e9
    assert cluster.link.bandwidth == 20e9
    assert cluster.host_of(15) == (1, 7)
    assert cluster.host_of(16) == (2, 0)
    assert cluster.device_of(16).name == "a100-40gb"


def test_unequal_devices_count_as_the_slowest_with_the_least_memory(tmp_path: Path) -> None:
    device = load_cluster(cluster_file(tmp_path, CLUSTER)).device

    assert device.flops["bf16"] == pytest.approx(312e12)
    assert device.memory == load_device("a100-40gb").memory


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[network]", "[netwrok]", "unknown key 'netwrok'"),
        ('device = "h100-80gb"', 'device = "h100-80g"', "did you mean h100-80gb"),
        ("count = 2", "count = 0", r"\[\[hosts\]\] 1 of 2: count = 0 is no number of at least 1"),
        ("gpus = 4", "gpus = -4", r"\[\[hosts\]\] 2 of 2: gpus = -4 is no number of at least 1"),
        ("gpus = 4", "gpus = true", "gpus = True is no number"),
        ('"50 GB/s"', '"0 GB/s"', "found '0 GB/s'.*hosts could not reach each other.*50 GB/s"),
        ('"20 GB/s"', '"0 GB/s"', "2 of 2: link.bandwidth: it should be above 0 and at most 1e.16"),
        ("gpus = 8", "cards = 8", "unknown key 'cards'"),
        ('bandwidth = "50 GB/s"', 'bandwidth = "50 GB"', "cannot read '50 GB'"),
        ('bandwidth = "50 GB/s"', "bandwidth = 50", "50 bytes per second are no link: give it with its unit"),
        ("count = 2", "count = 9_000_000", "72,000,004 devices; a plan is for at most 10,000,000"),
        ("[[hosts]]", "hosts = ", "not TOML"),
    ],
)
def test_what_is_wrong_with_a_cluster_file_is_said(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_cluster(cluster_file(tmp_path, CLUSTER.replace(old, new)))


NUMBERS = {
    name: value
    for name, value in load_device("h100-80gb").model_dump().items()
    if isinstance(value, int | float) and not isinstance(value, bool)
} | {"attention_backward_efficiency": 0.5, "replica_overlap": 0.5, "price_per_hour": 1.0}


@pytest.mark.parametrize("beyond", [-1, 1e300, float("nan"), float("-inf")])
@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_each_number_of_a_device_out_of_its_range_is_refused_with_the_range(name: str, beyond: float) -> None:
    device = load_device("h100-80gb").model_dump()

    with pytest.raises(ValidationError) as found:
        Device.model_validate(device | {name: beyond})

    assert re.search(r"it should be (from|above) \S+ (to|and at most) \S+$", rule_of(found.value, Device))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("flops", {"bf16": -1.0}, "it should be above 0 and at most 1e+20"),
        ("collective_factors", {"all_reduce": 0.0}, "it should be above 0 and at most 10000"),
        ("kernel_efficiency", {"norm": 1.5}, "it should be above 0 and at most 1"),
        ("size_efficiency", ((1e6, 2.0),), "it should be above 0 and at most 1"),
        ("link", {"bandwidth": 1e11, "latency": -1e-6}, "it should be from 0 to 60"),
    ],
)
def test_numbers_within_tables_of_a_device_are_refused_with_the_range(name: str, value: object, rule: str) -> None:
    device = load_device("h100-80gb").model_dump()

    with pytest.raises(ValidationError) as found:
        Device.model_validate(device | {name: value})

    assert rule_of(found.value, Device) == rule


def test_without_a_network_it_is_the_slowest_of_the_usual_ones(tmp_path: Path) -> None:
    hosts = CLUSTER[CLUSTER.index("[[hosts]]") :]

    cluster = load_cluster(cluster_file(tmp_path, hosts))

    assert cluster.network == load_device("a100-40gb").network
    assert cluster.network.bandwidth < load_device("h100-80gb").network.bandwidth


def test_a_device_without_memory_is_refused(tmp_path: Path) -> None:
    text = (HARDWARE_FOLDER / "a100-80gb.toml").read_text().replace('"79.15 GiB"', '"-40 GiB"')
    (tmp_path / "mine.toml").write_text(text)

    with pytest.raises(
        ValueError, match=r"mine.toml: memory: it should be above 0 and at most 1e\+16 \(found '-40 GiB'\)"
    ):
        load_device(str(tmp_path / "mine.toml"))


def test_a_cluster_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_cluster(tmp_path / "none.toml")


def naive_worst_group(cluster: ClusterSpec, size: int, stride: int) -> tuple[int, int]:
    """(hosts, least of the largest ranks on a host) over every group of the cluster, by listing them."""
    worst = (1, -size)
    for rank in range(cluster.num_devices):
        if rank // stride % size == 0 and rank + (size - 1) * stride < cluster.num_devices:
            hosts = [cluster.host_of(rank + i * stride)[0] for i in range(size)]
            worst = max(worst, (len(set(hosts)), -max(hosts.count(h) for h in set(hosts))))
    return worst


@pytest.mark.parametrize(("num_devices", "per_host"), [(8, 8), (16, 8), (24, 6), (12, 4), (18, 3), (32, 4)])
def test_where_a_group_sits_equals_listing_all_groups(num_devices: int, per_host: int) -> None:
    cluster = cluster_of(load_device("cpu"), num_devices, per_host)

    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for size, stride in itertools.product(divisors, divisors):
        if size > 1 and num_devices % (size * stride) == 0:
            group = cluster.group(size, stride)
            assert (group.hosts, -group.ranks_per_host) == naive_worst_group(cluster, size, stride), (size, stride)


@pytest.mark.parametrize(
    ("name", "memory_mib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb"),
        ("Tesla V100-SXM2-32GB", 32768, "v100-32gb"),
        ("Tesla V100-SXM2-16GB", 16384, None),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA L4", 23034, None),
    ],
)
def test_names_of_nvidia_smi_match_presets(name: str, memory_mib: float, preset: str | None) -> None:
    assert preset_of(name, memory_mib) == preset


def test_hosts_behind_a_slower_link_are_of_a_kind_of_their_own(tmp_path: Path) -> None:
    hosts = CLUSTER.replace("a100-40gb", "h100-80gb")
    hosts += 'network = { bandwidth = "12.5 GB/s", latency = "30 us" }\n'

    cluster = load_cluster(cluster_file(tmp_path, hosts))

    fast, slow = cluster.kinds
    assert (cluster.network.bandwidth, cluster.between_hosts.bandwidth) == (50e9, 12.5e9)
    assert (fast.between_hosts.bandwidth, slow.between_hosts.bandwidth) == (50e9, 12.5e9)
    assert slow.between_hosts.latency == pytest.approx(30e-6)
    assert cluster.kind_names == ("h100-80gb of host 0", "h100-80gb of host 2")
    same = fast.changed({}, {1: slow.hosts[0].network})  # type: ignore[dict-item]
    assert [group.count for group in same.hosts] == [1, 1]
    assert fast.changed({}, {}).hosts == fast.changed({}).hosts


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ('{ bandwidth = "0 GB/s", latency = "1 us" }', "network.bandwidth: it should be above 0"),
        ('{ bandwidth = "25 GB/s" }', "network.latency: it is missing"),
        ('"25 GB/s"', "network: it should be a table of names and values"),
    ],
)
def test_a_network_of_hosts_that_is_none_is_refused_with_its_place(tmp_path: Path, network: str, message: str) -> None:
    hosts = f'[[hosts]]\ndevice = "h100-80gb"\nnetwork = {network}\n'

    with pytest.raises(ValueError, match=rf"\[\[hosts\]\] 1 of 1: {message}"):
        load_cluster(cluster_file(tmp_path, hosts))


def test_of_several_networks_the_lowest_rate_and_the_longest_latency_count() -> None:
    told = cluster_of(load_device("h100-80gb"), 16)
    near = told.network.model_copy(update={"bandwidth": told.network.bandwidth / 2, "latency": 0.0})

    between = told.changed({}, {1: near}).between_hosts

    assert between.bandwidth == near.bandwidth
    assert between.latency == told.network.latency > 0


def test_what_moves_networks_moves_those_of_hosts(tmp_path: Path) -> None:
    told = cluster_of(load_device("h100-80gb"), 16)
    slow = told.changed({}, {1: told.network.model_copy(update={"bandwidth": told.network.bandwidth / 2})})

    for moved in (scaled(slow, "network", 0.5), turned_hosts(slow, {"network bandwidth": 0.5})):
        assert moved.between_hosts.bandwidth == pytest.approx(slow.between_hosts.bandwidth / 2)
        assert moved.network.bandwidth == pytest.approx(slow.network.bandwidth / 2)
    alike = slow.kinds[1]
    assert hosts_with(alike, alike.device).between_hosts == alike.device.network
