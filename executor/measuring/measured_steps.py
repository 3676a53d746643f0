"""Measured steps of one's own cluster, read from JSON Lines for `plan calibrate --from`. Needs no torch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import PositiveFloat, ValidationError

from ...planner.cost.refit import MeasuredStep
from ...planner.plan.document import Plan, load_plan
from ...profiler.document import Frozen, in_a_sentence, parsed
from ...profiler.model.model_profile import ModelProfile
from ..run_document import load_run
from .measurement import WARM_UP_STEPS, quantile

_EXAMPLE = '{"plan": "plan.json", "step_time_s": 1.23}'


class _Line(Frozen):
    """A line of the list: the file of a plan, and either the seconds of a step or the telemetry file of a run."""

    plan: Path
    step_time_s: PositiveFloat | None = None
    run: Path | None = None
    model: str | None = None


def load_measured_steps(path: Path, profile_of: Callable[[Plan, str], ModelProfile]) -> list[MeasuredStep]:
    """The measured steps in the list at `path`. A line has `plan` and `step_time_s`, or `plan` and `run` (parallelize's
    telemetry, of which the median step after the warm-up counts), and `model` if that is not where the plan says. Paths
    are relative to the list's folder.

    profile_of: returns the profile of (plan, model). Raises ValueError that names the line; also if the plans are for
    several devices.
    """
    if not path.is_file():
        raise ValueError(f"no such list of measured steps: {path}; each of its lines is like {_EXAMPLE}")
    steps = []
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error}); each of its lines is like {_EXAMPLE}") from None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{path} line {number}"
        try:
            line = _Line.model_validate(parsed(json.loads, text))
        except ValueError as error:
            found = in_a_sentence(error) if isinstance(error, ValidationError) else str(error)
            raise ValueError(f"{where} is not a measured step ({found}); it should be like {_EXAMPLE}") from None
        plan = load_plan(path.parent / line.plan)
        step_s = _step_s(line, path.parent, where)
        label = f"{plan.model.name}, {plan.label}"
        steps.append(MeasuredStep(label, plan, profile_of(plan, line.model or plan.model.source), step_s))
    if not steps:
        raise ValueError(f"{path} has no line; each should be like {_EXAMPLE}")
    devices = sorted({step.plan.cluster.device.name for step in steps})
    if len(devices) > 1:
        raise ValueError(
            f"{path} has plans for {', '.join(devices)}: one device is fitted at a time, so give each its own list"
        )
    return steps


def _step_s(line: _Line, folder: Path, where: str) -> float:
    if (line.step_time_s is None) == (line.run is None):
        raise ValueError(f"{where} needs either step_time_s or run, for example {_EXAMPLE}")
    if line.step_time_s is not None:
        return line.step_time_s
    assert line.run is not None
    _, steps = load_run(folder / line.run)
    timed = tuple(step.step_time_s for step in steps[WARM_UP_STEPS:])
    if not timed:
        raise ValueError(f"{where}: {line.run} has {len(steps)} steps; more than {WARM_UP_STEPS} are needed")
    return quantile(timed, 0.5)


def computed_s(plan: Plan, measured: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """[pipeline coordinate] -> seconds of a step that the slowest rank at this place computes, each rank by its median;
    () if a step does not tell, or a rank is said to compute nothing. measured: [step or lap][rank] -> seconds."""
    if not measured or any(len(found) != plan.degrees.num_devices for found in measured):
        return ()
    slowest = [0.0] * plan.degrees.pipeline
    for rank, seconds in enumerate(zip(*measured, strict=True)):
        position = plan.coordinates(rank)["pipeline"]
        slowest[position] = max(slowest[position], quantile(seconds, 0.5))
    return tuple(slowest) if min(slowest) > 0.0 else ()
