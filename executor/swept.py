"""The best plan at many points: every number of GPUs and length of a sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..profiler.machine.cluster import ClusterSpec
from ..profiler.machine.units import gpus_in_words
from .commands import inputs
from .commands.options import JobOptions, MachineOptions, PlanOptions, StackOptions
from .planning import Request, profiled
from .reporting import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.answers.sweep import LeftOut, Point
    from ..profiler.model.loaded import Loss, MakeBatch
    from .planning import Lora, Model
    from .reporting.sweep_report import Worth


@dataclass(frozen=True, repr=False)
class Swept:
    """The points of a sweep in order, questions that could not be asked with the reason, what must be said, and, where
    it was asked for, what more of each resource would be worth at each point."""

    points: "tuple[Point, ...]"
    left_out: "tuple[LeftOut, ...]" = ()
    notes: tuple[str, ...] = ()
    worth: "tuple[Worth, ...]" = ()

    def __iter__(self) -> "Iterator[Point]":
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> "Point":
        return self.points[index]

    @property
    def price_per_hour(self) -> float | None:
        """US dollars of one GPU, if anyone has said them."""
        return self.points[0].cluster.device.price_per_hour

    @property
    def document(self) -> "dict[str, Any]":
        """All of it as plain data, which `plan sweep --json` prints."""
        from .reporting.sweep_report import sweep_document

        return sweep_document(self.points, self.worth, self.notes, self.price_per_hour, self.left_out)

    def write(self, path: str | Path) -> Path:
        """Write it as the file's name says: .png, .html or .json. Raises ValueError where a picture would be empty."""
        from .reporting.sweep_report import check_target, write

        check_target(Path(path))
        write(Path(path), self.points, self.worth, self.document, self.price_per_hour)
        return Path(path)

    def show(self, console: "Console") -> None:
        """Print the tables, and what must be said of them."""
        from ..planner.answers.sweep import left_out_in_words
        from .reporting.sweep_report import print_sweep

        said = [*self.notes, *left_out_in_words(self.left_out)]
        print_sweep(console, self.points, self.worth, said, self.price_per_hour)

    def __str__(self) -> str:
        return terminal.as_text(self.show)

    __repr__ = __str__


def swept(
    model: "Model",
    machine: MachineOptions,
    lengths: Sequence[int | None],
    stack: StackOptions,
    choices: PlanOptions,
    *,
    global_batch: str | None,
    scale_batch: bool,
    prices: bool,
    time_limit_s: float,
    use_cache: bool,
    batch: "MakeBatch | None" = None,
    loss: "Loss | None" = None,
    lora: "Lora | None" = None,
    waiting: terminal.Waiting,
) -> Swept:
    """The best plan at every number of GPUs and length. What cannot be asked at a point ends the sweep only where it
    cannot be asked at any; where nothing fits, the point says so. prices: also what more of each resource is worth."""
    from ..planner.answers.sweep import LeftOut, marginal_prices, robustness
    from ..planner.answers.sweep import sweep as answered
    from .commands.sweep_grid import batches_of, machines_of
    from .reporting.sweep_report import Worth

    pins, stack = choices.pins(), choices.stack(stack)
    machines = machines_of(machine)
    counts = [each.num_devices for each in machines]
    left_out = [each for each in machines if isinstance(each, LeftOut)]
    jobs, errors = [], []
    notes: list[str] = []
    for length in lengths:
        try:
            job = JobOptions(seq_len=length)
            found, _ = profiled(Request(model, job, use_cache=use_cache, batch=batch, loss=loss, lora=lora), waiting)
        except ValueError as error:
            if type(error) is not ValueError:  # a mistake of ours, not of the point
                raise
            errors.append(error)
            left_out += [LeftOut(count, length, str(error)) for count in counts]
            continue
        batches, notes = batches_of(global_batch, counts, found.global_batch, scale_batch)
        for part, samples in zip(machines, batches, strict=True):
            if isinstance(part, ClusterSpec):
                jobs.append((found, part, inputs.read_training(found, part, samples, stack)[0]))
    if not jobs:
        raise errors[0]
    points = answered(jobs, pins, time_limit_s, waiting)
    worth = []
    for point in points if prices else ():
        waiting(f"pricing what more of each resource is worth on {gpus_in_words(point.num_devices)}")
        worth.append(Worth(marginal_prices(point, pins), robustness(point)))
    return Swept(points, tuple(left_out), tuple(notes), tuple(worth))
