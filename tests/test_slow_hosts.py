"""Hosts that a run's telemetry shows as slow, and what plan replan --run plans because of them."""

import html
import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.executor.measuring.replanning import replanning
from meshwright.executor.measuring.slow_hosts import HostSpeeds, SlowHost, host_speeds, slow_in_laps, slower_cluster
from meshwright.executor.measuring.slower_cluster import ways_on, without_slow
from meshwright.executor.reporting.run_report import run_table
from meshwright.executor.reporting.switching import Switching
from meshwright.executor.run_document import RunRestart, RunStep
from meshwright.executor.state.checkpoint_folder import Progress
from meshwright.planner.answers.search import InfeasibleError, SearchResult, search
from meshwright.planner.cost.alone import kernels_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import slower
from meshwright.planner.plan.document import Plan, load_plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from support.cli import run_plan, save_profile, small_profile, some_plan
from support.runs import header_of, write_lines
from support.synthetic import device, mixed

PROFILE = small_profile()
REPLICAS = some_plan(replicate=2, shard=2, per_host=2)
PIPELINE = some_plan(pipeline=2, replicate=2, per_host=2, micro_batches=8)
ONE_HOST = some_plan(replicate=4, per_host=4)
THIRD = 1.5
"""Times as long, of a host that is slower by a third."""


def computed(
    plan: Plan, by_rank: Mapping[int, float], steps: int = 30, noise: float = 0.0, off: float = 1.0
) -> list[list[float]]:
    """[step][rank] -> what a rank computes: as predicted times `off`, times its own factor."""
    found, draw = estimate(plan, PROFILE), random.Random(7)
    own = [
        off * by_rank.get(rank, 1.0) * kernels_s(plan, PROFILE, found, plan.coordinates(rank)["pipeline"])
        for rank in range(plan.degrees.num_devices)
    ]
    return [[seconds * draw.lognormvariate(0.0, noise) for seconds in own] for _ in range(steps)]


def write_run(path: Path, plan: Plan, rows: list[list[float]], step_s: float = 2.0, header: Plan | None = None) -> Path:
    """A run whose ranks compute these seconds, after two steps to warm up."""
    steps = [
        RunStep(
            step=number,
            loss=1.0,
            grad_norm=1.0,
            step_time_s=step_s,
            between_s=0.0,
            tokens_per_s=1.0,
            mfu=None,
            peak_memory_bytes=(1,) * plan.degrees.num_devices,
            communication_s={},
            rank_compute_s=tuple(row),
        )
        for number, row in enumerate([[9.0] * plan.degrees.num_devices] * 2 + rows, 1)
    ]
    return write_lines(path, header_of(header or plan), *steps)


def speeds_of(folder: Path, plan: Plan, rows: list[list[float]]) -> HostSpeeds:
    return host_speeds(plan, PROFILE, write_run(folder / "run.jsonl", plan, rows))


@pytest.mark.parametrize(("plan", "beside"), [(REPLICAS, True), (PIPELINE, False)], ids=["replicas", "pipeline"])
def test_a_host_that_is_slower_by_a_third_is_found_in_noise(tmp_path: Path, plan: Plan, beside: bool) -> None:
    found = speeds_of(tmp_path, plan, computed(plan, {2: THIRD, 3: THIRD}, noise=0.03))

    (host,) = found.slow
    assert (host.host, host.ranks, host.beside) == (1, (2, 3), beside)
    assert host.ratio == pytest.approx(THIRD, rel=0.03)
    assert 1.4 < host.low < host.ratio < host.high < 1.6
    assert f"host 1 (ranks 2, 3) computes {host.ratio:.2f} times as long" in str(found)


@pytest.mark.parametrize("plan", [REPLICAS, PIPELINE, ONE_HOST], ids=["replicas", "pipeline", "one host"])
def test_noise_of_three_percent_makes_no_host_slow(tmp_path: Path, plan: Plan) -> None:
    found = speeds_of(tmp_path, plan, computed(plan, {}, noise=0.03))

    assert found.slow == ()
    assert found.most < 1.03


def test_one_slow_step_makes_no_host_slow_and_hides_none(tmp_path: Path) -> None:
    even, slow = computed(REPLICAS, {}), computed(REPLICAS, {0: THIRD, 1: THIRD})
    even[5] = [seconds * (10 if rank > 1 else 1) for rank, seconds in enumerate(even[5])]
    slow[5] = [seconds * (10 if rank > 1 else 1) for rank, seconds in enumerate(slow[5])]

    assert speeds_of(tmp_path, REPLICAS, even).slow == ()
    assert [host.host for host in speeds_of(tmp_path, REPLICAS, slow).slow] == [0]


def test_what_slows_all_hosts_in_the_same_steps_cancels(tmp_path: Path) -> None:
    rows = computed(REPLICAS, {2: THIRD, 3: THIRD})
    rows = [[seconds * (1 + step % 7) for seconds in row] for step, row in enumerate(rows)]

    (host,) = speeds_of(tmp_path, REPLICAS, rows).slow

    assert host.low == pytest.approx(THIRD) == host.high


def test_other_layers_are_compared_more_widely_than_the_same_ones(tmp_path: Path) -> None:
    slightly = {2: 1.08, 3: 1.08}

    assert speeds_of(tmp_path, REPLICAS, computed(REPLICAS, slightly)).slow
    assert not speeds_of(tmp_path, PIPELINE, computed(PIPELINE, slightly)).slow


def test_hosts_that_all_are_slow_are_said_to_be_alike(tmp_path: Path) -> None:
    found = speeds_of(tmp_path, REPLICAS, computed(REPLICAS, {}, off=1.4))

    assert found.slow == ()
    assert "no host computes slower than the others in 30 steps" in str(found)
    assert "all compute 1.40 times as long as predicted" in str(found)


def test_two_of_four_hosts_are_both_found_and_one_device_slows_its_host(tmp_path: Path) -> None:
    plan = some_plan(replicate=4, shard=2, per_host=2)

    found = speeds_of(tmp_path, plan, computed(plan, {2: 1.5, 3: 1.5, 7: 1.3}))

    assert [(host.host, host.ranks) for host in found.slow] == [(1, (2, 3)), (3, (7,))]
    assert [host.ratio for host in found.slow] == pytest.approx([1.5, 1.3])


@pytest.mark.parametrize("plan", [REPLICAS, PIPELINE], ids=["replicas", "pipeline"])
def test_a_host_that_is_planned_as_slow_is_not_found_again(tmp_path: Path, plan: Plan) -> None:
    by_rank = {2: THIRD, 3: THIRD}
    known = slower_cluster(plan.cluster, [SlowHost(1, (2, 3), THIRD, 1.4, 1.6, True)])

    found = speeds_of(tmp_path, plan.model_copy(update={"cluster": known}), computed(plan, by_rank, noise=0.03))

    assert found.slow == ()
    assert found.over_predicted == pytest.approx(1.0, rel=0.01)


def test_a_slow_device_of_the_only_host_is_told_from_the_others(tmp_path: Path) -> None:
    found = speeds_of(tmp_path, ONE_HOST, computed(ONE_HOST, {2: THIRD}))

    assert [(host.host, host.ranks) for host in found.slow] == [(0, (2,))]
    rest = without_slow(ONE_HOST.cluster, found.slow)
    assert rest is not None
    assert rest.num_devices == 3


def test_a_slower_device_takes_so_much_longer_for_every_kernel() -> None:
    measured = load_device("cpu").model_copy(update={"kernel_efficiency": {"adamw": 0.3}})
    for each in (load_device("cpu"), load_device("h100-80gb"), measured):
        plan = PIPELINE.model_copy(update={"cluster": cluster_of(each, 4, 2)})
        found = plan.cluster.device
        moved = plan.model_copy(
            update={"cluster": plan.cluster.changed(dict.fromkeys((0, 1), slower(found, THIRD, "by a test")))}
        )

        before, after = (kernels_s(each, PROFILE, estimate(each, PROFILE), 0) for each in (plan, moved))

        assert after == pytest.approx(THIRD * before, rel=1e-6)
        assert "1.50 times slower, by a test" in moved.cluster.device.sources["matmul_efficiency"]


def test_hosts_keep_their_numbers_and_those_of_one_speed_are_one_kind() -> None:
    cluster = mixed((3, 2, device(name="a")), (1, 2, device(name="b"))).in_order((1, 0))
    slow = [SlowHost(1, (4, 5), 1.5, 1.4, 1.6, True), SlowHost(2, (6, 7), 1.52, 1.4, 1.6, True)]

    now = slower_cluster(cluster, slow)

    assert [(group.first, group.count, group.device.name) for group in now.hosts] == [
        (3, 1, "b"),
        (0, 1, "a"),
        (1, 2, "a"),
    ]
    assert [now.host_of(rank) for rank in range(8)] == [cluster.host_of(rank) for rank in range(8)]
    assert now.device.matmul_efficiency == pytest.approx(1 / 1.51)
    left = without_slow(cluster, slow)
    assert left is not None
    assert [(group.first, group.count, group.device.name) for group in left.hosts] == [
        (None, 1, "a"),
        (None, 1, "b"),
    ]


def test_ranks_that_wait_for_the_slow_host_are_priced_as_it_is() -> None:
    slow = slower_cluster(REPLICAS.cluster, [SlowHost(1, (2, 3), THIRD, 1.4, 1.6, True)])
    on_slow = REPLICAS.model_copy(update={"cluster": slow})

    all_slow = REPLICAS.cluster.changed(dict.fromkeys((0, 1), slow.device))

    expected = estimate(REPLICAS.model_copy(update={"cluster": all_slow}), PROFILE).step_time_s
    assert estimate(on_slow, PROFILE).step_time_s == pytest.approx(expected)
    assert expected > 1.2 * estimate(REPLICAS, PROFILE).step_time_s


def checkpoint_of(folder: Path, plan: Plan) -> Path:
    saved = folder / "run" / "step-00000020"
    saved.mkdir(parents=True)
    plan.save(saved / "plan.json")
    (saved / "state.json").write_text(Progress(steps=20).model_dump_json())
    (saved / "__0_0.distcp").write_bytes(bytes(1_000_000))
    return folder / "run"


def replan(folder: Path, *more: str) -> int:
    words = ["replan", "--checkpoint", str(folder / "run"), "--run", str(folder / "run.jsonl")]
    return run_plan(*words, "--model", str(save_profile(folder)), "-o", str(folder / "new.json"), *more)


@pytest.mark.slow
def test_a_pipeline_moves_layers_away_from_a_slow_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = some_plan(pipeline=2, replicate=2, per_host=2, micro_batches=24)  # layers that no host keeps waiting
    checkpoint_of(tmp_path, busy)
    write_run(tmp_path / "run.jsonl", busy, computed(busy, {2: THIRD, 3: THIRD}))

    assert replan(tmp_path, "--pin", "pipeline=2", "--pin", "schedule=1f1b", "--time-limit", "10") == 0

    after = load_plan(tmp_path / "new.json")
    slow_stage = next(s for s in (0, 1) if after.cluster.host_of(s * after.stride("pipeline"))[0] == 1)
    blocks = [sum(layer.layer_class == "block" for layer in stage.layers) for stage in after.stages]
    assert blocks[slow_stage] < blocks[1 - slow_stage]
    shown = " ".join(capsys.readouterr().out.split())
    assert "host 1 (ranks 2, 3) computes 1.50 times as long as the others (1.50 to 1.50 at 95%" in shown
    assert "as it is DDP 2 + PP 2 (GPipe) 4 2.00 s" in shown
    assert re.search(r"with host 1 .*?PP 2 \(1F1B\) 4 \d+ ms \d+ steps without host 1 PP 2 \(1F1B\) 2 \d+ ms", shown)
    assert re.search(r"; it pays after \d+ steps: \d+ ms a step beside 2.00 s measured before", shown)
    assert "start the hosts in the same order as before" in shown
    assert "6 layers in 1 stage on h100-80gb of host 0" in shown


def test_the_ways_to_go_on_are_told_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_of(tmp_path, REPLICAS)
    write_run(tmp_path / "run.jsonl", REPLICAS, computed(REPLICAS, {2: 9.0, 3: 9.0}), step_s=3.0)

    assert replan(tmp_path, "--pin", "pipeline=1", "--json", "--time-limit", "10") == 0

    told = json.loads(capsys.readouterr().out)
    stay, slowed, without = told["ways"]
    assert told["slow_hosts"][0]["host"] == 1
    assert (stay["layout"], stay["step_s"], stay["pays"]) == (REPLICAS.label, 3.0, "")
    assert slowed["step_s"] == pytest.approx(3.0 * slowed["predicted_s"] / stay["predicted_s"])
    assert without["num_devices"] == 2
    assert without["step_s"] < min(stay["step_s"], slowed["step_s"])
    assert load_plan(tmp_path / "new.json").degrees.num_devices == 2  # all would wait for it
    assert told["switching"]["pays"] == without["pays"]


def report(folder: Path, plan: Plan, *more: str) -> int:
    plan.save(folder / "plan.json")
    words = ["report", str(folder / "plan.json"), "--model", str(save_profile(folder))]
    return run_plan(*words, "--run", str(folder / "run.jsonl"), "-o", str(folder / "report.html"), *more)


@pytest.mark.slow
def test_the_report_of_a_run_tells_of_a_slow_host_as_replan_does_and_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run.jsonl", PIPELINE, computed(PIPELINE, {2: THIRD, 3: THIRD}))
    finding = str(host_speeds(PIPELINE, PROFILE, run))

    assert report(tmp_path, PIPELINE) == 0

    page = re.search(r'<section id="run">.*?</section>', (tmp_path / "report.html").read_text(), re.DOTALL)
    assert page is not None
    for shown in (capsys.readouterr().out, page.group()):
        words = " ".join(re.sub(r"<[^>]*>", " ", html.unescape(shown)).split())
        assert "host 1 (ranks 2, 3) computes 1.50 times as long as the others" in words
        assert finding in words
        assert re.search(r"with host 1 by .*? on 4 GPUs: it would bring [\d.]+ m?s a step: ", words)
        assert re.search(r"without host 1 by .*? on 2 GPUs: it ", words)
        assert "`plan replan --checkpoint DIR --run run.jsonl`, DIR being the run's folder, searches for both" in words


@pytest.mark.slow
def test_a_run_that_was_resumed_says_after_how_many_steps_a_plan_around_the_slow_host_pays(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.jsonl", PIPELINE, computed(PIPELINE, {2: THIRD, 3: THIRD}))
    restart = RunRestart(steps=0, num_ranks=4, start_s=31.0, load_s=12.5, loaded_bytes=10**9)
    first, *steps = run.read_text().splitlines()
    run.write_text("\n".join([first, restart.model_dump_json(), *steps]) + "\n")

    _, with_it, _, cost, _ = replanning(PIPELINE, PROFILE, run)

    assert re.search(r"with host 1 by .* on 4 GPUs: it pays after \d+ steps: ", with_it)
    assert cost.startswith("switching costs about 43.5 s")


@pytest.mark.slow
def test_a_report_says_that_hosts_are_alike_or_why_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows, words in (
        (computed(REPLICAS, {}), "no host computes slower than the others in 30 steps"),
        ([[]] * 30, "slow hosts are not looked for: "),
    ):
        write_run(tmp_path / "run.jsonl", REPLICAS, rows)

        assert report(tmp_path, REPLICAS, "--json") == 0

        notes = json.loads(capsys.readouterr().out)["run"]["notes"]
        assert any(words in note for note in notes)
        assert not any("plan replan --checkpoint" in note for note in notes)


def test_steps_of_another_plan_before_a_restart_are_left_out_of_the_report(tmp_path: Path) -> None:
    larger = some_plan(replicate=4, shard=2, per_host=2)
    run = write_run(tmp_path / "run.jsonl", larger, computed(larger, {}), step_s=9.0)
    then = write_run(tmp_path / "then.jsonl", REPLICAS, computed(REPLICAS, {}), step_s=2.0)
    header, *steps = then.read_text().splitlines()
    later = [json.loads(line) | {"step": 100 + number} for number, line in enumerate(steps)]
    run.write_text(run.read_text() + "\n".join([header, *map(json.dumps, later)]) + "\n")

    rows = {row[0]: row for row in run_table(REPLICAS, run).rows}

    assert rows["step time, ms"][2] == "2,000.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by_rank": {}}, "no host computes slower than the others in 30 steps: the slowest takes 1.00 times as long"),
        ({"by_rank": {}, "off": 2.0}, "all compute 2.00 times as long as predicted"),
        ({"by_rank": {2: THIRD}, "steps": 6}, "2 to warm up and at least 8 more tell a slow one of 4 ranks from noise"),
    ],
)
def test_without_a_slow_host_it_is_said_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    checkpoint_of(tmp_path, REPLICAS)
    write_run(tmp_path / "run.jsonl", REPLICAS, computed(REPLICAS, **changes))  # type: ignore[arg-type]

    assert replan(tmp_path) == 2

    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new.json").exists()


def test_a_run_of_another_plan_or_without_what_ranks_compute_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_of(tmp_path, PIPELINE)
    sizes = [len(stage.layers) for stage in PIPELINE.stages]
    shape = Shape(2, 1, 1, 2, 1, 8, schedule="gpipe", mesh_axes=PIPELINE.mesh_axes)
    training = TrainingSpec(global_batch=16, seq_len=PROFILE.seq_len)
    cut = [[LayerOption()] * (sizes[0] + 1), [LayerOption()] * (sizes[1] - 1)]
    other_cut = make_plan(PROFILE, PIPELINE.cluster, training, shape, cut)
    runs = {
        "is a run of synthetic by": write_run(tmp_path / "a", REPLICAS, computed(REPLICAS, {})),
        "but with other layers on its ranks": write_run(
            tmp_path / "b", PIPELINE, computed(PIPELINE, {}), header=other_cut
        ),
        "does not say what each rank computes": write_run(tmp_path / "c", PIPELINE, [[]] * 30),
        "has 0 steps since the run began or was resumed": write_run(tmp_path / "d", PIPELINE, []),
    }
    header = (tmp_path / "d").read_text().splitlines()[0]
    (tmp_path / "d").write_text((tmp_path / "c").read_text() + header + "\n")

    for message, run in runs.items():
        run.rename(tmp_path / "run.jsonl")
        assert replan(tmp_path) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new.json").exists()


def test_only_steps_since_the_last_start_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.jsonl", PIPELINE, computed(PIPELINE, {2: THIRD, 3: THIRD}))
    again = write_run(tmp_path / "again.jsonl", REPLICAS, computed(REPLICAS, {0: THIRD, 1: THIRD}))
    run.write_text(run.read_text() + again.read_text())

    assert [host.host for host in host_speeds(REPLICAS, PROFILE, run).slow] == [0]
    assert replace(host_speeds(REPLICAS, PROFILE, run), slow=()).steps == 30


def test_a_search_that_ends_early_leaves_the_plan_as_it_is_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    speeds = speeds_of(tmp_path, PIPELINE, computed(PIPELINE, {2: THIRD, 3: THIRD}))
    cost = Switching(1.0, 1.0, 0, None, "assumed")

    def searched(cluster: ClusterSpec) -> SearchResult:
        if cluster.num_hosts == 1:
            raise InfeasibleError("does not fit by 6.3 GiB")
        poor = Pins(tensor=4, micro_batch=1)
        return search(PROFILE, cluster, PIPELINE.training, pins=poor, time_limit_s=5.0)

    ways = ways_on(PIPELINE, PROFILE, speeds, cost, searched, may_stay=True)
    kept_to = ways_on(PIPELINE, PROFILE, speeds, cost, searched, may_stay=False)

    assert ways.best.plan.stages == PIPELINE.stages
    assert ways.chosen.pays.startswith("it does not pay: 2.00 s a step, within 2% of the plan as it is")
    assert kept_to.best.plan.degrees.tensor == 4
    assert kept_to.chosen.pays_after is None
    assert kept_to.chosen.pays.startswith("it does not pay: 7.")
    assert ways.rows[2].step_s is None
    assert ways.rows[2].pays == "does not fit by 6.3 GiB"


@pytest.mark.parametrize(("laps", "hosts"), [(1, []), (3, [1])])
def test_a_slow_host_shows_in_few_laps_but_not_in_one(laps: int, hosts: list[int]) -> None:
    taken = [(1.0 + 0.001 * lap, 1.0, 1.5, 1.5 + 0.002 * lap) for lap in range(laps)]

    assert [each.host for each in slow_in_laps([(REPLICAS, taken)])] == hosts
    assert slow_in_laps([(REPLICAS, [tuple(sorted(lap)) for lap in taken[:1]])]) == ()


def test_one_host_is_beside_no_other() -> None:
    alone = REPLICAS.model_copy(update={"cluster": cluster_of(REPLICAS.cluster.device, 4, 4)})

    assert slow_in_laps([(alone, [(1.0, 1.0, 1.5, 1.5)] * 5)]) == ()


def test_laps_that_do_not_tell_what_ranks_compute_show_nothing() -> None:
    assert slow_in_laps([(REPLICAS, [(), ()])]) == ()
    assert slow_in_laps([]) == ()
