"""From what is asked to the plan that a race on the real cluster chooses."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...planner.plan.document import Plan
from ...planner.plan.not_run import never_run, refusal
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..commands import inputs
from ..planning import Request, profiled, searched
from ..reporting import terminal
from ..reporting.documents import json_kind

if TYPE_CHECKING:
    from ...planner.plan.training import TrainingSpec
    from ...profiler.model.loaded import LoadedModel
    from .cut_down import ProfileWithout
    from .outcome import Tuned
    from .record import Record
    from .sitting import Venue


def tuned(
    request: Request, setups: Sequence[str], budget_s: float, place: "Venue", waiting: terminal.Waiting
) -> "tuple[Tuned, Record, list[str]]":
    """Candidates raced on the real cluster until no other plan is predicted to come near the best measured one, or the
    budget is spent; (the outcome, the record of it, notes). What is wrong is said before anything is launched.

    setups: layouts that take part whatever their prediction. place: where the plan, the record and the jobs are.
    """
    from .rounds import Job, Tuning
    from .sitting import (
        PROBE_S,
        check_budget,
        check_cluster,
        check_here,
        forget,
        header_of,
        memory_for_jobs,
        open_record,
        running_hosts,
        track_of,
    )
    from .small import SmallTuning, first_that_can

    if not isinstance(request.model, str | Path):
        raise ValueError("plan tune starts the ranks of the model's file: give its path")
    machine = request.cluster or inputs.read_cluster(request.job.machine)
    pins = request.choices.pins()
    running = running_hosts(place, machine)
    check_here(running, place.launcher)
    is_profile = json_kind(Path(request.model)) == "meshwright-profile"
    profile, loaded = profiled(request, waiting, needs_model=place.hosts is not None and not is_profile)
    if is_profile:
        raise ValueError(f"plan tune runs the model, and {request.model} is only its profile: give the model itself")
    stack = request.choices.stack(request.job.stack)
    training, notes = inputs.read_training(profile, machine, request.job.global_batch, stack)
    given, unfit = _given(setups, profile, machine, training)
    result = searched(profile, machine, training, pins, request.time_limit_s, waiting)
    if priced_only := never_run(result.plan):
        raise ValueError(f"plan tune runs what it measures: {refusal(result.plan, priced_only)}")
    profile_without = _profiles_without(loaded, waiting)
    first = result.plan
    if place.hosts is not None:
        first = first_that_can(result, pins, given, profile, running, profile_without).plan
    check_budget(budget_s, first)
    track = track_of(place, running, str(request.model), memory_for_jobs(running))
    hosts = 0 if place.one_gpu else place.hosts
    header = header_of(result.plan.model.name, profile.fingerprint, result.plan, machine, place.launcher, hosts)
    record = open_record(place, header)
    if place.launcher is not None:
        waiting("asking every rank what it sees")
        try:
            notes += check_cluster(track.probe(first, min(budget_s, PROBE_S)), running)
        except BaseException:
            if not place.resume:
                forget(place)
            raise
    if not place.resume:
        result.plan.save(place.plan)
    job = Job(profile, machine, training, pins, given, budget_s, request.time_limit_s)
    tuning = (
        Tuning(job, track, record, waiting.say)
        if hosts is None
        else SmallTuning(job, track, record, waiting.say, None if place.one_gpu else running, profile_without)
    )
    return tuning.run(result), record, [*notes, *unfit]


def _profiles_without(loaded: "LoadedModel | None", waiting: terminal.Waiting) -> "ProfileWithout":
    """Profiles of a model without some of its blocks, each made once."""

    @cache
    def profile_without(blocks: tuple[str, ...]) -> ModelProfile:
        from ...profiler.model.trace import trace
        from .fewer_layers import without_blocks

        assert loaded is not None, "only jobs for fewer hosts leave blocks out"
        waiting.say(f"profiling the model without {len(blocks)} of its blocks")
        return trace(without_blocks(loaded, blocks))

    return profile_without


def _given(
    setups: Sequence[str], profile: ModelProfile, cluster: ClusterSpec, training: "TrainingSpec"
) -> "tuple[tuple[tuple[str, Plan], ...], list[str]]":
    """(what --setup names and its plan, of those that fit; what became of the others)."""
    from ...planner.answers.verdict import THE_PLAN
    from ..measuring.compare import PLANNED, beside, read_setups

    if not setups:
        return (), []
    from ...planner.answers.candidate import Candidate

    first = Candidate(PLANNED, None, None, THE_PLAN)
    asked = read_setups(setups, cluster)
    found = beside(first, None, profile, cluster, training, asked).candidates[1:]
    unfit = [f"--setup {each.label} takes no part: {each.verdict}" for each in found if each.plan is None]
    return tuple((each.label, each.plan) for each in found if each.plan is not None), unfit
