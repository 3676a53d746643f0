"""Generated models of odd habits: planned and verified, or refused with a rule; and how failures are made small."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.abuse import outcomes
from benchmarks.abuse.generate import Tree, draw, file_of, loaded
from benchmarks.abuse.outcomes import FAILURES, Outcome
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace


def test_trees_are_the_same_from_run_to_run_and_come_back_from_text() -> None:
    trees = [draw(seed) for seed in range(50)]

    assert [Tree.of(tree.text) for tree in trees] == trees == [draw(seed) for seed in range(50)]
    assert len({tree.blocks for tree in trees}) > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_generated_model_is_verified_or_refused(seed: int) -> None:
    found = list(outcomes.outcomes(draw(seed), plans=2))

    assert [outcome.words for outcome in found if outcome.kind in FAILURES] == []


def test_a_failure_is_shrunk_to_what_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(tree: Tree, pins: dict[str, object]) -> Outcome:
        fails = "norm" in (tree.blocks[i] for i in tree.order) and bool(tree.hooks)
        return Outcome(tree, pins, "different" if fails else "verified")

    monkeypatch.setattr(outcomes, "_again", again)
    tree = Tree(1, ("mlp", "norm", "gated"), (0, 1, 2, 0), ((0, 2),), ((0, 3),), ((0, "keep"), (2, "keep")), (3,))

    least = outcomes.shrunken(Outcome(replace(tree, batch="dict"), {}, "different")).tree

    assert least == Tree(1, ("linear", "norm", "linear"), (1,), hooks=((2, "keep"),))


def test_a_minimal_file_is_a_model_file(tmp_path: Path) -> None:
    path = tmp_path / "least.py"
    path.write_text(file_of(draw(3), {"pipeline": 2}, "a difference"))

    built = load_model(path).build()

    shapes = {name: p.shape for name, p in loaded(draw(3)).build().named_parameters()}
    assert {name: p.shape for name, p in built.named_parameters()} == shapes


def test_what_trains_in_pytorch_is_not_refused_by_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: LoadedModel) -> None:
        raise ValueError(f"{model.name} does not run")

    monkeypatch.setattr(outcomes, "trace", refuse)

    well = next(outcomes.outcomes(Tree(1, ("linear",), (0,))))
    unwell = next(outcomes.outcomes(Tree(1, ("linear",), (0,), hooks=((0, "backward"),), writes=(0,))))

    assert (well.kind, unwell.kind) == ("failed", "refused")


@pytest.mark.slow
def test_backward_hooks_are_planned() -> None:
    tree = Tree(1, ("linear", "mlp"), (0, 1), hooks=((1, "backward"),))

    found = list(outcomes.outcomes(tree, plans=1))

    assert [outcome.kind for outcome in found] == ["verified"]


@pytest.mark.slow
def test_tied_weights_that_one_stage_gives_no_gradient_are_summed_by_both() -> None:
    tree = Tree(1, ("residual", "norm", "linear", "bias only"), (0, 1, 2, 3), ties=((0, 2),))
    made = loaded(tree)

    kind, words, _ = outcomes.answered(made, trace(made), {"pipeline": 2, "schedule": "zb-h1"})

    assert (kind, words) == ("verified", "")


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    made = loaded(Tree(1, ("linear",), (0,)))

    with pytest.raises(ValueError, match="returned a dict, not the one tensor that is trained on"):
        trace(replace(made, loss=lambda output, batch: {"loss": output.sum()}))


def test_work_that_does_not_grow_evenly_with_samples_is_refused_in_words() -> None:
    """Of one sample the loss does more, so that its work is seen at two and at three."""

    def of_pairs(output: Any, batch: Any) -> Any:
        own = output.sin() if len(output) == 1 else output
        return (own @ own.T).square().mean()

    model = replace(loaded(Tree(1, ("linear", "linear"), (0, 1))), loss=of_pairs)

    with pytest.raises(ValueError, match=r"cannot be priced: mm in the code of .* must grow evenly with the samples"):
        trace(model)
