"""Optimizers that look at whole matrices (Muon, Shampoo, Adafactor, LAMB) are given whole matrices, by owner.

An optimizer that treats every element by itself may be given shards. Whether one does is tried: a step of a small
matrix must be that of its halves. Where it is not, every parameter has one owner among the ranks of its stage. Before a
step the parameter and its gradient are gathered, one after the other, and the owner keeps them; it does the step, and
hands the new parameter to the others. Ranks share the work and the state as evenly as whole matrices allow.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FunctionType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ...planner.cost.sharding import kept_rows
from ...planner.plan.document import Plan
from ..apply import AppliedModel
from ..torch_compat import all_gather_single, own_group
from .host_optimizer import HostParameters
from .mesh import RankMesh, mechanism
from .optimizer_groups import ParameterGroups
from .optimizers import JoinedOptimizers, MakeOptimizer, joined, keep_attributes, optimizers_inside


def looks_at_whole_matrices(optimizer: Optimizer) -> Literal["yes", "no"] | str:
    """Whether an optimizer's step of a matrix differs from the steps of its parts: "yes", "no", or in a sentence why
    that cannot be tried."""
    for one in joined(optimizer):
        for group in one.param_groups:
            for ndim in sorted({p.dim() for p in group["params"] if p.requires_grad}):
                found = _tried(one, {k: v for k, v in group.items() if k not in ("params", "param_names")}, ndim)
                if found != "no":
                    return found
    return "no"


def _tried(optimizer: Optimizer, options: dict[str, Any], ndim: int) -> str:
    draw = torch.Generator().manual_seed(0)
    shape = (4, 6, 2, 2, 2, 2)[:ndim]
    start = torch.randn(shape, generator=draw, dtype=torch.float64)
    gradients = [torch.randn(shape, generator=draw, dtype=torch.float64) * scale for scale in (0.1, 0.3)]
    if ndim:
        for gradient in gradients:
            gradient[:2] *= 7.0  # so that what is common to both halves shows
    try:
        whole = _stepped(optimizer, options, start, gradients)
        if torch.equal(whole, start):
            return "a trial step changes nothing"
        for dim in range(min(ndim, 2)):
            halves = [
                _stepped(optimizer, options, half, [g.chunk(2, dim)[i] for g in gradients])
                for i, half in enumerate(start.chunk(2, dim))
            ]
            if not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-9, atol=1e-12):
                return "yes"
    except Exception as error:
        return f"a trial step ends with {type(error).__name__}: {error}"
    return "no"


def steps_shards(optimizer: Optimizer) -> bool:
    """Whether a trial step of a shard that fully_shard makes (a DTensor) ends: torch has no rule for some of what is
    written in place, as Rprop writes. Sends nothing."""
    for one in joined(optimizer):
        for group in one.param_groups:
            shards = [p for p in group["params"] if p.requires_grad and isinstance(p, DTensor)]
            if not shards:
                continue
            like = max(shards, key=lambda p: p.dim())
            local = torch.ones(_TRIED_SHAPE[: like.dim()], device=like.device)
            start = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            try:
                _all_stepped(one, [(options, [start])], [[start]], as_asked=True)
            except Exception:
                return False
    return True


_OTHERWISE = 30.0
"""Factor of one parameter's gradient in a trial of whether it changes the steps of others: large enough to change a
norm over all of them, and no power of two."""

_TRIED_SHAPE = (4, 6, 2, 2, 2, 2)
"""Shape of a parameter in such a trial, cut to as many dims as the real one has: small, and not square."""


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether the step of one parameter depends on the gradients of others (a norm over all, a learning rate that all
    of them determine), as far as trial steps show it in which one parameter's gradient is changed."""
    inner = optimizer.optimizers if isinstance(optimizer, JoinedOptimizers) else [optimizer]
    return any(_is_coupled(one) for one in inner)


def _is_coupled(optimizer: Optimizer) -> bool:
    groups = []
    draw = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        dims = sorted({p.dim() for p in group["params"] if p.requires_grad})
        shapes = [_TRIED_SHAPE[:ndim] for ndim in (dims * 2)[: max(2, len(dims))]]
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append((options, [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]))
    starts = [start for _, own in groups for start in own]
    gradients = [[torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in starts] for _ in range(2)]
    if not starts:
        return False
    found = []
    try:
        for factor in (1.0, _OTHERWISE):
            with torch.random.fork_rng([]):
                torch.default_generator.manual_seed(0)  # an optimizer may draw
                scaled = [[*step[:-1], step[-1] * factor] for step in gradients]
                found.append(_all_stepped(optimizer, groups, scaled))
    except Exception:  # what cannot be tried is asked for by name where parameters are divided
        return False
    (stepped, learned), (others, learned_there) = found
    return learned != learned_there or not all(map(torch.equal, stepped[:-1], others[:-1]))


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A value of an optimizer's state made for another parameter: a number as it is, a tensor filled with its first
    element."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return copy.deepcopy(value)
    own = value.to_local() if isinstance(value, DTensor) else value
    return torch.full_like(parameter, own.flatten()[:1].sum().item())  # 0 on a rank without a share


def _stepped(
    optimizer: Optimizer, options: dict[str, Any], start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A parameter after steps of a copy of the optimizer, one for each gradient."""
    return _all_stepped(optimizer, [(options, [start])], [[gradient] for gradient in gradients])[0][0]


def _all_stepped(
    optimizer: Optimizer,
    groups: Sequence[tuple[dict[str, Any], Sequence[torch.Tensor]]],
    gradients: Sequence[Sequence[torch.Tensor]],
    as_asked: bool = False,
) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """(parameters, numbers of each group) after steps of a copy of the optimizer. groups: (options, parameters).
    gradients: [step][parameter]. as_asked: by the kernels that the options ask for; else one operator at a time, which
    takes any device and dtype."""
    own = _copied(optimizer)
    for options, starts in groups:
        parameters = [nn.Parameter(start.clone()) for start in starts]
        for made in islice(optimizer.state.values(), 1):  # by the constructor, as Adagrad's before torch 2.13
            for parameter in parameters:
                own.state[parameter] = {name: _like(value, parameter) for name, value in made.items()}
        kernels = () if as_asked else ("fused", "foreach", "capturable")
        plain = {key: False for key in kernels if options.get(key)}
        rate = {"lr": 0.01} if "lr" in options else {}
        own.param_groups.append({**copy.deepcopy(options), **plain, **rate, "params": parameters})
    stepped = [parameter for group in own.param_groups for parameter in group["params"]]
    for step in gradients:
        for parameter, gradient in zip(stepped, step, strict=True):
            parameter.grad = gradient.clone()
        own.step()
    learned = [{k: v for k, v in group.items() if isinstance(v, int | float)} for group in own.param_groups]
    return [parameter.detach() for parameter in stepped], learned


def _copied(optimizer: Optimizer) -> Optimizer:
    """A copy of an optimizer without parameters and states. Numbers, words and functions that it has as attributes, and
    that torch leaves out of copies, are copied, too."""
    own = copy.copy(optimizer)
    leaves = {name: tree_leaves(value) for name, value in vars(optimizer).items() if name not in vars(own)}
    for name, found in leaves.items():
        if all(leaf is None or isinstance(leaf, int | float | str | FunctionType) for leaf in found):
            setattr(own, name, copy.deepcopy(getattr(optimizer, name)))
    own.state = defaultdict(dict)
    own.param_groups = []
    for name, inner in optimizers_inside(optimizer).items():
        made = _copied(inner)
        made.param_groups = own.param_groups
        setattr(own, name, made)
    return own


def _is_divided(model: AppliedModel) -> bool:
    """Whether this rank holds only parts of some parameters."""
    return bool(model.experts or model.layout.cuts) or any(
        isinstance(p, DTensor)
        and any(n > 1 and at.is_shard() for n, at in zip(p.device_mesh.shape, p.placements, strict=True))
        for p in model.parameters.values()
    )


def whole_tensor(model: AppliedModel, mesh: RankMesh, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter, or of a tensor that is divided like it, from the shards of the ranks of this stage. All
    of these ranks must call it."""
    if name in model.experts:
        assert isinstance(tensor, DTensor)
        return model.experts[name].whole(tensor.full_tensor(), mesh.expert_mesh.get_group("expert"))
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if name in model.without_dims:
        return tensor.view(())
    cut = model.cut(name)
    if cut is None:
        return tensor
    shards = [torch.empty_like(tensor) for _ in range(cut.degree)]
    dist.all_gather(shards, tensor.contiguous(), group=mesh.group("tensor"))
    return cut.full(shards)


def whole_rows(
    model: AppliedModel, mesh: RankMesh, name: str, tensor: torch.Tensor, most_bytes: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """The whole of a parameter in pieces, each as (its first row, rows): of about most_bytes where ranks hold rows of
    it, else all at once. All ranks of this stage must go through all of them."""
    cut, size = model.cut(name), whole_size(model, name, model.parameters[name])
    row_bytes = tensor.element_size() * size[1:].numel()
    shards = _rows_of_shards(mesh, tensor)
    if name in model.experts or shards is None or not size or size[0] * row_bytes <= most_bytes:
        yield 0, whole_tensor(model, mesh, name, tensor)
        return
    local, group, places = shards
    each = len(kept_rows(tuple(tensor.shape), len(places), 0))
    together = len(places) * (cut.degree if cut is not None and cut.dim == 0 else 1)
    step = max(1, most_bytes // (row_bytes * together))
    for start in range(0, each, step):
        count = min(step, each - start)
        own = local[start : start + count]
        block = own.new_zeros(count, *tensor.shape[1:])
        block[: own.shape[0]] = own
        if group is not None:
            gathered = block.new_empty(len(places) * count, *block.shape[1:])
            all_gather_single(gathered, block, group=group)
            block = gathered
        blocks = [block]
        if cut is not None:
            blocks = [torch.empty_like(block) for _ in range(cut.degree)]
            dist.all_gather(blocks, block, group=mesh.group("tensor"))
        for number, place in enumerate(places):
            first = place * each + start
            found = min(count, tensor.shape[0] - first)
            rows = [part[number * count : number * count + found] for part in blocks]
            if found <= 0:
                continue
            if cut is None:
                yield first, rows[0]
            elif cut.dim:
                yield first, cut.full(rows)
            else:
                for rank, part in enumerate(rows):
                    yield from _placed(cut.rows(rank), first, part)


def _rows_of_shards(
    mesh: RankMesh, tensor: torch.Tensor
) -> tuple[torch.Tensor, dist.ProcessGroup | None, list[int]] | None:
    """(this rank's rows, the group of ranks that hold the others, [rank of the group] -> its place in the order of
    rows); None if shards are not made of whole rows."""
    if not isinstance(tensor, DTensor):
        return tensor, None, [0]
    if any(not (at.is_shard(0) or at.is_replicate()) for at in tensor.placements):
        return None
    if not any(at.is_shard() for at in tensor.placements):
        return tensor.to_local(), None, [0]
    order = mesh.shard_mesh.mesh.tolist()
    group = mesh.shard_mesh.get_group()
    return tensor.to_local(), group, [order.index(process) for process in dist.get_process_group_ranks(group)]


def _placed(ranges: Sequence[range], first: int, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(place in the whole, rows) for rows of a tensor rank, the first of which is its row number `first`. ranges: where
    the rank's rows lie in the whole."""
    begin = 0
    for where in ranges:
        low, high = max(first, begin), min(first + rows.shape[0], begin + len(where))
        if low < high:
            yield where.start + low - begin, rows[low - first : high - first]
        begin += len(where)


def whole_size(model: AppliedModel, name: str, p: nn.Parameter) -> torch.Size:
    """The shape of the whole of a parameter."""
    shape = [] if name in model.without_dims else list(p.shape)
    cut = model.cut(name)
    if name in model.experts:
        shape[0] = model.experts[name].count
    elif cut is not None:
        shape[cut.dim] = sum(cut.parts)
    return torch.Size(shape)


class WholeMatrices:
    """What the optimizer is given instead of shards. Every rank must make one, and call its methods together with the
    others.

    parameters: name -> the whole parameter if this rank owns it, on the device, or on the host if the plan offloads the
    optimizer. For a parameter that another rank owns, a tensor of its shape without memory, which never has a gradient:
    so all ranks make the same parameter groups.
    """

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
        self._model, self._mesh = model, mesh
        self._device = torch.device("cpu") if plan.offload_optimizer else mesh.device
        self._group, ranks = _stage_ranks(plan, mesh)
        whole = {name: whole_size(model, name, p) for name, p in model.parameters.items()}
        loads = dict.fromkeys(ranks, 0)
        self._owners: dict[str, int] = {}
        for name in sorted(whole, key=lambda n: (-whole[n].numel(), n)):
            self._owners[name] = min(ranks, key=lambda rank: loads[rank])
            loads[self._owners[name]] += whole[name].numel()
        self.parameters = {
            n: nn.Parameter(self._made(n, whole[n]), p.requires_grad) for n, p in model.parameters.items()
        }
        for name, p in self.parameters.items():
            keep_attributes(p, vars(model.parameters[name]))

    def owns(self, name: str) -> bool:
        """Whether this rank has the whole of a parameter."""
        return self._owners[name] == self._mesh.rank

    @torch.no_grad()
    def gather(self) -> None:
        """Give owners the parameters as they are, and their gradients."""
        for name, p in self._model.parameters.items():
            own = self.parameters[name]
            own.grad = None
            if p.grad is None:
                continue
            for source, keep in ((p, own.copy_), (p.grad, lambda g, own=own: setattr(own, "grad", g.to(own)))):
                found = whole_tensor(self._model, self._mesh, name, source.detach())
                if self.owns(name):
                    keep(found)

    @torch.no_grad()
    def scatter(self) -> None:
        """Take over what owners have made of the parameters."""
        for name, p in self._model.parameters.items():
            if p.grad is None:
                continue
            own = self.parameters[name]
            whole = torch.empty(own.shape, dtype=own.dtype, device=self._mesh.device)
            if self.owns(name):
                whole = own.detach().to(self._mesh.device)
            dist.broadcast(whole, self._mesh.processes[self._owners[name]], group=self._group)
            own.grad = None  # it is not needed any more, and as large as the matrix
            _own_part(p).copy_(self._part(name, p, whole))

    def _part(self, name: str, p: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole tensor that is divided like the parameter `name`."""
        cut = self._model.cut(name)
        if name in self._model.without_dims:
            whole = whole.view(1)
        elif name in self._model.experts:
            whole = self._model.experts[name].local(whole)
        elif cut is not None:
            whole = cut.local(whole, self._mesh.coordinates["tensor"])
        if isinstance(p, DTensor):
            for dim, placement in enumerate(p.placements):
                if isinstance(placement, Shard):
                    chunks = whole.chunk(p.device_mesh.size(dim), placement.dim)
                    at = p.device_mesh.get_local_rank(dim)
                    whole = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0)
        return whole

    def _made(self, name: str, shape: torch.Size) -> torch.Tensor:
        dtype, device = self._model.parameters[name].dtype, self._device
        if self.owns(name):
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


def prepare_optimizer(
    make: MakeOptimizer, model: AppliedModel, plan: Plan, mesh: RankMesh, whole: bool | None
) -> tuple[Optimizer, WholeMatrices | HostParameters | None]:
    """(what the user's function makes, what it was given instead of the model's parameters: whole matrices if it has to
    see them, or copies on the host if the plan has the optimizer there). Every rank must call it.

    whole: whether it has to; None: if parameters are divided, and a step is not done element by element. Raises
    ValueError, on every rank, if that cannot be tried, or a step needs all parameters, of which ranks have some.
    """
    groups = ParameterGroups(make, model, plan, mesh)
    optimizer = groups.optimizer(model.parameters)
    _check_coupling(optimizer, model, plan, mesh)
    if _sees_whole_matrices(optimizer, model, plan, mesh, whole):
        matrices = WholeMatrices(model, plan, mesh)
        return groups.optimizer(matrices.parameters), matrices
    if plan.offload_optimizer:
        on_host = HostParameters(model.parameters)
        return groups.optimizer(on_host.parameters), on_host
    return optimizer, None


def _check_coupling(optimizer: Optimizer, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
    """Raise ValueError, on every rank, if the step of one parameter depends on others and ranks hold only some
    parameters or parts of them."""
    degrees = plan.degrees
    if degrees.pipeline == 1 and mechanism(plan) != "fsdp" and degrees.tensor == 1:
        return
    coupled = (degrees.pipeline > 1 or _is_divided(model)) and couples_parameters(optimizer)
    verdict = torch.tensor(int(coupled), device=mesh.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    if verdict:
        raise ValueError(
            f"{type(optimizer).__name__} steps a parameter by the gradients of all of them (a common norm or rate), of "
            "which a rank has only some under this plan: plan for replicas, which have all (--setup ddp), or take "
            "another optimizer; parallelize(max_grad_norm=...) clips by the norm of all under every plan"
        )


def _sees_whole_matrices(
    optimizer: Optimizer, model: AppliedModel, plan: Plan, mesh: RankMesh, whole: bool | None
) -> bool:
    """Whether an optimizer must be given whole matrices. All ranks get the same answer."""
    if whole is False or (mechanism(plan) != "fsdp" and plan.degrees.tensor == 1):
        return False
    found = "no" if not _is_divided(model) else "yes" if whole else looks_at_whole_matrices(optimizer)
    if found == "no" and not steps_shards(optimizer):
        found = "yes"
    verdict = torch.tensor({"no": 0, "yes": 1}.get(found, 2), device=mesh.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    if verdict == 2:
        why = found if found not in ("yes", "no") else "a trial step of another rank shows nothing"
        raise ValueError(
            f"{type(optimizer).__name__} cannot be given shards of parameters without knowing whether it treats every "
            f"element by itself, and {why}. Say parallelize(..., whole_matrices=True) if it looks at whole matrices or "
            "their norms, False if it does not"
        )
    return bool(verdict == 1)


def _stage_ranks(plan: Plan, mesh: RankMesh) -> tuple[dist.ProcessGroup | None, list[int]]:
    """(group, ranks of the plan) of this rank's place in the pipeline. The group is None if that is all ranks."""
    if plan.degrees.pipeline == 1:
        return None, list(range(plan.degrees.num_devices))
    ranks: list[list[int]] = [[] for _ in range(plan.degrees.pipeline)]
    for rank in range(plan.degrees.num_devices):
        ranks[plan.coordinates(rank)["pipeline"]].append(rank)
    group = own_group([[mesh.processes[rank] for rank in position] for position in ranks])
    return group, ranks[mesh.coordinates["pipeline"]]


def _own_part(p: nn.Parameter) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p
