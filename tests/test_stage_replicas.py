"""Replicas of pipeline stages average gradients while the last backward goes on: with the numbers of one process."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.executor import Trainer
from meshwright.executor.parallel import flat_gradients
from meshwright.executor.parallel.stage_replicas import StageReplicas
from support import slow
from support.ranks import RankError, run_ranks
from support.same_numbers import TOLERANCE, Case, Numbers, errors, numbers_of, plan_of, samples, trainer_of
from support.trained_models import NOISE, NUM_STEPS, VOCABULARY, loaded_model, profile_of, reference_of

os.environ.setdefault("OMP_NUM_THREADS", "1")

BUFFER = 4_000
"""Elements: several of them in each stage of the small models."""

CASES = {
    "1f1b": Case("gpt", 2, stages=(2, 4), num_microbatches=4),
    "naive, unread parameters": Case("normed", 2, stages=(2, 2), num_microbatches=1, more={"schedule": "gpipe"}),
    "gpipe, recompute": Case("llama", 2, stages=(2, 3), recompute="full", more={"schedule": "gpipe"}),
    "interleaved": Case("gpt", 2, stages=(1, 2, 1, 2), virtual=2, more={"schedule": "interleaved"}),
    "zb-h1": Case("gpt", 2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}),
    "zb-v, tied on one rank": Case("gpt", 2, stages=(1, 2, 1, 2), virtual=2, more={"schedule": "zb-v"}),
}

Sent = list[tuple[int, int | None, bool]]
"""Of each step: buffers that were on their way when its schedule had ended, how many there are, and whether one was on
its way while gradients were to come."""


@contextmanager
def _small_buffers() -> Iterator[Sent]:
    seen: Sent = []
    finish, send, grad = StageReplicas.finish, StageReplicas._send, torch.autograd.grad
    num_parts = 0  # of backwards: a zero-bubble schedule calls for each
    at_sends: list[tuple[int, int]] = []

    def in_part(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_parts
        num_parts += 1
        return grad(*args, **kwargs)

    def noting(self: StageReplicas) -> None:
        is_early = bool(at_sends) and at_sends[0][0] < len(self._arrived)
        if num_parts:
            is_early = is_early and at_sends[0][1] < num_parts
        seen.append((len(self._sent), None if self._buffers is None else len(self._buffers), is_early))
        finish(self)
        at_sends.clear()

    def sending(self: StageReplicas, buffer: Sequence[nn.Parameter]) -> None:
        at_sends.append((len(self._arrived), num_parts))
        send(self, buffer)

    with (
        patch.object(flat_gradients, "BUCKET_ELEMENTS", BUFFER),
        patch.object(StageReplicas, "finish", noting),
        patch.object(StageReplicas, "_send", sending),
        patch.object(torch.autograd, "grad", in_part),
    ):
        yield seen


def _trainer(case: Case) -> Trainer:
    return trainer_of(loaded_model(case.model).build, plan_of(case, profile_of(case.model)))


def _trained(case: Case) -> tuple[Numbers, Sent]:
    with _small_buffers() as seen:
        return numbers_of(_trainer(case), samples(VOCABULARY, NUM_STEPS)), seen


@pytest.mark.parametrize("name", slow.but_first(CASES, 1))
def test_replicas_average_while_the_last_backward_goes_on(name: str) -> None:
    case = CASES[name]
    expected = reference_of(case.model)
    profile_of(case.model)  # before the fork

    ranks = run_ranks(_trained, case.num_ranks, case)

    relative = errors(ranks[0][0], expected, NOISE / TOLERANCE)
    assert max(relative.values()) < TOLERANCE, relative
    for _, seen in ranks:
        for sent, there_are, is_early in seen[1:]:  # the first step learns
            assert there_are is not None
            assert there_are > 1
            assert sent == there_are
            assert is_early


def _by_hand(case: Case) -> tuple[Sent, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of two backwards and one optimizer step, after a first step; as they are, and averaged at the end."""
    found = []
    for learns in (True, False):
        with _small_buffers() as seen:
            trainer = _trainer(case)
            if not learns:
                trainer._gradients.replicas._learn = lambda: None  # type: ignore[union-attr, method-assign]
            batch = next(iter(trainer.loader(samples(VOCABULARY, 1))))
            trainer.step(batch)
            trainer.forward_backward(batch)
            trainer.forward_backward(batch, scale=0.5)
            trainer.optimizer_step()
            found.append((seen, trainer.named_gradients()))
    return found[0][0], found[0][1], found[1][1]


@pytest.mark.slow
def test_nothing_is_averaged_before_the_last_of_several_backwards() -> None:
    case = CASES["1f1b"]
    profile_of(case.model)

    seen, gradients, expected = run_ranks(_by_hand, case.num_ranks, case)[0]

    assert [sent for sent, _, _ in seen] == [0, 0]
    assert gradients.keys() == expected.keys()
    assert all(torch.allclose(gradients[name], expected[name], atol=1e-7) for name in expected)


def _two_gradients_in_one_backward() -> None:
    model = nn.Linear(3, 1)
    named = dict(model.named_parameters())
    replicas = StageReplicas(named, [list(named.values())], None, dist.get_world_size())
    for times in (1, 2):
        replicas.begin(ends_step=True)
        replicas.before_last(0)
        for _ in range(times):
            model(torch.ones(2, 3)).sum().backward()
        replicas.finish()


@pytest.mark.slow
def test_a_gradient_that_comes_after_its_buffer_was_sent_is_told() -> None:
    with pytest.raises(RankError, match="was given two gradients in one backward, though only one in the first step"):
        run_ranks(_two_gradients_in_one_backward, 2)
