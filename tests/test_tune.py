"""plan tune: who races, who is out, what the fit makes of it, what a record keeps, and what is refused before."""

import json
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor.measuring.exchanges import TimedExchanges, expected_collectives
from meshwright.executor.measuring.significance import Apart, paired
from meshwright.executor.measuring.slow_hosts import SlowHost, slower_cluster
from meshwright.executor.measuring.slow_links import SlowLink, with_slow_links
from meshwright.executor.reporting.tune_page import tune_page
from meshwright.executor.reporting.tune_report import sentences, tuned_document
from meshwright.executor.tuning import rounds
from meshwright.executor.tuning.entrants import (
    Entrant,
    Pool,
    challengers,
    could_be_best,
    missed_by,
    on_cluster,
    to_beat_s,
)
from meshwright.executor.tuning.fit import TEACHERS, teachers
from meshwright.executor.tuning.jobs import Fallen, Lap, LaunchedJob, cause_of, filled, processes_with, read_launcher
from meshwright.executor.tuning.outcome import Tuned
from meshwright.executor.tuning.race import in_words, lap_steps, leader_of, out_after
from meshwright.executor.tuning.record import LapLine, Record, load_record
from meshwright.executor.tuning.rounds import Job, Tuning
from meshwright.executor.tuning.sitting import Venue, check_budget, check_cluster, header_of, open_record, read_budget
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.cost.alone import kernels_s
from meshwright.planner.cost.comm_cost import collective_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.refit import most_open, turned
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from support.cli import run_plan, save_profile
from support.synthetic import layer_class, profile
from support.tracks import HiddenTrack
from support.waiting import until

PROFILE = profile(
    [layer_class("block", 1e8, 4_000_000, saved=1e6, inputs=1e5, heads=4, transient=1e5)], [0] * 2, crossing=1e5
)
CLUSTER = cluster_of(load_device("cpu"), 2)
TRAINING = TrainingSpec(global_batch=16, seq_len=64, precision="fp32")
TRUTH = {"link bandwidth": 0.1, "matmul": 0.7}
"""Links are ten times as slow as announced, and matmuls slower: another plan is the best."""


@pytest.fixture(scope="module")
def chosen() -> SearchResult:
    return search(PROFILE, CLUSTER, TRAINING, time_limit_s=5.0)


def race(
    folder: Path,
    chosen: SearchResult,
    track: HiddenTrack,
    resume: bool = False,
    cluster: ClusterSpec = CLUSTER,
    knobs: Collection[str] = tuple(TRUTH),
) -> tuple[Tuned, Record]:
    place = Venue(folder / "plan.json", resume=resume)
    record = open_record(place, header_of("net", PROFILE.fingerprint, chosen.plan, cluster, None))
    job = Job(PROFILE, cluster, TRAINING, search_s=2.0, knobs=tuple(knobs))
    return Tuning(job, track, record, lambda line: None).run(chosen), record


def race_on(folder: Path, cluster: ClusterSpec, track: HiddenTrack, knobs: Collection[str]) -> tuple[Tuned, Record]:
    """A race on another cluster, from what is searched for there."""
    return race(folder, search(PROFILE, cluster, TRAINING, time_limit_s=5.0), track, cluster=cluster, knobs=knobs)


def test_a_race_ends_with_the_best_plan_of_the_hidden_device_and_its_constants(
    tmp_path: Path, chosen: SearchResult
) -> None:
    track = HiddenTrack(PROFILE, CLUSTER, TRUTH)

    found, record = race(tmp_path, chosen, track)

    best = search(PROFILE, track._cluster, TRAINING, time_limit_s=5.0)
    assert track.true_s(chosen.plan) > 1.02 * best.estimate.step_time_s, "or the prediction alone would have done"
    assert found.agreed
    assert track.true_s(found.plan) <= 1.01 * best.certificate.fastest_s
    assert found.plan.measured is not None
    assert found.plan.measured.step_time_s == pytest.approx(track.true_s(found.plan), rel=0.01)
    assert found.device.link.bandwidth < CLUSTER.link.bandwidth / 3
    errors = [abs(each.fitted_s / each.measured.step_time_s - 1) for each in found.standings if each.measured]  # type: ignore[operator]
    assert max(errors) < 0.05
    assert track.closed
    assert "What each minute bought" in tune_page(found, record)


SLOW = 1.5
TWO_HOSTS = cluster_of(CLUSTER.device, 4, 2)


class SlowHostTrack(HiddenTrack):
    """Ranks of the second host compute longer, and say so."""

    def __init__(self) -> None:
        super().__init__(PROFILE, TWO_HOSTS, TRUTH)
        self._alike = self._cluster
        self._cluster = slower_cluster(self._cluster, [SlowHost(1, (2, 3), SLOW, SLOW, SLOW, True)])

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        found = super().lap(label, plan, steps, limit_s, more)
        if isinstance(found, Fallen):
            return found
        on_alike = plan.model_copy(update={"cluster": self._alike})
        priced = estimate(on_alike, PROFILE)
        positions = [plan.coordinates(rank)["pipeline"] for rank in range(4)]
        own_s = [kernels_s(on_alike, PROFILE, priced, position) for position in positions]
        noisy = (s * self._random.gauss(1.0, 0.003) * (SLOW if rank >= 2 else 1.0) for rank, s in enumerate(own_s))
        return replace(found, rank_compute_s=tuple(noisy))


@pytest.mark.slow
def test_a_slow_host_is_found_by_what_ranks_compute_and_planned_for(tmp_path: Path) -> None:
    track = SlowHostTrack()

    found, _ = race_on(tmp_path, TWO_HOSTS, track, TRUTH)

    best = search(PROFILE, track._cluster, TRAINING, time_limit_s=5.0)
    (slow,) = found.slow
    assert (slow.host, slow.ranks, slow.beside) == (1, (2, 3), True)
    assert slow.low < slow.ratio < slow.high
    assert slow.ratio == pytest.approx(SLOW, rel=0.01)
    assert len(found.plan.cluster.kinds) == 2
    errors = [abs(each.fitted_s / each.measured.step_time_s - 1) for each in found.standings if each.measured]  # type: ignore[operator]
    assert max(errors) < 0.05
    assert track.true_s(found.plan) <= 1.01 * best.certificate.fastest_s
    assert any("host 1 (ranks 2, 3) computes 1.50 times as long" in line for line in sentences(found))
    assert [each["host"] for each in tuned_document(found, [])["slow_hosts"]] == [1]
    assert found.device.matmul_efficiency == pytest.approx(
        turned(CLUSTER.device, found.factors).matmul_efficiency, rel=1e-6
    )


FOUR_HOSTS = cluster_of(CLUSTER.device, 4, 1)
NETWORK = {"network bandwidth": 0.1, "matmul": 0.7}


class SlowLinkTrack(HiddenTrack):
    """The last two hosts are behind slower links; ranks say what passes between hosts, and what collectives take."""

    def __init__(self) -> None:
        super().__init__(PROFILE, FOUR_HOSTS, NETWORK)
        self._cluster = with_slow_links(self._cluster, [SlowLink(host, 2.0, 2.0, 2.0) for host in (2, 3)])

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        first = label not in self.laps
        found = super().lap(label, plan, steps, limit_s, more)
        if isinstance(found, Fallen) or not first:
            return found
        links = CostModel(PROFILE, self._cluster, TRAINING).links(4, 1)
        told = [(each.kind, each.full_bytes) for each in expected_collectives(plan, PROFILE)]
        rates = [[rate * self._random.gauss(1.0, 0.003) for rate in (2.0, 2.0, 1.0, 1.0)] for _ in range(3)]
        collectives = [(kind, size, collective_s(kind, size, links)) for kind, size in told]
        return replace(
            found, exchanged=TimedExchanges.model_validate({"host_rates": rates, "collectives": collectives})
        )


@pytest.mark.slow
def test_hosts_behind_slower_links_are_found_by_what_passes_between_them_and_planned_for(tmp_path: Path) -> None:
    track = SlowLinkTrack()

    found, record = race_on(tmp_path, FOUR_HOSTS, track, NETWORK)

    assert [each.host for each in found.slow_links] == [2, 3]
    assert found.slow == ()
    fast, slow = found.plan.cluster.kinds
    assert fast.between_hosts.bandwidth == pytest.approx(2 * slow.between_hosts.bandwidth, rel=0.01)
    assert found.factors["network bandwidth"] == pytest.approx(0.1, rel=0.05)
    errors = [abs(each.fitted_s / each.measured.step_time_s - 1) for each in found.standings if each.measured]  # type: ignore[operator]
    assert max(errors) < 0.02
    best = search(PROFILE, track._cluster, TRAINING, time_limit_s=5.0)  # with its hosts in the order that the job has
    assert track.true_s(found.plan) <= 1.02 * track.true_s(best.plan)
    assert sum(line.startswith("bytes to and from host") for line in sentences(found)) == 2
    assert [each["host"] for each in tuned_document(found, [])["slow_links"]] == [2, 3]
    again = load_record(record.path)
    assert [lap.exchanged for lap in again.laps()[found.label]] == [lap.exchanged for lap in record.laps()[found.label]]


@pytest.mark.slow
def test_a_plan_for_slower_hosts_is_priced_as_if_they_were_not() -> None:
    known = slower_cluster(TWO_HOSTS, [SlowHost(1, (2, 3), SLOW, SLOW, SLOW, True)])
    plan = search(PROFILE, known, TRAINING, pins=Pins(pipeline=2), time_limit_s=5.0).plan

    found = on_cluster(plan, TWO_HOSTS, PROFILE)[1]

    assert found.step_time_s == estimate(plan.model_copy(update={"cluster": TWO_HOSTS}), PROFILE).step_time_s
    assert found.step_time_s < on_cluster(plan, known, PROFILE)[1].step_time_s


@pytest.mark.slow
def test_a_plan_that_takes_hosts_in_another_order_does_not_race() -> None:
    known = slower_cluster(TWO_HOSTS, [SlowHost(1, (2, 3), SLOW, SLOW, SLOW, True)])
    plan = search(PROFILE, known, TRAINING, time_limit_s=5.0).plan
    turned_round = plan.model_copy(update={"cluster": known.ordered_by(known.first_hosts[::-1])})
    pool = Pool(PROFILE, Pins())

    for each in (turned_round, plan):
        pool.add(each, "the search")

    assert [each.plan.cluster.first_hosts for each in pool.priced(known)] == [known.first_hosts]
    pool.add(on_cluster(plan, TWO_HOSTS, PROFILE)[0], "the search")
    assert len(pool.priced(known)) == 1, "it is the same plan where hosts are not known to be slower"


class CrookedTrack(HiddenTrack):
    """No constants say that pipelines take longer than the model has them, and others less."""

    def _runs_s(self, plan: Plan, more: Sequence[str]) -> float:
        return self.true_s(plan) * (1.06 if plan.degrees.pipeline > 1 else 0.97)


@pytest.mark.slow
def test_newcomers_may_be_as_much_slower_as_constants_miss(
    tmp_path: Path, chosen: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def noted(found: Sequence[Entrant], seen: Collection[str], limit_s: float) -> list[Entrant]:
        limits.append(limit_s)
        return challengers(found, seen, limit_s)

    monkeypatch.setattr(rounds, "challengers", noted)

    found, _ = race(tmp_path, chosen, CrookedTrack(PROFILE, CLUSTER, TRUTH))

    ran = [(each.fitted_s, each.measured.step_time_s) for each in found.standings if each.measured]
    missed = missed_by(fitted / measured for fitted, measured in ran)
    fitted_s, leader_s = min(ran, key=lambda pair: pair[1])
    assert missed > 0.01
    assert limits[-1] == pytest.approx(to_beat_s(leader_s, fitted_s, missed) * (1 - rounds.WORTH), rel=1e-3)
    assert limits[-1] > leader_s


@pytest.mark.slow
def test_what_was_measured_outlives_ctrl_c_and_is_gone_on_with(tmp_path: Path, chosen: SearchResult) -> None:
    first, _ = race(tmp_path, chosen, HiddenTrack(PROFILE, CLUSTER, TRUTH, stops_after=5))
    with (tmp_path / "plan.tune.jsonl").open("a") as file:
        file.write('{"event": "lap", "lab')  # what a killed process leaves

    track = HiddenTrack(PROFILE, CLUSTER, TRUTH)
    found, record = race(tmp_path, chosen, track, resume=True)

    assert first.interrupted
    assert len([each for each in first.standings if each.measured]) == 5
    assert found.agreed
    laps = [line for line in load_record(record.path).lines if isinstance(line, LapLine)]
    assert len(laps) == 5 + len(track.laps)
    assert [lap.at_s for lap in laps] == sorted(lap.at_s for lap in laps)


@pytest.mark.slow
def test_candidates_that_fall_end_alone_with_their_cause(tmp_path: Path, chosen: SearchResult) -> None:
    falls = {"TP": Fallen("hang", "rank 1 of 2 hangs"), "FSDP": Fallen("memory", "OutOfMemoryError: no")}

    found, record = race(tmp_path, chosen, HiddenTrack(PROFILE, CLUSTER, TRUTH, falls))

    assert {line.cause for line in record.falls().values()} == {"hang", "memory"}
    assert found.plan.measured is not None
    assert all(each.measured is None for each in found.standings if "TP" in each.label or "FSDP" in each.label)
    smallest = min(line.predicted_bytes for line in record.falls().values() if line.cause == "memory")
    biggest = max(max(e.plan.prediction.stage_memory_bytes) for e in found.standings if e.measured)  # type: ignore[union-attr]
    assert found.device.memory < CLUSTER.device.memory or smallest <= biggest


def test_no_candidate_that_runs_leaves_the_predicted_plan_and_the_causes(tmp_path: Path, chosen: SearchResult) -> None:
    found, record = race(tmp_path, chosen, HiddenTrack(PROFILE, CLUSTER, {}, {"": Fallen("crash", "ValueError: no")}))

    assert found.plan == chosen.plan
    assert found.reason == "no candidate could be measured"
    assert set(record.falls()) == set(record.entrants())
    assert "ValueError: no" in tune_page(found, record)


def test_a_record_on_a_full_disk_loses_its_lines_and_not_the_race(tmp_path: Path, chosen: SearchResult) -> None:
    header = header_of("net", PROFILE.fingerprint, chosen.plan, CLUSTER, None)
    record = Record(Path("/dev/full"), header)
    job = Job(PROFILE, CLUSTER, TRAINING, search_s=2.0, knobs=tuple(TRUTH))

    track = HiddenTrack(PROFILE, CLUSTER, TRUTH, stops_after=4)
    found = Tuning(job, track, record, lambda line: None).run(chosen)

    assert found.plan.measured is not None
    assert "the record lacks its last lines: No space left on device" in found.reason
    assert {each.outcome for each in found.standings if each.measured is None} == {"not measured before the race ended"}
    assert all("measured" in each.detail for each in found.plan.alternatives if each.outcome == "faster")


def test_the_leader_is_who_beats_each_leader_before_over_common_turns() -> None:
    medians = {"a": {1: 1.0, 2: 1.0}, "b": {1: 0.9, 2: 0.9, 3: 2.0}, "c": {3: 1.9}}

    assert leader_of(medians) == "c"
    assert leader_of({"a": {1: 1.0}, "z": {2: 0.1}}) == "a"
    assert leader_of({}) is None


def test_who_is_slower_beyond_the_noise_is_out_and_who_is_near_runs_again() -> None:
    medians = {
        "leader": {1: 1.0, 2: 1.01, 3: 0.99},
        "slower": {1: 1.05, 2: 1.06, 3: 1.04},
        "near": {1: 0.97, 2: 1.02, 3: 1.01},
    }

    assert list(out_after(medians, {}, list(medians))) == ["slower"]
    one_turn = {label: {1: times[1]} for label, times in medians.items()} | {"far": {1: 2.0}}
    steps = {label: list(times.values()) for label, times in one_turn.items()}
    assert list(out_after(one_turn, steps, list(one_turn))) == ["far"]


def test_noise_of_all_pairs_is_pooled_and_a_noisier_pair_keeps_its_own() -> None:
    steady = {turn: 1.0 + 0.001 * (-1) ** turn for turn in (1, 2, 3, 4)}
    medians = {
        "leader": dict.fromkeys((1, 2, 3, 4), 1.0),
        "steady": steady,
        "noisy": {turn: 1.0 + 0.2 * (-1) ** turn for turn in (1, 2, 3, 4)},
    }

    found = paired(medians, "leader")

    assert found["noisy"].high - found["noisy"].low > found["steady"].high - found["steady"].low
    assert found["steady"].tie
    assert paired({"leader": {1: 1.0}, "other": {1: 2.0}}, "leader")["other"].low == 0.0


def test_words_claim_no_more_than_the_interval_holds() -> None:
    found = [in_words(Apart("a", "b", 1.2, low, 1.5)) for low in (1.01, 0.995, 0.9, 0.0)]

    assert [words.partition("): ")[2] for words in found] == ["", "at most 1% faster", "not told apart", ""]
    assert found[3] == "1.20x b"


def test_laps_are_two_to_twenty_steps() -> None:
    assert [lap_steps(step_s, 2.0) for step_s in (0.001, 0.5, 60.0)] == [20, 4, 2]


def test_candidates_are_those_whose_bands_overlap_and_one_of_each_family_comes_first(chosen: SearchResult) -> None:
    pool = Pool(PROFILE, Pins())
    pool.add_result(chosen)
    found = pool.priced(CLUSTER)

    near = could_be_best(found)

    assert near[0] == found[0]
    assert all(each.predicted_s * 0.74 <= found[0].predicted_s * 1.35 for each in near)
    far = Entrant("far", "the search", found[0].plan, 10 * found[0].predicted_s)
    named = Entrant("named", "--setup", found[0].plan, 10 * found[0].predicted_s)
    assert [each.label for each in could_be_best([found[0], far, named], 1)] == [found[0].label, "named"]


def test_no_rule_of_thumb_races_that_breaks_a_pin(chosen: SearchResult) -> None:
    degree = chosen.plan.degrees.data_shard
    pool = Pool(PROFILE, Pins(data_shard=degree))
    pool.add_result(chosen)

    assert any(each.plan is not None and each.plan.degrees.data_shard != degree for each in chosen.alternatives)
    assert {each.plan.degrees.data_shard for each in pool.priced(CLUSTER) if each.by.startswith("rule")} <= {degree}


def test_rules_of_thumb_that_break_a_way_of_reducing_gradients_do_not_race() -> None:
    """With several micro-batches gradients may be reduced in each of them, or once."""
    training = TRAINING.model_copy(update={"global_batch": 8 * TRAINING.global_batch})
    found = search(PROFILE, CLUSTER, training, pins=Pins(gradient_sync="every"), time_limit_s=5.0)
    shards = next(each for each in found.baselines if each.plan is not None and each.plan.degrees.data_shard > 1)
    assert shards.plan is not None
    micro_batch = training.global_batch // shards.plan.degrees.data_shard // 2
    update = {"gradient_sync": "last", "micro_batch": micro_batch, "num_microbatches": 2}
    result = replace(found, alternatives=(replace(shards, plan=shards.plan.model_copy(update=update)),))
    free, pool = Pool(PROFILE, Pins()), Pool(PROFILE, Pins(gradient_sync="every"))

    for each in (free, pool):
        each.add_result(result)

    assert [len([e for e in each.priced(CLUSTER) if e.by.startswith("rule")]) for each in (free, pool)] == [1, 0]


def test_who_teaches_the_fit_is_what_the_others_leave_open(chosen: SearchResult) -> None:
    pool = Pool(PROFILE, Pins())
    pool.add_result(chosen)
    found = pool.priced(CLUSTER)

    first = teachers(found, found[:1], CLUSTER, PROFILE)

    assert 1 <= len(first) <= TEACHERS
    assert found[0].label not in {each.label for each in first}
    assert teachers(found, found, CLUSTER, PROFILE) == []
    assert teachers(found, found[:1], CLUSTER, PROFILE, knobs=()) == []  # nothing is open where nothing may be off


@pytest.mark.slow
def test_what_was_asked_for_leaves_nothing_open(chosen: SearchResult) -> None:
    pool = Pool(PROFILE, Pins())
    pool.add_result(chosen)
    first, *others = [each.plan for each in pool.priced(CLUSTER)]

    asked = most_open(CLUSTER.device, PROFILE, [first], others, 9, noise=0.02)

    assert 1 < len(asked) <= len(others)
    known = [first, *(others[i] for i in asked)]
    assert most_open(CLUSTER.device, PROFILE, known, others, 9, noise=0.02) == []
    assert most_open(CLUSTER.device, PROFILE, [first], others, 1, noise=0.02) == asked[:1]
    twins = [others[asked[0]]] * 2
    assert len(most_open(CLUSTER.device, PROFILE, [first], twins, 9, noise=0.02)) == 1
    assert most_open(CLUSTER.device, PROFILE, [first], others, 9, names=(), noise=0.02) == []


def test_a_leader_that_is_predicted_too_slow_lets_in_plans_that_share_that_error_up_to_a_limit() -> None:
    assert to_beat_s(1.0, 0.9, 0.0) == 1.0
    assert to_beat_s(1.0, 1.05, 0.0) == 1.05
    assert to_beat_s(1.0, 2.0, 0.0) == pytest.approx(1.09)


def test_what_constants_miss_steps_by_lets_in_plans_as_much_slower_up_to_a_limit() -> None:
    assert missed_by([1.0, 1.0]) == 0.0
    assert missed_by([1.03, 1 / 1.03]) == pytest.approx(math.log(1.03))
    assert to_beat_s(1.0, 1.01, 0.03) == 1.03
    assert to_beat_s(1.0, 1.05, 0.03) == 1.05
    assert to_beat_s(1.0, 1.0, 0.5) == pytest.approx(1.09)


RAISED = 'Traceback (most recent call last):\n  File "m.py", line 1\nValueError: the model says no\n'
ENDED = "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 7)\n"
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"


@pytest.mark.parametrize(
    ("output", "cause", "words"),
    [
        (
            RAISED + "\nmeshwright: rank 1 of 2 failed in step 1: ValueError: the model says no\n",
            "crash",
            "rank 1 of 2",
        ),
        (RAISED + ELASTIC, "crash", "ValueError: the model says no"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\n", "memory", "allocate"),
        ("torch.OutOfMemoryError: out of memory on rank 3\n" + ELASTIC, "memory", "rank 3"),
        ("\nmeshwright: rank 0 of 2 hangs: for 61 s in step 3, at m.py:3; the others wait\n", "hang", "m.py:3"),
        ("\nmeshwright: rank 1 of 2 gave no sign of life any more in step 2: it was killed\n", "killed", "rank 1"),
        ("\nmeshwright: rank 1 of 2 has died in step 2: process 71 ended without a word\n", "killed", "rank 1"),
        (ELASTIC + ENDED.format(0, -15) + ENDED.format(1, -9), "killed", "rank 1 was killed by signal 9"),
        ("", "crash", "exit status 7 without a word"),
    ],
)
def test_causes_are_read_from_what_a_job_said(output: str, cause: str, words: str) -> None:
    found = cause_of(output, 7)

    assert found.cause == cause
    assert words in found.message


def test_a_job_that_never_began_is_the_launchers_fault() -> None:
    assert cause_of("srun: error: no such partition\n", 1, False) == Fallen(
        "launch", "the launcher did not start its ranks: srun: error: no such partition"
    )


def test_a_launchers_template_takes_the_program_as_words_or_inside_of_one() -> None:
    assert filled(read_launcher(f"{sys.executable} {{args}}", 2), ["-m", "a b"]) == [sys.executable, "-m", "a b"]
    assert filled(["bash", "-c", "torchrun {args}"], ["-m", "a b"])[-1] == "torchrun -m 'a b'"
    assert "--nproc-per-node" in read_launcher(None, 2)


def test_ending_a_job_ends_what_it_began_however_it_hides(tmp_path: Path) -> None:
    hides = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ntime.sleep(60)\n"
    job = LaunchedJob([sys.executable, "-c", hides], tmp_path / "log")
    entry = f"MESHWRIGHT_TUNE={job._token}"
    until(lambda: len(processes_with(entry)) == 2)

    job.end(grace_s=0.2)

    until(lambda: processes_with(entry) == [])


def test_the_least_budget_that_is_named_is_enough(chosen: SearchResult) -> None:
    with pytest.raises(ValueError, match="too short") as refused:
        check_budget(5.0, chosen.plan)

    check_budget(read_budget(str(refused.value).split("give at least ")[1].split(",")[0]), chosen.plan)


def test_a_budget_is_read_with_its_unit() -> None:
    assert [read_budget(text) for text in ("90s", "10m", "1.5h", "30")] == [90.0, 600.0, 5400.0, 30.0]
    for text in ("", "ten", "-1m", "0s", "10 parsecs"):
        with pytest.raises(ValueError, match="give a time, as in 90s, 10m or 1h"):
            read_budget(text)


def seen(count: int, ranks: int = 2, **changes: Any) -> list[dict[str, Any]]:
    one = {"ranks": ranks, "host": "a", "plan": "p", "model": "m", "meshwright": "w"}
    return [{**one, "rank": rank} for rank in range(count - 1)] + [{**one, "rank": count - 1, **changes}]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (seen(1, ranks=1), "know of no others"),
        (seen(4, ranks=4), "starts 4 ranks, 4 of which answered, and 2 are announced: give --gpus 4"),
        (seen(1), "starts 2 ranks, 1 of which answered"),
        (seen(2, plan="other"), "ranks 0 and 1 see different files for the plan's file"),
        (seen(2, model="other"), "ranks 0 and 1 see different files for the model's file"),
        (seen(2, meshwright="other"), "see different files for the code of meshwright"),
        (seen(2, plan="", host="b"), "rank 1 on b does not see the plan's file"),
    ],
)
def test_a_cluster_that_is_not_the_announced_one_is_refused(found: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cluster(found, cluster_of(load_device("cpu"), 2))


def test_ranks_on_fewer_hosts_than_announced_are_said() -> None:
    two_hosts: ClusterSpec = cluster_of(load_device("cpu"), 2, 1)

    assert check_cluster(seen(2), two_hosts) == ["the ranks are on 1 host, the cluster has 2"]
    assert check_cluster(seen(2, host="b"), two_hosts) == []


FAULTS = """
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        if not x.is_meta and type(x) is torch.Tensor and os.environ.get("RANK") == "1":
            if x.shape[0] == 1:
                torch.empty(2**50)
            if x.shape[0] == 2:
                time.sleep(3600)
            if x.shape[0] == 4:
                raise KeyError("no such token")
            if x.shape[0] == 8:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)

def model():
    return Net()

def batch(size):
    return torch.randn(size, 64), torch.randn(size, 64)

def loss(output, batch):
    return (output - batch[1]).square().mean()

global_batch = 32
"""


TWO = ["--gpus", "2", "--device", "cpu"]


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("profile.json", ["--budget", "soon"], "give a time, as in 90s, 10m or 1h"),
        ("profile.json", ["--gpus", "17", "--device", "cpu"], "more than 16"),
        ("profile.json", ["--gpus", "2", "--device", "h100-80gb"], "this machine has 0 GPUs: run this on one"),
        ("profile.json", [*TWO, "-o", "none/plan.json"], "none does not exist"),
        ("profile.json", [*TWO, "--report", "tune.pdf"], "ends in .html"),
        ("profile.json", ["--gpus", "2", "--device", "device.toml"], "would be written over"),
        ("profile.json", TWO, "is only its profile: give the model itself"),
        ("net.py", [*TWO, "--budget", "5s"], "--budget 5s is too short for one candidate: its ranks take some 15 s"),
        ("net.py", [*TWO, "--launcher", "torchrun"], "has no {args}, which the program of each rank takes the place"),
        ("net.py", [*TWO, "--launcher", "no-such-launcher {args}"], "there is no command no-such-launcher here"),
        ("net.py", [*TWO, "--launcher", "srun 'half {args}"], "cannot be read: No closing quotation"),
    ],
)
def test_bad_input_is_refused_before_anything_is_launched_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    flags: list[str],
    message: str,
) -> None:
    if model == "profile.json":
        save_profile(tmp_path)
    else:
        (tmp_path / model).write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.executor.tuning.sitting.local_gpus", list)
    monkeypatch.setattr("subprocess.Popen", None)

    assert run_plan("tune", model, "--time-limit", "2", *flags) == 2

    assert message in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} <= {model, "__pycache__"}


def processes_of(model: Path) -> list[str]:
    """Command lines of ranks of a model that are still there."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(model) in words and "tuning.rank" in words:
            found.append(words)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_jobs_that_fall_in_every_way_end_alone_and_leave_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FAULTS)
    setups = [word for size in (1, 2, 4, 8, 16) for word in ("--setup", f"ddp mb={size}")]
    few = ["--pin", "pipeline=1", "--pin", "tensor=1", "--pin", "micro_batch=16", "--timeout", "20"]

    assert run_plan("tune", "net.py", "--gpus", "2", "--device", "cpu", "--budget", "2m", *setups, *few) == 0

    falls = {fall.label.rpartition("=")[2]: fall for fall in load_record(tmp_path / "plan.tune.jsonl").falls().values()}
    assert {size: fall.cause for size, fall in falls.items()} == {
        "1": "memory",
        "2": "hang",
        "4": "crash",
        "8": "killed",
    }
    assert "rank 1 of 2" in falls["2"].message
    assert "no such token" in falls["4"].message
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["micro_batch"] == 16
    assert plan["measured"]["turns"] >= 1
    assert (tmp_path / "device.toml").exists()
    assert "killed" in (tmp_path / "tune.html").read_text()
    assert processes_of(tmp_path / "net.py") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("false {args}", "did not start a rank"),
        (f"{sys.executable} {{args}}", "processes that know of no others"),
        (
            f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 4 {{args}}",
            "starts 4 ranks, 4 of which answered, and 2 are announced",
        ),
    ],
)
def test_a_launcher_that_starts_another_cluster_is_refused_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FAULTS)

    words = ["--gpus", "2", "--device", "cpu", "--budget", "2m", "--launcher", launcher]
    assert run_plan("tune", "net.py", *words) == 2

    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "plan.json").exists()
    assert not (tmp_path / "plan.tune.jsonl").exists()
    assert processes_of(tmp_path / "net.py") == []


@pytest.mark.slow
def test_ranks_that_see_different_files_are_refused_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FAULTS)
    (tmp_path / "other.py").write_text(FAULTS + "# of another host\n")
    (tmp_path / "two.sh").write_text(
        f'RANK=0 WORLD_SIZE=2 {sys.executable} "$@" &\n'
        f'RANK=1 WORLD_SIZE=2 {sys.executable} "${{@/net.py/other.py}}" &\nwait\n'
    )

    words = ["--gpus", "2", "--device", "cpu", "--budget", "5m", "--launcher", "bash two.sh {args}"]
    assert run_plan("tune", "net.py", *words) == 2

    assert "ranks 0 and 1 see different files for the model's file" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "plan.json").exists()
    assert not (tmp_path / "plan.tune.jsonl").exists()
    assert processes_of(tmp_path / "net.py") == []


@pytest.mark.slow
def test_a_launchers_own_job_for_every_lap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FAULTS)
    launcher = f"bash -c '{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {{args}}'"
    few = ["--pin", "pipeline=1", "--pin", "tensor=1", "--pin", "micro_batch=16"]

    words = ["--gpus", "2", "--device", "cpu", "--budget", "1m", "--launcher", launcher, *few]
    assert run_plan("tune", "net.py", *words) == 0

    laps = [line for line in load_record(tmp_path / "plan.tune.jsonl").lines if isinstance(line, LapLine)]
    assert all(lap.started_s > 0 for lap in laps)
    for lap in laps:
        assert lap.exchanged is not None
        assert len(lap.exchanged.collectives) == 6
        assert lap.exchanged.host_rates == ()
        assert len(lap.rank_compute_s) == 2
        assert 0 < min(lap.rank_compute_s) <= max(lap.steps_s)
    assert len(laps) >= 2  # at least one of each plan; a slow machine may need no second turn to part them
