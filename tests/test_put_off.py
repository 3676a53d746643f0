"""What waits for the weights' backward of a zero-bubble schedule: as torch waits, as profiled, and as it is priced."""

from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.accuracy.played import play, ranks_to_play
from meshwright.planner.answers.search import price_setup
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.schedules import ZERO_BUBBLE, Schedule, rank_in_flight, rank_put_off, table
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace
from meshwright.profiler.running.put_off import PutOff

WIDTH, WORDS, TOKENS, BLOCKS = 32, 2048, 64, 4


class Block(nn.Module):
    """A norm, two products with a non-linear function between, a branch, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, WIDTH] -> the same."""
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """A large vocabulary over narrow blocks: its loss keeps far more than its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[samples, tokens] -> [samples, tokens, WORDS]."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def next_word(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


@cache
def words() -> tuple[LoadedModel, Any]:
    """The model and its profile."""
    loaded = LoadedModel(
        Words, batch=lambda n: torch.zeros(n, TOKENS, dtype=torch.long), loss=next_word, name="words", source="words"
    )
    return loaded, trace(loaded)


def test_gradients_that_wait_are_those_that_torch_holds() -> None:
    block, x = Block(), torch.randn(3, WIDTH, requires_grad=True)
    ours: set[int] = set()
    y = block(x).sum()
    watch = PutOff([y], [x], block.parameters(), lambda gradient: ours.add(gradient.data_ptr()))

    _, groups = stage_backward_input([y], None, [x], block.parameters())
    watch.end()

    held = {gradient.data_ptr() for group in groups for gradients in group["grads"] for gradient in gradients}
    assert ours == held
    stage_backward_weight(block.parameters(), iter(groups))
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_a_block_waits_for_the_gradient_of_everything_that_reads_a_weight() -> None:
    block = next(c for c in words()[1].classes if c.name == "Block")

    tokens = 4 * TOKENS
    each = 4 * WIDTH + WIDTH + WIDTH + WIDTH  # of what `up`, `down`, the scale and the norm have made
    assert block.whole.put_off.at(4, 2) == tokens * each * 2
    assert block.whole.spent.at(4, 2) == 0


def test_what_the_loss_has_saved_is_gone_with_the_gradients_of_inputs() -> None:
    head = words()[1].classes[-1]

    logits = 4 * TOKENS * WORDS
    assert head.whole.put_off.at(4, 2) == pytest.approx(logits * 2, rel=0.01)
    assert head.whole.spent.at(4, 2) == pytest.approx(logits * 4, rel=0.02)  # softmax in fp32
    assert head.whole.saved.at(4, 2) > head.whole.spent.at(4, 2)


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 2), (2, 5), (4, 8), (4, 40), (3, 7)])
def test_as_many_wait_as_the_table_lets(schedule: Schedule, ranks: int, count: int) -> None:
    chunks = 2 if schedule == "zb-v" else 1
    found = rank_put_off(schedule, ranks, count, chunks)
    held = rank_in_flight(schedule, ranks, count, chunks)

    for rank, actions in enumerate(table(schedule, ranks, count, chunks)):
        there, waiting, most = 0, 0, 0
        for action in actions:
            if action.kind == "forward":
                there += 1
            elif action.kind == "backward":
                most = max(most, there + waiting)
                waiting += 1
            else:
                there, waiting = there - 1, waiting - 1
        assert sum(found[rank]) <= most <= sum(held[rank]) + sum(found[rank])
        assert all(0 <= each <= most for each in chain(found[rank], held[rank]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "precision"),
    [
        ("pp=4 schedule=zb-h1 mb=1", "bf16"),
        ("pp=4 schedule=zb-h1 mb=2 zero=1", "bf16"),
        ("pp=2 schedule=zb-h2 mb=1 tp=2", "fp32"),
    ],
)
def test_every_stage_holds_what_is_predicted(setup: str, precision: Precision) -> None:
    loaded, profile = words()
    training = TrainingSpec(global_batch=32, seq_len=TOKENS, precision=precision)
    plan = price_setup(parse_setup(setup, 4, 4), profile, cluster_of(load_device("h100-80gb"), 4), training).plan
    assert plan is not None
    memory = estimate(plan, profile).memory

    for rank in ranks_to_play(plan):
        played = play(loaded, plan, rank)
        assert memory[played.stage].allocated_bytes == pytest.approx(played.peak_bytes, rel=0.05), played.stage
