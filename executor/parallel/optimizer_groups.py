"""Parameter groups of a rank's optimizer as one process has them, where a rank has some of the parameters, or parts.

In a pipeline a rank has the parameters of its stages, and may have a tied one by another name than its first; under
tensor and expert parallelism it has parts. The user's function is given them by the names that one process has, and
what it makes of them is held against what it makes of the whole model's parameters without memory.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...planner.plan.document import Plan
from ..agreement import peers_answer
from ..apply import AppliedModel
from .mesh import RankMesh, mechanism
from .optimizers import JoinedOptimizers, MakeOptimizer, joined, optimizer_of

_KERNELS = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose kernels, which step alike."""


class ParameterGroups:
    """Makes a rank's optimizers with the groups of one process: as many, in their order, with what is this rank's."""

    def __init__(self, make: MakeOptimizer, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
        self._make, self._model, self._mesh = make, model, mesh
        self._in_pipeline = plan.degrees.pipeline > 1
        firsts: dict[int, str] = {}
        self._firsts = {name: firsts.setdefault(id(p), name) for name, p in model.of_model.items()}
        self._names = firsts
        self._is_part = _has_other_shapes(plan) or self._in_pipeline
        self._of_model: Optimizer | None = None
        if self._is_part:
            try:
                self._of_model = optimizer_of(make, [(name, model.of_model[name]) for name in firsts.values()])
            except Exception:  # it needs numbers; else of the real parameters it raises what there is to say
                self._of_model = None

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """The optimizer that the user's function makes of these parameters, which are this rank's or stand for them.
        Every rank must call it. Raises ValueError, on every rank, if a parameter is stepped in another way than when
        the function is given all of the model's."""
        named = [(self._firsts[name], p) for name, p in parameters.items()]
        made = optimizer_of(self._make, named)
        if self._is_part and peers_answer(self._mesh):
            self._check(made, named)
        if self._in_pipeline and self._of_model is not None:
            self._arrange(made, self._of_model, named)
        return made

    def _check(self, made: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise ValueError, on every rank, if the user's function goes by the shapes, places or number of
        parameters."""
        own = dict(named)
        here = _by_name(made, {id(p): name for name, p in named}, own)
        there = here if self._of_model is None else _by_name(self._of_model, self._names, own)
        other = next((name for name in own if here.get(name) != there.get(name)), None)
        told = next(filter(None, self._mesh.on_all(other and (other, self._why(other, own[other])))), None)
        if told is not None:
            raise ValueError(f"optimizer=... steps {told[0]} otherwise than where it is given {told[1]}")

    def _why(self, name: str, p: nn.Parameter) -> str:
        """The end of the error for a parameter: what one process has in its place, what the user's function goes by,
        and the way out."""
        by_names = "Let it go by names (optimizer=lambda named: ...)"
        or_marks = f"{by_names}, or by what the function that builds the model writes on parameters (p.rate = 0.1)"
        if name in self._model.without_dims:
            return (
                "it without dims, as the model has it, and not as a tensor of one element, which shards are cut from: "
                f"it goes by the number of dims. {by_names} or by p.numel() == 1, or plan for replicas (--setup ddp)"
            )
        if p.shape != self._model.of_model[name].shape:
            return (
                f"all of it, and not a rank's part of {list(p.shape)}: it goes by shapes, which are those of parts "
                f"under tensor and expert parallelism. {or_marks}, or plan with --pin tensor=1 --pin expert=1"
            )
        return (
            "all parameters of the model: it goes by how many there are or by their order, and a rank of a pipeline "
            f"has those of its stages. {or_marks}, or plan with --pin pipeline=1"
        )

    def _arrange(self, made: Optimizer, of_model: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Give an optimizer all groups of one process, empty where this rank has nothing of them, as schedulers count
        them; and let all copies of a tied parameter, of which a rank may have two, be in one, also where the function
        has looked parameters up by name."""
        ours, theirs = joined(made), joined(of_model)
        if len(ours) != len(theirs):
            return
        copies: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, p in named:
            copies[name].append(p)
        for one, whole in zip(ours, theirs, strict=True):
            own = {id(p): group for group in one.param_groups for p in group["params"]}
            groups = []
            for group in whole.param_groups:
                here = [p for w in group["params"] for p in copies[self._names[id(w)]]]
                kept = next((own[id(p)] for p in here if id(p) in own), group)
                groups.append({**kept, "params": here})
            one.param_groups[:] = groups
        if isinstance(made, JoinedOptimizers):
            made.share_groups()


def _by_name(
    optimizer: Optimizer, names: Mapping[int, str], among: Container[str]
) -> dict[str, tuple[dict[str, Any], set[str]]]:
    """Name of a parameter -> (options of its group, as far as they are numbers or words; parameters of `among` in that
    group)."""
    found = dict[str, tuple[dict[str, Any], set[str]]]()
    for group in optimizer.param_groups:
        said = {k: v for k, v in group.items() if isinstance(v, str | int | float | tuple)}
        options = {k: v for k, v in said.items() if k not in _KERNELS}
        members = {name for p in group["params"] if (name := names[id(p)]) in among}
        found |= dict.fromkeys(members, (options, members))
    return found


def _has_other_shapes(plan: Plan) -> bool:
    """Whether some rank holds parameters in other shapes than the model has them in: the same on all ranks, which meet
    over it. (What fully_shard divides is a DTensor, which tells the shape of the whole.)"""
    gives_dims = plan.model.without_dims != "" and mechanism(plan) == "fsdp"
    return plan.degrees.tensor * plan.degrees.expert > 1 or gives_dims
