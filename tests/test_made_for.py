"""Plans made for a framework: all of its space goes to it and comes back the same, and the best of it is certified."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from benchmarks.accuracy import cases
from benchmarks.exports import made_for
from meshwright.executor.reporting.report import certificate_line
from meshwright.planner.answers.guidance import rules_of_thumb
from meshwright.planner.answers.search import search
from meshwright.planner.answers.verdict import VerdictKind
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.exchange.export import export
from meshwright.planner.exchange.export_notes import ordered
from meshwright.planner.plan.document import AXES, Plan, load_plan
from meshwright.planner.plan.frameworks import FRAMEWORKS, TARGETS, Framework, Target
from meshwright.planner.plan.legality import stage_starts
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.pin_texts import read_pins
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import ClusterSpec, Link, cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.cli import run_plan
from support.exported import MIXTURE, PROFILE, read_back
from support.slow import but_first
from support.zoo import zoo_profile

MODELS = {"decoder": PROFILE, "mixture": MIXTURE}
BATCH = 32
EACH = 40
"""Shapes of a space that are tried, spread over all of it."""


def machine(count: int) -> ClusterSpec:
    return cluster_of(load_device("h100-80gb"), count, 8)


def training(target: Target, profile: ModelProfile = PROFILE) -> TrainingSpec:
    return TrainingSpec(global_batch=BATCH, seq_len=profile.seq_len, software=FRAMEWORKS[target].software)


def even_plan(model: CostModel, shape: Shape, pins: Pins, places: list[int]) -> Plan:
    """A shape as a plan, with stages as even as these places allow."""
    num_stages = shape.pipeline * shape.virtual_stages
    cuts = [places[round(stage * (len(places) - 1) / num_stages)] for stage in range(num_stages + 1)]
    recompute = "none" if shape.schedule in ZERO_BUBBLE else pins.recompute
    options = [model.options(kind, shape, recompute, pins.reshard)[0] for kind in model.kinds]
    stages = [options[begin:end] for begin, end in pairwise(cuts)]
    return make_plan(model.profile, model.cluster, model.training, shape, stages)


def plans_of(pins: Pins, job: TrainingSpec, profile: ModelProfile, count: int, framework: Framework) -> Iterator[Plan]:
    """Plans of shapes all over a space, cut where a framework may cut."""
    model = CostModel(profile, machine(count), job, framework=framework)
    places = [0, *(framework.starts(profile) or stage_starts(profile)), len(profile.layers)]
    space = Space(profile, machine(count), job, pins)
    shapes = [shape for family in space.families() for shape in space.shapes(family)]
    fitting = [shape for shape in shapes if shape.pipeline * shape.virtual_stages < len(places)]
    return (even_plan(model, shape, pins, places) for shape in fitting[:: 1 + len(fitting) // EACH])


def canonical(plan: Plan) -> Plan:
    """With the axes that split nothing before all others in the order of the mesh."""
    axes = tuple(axis for axis in AXES if plan.degrees.of(axis) == 1)
    return plan.model_copy(update={"mesh_axes": (*axes, *ordered(plan, plan.mesh_axes))})


def told(target: Target, plan: Plan) -> Plan:
    """What a framework's settings say of a plan; that gradients are reduced after every micro-batch is said in the
    script of Accelerate."""
    return canonical(plan.model_copy(update={"gradient_sync": "last"} if target == "accelerate" else {}))


@pytest.mark.parametrize("count", but_first([16, 8], 1))
@pytest.mark.parametrize("name", ["decoder", "mixture"])
@pytest.mark.parametrize("target", TARGETS)
def test_all_that_is_searched_for_a_framework_goes_there_and_back(target: Target, name: str, count: int) -> None:
    framework, profile = FRAMEWORKS[target], MODELS[name]
    spaces = Pins(framework=framework).alternatives
    plans = [plan for pins in spaces for plan in plans_of(pins, training(target), profile, count, framework)]

    assert len(plans) > 20
    for plan in plans:
        assert told(target, read_back(export(plan, target), plan, profile)) == told(target, plan)


@pytest.mark.parametrize("target", TARGETS)
def test_what_goes_to_a_framework_and_back_is_searched_for_it(target: Target) -> None:
    framework = FRAMEWORKS[target]
    job = training(target).model_copy(update={"software": "fsdp2-eager"})
    inside = {
        (shape, "none" if shape.schedule in ZERO_BUBBLE else kind, pins.reshard)
        for pins in Pins(framework=framework).alternatives
        for kind in (framework.mixed if pins.recompute is None else (pins.recompute,))
        for space in [Space(PROFILE, machine(8), job, pins)]
        for family in space.families()
        for shape in space.shapes(family)
    }
    tried = 0
    for recompute, reshard in product(framework.recomputes, (False, True)):
        pins = Pins(recompute=recompute, reshard=reshard, everything=True)
        for plan in plans_of(pins, job, PROFILE, 8, framework):
            shape = replace(shape_of(plan), cuts=None)
            if reshard and shape.sharded_over == 1:
                continue
            try:
                same = read_back(export(plan, target), plan) == plan
            except ValueError:
                continue
            tried += same
            kind = "none" if shape.schedule in ZERO_BUBBLE else recompute
            assert not same or (shape, kind, reshard) in inside
    assert tried > 5


@pytest.mark.parametrize(
    ("target", "count"), but_first([("megatron", 8), ("deepspeed", 8), *product(TARGETS, (8, 64))], 2)
)
def test_the_best_for_a_framework_is_certified_there_and_beside_the_open_search(target: Target, count: int) -> None:
    job = training(target).model_copy(update={"global_batch": 8 * count})

    found = search(PROFILE, machine(count), job, pins=Pins(framework=FRAMEWORKS[target]), time_limit_s=6.0)

    certificate = found.certificate
    assert export(found.plan, target).target == target
    assert certificate.framework == target
    assert certificate.open_s is not None
    assert 0.0 < certificate.open_s <= certificate.fastest_s
    assert f"that {target} runs" in certificate_line(found.plan)


@pytest.mark.slow
def test_what_a_framework_costs_is_the_difference_to_a_pipeline_that_it_has_not() -> None:
    """Stages are the only way to fit where links between hosts are slow: DeepSpeed's settings say none."""
    job, cluster = training("deepspeed"), machine(16)
    slow = cluster.model_copy(update={"network": Link(bandwidth=1e8, latency=1e-3)})

    found = search(PROFILE, slow, job, pins=Pins(framework=FRAMEWORKS["deepspeed"]), time_limit_s=15.0)
    free = search(PROFILE, slow, job, time_limit_s=15.0)

    assert free.plan.degrees.pipeline > 1
    assert found.certificate.restriction == pytest.approx(
        found.certificate.fastest_s / free.certificate.fastest_s - 1, rel=0.02
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_that_goes_with_some_numbers_of_micro_batches_only_is_planned(zero: int) -> None:
    pins = replace(read_pins([f"zero={zero}"]), framework=FRAMEWORKS["torchtitan"])

    found = search(PROFILE, machine(8), training("torchtitan"), pins=pins, time_limit_s=6.0, beside_open=False)

    assert pins.allows_shape(shape_of(found.plan))


def test_what_is_faster_and_pinned_away_is_not_laid_to_the_framework() -> None:
    pins = Pins(framework=FRAMEWORKS["deepspeed"], tensor=8)

    found = search(PROFILE, machine(8), training("deepspeed"), pins=pins, time_limit_s=6.0)

    faster = [each.verdict for each in found.baselines if each.verdict.kind is VerdictKind.FASTER]
    assert {each.detail for each in faster} == {"excluded by --pin"}


@pytest.mark.parametrize(
    ("pins", "changes", "sentence"),
    [
        (Pins(framework=FRAMEWORKS["megatron"]), {"layers": "twice"}, "no single row of numbered blocks"),
        (Pins(framework=FRAMEWORKS["torchtitan"]), {"precision": "fp16"}, "no setting for fp16: give --precision bf16"),
        (Pins(framework=FRAMEWORKS["accelerate"], recompute="attention"), {}, "it takes none, full"),
        (Pins(framework=FRAMEWORKS["deepspeed"], everything=True), {}, "go beyond what DeepSpeed is told"),
    ],
)
def test_what_a_framework_cannot_run_is_said_at_planning(pins: Pins, changes: dict[str, str], sentence: str) -> None:
    job = training("accelerate").model_copy(update={k: v for k, v in changes.items() if k == "precision"})
    layers = PROFILE.layers[:5] + PROFILE.layers[:5] if "layers" in changes else PROFILE.layers

    with pytest.raises(ValueError, match=sentence):
        search(PROFILE.model_copy(update={"layers": layers}), machine(8), job, pins=pins)


def decoder_file(folder: Path) -> str:
    PROFILE.save(folder / "decoder.json")
    return str(folder / "decoder.json")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    both = capsys.readouterr()
    return " ".join((both.out + both.err).split())


def test_a_plan_for_a_framework_is_priced_with_its_software_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"

    planned = run_plan(
        decoder_file(tmp_path), "--gpus", "8", "--for", "megatron", "-o", str(target), "--time-limit", "2"
    )
    printed = said(capsys)
    exported = run_plan("export", str(target), "--to", "megatron")

    assert (planned, exported) == (0, 0)
    assert "no plan that megatron runs can be more than" in printed or "no plan that megatron runs is" in printed
    assert "--to megatron" in printed
    assert load_plan(target).training.software == "megatron-core"


@pytest.mark.slow
def test_a_set_up_is_planned_and_kept(tmp_path: Path) -> None:
    model, one, two = decoder_file(tmp_path), tmp_path / "one.json", tmp_path / "two.json"
    words = "tp=2 pp=2 zero=1 mb=2 recompute=full schedule=1f1b"

    planned = run_plan(model, "--gpus", "8", "--setup", words, "-o", str(one), "-q")
    compared = run_plan("compare", model, "--gpus", "8", "--setup", words, "-o", str(two), "-q")

    degrees = load_plan(one).degrees
    assert (planned, compared) == (0, 0)
    assert load_plan(one).stages == load_plan(two).stages
    assert (degrees.tensor, degrees.pipeline, degrees.data_shard) == (2, 2, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--setup", "tp=2", "--pin", "pipeline=2"), "say all of it in --setup"),
        (("--setup", "tp=3"), "does not divide 8 GPUs"),
        (("--for", "colossalai"), "plans are made for megatron, torchtitan, accelerate, deepspeed"),
        (("--for", "accelerate", "--pin", "pipeline=2"), "pipeline: Accelerate has stages in code"),
        (("--pin", "zero=1", "--pin", "zero=3"), "contradicts"),
        (("--pin", "zero=0", "--pin", "context=2"), "--pin zero=0 contradicts --pin context=2"),
        (("--pin", "zero=4"), "there is no zero '4'"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_plan(decoder_file(tmp_path), "--gpus", "8", *words, "-o", str(tmp_path / "plan.json"))

    assert code == 2
    assert sentence in said(capsys)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("zero=0",), Pins(data_shard=1, context=1)),
        (("zero=1",), Pins(data_replicate=1, gradient_sync="last", reshard=False)),
        (("zero=2",), Pins(data_replicate=1, gradient_sync="every", reshard=False)),
        (("zero=3",), Pins(data_replicate=1, gradient_sync="every", reshard=True)),
        (("zero=3", "data_shard=4"), Pins(data_shard=4, gradient_sync="every", reshard=True)),
    ],
)
def test_a_zero_stage_is_pinned_as_in_a_set_up(words: tuple[str, ...], expected: Pins) -> None:
    assert read_pins(words) == expected


def test_megatron_3d_shards_its_optimizer() -> None:
    rules = rules_of_thumb(machine(64), training("megatron"))

    attempts = next(rule.attempts for rule in rules if rule.name == "Megatron 3D")

    assert all(each.data_replicate is None and each.gradient_sync == "last" and not each.reshard for each in attempts)
    assert [each.data_shard for each in attempts[:3]] == [8, 4, 2]


def test_megatron_is_told_of_the_first_blocks_of_every_stage() -> None:
    """Memory for half of the blocks' activations: full recompute of all would be slower, and of none does not fit."""
    job = TrainingSpec(global_batch=64, seq_len=PROFILE.seq_len, software="megatron-core")
    tight = machine(8).model_copy(
        update={
            "hosts": tuple(
                group.model_copy(update={"device": group.device.model_copy(update={"memory": 12e9})})
                for group in machine(8).hosts
            )
        }
    )
    pins = Pins(framework=FRAMEWORKS["megatron"], micro_batch=8, tensor=1, context=1, pipeline=2, schedule="1f1b")

    found = search(PROFILE, tight, job, pins=pins, time_limit_s=2.0, beside_open=False)

    counts = {sum(layer.recompute == "full" for layer in stage.layers) for stage in found.plan.stages}
    words = export(found.plan, "megatron").words
    assert len(counts) == 1
    assert 0 < counts.pop() < 4
    assert words[words.index("--recompute-method") + 1] == "block"
    assert told("megatron", read_back(export(found.plan, "megatron"), found.plan)) == told(
        "megatron", found.plan.model_copy(update={"certificate": None, "prediction": None, "alternatives": ()})
    )


def test_megatron_pads_a_vocabulary_as_it_was_planned() -> None:
    plan = even_plan(
        CostModel(PROFILE, machine(8), training("megatron")),
        Shape(1, 2, 4, 1, 1, 16),
        Pins(recompute="none", reshard=False),
        [0, len(PROFILE.layers)],
    )
    padded = plan.model.model_copy(update={"source": "gpt2/config.json@vocab%128"})

    words = export(plan.model_copy(update={"model": padded}), "megatron").words

    assert words[words.index("--make-vocab-size-divisible-by") + 1] == "32"  # Megatron-LM multiplies it by 4 ranks
    assert "--make-vocab-size-divisible-by" not in export(plan, "megatron").words


@pytest.mark.slow
def test_a_padded_vocabulary_is_cut_by_tensor_parallelism() -> None:
    source = Path(__file__).parents[1] / "benchmarks" / "models" / "gpt2" / "config.json"

    plain, padded = (trace(load_model(f"{source}{more}", 64)) for more in ("", "@vocab%128"))

    kinds = [{cut.kind for c in profile.classes for cut in c.cuts} for profile in (plain, padded)]
    assert kinds == [{"attention", "mlp"}, {"attention", "mlp", "embedding", "head"}]
    assert padded.num_parameters - plain.num_parameters == (50304 - 50257) * 768
    with pytest.raises(ValueError, match="is padded here"):
        load_model(f"{source.parents[1] / 'mlp.py'}@vocab%128")
    with pytest.raises(ValueError, match="a multiple of a whole number"):
        load_model(f"{source}@vocab%x")


def test_every_plan_of_the_sweep_goes_to_its_framework() -> None:
    rows = json.loads((Path(made_for.__file__).with_name("results") / "made_for.json").read_text())

    models = {cases.name_of(source) for source in cases.sources()}
    asked = set(product(models, made_for.GPUS, TARGETS))
    assert {(row["model"], row["gpus"], row["target"]) for row in rows} == asked
    assert {row["outcome"] for row in rows} <= {*made_for.EXPORTED, *made_for.AT_PLANNING}


@pytest.mark.slow
@pytest.mark.parametrize("count", made_for.GPUS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_zoo_model_goes_to_every_framework_on_any_number_of_gpus(target: Target, count: int) -> None:
    found = made_for.made_for(FRAMEWORKS[target], "gpt", zoo_profile("gpt.py"), count, 20.0)

    assert found.outcome in made_for.EXPORTED, found
