"""The file of a run: a header and one line of JSON per step. Needs no torch."""

import json
from contextlib import suppress
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
    rank_compute_s: tuple[NonNegativeFloat, ...] = ()
    """[rank] seconds of the step in which the rank did not wait for communication; () where that is not known."""


class RunRestart(Frozen):
    """The line that a run writes when it has taken over a checkpoint: what beginning again has cost."""

    kind: Literal["meshwright-restart"] = "meshwright-restart"
    steps: NonNegativeInt
    """That the checkpoint has behind it."""
    num_ranks: PositiveInt
    start_s: NonNegativeFloat | None
    """Seconds from the beginning of the first rank's process until it read the checkpoint: imports, the meeting of
    ranks, the model; None where the system does not say."""
    load_s: NonNegativeFloat
    """Seconds until all ranks had read it."""
    loaded_bytes: NonNegativeInt
    """Of the checkpoint's files."""


def load_restarts(path: Path) -> list[RunRestart]:
    """What each restart of a run has cost, the last one last. Raises ValueError for files of another kind."""
    load_run(path)
    lines = [line for line in path.read_text().splitlines() if '"meshwright-restart"' in line]
    found = []
    for line in lines:
        with suppress(ValidationError):  # a half-written last line
            found.append(RunRestart.model_validate_json(line))
    return found


def load_run(path: Path, from_last_start: bool = False) -> tuple[RunHeader, list[RunStep]]:
    """(last header, all steps by its plan; of steps that were run again the last) of a run's file.

    Steps before a header that says something else, such as another plan after a restart, are left out.
    from_last_start: only the steps behind the last header.
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
                before, header = header, RunHeader.model_validate(document)
                steps = {} if from_last_start or header != before else steps
            elif document.get("kind") == "meshwright-restart":
                RunRestart.model_validate(document)
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
