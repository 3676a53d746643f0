"""The report of a plan: its facts agree with the estimate, and its page is whole, self-contained and fits its frame."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshwright.executor.measuring.compare import Comparison, compare, read_setups, save_picture
from meshwright.executor.reporting.choice_charts import loss_bars
from meshwright.executor.reporting.chrome_trace import trace_events
from meshwright.executor.reporting.drawing import nice_step, stage_colour, table, tag, ticks
from meshwright.executor.reporting.glossary import terms_in
from meshwright.executor.reporting.html_report import report_page
from meshwright.executor.reporting.plan_diff import Cost, PlanDifference, difference
from meshwright.executor.reporting.report import axis_rows, certificate_line
from meshwright.executor.reporting.report_facts import Facts, front, gather, host_patterns, played
from meshwright.executor.reporting.sweep_report import _free
from meshwright.executor.reporting.terminal import make_console, print_difference
from meshwright.executor.run_document import RunHeader, RunStep
from meshwright.planner.answers.search import price_setup
from meshwright.planner.answers.sensitivity import scaled, sensitivity
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.exchange.export import export
from meshwright.planner.exchange.targets import NAMES
from meshwright.planner.plan.document import AXES, Alternative, Axis, Certificate, Plan, placements
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.setups import parse_setup, setup_words
from meshwright.planner.plan.shape import Shape
from meshwright.profiler.machine.units import GIB, format_seconds
from support.cli import run_plan, save_profile, small_profile, some_plan
from support.exported import MIXTURE, planned
from support.interpreter import modules_after

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
STAGES_INSIDE: tuple[Axis, ...] = ("data_replicate", "data_shard", "pipeline", "context", "tensor")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return some_plan(shard=2, tensor=2, pipeline=4, micro_batches=6)


@pytest.fixture(scope="module")
def facts(plan: Plan) -> Facts:
    return gather(plan, small_profile(), seconds=1.0)


@pytest.fixture(scope="module")
def page(facts: Facts) -> str:
    return report_page(facts, "plan.json", ["a <note> & more"])


@pytest.fixture(scope="module")
def large_page() -> str:
    large = some_plan(replicate=128, shard=2, tensor=8, pipeline=8, micro_batches=64)
    return report_page(gather(large, small_profile(), seconds=0.0), "plan.json")


class _Elements(HTMLParser):
    """Every element with its attributes, and those that were never closed."""

    VOID = ("meta", "link", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, attribute: str) -> list[str]:
        return [
            value for _, attributes in self.found for name, value in attributes.items() if name == attribute and value
        ]


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def picture(page: str, name: str) -> ElementTree.Element:
    return next(svg for svg in pictures(page) if svg.get("aria-labelledby") == f"{name}-t {name}-d")


def test_every_element_is_closed_and_every_reference_leads_somewhere(page: str) -> None:
    elements = _Elements(page)

    ids = elements.of("id")
    assert elements.open == []
    assert len(ids) == len(set(ids))
    assert {name for words in elements.of("aria-labelledby") for name in words.split()} <= set(ids)
    assert {href.removeprefix("#") for href in elements.of("href")} <= set(ids)


def test_what_a_screen_reader_hears_of_one_gpu_is_in_the_singular() -> None:
    alone = report_page(gather(some_plan(micro_batches=1), small_profile(), seconds=0.0), "plan.json")

    told = "; ".join(mark.text or "" for svg in pictures(alone) for mark in svg.iter(f"{SVG}desc"))

    assert "10 layers on 1 stage" in told
    assert "1 kind of hosts" in told
    assert "rank 0: " in told
    assert "of 1 micro-batch on 1 pipeline rank" in told
    assert not re.findall(r"\b1 [a-z-]+s\b", told)


def test_the_page_asks_the_network_for_nothing(page: str) -> None:
    elements = _Elements(page)

    assert not elements.of("src")
    assert all(href.startswith("#") for href in elements.of("href"))
    assert "url(http" not in page
    assert "@import" not in page
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_the_page_draws_the_graph_of_the_model_and_what_each_cut_carries(plan: Plan, page: str) -> None:
    words = [mark.text or "" for mark in picture(page, "graph").iter(f"{SVG}text")]

    assert [line for line in words if "block" in line] == ["block", "3 × block", "2 × block", "2 × block"]
    assert sum(line.startswith("cut: 9.54 MiB") for line in words) == len(plan.stages) - 1  # 1e7 bytes
    assert "<td>after stages 0–2, each</td>" in page


def test_every_picture_says_in_words_what_it_shows(page: str) -> None:
    found = pictures(page)

    assert len(found) >= 7
    for svg in found:
        title, description = list(svg)[:2]
        assert svg.get("role") == "img"
        assert title.text
        assert description.text


def test_what_others_wrote_is_escaped(page: str) -> None:
    assert "a &lt;note&gt; &amp; more" in page
    assert tag("b", title='"<x>') == '<b title="&quot;&lt;x&gt;"></b>'


def test_every_target_is_shown_with_its_settings_or_its_refusal(plan: Plan, page: str) -> None:
    with pytest.raises(ValueError, match="no single row of numbered blocks") as refusal:
        export(plan, "megatron")

    assert escape(f"{refusal.value}.") in page
    assert escape(export(plan, "torchtitan").text.rstrip()) in page
    assert all(f"<summary>{name}: " in page for name in NAMES.values())


def test_context_and_expert_ranks_are_shown_on_their_gpus() -> None:
    shape = Shape(1, 2, 2, 1, 1, 4, True, context=2, expert=4)
    spread = planned(shape, model=MIXTURE)
    page = report_page(gather(spread, MIXTURE, seconds=0.0), "plan.json")
    boxes = [mark.get("data-t") or "" for mark in picture(page, "hosts").iter(f"{SVG}rect")]

    assert [row.first_group for row in axis_rows(spread) if row.axis == "expert"] == ["0-3"]
    assert "rank 6|data shard 1, context 1, tensor 0, experts: part 3 of 4" in boxes[7]
    assert "TP 0 · CP 1 · EP 2" in page
    assert "CP 2 (ring) + EP 4" in page


def test_16384_gpus_stay_a_small_page(large_page: str) -> None:
    assert len(large_page) < 600_000
    assert "16,384" in large_page
    assert len(_Elements(large_page).found) < 6000


@pytest.mark.parametrize("layout", [{"tensor": 4, "pipeline": 4}, {"pipeline": 2, "shard": 32}, {"shard": 8}])
@pytest.mark.parametrize("axes", [AXES, STAGES_INSIDE])
def test_hosts_are_joined_as_ranks_are_placed(layout: dict[str, int], axes: tuple[Axis, ...]) -> None:
    plan = some_plan(**layout, mesh_axes=axes)

    by_host = {host: pattern.positions for pattern in host_patterns(plan) for host in pattern.hosts}

    assert sorted(by_host) == list(range(plan.cluster.num_hosts))
    for place in placements(plan):
        assert by_host[place.host][place.device] == place.coordinates["pipeline"]


def test_memory_bars_are_as_long_as_the_estimate_says(facts: Facts, page: str) -> None:
    bars = [r for r in picture(page, "memory").iter() if "stage" in r.get("data-t", "") and r.tag.endswith("rect")]
    longest = facts.estimate.peak_device_bytes

    rows: dict[str | None, float] = {}
    for bar in bars:
        rows[bar.get("y")] = rows.get(bar.get("y"), 0.0) + float(bar.get("width", 0))

    device = facts.plan.cluster.device.memory
    per_byte = (1000 - 112 - 130) / max(device, longest)
    assert max(rows.values()) == pytest.approx(longest * per_byte, abs=1.5)


def test_the_timeline_is_the_whole_step_and_no_rank_does_two_things_at_once(facts: Facts) -> None:
    step = facts.played

    assert step.num_microbatches == facts.plan.num_microbatches
    assert step.seconds == pytest.approx(facts.estimate.step_time_s)
    for rank in range(facts.plan.degrees.pipeline):
        own = sorted((e.start_s, e.end_s) for e in step.events if e.rank == rank)
        assert len(own) == 2 * facts.plan.num_microbatches
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(own))


def test_a_long_step_is_cut_in_whole_rounds_and_the_page_says_so() -> None:
    plan = some_plan(pipeline=4, micro_batches=256)
    found = gather(plan, small_profile(), seconds=0.0)

    assert found.played.num_microbatches < 256
    assert found.played.num_microbatches % 4 == 0
    assert f"{found.played.num_microbatches} of its 256 micro-batches are drawn" in report_page(found, "plan.json")


def test_the_causes_of_a_pass_add_up_to_it(facts: Facts) -> None:
    for event in facts.played.events:
        causes = facts.played.causes[event.rank][event.action.kind]
        assert sum(causes.values()) == pytest.approx(event.end_s - event.start_s)


def test_the_waterfall_ends_at_the_step(facts: Facts, page: str) -> None:
    shares = re.findall(r"data-t=\"[^\"]*\|[^\"]*, (-?[\d.]+)% of the step\"", page)

    assert sum(float(share) for share in shares[:-1]) == pytest.approx(100, abs=0.5)
    assert shares[-1] == "100.0"


def test_alternatives_are_other_layouts_that_fit_or_say_why_not(facts: Facts) -> None:
    listed = (*facts.alternatives, *facts.others)
    labels = [candidate.label for candidate in listed]

    assert {"DDP", "FSDP", "naive model parallel"} <= set(labels)
    assert len(labels) > 8
    for candidate in listed:
        assert (candidate.estimate is None) == str(candidate.verdict).startswith(("does not fit", "not legal"))
        assert candidate.estimate is None or candidate.estimate.fits


def test_the_front_is_what_nothing_beats_in_both() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 2.5), (3.0, 0.9), (4.0, 0.95)]

    found = {points[i] for i in front(points)}

    assert found == {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}


def test_slower_hardware_never_makes_a_step_shorter(facts: Facts) -> None:
    assert {shift.name for shift in facts.shifts} >= {"compute", "device memory", "links in a host", "network"}
    for shift in facts.shifts:
        worse, better = (shift.higher_s, shift.lower_s) if "latency" in shift.name else (shift.lower_s, shift.higher_s)
        assert worse >= facts.estimate.step_time_s >= better


def test_a_number_that_changes_nothing_has_no_sign(page: str) -> None:
    assert not re.findall(r"[-+−]0\.0%", page)
    assert ", 0%" in page


def test_one_host_has_no_network_to_hang_on() -> None:
    plan = some_plan(shard=8)

    assert "network" not in {
        shift.name for shift in sensitivity(plan, estimate(plan, small_profile()), small_profile())
    }


def test_numbers_of_unequal_hosts_are_told_from_the_least_to_the_most() -> None:
    plan = some_plan(shard=16)
    (group,) = plan.cluster.hosts
    slow = group.device.model_copy(update={"bandwidth": group.device.bandwidth / 2})
    halves = (group.model_copy(update={"count": 1}), group.model_copy(update={"count": 1, "device": slow}))
    on = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"hosts": halves})})

    values = {shift.name: shift.value for shift in sensitivity(on, estimate(on, small_profile()), small_profile())}

    fast, near, far = group.device.bandwidth / 1e9, group.link.latency, plan.cluster.network.latency
    assert values["device memory"] == f"{fast / 2:,.0f} GB/s to {fast:,.0f} GB/s"
    assert values["latency of links"] == f"{format_seconds(near)} to {format_seconds(far)}"


def test_scaling_changes_the_one_number_everywhere() -> None:
    cluster = some_plan(shard=16).cluster

    faster = scaled(cluster, "compute", 1.2)

    assert faster.device.flops["bf16"] == pytest.approx(1.2 * cluster.device.flops["bf16"])
    assert faster.model_dump(exclude={"hosts"}) == cluster.model_dump(exclude={"hosts"})
    assert scaled(cluster, "network", 0.8).network.bandwidth == pytest.approx(0.8 * cluster.network.bandwidth)
    assert scaled(cluster, "links in a host", 0.8).link.bandwidth == pytest.approx(0.8 * cluster.link.bandwidth)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_in_light_and_dark() -> None:
    style = (ROOT / "executor" / "reporting" / "html_report.css").read_text()
    white = "#ffffff"

    themes = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root[^{]*\{([^}]*)\}", style)]

    assert len(themes) == 2
    for theme in themes:
        full = {name: white if colour == "#fff" else colour for name, colour in theme.items()}
        for name in ("ink", "ink2", "accent", "good", "bad"):
            assert min(contrast(full[name], full[behind]) for behind in ("page", "panel", "soft")) >= 4.5
        for name in ("blue", "violet", "orange", "gold", "cyan", "rose", "slate", "green"):
            assert contrast(full[name], white) >= 4.5
    assert min(contrast(stage_colour(stage, 16), white) for stage in range(16)) >= 4.5


@pytest.mark.parametrize(("largest", "expected"), [(1.0, 0.2), (79.0, 20.0), (0.03, 0.01), (999.0, 200.0)])
def test_ticks_are_round_and_cover(largest: float, expected: float) -> None:
    assert nice_step(largest) == pytest.approx(expected)
    assert ticks(largest)[-1] >= largest - 1e-9


def slices(events: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, int], list[tuple[float, float]]]]:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return iter((track, sorted(times)) for track, times in tracks.items())


def test_a_trace_plays_the_step_on_every_rank(plan: Plan, facts: Facts) -> None:
    events = json.loads(json.dumps(trace_events(plan, small_profile())))

    assert max(end for _, times in slices(events) for _, end in times) == pytest.approx(
        1e6 * facts.estimate.step_time_s
    )
    assert {track[0] for track, _ in slices(events)} == set(range(4))
    for _, times in slices(events):
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(times))


def test_the_arrows_of_a_trace_join_neighbours_and_never_go_back_in_time(plan: Plan) -> None:
    arrows: dict[int, dict[str, dict[str, Any]]] = {}
    for event in trace_events(plan, small_profile()):
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event

    assert len(arrows) == 2 * 3 * plan.num_microbatches
    for ends in arrows.values():
        assert abs(ends["s"]["pid"] - ends["f"]["pid"]) == 1
        assert ends["s"]["ts"] <= ends["f"]["ts"]


def test_the_counter_of_a_trace_reaches_the_estimated_activations_and_falls_to_none(plan: Plan, facts: Facts) -> None:
    counters: dict[int, list[float]] = {}
    for event in trace_events(plan, small_profile()):
        if event["ph"] == "C":
            counters.setdefault(event["pid"], []).append(event["args"]["GiB"])

    for rank, values in counters.items():
        assert max(values) == pytest.approx(facts.estimate.memory[rank].items["activations"] / GIB, abs=2e-3)
        assert values[-1] == 0


def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    found = estimate(plan, small_profile())

    same = difference(plan, plan, (found, found))

    assert same.changes == ()
    assert all(cost.first == cost.second for cost in (*same.times, *same.sizes))


def test_every_decision_of_a_plan_shows_when_it_differs(plan: Plan) -> None:
    def with_layers(**changes: object) -> Plan:
        stages = [
            s.model_copy(update={"layers": tuple(x.model_copy(update=changes) for x in s.layers)}) for s in plan.stages
        ]
        return plan.model_copy(update={"stages": tuple(stages)})

    first, second, *others = plan.stages
    moved = (
        first.model_copy(update={"layers": first.layers[:-1]}),
        second.model_copy(update={"layers": (first.layers[-1], *second.layers)}),
    )
    variants = {
        "layers of each stage": plan.model_copy(update={"stages": (*moved, *others)}),
        "recompute full": with_layers(recompute="full"),
        "parameters given back": with_layers(reshard=True),
        "schedule": plan.model_copy(update={"schedule": "1f1b"}),
        "micro-batch": plan.model_copy(update={"micro_batch": 2, "num_microbatches": 3}),
        "gradients reduced": plan.model_copy(update={"gradient_sync": "every"}),
        "mesh, outermost first": plan.model_copy(update={"mesh_axes": STAGES_INSIDE}),
        "tensor": plan.model_copy(update={"degrees": plan.degrees.model_copy(update={"tensor": 4})}),
        "sequence parallel": plan.model_copy(
            update={"classes": tuple(c.model_copy(update={"sequence": True}) for c in plan.classes)}
        ),
        "job: precision": plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp32"})}),
        "network": plan.model_copy(update={"cluster": scaled(plan.cluster, "network", 0.5)}),
    }

    for what, variant in variants.items():
        assert what in {change.what for change in difference(plan, variant, None).changes}


def test_the_causes_of_a_difference_add_up_to_it(plan: Plan) -> None:
    other = some_plan(shard=16, micro_batches=6)
    priced = estimate(plan, small_profile()), estimate(other, small_profile())

    found = difference(plan, other, priced)

    times = {cost.name: cost.second - cost.first for cost in found.times}
    parts = sum(change for name, change in times.items() if not name.startswith("step"))
    assert times["step"] == pytest.approx(parts)
    assert times["step"] == pytest.approx(priced[1].step_time_s - priced[0].step_time_s)
    sizes = {cost.name: cost.second - cost.first for cost in found.sizes}
    assert sizes.pop("fullest GPU") == pytest.approx(sum(sizes.values()))


def test_a_step_of_several_times_the_length_is_told_as_a_factor(capsys: pytest.CaptureFixture[str]) -> None:
    times = (Cost("step", 1.0, 22.3), Cost("compute", 1.0, 1.5), Cost("data", 0.0, 1.0))
    print_difference(make_console(), ("a.json", "b.json"), PlanDifference((), times, ()))

    out = capsys.readouterr().out
    assert "22.3x" in out
    assert "+50.0%" in out


def test_no_name_is_drawn_over_what_people_usually_try(page: str) -> None:
    picture = page.split(">Time against memory</title>")[1].split("</svg>")[0]

    assert picture.rindex("label halo") < picture.index('class="rule"') < picture.index('class="chosen"')


def test_more_work_is_compared_by_the_sample() -> None:
    one, two = some_plan(shard=4, micro_batches=4), some_plan(shard=4, micro_batches=8)

    found = difference(one, two, (estimate(one, small_profile()), estimate(two, small_profile())))

    assert found.times[0].name == "step per sample"
    assert found.times[0].first == pytest.approx(estimate(one, small_profile()).step_time_s / 16)


@pytest.mark.parametrize(
    "words",
    [
        "fsdp=8 zero=3 mb=1",
        "ddp=2 fsdp=2 tp=2 zero=1 mb=2",
        "tp=2 pp=4 v=2 mb=1 schedule=interleaved recompute=full",
        "ddp",
    ],
)
def test_the_words_of_a_plan_read_back_as_its_layout(words: str) -> None:
    model = small_profile()
    cluster, training = some_plan(shard=8).cluster, some_plan(shard=8).training
    priced = price_setup(parse_setup(words, 8, 8), model, cluster, training)
    assert priced.plan is not None

    again = price_setup(parse_setup(" ".join(setup_words(priced.plan)), 8, 8), model, cluster, training)

    assert again.plan is not None
    assert (again.plan.degrees, again.plan.schedule) == (priced.plan.degrees, priced.plan.schedule)
    assert again.seconds == pytest.approx(priced.seconds)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    save_profile(tmp_path)
    some_plan(shard=2, pipeline=2).save(tmp_path / "plan.json")
    some_plan(shard=4).save(tmp_path / "other.json")
    return tmp_path


@pytest.mark.slow
def test_the_command_writes_report_and_trace_without_torch(folder: Path) -> None:
    words = ["report", "plan.json", "--model", "profile.json", "--trace", "trace.json"]

    loaded = modules_after(f"from meshwright.executor.cli import main\nmain({words!r})", folder)

    assert "torch" not in loaded
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_the_command_prints_the_essentials(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("report", "plan.json", "--model", "profile.json", "-o", "my.html") == 0

    out = capsys.readouterr().out
    for part in ("step time", "Memory per GPU", "Alternatives", "device memory", "proof", "my.html"):
        assert part in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.slow
def test_the_page_shows_step_time_and_memory_with_their_bands(folder: Path) -> None:
    run_plan("report", "plan.json", "--model", "profile.json")
    assert "How far off these may be is not known" in (folder / "report.html").read_text()

    document = json.loads((folder / "plan.json").read_text())
    document["model"]["attention_modules"] = ["attention"]
    (folder / "attentive.json").write_text(json.dumps(document))
    run_plan("report", "attentive.json", "--model", "profile.json")

    page = (folder / "report.html").read_text()
    assert len(re.findall(r"[\d.]+ m?s to [\d.]+ m?s in 8 of 10 runs", page)) == 1
    assert len(re.findall(r"[\d.]+ [GM]iB to [\d.]+ [GM]iB in 8 of 10 runs", page)) == 1


def test_a_run_stands_beside_its_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, model = some_plan(shard=2, pipeline=2), small_profile()
    shape = shape_of(plan).label
    header = RunHeader(
        model=model.name,
        layout=shape,
        num_ranks=4,
        device="a test",
        torch_version="2",
        tokens_per_step=512,
        memory_kind="allocated",
    )
    steps = [
        RunStep(
            step=i,
            loss=1.0,
            grad_norm=1.0,
            step_time_s=0.0123,
            between_s=0.0,
            tokens_per_s=1.0,
            mfu=None,
            peak_memory_bytes=(2**30,) * 4,
            communication_s={},
        )
        for i in range(5)
    ]
    (folder / "run.jsonl").write_text("\n".join(d.model_dump_json() for d in (header, *steps)))

    assert run_plan("report", "plan.json", "--model", "profile.json", "--run", "run.jsonl") == 0

    assert "12.3" in capsys.readouterr().out
    markup = Path("report.html").read_text()
    assert '<section id="run">' in markup
    assert "12.3" in markup


def test_diff_says_what_differs_and_what_it_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("diff", "plan.json", "other.json", "--model", "profile.json") == 0
    out = capsys.readouterr().out
    assert run_plan("diff", "plan.json", "other.json", "--model", "profile.json", "--json") == 0
    document = json.loads(capsys.readouterr().out)

    for part in ("What differs", "pipeline", "Step time", "Memory of the fullest GPU", "activations"):
        assert part in out
    assert {"changes", "times", "sizes", "notes"} == set(document)
    assert {"what": "pipeline", "first": "2", "second": "1"} in document["changes"]


def test_diff_without_the_model_says_why_it_knows_no_causes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("diff", "plan.json", "plan.json") == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "The plans decide everything alike" in out
    assert "--model says where it is" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["report", "none.json"], "no such plan: none.json"),
        (["report", "plan.json"], "no such file: synthetic"),
        (["report", "plan.json", "--model", "profile.json", "-o", "report.pdf"], "ends in .html"),
        (["report", "plan.json", "--model", "profile.json", "-o", "nowhere/report.html"], "nowhere does not exist"),
        (["report", "plan.json", "--model", "profile.json", "--trace", "plan.json"], "is no trace"),
        (["report", "plan.json", "--model", "changed.json"], "is not the model that plan.json was made for"),
        (["diff", "plan.json", "profile.json"], "is not a Meshwright plan"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small_profile().model_copy(update={"fingerprint": "another"}).save(folder / "changed.json")
    before = sorted(path.name for path in folder.iterdir())

    assert run_plan(*words) == 2

    assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_plans_and_estimates_show_themselves_in_notebooks_and_terminals(plan: Plan, facts: Facts) -> None:
    for shown in (plan, facts.estimate):
        console = Console(width=100, record=True, file=StringIO())
        console.print(shown)
        words = console.export_text()
        markup = shown._repr_html_()

        assert "stage" in words or "compute" in words
        assert _Elements(markup).open == []
        assert "<table>" in markup


@pytest.fixture(scope="module")
def comparison(plan: Plan) -> Comparison:
    asked = read_setups(["ddp", "tp=4 pp=4 mb=1", "tp=16"], plan.cluster)
    return compare(small_profile(), plan.cluster, plan.training, asked)


def test_a_comparison_shows_itself_too(comparison: Comparison) -> None:
    console = Console(width=100, record=True, file=StringIO())
    console.print(comparison)

    words, markup = console.export_text(), comparison._repr_html_()
    for part in ("planned", "ddp", "tp=4 pp=4 mb=1", "not legal", "compute"):
        assert part in words
        assert part in markup
    assert _Elements(markup).open == []


def test_bars_of_a_comparison_are_as_long_as_their_steps(comparison: Comparison) -> None:
    svg = picture(comparison.page(), "losses")

    lengths: dict[str, float] = {}
    for bar in svg.iter():
        label, mark, _ = bar.get("data-t", "").partition(": ")
        if mark:
            lengths[label] = lengths.get(label, 0.0) + float(bar.get("width", 0))

    steps = {c.label: c.estimate.step_time_s for c in comparison.candidates if c.estimate is not None}
    longest = max(steps, key=lambda label: steps[label])
    assert set(lengths) == set(steps)
    for label, seconds in steps.items():
        assert lengths[label] / lengths[longest] == pytest.approx(seconds / steps[longest], abs=0.005)


def test_a_comparison_is_drawn_as_png(comparison: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")

    save_picture(tmp_path / "compare.png", comparison)

    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_what_shows_plans_imports_rich_only_then(tmp_path: Path) -> None:
    some_plan(shard=4).save(tmp_path / "plan.json")
    code = """
import sys
from pathlib import Path
from meshwright.planner.plan.document import load_plan
plan = load_plan(Path("plan.json"))
plan._repr_html_()
assert "rich" not in sys.modules
plan.__rich__()
"""

    assert "rich.table" in modules_after(code, tmp_path)


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no headless browser here (looked for {', '.join(BROWSERS)}): the page is only parsed")
    return found


PROBE = """<script>addEventListener("load", () => {
  const loaded_ms = performance.now()
  const out = []
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.viewBox.baseVal
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBBox()
      if (box.x < frame.x - 2 || box.x + box.width > frame.x + frame.width + 2 || box.y + box.height > frame.height + 2)
        out.push(svg.querySelector("title").textContent + ": " + text.textContent)
    }
  }
  const mark = document.querySelector("svg [data-t]")
  mark.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 50, clientY: 50 }))
  const shown = document.getElementById("tip")
  const tip = shown.textContent
  const pass = document.querySelector("svg [data-p]")
  pass.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 50, clientY: 50 }))
  const light = getComputedStyle(document.body).backgroundColor
  document.getElementById("theme").click()
  const found = {
    outside: out, tip, pass: shown.textContent, shown: shown.classList.contains("on"), light,
    dark: getComputedStyle(document.body).backgroundColor, theme: document.documentElement.dataset.theme,
    loaded_ms, wide: document.documentElement.scrollWidth - innerWidth,
  }
  const words = { id: "found", textContent: JSON.stringify(found) }
  document.body.replaceChildren(Object.assign(document.createElement("pre"), words))
})</script>"""


def opened(browser: str, page: str, folder: Path, width: int) -> dict[str, Any]:
    """What the page does in a real browser; fails on any error of its script."""
    path = folder / "page.html"
    path.write_text(page + PROBE)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=90)
    assert "Uncaught" not in done.stderr
    markup = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert markup, done.stderr[-1000:]
    found: dict[str, Any] = json.loads(markup.group(1).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return found


@pytest.mark.parametrize("width", [1200, 400])
def test_in_a_browser_nothing_sticks_out_hovering_tells_and_dark_is_dark(
    browser: str, page: str, large_page: str, tmp_path: Path, width: int
) -> None:
    found = opened(browser, large_page if width == 1200 else page, tmp_path, width)

    assert found["outside"] == []
    assert found["wide"] <= 0
    assert found["shown"]
    assert "embedding" in found["tip"]
    assert re.fullmatch(r"forward, micro-batch 0stage 0, from 0\.00 us[\d.]+ .s: compute .*", found["pass"])
    assert found["theme"] == "dark"
    assert found["light"] == "rgb(246, 247, 249)"
    assert found["dark"] == "rgb(16, 19, 26)"
    assert found["loaded_ms"] < 2000


def test_played_counts_what_it_is_asked_for(plan: Plan, facts: Facts) -> None:
    step = played(plan, small_profile(), facts.estimate, 4)

    assert {event.action.microbatch for event in step.events} == set(range(4))
    assert step.seconds < facts.estimate.step_time_s


@pytest.mark.parametrize(
    ("step_s", "fastest_s", "bound", "said"),
    [
        (1.0, 1.0, 1.0, "no plan in the space is faster under"),
        (1.009, 1.0, 1.0, "no plan in the space can be more than 0.89% faster"),
        (1.0, 1.0, 0.9, "no plan in the space can be more than 10.00% faster"),
        (1.0, 1.0, 0.0, "how far from the fastest is not known"),
    ],
)
def test_the_proof_says_how_much_faster_than_the_plan_itself_another_may_be(
    step_s: float, fastest_s: float, bound: float, said: str
) -> None:
    certificate = Certificate(
        step_s=step_s,
        fastest_s=fastest_s,
        bound=bound,
        gap=1 - bound / fastest_s,
        status="feasible",
        solver="HiGHS",
        search_seconds=1.0,
        shapes={"total": 3, "rejected": 1, "pruned": 1, "solved": 1},
    )

    line = certificate_line(some_plan().model_copy(update={"certificate": certificate}))

    assert said in line
    assert ("given away for a simpler plan" in line) == (step_s > fastest_s)


def test_names_of_set_ups_are_whole_and_begin_in_the_picture(facts: Facts) -> None:
    name = "tp=4 pp=2 mb=2 recompute=full fsdp sp=on schedule=interleaved v=2"
    candidates = [replace(each, label=name) for each in facts.alternatives if each.estimate is not None][:2]

    picture, _ = loss_bars(candidates)

    assert picture.count(f">{name}</text>") == 2
    assert min(float(x) for x in re.findall(r'<text x="([-\d.]+)"', picture)) >= 0.0
    assert "…" not in picture


def test_labels_of_a_sweep_stand_apart() -> None:
    taken = [(100.0, 100.0), (100.0, 122.0)]

    first = _free(100.0, 100.0, 8, taken)
    second = _free(100.0, 122.0, 8, [*taken, (100.0, first)])

    assert first == 82.0, "below is the other point"
    assert second == 142.0
    assert all(abs(place - y) > 14 for place in (first, second) for _, y in taken)


def test_the_words_of_a_page_are_explained_on_it(page: str) -> None:
    words = page.partition('id="words"')[2]

    for term in terms_in("FSDP MFU micro-batch"):
        assert f"<td>{term.name}</td>" in words
    assert "<td>ZB-V</td>" not in words or "ZB-V" in page.partition('id="words"')[0]


def test_words_stand_at_the_left_of_a_table_of_numbers() -> None:
    markup = table(["GPUs", "step", "plan"], [("8", "1 s", "FSDP 8")], 0, words_from=2)

    assert markup.count('class="n"') == 4
    assert "<td>FSDP 8</td>" in markup


def test_what_was_weighed_or_measured_is_no_decision(plan: Plan) -> None:
    weighed = Alternative(label="DDP", by_rule=True, outcome="does not fit")

    found = difference(plan, plan.model_copy(update={"alternatives": (weighed,), "certificate": None}), None)

    assert found.changes == ()
