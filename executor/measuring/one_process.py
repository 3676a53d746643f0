"""Trains in one process without parallelism: the reference that plans are compared with."""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ...planner.plan.document import Degrees, Plan
from ...profiler.model.building import in_training
from ...profiler.model.coupling import as_float
from ...profiler.model.loaded import Batch, LoadedModel, split_inputs
from ...profiler.running.forward_state import Taken, changed, places_of, put_back, taken
from ...profiler.semantics.draws import SameDraws, dice_apart, seed_dice
from ..agreement import check_total_weight
from ..parallel.dropout_calls import CallsInstead, holds_dropouts
from ..parallel.mesh import RankMesh
from ..parallel.micro_batches import loss_of, num_microbatches, num_samples, split_micro_batches
from ..parallel.random_numbers import KEEPS_ALL, RandomNumbers, of_micro_batch
from ..parallel.synced_norms import normalise_here, normalised, synced_norms

LEARNING_RATE = 1e-3

SEED = 0
"""Seed of weights and random numbers, in one process and under the plan alike."""

_MOST_REPLICATED = 100_000_000
"""Most parameters in all replicas together in the reference run: 0.4 GB, and as much again for gradients."""

_EPS = 1.0
"""AdamW's eps as a share of the RMS gradient: the usual 1e-8 would turn rounding into whole steps."""


NamedOptimizers = Callable[[list[tuple[str, nn.Parameter]]], list[torch.optim.Optimizer]]
"""Makes optimizers of (name, parameter) pairs of all parameters."""


def adamw(eps: float) -> NamedOptimizers:
    """A function that makes one AdamW of all parameters, with this eps."""
    return lambda named: [torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE, eps=eps)]


@dataclass(frozen=True)
class Training:
    """How both runs train. compile: as parallelize takes it. optimizers: returns what makes them, for AdamW's eps.
    dropout: whether dropout is on; both runs then use the masks that the executor draws sample by sample."""

    compile: bool | str = False
    optimizers: Callable[[float], NamedOptimizers] = adamw
    dropout: bool = False


USUAL = Training()
"""How `plan verify` trains."""


@dataclass(frozen=True)
class RunResult:
    """What a run computed. gradients: those of the first step. parameters: those after the last step. evaluated: mean
    loss of the last batch, with these parameters."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    eps: float
    drew: bool = False
    """Whether the model has drawn random numbers."""
    evaluated: float | None = None


def global_batches(loaded: LoadedModel, plan: Plan, steps: int, problem: str) -> list[Any]:
    """Global batches for so many steps; tensors in half precision become fp32. problem: why they cannot be cut, if they
    cannot: then each is given as shares."""
    share = plan.micro_batch * plan.num_microbatches
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if problem:
            ranks = range(plan.degrees.data)
            return [SharesApart(tree_map(as_float, loaded.batch(share)) for _ in ranks) for _ in range(steps)]
        return [tree_map(as_float, loaded.batch(plan.training.global_batch)) for _ in range(steps)]


def one_process(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[Batch],
    training: Training = USUAL,
) -> RunResult:
    """What training in one process computes on these batches. Of our own machinery it uses only the masks of dropout
    and the seeds of Python's and numpy's random numbers.

    A batch is run in the plan's micro-batches, one after another. What a forward leaves behind (running averages,
    counters, also in files and classes) belongs to each data rank alone under the plan, so here each data rank has a
    replica of the module.
    """
    torch.manual_seed(SEED)
    parameters = plan.degrees.data * plan.model.num_parameters
    count = plan.degrees.data if parameters <= _MOST_REPLICATED else 1
    replicas = [in_training(_seeded(loaded)) for _ in range(count)]
    model = replicas[0]
    alone = [_with_own_loss(loaded) for _ in replicas]
    together = Together(replicas) if synced_norms(model) and count > 1 else None
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    eps = 1e-8
    optimizers: list[torch.optim.Optimizer] = []
    draws = SameDraws()
    masks = _masks_of_one_process(plan, replicas) if training.dropout else None
    alternate = together is None and masks is None  # masks have names of files bound to them
    turns = ReplicaTurns(replicas, alone) if alternate else None
    last = copied(batches[-1])  # for the evaluation: models may write into what they are given

    def begins(step: int, place: int) -> None:
        seed_dice(of_micro_batch(SEED, (step, 0), place * plan.micro_batch))

    off = nullcontext() if training.dropout else no_dropout(model)
    with off, nullcontext() if training.dropout else draws, dice_apart():
        for step, batch in enumerate(batches, start=1):
            shares = [_micro_batches(share, plan) for share in shares_of(batch, plan)]
            with nullcontext() if masks is None else masks.step(step):
                losses.append(_accumulate(replicas, alone, shares, together, masks, partial(begins, step), turns))
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            each = [torch.linalg.vector_norm(as_real(grad), dtype=torch.float64) for grad in grads]
            norms.append(float(torch.stack(each).norm()))
            if not optimizers:
                named = model.named_parameters(remove_duplicate=False)
                gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
                eps = max(eps, _EPS * norms[0] / sum(g.numel() for g in grads) ** 0.5)
                optimizers = training.optimizers(eps)(list(model.named_parameters()))
            for optimizer in optimizers:
                optimizer.step()
            _hand_on(replicas)
        found = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}  # as trained
        drew = draws.drew or (together is not None and together.drew)
        shares = [_micro_batches(share, plan) for share in shares_of(last, plan)]
        return RunResult(
            losses, norms, gradients, found, eps, drew, _evaluated(replicas, alone, shares, partial(begins, 0), turns)
        )


def _masks_of_one_process(plan: Plan, replicas: Sequence[nn.Module]) -> RandomNumbers:
    """The random numbers of a process that runs all micro-batches of all data ranks in order."""
    alone = plan.model_copy(
        update={"degrees": Degrees(), "num_microbatches": plan.num_microbatches * plan.degrees.data}
    )
    masks = RandomNumbers(replicas[0], alone, RankMesh(alone, 0, torch.device("cpu"), None), SEED)
    masks.drops = masks.drops is not False  # as the plan will find in its first forward
    for replica in replicas:
        masks.watch(replica, ())
    return masks


@torch.no_grad()
def _evaluated(
    replicas: Sequence[nn.Module],
    alone: Sequence[LoadedModel],
    shares: Sequence[Sequence[Any]],
    begins: Callable[[int], None],
    turns: "ReplicaTurns | None",
) -> float | None:
    """Mean loss of a batch in evaluation mode; None if the forward asks for gradients, which there are none of then.
    shares: [data rank] -> micro-batches. begins: is called with the number of each micro-batch before it runs. turns:
    of the replicas."""
    total, count = 0.0, 0.0
    for i, share in enumerate(shares):
        if turns is not None:
            turns.take(i % len(replicas))
        model, loaded = replicas[i % len(replicas)].eval(), alone[i % len(replicas)]
        for place, part in enumerate(share, start=i * len(share)):
            begins(place)
            weight = 1.0 if loaded.weight is None else float(loaded.weight(part))
            try:
                loss = float(_loss(model, loaded, part))
            except RuntimeError as error:
                if not re.search(r"requires?[ _]grad", str(error)):
                    raise
                return None
            total, count = total + weight * loss if weight else total, count + weight
    return total / count


def unsplit(loaded: LoadedModel, plan: Plan, batch: Batch) -> RunResult:
    """Loss and gradients of the first step, if its global batch is run in a single forward."""
    model = in_training(_seeded(loaded))
    with no_dropout(model), SameDraws():
        loss = _accumulate([model], [loaded], [[batch]])
    named = model.named_parameters(remove_duplicate=False)
    gradients = {n: p.grad for n, p in named if p.grad is not None}
    return RunResult([loss], [], gradients, {}, 0.0)


def _seeded(loaded: LoadedModel) -> nn.Module:
    torch.manual_seed(SEED)
    return loaded.build()


class Together:
    """Replicas in threads of one process, whose synchronised norms take their statistics over the samples of all."""

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        self.drew = False
        self._held = holds_dropouts(replicas[0])
        self._count = len(replicas)
        self._barrier = threading.Barrier(self._count)
        self._shared: list[torch.Tensor | None] = [None] * self._count
        for rank, replica in enumerate(replicas):
            for norm in synced_norms(replica):
                reduce = partial(self._reduce, rank)
                normalise_here(norm).forward = partial(normalised, norm, reduce, self._count)

    def _reduce(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        self._shared[rank] = value
        self._barrier.wait()
        found = torch.stack([x for x in self._shared if x is not None]).sum(0)
        self._barrier.wait()
        return found

    def sum_of(self, runs: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
        """The sum of the losses that these functions return, one for each replica, run at once."""

        def alone(run: Callable[[], torch.Tensor]) -> torch.Tensor:
            try:
                with SameDraws() as draws, _held_too(self._held):  # modes are a thread's own
                    loss = run()
                self.drew |= draws.drew
                return loss
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self._count) as pool:
            found = [future.result() for future in [pool.submit(alone, run) for run in runs]]
        return torch.stack(found).sum()


def _with_own_loss(loaded: LoadedModel) -> LoadedModel:
    """The model with a copy of its loss, if the loss is an object that may count its calls: so calls by others do not
    count."""
    if loaded.loss is None or isinstance(loaded.loss, FunctionType | MethodType):
        return loaded
    return replace(loaded, loss=copy.deepcopy(loaded.loss))


class ReplicaTurns:
    """Replicas of one process that take turns. Each finds what its code, or that of its loss, keeps in files, classes
    and shared objects as it left it, as if it ran in a process of its own."""

    def __init__(self, replicas: Sequence[nn.Module], alone: Sequence[LoadedModel]) -> None:
        self._replicas, self._alone = replicas, alone
        self._left = [self._found(number) for number in range(len(replicas))] if len(replicas) > 1 else []
        self._running = 0

    def take(self, number: int) -> None:
        """Switch to a replica."""
        if number != self._running:
            self._left[self._running], self._running = self._found(self._running), number
            put_back(changed(self._left[number]))

    def _found(self, number: int) -> Taken:
        loss = self._alone[number].loss
        return taken([*places_of(self._replicas[number]), *([] if loss is None else places_of(loss))])


class SharesApart(tuple[Batch, ...]):
    """The shares of all data ranks, for a batch that cannot be cut into them."""


def shares_of(batch: "Batch | SharesApart", plan: Plan) -> list[Any]:
    """[data rank] -> its share of a global batch, which may be smaller than the plan's."""
    if isinstance(batch, SharesApart):
        return list(batch)
    samples = num_samples(batch, plan.training.global_batch, plan.model.batch)
    return split_micro_batches(batch, plan.degrees.data, samples, plan.model.batch)


def _micro_batches(share: Any, plan: Plan) -> list[Any]:
    samples = num_samples(share, plan.micro_batch * plan.num_microbatches, plan.model.batch)
    return split_micro_batches(share, num_microbatches(plan, samples), samples, plan.model.batch)


def _accumulate(
    replicas: Sequence[nn.Module],
    alone: Sequence[LoadedModel],
    shares: Sequence[Sequence[Any]],
    together: "Together | None" = None,
    masks: RandomNumbers | None = None,
    begins: Callable[[int], None] = lambda place: None,
    turns: "ReplicaTurns | None" = None,
) -> float:
    """Loss of a step. Gradients are left on the parameters of the first replica. shares: [data rank] -> micro-batches.
    alone: the model with each replica's own loss. together: runs the micro-batches of all data ranks at once, if norms
    take statistics over all of them. masks: draws the masks of dropout. begins: is called with the number of each
    micro-batch before it runs, unless they run together. turns: of the replicas."""
    parts = [(i % len(replicas), part) for i, share in enumerate(shares) for part in share]
    weight_of = alone[0].weight
    weights = [1.0 if weight_of is None else float(weight_of(part)) for _, part in parts]
    check_total_weight(sum(weights))
    total = 0.0
    for replica in replicas:
        replica.zero_grad()

    def scaled(number: int, part: Any, weight: float) -> torch.Tensor:
        loss = _loss(replicas[number], alone[number], part)
        if not weight:  # its mean would be NaN
            return torch.zeros_like(loss, requires_grad=True)
        return loss * (weight / sum(weights))

    runs = [partial(scaled, *part, weight) for part, weight in zip(parts, weights, strict=True)]
    if together is None:
        for place, run in enumerate(runs):
            if masks is not None:
                masks.micro_batch(place)
            if turns is not None:
                turns.take(parts[place][0])
            begins(place)
            loss = run()
            loss.backward()
            total += float(loss.detach())
    else:
        for i in range(len(shares[0])):
            loss = together.sum_of(runs[i :: len(shares[0])])
            loss.backward()
            total += float(loss.detach())
    for replica in replicas[1:]:
        for own, parameter in zip(replicas[0].parameters(), replica.parameters(), strict=True):
            if parameter.grad is not None:
                own.grad = parameter.grad if own.grad is None else own.grad + parameter.grad
    return total


def _loss(model: nn.Module, loaded: LoadedModel, part: Any) -> torch.Tensor:
    args, kwargs = split_inputs(model, part, loaded.loss is not None)
    output = model(*args, **kwargs)
    return loss_of(output) if loaded.loss is None else loaded.loss(output, part)


@torch.no_grad()
def _hand_on(replicas: Sequence[nn.Module]) -> None:
    """Copy the first replica's parameters to the others."""
    for replica in replicas[1:]:
        for own, parameter in zip(replicas[0].parameters(), replica.parameters(), strict=True):
            parameter.copy_(own)


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """While it lasts, dropouts keep everything: two runs that draw differently could not be compared."""

    def keep_all(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)  # tensors between layers are known by the name of the function that made them
        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return original(input, 0.0, training, inplace)

        setattr(dropout, KEEPS_ALL, True)
        return dropout

    @wraps(_DROPPING["scaled_dot_product_attention"])
    def attend(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("dropout_p", None)
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return _DROPPING["scaled_dot_product_attention"](*args, **kwargs)

    held = holds_dropouts(model)
    for name, original in _DROPPING.items():
        setattr(functional, name, attend if name == "scaled_dot_product_attention" else keep_all(original))
    try:
        with _held_too(held):
            yield
    finally:
        for name, original in _DROPPING.items():
            setattr(functional, name, original)


_DROPPING = {
    name: getattr(functional, name)
    for name in (
        *("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
        "scaled_dot_product_attention",
    )
}


def _held_too(held: bool) -> AbstractContextManager[Any]:
    """While it lasts, torch's original functions call those that are now bound to their names. Needed only if a model
    holds the originals (`held`)."""
    return CallsInstead({_DROPPING[name]: getattr(functional, name) for name in _DROPPING}) if held else nullcontext()


def copied(batch: Any) -> Any:
    """A copy of a batch with tensors of its own, for models may write into them."""

    def cloned(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    if isinstance(batch, SharesApart):
        return SharesApart(tree_map(cloned, share) for share in batch)
    return tree_map(cloned, batch)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a complex one as pairs of real and imaginary parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
