"""Evaluation under every plan gives what one process gives, and leaves training as it was."""

from typing import Any

import pytest
import torch
from test_random_numbers import CASES, MODELS, VOCABULARY, profile_of

from meshwright.executor import Trainer
from meshwright.executor.parallel.micro_batches import loss_of
from support import slow
from support.ranks import run_ranks
from support.same_numbers import Case, errors, numbers_of, plan_of, samples, trainer_of

MORE = {
    "one": Case("drop", num_microbatches=2),
    "zero-3": Case("drop", shard=2, reshard=True),
    "pipeline 2, gpipe": Case("drop", stages=(1, 3), num_microbatches=2, more={"schedule": "gpipe"}),
    "tensor 2, tied, head": Case("gpt", tensor=2),
}


def accuracy(output: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (output.argmax(-1) == batch[1]).double().mean()


def evaluated(trainer: Trainer) -> tuple[dict[str, float], torch.Tensor]:
    """(means over three batches, the outputs for this rank's share of the first one)."""
    data = samples(VOCABULARY, 3)
    found = trainer.evaluate(trainer.loader(data, training=False), {"accuracy": accuracy})
    return found, trainer.forward(next(trainer.loader(data, training=False))).clone()


def run(case: Case) -> tuple[list[Any], list[int], Any]:
    """Evaluations before, between and after steps; this rank's samples of a batch; what training gave."""
    trainer = trainer_of(MODELS[case.model], plan_of(case, profile_of(case.model)))
    before = evaluated(trainer)
    progress = trainer.progress
    numbers = numbers_of(trainer, samples(VOCABULARY, 2))
    after = evaluated(trainer)
    share = trainer.samples_per_step
    assert trainer.progress.steps == 2
    assert progress.samples == 0
    assert all(module.training for module in trainer.model.modules())
    return [before, after], [trainer.data_rank * share, (trainer.data_rank + 1) * share], numbers


NAMES = {**CASES, **{name: case for name, case in MORE.items() if case.model == "drop"}}


@pytest.mark.parametrize("name", slow.but_these(NAMES, ["pipeline 2, gpipe"]))
def test_every_plan_evaluates_as_one_process_does(name: str) -> None:
    case = NAMES[name]
    expected, _, trained = run(Case(case.model, num_microbatches=1))
    plan_of(case, profile_of(case.model))

    found = [run(case)] if case.num_ranks == 1 else run_ranks(run, case.num_ranks, case)

    for evaluations, (start, end), numbers in found:
        for (means, outputs), (whole_means, whole) in zip(evaluations, expected, strict=True):
            assert means == pytest.approx(whole_means, rel=1e-5)
            torch.testing.assert_close(outputs, whole[start:end], rtol=1e-4, atol=1e-5)
        assert numbers.losses == pytest.approx(trained.losses, rel=1e-5)
    assert max(errors(found[0][2], trained, 2e-2, 1e-3).values()) < 1e-5
    assert expected[0][0]["loss"] > expected[1][0]["loss"]


def test_a_loss_among_several_numbers_must_have_a_name_where_nothing_has_gradients() -> None:
    loss, metric = torch.ones(()), torch.ones(1)

    with torch.no_grad(), pytest.raises(ValueError, match=r'2 single numbers.*under a name, \{"loss": loss'):
        loss_of((metric, loss))

    with torch.no_grad():
        assert loss_of((torch.ones(3), loss)) is not None
