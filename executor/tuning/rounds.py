"""The loop: race the candidates, refit the constants to what they took, search again, let those join that now beat the
leader; until no plan that was not tried is predicted to come near the best measured one, or the budget is spent."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...planner.answers.alternatives import kept, ordered
from ...planner.answers.candidate import Candidate
from ...planner.answers.explain import compared, unless_measured
from ...planner.answers.infeasible import InfeasibleError
from ...planner.answers.search import SearchResult, SolverError, search
from ...planner.cost.estimate import estimate
from ...planner.cost.refit import MeasuredCollective, MeasuredStep, turned_hosts
from ...planner.cost.refit_memory import MeasuredMemory, MemoryRefit, refit_memory
from ...planner.plan.document import MeasuredPlan, Plan
from ...planner.plan.pins import Pins
from ...planner.plan.training import TrainingSpec
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..measuring.exchanges import measured_collectives
from ..measuring.measured_steps import computed_s
from ..measuring.measurement import WARM_UP_STEPS, quantile
from ..measuring.significance import Apart, paired
from ..measuring.slow_hosts import SlowHost, slow_in_laps, slower_cluster
from ..measuring.slow_links import SlowLink, slow_links, with_slow_links
from .entrants import (
    NEWCOMERS,
    Entrant,
    Pool,
    challengers,
    could_be_best,
    key_of,
    missed_by,
    on_cluster,
    priced_layouts,
    to_beat_s,
    usual_layouts,
)
from .fit import fitted, refitted, teachers
from .jobs import Fallen, Track
from .outcome import NOT_MEASURED, Contender, MemoryRow, Tuned
from .race import TURNS, in_words, lap_steps, leader_of, out_after
from .record import EndLine, EntrantLine, FallLine, LapLine, Record, RefitLine, Say

START_S = 15.0
"""Seconds that a job takes until its first step, before any was started here: Python, torch and the meeting of ranks
(measured with its warm-up: 14 to 19 s, two ranks on two cores under a load of 9)."""

LAP_S, COLD_LAP_S = 2.0, 8.0
"""Seconds of a lap: where jobs wait between laps, and where each lap starts one anew."""

FIRST_SHARE = 0.6
"""Of the budget, for the first round at most: the best plan may be one that joins after a refit."""

FULL = 0.8
"""Of a GPU's memory, from which on what torch's allocator holds tells of what it needs; an assumption. With memory to
spare it keeps what it need not give back: GPT-2 held 12.8 GiB of an H100, and its steps ran in 7.4
(benchmarks/one_gpu/results/memory.md)."""

WORTH = 0.005
"""A newcomer must be predicted to be this much faster than the leader; half of what counts as a difference."""

LESS = 0.98
"""Memory that plans may have, of what one that ran out of it was predicted to need."""

_KEPT = 16
"""Layouts that the plan's document keeps as weighed beside it."""


@dataclass(frozen=True)
class Job:
    """What is tuned. given: plans that users named, with their words; knobs: constants that may move; None: all that
    anything there depends on."""

    profile: ModelProfile
    cluster: ClusterSpec
    training: TrainingSpec
    pins: Pins = field(default_factory=Pins)
    given: tuple[tuple[str, Plan], ...] = ()
    budget_s: float = 600.0
    search_s: float = 60.0
    knobs: tuple[str, ...] | None = None
    seed: int = 0


class Tuning:
    """One sitting of a race. `run` raises nothing for what candidates do: that is in the record."""

    def __init__(self, job: Job, track: Track, record: Record, say: Say) -> None:
        self.job, self.track, self.record, self.say = job, track, record, say
        self._began = time.monotonic() - record.elapsed_s
        self._until = time.monotonic() + job.budget_s
        self._base = job.cluster
        self._cluster = job.cluster
        self._factors: dict[str, float] = {}
        self._pool = Pool(job.profile, job.pins)
        self._steps_s: dict[str, float] = {}
        self._result: SearchResult | None = None
        self._memory: MemoryRefit | None = None
        self._slow: tuple[SlowHost, ...] = ()
        self._slow_links: tuple[SlowLink, ...] = ()
        self._fitted_laps = 0
        self._out: set[str] = set()
        self._random = random.Random(job.seed + len(record.lines))

    def run(self, result: SearchResult) -> Tuned:
        """Race until both agree or the budget is spent. result: the plan that the search chose before."""
        interrupted = False
        try:
            reason, agreed = self._run(result)
        except KeyboardInterrupt:
            reason, agreed, interrupted = "interrupted; --resume goes on", False, True
        finally:
            self.track.close()
        if self.record.lost is not None:
            reason += f"; the record lacks its last lines: {self.record.lost}"
        self.record.add(EndLine(reason=reason, agreed=agreed, at_s=self._at_s()))
        return self._outcome(result, reason, agreed, interrupted)

    def _begin(self, result: SearchResult) -> int:
        """The round that is under way: the first, whose candidates are let in, or that of a record that goes on."""
        self._fill(result)
        number = max((line.round for line in self.record.entrants().values()), default=0)
        if number == 0:
            number = 1
            self._let_in(self._first(), number)
        return number

    def _run(self, result: SearchResult) -> tuple[str, bool]:
        number = self._begin(result)
        until_s = self._until if number > 1 else self._until - (1 - FIRST_SHARE) * self.job.budget_s
        while True:
            fallen = self._race(number, until_s)
            if fallen is not None:
                return fallen, False
            if not self.record.laps():
                others = self._unseen()
                if not others:
                    return "no candidate could be measured", False
                number += 1
                self._let_in(others, number)
                continue
            self._refit(number)
            newcomers = self._newcomers()
            if not newcomers and until_s < self._until:
                until_s = self._until  # it was cut short in favour of newcomers
                continue
            until_s = self._until
            if not newcomers:
                return "no plan that was not tried is predicted to come near the fastest one", True
            cost_s = self._cost_s(newcomers[0])
            if self._left_s() < cost_s:
                return (
                    f"the budget is spent; {newcomers[0].label}, predicted at {newcomers[0].predicted_s:.3g} s, may be "
                    f"faster than the leader and would take about {cost_s:.0f} s to try: --resume goes on",
                    False,
                )
            number += 1
            self._let_in([each for each in newcomers if self._afford(each, newcomers)], number)

    def _fill(self, result: SearchResult) -> None:
        """Everything that was named: by the record, by users, by the search, by habit."""
        for line in self.record.entrants().values():
            self._pool.restore(line.label, line.by, line.plan)
        for words, plan in self.job.given:
            self._pool.add(plan, "--setup", words)
        self._pool.add_result(result)
        if self.job.pins == Pins():
            self.say("pricing the layouts that people try by hand")
            for words, plan in priced_layouts(
                usual_layouts(self._base), self.job.profile, self._base, self.job.training
            ):
                self._pool.add(plan, f"usual layout: {words}")

    def _first(self) -> list[Entrant]:
        """The first round: as many of those that could be the best as the budget bears, but at least two; and who
        teaches the fit."""
        found = could_be_best(self._pool.priced(self._base))
        budget_s, chosen = FIRST_SHARE * self.job.budget_s, list[Entrant]()
        for each in found:
            budget_s -= self._cost_s(each)
            if len(chosen) >= 2 and budget_s < 0 and each.by != "--setup":
                break
            chosen.append(each)
        everyone = self._pool.priced(self._base)
        return [*chosen, *teachers(everyone, chosen, self._base, self.job.profile, self.job.knobs)]

    def _unseen(self) -> list[Entrant]:
        """The next ones to try where none could be measured, of those that need less memory than what ran out of it."""
        priced = self._pool.priced(self._with_known_memory(self._base))
        return [each for each in priced if each.label not in self.record.entrants()][:NEWCOMERS]

    def _afford(self, entrant: Entrant, among: Sequence[Entrant]) -> bool:
        spent_s = sum(self._cost_s(each) for each in among[: among.index(entrant) + 1])
        return entrant is among[0] or spent_s < self._left_s()

    def _let_in(self, entrants: Sequence[Entrant], number: int) -> bool:
        """Candidates into the record. Whether any takes part."""
        before = {each.label: each.predicted_s for each in self._pool.priced(self.job.cluster)}
        for each in entrants:
            self.record.add(
                EntrantLine(
                    label=each.label,
                    by=each.by,
                    round=number,
                    plan=each.plan,
                    predicted_s=before.get(each.label, each.predicted_s),
                    at_s=self._at_s(),
                )
            )
        return bool(entrants)

    def _race(self, number: int, until_s: float) -> str | None:
        """Turns of everyone who may still be the fastest, in random order, until a moment. Why the whole race must end,
        or None."""
        record = self.record
        turn = max((lap.turn for laps in record.laps().values() for lap in laps), default=0)
        for _ in range(TURNS):
            racing = [label for label in record.entrants() if label not in self._out and label not in record.falls()]
            for label, why in out_after(record.medians(), self._all_steps(), racing).items():
                self.say(f"out: {label}, {why}")
                self.track.leave(label)
                self._out.add(label)
                racing.remove(label)
            measured = all(label in record.laps() for label in racing)
            if measured and (len(racing) < 2 or (time.monotonic() > until_s and turn > 2)):
                return None
            turn += 1
            ended = self._turn(racing, number, turn)
            if ended is not None:
                return ended
        return None

    def _turn(self, racing: list[str], number: int, turn: int, last: bool = False) -> str | None:
        """A lap of each in random order. last: after it they leave the track. Why the whole race must end, or None."""
        self._random.shuffle(racing)
        for label in racing:
            if self._left_s() <= 0:
                return "the budget is spent; --resume goes on"
            ended = self._lap(label, number, turn)
            if ended is not None:
                return ended
            if last:
                self.track.leave(label)
        return None

    def _lap(self, label: str, number: int, turn: int) -> str | None:
        """One lap of a candidate, into the record. Why the whole race must end, or None."""
        plan, predicted_s, more = self._what_runs(label)
        step_s = self._steps_s.get(label, predicted_s)
        steps = lap_steps(step_s, LAP_S if self.track.keeps else COLD_LAP_S)
        self.say(f"round {number}, turn {turn}: {label}")
        try:
            found = self.track.lap(label, plan, steps, self._left_s(), more)
        except OSError as error:
            return f"jobs cannot be started any more: {error.strerror or error}"
        if isinstance(found, Fallen):
            self.say(f"out: {label}, {found.cause}: {found.message}")
            self.record.add(
                FallLine(
                    label=label,
                    round=number,
                    cause=found.cause,
                    message=found.message,
                    predicted_bytes=max(_bytes(plan)),
                    at_s=self._at_s(),
                )
            )
            if found.cause == "launch" and not self.record.laps():
                return found.message
            return "the budget is spent; --resume goes on" if found.cause == "budget" else None
        self.record.add(
            LapLine(
                label=label,
                round=number,
                turn=turn,
                steps_s=found.steps_s,
                started_s=found.started_s,
                peak_memory_bytes=found.peak_memory_bytes,
                memory_kind="allocated" if found.memory_kind == "allocated" else "resident",
                peak_reserved_bytes=found.peak_reserved_bytes,
                rank_compute_s=found.rank_compute_s,
                exchanged=found.exchanged,
                at_s=self._at_s(),
            )
        )
        self._steps_s[label] = quantile(found.steps_s, 0.5)
        return None

    def _what_runs(self, label: str) -> tuple[Plan, float, tuple[str, ...]]:
        """(plan, predicted seconds of its step, what its ranks are told beside it) of what has this label."""
        line = self.record.entrants()[label]
        return line.plan, line.predicted_s, ()

    def _refit(self, number: int) -> None:
        """Constants by everything that was measured, from the priors that the race began with, and a search by them."""
        self._fit()
        entrants = {each.label: each for each in self._again(self._cluster)}
        self._search(number)
        best = self._pool.priced(self._cluster)
        measured = self.record.laps()
        self.record.add(
            RefitLine(
                round=number,
                factors=self._factors,
                predicted_s={label: entrants[label].predicted_s for label in measured},
                best=best[0].label if best else next(iter(measured)),
                best_s=best[0].predicted_s if best else entrants[next(iter(measured))].predicted_s,
                at_s=self._at_s(),
            )
        )

    def _fit(self) -> None:
        self._base = self._as_hosts_differ()
        self.say("fitting the constants to what was measured")
        self._factors = fitted(self._base, self._runs(), self.job.knobs, self._exchanged())
        seen = self._memory_seen()
        self._memory = refit_memory(self.job.cluster.device, seen) if seen else None
        self._cluster = self._turned(self._base)
        self._fitted_laps = self._num_laps()

    def _turned(self, cluster: ClusterSpec) -> ClusterSpec:
        """A cluster with the constants and the memory that were fitted."""
        found = self._with_known_memory(turned_hosts(cluster, self._factors))
        return found if self._memory is None else self._memory.at(found, len(self._memory.after))

    def _as_hosts_differ(self) -> ClusterSpec:
        """The cluster of the job; where that is told to be of one kind, with slower devices and networks of hosts that
        were seen to compute or to exchange slower than the others."""
        cluster = self.job.cluster
        if len(cluster.kinds) > 1:
            return cluster
        laps = self.record.laps()
        self._slow = slow_in_laps(
            [(self._ran(label)[0], [lap.rank_compute_s for lap in laps[label]]) for label in laps]
        )
        seen = [lap.exchanged for each in laps.values() for lap in each if lap.exchanged is not None]
        self._slow_links = slow_links([rates for each in seen for rates in each.host_rates])
        for found in (*self._slow, *self._slow_links):
            self.say(str(found))
        slower = slower_cluster(cluster, self._slow, "as ranks computed in plan tune") if self._slow else cluster
        return with_slow_links(slower, self._slow_links) if self._slow_links else slower

    def _memory_seen(self) -> list[MeasuredMemory]:
        """The fullest process of every pipeline coordinate of all that ran; of those whose GPU had memory to spare
        nothing is known but what was allocated."""
        full, found = FULL * self.job.cluster.device.memory, []
        for label, laps in self.record.laps().items():
            plan, profile, rank = self._ran(label)
            kind: Literal["resident", "reserved"] = "resident" if laps[0].memory_kind == "resident" else "reserved"
            told = [lap.peak_memory_bytes if kind == "resident" else lap.peak_reserved_bytes for lap in laps]
            for position, peak in _fullest(plan, told, rank).items():
                if kind == "resident" or peak >= full:
                    found.append(MeasuredMemory(label, plan, profile, position, kind, peak))
        return found

    def _memory_rows(self) -> tuple[MemoryRow, ...]:
        """Measured memory beside predicted, before and after the fit. What the GPU's allocator handed out is
        counted, so no constant moves it."""
        seen, fit = self._memory_seen(), self._memory
        rows = []
        if fit is not None and len(seen) == len(fit.after):
            rows = [
                MemoryRow(each.label, each.position, each.kind, each.bytes, before, after)
                for each, before, after in zip(seen, fit.before, fit.after, strict=True)
            ]
        for label, laps in self.record.laps().items():
            plan, profile, rank = self._ran(label)
            if laps[0].memory_kind == "allocated":
                memory = estimate(plan, profile).memory
                for position, peak in _fullest(plan, [lap.peak_memory_bytes for lap in laps], rank).items():
                    size = memory[position].allocated_bytes
                    rows.append(MemoryRow(label, position, "allocated", peak, size, size))
        return tuple(rows)

    def _ran(self, label: str) -> tuple[Plan, ModelProfile, int | None]:
        """(plan on the constants that the race began with, profile, the only rank that ran or None) of a label."""
        line = self.record.entrants()[label]
        return line.plan, self.job.profile, None

    def _num_laps(self) -> int:
        return sum(map(len, self.record.laps().values()))

    def _search(self, number: int) -> None:
        """Plans by the constants of now, into the pool; nothing where none fits or is found in time."""
        left_s = min(self.job.search_s, max(2.0, self._left_s() / 4))
        self.say(f"searching again with what round {number} taught")
        try:
            found = search(self.job.profile, self._cluster, self.job.training, pins=self.job.pins, time_limit_s=left_s)
        except (InfeasibleError, SolverError) as error:
            self.say(f"no other plan: {error}")
            return
        self._pool.add_result(found)
        self._result = found

    def _with_known_memory(self, cluster: ClusterSpec) -> ClusterSpec:
        """With no more memory than plans that ran out of it were predicted to need, unless one that was predicted to
        need more has run."""
        ran = [max(_bytes(self._what_runs(label)[0])) for label in self.record.laps()]
        fell = [line.predicted_bytes for line in self.record.falls().values() if line.cause == "memory"]
        fell = [size for size in fell if size > max(ran, default=0.0)]
        if not fell:
            return cluster
        most = LESS * min(fell) / (1 - self.job.training.memory_margin)
        hosts = tuple(
            group.model_copy(
                update={"device": group.device.model_copy(update={"memory": min(most, group.device.memory)})}
            )
            for group in cluster.hosts
        )
        return cluster.model_copy(update={"hosts": hosts})

    def _newcomers(self) -> list[Entrant]:
        """Who may beat the leader by what is predicted now, and by how far that misses what was measured."""
        leader = leader_of(self.record.medians())
        assert leader is not None, "something was measured"
        predicted = {each.label: each.predicted_s for each in self._again(self._cluster)}
        missed = missed_by(predicted[label] / self._measured_s(label) for label in self.record.laps())
        limit_s = to_beat_s(self._measured_s(leader), predicted[leader], missed)
        return challengers(self._pool.priced(self._cluster), self.record.entrants(), limit_s * (1 - WORTH))

    def _again(self, cluster: ClusterSpec) -> list[Entrant]:
        """Everyone who ever raced, priced on a cluster, whether it fits or not."""
        found = []
        for line in self.record.entrants().values():
            plan, priced = on_cluster(line.plan, cluster, self.job.profile)
            found.append(Entrant(line.label, line.by, plan, priced.step_time_s))
        return found

    def _runs(self) -> list[MeasuredStep]:
        """What was measured, as the fit takes it."""
        laps = self.record.laps()
        return [
            MeasuredStep(
                each.label,
                each.plan,
                self.job.profile,
                self._measured_s(each.label),
                compute_s=computed_s(each.plan, [lap.rank_compute_s for lap in laps[each.label]]),
            )
            for each in self._again(self._base)
            if each.label in laps
        ]

    def _exchanged(self) -> list[MeasuredCollective]:
        """What collectives took before the steps, on the hosts as they differ."""
        found = []
        for label, laps in self.record.laps().items():
            plan, profile, _ = self._ran(label)
            hosts = self._base if self._base.num_devices == plan.cluster.num_devices else plan.cluster
            ran = plan.model_copy(update={"cluster": hosts})
            found += [(ran, profile, lap.exchanged) for lap in laps if lap.exchanged is not None]
        return measured_collectives(found)

    def _outcome(self, result: SearchResult, reason: str, agreed: bool, interrupted: bool) -> Tuned:
        laps = self.record.laps()
        if self._num_laps() > self._fitted_laps:
            self._fit()
        leader = leader_of(self.record.medians())
        standings = self._standings(leader)
        first = next((each for each in standings if each.label == leader), None)
        plan = result.plan if first is None else self._document(first)
        device = refitted(self.job.cluster, self._turned(self.job.cluster), self._factors, len(laps))
        label = self._pool.label_of(result.plan) if first is None else first.label
        rounds = max((line.round for line in self.record.entrants().values()), default=0)
        memory = self._memory_rows()
        return Tuned(
            *(plan, label, device, self._factors, standings, agreed, reason, rounds, self._at_s(), interrupted, memory),
            slow=self._slow,
            slow_links=self._slow_links,
        )

    def _standings(self, leader: str | None) -> tuple[Contender, ...]:
        medians, falls = self.record.medians(), self.record.falls()
        apart = {} if leader is None else paired(medians, leader)
        fitted_s = {each.label: each.predicted_s for each in self._again(self._cluster)}
        found = []
        for label, line in self.record.entrants().items():
            measured = self._measured_of(label, line.predicted_s)
            if label in falls:
                outcome = f"{falls[label].cause}: {falls[label].message}"
            elif measured is None:
                outcome = NOT_MEASURED
            else:
                outcome = self._beside(label, leader, apart)
            known_s = fitted_s[label] if medians else None
            ratio = apart[label].ratio if label in apart else None
            beside = known_s, measured, outcome
            found.append(Contender(label, line.by, line.plan, line.predicted_s, *beside, ratio=ratio))
        order = [leader, *sorted(apart, key=lambda label: apart[label].ratio)]
        place = {label: i for i, label in enumerate(order)}
        return tuple(sorted(found, key=lambda each: place.get(each.label, len(place))))

    def _beside(self, label: str, leader: str | None, apart: Mapping[str, Apart]) -> str:
        if label == leader or leader is None:
            return "the fastest" if len(self.record.laps()) > 1 else "the only one that was measured"
        if label in apart:
            return in_words(apart[label])
        return f"{self._measured_s(label) / self._measured_s(leader):.2f}x {leader}, in other turns"

    def _measured_of(self, label: str, predicted_s: float) -> MeasuredPlan | None:
        laps = self.record.laps().get(label)
        if laps is None:
            return None
        steps = tuple(step for lap in laps for step in lap.steps_s)
        median_s = self._measured_s(label)
        return MeasuredPlan(
            step_time_s=median_s,
            spread=(quantile(steps, 0.75) - quantile(steps, 0.25)) / 2 / median_s,
            num_steps=len(steps),
            turns=len(laps),
            peak_memory_bytes=tuple(map(max, zip(*(lap.peak_memory_bytes for lap in laps), strict=True))),
            memory_kind=laps[0].memory_kind,
            predicted_before_s=predicted_s,
        )

    def _document(self, first: Contender) -> Plan:
        """The winner's document: on the fitted cluster, with what was measured, and what was weighed beside it."""
        plan, own = on_cluster(first.plan, self._cluster, self.job.profile)
        others = []
        for each in self._pool.priced(self._cluster)[:_KEPT]:
            if each.label != first.label:
                priced = on_cluster(each.plan, self._cluster, self.job.profile)[1]
                verdict = compared(priced, own, unless_measured(first.measured))
                others.append(Candidate(each.label, each.plan, priced, verdict, priced.step_time_s))
        chosen = self._result is not None and key_of(self._result.plan) == key_of(plan)
        certificate = self._result.certificate if chosen and self._result is not None else None
        listed = kept(ordered(others, plan), plan.cluster)
        told = {"measured": first.measured, "certificate": certificate, "alternatives": listed}
        return plan.model_copy(update=told)

    def _measured_s(self, label: str) -> float:
        """Median seconds over all steps of a candidate."""
        return quantile(tuple(step for lap in self.record.laps()[label] for step in lap.steps_s), 0.5)

    def _all_steps(self) -> dict[str, list[float]]:
        return {label: [s for lap in laps for s in lap.steps_s] for label, laps in self.record.laps().items()}

    def _cost_s(self, entrant: Entrant) -> float:
        """Seconds that a candidate is likely to take until it can be told from the leader: its start, its warm-up, and
        three laps of its own and of the leader's."""
        started = [lap.started_s for laps in self.record.laps().values() for lap in laps if lap.started_s]
        start_s = quantile(tuple(started), 0.5) if started else start_s_of(entrant.predicted_s)
        if self.track.keeps:
            return start_s + 3 * LAP_S
        return 3 * (start_s + COLD_LAP_S)

    def _at_s(self) -> float:
        return time.monotonic() - self._began

    def _left_s(self) -> float:
        return self._until - time.monotonic()


def _fullest(plan: Plan, laps: Sequence[Sequence[int]], rank: int | None) -> dict[int, float]:
    """Pipeline coordinate -> most bytes of its ranks over laps. rank: the only one that ran."""
    found: dict[int, float] = {}
    for peaks in laps:
        for process, peak in enumerate(peaks):
            position = plan.coordinates(process if rank is None else rank)["pipeline"]
            found[position] = max(found.get(position, 0.0), float(peak))
    return found


def start_s_of(step_s: float) -> float:
    """Seconds until a job is warm, by its predicted step."""
    return START_S + WARM_UP_STEPS * step_s


def _bytes(plan: Plan) -> tuple[float, ...]:
    return (0.0,) if plan.prediction is None else plan.prediction.stage_memory_bytes
