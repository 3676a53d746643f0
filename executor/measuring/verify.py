"""Verifies a plan: a small version of its model is trained by it on processes of this machine, and in one process."""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...planner.plan.document import Plan
from ...profiler.machine.units import first_of
from ...profiler.model.building import on_meta
from ...profiler.model.loaded import Batch, LoadedModel, Loss
from ...profiler.model.model_profile import ModelProfile
from ...profiler.model.trace import trace
from ...profiler.semantics.draws import SameDraws
from ..apply import check_model
from ..start_up import parallelize
from .local_ranks import RankError, apart, run_local_ranks
from .one_process import (
    LEARNING_RATE,
    SEED,
    USUAL,
    RunResult,
    SharesApart,
    Training,
    as_real,
    copied,
    global_batches,
    no_dropout,
    one_process,
    shares_of,
    unsplit,
)
from .small_plan import small_model, small_plan

TOLERANCE = 1e-4
"""The largest difference between two runs that counts as equal, relative to the largest element of the tensor."""

_FLOOR = 5e-3
"""Gradients below this share of the model's largest gradient, and parameters below what AdamW moves them by for such
gradients, are compared relative to that value instead: a gradient that is zero by mathematics (an attention key's bias,
or one before a norm) is nothing but rounding. TOLERANCE of it is 5e-7 of the largest gradient, four times what fp32 can
tell apart there."""

_AS_FAR = 4.0
"""How many times as far from exact numbers as those of one process a plan's may be, for it rounds in another order."""

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Difference:
    """The element of a tensor in which two runs differ most."""

    what: str
    one_process: float
    plan: float
    relative: float


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Whether a plan computes what one process computes.

    largest: of the losses, gradient norms, gradients and parameters each the largest relative difference.
    first: the first tensor that differs by more than TOLERANCE, in the order in which they come about.
    failure: why the plan could not be run to the end; detail: the traceback to that.
    splitting: what the same process computes otherwise where the batch is one micro-batch; None: the same.
    rounding: what differs by more than TOLERANCE is no farther from exact numbers than one process is, as _AS_FAR says.
    """

    title: str
    notes: tuple[str, ...]
    largest: dict[str, Difference]
    first: Difference | None = None
    failure: str | None = None
    detail: str = ""
    splitting: Difference | None = None
    rounding: bool = False

    @property
    def ok(self) -> bool:
        """Whether all numbers agree."""
        return self.first is None and self.failure is None

    @property
    def lines(self) -> list[str]:
        """The report for people."""
        lines = [self.title, *(f"  note: {note}" for note in self.notes)]
        if self.failure is not None:
            return [*lines, f"NOT VERIFIED: {self.failure}"]
        for kind, d in self.largest.items():
            found = f"largest difference {d.relative:.1e} ({d.what})" if d.relative else "bit for bit the same"
            lines.append(f"  {kind}: {found}")
        if self.splitting is not None:
            d = self.splitting
            lines.append(
                f"  splitting the batch, with one process or many, changes the {d.what}: {d.one_process:.7g} with all "
                f"samples in one forward, {d.plan:.7g} in the plan's micro-batches (relative difference "
                f"{d.relative:.1e}): samples see each other (batch norm, a loss over pairs), a forward follows on the "
                "one before, or draws one of Python's or numpy's random numbers for all of its samples"
            )
        alike = " that splits its batch alike" if self.splitting is not None else ""
        if self.first is None and self.rounding:
            return [
                *lines,
                f"SAME NUMBERS as one process{alike} but for rounding: where they differ by more than {TOLERANCE:g}, "
                f"the plan's are at most {_AS_FAR:g} times as far from those in float64 as one process's",
            ]
        if self.first is None:
            return [*lines, f"SAME NUMBERS as one process{alike} (relative difference below {TOLERANCE:g})"]
        return [
            *lines,
            f"DIFFERENT NUMBERS, first in {self.first.what}: one process {self.first.one_process:.7g}, "
            f"plan {self.first.plan:.7g} (relative difference {self.first.relative:.1e}, allowed {TOLERANCE:g})",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


def verify(plan: Plan, loaded: LoadedModel, steps: int = 3, profile: ModelProfile | None = None) -> VerifyReport:
    """Train a small version of the model by a small version of the plan, and beside it in one process.

    Compares losses, gradient norms, the first step's gradients, and all parameters after `steps` AdamW steps in fp32.
    profile: of the model as it is, if there is one; it serves where there is no smaller version.
    Raises ValueError if the plan is for another model, if there is no small version, or it cannot be cut as the plan
    says.
    """
    check_model(on_meta(loaded.build), plan)
    with tempfile.TemporaryDirectory() as folder:
        small, notes = small_model(plan, loaded, Path(folder))
        is_whole = small.make_batch is loaded.make_batch and small.seq_len == loaded.seq_len
        if profile is None or not is_whole or loaded.small is not None:
            try:
                profile = apart(trace, small)
            except ValueError:
                if is_whole or small.make_batch is not loaded.make_batch:
                    raise
                small = small.with_seq_len(loaded.seq_len or 1)  # it takes no other length
                profile = apart(trace, small)
    trial, shrunk = small_plan(plan, profile)
    title = f"{plan.model.name} by {plan.label}, run as {small.name} by {trial.label}"
    notes += shrunk
    batches = global_batches(small, trial, steps, profile.batch_problem)
    dropouts = any(
        getattr(m, "p", 0) for m in on_meta(small.build).modules() if isinstance(m, nn.modules.dropout._DropoutNd)
    )
    if dropouts:
        notes += ("dropout is off in both runs",)
    return beside_one_process(VerifyReport(title, notes, {}), trial, small, batches)


def beside_one_process(
    report: VerifyReport,
    plan: Plan,
    loaded: LoadedModel,
    batches: Sequence[Batch],
    timeout_s: float = _TIMEOUT_S,
    training: Training = USUAL,
) -> VerifyReport:
    """The report, with what differs between training a model by the plan as it stands and in one process.

    batches: one global batch per step, smaller than the plan's if the plan can run it.
    """
    ranks = plan.degrees.num_devices
    try:
        expected: RunResult = run_local_ranks(one_process, 1, loaded, plan, batches, training, timeout_s=timeout_s)[0]
    except RankError as error:
        return replace(report, failure=f"the model does not train in one process: {error}", detail=error.detail)
    for step, loss in enumerate(expected.losses, start=1):
        if not math.isfinite(loss):
            drawn = ", where all that the model draws is one number" if expected.drew else ""
            words = f"the loss of step {step} is {loss} in one process{drawn}, so there is nothing to compare"
            return replace(report, failure=words)
    if not training.dropout:
        report = replace(report, splitting=_splitting(expected, loaded, plan, batches[0], timeout_s))
    if expected.evaluated is None:
        alone = "it is not evaluated: its forward asks for gradients, and evaluation has none"
        report = replace(report, notes=(*report.notes, alone))
    if expected.drew:
        report = replace(report, notes=(*report.notes, "random numbers are one and the same in all runs"))
    try:
        told = loaded, plan, batches, expected.eps, training, expected.drew, expected.evaluated is not None
        found: RunResult = run_local_ranks(_one_rank, ranks, *told, timeout_s=timeout_s)[0]
    except RankError as error:
        return replace(report, failure=f"the plan did not run: {error}", detail=error.detail)
    seen = compared(report, expected, found)
    if seen.first is None:
        return seen
    try:
        given = in_double(loaded), plan, [_as_double(batch) for batch in batches], training
        exact: RunResult = run_local_ranks(one_process, 1, *given, timeout_s=timeout_s)[0]
    except RankError:
        return seen
    return compared(report, expected, found, exact)


def _splitting(
    expected: RunResult, loaded: LoadedModel, plan: Plan, batch: Batch, timeout_s: float
) -> Difference | None:
    """What is different in one process if the first batch is not split: the loss if that differs, else the gradient
    that differs most. None if it is rounding only, or if the batch cannot be run unsplit."""
    if plan.num_microbatches * plan.degrees.data == 1 or isinstance(batch, SharesApart):
        return None
    try:
        whole: RunResult = run_local_ranks(unsplit, 1, loaded, plan, batch, timeout_s=timeout_s)[0]
    except RankError:
        return None
    floor = _floor(whole)
    loss = _difference("loss of step 1", torch.tensor(whole.losses[0]), torch.tensor(expected.losses[0]))
    differences = [
        _difference(f"gradient of {name} in step 1", gradient, expected.gradients[name], floor)
        for name, gradient in whole.gradients.items()
        if name in expected.gradients
    ]
    largest = max(differences, key=lambda d: d.relative, default=loss)
    return next((d for d in (loss, largest) if not d.relative <= TOLERANCE), None)


def _floor(expected: RunResult) -> float:
    """The value that smaller gradients are compared relative to."""
    return _FLOOR * max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)


def compared(
    report: VerifyReport, expected: RunResult, found: RunResult, exact: RunResult | None = None
) -> VerifyReport:
    """The report, with what differs between two runs. exact: what one process computes in float64. If it is given, the
    plan may be _AS_FAR times as far from it as the fp32 run of one process, however few digits rounding leaves."""
    missing = [f"gradient of {name}" for name in expected.gradients if name not in found.gradients]
    missing += [name for name in expected.parameters if name not in found.parameters]
    if missing:
        return replace(report, failure=f"the plan has no {first_of(missing)}")
    kinds = _differences(expected, found)
    held = kinds if exact is None else _differences(_nearer(expected, found, exact), found)
    in_order = [held["loss"][0], *held["gradients"], *held["gradient norm"], *held["loss"], *held["parameters"]]
    in_order += held["evaluation"]
    first = next((d for d in in_order if not d.relative <= TOLERANCE), None)
    return replace(
        report,
        largest={kind: max(ds, key=lambda d: d.relative) for kind, ds in kinds.items() if ds},
        first=first,
        rounding=exact is not None and first is None,
    )


def _differences(expected: RunResult, found: RunResult) -> dict[str, list[Difference]]:
    """Kind of numbers -> the largest difference between two runs in each of them."""
    floor = _floor(expected)
    moved = LEARNING_RATE * len(expected.losses) * min(1.0, max(_FLOOR, floor / expected.eps))
    return {
        "loss": [
            _difference(f"loss of step {i + 1}", torch.tensor(a), torch.tensor(b))
            for i, (a, b) in enumerate(zip(expected.losses, found.losses, strict=True))
        ],
        "gradient norm": [
            _difference(f"gradient norm of step {i + 1}", torch.tensor(a), torch.tensor(b))
            for i, (a, b) in enumerate(zip(expected.norms, found.norms, strict=True))
        ],
        "gradients": [
            _difference(f"gradient of {n} in step 1", g, found.gradients[n], floor)
            for n, g in expected.gradients.items()
        ],
        "parameters": [
            _difference(f"{n} after step {len(expected.losses)}", p, found.parameters[n], moved)
            for n, p in expected.parameters.items()
        ],
        "evaluation": [
            _difference("evaluated loss", torch.tensor(a), torch.tensor(b))
            for a, b in [(expected.evaluated, found.evaluated)]
            if a is not None and b is not None
        ],
    }


def _nearer(expected: RunResult, found: RunResult, exact: RunResult) -> RunResult:
    """The numbers of one process; where those of the plan are about as near to the exact ones (_AS_FAR), these
    instead."""

    def nearer(a: torch.Tensor, b: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        if not a.shape == b.shape == true.shape or not a.numel():
            return a
        one, plan, exactly = (as_real(x.detach()).double() for x in (a, b, true))
        off, other = (float((x - exactly).abs().max()) for x in (one, plan))
        return b if other <= _AS_FAR * off else a

    def number(a: float, b: float, true: float) -> float:
        return nearer(*(torch.tensor([each], dtype=torch.float64) for each in (a, b, true))).item()

    evaluated = [each for each in (expected.evaluated, found.evaluated, exact.evaluated) if each is not None]
    return replace(
        expected,
        losses=[number(*each) for each in zip(expected.losses, found.losses, exact.losses, strict=True)],
        norms=[number(*each) for each in zip(expected.norms, found.norms, exact.norms, strict=True)],
        evaluated=number(*evaluated) if len(evaluated) == 3 else expected.evaluated,
        gradients={n: nearer(g, found.gradients[n], exact.gradients[n]) for n, g in expected.gradients.items()},
        parameters={n: nearer(p, found.parameters[n], exact.parameters[n]) for n, p in expected.parameters.items()},
    )


def in_double(loaded: LoadedModel) -> LoadedModel:
    """The model in float64; casts to shorter types that its forward and its loss name become casts to float64."""

    def build() -> nn.Module:
        module = loaded.build().double()
        running: list[_NothingShorter] = []

        def begin(*call: object) -> None:
            running.append(_NothingShorter())
            running[-1].__enter__()

        def end(*call: object) -> None:
            running.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begin, prepend=True)
        module.register_forward_hook(end, always_call=True)
        return module

    return replace(loaded, build=build, loss=loaded.loss and partial(_loss_in_double, loaded.loss))


def _loss_in_double(loss: Loss, output: Any, batch: Any) -> torch.Tensor:
    with _NothingShorter():
        return loss(output, batch)


class _NothingShorter(TorchFunctionMode):
    """While it lasts, functions that are asked for floating point shorter than float64 use float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` with float64 in place of shorter types."""
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        return func(*tree_map(_no_shorter, args), **tree_map(_no_shorter, kwargs or {}))


def _no_shorter(leaf: Any) -> Any:
    shorter = isinstance(leaf, torch.dtype) and leaf in (torch.float32, torch.bfloat16, torch.float16)
    return torch.float64 if shorter else leaf


def _as_double(batch: Any) -> Any:
    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    if isinstance(batch, SharesApart):
        return SharesApart(tree_map(double, share) for share in batch)
    return tree_map(double, batch)


def _one_rank(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[Batch],
    eps: float,
    training: Training,
    draws: bool = False,
    evaluates: bool = True,
) -> RunResult | None:
    """Train by the plan, on one of its ranks; returns what was computed on rank 0, None elsewhere. draws: the model
    draws random numbers. evaluates: it can run without gradients."""
    make = training.optimizers(eps)
    trainer = parallelize(
        loaded.build,
        plan,
        lambda named: make(named),
        loaded.loss,
        loaded.weight,
        seed=SEED,
        device="cpu",
        compile=training.compile,
    )
    last = copied(batches[-1])
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    with nullcontext() if training.dropout else no_dropout(trainer.model), SameDraws() if draws else nullcontext():
        for batch in batches:
            metrics = trainer.step(shares_of(batch, plan)[trainer.data_rank])
            losses.append(metrics.loss)
            norms.append(metrics.grad_norm)
            if len(losses) == 1:
                gradients = {name: grad.clone() for name, grad in trainer.named_gradients().items()}
        shares = [shares_of(last, plan)[trainer.data_rank]]
        evaluated = trainer.evaluate(shares)["loss"] if evaluates else None
    parameters = trainer.full_state_dict()
    is_first = trainer.mesh.rank == 0
    trainer.close()
    return RunResult(losses, norms, gradients, parameters, eps, evaluated=evaluated) if is_first else None


def _difference(what: str, expected: torch.Tensor, found: torch.Tensor, floor: float = 0.0) -> Difference:
    """The element in which two tensors differ most; the difference is relative to the largest element of the first
    tensor, or to `floor` if that is larger."""
    if expected.shape != found.shape:
        return Difference(f"{what}, of shape {tuple(expected.shape)} and {tuple(found.shape)}", 0.0, 0.0, float("inf"))
    if expected.numel() == 0:
        return Difference(what, 0.0, 0.0, 0.0)
    a, b = (as_real(tensor.detach()).double().flatten() for tensor in (expected, found))
    gap = (a - b).abs().nan_to_num(nan=float("inf"))
    place = int(gap.argmax())
    scale = max(float(a.abs().max()), floor)
    relative = float(gap[place]) / scale if scale else float(gap[place])
    return Difference(what, float(a[place]), float(b[place]), relative)
