"""Hosts of an emulated cluster: network namespaces on one bridge, each behind a link of a declared rate."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SWITCH = "mwswitch"
_NAMESPACES = Path("/var/run/netns")
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""

_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""Of the namespace of the process that looks."""

_BURST = "24kb"
"""What a link lets pass at once before its rate counts: about a millisecond at the rates of an emulated network, so
that small messages, too, take the time that a real link would."""


@dataclass(frozen=True)
class Host:
    """A namespace with its address. Ranks of one host talk over its loopback, which has no limit."""

    name: str
    address: str
    interface: str

    def enter(self) -> None:
        """Move this process into the host, whose connections shall find their speed in a regular way: BBR, where it is
        the default, now and then goes slower to measure. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMESPACES / self.name).open() as handle:
            if libc.setns(handle.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.name}")
        _CONGESTION_CONTROL.write_text("reno")


def problem() -> str | None:
    """Why hosts cannot be emulated here, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no {missing[0]} (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


@contextmanager
def emulated(count: int, *bytes_per_s: float) -> Iterator[list[Host]]:
    """`count` hosts, each with a full-duplex link of that rate, or of its own where there are several: two hosts talk
    at the lower rate of both. Gone again at the end, whatever happens."""
    hosts = [Host(f"mwhost{i}", f"10.78.0.{i + 1}", f"mw{i}") for i in range(count)]
    _remove(hosts)
    try:
        _run("ip netns add", _SWITCH)
        _inside(_SWITCH, "ip link add br0 type bridge")
        _inside(_SWITCH, "ip link set br0 up")
        for i, host in enumerate(hosts):
            rate = f"rate {bytes_per_s[i % len(bytes_per_s)] * 8 / 1e6:.0f}mbit burst {_BURST} latency 100ms"
            port = f"{host.interface}s"
            _run("ip netns add", host.name)
            _run(f"ip link add {host.interface} netns {host.name} type veth peer name {port} netns {_SWITCH}")
            _inside(host.name, f"ip addr add {host.address}/24 dev {host.interface}")
            _inside(host.name, f"ip link set {host.interface} up")
            _inside(host.name, "ip link set lo up")
            _inside(_SWITCH, f"ip link set {port} master br0 up")
            _inside(host.name, f"tc qdisc add dev {host.interface} root tbf {rate}")
            _inside(_SWITCH, f"tc qdisc add dev {port} root tbf {rate}")
        yield hosts
    finally:
        _remove(hosts)


def _remove(hosts: list[Host]) -> None:
    for name in (*(host.name for host in hosts), _SWITCH):
        if (_NAMESPACES / name).exists():
            _run("ip netns del", name)


def _inside(name: str, command: str) -> None:
    _run(f"ip netns exec {name} {command}")


def _run(command: str, *more: str) -> None:
    subprocess.run([*command.split(), *more], check=True, capture_output=True, text=True)
