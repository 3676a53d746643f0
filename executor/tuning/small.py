"""The loop for jobs that take more hosts than there are: each candidate is cut down to a few hosts, or its stages run
one rank at a time on one GPU; what they take refits the constants, and the whole jobs are priced by these."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...planner.answers.search import SearchResult
from ...planner.cost.alone import composed_step_s, kernels_s
from ...planner.cost.estimate import Estimate, estimate
from ...planner.cost.refit import COMPUTE, MeasuredStep, hosts_with
from ...planner.plan.document import MeasuredPlan, Plan
from ...planner.plan.pins import Pins
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..measuring.measured_steps import computed_s
from ..measuring.measurement import quantile
from .cut_down import CannotCutError, ProfileWithout, SmallerJob, Unseen, cut_down, unseen
from .entrants import Entrant, Pool, challengers, key_of, on_cluster
from .fit import knobs_of, refitted
from .jobs import Track
from .outcome import NOT_MEASURED, Contender, StandIn, Tuned
from .record import EntrantLine, Record, RefitLine, Say, StandInLine
from .rounds import COLD_LAP_S, LAP_S, WORTH, Job, Tuning, start_s_of

TURNS_EACH = 3
"""Laps of everything that runs: smaller jobs are measured for the fit, not told apart."""


@dataclass(frozen=True)
class _Piece:
    """What runs in the place of a candidate, or of one of its stages."""

    label: str
    job: SmallerJob
    rank: int | None


def first_that_can(
    result: SearchResult,
    pins: Pins,
    given: Sequence[tuple[str, Plan]],
    profile: ModelProfile,
    small: ClusterSpec,
    profile_without: ProfileWithout,
) -> SmallerJob:
    """A smaller job of the search's plan, or of the next fastest that pins allow, or of those that users named. Raises
    ValueError where none has one, with what is in the way of the fastest."""
    pool = Pool(profile, pins)
    pool.add_result(result)
    others = [each.plan for each in pool.priced(result.plan.cluster)]
    why = ""
    for plan in (result.plan, *others, *(plan for _, plan in given)):
        try:
            return cut_down(plan, profile, small, profile_without)
        except CannotCutError as error:
            why = why or str(error)
    raise ValueError(why)


def ranks_alone(plan: Plan) -> dict[int, int]:
    """Pipeline coordinate -> its first rank, of those that differ in what they compute or hold: the first, the last,
    and of the others one for each kind."""
    found: dict[object, int] = {}
    for position in range(plan.degrees.pipeline):
        ends = position in (0, plan.degrees.pipeline - 1)
        stages = [plan.stages[stage] for stage in plan.stages_of(position)]
        work = tuple((layer.layer_class, layer.recompute, layer.reshard) for s in stages for layer in s.layers)
        found.setdefault((position if ends else -1, work), position)
    return {position: position * plan.stride("pipeline") for position in sorted(found.values())}


class SmallTuning(Tuning):
    """One sitting. small: the hosts that smaller jobs run on; None: one GPU, on which ranks run without their peers."""

    def __init__(
        self,
        job: Job,
        track: Track,
        record: Record,
        say: Say,
        small: ClusterSpec | None,
        profile_without: ProfileWithout,
    ) -> None:
        knobs = job.knobs or (COMPUTE if small is None else knobs_of(small))
        super().__init__(replace(job, knobs=knobs), track, record, say)
        self._small, self._profile_without = small, profile_without
        self._uncut: dict[str, str] = {}
        self._profiles: dict[str, ModelProfile] = {}

    def _run(self, result: SearchResult) -> tuple[str, bool]:
        number = self._begin(result)
        while True:
            ended = self._turns(number)
            if ended is not None:
                return ended, False
            if not self.record.laps():
                newcomers = self._unseen()
            else:
                self._refit(number)
                newcomers = self._challengers()
            number += 1
            while newcomers and not self._let_in(newcomers, number):
                newcomers = self._challengers() if self.record.laps() else self._unseen()
            if not newcomers:
                if not self.record.laps():
                    return "no candidate could be measured", False
                return "what is predicted best was measured, as far as it can be", True
            if self.record.laps() and self._left_s() < self._cost_s(newcomers[0]):
                return f"the budget is spent; {newcomers[0].label} was not measured: --resume goes on", False

    def _turns(self, number: int) -> str | None:
        """Laps in random order until everything that runs has had its share. Why all must end, or None."""
        for turn in range(1, TURNS_EACH + 1):
            record = self.record
            racing = [
                label
                for label in record.stand_ins()
                if label not in record.falls() and len(record.laps().get(label, ())) < turn
            ]
            ended = self._turn(racing, number, turn, last=turn == TURNS_EACH)
            if ended is not None:
                return ended
        return None

    def _let_in(self, entrants: Sequence[Entrant], number: int) -> bool:
        """Cut candidates down, and into the record with those that can be. Whether any can."""
        found = []
        for each in entrants:
            try:
                pieces = self._pieces(each)
            except CannotCutError as error:
                self._uncut[each.label] = str(error)
                self.say(f"not run: {each.label}: {error}")
                continue
            found.append((each, pieces))
        super()._let_in([each for each, _ in found], number)
        for each, pieces in found:
            for piece in pieces:
                label = self._label_of(piece)
                self._profiles.setdefault(label, piece.job.profile)
                line = StandInLine(
                    label=label,
                    of=each.label,
                    plan=piece.job.plan,
                    without=piece.job.without,
                    rank=piece.rank,
                    predicted_s=self._seconds(piece.job.plan, piece.job.profile, piece.rank),
                    at_s=self._at_s(),
                )
                self.record.add(line)
        return bool(found)

    def _label_of(self, piece: _Piece) -> str:
        """That of the same job, where one runs in the place of another candidate already."""
        alike = (key_of(piece.job.plan), piece.job.without, piece.rank)
        return next(
            (
                label
                for label, line in self.record.stand_ins().items()
                if (key_of(line.plan), line.without, line.rank) == alike
            ),
            piece.label,
        )

    def _pieces(self, entrant: Entrant) -> list[_Piece]:
        plan, profile = on_cluster(entrant.plan, self._base, self.job.profile)[0], self.job.profile
        if self._small is not None:
            self.say(f"cutting {entrant.label} down to {self._small.devices}")
            return [_Piece(entrant.label, cut_down(plan, profile, self._small, self._profile_without), None)]
        job = SmallerJob(plan, profile, ())
        ranks = ranks_alone(plan)
        if len(ranks) == 1:
            return [_Piece(entrant.label, job, rank) for rank in ranks.values()]
        return [_Piece(f"{entrant.label}, stage {position}", job, rank) for position, rank in ranks.items()]

    def _profile_of(self, line: StandInLine) -> ModelProfile:
        if line.label not in self._profiles:
            without = self._profile_without(line.without) if line.without else self.job.profile
            self._profiles[line.label] = without
        return self._profiles[line.label]

    def _seconds(self, plan: Plan, profile: ModelProfile, rank: int | None) -> float:
        """Predicted, of what runs."""
        found = estimate(plan, profile)
        if rank is None:
            return found.step_time_s
        return kernels_s(plan, profile, found, plan.coordinates(rank)["pipeline"])

    def _what_runs(self, label: str) -> tuple[Plan, float, tuple[str, ...]]:
        line = self.record.stand_ins()[label]
        more: tuple[str, ...] = ("--without", *line.without) if line.without else ()
        if line.rank is not None:
            more = (*more, "--alone", str(line.rank))
        return line.plan, line.predicted_s, more

    def _ran(self, label: str) -> tuple[Plan, ModelProfile, int | None]:
        line = self.record.stand_ins()[label]
        return line.plan, self._profile_of(line), line.rank

    def _as_hosts_differ(self) -> ClusterSpec:
        """Not looked for: what runs is on few hosts of the job, or on none."""
        return self.job.cluster

    def _runs(self) -> list[MeasuredStep]:
        found = []
        for label in self.record.laps():
            plan, profile, rank = self._ran(label)
            position = None if rank is None else plan.coordinates(rank)["pipeline"]
            laps = [lap.rank_compute_s for lap in self.record.laps()[label]]
            known = computed_s(plan, laps) if rank is None else ()
            found.append(MeasuredStep(label, plan, profile, self._measured_s(label), position, known))
        return found

    def _refit(self, number: int) -> None:
        self._fit()
        self._search(number)
        wholes = self._wholes()
        best = min(wholes, key=lambda label: wholes[label])
        self.record.add(
            RefitLine(
                round=number,
                factors=self._factors,
                predicted_s={label: self._fitted_s(label) for label in self.record.laps()},
                best=best,
                best_s=wholes[best],
                at_s=self._at_s(),
            )
        )

    def _fitted_s(self, label: str) -> float:
        """Seconds of what ran, by the constants of now."""
        plan, profile, rank = self._ran(label)
        return self._seconds(self._moved(plan), profile, rank)

    def _moved(self, plan: Plan) -> Plan:
        """A plan with the fitted device in its hosts."""
        device = self._cluster.device.model_copy(
            update={"link": self._cluster.link, "network": self._cluster.between_hosts}
        )
        return plan.model_copy(update={"cluster": hosts_with(plan.cluster, device)})

    def _wholes(self) -> dict[str, float]:
        """Label -> seconds of the whole job's step, of every candidate in whose place something was measured."""
        found = {}
        for label in self.record.entrants():
            step_s = self._whole_s(label)
            if step_s is not None:
                found[label] = step_s
        return found

    def _whole_s(self, label: str) -> float | None:
        """Seconds of a candidate's step: by the fitted constants, and what was measured in its place over what they
        predict of it; terms that do not show stay as predicted. None where nothing was measured."""
        measured = [line for line in self.record.stand_ins_of(label) if line.label in self.record.laps()]
        if not measured:
            return None
        plan, whole = on_cluster(self.record.entrants()[label].plan, self._cluster, self.job.profile)
        ratios = {
            0 if line.rank is None else line.plan.coordinates(line.rank)["pipeline"]: self._measured_s(line.label)
            / self._fitted_s(line.label)
            for line in measured
        }
        if self._small is not None:
            hidden_s = sum(each.seconds for each in self._unseen_of(plan, whole, label))
            return hidden_s + (whole.step_time_s - hidden_s) * ratios[0]
        spread = {p: ratios[min(ratios, key=lambda q: abs(p - q))] for p in range(plan.degrees.pipeline)}
        return composed_step_s(plan, self.job.profile, whole, spread)

    def _unseen_of(self, plan: Plan, whole: Estimate, label: str) -> tuple[Unseen, ...]:
        own = self.record.stand_ins_of(label)[0]
        return unseen(plan, whole, None if self._small is None else own.plan)

    def _challengers(self) -> list[Entrant]:
        """Who is predicted to be faster than all in whose place something was measured, and can be cut down."""
        best_s = min(self._wholes().values())
        seen = {*self.record.entrants(), *self._uncut}
        return challengers(self._pool.priced(self._cluster), seen, best_s * (1 - WORTH))

    def _unseen(self) -> list[Entrant]:
        return [each for each in super()._unseen() if each.label not in self._uncut]

    def _cost_s(self, entrant: Entrant) -> float:
        """Seconds that measuring a candidate takes: start and laps, of every stage where these run one by one."""
        started = [lap.started_s for laps in self.record.laps().values() for lap in laps if lap.started_s]
        start_s = quantile(tuple(started), 0.5) if started else start_s_of(entrant.predicted_s)
        each_s = start_s + TURNS_EACH * LAP_S if self.track.keeps else TURNS_EACH * (start_s + COLD_LAP_S)
        return each_s * (1 if self._small is not None else len(ranks_alone(entrant.plan)))

    def _outcome(self, result: SearchResult, reason: str, agreed: bool, interrupted: bool) -> Tuned:
        laps = self.record.laps()
        if self._num_laps() > self._fitted_laps:
            self._fit()
        wholes = self._wholes() if laps else {}
        standings = self._standings(min(wholes, key=lambda label: wholes[label], default=None))
        plan, label = result.plan, self._pool.label_of(result.plan)
        if wholes:
            first = standings[0]
            chosen = on_cluster(first.plan, self._cluster, self.job.profile)[0]
            plan, label = chosen, first.label
        rounds = max((line.round for line in self.record.entrants().values()), default=0)
        return Tuned(
            plan,
            label,
            refitted(self._base, self._cluster, self._factors, len(laps)),
            self._factors,
            standings,
            agreed,
            reason,
            rounds,
            self._at_s(),
            interrupted,
            self._memory_rows(),
            f"smaller jobs on {self._small.devices}" if self._small is not None else "ranks without their peers",
        )

    def _standings(self, leader: str | None) -> tuple[Contender, ...]:
        wholes = self._wholes() if leader is not None else {}
        found = [self._contender(line, wholes.get(label), leader) for label, line in self.record.entrants().items()]
        found.sort(key=lambda each: wholes.get(each.label, float("inf")))
        raced = {each.label for each in found}
        for each in self._pool.priced(self._cluster):
            if each.label in self._uncut and each.label not in raced:
                before = self._pool.priced(self._base)
                first_s = next((other.predicted_s for other in before if other.label == each.label), each.predicted_s)
                outcome = self._uncut[each.label]
                found.append(Contender(each.label, each.by, each.plan, first_s, each.predicted_s, None, outcome))
        return tuple(found)

    def _contender(self, line: EntrantLine, whole_s: float | None, leader: str | None) -> Contender:
        pieces = tuple(self._stand_in(each) for each in self.record.stand_ins_of(line.label))
        plan, whole = on_cluster(line.plan, self._cluster, self.job.profile)
        if whole_s is None:
            outcome = next((each.outcome for each in pieces), NOT_MEASURED)
        elif line.label == leader:
            outcome = "predicted to be the fastest"
        else:
            best_s = self._whole_s(leader) if leader is not None else None
            outcome = f"{whole_s / best_s:.2f}x {leader}" if best_s else ""
        return Contender(
            line.label,
            line.by,
            line.plan,
            line.predicted_s,
            whole_s,
            None,
            outcome,
            pieces,
            self._unseen_of(plan, whole, line.label),
        )

    def _stand_in(self, line: StandInLine) -> StandIn:
        falls = self.record.falls()
        measured: MeasuredPlan | None = None
        outcome = NOT_MEASURED
        if line.label in falls:
            outcome = f"{falls[line.label].cause}: {falls[line.label].message}"
        elif line.label in self.record.laps():
            measured, outcome = self._measured_of(line.label, line.predicted_s), "measured"
        fitted_s = self._fitted_s(line.label)
        return StandIn(line.label, line.plan, line.rank, line.predicted_s, fitted_s, measured, outcome)
