"""plan tune of jobs that are larger than what is there: candidates cut down to a few hosts, or one rank at a time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.executor.reporting.tune_page import tune_page
from meshwright.executor.reporting.tune_report import sentences, tuned_document
from meshwright.executor.tuning import rounds
from meshwright.executor.tuning.cut_down import CannotCutError, SmallerJob, cut_down, fewer_hosts, unseen
from meshwright.executor.tuning.fewer_layers import without_blocks
from meshwright.executor.tuning.jobs import Fallen, Lap
from meshwright.executor.tuning.outcome import Tuned
from meshwright.executor.tuning.record import Record, StandInLine, load_record
from meshwright.executor.tuning.rounds import Job
from meshwright.executor.tuning.sitting import Venue, header_of, open_record, running_hosts
from meshwright.executor.tuning.small import SmallTuning, ranks_alone
from meshwright.planner.answers.search import SearchResult, price_setup, search
from meshwright.planner.cost.alone import kernels_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import turned_hosts
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from support.cli import run_plan
from support.synthetic import layer_class, profile
from support.tracks import HELD_BESIDE, HiddenTrack

NUM_BLOCKS = 8


@cache
def model_of(blocks: int) -> ModelProfile:
    """An embedding, blocks of a list, a head; with a fingerprint of its own for each depth."""
    ends = layer_class("ends", 2e7, 500_000, saved=1e5, inputs=1e5)
    block = layer_class("block", 1e8, 4_000_000, saved=1e6, inputs=1e5, heads=8, transient=1e5)
    made = profile([ends, block], [0, *[1] * blocks, 0], crossing=1e5)
    names = ["embedding", *(f"blocks.{i}" for i in range(blocks)), "head"]
    layers = tuple(
        layer.model_copy(update={"name": name, "root": name, "modules": (name,), "parameters": (f"{name}.weight",)})
        for name, layer in zip(names, made.layers, strict=True)
    )
    return made.model_copy(update={"layers": layers, "fingerprint": f"{blocks:064d}"})


WHOLE = model_of(NUM_BLOCKS)
CLUSTER = cluster_of(load_device("cpu"), 8, 1)
SMALL = fewer_hosts(CLUSTER, 2)
TRAINING = TrainingSpec(global_batch=64, seq_len=64, precision="fp32")
PINS = Pins(tensor=1)
TRUTH = {"network bandwidth": 0.15, "matmul": 0.7}
"""The network has a seventh of the announced rate, and matmuls are slower: another plan is the best."""


def without(blocks: tuple[str, ...]) -> ModelProfile:
    return model_of(NUM_BLOCKS - len(blocks))


def plan_of(words: str) -> Plan:
    found = price_setup(parse_setup(words, 8, 1), WHOLE, CLUSTER, TRAINING)
    assert found.plan is not None, found.verdict
    return found.plan


def cut(words: str, hosts: int = 2) -> SmallerJob:
    return cut_down(plan_of(words), WHOLE, fewer_hosts(CLUSTER, hosts), without)


def work_of(plan: Plan, model: ModelProfile, position: int) -> float:
    """Seconds of kernels of one micro-batch at a pipeline coordinate, without the optimizer."""
    found = estimate(plan, model)
    return (kernels_s(plan, model, found, position) - found.breakdown["optimizer"]) / plan.num_microbatches


def test_fewer_replicas_take_fewer_samples_and_nothing_else_changes() -> None:
    whole, small = plan_of("ddp"), cut("ddp")

    assert small.plan.degrees.data_replicate == 2
    assert small.plan.training.global_batch == TRAINING.global_batch // 4
    assert small.without == ()
    assert work_of(small.plan, small.profile, 0) == pytest.approx(work_of(whole, WHOLE, 0))
    assert small.plan.prediction is not None


def test_a_shorter_pipeline_has_the_first_and_the_last_stage_with_their_work() -> None:
    words = "pp=8 schedule=1f1b mb=8"
    whole, small = plan_of(words), cut(words)

    held = [[layer.name for layer in stage.layers] for stage in whole.stages]
    assert small.plan.degrees.pipeline == 2
    assert [len(stage.layers) for stage in small.plan.stages] == [len(held[0]), len(held[-1])]
    assert set(small.without) == {name for own in held[1:-1] for name in own}
    for here, there in ((0, 0), (1, 7)):
        assert work_of(small.plan, small.profile, here) == pytest.approx(work_of(whole, WHOLE, there))


def test_micro_batches_keep_their_size_and_are_a_few_for_each_stage() -> None:
    whole, small = plan_of("pp=8 schedule=1f1b mb=1"), cut("pp=8 schedule=1f1b mb=1")

    assert whole.num_microbatches == 64
    assert (small.plan.micro_batch, small.plan.num_microbatches) == (1, 8)


def test_a_pipeline_stays_one_and_the_rest_is_cut_first() -> None:
    assert cut("pp=2 schedule=1f1b").plan.degrees.data == 1
    four = cut("pp=2 schedule=1f1b", 4).plan.degrees
    assert (four.pipeline, four.data) == (2, 2)
    sharded = cut("hsdp:4", 4).plan.degrees
    assert sharded.data_shard > 1
    assert sharded.data_replicate > 1


def test_blocks_are_halved_where_fewer_ranks_could_not_hold_the_model() -> None:
    tight = load_device("cpu").model_copy(update={"memory": 700e6})
    cluster = cluster_of(tight, 8, 1)
    found = price_setup(parse_setup("fsdp mb=1", 8, 1), WHOLE, cluster, TRAINING)
    assert found.plan is not None

    small = cut_down(found.plan, WHOLE, fewer_hosts(cluster, 2), without)

    assert 0 < len(small.without) < NUM_BLOCKS
    assert estimate(small.plan, small.profile).fits


@pytest.mark.parametrize(
    ("words", "message"),
    [("tp=8", "splits every layer over 8 tensor ranks, which 2 ranks cannot do")],
)
def test_what_cannot_be_cut_down_says_why(words: str, message: str) -> None:
    wide = cluster_of(load_device("cpu"), 8, 8)
    found = price_setup(parse_setup(words, 8, 8), WHOLE, wide, TRAINING)
    assert found.plan is not None

    with pytest.raises(CannotCutError, match=message):
        cut_down(found.plan.model_copy(update={"cluster": CLUSTER}), WHOLE, SMALL, without)


def test_a_pipeline_of_layers_that_cannot_be_left_out_says_so() -> None:
    layers = tuple(layer.model_copy(update={"root": ""}) for layer in WHOLE.layers)
    fixed = WHOLE.model_copy(update={"layers": layers})

    with pytest.raises(CannotCutError, match="none of its layers can be left out"):
        cut_down(plan_of("pp=8 schedule=1f1b"), fixed, SMALL, without)


def test_another_model_is_no_cut_one() -> None:
    with pytest.raises(CannotCutError, match="without the other blocks the model has 10 layers, not 4"):
        cut_down(plan_of("pp=8 schedule=1f1b"), WHOLE, SMALL, lambda blocks: WHOLE)


@pytest.mark.parametrize(
    ("hosts", "gpus", "message"),
    [
        (8, 8, "give fewer, from 1 to 7"),
        (0, 8, "give fewer, from 1 to 7"),
        (1, 1, "the job is for 1 host"),
    ],
)
def test_as_many_hosts_as_the_job_has_are_no_fewer(hosts: int, gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fewer_hosts(cluster_of(load_device("cpu"), gpus, 1), hosts)


def test_one_way_to_be_small_is_enough() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        running_hosts(Venue(Path("plan.json"), hosts=2, one_gpu=True), CLUSTER)


def test_what_a_smaller_job_does_not_show_is_named_with_its_seconds() -> None:
    whole = plan_of("pp=2 schedule=1f1b zero=1")
    found = estimate(whole, WHOLE)

    terms = unseen(whole, found, cut("pp=2 schedule=1f1b zero=1").plan)

    assert [each.term for each in terms] == ["communication of 4 shards (none of 4 ran)"]
    assert terms[0].seconds == pytest.approx(found.breakdown["data"])
    alone = unseen(whole, found, None)
    assert {each.term for each in alone} == {
        "communication of 4 shards (none of 4 ran)",
        "the fill and transfers of 2 pipeline stages' ranks (none of 2 ran)",
    }


class SmallTrack(HiddenTrack):
    """Smaller jobs, or ranks alone, take what they would on the hidden device."""

    def _runs_s(self, plan: Plan, more: Sequence[str]) -> float:
        model = model_of(len(plan.model.layer_modules) - 2)
        moved = plan.model_copy(update={"cluster": turned_hosts(plan.cluster, TRUTH)})
        found = estimate(moved, model)
        if "--alone" not in more:
            return found.step_time_s
        return kernels_s(moved, model, found, plan.coordinates(int(more[-1]))["pipeline"])


@pytest.fixture(scope="module")
def chosen() -> SearchResult:
    return search(WHOLE, CLUSTER, TRAINING, pins=PINS, time_limit_s=5.0)


def tuned(
    folder: Path, chosen: SearchResult, hosts: int, track: SmallTrack, resume: bool = False
) -> tuple[Tuned, Record]:
    place = Venue(folder / "plan.json", resume=resume)
    record = open_record(place, header_of("net", WHOLE.fingerprint, chosen.plan, CLUSTER, None, hosts))
    given = tuple((words, plan_of(words)) for words in ("hsdp:2 mb=4", "hsdp:4 mb=4"))
    job = Job(WHOLE, CLUSTER, TRAINING, PINS, given, search_s=2.0, knobs=tuple(TRUTH) if hosts else ("matmul",))
    return SmallTuning(job, track, record, lambda line: None, SMALL if hosts else None, without).run(chosen), record


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, chosen: SearchResult) -> tuple[Tuned, Record, SmallTrack]:
    """Eight hosts, tuned with two of them."""
    track = SmallTrack(WHOLE, CLUSTER, TRUTH)
    return *tuned(tmp_path_factory.mktemp("two"), chosen, 2, track), track


@pytest.mark.slow
def test_two_hosts_tell_the_best_plan_of_eight(on_two: tuple[Tuned, Record, SmallTrack], chosen: SearchResult) -> None:
    found, _, track = on_two

    best = search(WHOLE, track._cluster, TRAINING, pins=PINS, time_limit_s=5.0)
    assert track.true_s(chosen.plan) > 1.02 * best.estimate.step_time_s, "or the prediction alone would have done"
    assert found.agreed, found.reason
    assert track.true_s(found.plan) <= 1.02 * best.certificate.fastest_s
    assert found.plan.measured is None, "what ran was another job"
    first = found.standings[0]
    assert first.fitted_s == pytest.approx(track.true_s(found.plan), rel=0.02)
    assert {one.plan.degrees.num_devices for each in found.standings for one in each.stand_ins} == {2}


@pytest.mark.slow
def test_terms_that_were_not_seen_are_said_everywhere(on_two: tuple[Tuned, Record, SmallTrack]) -> None:
    found, record, _ = on_two

    assert all(any("ran)" in term.term for term in each.unseen) for each in found.standings if each.stand_ins)
    told = " ".join(sentences(found))
    assert "not seen so, and therefore still predicted" in told
    assert found.standings[0].unseen[0].term in told
    assert "Not seen so small" in tune_page(found, record)
    assert tuned_document(found, [])["candidates"][0]["still_predicted"]


@pytest.mark.slow
def test_memory_of_smaller_jobs_is_within_3_percent_after_the_fit(on_two: tuple[Tuned, Record, SmallTrack]) -> None:
    found, record, _ = on_two

    assert found.memory
    assert all(each.measured_bytes - each.predicted_bytes == pytest.approx(HELD_BESIDE) for each in found.memory)
    close = [abs(each.fitted_bytes / each.measured_bytes - 1) < 0.03 for each in found.memory]
    assert sum(close) >= 0.95 * len(close)
    assert found.device.context > CLUSTER.device.context + HELD_BESIDE / 2
    assert "Peak memory" in tune_page(found, record)


class GpuTrack(SmallTrack):
    """Ranks on GPUs that hand out what is predicted; their allocators hold twice as much."""

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        found = super().lap(label, plan, steps, limit_s, more)
        assert isinstance(found, Lap)
        model = model_of(len(plan.model.layer_modules) - 2)
        stages = [memory.allocated_bytes for memory in estimate(plan, model).memory]
        sizes = [int(stages[plan.coordinates(rank)["pipeline"]]) for rank in range(plan.degrees.num_devices)]
        held = tuple(2 * size for size in sizes)
        return replace(found, peak_memory_bytes=tuple(sizes), memory_kind="allocated", peak_reserved_bytes=held)


@pytest.mark.slow
@pytest.mark.parametrize(("full", "kinds"), [(1.0, {"allocated"}), (0.0, {"allocated", "reserved"})])
def test_what_an_allocator_keeps_tells_nothing_while_there_is_memory_to_spare(
    full: float,
    kinds: set[str],
    chosen: SearchResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "FULL", full)

    found, _ = tuned(tmp_path, chosen, 2, GpuTrack(WHOLE, CLUSTER, TRUTH))

    assert {each.kind for each in found.memory} == kinds
    assert (found.device.fragmentation == CLUSTER.device.fragmentation) == (kinds == {"allocated"})
    told = next(line for line in sentences(found) if "memory of" in line)
    assert ("off by 0.0% in the median and 0.0% at worst, " in told) == (kinds == {"allocated"})


@pytest.mark.slow
def test_plans_that_are_cut_down_to_one_job_share_its_laps(on_two: tuple[Tuned, Record, SmallTrack]) -> None:
    record = on_two[1]

    lines = [line for line in record.lines if isinstance(line, StandInLine)]
    jobs = {line.plan.model_copy(update={"prediction": None}).model_dump_json() for line in lines}
    assert len(record.laps()) == len(record.stand_ins()) == len(jobs) < len(lines)
    assert {line.of for line in lines} == set(record.entrants())


@pytest.mark.slow
def test_a_rank_of_each_stage_alone_fits_compute_and_leaves_communication_predicted(
    tmp_path: Path, chosen: SearchResult
) -> None:
    found, record = tuned(tmp_path, chosen, 0, SmallTrack(WHOLE, CLUSTER, TRUTH))

    assert found.agreed
    assert found.factors["matmul"] == pytest.approx(TRUTH["matmul"], rel=0.05)
    assert found.device.network == CLUSTER.network
    for each in found.standings:
        positions = {one.plan.coordinates(one.rank)["pipeline"] for one in each.stand_ins if one.rank is not None}
        assert positions == set(ranks_alone(each.plan))
        assert all("none of" in term.term for term in each.unseen)
    assert record.laps()


def test_equal_stages_in_the_middle_run_once() -> None:
    plan = plan_of("pp=8 schedule=gpipe mb=1")
    layers = [len(stage.layers) for stage in plan.stages]

    assert len(ranks_alone(plan)) == 2 + len({layers[i] for i in range(1, 7)})


@pytest.mark.slow
def test_what_was_measured_small_is_gone_on_with_and_only_so(tmp_path: Path, chosen: SearchResult) -> None:
    tuned(tmp_path, chosen, 2, SmallTrack(WHOLE, CLUSTER, TRUTH, stops_after=4))
    track = SmallTrack(WHOLE, CLUSTER, TRUTH)

    found, record = tuned(tmp_path, chosen, 2, track, resume=True)

    assert found.agreed
    laps = load_record(record.path).laps()
    assert sum(map(len, laps.values())) == 4 + len(track.laps)
    assert {len(own) for own in laps.values()} == {3}
    with pytest.raises(ValueError, match=r"it ran on 2 of them \(--hosts 2\), this one is to run on one GPU"):
        tuned(tmp_path, chosen, 0, track, resume=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner["blocks"]:  # type: ignore[attr-defined]
            x = torch.relu(block(x))
        return self.head(x)


def test_a_model_without_blocks_runs_the_others_in_their_order() -> None:
    loaded = load_model(
        Net, batch=lambda size: (torch.randn(size, 4), torch.randn(size, 2)), loss=nn.functional.mse_loss
    )
    torch.manual_seed(0)
    whole = loaded.build()
    torch.manual_seed(0)
    less = without_blocks(loaded, ("inner.blocks.1", "inner.blocks.2")).build()

    x, blocks = torch.randn(3, 4), whole.inner["blocks"]  # type: ignore[index]
    assert torch.equal(less(x), whole.head(torch.relu(blocks[3](torch.relu(blocks[0](x))))))  # type: ignore[operator]
    assert [name for name, _ in less.named_modules() if name.startswith("inner.blocks.")] == [
        "inner.blocks.0",
        "inner.blocks.1",
    ]
    with pytest.raises(ValueError, match="head is in a Net, of which nothing can be left out"):
        without_blocks(loaded, ("head",)).build()


NET = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(64, 8)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    return Net()

def batch(size):
    return torch.randn(size, 64), torch.randint(8, (size,))

def loss(output, batch):
    return F.cross_entropy(output, batch[1])

global_batch = 64
"""


@pytest.mark.slow
def test_a_job_that_cannot_be_cut_down_is_refused_before_anything_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.setattr("meshwright.executor.tuning.jobs.LaunchedJob", None)
    eight = ["--gpus", "8", "--gpus-per-node", "1", "--device", "cpu", "--pin", "tensor=8"]

    assert run_plan("tune", "net.py", *eight, "--hosts", "2") == 2

    told = " ".join(capsys.readouterr().err.split())
    assert "splits every layer over 8 tensor ranks, which 2 ranks cannot do" in told
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("plan")] == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--hosts", "2"], ["--one-gpu"]])
def test_eight_cpu_ranks_are_tuned_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    eight = ["--gpus", "8", "--gpus-per-node", "1", "--device", "cpu", "--time-limit", "5"]
    given = ["--setup", "ddp", "--setup", "pp=4 schedule=1f1b mb=2"]

    assert run_plan("tune", "net.py", *eight, *how, *given, "--budget", "30s", "--json") == 0

    told = json.loads(capsys.readouterr().out)
    record = load_record(tmp_path / "plan.tune.jsonl")
    ran = [one for each in told["candidates"] for one in each["stand_ins"] if one["measured"]]
    assert ran
    assert all(one["measured"]["step_time_s"] > 0 for one in ran)
    ranks = {len(lap.peak_memory_bytes) for laps in record.laps().values() for lap in laps}
    assert ranks == ({2} if "--hosts" in how else {1})
    if "--hosts" in how:
        assert any(line.without for line in record.stand_ins().values())
    assert told["memory"]
    assert told["plan"]["cluster"]["hosts"][0]["count"] == 8
    assert (tmp_path / "tune.html").exists()
    assert (tmp_path / "device.toml").exists()
