"""verify: equal numbers are called equal, unequal ones are named, and what cannot be run is said in a sentence."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.executor.measuring import verify
from meshwright.executor.measuring.local_ranks import RankError, run_local_ranks
from meshwright.executor.measuring.one_process import ReplicaTurns, RunResult, no_dropout
from meshwright.executor.measuring.shrink import shrunken_config
from meshwright.executor.measuring.small_plan import shrunken_degrees, small_model, small_plan, small_stages
from meshwright.executor.measuring.verify import TOLERANCE, Difference, VerifyReport, compared, in_double
from meshwright.executor.parallel import gradients
from meshwright.executor.parallel.stage_module import StageModule
from meshwright.planner.plan.document import ClassPlan, Degrees, LayerPlan, Plan, Recompute, Stage
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile, TensorCut
from meshwright.profiler.model.trace import trace
from meshwright.profiler.semantics.draws import SameDraws
from meshwright.profiler.tensor_cuts.tensor_cuts import SMALLEST_VOCABULARY
from support import habits, synthetic

GPT = Path(__file__).parent.parent / "benchmarks" / "models" / "gpt.py"


@cache
def small_gpt() -> tuple[LoadedModel, ModelProfile]:
    """The small GPT and its profile."""
    loaded = load_model(GPT).small
    assert loaded is not None
    return loaded(), trace(loaded())


def gpt_plan(micro_batch: int = 2, num_microbatches: int = 4, **degrees: Any) -> Plan:
    """A plan for the small GPT; every other layer gives its parameters back."""
    _, profile = small_gpt()
    shape = Shape(
        **{"data_replicate": 1, "data_shard": 1, "tensor": 1, "pipeline": 1, **degrees},
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
    )
    shape = replace(shape, schedule="1f1b" if shape.pipeline > 1 else "none")
    training = TrainingSpec(
        global_batch=micro_batch * num_microbatches * shape.data, seq_len=profile.seq_len, precision="bf16"
    )
    per_stage = len(profile.layers) // shape.pipeline
    stages = [[LayerOption(reshard=i % 2 == 0) for i in range(per_stage)] for _ in range(shape.pipeline)]
    return make_plan(profile, synthetic.cluster(1, shape.degrees.num_devices), training, shape, stages)


def test_another_model_than_the_plans_is_not_run_in_its_place() -> None:
    other = load_model(lambda: torch.nn.Linear(4, 4), batch=lambda size: torch.ones(size, 4), loss=lambda y, x: y.sum())

    with pytest.raises(ValueError, match=r"the plan is for gpt.* with a parameter .* that this Linear has not"):
        verify.verify(gpt_plan(), other)


@pytest.mark.slow
def test_a_plan_of_three_kinds_of_parallelism_computes_what_one_process_computes() -> None:
    loaded, _ = small_gpt()

    report = verify.verify(gpt_plan(data_shard=2, tensor=2, pipeline=2, sequence=True), loaded)

    assert report.ok, report.lines
    assert set(report.largest) == {"loss", "gradient norm", "gradients", "parameters", "evaluation"}
    assert all(difference.relative <= TOLERANCE / 4 for difference in report.largest.values())
    assert report.lines[-1].startswith("SAME NUMBERS")


@pytest.mark.slow
def test_a_forgotten_tie_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = small_gpt()
    monkeypatch.setattr(gradients.Gradients, "reduce", lambda self: None)

    report = verify.verify(gpt_plan(pipeline=2), loaded)

    assert not report.ok
    assert report.first is not None
    assert "gradient of tokens.weight in step 1" in report.first.what
    assert f"{report.first.one_process:.7g}" in report.lines[-1]
    assert f"{report.first.plan:.7g}" in report.lines[-1]


@pytest.mark.slow
def test_gradients_of_a_wrong_size_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = small_gpt()
    forward = StageModule.forward

    def twice(self: StageModule, *given: Any) -> Any:
        output = forward(self, *given)
        return output if isinstance(output, tuple) else output * 2

    monkeypatch.setattr(StageModule, "forward", twice)

    report = verify.verify(gpt_plan(pipeline=2), loaded)

    assert report.first is not None
    assert report.first.relative == pytest.approx(1.0)


@pytest.mark.slow
def test_a_rank_that_fails_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = small_gpt()
    forward = StageModule.forward

    def fail(self: StageModule, *given: Any) -> Any:
        if self.stage == 1:
            raise ValueError("no more\nof this")
        return forward(self, *given)

    monkeypatch.setattr(StageModule, "forward", fail)

    report = verify.verify(gpt_plan(pipeline=2), loaded)

    assert not report.ok
    assert report.lines[-1] == "NOT VERIFIED: the plan did not run: rank 1 of 2 failed: ValueError: no more of this"
    assert "in fail" in report.detail


@pytest.mark.slow
def test_ranks_that_hang_are_ended() -> None:
    def hang() -> None:
        while torch.distributed.get_rank():
            signal.pause()

    started = time.monotonic()

    with pytest.raises(RankError, match=r"after 5 s rank 1 of 2 had not ended"):
        run_local_ranks(hang, 2, timeout_s=5.0)

    assert time.monotonic() - started < 300


def test_a_rank_that_dies_says_how() -> None:
    with pytest.raises(RankError, match="signal SIGTERM"):
        run_local_ranks(lambda: os.kill(os.getpid(), signal.SIGTERM), 1, timeout_s=300.0)


def test_ranks_answer_in_order() -> None:
    assert run_local_ranks(lambda x: (torch.distributed.get_rank(), x), 2, "x", timeout_s=300.0) == [(0, "x"), (1, "x")]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (Degrees(data_shard=64), Degrees(data_shard=8)),
        (Degrees(data_shard=8, tensor=8, pipeline=4), Degrees(data_shard=2, tensor=2, pipeline=2)),
        (Degrees(data_replicate=3, pipeline=4), Degrees(data_replicate=3, pipeline=2)),
        (
            Degrees(data_replicate=4, data_shard=8, tensor=8, pipeline=16),
            Degrees(data_replicate=2, data_shard=2, tensor=2, pipeline=2),
        ),
        (Degrees(pipeline=13), Degrees(pipeline=2)),
        (Degrees(data_shard=4, context=16, tensor=2), Degrees(data_shard=2, context=2, tensor=2)),
        (Degrees(tensor=2), Degrees(tensor=2)),
    ],
)
def test_degrees_shrink_to_the_machine_but_none_vanishes(degrees: Degrees, expected: Degrees) -> None:
    assert shrunken_degrees(degrees, 8) == expected


def layer(recompute: Recompute = "none", reshard: bool = False) -> LayerPlan:
    """A layer of which only the choices matter."""
    return LayerPlan(
        name="x", layer_class="X", root="", modules=("x",), parameters=(), recompute=recompute, reshard=reshard
    )


def test_cuts_scale_in_proportion_and_every_choice_of_a_stage_is_kept() -> None:
    stages = [[layer("full"), *[layer()] * 8], [layer()] * 20, [layer(reshard=True)] * 3]

    options = small_stages(stages, [False, *[True] * 7], range(1, 8))

    assert [len(stage) for stage in options] == [2, 5, 1]
    assert [o.recompute for o in options[0]] == ["none", "full"]
    assert not any(o.reshard or o.recompute == "full" for o in options[1])
    assert options[2][0].reshard


def test_every_kind_of_recompute_of_a_stage_is_kept() -> None:
    stages = [[layer("full"), layer("selective"), *[layer()] * 20, layer("attention")]]

    (options,) = small_stages(stages, [True] * 4, [])

    assert {o.recompute for o in options} == {"none", "full", "selective", "attention"}


def with_recompute(plan: Plan, *kinds: Recompute) -> Plan:
    """The plan with these kinds of recompute for its blocks, one after the other."""
    stages, kind = [], cycle(kinds)
    for stage in plan.stages:
        changed = [
            each.model_copy(update={"recompute": next(kind)}) if each.layer_class == "Block" else each
            for each in stage.layers
        ]
        stages.append(Stage(layers=tuple(changed)))
    return plan.model_copy(update={"stages": tuple(stages)})


@pytest.mark.slow
def test_parts_of_layers_are_recomputed_in_the_small_model_too() -> None:
    loaded, profile = small_gpt()
    plan = with_recompute(gpt_plan(data_shard=2, pipeline=2), "parts:norm1+attention", "parts:norm2")

    small, _ = small_plan(plan, profile)
    report = verify.verify(plan, loaded)

    found = {each.recompute for each in small.layers}
    assert found == {"none", "parts:norm1+attention", "parts:norm2"}
    assert report.ok, report.lines


@pytest.mark.slow
def test_parts_that_small_layers_do_not_have_are_named() -> None:
    plan = with_recompute(gpt_plan(data_shard=2), "parts:attention+router", "parts:bank")

    small, notes = small_plan(plan, small_gpt()[1])

    assert {each.recompute for each in small.stages[0].layers} == {"none", "parts:attention"}
    assert "bank, router is not recomputed here: no such part is in the small model's layers" in notes


def test_cuts_that_the_small_model_does_not_have_are_named() -> None:
    plan, profile = gpt_plan(tensor=2), small_gpt()[1]
    cut = TensorCut(kind="embedding", columns=("",), units=(50304,), sharded={"weight": 0})
    more = plan.model_copy(update={"classes": (*plan.classes, ClassPlan(name="Embedding", cuts=(cut,)))})

    told = "the tensor cut of embedding is not run here: the small model has that whole (cut from 1,024 rows on)"
    assert small_plan(more, profile)[1] == (told,)
    assert small_plan(plan, profile)[1] == ()


@pytest.mark.parametrize(
    ("schedule", "virtual", "kept"), [("interleaved", 2, 2), ("interleaved", 9, 3), ("zb-h1", 3, 3), ("zb-v", 2, 2)]
)
def test_ranks_keep_several_stages_as_far_as_the_small_model_has_layers(
    schedule: Schedule, virtual: int, kept: int
) -> None:
    plan = gpt_plan(2, 8, pipeline=2)
    longer = tuple(plan.stages[0].layers) * 9
    stages = tuple(Stage(layers=longer[:1]) for _ in range(2 * virtual))
    chunked = plan.model_copy(
        update={
            "schedule": schedule,
            "stages": stages,
            "degrees": plan.degrees.model_copy(update={"virtual_stages": virtual}),
        }
    )

    small, _ = small_plan(chunked, small_gpt()[1])

    assert (small.degrees.pipeline, small.degrees.virtual_stages, len(small.stages)) == (2, kept, 2 * kept)
    assert small.schedule == schedule


def test_every_stage_keeps_a_layer() -> None:
    stages = small_stages([[layer()], [layer()], [layer()] * 98], [True] * 3, [1, 2])

    assert [len(stage) for stage in stages] == [1, 1, 1]


def test_no_stage_ends_between_layers_that_share_a_parameter() -> None:
    stages = small_stages([[layer()] * 2, [layer()] * 2], [True] * 4, [1])

    assert [len(stage) for stage in stages] == [1, 3]


def test_what_is_scaled_down_is_said() -> None:
    plan, notes = small_plan(gpt_plan(4, 32, data_shard=8, tensor=4, pipeline=3), small_gpt()[1])

    assert plan.degrees == Degrees(data_shard=2, tensor=2, pipeline=2)
    assert notes == (
        "data_shard is 2 here instead of 8",
        "tensor is 2 here instead of 4",
        "pipeline is 2 here instead of 3",
    )
    assert plan.num_microbatches >= 2 * plan.degrees.pipeline
    assert plan.training.precision == "fp32"


def test_a_shrunken_config_can_be_cut_as_the_plan_cuts() -> None:
    plan = gpt_plan(tensor=2, pipeline=3)
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "eos_token_id": 128001,
        "attention_dropout": 0.1,
        "layer_types": ["sliding"] * 79 + ["full"],
        "rms_norm_eps": 1e-5,
    }

    small = shrunken_config(config, plan.degrees, 8)

    assert small["num_key_value_heads"] % 2 == 0
    assert small["num_attention_heads"] == 2 * small["num_key_value_heads"]
    assert small["hidden_size"] % small["num_attention_heads"] == 0
    assert small["num_hidden_layers"] == 3
    assert small["layer_types"] == ["sliding", "full", "sliding"]
    assert small["eos_token_id"] < small["vocab_size"] == SMALLEST_VOCABULARY  # the least that is cut
    assert small["attention_dropout"] == 0.0
    assert small["rms_norm_eps"] == 1e-5


def test_a_shrunken_config_keeps_what_is_cut_in_a_way_of_its_own() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 50257}

    small = shrunken_config(config, gpt_plan(tensor=4).degrees, 8)

    assert (small["num_key_value_heads"], small["num_attention_heads"] % 4) == (1, 0)
    assert small["vocab_size"] >= SMALLEST_VOCABULARY
    assert small["vocab_size"] % 4  # as 50,257, which stays whole


@pytest.mark.slow
def test_a_shrunken_gemma_has_its_scaled_embedding_cut(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path, seq_len=32)
    profile = trace(loaded)
    training = TrainingSpec(global_batch=4, seq_len=32, precision="fp32")
    stages = [[LayerOption()] * len(profile.layers)]
    plan = make_plan(profile, synthetic.cluster(1, 2), training, Shape(1, 1, 2, 1, 4, 1), stages)
    small, _ = small_model(plan, loaded, tmp_path)

    assert "embedding" in {cut.kind for layer in trace(small).classes for cut in layer.cuts}
    assert verify.verify(plan, loaded).ok


@pytest.mark.slow
def test_a_hugging_face_config_is_shrunk_and_verified(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path, seq_len=32)
    profile = trace(loaded)
    shape = Shape(1, 1, 2, 2, 2, 4, schedule="1f1b")
    training = TrainingSpec(global_batch=8, seq_len=32, precision="fp32")
    stages = [[LayerOption("full")] * 4, [LayerOption()] * 4]
    plan = make_plan(profile, synthetic.cluster(1, 4), training, shape, stages)

    report = verify.verify(plan, loaded)

    assert report.ok, report.lines
    assert "config.json shrunken" in report.notes[0]


def test_a_large_model_without_a_small_version_is_refused(tmp_path: Path) -> None:
    loaded = replace(load_model(GPT), small=None)
    plan = gpt_plan()
    large = plan.model_copy(update={"model": plan.model.model_copy(update={"num_parameters": 10**9})})

    with pytest.raises(ValueError, match=r"1,000,000,000 parameters.*add to .*gpt.py a function small\(\)"):
        small_model(large, loaded, tmp_path)


def run(loss: float = 1.0, gradient: float = 1.0, tiny: float = 1e-9, parameter: float = 2.0) -> Any:
    """What a run of one step computed."""
    return RunResult(
        [loss], [gradient], {"a": torch.tensor([gradient, 0.0]), "zero": torch.tensor([tiny])},
        {"a": torch.tensor([parameter]), "zero": torch.tensor([0.0])}, 1.0,
    )  # fmt: skip


REPORT = VerifyReport("title", (), {})


def test_complex_numbers_are_held_against_exact_ones_in_both_parts() -> None:
    def of(imaginary: float) -> Any:
        return replace(run(), gradients={"a": torch.tensor([[complex(1.0, imaginary)] * 3])})

    assert compared(REPORT, of(1.01), of(0.99), of(1.0)).rounding
    assert not compared(REPORT, of(1.01), of(0.9), of(1.0)).ok


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    assert compared(REPORT, run(tiny=1e-9), run(tiny=-3e-9)).ok


@pytest.mark.parametrize(
    ("found", "first"),
    [
        (run(loss=1.1), Difference("loss of step 1", 1.0, pytest.approx(1.1), pytest.approx(0.1))),
        (run(gradient=1.5, parameter=9.0), Difference("gradient of a in step 1", 1.0, 1.5, 0.5)),
        (run(tiny=0.5), Difference("gradient of zero in step 1", pytest.approx(1e-9), 0.5, pytest.approx(100))),
        (run(parameter=2.5), Difference("a after step 1", 2.0, 2.5, 0.25)),
    ],
)
def test_the_first_difference_is_named_with_both_values(found: Any, first: Difference) -> None:
    assert compared(REPORT, run(), found).first == first


def test_what_rounding_does_to_one_process_it_may_do_to_a_plan() -> None:
    one, plan, exact = run(tiny=4e-4), run(tiny=-1e-4), run(tiny=0.0)

    assert not compared(REPORT, one, plan).ok
    held = compared(REPORT, one, plan, exact)
    assert held.ok
    assert held.largest["gradients"].relative == pytest.approx(0.1)
    assert "SAME NUMBERS as one process but for rounding" in held.lines[-1]
    assert not compared(REPORT, one, run(tiny=-2e-2), exact).ok
    assert not compared(REPORT, one, run(gradient=1.5), exact).ok
    assert not compared(REPORT, one, run(parameter=float("nan")), exact).ok


def test_a_loss_of_which_rounding_leaves_few_digits_is_held_against_exact_numbers() -> None:
    one, plan, exact = run(loss=1.0004), run(loss=1.0001), run(loss=1.0)

    assert not compared(REPORT, one, plan).ok
    assert compared(REPORT, one, plan, exact).ok
    assert not compared(REPORT, one, run(loss=1.01), exact).ok
    assert not compared(REPORT, one, run(loss=float("nan")), exact).ok


class _Casting(nn.Linear):
    """In half precision by autocast, and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def test_exact_numbers_stay_so_where_a_model_casts_by_name() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output.to(torch.float32) - batch[1].half()).square().mean()

    exact = in_double(load_model(lambda: _Casting(4, 4), batch=lambda size: 2 * (torch.randn(size, 4),), loss=loss))
    module, x = exact.build(), torch.randn(2, 4, dtype=torch.float64)
    output = module(x)

    assert exact.loss is not None
    assert exact.loss(output, (x, x)).dtype == torch.float64
    assert torch.equal(output, functional.linear(x, module.weight, module.bias))


def test_not_a_number_is_a_difference() -> None:
    assert not compared(REPORT, run(), run(parameter=float("nan"))).ok


def test_dropout_is_off_only_inside() -> None:
    x = torch.ones(1000)

    with no_dropout(torch.nn.Dropout(0.5)):
        inside = functional.dropout(x, 0.5), torch.nn.Dropout(0.5)(x)

    assert all(torch.equal(y, x) for y in inside)
    assert not torch.equal(functional.dropout(x, 0.5), x)


class _Held(nn.Module):
    """A block that holds torch's dropout in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), functional.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(x).tanh()), 0.2, self.training)


def test_dropout_that_a_model_holds_is_off_inside_too() -> None:
    block, x = _Held(), torch.ones(4, 8)

    with no_dropout(block):
        assert torch.equal(block(x), block.eval()(x))


@pytest.mark.slow
def test_dropout_that_a_model_holds_is_off_where_tensor_ranks_look_at_their_first_step() -> None:
    loaded = load_model(
        lambda: nn.Sequential(_Held(), _Held()),
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )

    report = habits.run(loaded, tensor=2)

    assert report.ok, report.lines


def test_what_draws_in_passing_computes_all_the_same() -> None:
    x = torch.tensor([-2.0, 3.0], requires_grad=True)

    with SameDraws() as draws:
        y = functional.rrelu(x, 0.1, 0.3, training=True)
        y.sum().backward()

    assert draws.drew
    assert x.grad is not None
    torch.testing.assert_close(y.detach(), torch.tensor([-0.4, 3.0]))
    torch.testing.assert_close(x.grad, torch.tensor([0.2, 1.0]))


_LOSSES = [0]


class _CountsInItsClass(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _CountsInItsClass.calls += 1
        return super().forward(x)


def _counted(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    _LOSSES[0] += 1
    return output.mean()


def test_replicas_of_one_process_count_for_themselves_what_their_code_counts() -> None:
    loaded = load_model(lambda: _CountsInItsClass(2, 2), batch=lambda size: torch.ones(size, 2), loss=_counted)
    replicas = [loaded.build() for _ in range(2)]
    turns = ReplicaTurns(replicas, [loaded] * 2)
    counts = []

    for number in (0, 1, 1, 0):
        turns.take(number)
        _counted(replicas[number](torch.ones(1, 2)), torch.ones(1, 2))
        counts.append((_CountsInItsClass.calls, _LOSSES[0]))

    assert counts == [(1, 1), (1, 1), (2, 2), (2, 2)]
