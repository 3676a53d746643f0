"""Nothing in a step reads a number from the device, for which a GPU's launch queue would run empty."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.executor import parallelize
from meshwright.executor.faults import NonFiniteError
from meshwright.executor.run_document import load_run
from meshwright.planner.plan.document import Plan
from support import slow
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero")


class ReadError(AssertionError):
    """A number was read from the device."""


class _NoCalls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], torch.Tensor):
            raise ReadError(f"Tensor.{func.__name__} of {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise ReadError(str(func))
        return func(*args, **(kwargs or {}))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # AdamW counts its steps on the CPU, where it may read them


def _weight(batch: Any) -> torch.Tensor:
    return (batch[0] > 0).sum()


def _steps(plan: Plan, weight: Callable[[Any], torch.Tensor] | None, every: int, telemetry: Path | None) -> list[float]:
    """Losses of four steps, of which the third and fourth may read nothing unless they look at every step."""
    trainer = parallelize(
        TiedNet,
        plan,
        _sgd,
        loss=loss,
        weight=weight,
        check_every=every,
        max_grad_norm=1.0,
        telemetry=telemetry,
    )
    shares = list(trainer.loader(samples()[: 4 * GLOBAL_BATCH]))
    found = [trainer.step(shares[0]), trainer.step(shares[1])]
    with _NoCalls(), _NoReads():
        found.append(trainer.step(shares[2]))
        trainer.forward_backward(shares[3])
        found.append(trainer.optimizer_step())
    losses = [metrics.loss for metrics in found]
    trainer.close()
    return losses


@pytest.mark.parametrize(
    "degrees",
    slow.but_first(
        [{}, {"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"stages": (2, 2)}, {"replicate": 2, "stages": (2, 2)}], 2
    ),
    ids=str,
)
def test_a_step_reads_nothing(degrees: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(tied_profile(), **degrees)
    path = tmp_path / "run.jsonl"

    told = run_ranks(_steps, plan.degrees.num_devices, plan, _weight, 5, path)[0]

    _, steps = load_run(path)
    assert [step.loss for step in steps] == told
    assert all(math.isfinite(value) for value in told)


def test_a_step_that_is_looked_at_reads() -> None:
    with pytest.raises(ReadError):
        _steps(plan_of(tied_profile()), None, 1, None)


def test_a_step_that_was_not_looked_at_is_named_later() -> None:
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss, check_every=3)
    shares = list(trainer.loader(samples()[: 3 * GLOBAL_BATCH]))
    trainer.step(shares[0])
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(math.nan)
    trainer.step(shares[1])

    with pytest.raises(NonFiniteError, match=r"^step 2: its loss or its gradients are not finite, seen after step 3"):
        trainer.step(shares[2])


def test_looking_at_every_zeroth_step_is_refused() -> None:
    with pytest.raises(ValueError, match="check_every is 0; it counts steps"):
        parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss, check_every=0)
