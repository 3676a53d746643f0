"""Tensors that a model holds beside its parameters and buffers, and hooks on gradients: found, given their numbers, and
ruled out where shards would not be they."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.abuse import outcomes
from benchmarks.abuse.generate import Tree, loaded
from meshwright.executor.apply import build_on_meta
from meshwright.executor.measuring.one_rank import without_peers
from meshwright.executor.state.initialise import Materialiser, empty_values, initial_values
from meshwright.planner.answers.search import search
from meshwright.planner.plan.legality import pipeline_rule, sharding_rule, zero_bubble_rule
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.building import on_meta
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from meshwright.profiler.running.forward_state import undone
from meshwright.profiler.running.held_tensors import HeldTensors, kept_parameters, whole_because

GLOBAL = nn.Linear(4, 4)


class Object:
    def __init__(self, *given: Any) -> None:
        self.given = given


class Holding(nn.Module):
    """Holds one constant and one weight in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4)
        scale, weight = torch.arange(4.0), self.linear.weight
        self.register_buffer("held", torch.ones(4))
        self.plain = scale
        self.nested = {"a": [(scale, 1), {"b": weight}]}
        self.closure = lambda x: x * scale @ weight
        self.partial = partial(torch.mul, scale, other=weight)
        self.object = Object(scale, [self.held])
        self.linear.register_forward_hook(lambda module, args, output: output * scale)
        weight.register_hook(lambda gradient: gradient * scale)
        self.teachers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False), GLOBAL]
        object.__setattr__(self, "student", nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rnn(x)[0] + self.nested["a"][0][0] + self.nested["a"][1]["b"].sum()
        x = x + self.teachers[1](self.student(x)) + self.teachers[0](x[0])
        x = self.linear(self.closure(x)) + self.object.given[0] + self.object.given[1][0]
        held: torch.Tensor = self.partial.args[0]
        return x * held + self.partial.keywords["other"].mean() + self.plain


def places(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    HeldTensors(lambda place, tensor: found.setdefault(place, tensor)).enter(model)
    return found


def test_every_way_of_holding_a_tensor_is_found_under_one_name_in_all_builds() -> None:
    first, second = places(Holding()), places(on_meta(Holding))

    assert list(first) == list(second)
    assert set(first) == {
        "plain",
        "nested.a[0][0]",
        "nested.a[1].b",
        "closure.scale",
        "closure.weight",
        "partial.args[0]",
        "partial.other",
        "object.given[0]",
        "object.given[1][0]",
        "linear._forward_hooks(0).scale",
        "linear.weight(1).scale",
        "teachers[0].0.weight",
        "teachers[0].0.bias",
        "teachers[0].1.weight",
        "teachers[0].1.bias",
        "teachers[0].1.running_mean",
        "teachers[0].1.running_var",
        "teachers[0].1.num_batches_tracked",
        "teachers[1].weight",
        "teachers[1].bias",
        "student.weight",
        "student.bias",
    }


def test_a_stage_has_the_numbers_of_one_process_wherever_they_are_held() -> None:
    torch.manual_seed(3)
    expected = Holding()
    model = on_meta(Holding)

    Materialiser(model, initial_values(Holding, False, 3), {}, 0, torch.device("cpu"))([model])

    assert not any(tensor.is_meta for tensor in places(model).values())
    assert model.nested["a"][1]["b"] is model.linear.weight  # type: ignore[index]
    assert model.object.given[1][0] is model.held  # type: ignore[union-attr, index]
    assert model.teachers[1] is GLOBAL
    assert not GLOBAL.weight.is_meta
    assert isinstance(model.student.weight, nn.Parameter)
    assert model.student.weight.requires_grad
    assert not model.teachers[0][0].weight.requires_grad  # type: ignore[index, union-attr]
    x = torch.randn(3, 2, 4)
    for each in (expected, model):
        each(x).square().sum().backward()
    assert torch.equal(expected(x), model(x))
    assert torch.equal(expected.linear.weight.grad, model.linear.weight.grad)  # type: ignore[arg-type, union-attr]
    assert not model.linear.weight.grad[:, 0].any()  # type: ignore[index, union-attr]


def test_unregistered_modules_have_the_same_numbers_after_weights_are_loaded_and_in_large_models() -> None:
    names = {name for name, _ in on_meta(Holding).named_parameters()}
    first, again = initial_values(Holding, False, 3), empty_values(Holding, on_meta(Holding), names, 3)
    large = [initial_values(Holding, True, 3).attributes for _ in range(2)]

    assert torch.equal(first.attributes["student.weight"], again.attributes["student.weight"])
    assert torch.equal(large[0]["student.weight"], large[1]["student.weight"])
    assert 0.0 < large[0]["student.weight"].std() < 0.5
    assert torch.equal(large[0]["teachers[0].1.running_var"], torch.ones(4))


def test_parameters_that_are_not_registered_are_told() -> None:
    assert profiled("linear", "mlp").untrained == ""
    assert re.match(
        r"blocks.1.hidden\[0\].weight \(and 1 more\) is not registered, .* nn.ModuleList",
        profiled("linear", "unregistered").untrained,
    )


def test_recurrent_modules_list_their_weights_by_themselves() -> None:
    assert kept_parameters(nn.Sequential(nn.LSTM(4, 4), nn.GRU(4, 4))) == []
    assert whole_because(nn.LSTM(4, 4)) == ""


def hooked_late() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def test_hooks_after_gradients_are_summed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1.weight has a hook for when .*register_hook, or between forward_backward"):
        whole_because(hooked_late())


def profiled(*blocks: str, **told: Any) -> ModelProfile:
    return trace(loaded(Tree(1, blocks, tuple(range(len(blocks))), **told)))


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("masked weight", "the gradient of blocks.1.linear.weight has a hook"),
        pytest.param("kept weight", r"linear.weight is kept in blocks.1.kept\[0\], too", marks=pytest.mark.slow),
        ("hooked gradient", "^None$"),
        pytest.param("closed over", "^None$", marks=pytest.mark.slow),
        pytest.param("unregistered", "^None$", marks=pytest.mark.slow),
    ],
)
def test_what_must_stay_whole_is_not_sharded(habit: str, words: str) -> None:
    assert re.search(words, str(sharding_rule(profiled("linear", habit, "mlp"), "fp32")))


def test_a_layer_with_hooks_on_its_gradients_is_under_no_zero_bubble_schedule() -> None:
    training = TrainingSpec(global_batch=16, seq_len=None, precision="fp32")

    assert "register_hook" in str(zero_bubble_rule(profiled("linear", "hooked gradient"), training))
    assert zero_bubble_rule(profiled("linear", "mlp"), training) is None


class RepeatsInside(nn.Module):
    """A layer that has its backward repeat what is in it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@contextmanager
def once() -> Iterator[None]:
    """Can be entered one time."""
    yield


KEEPING_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class RepeatsInContexts(nn.Module):
    """A layer whose backward runs it again, in contexts of its own."""

    def __init__(self, contexts: Any) -> None:
        super().__init__()
        self.inner, self.contexts = nn.Linear(8, 8), contexts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = checkpoint(
            lambda x: self.inner(x).tanh(), x, use_reentrant=False, context_fn=self.contexts
        )
        return kept


@pytest.mark.parametrize("contexts", [KEEPING_PRODUCTS, lambda: (once(), once())])
def test_checkpoints_in_contexts_of_their_own_are_under_no_zero_bubble_schedule(contexts: Any) -> None:
    profile = trace(
        load_model(
            lambda: nn.Sequential(nn.Linear(8, 8), RepeatsInContexts(contexts), nn.Linear(8, 8)),
            batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
            loss=lambda output, batch: (output - batch[1]).square().mean(),
        )
    )

    assert "with context_fn, as selective ones" in str(
        zero_bubble_rule(profile, TrainingSpec(global_batch=8, precision="fp32"))
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_with_reentrant_checkpoints_in_it_is_under_no_zero_bubble_schedule(reentrant: bool) -> None:
    training = TrainingSpec(global_batch=16, seq_len=None, precision="fp32")

    profile = trace(
        load_model(
            lambda: nn.Sequential(nn.Linear(8, 8), RepeatsInside(reentrant), nn.Linear(8, 8)),
            batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
            loss=lambda output, batch: (output - batch[1]).square().mean(),
        )
    )

    assert ("use_reentrant=False" in str(zero_bubble_rule(profile, training))) == reentrant


def test_what_a_module_with_backward_hooks_returns_crosses_no_cut() -> None:
    whole, hooked = profiled("linear", "mlp", "norm"), profiled("linear", "mlp", "norm", hooks=((1, "halve"),))

    assert len(hooked.layers) == len(whole.layers) - 1
    assert str(pipeline_rule(hooked, 4, 3)).endswith(
        "blocks.1 has hooks on its backward, so it and what reads its output are one layer"
    )


def test_a_module_without_parameters_that_hooks_its_backward_is_cut_nowhere_inside() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[1].register_full_backward_hook(lambda module, given, grads: (given[0] / 2,))
        return model

    profile = trace(load_model(build, batch=lambda n: (torch.randn(n, 4),) * 2, loss=lambda out, b: out.sum()))

    assert [layer.modules for layer in profile.layers] == [("0",), ("1", "2"), ("4",)]


def hooks_between() -> nn.Module:
    class Hooked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            x.retain_grad()
            found: torch.Tensor = self[1](x)
            return found

    return Hooked(nn.Linear(4, 4), nn.Linear(4, 4))


def test_gradients_between_layers_that_the_forward_hooks_itself_onto_are_in_one_layer() -> None:
    profile = trace(load_model(hooks_between, batch=lambda n: (torch.randn(n, 4),) * 2, loss=lambda out, b: out.sum()))

    assert len(profile.layers) == 1
    assert "hooks itself onto gradients between layers" in str(pipeline_rule(profile, 2, 1))


@pytest.mark.parametrize(
    ("blocks", "told", "pins"),
    [
        (("linear", "masked weight", "mlp"), {}, {"pipeline": 2, "schedule": "zb-h1"}),
        pytest.param(
            ("kept weight", "linear", "unregistered", "closed over"),
            {},
            {"pipeline": 2, "schedule": "1f1b"},
            marks=pytest.mark.slow,
        ),
        pytest.param(("linear", "kept weight"), {}, {"data_replicate": 4}, marks=pytest.mark.slow),
        pytest.param(("linear", "unregistered"), {}, {"data_shard": 4}, marks=pytest.mark.slow),
        pytest.param(("linear", "closed over", "hooked gradient"), {}, {"data_shard": 4}, marks=pytest.mark.slow),
        pytest.param(
            ("mlp", "linear", "residual"), {"hooks": ((1, "halve"),)}, {"pipeline": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_plans_of_such_models_give_the_same_numbers(
    blocks: tuple[str, ...], told: dict[str, Any], pins: dict[str, Any]
) -> None:
    tree = Tree(1, blocks, tuple(range(len(blocks))), **told)

    kind, words, _ = outcomes.answered(loaded(tree), trace(loaded(tree)), pins)

    assert (kind, words) == ("verified", "")


@pytest.mark.slow
def test_a_plan_with_shards_of_another_model_than_the_one_at_hand_is_refused() -> None:
    made = loaded(Tree(1, ("linear", "mlp"), (0, 1)))
    training = TrainingSpec(global_batch=16, seq_len=None, precision="fp32")
    plan = search(trace(made), cluster_of(load_device("cpu"), 2), training, pins=Pins(data_shard=2)).plan

    def hooked() -> nn.Module:
        model = made.build()
        next(model.parameters()).register_hook(lambda gradient: gradient)
        return model

    build_on_meta(made.build, plan)
    with pytest.raises(ValueError, match=r"the plan shards parameters, but the gradient of .* has a hook"):
        build_on_meta(hooked, plan)


def beside_a_graph(layout: torch.layout) -> LoadedModel:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("edges", torch.eye(4).roll(1, 0).to_sparse(layout=layout))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second((self.edges @ self.first(x).t()).t())
            return found

    return load_model(Spread, batch=lambda n: (torch.randn(n, 4),) * 2, loss=lambda out, batch: out.square().mean())


@pytest.mark.slow
def test_sparse_buffers_are_on_pipeline_stages() -> None:
    made = beside_a_graph(torch.sparse_coo)

    kind, words, _ = outcomes.answered(made, trace(made), {"pipeline": 2})

    assert (kind, words) == ("verified", "")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_buffers_of_other_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the buffer edges of .* is sparse_csr.*keep it as sparse COO"):
        trace(beside_a_graph(torch.sparse_csr))


def test_held_shards_are_looked_at_without_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_peers(0, 2):
        monkeypatch.setattr(dist, "all_reduce", None)
        held, layer = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,))), nn.Linear(1, 1)
        layer.register_forward_hook(lambda *_: held.ndim and None)
        with undone(layer):
            layer(torch.ones(1, 1))
            held.to_local().data.zero_()

        assert held.to_local().tolist() == [1] * 4
