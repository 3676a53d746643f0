"""Telemetry of runs that never were."""

from pathlib import Path

from meshwright.executor.run_document import RunHeader, RunRestart, RunStep
from meshwright.planner.plan.document import Plan


def header_of(plan: Plan) -> RunHeader:
    """The first line of a run by a plan."""
    return RunHeader(
        model=plan.model.name,
        layout=plan.label,
        num_ranks=plan.degrees.num_devices,
        device="cpu",
        torch_version="2",
        tokens_per_step=1,
        memory_kind="resident",
        plan=plan,
    )


def write_lines(path: Path, *lines: RunHeader | RunRestart | RunStep) -> Path:
    """A run's file with these lines."""
    path.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return path
