"""Optimizers that look at whole matrices do under any plan what they do in one process, or are refused at once."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer, Rprop

from meshwright.executor import parallelize
from meshwright.executor.measuring.one_rank import without_peers
from meshwright.executor.parallel.optimizers import JoinedOptimizers
from meshwright.executor.parallel.whole_matrices import couples_parameters, looks_at_whole_matrices, steps_shards
from support import slow
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, PLANS, TiedNet, adamw, loss, plan_of, samples, tied_profile, what_is_said

STEPS = 4
LOSS = 1e-4


class Lamb(Optimizer):
    """Steps of a tenth of the parameter's own norm, as LAMB and LARS scale them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-3)), alpha=-group["lr"])


def muon(named: Any) -> list[Optimizer]:
    """Muon for the matrices, AdamW for the rest, as Muon is used."""
    hidden = [p for n, p in named if p.ndim == 2 and n.startswith("blocks")]
    others = [p for n, p in named if not (p.ndim == 2 and n.startswith("blocks"))]
    return [Muon(hidden, lr=0.004), AdamW(others, lr=1e-2, eps=1e-4)]


def adafactor(parameters: Any) -> Optimizer:
    return Adafactor(parameters, lr=0.05, eps=(1e-4, 1e-3))  # else it makes steps of the noise in gradients of zero


def lamb(parameters: Any) -> Optimizer:
    return Lamb(parameters)


NOISE = {"muon": 5e-4, "adafactor": 2e-5, "lamb": 2e-5}
"""Differences of parameters that are rounding: Muon orthogonalises in bf16, whatever it is given."""


def assert_same(optimizer: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=NOISE[optimizer], msg=name)


MAKERS: dict[str, Callable[[Any], Any]] = {"muon": muon, "adafactor": adafactor, "lamb": lamb}


def alone(make: Callable[[Any], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of a hand-written loop."""
    torch.manual_seed(0)
    model = TiedNet()
    named = list(model.named_parameters())
    made = make(named if make is muon else [p for _, p in named])
    optimizers = made if isinstance(made, list) else [made]
    losses = []
    for step in range(STEPS):
        batch = torch.utils.data.default_collate(samples()[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        model.zero_grad()
        value = loss(model(batch[0]), batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(value.item())
    return losses, {n: p.detach() for n, p in named}


def by_plan(
    make: Callable[[Any], Any],
    degrees: dict[str, Any],
    folder: Path | None = None,
    first: int = 0,
    last: int = STEPS,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses, whole parameters, and the share of the optimizer's state that is here."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **degrees), make, loss=loss, max_grad_norm=1.0, **options)
    if first and folder is not None:
        trainer.resume(folder)
    losses = []
    for _, share in zip(range(first, last), trainer.loader(samples), strict=False):
        losses.append(trainer.step(share).loss)
    if folder is not None and last < STEPS:
        trainer.save(folder)
    if folder is not None:  # and give its lock back
        trainer.close()
    state = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return losses, trainer.full_state_dict(), float(sum(t.numel() for t in state))


CASES = [(optimizer, plan) for optimizer in MAKERS for plan in ("fsdp", *PLANS)]


@pytest.mark.parametrize(("optimizer", "plan"), slow.but_these(CASES, [("muon", "fsdp")]))
def test_every_plan_gives_the_numbers_of_one_process(optimizer: str, plan: str) -> None:
    make = MAKERS[optimizer]
    degrees = {"shard": 2} if plan == "fsdp" else PLANS[plan]
    ranks = plan_of(tied_profile(), **degrees).degrees.num_devices
    losses, parameters = alone(make)

    found = run_ranks(by_plan, ranks, make, degrees) if ranks > 1 else [by_plan(make, degrees)]

    assert all(own == pytest.approx(losses, rel=LOSS) for own, _, _ in found)
    assert_same(optimizer, found[0][1], parameters)
    if plan == "fsdp" and optimizer == "muon":
        shares = [share / sum(other for *_, other in found) for *_, share in found]
        assert max(shares) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "lamb"])
def test_shards_alone_would_train_something_else(optimizer: str) -> None:
    losses, parameters = alone(MAKERS[optimizer])

    found = run_ranks(partial(by_plan, whole_matrices=False), 2, MAKERS[optimizer], {"tensor": 2})

    assert found[0][0] != pytest.approx(losses, rel=LOSS)
    with pytest.raises(AssertionError):
        assert_same(optimizer, found[0][1], parameters)


@pytest.mark.parametrize("optimizer", slow.but_first(MAKERS, 0))
def test_it_is_saved_and_goes_on_under_another_plan(optimizer: str, tmp_path: Path) -> None:
    make = MAKERS[optimizer]
    losses, parameters = alone(make)
    run_ranks(partial(by_plan, make, PLANS["fsdp and tensor"], tmp_path), 4, 0, 1)
    run_ranks(partial(by_plan, make, PLANS["ddp in stages"], tmp_path), 4, 1, 2)
    run_ranks(partial(by_plan, make, {"shard": 2}, tmp_path), 2, 2, 3)

    rest, state, _ = by_plan(make, {}, tmp_path, 3)

    assert rest == pytest.approx(losses[3:], rel=LOSS)
    assert_same(optimizer, state, parameters)


class Lookahead(Optimizer):
    """Goes half of the way that another optimizer has gone, every other step; keeps no hooks, as some such do."""

    def __init__(self, params: Any) -> None:
        self.base = adamw(params)
        self.param_groups, self.defaults, self.state = self.base.param_groups, {}, defaultdict(dict)
        for group in self.param_groups:
            group["count"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        self.base.step()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"] if group["count"] % 2 == 0 else ():
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


def test_an_optimizer_around_another_is_saved_with_what_that_keeps(tmp_path: Path) -> None:
    losses, _ = alone(Lookahead)

    first, *_ = by_plan(Lookahead, {}, tmp_path, 0, 3)
    rest, *_ = by_plan(Lookahead, {}, tmp_path, 3)

    assert first + rest == pytest.approx(losses, rel=LOSS)


class Unchanging(Optimizer):
    """Hides its parameters from whoever looks at its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return


class ClippingSGD(SGD):
    """Clips by the norm of all gradients that it has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()


class LearningSGD(SGD):
    """Learns its rate from all gradients, as Prodigy and D-Adaptation do, and has written a number on itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.growth = 1.01

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            total = sum(p.grad.abs().sum().item() for p in group["params"] if p.grad is not None)
            group["lr"] = min(group["lr"] * self.growth, 1 / (1e-6 + total))


class FusedAlone(AdamW):
    """Steps in one kernel or not at all, as those do that have no other way."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(group["fused"] for group in self.param_groups)
        super().step()


class Signed(SGD):
    """Has written a number and a function on itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.scale, self.of = 0.5, _sign

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = self.scale * self.of(p.grad)
        super().step()


def _sign(x: torch.Tensor) -> torch.Tensor:
    return x.sign()


class NoisySGD(SGD):
    """Draws in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad += torch.randn_like(p)
        super().step()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (adamw, "no"),
        (lambda p: SGD(p, lr=1e-9, momentum=0.9, nesterov=True), "no"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "no"),
        (lambda p: torch.optim.Adagrad(p), "no"),
        (lambda p: AdamW(p, lr=0.0, fused=True), "no"),
        (Signed, "no"),
        (Lookahead, "no"),
        (adafactor, "yes"),
        (lamb, "yes"),
        (lambda p: Muon([x for x in p if x.ndim == 2]), "yes"),
        (Unchanging, "a trial step changes nothing"),
        (torch.optim.LBFGS, "a trial step ends with TypeError"),
    ],
)
def test_what_an_optimizer_looks_at_is_tried(make: Callable[[Any], Optimizer], found: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3))
    before = [p.clone() for p in model.parameters()]
    optimizer = make(list(model.parameters()))
    states = str(optimizer.state)

    assert str(looks_at_whole_matrices(optimizer)).startswith(found)
    assert all(map(torch.equal, before, model.parameters()))
    assert str(optimizer.state) == states


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (ClippingSGD, True),
        (LearningSGD, True),
        (Signed, False),
        (lambda p: [adamw(p[:1]), ClippingSGD(p[1:])], True),
        (adamw, False),
        (lambda p: AdamW([{"params": p[:1]}, {"params": [], "lr": 1.0}, {"params": p[1:]}], fused=True), False),
        (adafactor, False),
        (lamb, False),
        (lambda p: Muon([x for x in p if x.ndim == 2]), False),
        (NoisySGD, False),
        (torch.optim.LBFGS, False),
        (Unchanging, False),
    ],
)
def test_optimizers_that_need_all_parameters_are_known(make: Callable[[Any], Any], found: bool) -> None:
    made = make(list(nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3)).parameters()))

    assert couples_parameters(JoinedOptimizers(made) if isinstance(made, list) else made) is found


def test_optimizers_that_do_not_step_shards_are_known() -> None:
    with without_peers(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        first, second = (nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])) for _ in range(2))

        assert steps_shards(adamw([first]))
        assert not steps_shards(JoinedOptimizers([adamw([first]), Rprop([second])]))
        assert steps_shards(FusedAlone([first], fused=True))


def _noisy(plan: dict[str, Any]) -> list[torch.Tensor] | str:
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **plan), lambda p: NoisySGD(p, lr=0.1), loss=loss)
    torch.rand(1 + trainer.mesh.rank)  # as a loop may draw on each rank
    try:
        trainer.step(next(trainer.loader(samples)))
    except ValueError as error:
        return str(error)
    return list(trainer.full_state_dict().values()) or [p.detach() for p in trainer.model.parameters()]


@pytest.mark.slow
def test_replicas_stay_alike_where_an_optimizer_draws() -> None:
    found = run_ranks(_noisy, 2, {"replicate": 2})

    replica = [p for p in found[0] if p.dtype == torch.float32]
    assert all(any(torch.equal(own, other) for other in replica) for own in found[1])


@pytest.mark.slow
def test_weights_on_several_stages_are_refused_where_an_optimizer_draws() -> None:
    found = run_ranks(_noisy, 2, {"stages": (2, 2)})

    assert all("weight, which several stages hold" in str(said) for said in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"replicate": 2}, "taken"),
        ({"shard": 2}, "--setup ddp"),
        ({"tensor": 2}, "--setup ddp"),
        ({"stages": (2, 2)}, "--setup ddp"),
    ],
)
def test_they_are_refused_where_a_rank_has_only_some(plan: dict[str, Any], said: str) -> None:
    assert all(said in found for found in run_ranks(what_is_said, 2, ClippingSGD, plan))


def _refused() -> str:
    with pytest.raises(ValueError, match="if it looks at whole matrices or their norms, False if") as caught:
        parallelize(TiedNet, plan_of(tied_profile(), shard=2), Unchanging, loss=loss)
    parallelize(TiedNet, plan_of(tied_profile(), shard=2), Unchanging, loss=loss, whole_matrices=False)
    return str(caught.value)


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_tried_is_refused_before_the_first_step() -> None:
    assert all("Unchanging cannot be given shards" in message for message in run_ranks(_refused, 2))


def test_parameters_of_the_users_own_model_are_refused() -> None:
    own = TiedNet()

    with pytest.raises(ValueError, match=r"took a parameter of shape .* that it was not given"):
        parallelize(TiedNet, plan_of(tied_profile()), lambda p: SGD(own.parameters(), lr=0.1), loss=loss)
    with pytest.raises(ValueError, match=r"gave tokens\.weight to two optimizers"):
        parallelize(TiedNet, plan_of(tied_profile()), lambda p: [SGD(p, lr=0.1), SGD(p, lr=0.1)], loss=loss)
    with pytest.raises(ValueError, match="returned NoneType: it must return a torch optimizer"):
        parallelize(TiedNet, plan_of(tied_profile()), lambda p: None, loss=loss)  # type: ignore[arg-type, return-value]


def marked() -> TiedNet:
    model = TiedNet()
    model.blocks[0].up.weight.rate = 0.5  # type: ignore[union-attr]
    return model


def _named() -> dict[str, float]:
    rates: dict[str, float] = {}

    def make(named: Any) -> Optimizer:
        rates.update({name: getattr(p, "rate", 1.0) for name, p in named})
        return SGD([{"params": [p], "lr": 0.01 * rates[name]} for name, p in named])

    parallelize(marked, plan_of(tied_profile(), shard=2), make, loss=loss)
    return rates


@pytest.mark.slow
def test_parameters_come_with_names_and_attributes_when_asked_for() -> None:
    for rates in run_ranks(_named, 2):
        assert set(rates) == {name for name, _ in TiedNet().named_parameters()}
        assert [name for name, rate in rates.items() if rate != 1.0] == ["blocks.0.up.weight"]
