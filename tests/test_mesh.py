"""Processes play the plan's ranks on the hosts that the plan means, whatever order the launcher gave them."""

import os
import socket
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.executor import parallelize
from meshwright.executor.parallel.mesh import mechanism, plan_ranks
from meshwright.executor.torch_compat import own_group
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.ranks import run_ranks
from support.synthetic import cluster, layer_class, profile
from support.synthetic_plans import plan_on
from support.zoo import zoo_module


@pytest.mark.parametrize(
    ("degrees", "precision", "expected"),
    [
        ({"tensor": 2}, "fp32", "plain"),
        ({"tensor": 2, "pipeline": 2, "schedule": "1f1b"}, "fp32", "plain"),
        ({"tensor": 2, "data_shard": 2}, "fp32", "fsdp"),
        ({"tensor": 2, "data_replicate": 2}, "fp32", "fsdp"),  # which averages what tensor ranks hold parts of
        ({"tensor": 2, "context": 2}, "fp32", "fsdp"),
        ({"tensor": 2, "sequence": True, "expert": 2}, "fp32", "fsdp"),
        ({"tensor": 2}, "bf16", "cast"),
        ({"tensor": 2, "data_shard": 2}, "bf16", "fsdp"),
        ({"tensor": 2, "pipeline": 2, "schedule": "1f1b"}, "bf16", "fsdp"),
        ({"pipeline": 2, "schedule": "1f1b"}, "bf16", "fsdp"),
        ({"pipeline": 2, "schedule": "1f1b"}, "fp32", "plain"),
        ({}, "bf16", "plain"),
        ({"data_replicate": 2}, "bf16", "ddp"),
    ],
)
def test_layers_are_wrapped_where_that_buys_something(
    degrees: dict[str, Any], precision: Precision, expected: str
) -> None:
    shape = replace(Shape(1, 1, 1, 1, 1, 2), **degrees)
    model = profile([layer_class("block", 1e12, 10, 1e6, 1e6, heads=8)], [0, 0])
    training = TrainingSpec(global_batch=2 * shape.data, seq_len=64, precision=precision)
    options = [[LayerOption()] * (2 // shape.pipeline)] * shape.pipeline
    ranks = shape.data * shape.context * shape.tensor * shape.pipeline
    plan = make_plan(model, cluster(1, ranks), training, shape, options)

    assert mechanism(plan) == expected


def test_ranks_in_the_plans_order_stay() -> None:
    seats = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]

    assert plan_ranks(plan_on(2, 2), seats) == [0, 1, 2, 3]


def test_ranks_dealt_in_turn_over_hosts_are_put_back_together() -> None:
    seats = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]

    assert plan_ranks(plan_on(2, 2), seats) == [0, 2, 1, 3]


def test_other_hosts_than_the_plans_keep_the_launchers_order() -> None:
    seats = [("a", 3), ("a", 2), ("a", 1), ("a", 0)]

    assert plan_ranks(plan_on(2, 2), seats) == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_launchers_order_does_not_change_the_numbers() -> None:
    """Two hosts of two, dealt in turn: tensor parallel inside a host, replicas across, and tied weights over stages."""
    tokens = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    alone = _losses(_plan_of_gpt(Shape(1, 1, 1, 1, 4, 1), 1, 1), batch)

    shapes = (
        Shape(2, 1, 2, 1, 2, 1),
        Shape(1, 1, 2, 2, 2, 2, schedule="1f1b"),
        Shape(1, 2, 1, 2, 1, 2, schedule="1f1b"),
        Shape(1, 4, 1, 1, 1, 1),
    )
    plans = [_plan_of_gpt(shape, 2, 2) for shape in shapes]

    by_rank = run_ranks(_interleaved_losses, 4, plans, batch)

    assert by_rank == [[pytest.approx(alone, rel=1e-5)] * len(plans)] * 4


VOCABULARY = 32


def _gpt() -> nn.Module:
    gpt = zoo_module("gpt.py")
    return gpt.GPT(gpt.Config(num_layers=2, num_heads=2, width=16, vocabulary=VOCABULARY, context=16))


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


@cache
def _profile() -> ModelProfile:
    def example(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(size, 17, dtype=torch.long)
        return tokens[:, :-1], tokens[:, 1:]

    return trace(load_model(_gpt, batch=example, loss=_loss))


def _plan_of_gpt(shape: Shape, hosts: int, per_host: int) -> Plan:
    model = _profile()
    training = TrainingSpec(global_batch=4, seq_len=model.seq_len, precision="fp32")
    half = len(model.layers) // 2
    options = [LayerOption()] * len(model.layers)
    stages = [options] if shape.pipeline == 1 else [options[:half], options[half:]]
    return make_plan(model, cluster(hosts, per_host), training, shape, stages)


def _losses(plan: Plan, batch: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    trainer = parallelize(_gpt, plan, lambda p: torch.optim.SGD(p, lr=0.5), loss=_loss)
    share = tuple(x.chunk(trainer.data_size)[trainer.data_rank] for x in batch)
    return [trainer.step(share).loss for _ in range(3)]


def _interleaved_losses(plans: list[Plan], batch: tuple[torch.Tensor, torch.Tensor]) -> list[list[float]]:
    rank = dist.get_rank()
    socket.gethostname = lambda: "ab"[rank % 2]
    os.environ["LOCAL_RANK"] = str(rank // 2)
    return [_losses(plan, batch) for plan in plans]


def test_an_order_that_torch_would_sort_away_is_left_alone_with_a_warning() -> None:
    seats = [("a", 1), ("a", 0), ("b", 0), ("b", 1)]

    with pytest.warns(UserWarning, match="start ranks host by host"):
        assert plan_ranks(plan_on(2, 2), seats) == [0, 1, 2, 3]


def _groups_of_uneven_numbers() -> list[list[int]]:
    """Ranks of the groups that this rank gets, after one that only two ranks are in."""
    given = [own_group(groups) for groups in ([[0, 1]], [[0, 2], [3, 1]])]
    dist.barrier()  # a rank that ends while others connect to it breaks them
    return [dist.get_process_group_ranks(group) for group in given if group is not None]


def test_ranks_that_hold_different_numbers_of_groups_still_join_one() -> None:
    given = run_ranks(_groups_of_uneven_numbers, 4)

    assert given == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[0, 2]], [[1, 3]]]


def test_groups_of_nccl_that_knows_its_device_are_split_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[Any] = []
    monkeypatch.setattr(dist, "split_group", lambda **kwargs: split.append(kwargs))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda", 0))
        own_group([[2, 0], [3, 1]])
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()

    assert split == [{"split_ranks": [[0, 2], [1, 3]]}]  # members or not, for all ranks have to take part
