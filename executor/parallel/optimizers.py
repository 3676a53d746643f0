"""Optimizers made by a user's function of parameters: one or several, with or without the parameters' names."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Any], Optimizer | Sequence[Optimizer]]


def optimizer_of(make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer that `make` makes of these parameters; if it makes several, they are joined to one.

    make: is given (name, parameter) pairs if its first argument is called `named...`, else parameters. Raises
    ValueError if it returns anything but optimizers, or if these have other parameters.
    """
    if not callable(make):
        made = f"{type(make).__name__}(...) is made already, of parameters that are not those that are trained"
        found = made if isinstance(make, Optimizer) else repr(make)
        raise ValueError(
            f"optimizer={found}: give the function that makes it, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4)"
        )
    made = make(list(named) if _wants_names(make) else [p for _, p in named])
    several = list(made) if isinstance(made, Iterable) and not isinstance(made, Optimizer) else [made]
    if not several or not all(isinstance(one, Optimizer) for one in several):
        raise ValueError(
            f"optimizer=... returned {type(made).__name__}: it must return a torch optimizer of the parameters that it "
            "is given, or a list of several"
        )
    for one in several:
        if _wants_closure(one):
            raise ValueError(
                f"{type(one).__name__} asks for the loss again within its step (step(closure)), which a plan cannot "
                "give it: take an optimizer whose step() needs none"
            )
    seen: set[int] = set()
    known = {id(p) for _, p in named}
    for p in (p for one in several for group in one.param_groups for p in group["params"]):
        if id(p) not in known:
            raise ValueError(
                f"optimizer=... took a parameter of shape {list(p.shape)} that it was not given: take the parameters "
                "from its argument, for those of the model that you built are not the ones that are trained"
            )
        if id(p) in seen:
            name = next(name for name, own in named if own is p)
            raise ValueError(f"optimizer=... gave {name} to two optimizers; it would be stepped twice")
        seen.add(id(p))
    return several[0] if len(several) == 1 else JoinedOptimizers(several)


def joined(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that were joined to this one; itself if none were."""
    return optimizer.optimizers if isinstance(optimizer, JoinedOptimizers) else [optimizer]


def without_memory(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters of a model on the meta device by each of their names, with what the user has written on them; tied
    ones are one."""
    made: dict[int, nn.Parameter] = {}
    for p in model.parameters():
        made[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        keep_attributes(made[id(p)], vars(p))
    return {name: made[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def keep_attributes(parameter: nn.Parameter, attributes: Mapping[str, Any]) -> None:
    """Copy to a parameter the attributes that the user has set on the one that it stands for."""
    for name, value in attributes.items():
        if not name.startswith("__") and not isinstance(value, torch.Tensor) and not hasattr(parameter, name):
            setattr(parameter, name, value)


def _wants_names(make: Callable[..., Any]) -> bool:
    try:
        first = next(iter(inspect.signature(make).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    return first is not None and first.name.startswith("named")


def _wants_closure(optimizer: Optimizer) -> bool:
    found = inspect.signature(optimizer.step).parameters.get("closure")
    return found is not None and found.default is found.empty


def optimizers_inside(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Name -> the optimizer that one holds under it and lets step its own parameters, as Lookahead does."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        name: inner
        for name, inner in vars(optimizer).items()
        if isinstance(inner, Optimizer) and {id(p) for group in inner.param_groups for p in group["params"]} == own
    }


def sizes_of_groups(optimizer: Optimizer) -> list[int]:
    """Number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def check_added(optimizer: Optimizer, given: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if add_param_group has given an optimizer parameters that no plan trains.

    given: those that it was made with. trained: the model's parameters, which `given` may stand for.
    """
    known, of_model = ({id(p) for p in own.values()} for own in (given, trained))
    added = next((p for group in optimizer.param_groups for p in group["params"] if id(p) not in known), None)
    if added is None:
        return
    if id(added) in of_model:
        name = next(name for name, p in trained.items() if p is added)
        raise ValueError(
            f"{name} was added to the optimizer, which under this plan steps others in the place of the model's "
            "parameters (whole matrices, or copies on the host): let optimizer=... make a group for it from the start, "
            "and freeze it (requires_grad_(False)) until it is to be trained"
        )
    raise ValueError(
        f"a parameter of shape {list(added.shape)} was added to the optimizer that is none of the model's, whose "
        "gradient no plan brings together from all ranks: let it be a parameter of the model, and plan that"
    )


class JoinedOptimizers(Optimizer):
    """Several optimizers of different parameters as one; parameter groups are theirs, one after the other."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers: list[Optimizer] = []
        super().__init__([{"params": group["params"]} for one in optimizers for group in one.param_groups], {})
        self.optimizers = list(optimizers)
        self.share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError once optimizers are joined: none of them would step the group."""
        if self.optimizers:
            raise ValueError(
                f"add_param_group of {len(self.optimizers)} optimizers: say which of them is to step it, "
                "trainer.optimizer.optimizers[0].add_param_group(...)"
            )
        super().add_param_group(param_group)

    def share_groups(self) -> None:
        """Take over the optimizers' present groups and states."""
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]
        self.state = _States(self.optimizers)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each."""
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also of groups that were added to one of the optimizers."""
        self.share_groups()
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each its part."""
        groups = iter(state_dict["param_groups"])
        for one in self.optimizers:
            own = [next(groups) for _ in one.param_groups]
            numbers = {number: i for i, number in enumerate(chain(*(group["params"] for group in own)))}
            renamed = [{**group, "params": [numbers[n] for n in group["params"]]} for group in own]
            state = {numbers[n]: value for n, value in state_dict["state"].items() if n in numbers}
            one.load_state_dict({"state": state, "param_groups": renamed})
        self.share_groups()


class _States(Mapping[torch.Tensor, Any]):
    """States of all parameters."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        for one in self._optimizers:
            if parameter in one.state:
                return one.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(one.state for one in self._optimizers)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)
