"""Model files of odd habits (benchmarks/abuse/odd_models): refused in words, or run as eager trains them."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from benchmarks.abuse.folder import is_well, table_of
from meshwright.planner.plan.legality import legal_cuts, micro_batch_rule, sharding_rule
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace
from support import slow
from support.habits import WIDTH, habit, planned, run

FOLDER = Path(__file__).parents[1] / "benchmarks" / "abuse" / "odd_models"
FILES = sorted(FOLDER.glob("*.py"))


def odd(name: str) -> LoadedModel:
    """The model of a file."""
    return load_model(FOLDER / f"{name}.py")


@pytest.mark.filterwarnings("ignore")  # what the files themselves are warned of
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("asks_arguments", "ends the process by sys.exit.2."),
        ("exits", "ends the process by sys.exit.0."),
        ("ignores_size", r"batch\(1\) and batch\(2\) .* ignores its size"),
        ("new_layers", "the first forward .* makes parameters, second.weight"),
        ("batch_squeezed", "a dim of size 1 is dropped, .*: name the dim to drop, as in squeeze"),
        ("momentum_copy", "writes into the parameter target.0.weight"),
        ("all_frozen", "nothing to train"),
        ("first_batch_scales", "writes into the parameter 1.scale"),
        ("penalty_by_name", "reads 0.bias, which is not in the output"),
        ("subclassed_parameters", "reads place of 0.weight"),
        ("flexible_scores", "uses flex_attention"),
        ("branches", "gives torch functions to call"),
        ("triplets", "runs with 3, 6 samples and not with other numbers up to 8 .*let a sample be a group"),
        ("operator_of_its_own", "calls odd_models::softsign .* say so with its register_fake"),
        ("batch_dataclass", "gives an object of Inputs at .0., whose tensors are cut into no micro-batches"),
    ],
)
def test_what_no_plan_runs_is_refused_when_it_is_profiled(name: str, words: str) -> None:
    random.seed(0)

    with pytest.raises(ValueError, match=words):
        trace(odd(name))


def test_a_model_without_a_forward_is_told_to_have_one() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return self.inner(batch[0]).mean()  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"has no forward: .*training_step .* are not called"):
        trace(habit(Trained))


def _misspelt(x: torch.Tensor) -> torch.Tensor:
    return misspelt(x)  # type: ignore[name-defined, no-any-return]  # noqa: F821


def _leaves(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(0)


def _own_error(x: torch.Tensor) -> torch.Tensor:
    raise Exception


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (_misspelt, r"raised NameError: name 'misspelt' is not defined .*test_odd_files.py:\d"),
        (_leaves, r"the forward, loss or backward of .* ends the process by sys.exit.0."),
        (_own_error, r"does not run with its own micro-batch: Exception \(.*test_odd_files.py:\d"),
    ],
)
def test_whatever_a_forward_raises_is_told_in_a_sentence(
    forward: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(super().forward(x))

    with pytest.raises(ValueError, match=words):
        trace(habit(lambda: Failing(WIDTH, WIDTH)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("complex_weights", "weight is complex64 and .*weight is float32"),
        ("half_model", "weight is float16 and .*weight is float32"),
        pytest.param("hypernetwork", "functional_call", marks=pytest.mark.slow),
        ("straight_through", "gathers codes.weight when its module runs"),
        ("layer_drop", "a draw of Python's or numpy's in .*layer_drop.py .random. decides by values"),
        ("lstm", "None"),
        pytest.param("packed_lstm", "_pack_padded_sequence.* decides by values", marks=pytest.mark.slow),
        pytest.param("transposed_tie", "None", marks=pytest.mark.slow),
        ("weights_read", "None"),
    ],
)
def test_what_fully_shard_gets_wrong_is_not_sharded(name: str, words: str) -> None:
    assert re.search(words, str(sharding_rule(trace(odd(name)), "fp32")))


def test_a_layer_that_draws_leave_out_is_not_said_never_to_be_used() -> None:
    class Dropping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, rate in zip(self, (0.0, 0.8, 0.9999), strict=True):
                x = x if random.random() < rate else layer(x)
            return x

    profile = trace(habit(lambda: Dropping(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))))

    assert any("not used on the way that this forward took" in note for note in profile.notes)


@pytest.mark.slow
def test_dice_that_change_numbers_but_no_layers_are_fine() -> None:
    class Scaled(odd("lora").build().__class__):  # type: ignore[misc]
        def forward(self, x: object) -> object:
            return super().forward(x) * random.random()

    loaded = odd("lora")

    assert trace(load_model(Scaled, batch=loaded.make_batch, loss=loaded.loss)).num_parameters > 0


@pytest.mark.slow
def test_a_head_that_goes_by_the_words_is_profiled_though_other_lengths_go_other_ways() -> None:
    profile = trace(odd("adaptive_softmax"))

    assert not profile.decides_by_values
    assert "goes the way of its batch function's integers" in profile.notes[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clipped_inside", "the gradient of 0.linear.(weight|bias) does not follow a factor of the loss"),
        ("clipped_parameters", "the gradient of .* does not follow"),
        pytest.param("gradient_attached", "the gradient of .*router.* does not follow", marks=pytest.mark.slow),
        ("gradient_hooks", "^$"),
        ("reentrant", "^$"),
    ],
)
def test_gradients_that_do_not_follow_the_loss_are_of_one_micro_batch(name: str, words: str) -> None:
    profile = trace(odd(name))

    assert re.search(words, profile.gradient_problem)
    several = [micro_batch_rule(profile, data, count, pinned=True) for data, count in ((2, 1), (1, 2))]
    assert [rule is not None for rule in several] == [bool(profile.gradient_problem)] * 2
    assert micro_batch_rule(profile, 1, 1, pinned=False) is None


@pytest.mark.parametrize("name", slow.but_first(["mask_kept", "mask_of_activations", "rotary_cached"], 0))
def test_what_is_made_of_sizes_alone_and_kept_is_no_state(name: str) -> None:
    profile = trace(odd(name))

    assert len(profile.layers) == 6
    assert not [note for note in profile.told if "every forward" in note]


def test_layers_that_reentrant_checkpoints_run_are_one_and_it_is_said_why() -> None:
    profile = trace(odd("reentrant"))

    assert len(profile.layers) == 1
    assert any("repeated by reentrant checkpoints" in note for note in profile.notes)


def test_batch_norms_that_are_kept_frozen_are_not_said_to_see_the_batch() -> None:
    assert not [note for note in trace(odd("frozen_norms")).told if "micro-batch" in note]


@pytest.mark.slow
def test_a_batch_with_the_number_of_its_samples_is_drawn_and_not_repeated() -> None:
    profile = trace(odd("nodes_of_graphs"))

    assert "goes the way of its batch function's integers" in profile.notes[0]
    assert "counts rows of all samples" in profile.batch_problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "words"),
    [
        ("longest_in_batch", 1, r"what embed returns is \[2, \d+, 32\] in one batch of 2"),
        ("early_heads", 2, "what add returns between layers is not there, or another tensor, in evaluation"),
    ],
)
def test_what_is_not_the_same_in_every_run_is_sent_between_no_stages(name: str, most: int, words: str) -> None:
    assert len(legal_cuts(trace(odd(name)))) == most - 1

    with pytest.raises(ValueError, match=f"cut into .{most}.: {words}"):
        planned(odd(name), ranks=4, pipeline=4)


def test_what_a_pin_leaves_is_not_laid_to_cuts_that_nobody_asked_for() -> None:
    with pytest.raises(ValueError, match=r"legal with pipeline=2: micro_batch: the gradient of .* does not follow"):
        planned(odd("clipped_parameters"), ranks=4, pipeline=2)


def test_gradients_by_how_often_a_word_is_there_couple_samples() -> None:
    assert "the gradient of embed.weight in 4 samples is not" in trace(odd("gradient_by_frequency")).coupling


@pytest.mark.slow
def test_weights_of_labels_are_seen_though_some_batches_have_as_many_in_both_halves() -> None:
    assert "samples of a micro-batch see each other a little" in trace(odd("class_weights")).told[0]


def test_a_mean_over_what_counts_in_a_batch_is_told_with_its_way_out() -> None:
    told = trace(odd("unweighed_labels")).told

    assert re.search(r"has (?!50%)\d+% of the weight in their loss and 50% as a micro-batch.*weight\(batch\)", told[0])
    assert trace(odd("ignored_labels")).told == ()


@pytest.mark.parametrize("name", ["hard_examples", "balanced_losses"])
def test_samples_that_see_each_other_in_gradients_alone_couple(name: str) -> None:
    assert re.match("the gradient of .* in 4 samples is not the mean of its halves'", trace(odd(name)).coupling)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("neighbour_pairs", "the loss of 2 samples is .*, the mean of each one's alone nan"),
        ("cross_correlation", "the loss of 4 samples is .*, the mean of its halves'"),
    ],
)
def test_samples_that_are_pairs_or_see_each_other_behind_a_batch_norm_couple(name: str, words: str) -> None:
    assert re.match(words, trace(odd(name)).coupling)


def test_the_first_screen_says_that_samples_see_each_other() -> None:
    screen = " ".join(str(mw.plan(FOLDER / "unweighed_labels.py", gpus=2, device="cpu")).split())

    assert "note samples of a micro-batch see each other a little" in screen


def test_bounds_of_rows_are_not_cut() -> None:
    profile = trace(odd("ragged"))

    assert [tensor.counts_rows for tensor in profile.batch] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("one_object", {"pipeline": 2}),
        pytest.param("held_by_first", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("rotary_cached", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("inference_mode", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("mask_kept", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("mask_of_activations", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("norm_of_all", {"pipeline": 2, "schedule": "interleaved"}, marks=pytest.mark.slow),
        pytest.param("reentrant", {"data_replicate": 2}, marks=pytest.mark.slow),
        pytest.param("ragged", {"pipeline": 2, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("expert_loop", {"data_shard": 2}, marks=pytest.mark.slow),
        pytest.param("expert_loop", {"pipeline": 2, "schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
)
def test_plans_of_odd_files_give_the_same_numbers(name: str, pins: dict[str, int]) -> None:
    """Of files that the open question, as test_all_odd_files asks it, does not show under such a plan."""
    report = run(odd(name), **pins)

    assert report.ok, report.lines[-1]


def test_what_is_put_into_a_tensor_between_layers_is_sent_with_it() -> None:
    profile = trace(odd("results_written"))

    sent = {tensor.producer.name: tensor.used_by for tensor in profile.tensors}
    assert len(profile.layers) == 6
    assert sent["layers.0"] == (2, 3, 4, 5)
    assert all(tensor.requires_grad for tensor in profile.tensors)


def test_what_is_copied_into_a_part_of_a_tensor_between_layers_joins_them() -> None:
    profile = trace(odd("results_copied"))

    assert len(profile.layers) == 2
    assert any(note.startswith("the forward writes between layers into a part of a tensor") for note in profile.notes)


@pytest.mark.parametrize(
    ("name", "why", "of_a_copy"),
    [
        ("object_changed", "layers.0 changes attributes of an object of Progress that it is given", False),
        ("list_filled", "layers.0 keeps a tensor aside that stack reads", True),
    ],
)
def test_layers_from_the_first_that_changes_an_object_on_are_one(name: str, why: str, of_a_copy: bool) -> None:
    profile = trace(odd(name))

    assert len(profile.layers) == 2
    assert any(why in note for note in profile.notes)
    assert ("of which fully_shard gives it a copy" in profile.sharding_problem) == of_a_copy


def test_layers_that_write_into_a_tensor_and_do_not_return_it_are_one() -> None:
    profile = trace(odd("written_by_layers"))

    assert len(profile.layers) == 2
    assert any("layers.0 writes into a tensor that it does not return and head reads" in n for n in profile.notes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["results_written", "written_by_layers"])
def test_tensors_that_are_written_in_parts_give_the_same_numbers_in_stages(name: str, schedule: str) -> None:
    report = run(odd(name), pipeline=2, schedule=schedule, micro_batch=2)

    assert report.ok, report.lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_odd_files_are_planned_and_verified_or_refused(part: int) -> None:
    ill = {name: answers for name, answers in table_of(FILES[part::4], 1) if not is_well(answers, 1)}

    assert ill == {}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_all_odd_files_are_verified_with_several_plans_or_refused() -> None:
    ill = {name: answers for name, answers in table_of(FILES, 4) if not is_well(answers, 4)}

    assert ill == {}


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))


def features(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8), torch.randn(size, 4)


def distance(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


@pytest.mark.slow
def test_dropout_is_off_in_both_runs_that_are_compared() -> None:
    report = run(load_model(dropping, batch=features, loss=distance), data_replicate=2)

    assert report.ok, report.lines
