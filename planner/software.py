"""Software: a training stack by a handful of constants, relative to what a device file says of the device."""

import math
import tomllib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..profiler.cluster import Device

REFERENCE = "fsdp2-eager"
"""What our executor runs, and what device files are made for."""

_FILE = Path(__file__).with_name("software.toml")

_MEMORY_KINDS = ("norm", "elementwise", "copy", "loss", "embedding", "other")
"""Kinds of operators that fusion speeds up: all that are neither matmul nor attention."""


class Software(BaseModel):
    """A training stack. Shares and factors are relative to the device file's numbers; seconds are the host's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str
    matmul: float = Field(default=1.0, gt=0, description="speed of matmuls")
    low_precision: float = Field(default=1.0, gt=0, description="speed of fp8 and fp4 matmuls, casts included")
    attention: float = Field(default=1.0, gt=0, description="speed of fused attention: its kernel's generation")
    fusion: float = Field(default=1.0, gt=0, description="share of the memory traffic of other kernels that is left")
    overlap: float | None = Field(
        default=None, ge=0, le=1, description="share of compute behind which gradients and gathers hide; None: device's"
    )
    tensor_overlap: float = Field(default=0.0, ge=0, le=1, description="share of tensor-parallel communication hidden")
    layer_s: float = Field(default=0.0, ge=0, description="seconds that the host adds to each pass of a layer")
    step_s: float = Field(default=0.0, ge=0, description="seconds that the host adds to each step")
    accumulates_in_matmul: bool = Field(default=False, description="new gradients are added by the matmul itself")
    source: str = Field(description="where the numbers come from")

    def on(self, device: Device, num_devices: int = 1) -> Device:
        """The device as this stack uses it, in a job of so many."""
        device = _waiting_for_stragglers(device, num_devices)
        changes: dict[str, object] = {}
        if self.matmul != 1.0:
            changes["matmul_efficiency"] = device.matmul_efficiency * self.matmul
            changes["low_precision_efficiency"] = device.low_precision_efficiency * self.matmul * self.low_precision
            changes["matmul_samples"] = {
                dtype: tuple((*sides, share * self.matmul) for *sides, share in samples)
                for dtype, samples in device.matmul_samples.items()
            }
        elif self.low_precision != 1.0:
            changes["low_precision_efficiency"] = device.low_precision_efficiency * self.low_precision
        if self.attention != 1.0:
            changes["attention_efficiency"] = device.attention_efficiency * self.attention
            if device.attention_backward_efficiency is not None:
                changes["attention_backward_efficiency"] = device.attention_backward_efficiency * self.attention
        if self.fusion != 1.0:
            shares = dict.fromkeys(_MEMORY_KINDS, device.bandwidth_efficiency) | device.kernel_efficiency
            changes["kernel_efficiency"] = {kernel: share / self.fusion for kernel, share in shares.items()}
        if self.overlap is not None:
            changes["overlap"] = self.overlap
        return device.model_copy(update=changes) if changes else device


STRAGGLING = 0.009
"""Share that a step loses for each doubling of the devices beyond one host. Pilot fit on published runs: 0.6-1.1%."""


def _waiting_for_stragglers(device: Device, num_devices: int) -> Device:
    doublings = math.log2(num_devices / device.devices_per_host) if num_devices > device.devices_per_host else 0.0
    if doublings == 0.0:
        return device
    speed = 1.0 / (1.0 + STRAGGLING * doublings)
    names = ("matmul_efficiency", "low_precision_efficiency", "attention_efficiency", "bandwidth_efficiency")
    return device.model_copy(update={name: getattr(device, name) * speed for name in names})


@cache
def all_software() -> dict[str, Software]:
    """Every stack by name."""
    tables = tomllib.loads(_FILE.read_text())
    return {name: Software(name=name, **table) for name, table in tables.items()}


def load_software(name_or_path: str) -> Software:
    """A stack of ours by name, or the one table of a TOML file. Raises ValueError that names those there are."""
    if name_or_path in all_software():
        return all_software()[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".toml" or not path.exists():
        raise ValueError(
            f"there is no software {name_or_path!r}; there are {', '.join(all_software())}, or give the path of a TOML"
        )
    try:
        ((name, table),) = tomllib.loads(path.read_text()).items()
        return Software(name=name, **table)
    except (tomllib.TOMLDecodeError, ValidationError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no table of one software: {str(error).splitlines()[0]}") from None
