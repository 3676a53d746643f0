"""Measurement: what a plan's steps really took, as a document."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from ...profiler.document import Document

MAX_CPU_RANKS = 16
"""Most ranks on one CPU: with more, the operating system's scheduler would be measured."""

WARM_UP_STEPS = 2
"""First steps of a run, which are not timed: they allocate, connect ranks, and make optimizer state."""


class Measurement(Document):
    """Step times and memory of one plan on the devices of one machine."""

    made_by: ClassVar[str] = "compare(...) and measured(...).save({path})"

    schema_version: Literal[1] = 1
    kind: Literal["meshwright-measurement"] = "meshwright-measurement"
    label: str
    model: str
    layout: str = Field(description="the plan's shape in words")
    num_ranks: PositiveInt
    device: str = Field(description="what the ranks ran on, and over what they talked")
    torch_version: str
    steps_s: tuple[tuple[float, ...], ...] = Field(
        min_length=1, description="[repetition][step] seconds until the slowest rank had ended; without warm-up steps"
    )
    tokens_per_step: PositiveInt = Field(description="samples, for models without a sequence")
    peak_memory_bytes: tuple[int, ...] = Field(description="[rank] largest over the repetitions")
    memory_kind: Literal["resident", "allocated"] = Field(
        description="resident: of the whole process, libraries included (CPU); allocated: by torch on the GPU"
    )

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Seconds of all steps of all repetitions."""
        return tuple(seconds for repetition in self.steps_s for seconds in repetition)

    @property
    def step_time_s(self) -> float:
        """Median seconds of a step."""
        return quantile(self.step_times_s, 0.5)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles of the step time, relative to the median."""
        times = self.step_times_s
        return (quantile(times, 0.75) - quantile(times, 0.25)) / 2 / self.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens (or samples) of the global batch per median step."""
        return self.tokens_per_step / self.step_time_s


def quantile(values: tuple[float, ...], share: float) -> float:
    """The value that this share of the values lies below, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
