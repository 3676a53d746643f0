"""The first screen of a plan: one screen, in words that hold."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.executor.reporting import terminal
from meshwright.executor.reporting.first_screen import MOST_LINES, print_first_screen, stage_groups, work_in_words
from meshwright.executor.reporting.glossary import term, terms_in
from meshwright.executor.reporting.report import against_others, axis_rows, choice_in_words, launch_command
from meshwright.planner.answers.explain import compared
from meshwright.planner.answers.search import Candidate, search
from meshwright.planner.answers.verdict import Verdict, VerdictKind
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan, Prediction
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from support.cli import run_plan, small_profile, some_plan
from support.exported import planned
from support.synthetic import mixed

GIB = 2.0**30


def with_memory(plan: Plan, sizes: list[float], budget: float = 75.0) -> Plan:
    """The plan as if its pipeline ranks held so many GiB."""
    predicted = Prediction(
        step_time_s=1.0,
        tokens_per_s=1e6,
        mfu=0.4,
        stage_memory_bytes=tuple(size * GIB for size in sizes),
        budget_bytes=budget * GIB,
    )
    return plan.model_copy(update={"prediction": predicted})


def screen(plan: Plan, *arguments: object, **named: object) -> str:
    return terminal.as_text(lambda console: print_first_screen(console, plan, *arguments, **named))  # type: ignore[arg-type]


def test_equal_stages_are_one_row() -> None:
    plan = with_memory(some_plan(pipeline=8, micro_batches=8), [74.0, 60.0, 60.5, 61.0, 61.2, 60.1, 60.0, 30.0])

    groups = stage_groups(plan)

    assert [(group.first, group.last) for group in groups] == [(0, 0), (1, 6), (7, 7)]
    assert (groups[1].least_bytes, groups[1].most_bytes) == (60.0 * GIB, 61.2 * GIB)
    assert "stages 1-6" in screen(plan)
    assert "60.0 to 61.2 of 75.0 GiB" in screen(plan)


def test_figures_of_memory_are_whole_on_80_columns() -> None:
    kinds = mixed((1, 4, load_device("rtx-6000-ada")), (1, 4, load_device("h100-80gb")))
    plan = with_memory(some_plan(pipeline=8, micro_batches=8), [10.0, 20.0, 30.0, 40.0, 45.0, 50.0, 60.0, 70.0])
    plan = plan.model_copy(update={"cluster": kinds})

    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        print_first_screen(console, plan, None)

    assert re.search(r"stages? 0.* \(rtx-6000-ada\) +█+░+ .*of 75.0 GiB", captured.get())


def test_many_unlike_stages_are_few_rows_that_hold_all_of_them() -> None:
    plan = with_memory(some_plan(pipeline=8, micro_batches=8), [10.0, 70.0, 11.0, 60.0, 12.0, 50.0, 13.0, 40.0])

    groups = stage_groups(plan, most=3)

    assert len(groups) == 3
    assert [group.first for group in groups[1:]] == [group.last + 1 for group in groups[:-1]]
    assert (groups[0].first, groups[-1].last) == (0, 7)
    assert max(group.most_bytes for group in groups) == 70.0 * GIB


def test_however_much_there_is_to_say_it_is_one_screen() -> None:
    job, pins = TrainingSpec(global_batch=64), Pins(pipeline=1)
    plan = search(small_profile(), cluster_of(load_device("h100-80gb"), 8), job, pins=pins).plan
    found = estimate(plan, small_profile())
    long = Verdict(VerdictKind.SLOWER, "a reason that goes on and on, " * 7, 0.1)
    layouts = [some_plan(tensor=8), some_plan(replicate=8), some_plan(shard=4, pipeline=2)] * 2
    name = "FSDP 2 + CP 2 (ring) + PP 2 x 6 (ZB-V), micro-batch"
    others = [Candidate(f"{name} {i}", each, found, long) for i, each in enumerate(layouts)]
    named = {"alternatives": others, "assumptions": ["something that was not said; --flag changes it"] * 3}

    text = screen(plan, found, **named, written="plan.json")

    assert len(text.splitlines()) <= MOST_LINES
    assert text.count("FSDP 2 + CP 2 (ring)") == 3
    assert [i for i in range(6) if f"micro-batch {i} " in text] == [0, 1, 2], "each layout once"
    assert "words    plan glossary explains every word" in text


def test_layers_are_counted_as_people_count_them() -> None:
    plan = some_plan(shard=2)
    layers = tuple(layer.model_copy(update={"recompute": "full"}) for layer in plan.stages[0].layers[:3])
    stage = plan.stages[0].model_copy(update={"layers": layers + plan.stages[0].layers[3:]})

    assert "recompute in 2 of 8 layers" in choice_in_words(plan.model_copy(update={"stages": (stage,)}))
    assert "2 pipeline stages of 4 layers" in work_in_words(some_plan(pipeline=2))


def test_layers_of_one_module_count_whatever_their_sizes() -> None:
    plan = some_plan(pipeline=2)
    last = [
        layer.model_copy(update={"layer_class": f"block.{i + 2}"}) if layer.layer_class == "block" else layer
        for i, layer in enumerate(plan.stages[1].layers)
    ]
    stages = (plan.stages[0], plan.stages[1].model_copy(update={"layers": tuple(last)}))

    assert "2 pipeline stages of 4 layers" in work_in_words(plan.model_copy(update={"stages": stages}))


@pytest.mark.parametrize(("sync", "name"), [("last", "ZeRO-1"), ("every", "ZeRO-2")])
def test_what_everybody_calls_zero_1_is_called_so(sync: str, name: str) -> None:
    plan = some_plan(shard=4)
    stage = plan.stages[0]
    kept = tuple(layer.model_copy(update={"reshard": False}) for layer in stage.layers)
    stages = (stage.model_copy(update={"layers": kept}),)
    plan = plan.model_copy(update={"stages": stages, "gradient_sync": sync})

    assert choice_in_words(plan).startswith(f"{name} over 4, micro-batch 1 x 4")
    assert "FSDP" not in choice_in_words(plan)
    assert name in work_in_words(plan)


def test_stages_of_one_layer_each_are_of_one_layer() -> None:
    alone = planned(Shape(1, 1, 1, 8, 1, 8, schedule="gpipe"), (2, *[1] * 6, 2))

    assert "8 pipeline stages of 1 layer;" in work_in_words(alone)


def test_a_cause_larger_than_the_difference_is_told_with_what_offsets_it() -> None:
    plan = some_plan(shard=2)
    best = estimate(plan, small_profile())
    shifted = {**best.breakdown, "compute": best.breakdown["compute"] + 0.5, "data": best.breakdown["data"] - 0.4}
    other = best.model_copy(update={"step_time_s": best.step_time_s + 0.1, "breakdown": shifted})

    assert compared(other, best).detail == "500 ms more compute, 400 ms less waiting for gradients and parameters"
    longer = {**best.breakdown, "compute": shifted["compute"]}
    alone = best.model_copy(update={"step_time_s": best.step_time_s + 0.5, "breakdown": longer})
    assert compared(alone, best).detail == "500 ms more compute"


def test_memory_to_spare_is_no_reason_against_what_needs_no_more() -> None:
    best = estimate(some_plan(shard=2), small_profile())
    faster = best.model_copy(update={"step_time_s": 0.99 * best.step_time_s})
    fuller = best.memory[0].model_copy(update={"device_bytes": best.memory[0].device_bytes + 1})

    assert compared(faster, best).detail == "less simple"
    held = compared(faster.model_copy(update={"memory": (fuller,)}), best)
    assert held.detail == "less simple or with less memory to spare"


def test_a_set_up_of_the_plan_s_own_kind_is_what_else_fits() -> None:
    plan = some_plan(shard=2)
    found = estimate(plan, small_profile())

    def against(micro_batch: int) -> str:
        other = plan.model_copy(update={"micro_batch": micro_batch})
        beside = Candidate(plan.label, other, found, Verdict(VerdictKind.AS_FAST), found.step_time_s, by_rule=True)
        return against_others(plan, found.step_time_s, [beside]).phrase

    assert against(2 * plan.micro_batch) == "as fast as ZeRO-1 over 2 with micro-batch 2 within 1%"
    assert against(plan.micro_batch) == "nothing else was priced"


def test_the_next_best_is_none_behind_another_of_the_plan_s_kind() -> None:
    plan = some_plan(shard=2)
    found = estimate(plan, small_profile())

    def beside(other: Plan, slower: float) -> Candidate:
        took = found.model_copy(update={"step_time_s": slower * found.step_time_s})
        return Candidate(other.label, other, took, Verdict(VerdictKind.SLOWER), took.step_time_s)

    kinds = [beside(other, 1.1) for other in (some_plan(tensor=2), some_plan(pipeline=2), some_plan(replicate=2))]
    own = beside(some_plan(shard=4), 1.05)

    assert "10.0% faster than the next best" in against_others(plan, found.step_time_s, kinds).phrase
    assert "10.0% faster than the best of other kinds" in against_others(plan, found.step_time_s, [*kinds, own]).phrase


def test_what_is_faster_is_told_with_why_it_is_not_the_plan() -> None:
    plan, why = some_plan(shard=2), "not known to be what Accelerate runs"
    found = estimate(plan, small_profile())
    took = found.model_copy(update={"step_time_s": 0.9 * found.step_time_s})
    other = some_plan(tensor=2)

    beside = Candidate(other.label, other, took, compared(took, found, why), took.step_time_s)

    assert against_others(plan, found.step_time_s, [beside]).phrase.endswith(f"which is {why}")


def test_fsdp_that_gathers_all_parameters_at_once_is_called_what_it_is() -> None:
    found = estimate(some_plan(shard=2), small_profile())

    beside = Candidate("FSDP", some_plan(shard=2), found, Verdict(VerdictKind.SLOWER), 1.0, by_rule=True)

    assert beside.name == "FSDP as ZeRO-1"


def test_no_group_sits_on_more_hosts_than_there_are() -> None:
    device = load_device("h100-80gb")
    plan = some_plan(tensor=3, pipeline=2, per_host=3)
    machine: ClusterSpec = cluster_of(device, 6, 3)
    (tensor,) = [row for row in axis_rows(plan.model_copy(update={"cluster": machine})) if row.axis == "pipeline"]

    assert tensor.where == "across 2 hosts, 1 in each"


@pytest.mark.parametrize(
    ("device", "gpus", "nodes"),
    [("gb200", 144, "--nnodes 36 --nproc-per-node 4"), ("gb300", 6, "--nnodes 3 --nproc-per-node 2")],
)
def test_trays_of_a_rack_are_launched_one_by_one(device: str, gpus: int, nodes: str) -> None:
    plan = some_plan(replicate=8).model_copy(update={"cluster": cluster_of(load_device(device), gpus)})

    assert launch_command(plan) == f"torchrun {nodes} train.py"


def test_every_hard_word_of_the_screen_is_in_the_glossary(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("ZB-V", "gathered", "transient", "closed form", "MFU", "1F1B", "HSDP", "ZeRO-1", "CP", "EP", "bubble"):
        assert term(word).says
    assert [each.name for each in terms_in("FSDP 8, ZB-V")] == ["FSDP", "ZB-V"]
    assert [each.name for each in terms_in("PP 2 (ZB-H2)")] == ["PP", "ZB-H2"], "and nothing of ZB-H1"
    assert run_plan("glossary", "zb-v", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "ZB-V"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["llama3_8b", "--gpus", "8"],
        ["llama3_70b", "--gpus", "64", "-b", "512"],
        ["llama31_405b", "--gpus", "16384", "-b", "2048"],
        ["deepseek_v3", "--gpus", "2048", "-b", "15360", "-s", "4096"],
        ["llama3_70b", "--gpus", "8"],
        ["llama3_8b", "--cluster", "mixed.toml"],
    ],
    ids=" ".join,
)
def test_models_that_people_train_take_one_screen(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    network, host = '[network]\nbandwidth = "25 GB/s"\nlatency = "20 us"\n', "[[hosts]]\ncount = 1\ngpus = 8\ndevice = "
    (tmp_path / "mixed.toml").write_text(f'{network}{host}"h100-80gb"\n{host}"a100-80gb"\n')

    code = run_plan(str(benchmarks / "models" / words[0]), *words[1:], "--time-limit", "40")

    told = capsys.readouterr()
    assert code == (3 if words == ["llama3_70b", "--gpus", "8"] else 0)
    assert len((told.out + told.err).splitlines()) <= MOST_LINES


def test_set_ups_side_by_side_name_the_stack_that_they_are_priced_for() -> None:
    plan = some_plan(shard=4)
    found = estimate(plan, small_profile())
    beside = [Candidate("planned", plan, found, Verdict(VerdictKind.PLAN, "the plan"))]

    told = terminal.as_text(lambda console: terminal.print_comparison(console, beside, found.step_time_s))

    assert "equal global batch, with fsdp2-eager" in told
    assert "with fsdp2-eager" in terminal.as_text(lambda console: console.print(terminal.comparison_tables(beside)))
