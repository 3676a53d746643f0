"""Parameters without dims are sharded like others, and are without dims wherever anyone looks at them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.executor import parallelize
from meshwright.executor.parallel.optimizers import MakeOptimizer
from meshwright.executor.parallel.without_dims import read_without_dims
from meshwright.executor.state.checkpoint_folder import complete_checkpoints
from meshwright.planner.answers.search import search
from meshwright.planner.cost.sharding import padded_elements, shard_dim
from meshwright.planner.exchange.export import export
from meshwright.planner.exchange.imports import Layout, imported
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.frameworks import framework_of
from meshwright.planner.plan.legality import sharding_rule
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.synthetic import cluster
from support.tied_net import GLOBAL_BATCH, LENGTH, PLANS, TiedNet, adamw, batch_of, loss, plan_of, samples
from support.tied_net import Block as PlainBlock

STEPS = 3

Trained = Callable[[str], tuple[dict[str, torch.Tensor], Path]]


class Block(PlainBlock):
    """Gates without dims around its parts, one of them between columns and rows, under two names, one not trained."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5 + place))
        self.inner = nn.Parameter(torch.tensor(1.5))
        self.alias = self.gate
        self.fixed = nn.Parameter(torch.tensor(0.9), requires_grad=False)
        self.list = nn.ParameterList([torch.tensor(1.1), torch.tensor(0.3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = [self.gate, self.inner, self.alias, self.fixed, self.list[0], self.list[1]]
        assert [p.shape for p in read] == [torch.Size()] * len(read)
        x = x + self.gate.exp() * self.attention(self.norm1(x)) * self.fixed
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x)) * self.inner)) * self.alias
        return torch.stack([*self.list])[0] * x + self.list[1]


class ScaledNet(TiedNet):
    """TiedNet with such blocks, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(place) for place in range(2))
        self.norm = nn.Identity()
        self.logit_scale = nn.Parameter(torch.tensor(0.07))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.logit_scale.exp()


def _batch(size: int, seq_len: int = LENGTH) -> Any:
    return tuple(tokens[:, :seq_len] for tokens in batch_of(size))


@functools.cache
def _profile() -> ModelProfile:
    return trace(load_model(ScaledNet, batch=_batch, loss=loss))


EVERY: dict[str, dict[str, Any]] = {
    "fsdp": {"shard": 2},
    **PLANS,
    "ddp": {"replicate": 2},
    "fsdp in stages": {"shard": 2, "stages": (2, 2)},
    "fsdp, zb-v": {"shard": 2, "stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "zb-v"},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
}


def _plan(name: str) -> Plan:
    return plan_of(_profile(), **EVERY[name])


def _scalars() -> set[str]:
    return {name for name, p in ScaledNet().named_parameters() if not p.dim()}


@functools.cache
def _alone(steps: int, make: MakeOptimizer = adamw) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = ScaledNet()
    optimizer = make(model.parameters())
    for tokens, targets in _batches(steps):
        optimizer.zero_grad()
        loss(model(tokens), (tokens, targets)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def _batches(steps: int) -> list[Any]:
    every = samples()
    return [tuple(torch.stack(x) for x in zip(*every[8 * i : 8 * i + 8], strict=True)) for i in range(steps)]


def _train(
    plan: Plan, steps: int, folder: Path | None = None, resume: Path | None = None, make: MakeOptimizer = adamw
) -> dict[str, torch.Tensor]:
    trainer = parallelize(ScaledNet, plan, make, loss=loss, seed=0)
    if resume is not None:
        trainer.resume(resume)
    for _, share in zip(range(steps), trainer.loader(samples), strict=False):
        trainer.step(share)
    gradients = trainer.named_gradients()
    assert all(not gradients[name].dim() for name in gradients.keys() & _scalars())
    if folder is not None:
        trainer.save(folder / "run")
        trainer.save_pretrained(folder / "weights")
    trainer.close()
    return trainer.full_state_dict()


def _check(state: dict[str, torch.Tensor], steps: int, make: MakeOptimizer = adamw) -> None:
    expected = _alone(steps, make)
    torch.testing.assert_close({name: state[name] for name in expected}, dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_scale_without_dims_may_be_sharded_and_takes_what_one_element_takes() -> None:
    assert sharding_rule(_profile(), "fp32") is None
    assert (shard_dim((), 4), padded_elements((), 4), padded_elements((), 1)) == (0, 4, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a plan has trained, and the folder of what it saved; each plan trains once for all tests."""

    @functools.cache
    def by_plan(name: str) -> tuple[dict[str, torch.Tensor], Path]:
        plan, folder = _plan(name), tmp_path_factory.mktemp("trained")
        return run_ranks(_train, plan.degrees.num_devices, plan, STEPS, folder)[0], folder

    return by_plan


@pytest.mark.parametrize("name", slow.but_first(EVERY, 1))
def test_every_plan_trains_them_as_one_process_does(trained: Trained, name: str) -> None:
    state, folder = trained(name)

    _check(state, STEPS)
    written = {name: x for path in (folder / "weights").glob("*.safetensors") for name, x in load_file(path).items()}
    read = dcp.FileSystemReader(complete_checkpoints(folder / "run")[0]).read_metadata().state_dict_metadata
    for scalar in _scalars():
        assert state[scalar].shape == read[f"model.{scalar}"].size == torch.Size()
        assert scalar.endswith("fixed") or read[f"optimizer.{scalar}.exp_avg"].size == torch.Size()
        assert torch.equal(written[scalar], state[scalar])


class OnceScaled(TiedNet):
    """TiedNet with a temperature, which the last stage alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.logit_scale = nn.Parameter(torch.tensor(0.07))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.logit_scale.exp()


def _train_once_scaled(plan: Plan) -> dict[str, torch.Tensor]:
    trainer = parallelize(OnceScaled, plan, adamw, loss=loss, seed=0)
    for _, share in zip(range(STEPS), trainer.loader(samples), strict=False):
        trainer.step(share)
    return trainer.full_state_dict()


def test_stages_that_have_none_go_on_with_those_that_have_some() -> None:
    profile = trace(load_model(OnceScaled, batch=_batch, loss=loss))
    alone = run_ranks(_train_once_scaled, 1, plan_of(profile))[0]

    state = run_ranks(_train_once_scaled, 4, plan_of(profile, shard=2, stages=(2, 2)))[0]

    torch.testing.assert_close({name: state[name] for name in alone}, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), slow.but_first([("ddp", "fsdp"), ("fsdp", "ddp")], 1))
def test_shards_and_replicas_go_on_where_the_other_was_saved(before: str, after: str, tmp_path: Path) -> None:
    run_ranks(_train, 2, _plan(before), 1, tmp_path)

    _check(run_ranks(_train, 2, _plan(after), 2, None, tmp_path / "run")[0], 3)


def _resumed(plan: Plan, folders: list[Path]) -> list[dict[str, torch.Tensor]]:
    return [_train(plan, 2, None, folder / "run") for folder in folders]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(EVERY)), ids=list(EVERY))
def test_every_plan_goes_on_with_them_where_others_were_saved(trained: Trained, place: int) -> None:
    """Each reads what two others have saved, and is read by two; what has dims any plan reads of any other, in
    test_checkpoint.py."""
    names = list(EVERY)
    folders = [trained(names[place - before])[1] for before in (1, 5)]

    found = run_ranks(_resumed, _plan(names[place]).degrees.num_devices, _plan(names[place]), folders)[0]

    for state in found:
        _check(state, STEPS + 2)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-4, 1e-3))  # keys' biases get rounding alone


@pytest.mark.parametrize(
    ("before", "after"), slow.but_first([("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp and tensor", "fsdp")], 0)
)
def test_optimizers_of_whole_matrices_have_them_without_dims(before: str, after: str, tmp_path: Path) -> None:
    first, second = _plan(before), _plan(after)
    state = run_ranks(_train, first.degrees.num_devices, first, 1, tmp_path, None, _adafactor)[0]
    _check(state, 1, _adafactor)

    state = run_ranks(_train, second.degrees.num_devices, second, 2, None, tmp_path / "run", _adafactor)[0]

    _check(state, 3, _adafactor)


class Copies(dict[str, torch.Tensor]):
    """What a script saves beside: a copy of every parameter, as a rank has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({name: p.detach().clone() for name, p in model.named_parameters()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.update(state)


def _with_copies(plan: Plan, folder: Path, saves: bool) -> dict[str, torch.Tensor]:
    trainer = parallelize(ScaledNet, plan, adamw, loss=loss, seed=0 if saves else 1)
    copies = Copies(trainer.model)
    if saves:
        trainer.save(folder, ema=copies)
    else:
        trainer.resume(folder, ema=copies)
    trainer.close()
    return {name: tensor for name, tensor in copies.items() if not isinstance(tensor, DTensor)}


@pytest.mark.slow
def test_averaged_weights_beside_have_none_either(tmp_path: Path) -> None:
    run_ranks(_with_copies, 2, _plan("fsdp"), tmp_path, True)

    found = run_ranks(_with_copies, 2, _plan("ddp"), tmp_path, False)[0]

    assert _scalars() < found.keys()
    torch.testing.assert_close(found, {name: _alone(0)[name] for name in found}, rtol=0, atol=0)


def test_a_class_that_cannot_be_extended_is_named_with_the_way_out() -> None:
    class Final(type(nn.Module)):  # type: ignore[misc]
        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("Gate is final")
            made: type = super().__new__(cls, name, bases, body)
            return made

    class Gate(nn.Module, metaclass=Final):
        pass

    with pytest.raises(ValueError, match=r"Gate holds scale, which has no dims.*Gate is final.*tensor of one element"):
        read_without_dims(Gate(), ["scale"])


def test_a_module_that_reads_them_so_is_of_the_same_name() -> None:
    gate = nn.Linear(1, 1, bias=False)
    gate.weight = nn.Parameter(torch.tensor([[2.0]]))

    read_without_dims(gate, ["weight"])

    assert isinstance(gate, nn.Linear)
    assert repr(gate) == repr(nn.Linear(1, 1, bias=False))
    assert gate.weight.shape == torch.Size()
    assert gate._parameters["weight"].shape == (1, 1)
    with pytest.raises(AttributeError, match="bias_"):
        gate.bias_  # noqa: B018
    del gate.weight
    with pytest.raises(AttributeError, match="weight"):
        gate.weight  # noqa: B018


def _by_dims(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [{"params": [p for p in every if p.dim()]}, {"params": [p for p in every if not p.dim()], "lr": 1e-3}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=1e-2)


def _refused(plan: Plan) -> str:
    with pytest.raises(ValueError, match="without dims") as refusal:
        parallelize(ScaledNet, plan, _by_dims, loss=loss)
    return str(refusal.value)


def test_groups_that_would_be_others_for_one_element_are_refused_with_the_way_out() -> None:
    for words in run_ranks(_refused, 2, _plan("fsdp")):
        assert words.startswith("optimizer=... steps logit_scale otherwise than where it is given it without dims")
        assert "p.numel() == 1" in words


@pytest.mark.parametrize("framework", ["torchtitan", "accelerate"])
def test_frameworks_that_shard_them_as_they_are_get_no_such_plan(framework: str) -> None:
    profile, training = _profile(), TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=LENGTH, precision="fp32")
    plan = search(profile, cluster(1, 2), training, pins=Pins(framework=framework_of(framework))).plan

    assert plan.model.without_dims == "blocks.0.gate"
    assert plan.degrees.sharded_over == 1
    with pytest.raises(ValueError, match=f"blocks.0.gate has no dims, .* plan --for {framework}"):
        export(_plan("fsdp"), framework)
    layout = Layout(target=framework_of(framework).target, data_shard=2)
    with pytest.raises(ValueError, match=r"not legal for ScaledNet: data_shard: blocks\.0\.gate has no dims"):
        imported(layout, profile, cluster(1, 2), training)
    assert export(_plan("fsdp"), "deepspeed").document["zero_optimization"]["stage"]


def _goes_back(plan: Plan, weights: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What weights of a file give, and what copies of the model's own state_dict() go back to after a step."""
    trainer = parallelize(ScaledNet, plan, adamw, loss=loss, seed=1, weights=weights)
    begun = trainer.full_state_dict()
    kept = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.step(next(trainer.loader(samples)))
    trainer.model.load_state_dict(kept)
    return begun, trainer.full_state_dict()


@pytest.mark.slow
def test_weights_and_own_copies_are_taken_over(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = ScaledNet().state_dict()
    save_file({n: x.clone() for n, x in expected.items()}, tmp_path / "model.safetensors")

    for state in run_ranks(_goes_back, 2, _plan("fsdp"), tmp_path)[0]:
        assert [n for n, x in expected.items() if not torch.equal(state[n], x) or state[n].shape != x.shape] == []
