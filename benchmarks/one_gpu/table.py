"""What ranks on one GPU did beside what was predicted of them."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.one_gpu.prepared import SAMPLES, TOKENS, Failure, Folder, profile_of
from benchmarks.one_gpu.rank import LIMITS, RankRun
from meshwright.planner.cost.alone import composed_step_s, kernels_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.profiler.model.model_profile import ModelProfile


@dataclass(frozen=True)
class Row:
    """One rank of one set-up of a model; None where the device does not say."""

    model: str
    setup: str
    layout: str
    rank: int
    stage: int
    measured_s: float
    busy_s: float | None
    predicted_s: float
    measured_bytes: int | None
    predicted_bytes: float
    reserved_bytes: int | None
    limit_bytes: float | None
    predicted_reserved_bytes: float
    composed_step_s: float | None
    predicted_step_s: float


def table_of(folder: Folder) -> tuple[list[Row], list[Failure]]:
    """Rows of all ranks that ran, and what did not."""
    rows: list[Row] = []
    failures = list(folder.without)
    for each in folder.prepared:
        runs = [run for _, run in folder.runs(each)]
        failures += [Failure(each.model, each.setup, run) for run in runs if isinstance(run, str)]
        ran = [run for run in runs if isinstance(run, RankRun)]
        rows += rows_of(each.model, each.setup, each.plan, profile_of(each.model, folder.small), ran)
    return rows, failures


def rows_of(name: str, setup: str, plan: Plan, profile: ModelProfile, runs: Sequence[RankRun]) -> list[Row]:
    """Measured beside predicted, for the ranks of one set-up that ran."""
    found = estimate(plan, profile)
    predicted = {run.stage: kernels_s(plan, profile, found, run.stage) for run in runs}
    ratios = {run.stage: run.step_s / predicted[run.stage] for run in runs}
    composed = composed_step_s(plan, profile, found, ratios) if ratios else None
    return [
        Row(
            model=name,
            setup=setup,
            layout=shape_of(plan).label,
            rank=run.rank,
            stage=run.stage,
            measured_s=run.step_s,
            busy_s=run.busy_s,
            predicted_s=predicted[run.stage],
            measured_bytes=run.peak_bytes,
            predicted_bytes=found.memory[run.stage].allocated_bytes,
            reserved_bytes=run.reserved_bytes,
            limit_bytes=run.limit_bytes,
            predicted_reserved_bytes=found.memory[run.stage].reserved_bytes,
            composed_step_s=composed,
            predicted_step_s=found.step_time_s,
        )
        for run in runs
    ]


def markdown(rows: Sequence[Row], failures: Sequence[Failure], where: str, num_gpus: int) -> str:
    """How far off predictions are, the table, then what did not run."""
    lines = [
        f"`python -m benchmarks.one_gpu`, {datetime.datetime.now(datetime.UTC).date().isoformat()}, {where}",
        "",
        f"One rank of jobs of {num_gpus} GPUs, {TOKENS:,} tokens (or {SAMPLES} samples) for each, with real kernels "
        "under a fake process group: collectives return at once. Kernels: a step of that rank, its waiting for the "
        "host included. Busy: the share of it in which a kernel ran. Memory: most that torch had allocated; reserved "
        "with all of the GPU to take; and the least limit (of "
        f"{', '.join(f'{times:g}' for times in LIMITS)} times what was allocated) under which a step still ran, beside "
        "what is predicted to be reserved. Composed: the predicted step with measured kernels in it.",
        "",
        *_errors(rows),
        "| model | set-up | layout | rank | kernels | predicted | ratio | busy | GiB allocated | predicted | ratio "
        "| reserved | least limit | predicted | ratio | composed step | predicted |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        known = row.measured_bytes
        cells = [
            *(row.model, row.setup, row.layout, str(row.rank)),
            *(_ms(row.measured_s), _ms(row.predicted_s), f"{row.predicted_s / row.measured_s:.2f}"),
            "-" if row.busy_s is None else f"{row.busy_s / row.measured_s:.0%}",
            *(_gib(known), _gib(row.predicted_bytes), _ratio(row.predicted_bytes, known)),
            *(_gib(row.reserved_bytes), _gib(row.limit_bytes), _gib(row.predicted_reserved_bytes)),
            _ratio(row.predicted_reserved_bytes, row.limit_bytes),
            *("-" if row.composed_step_s is None else _ms(row.composed_step_s), _ms(row.predicted_step_s)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {each.model}, {each.setup}: {each.reason}" for each in failures)]
    return "\n".join(lines).rstrip() + "\n"


def _errors(rows: Sequence[Row]) -> list[str]:
    """A line of each model and one of all: median and largest error of kernels and of allocated memory, and how many
    ranks ran within the memory that is predicted to be reserved."""
    if not rows or any(row.measured_bytes is None for row in rows):
        return []
    lines = ["| model | ranks | kernels: median, most | allocated | within its reserve |", "|---|---:|---:|---:|---:|"]
    for name in [*dict.fromkeys(row.model for row in rows), None]:
        of = [row for row in rows if name in (row.model, None)]
        kernels = _spread(row.predicted_s / row.measured_s for row in of)
        allocated = _spread(row.predicted_bytes / (row.measured_bytes or 1) for row in of)
        within = sum(row.limit_bytes is not None and row.limit_bytes <= row.predicted_reserved_bytes for row in of)
        lines.append(f"| {name or 'all'} | {len(of)} | {kernels} | {allocated} | {within} |")
    return [*lines, ""]


def _spread(ratios: Iterable[float]) -> str:
    errors = [abs(ratio - 1.0) for ratio in ratios]
    return f"{median(errors):.1%}, {max(errors):.1%}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _ratio(predicted: float, measured: float | None) -> str:
    return "-" if measured is None else f"{predicted / measured:.2f}"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"
