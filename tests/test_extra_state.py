"""What is saved beside the model: averaged weights go to any other plan, and what cannot is refused by save."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.executor import Trainer, parallelize
from support.ranks import run_ranks
from support.tied_net import PLANS, TiedNet, adamw, loss, plan_of, samples, tied_profile


class Averages:
    """Averaged weights as many scripts keep them; in_list: without names, local: only what lies on this rank."""

    def __init__(self, trainer: Trainer, in_list: bool = False, local: bool = False) -> None:
        self.model, self.in_list, self.updates = trainer.model, in_list, 0
        self.values = {n: self._own(p, local).clone() for n, p in trainer.model.named_parameters()}
        self.local = local

    def _own(self, p: torch.Tensor, local: bool) -> torch.Tensor:
        p = p.detach()
        return p.to_local() if local and isinstance(p, DTensor) else p

    def update(self) -> None:
        self.updates += 1
        for name, p in self.model.named_parameters():
            self.values[name].lerp_(self._own(p, self.local), 0.3)

    def state_dict(self) -> dict[str, Any]:
        values = list(self.values.values()) if self.in_list else {"module." + n: v for n, v in self.values.items()}
        return {"updates": self.updates, "shadow": values, "decay": torch.tensor(0.3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        values = state["shadow"]
        given = values if self.in_list else [values["module." + n] for n in self.values]
        for own, value in zip(self.values.values(), given, strict=True):
            own.copy_(value)


def run(degrees: dict[str, Any], folder: Path, steps: int, resume: bool, **kind: bool) -> dict[str, torch.Tensor]:
    """Whole averages by the parameters' names, as one process sees them, after some steps that are saved."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **degrees), adamw, loss=loss)
    averages = Averages(trainer, **kind)
    if resume:
        trainer.resume(folder, ema=averages)
    for _, share in zip(range(steps), trainer.loader(samples), strict=False):
        trainer.step(share)
        averages.update()
    trainer.save(folder, ema=averages)
    trainer.close()
    return {n: v.clone() for n, v in averages.values.items()} if trainer.plan.degrees.num_devices == 1 else {}


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        pytest.param("fsdp and tensor", "one", {}, marks=pytest.mark.slow),
        pytest.param("hsdp", "ddp in stages", {"local": True}, marks=pytest.mark.slow),
        pytest.param("ddp in stages", "fsdp and tensor", {}, marks=pytest.mark.slow),
        pytest.param("one", "hsdp", {"in_list": True}, marks=pytest.mark.slow),
        ({"shard": 2}, {"tensor": 2}, {"local": True}),
    ],
)
def test_averaged_weights_go_on_under_another_plan(
    first: Any, second: Any, kind: dict[str, bool], tmp_path: Path
) -> None:
    expected = run({}, tmp_path / "alone", 4, resume=False, **kind)
    for degrees, resume in ((first, False), (second, True)):
        degrees = PLANS[degrees] if isinstance(degrees, str) else degrees
        plan = plan_of(tied_profile(), **degrees)
        run_ranks(partial(run, **kind), plan.degrees.num_devices, degrees, tmp_path / "run", 2, resume)

    found = run({}, tmp_path / "run", 0, resume=True, **kind)

    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


class Own:
    """State of a rank's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [1, self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _refused(folder: Path) -> str:
    trainer = parallelize(TiedNet, plan_of(tied_profile(), shard=2), adamw, loss=loss)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller looks at the message)
        trainer.save(folder, sampler=Own(torch.full((3,), trainer.mesh.rank)))
    assert not list(folder.glob("step-*"))
    trainer.save(folder, sampler=Own(7))
    return str(caught.value)


def test_what_differs_between_ranks_is_refused_at_save(tmp_path: Path) -> None:
    for message in run_ranks(_refused, 2, tmp_path):
        assert message.startswith("sampler cannot be saved: inner/1 of its 2 values differs between ranks 0 and 1")
