"""The file of a run: a header and one line of JSON per step. Needs no torch."""

import json
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from ..planner.plan.document import Plan
from ..profiler.document import Frozen, in_a_sentence, parsed

RUN_SCHEMA_VERSION = 1


class RunHeader(Frozen):
    """The line that a run, or what resumes it, begins with."""

    schema_version: Literal[1] = 1
    kind: Literal["meshwright-run"] = "meshwright-run"
    model: str
    layout: str
    num_ranks: PositiveInt
    device: str
    torch_version: str
    tokens_per_step: PositiveInt
    memory_kind: Literal["resident", "allocated"]
    plan: Plan | None = None
    """By which it runs, without what was weighed beside it; None in files of earlier versions."""


class AxisSeconds(Frozen):
    """How long communication of an axis was under way in a step, hidden behind computing or not."""

    mean: NonNegativeFloat
    max: NonNegativeFloat


class RunStep(Frozen):
    """One optimizer step. mfu: in the plan's convention, of the planned devices; None without a prediction."""

    step: NonNegativeInt
    loss: float
    grad_norm: float
    step_time_s: NonNegativeFloat
    between_s: NonNegativeFloat
    """Seconds from the step before to this one: data, checkpoints, evaluation."""
    tokens_per_s: NonNegativeFloat
    mfu: float | None
    peak_memory_bytes: tuple[int, ...]
    """[rank]; allocated: of this step; resident: of the process until now."""
    communication_s: dict[str, AxisSeconds]
    """Axis, or `all` for what goes over all ranks, to seconds over ranks."""
    rank_communication_s: tuple[NonNegativeFloat, ...] = ()
    """[rank] seconds in which communication was under way, summed over axes: who has least, the others wait for."""


def load_run(path: Path) -> tuple[RunHeader, list[RunStep]]:
    """(last header, all steps; of steps that were run again the last) of a run's file.

    A last line that a dying process left half-written is left out. Raises ValueError for files of another kind.
    """
    if not path.is_file():
        raise ValueError(f'no such run: {path}; parallelize(..., telemetry="{path.name}") writes it')
    header: RunHeader | None = None
    steps: dict[int, RunStep] = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            document = parsed(json.loads, line)
            if document.get("kind") == "meshwright-run":
                header = RunHeader.model_validate(document)
            else:
                found = RunStep.model_validate(document)
                steps = {step: known for step, known in steps.items() if step < found.step}
                steps[found.step] = found
        except ValueError as error:
            if number == len(lines):
                break
            what = in_a_sentence(error) if isinstance(error, ValidationError) else str(error)
            raise ValueError(
                f"{path} line {number} is not of a run that this version reads (schema {RUN_SCHEMA_VERSION}): {what}"
            ) from None
    if header is None:
        raise ValueError(f"{path} is not a run: its first line should say kind meshwright-run")
    return header, list(steps.values())
