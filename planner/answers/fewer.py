"""Whether fewer GPUs would nearly do: where a step is mostly waiting, half of the GPUs take little longer."""

import time
from dataclasses import dataclass

from ...profiler.machine.cluster import made_by_flags
from ...profiler.machine.units import ALIKE, format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate
from ..plan.document import Plan
from ..plan.pins import Pins
from ..solve.explore import Explorer
from .fitting import grown
from .why_not import best_of

NEARLY = 1.25
"""Fewer GPUs are mentioned if their step is at most so many times that of all GPUs."""

SHARE = 0.05
"""Time for looking at fewer GPUs, as a share of the time that the search took."""

LEAST_S = 1.0
"""Least seconds for looking at fewer GPUs."""


_NEARLY_ALL = 0.99
"""Saved share of GPU time from which on the output says "over 99%", as no rounding should say 100%."""


@dataclass(frozen=True)
class Fewer:
    """The smallest number of GPUs, halved again and again, with which a step takes little longer. ratio: its step over
    that of all GPUs, less one. flags: options that ask for so many GPUs with the same global batch; empty if a file or
    an instance type gives the GPUs."""

    num_devices: int
    of: int
    layout: str
    step_time_s: float
    ratio: float
    flags: str = ""

    def __str__(self) -> str:
        does, slower = "would nearly do", f"{self.ratio:.1%} longer"
        if self.ratio < ALIKE:
            does, slower = "would do as well", "as long" if self.ratio > -ALIKE else f"{-self.ratio:.1%} less"
        cheaper = 1 - self.num_devices / self.of * (1 + self.ratio)
        saved = f"{cheaper:.0%}" if cheaper < _NEARLY_ALL else f"over {_NEARLY_ALL:.0%}"
        return (
            f"{self.num_devices:,} of the {self.of:,} GPUs {does}: {format_seconds(self.step_time_s)} a step, "
            f"{slower}, with {self.layout}, and {saved} less GPU time a sample"
            + (f" ({self.flags})" if self.flags else "")
        )


def fewer_gpus(plan: Plan, found: Estimate, profile: ModelProfile, pins: Pins) -> Fewer | None:
    """The smallest number of GPUs with a step at most a quarter longer; None if half of them take more, devices are
    unequal, or no plan was found in time.

    Nothing is searched if twice the plan's compute alone would take too long, because half the GPUs compute for twice
    as long.
    """
    count = plan.cluster.num_devices
    if count == 1 or len(plan.cluster.kinds) > 1 or 2 * found.breakdown["compute"] > NEARLY * found.step_time_s:
        return None
    searched_s = 0.0 if plan.certificate is None else plan.certificate.search_seconds
    deadline = time.monotonic() + max(LEAST_S, SHARE * searched_s)
    best = None
    while count % 2 == 0 and time.monotonic() < deadline:
        count //= 2
        explorer = Explorer(profile, grown(plan.cluster, count), plan.training, pins.framework)
        other = best_of(explorer, pins, deadline, NEARLY * found.step_time_s)
        if other is None or other[1].step_time_s > NEARLY * found.step_time_s:
            break
        step_s = other[1].step_time_s
        layout = other[0].label
        flags = f"--gpus {count} --global-batch {plan.training.global_batch}" if made_by_flags(plan.cluster) else ""
        best = Fewer(count, plan.cluster.num_devices, layout, step_s, step_s / found.step_time_s - 1, flags)
    return best
