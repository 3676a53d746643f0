"""Which parameters, modules and crossing tensors belong to which stage; and taking those of other stages out of a
model."""

from collections import Counter
from types import MethodType

import torch
from torch import nn

from ...planner.plan.document import Plan
from ...profiler.model.building import has_own_train
from ...profiler.model.model_profile import CrossingTensor
from ...profiler.running.held_tensors import HeldTensors

STALE = "the model is not the one the plan was made for; make the plan again"


def crossing_into(plan: Plan, stage: int) -> tuple[CrossingTensor, ...]:
    """Tensors that cross the cut before a stage, in the plan's order; none before the first stage, nor after the
    last."""
    if stage in (0, len(plan.stages)):
        return ()
    first = sum(len(s.layers) for s in plan.stages[:stage])
    return tuple(t for t in plan.model.tensors if t.made_by < first <= t.last_used_by)


def parameters_of_stages(model: nn.Module, plan: Plan) -> list[set[str]]:
    """[stage] -> full names of the parameters it owns; those that no layer reads go with the module they are in."""
    stages = [{name for layer in stage.layers for name in layer.parameters} for stage in plan.stages]
    named = list(model.named_parameters(remove_duplicate=False))
    read = {id(parameter) for name, parameter in named if any(name in names for names in stages)}
    for name, parameter in named:
        if id(parameter) not in read:
            stages[_stage_around(name, plan)].add(name)
    return stages


def check_partition(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError unless each parameter of the model is on exactly one stage."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stages = parameters_of_stages(model, plan)
    unknown = sorted(set().union(*stages) - names)
    if unknown:
        raise ValueError(f"the plan names the parameter {unknown[0]}, which the model does not have: {STALE}")
    for first, own in enumerate(stages):
        for second in range(first + 1, len(stages)):
            shared = sorted(own & stages[second])
            if shared:
                raise ValueError(
                    f"{shared[0]} is used by layers on the stages {first} and {second}; layers that share a module "
                    "must be on one stage"
                )
    modules = Counter(name for stage in plan.stages for name in {m for layer in stage.layers for m in layer.modules})
    twice = [name for name, count in modules.items() if count > 1]
    if twice:
        raise ValueError(f"module {twice[0]} runs on {modules[twice[0]]} stages; its layers must be on one")


class Placeholders:
    """Tensors without memory that stand in modules where parameters and buffers of other stages were."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._places: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []

    def put(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Take the parameter or buffer `name` out of a module, and put a meta tensor of its shape in its place."""
        like = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._places.append((module, name, like, tensor))
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.__dict__[name] = like

    def move(self, device: torch.device) -> None:
        """Make the placeholders anew on a device, also in other places where the model holds the same tensors."""
        instead: dict[int, torch.Tensor] = {}
        for module, name, like, tensor in self._places:
            instead[id(tensor)] = torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
            module.__dict__[name] = instead[id(tensor)]
        HeldTensors(lambda place, tensor: instead.get(id(tensor), tensor)).enter(self._root)

    def answer_for(self, module: nn.Module) -> None:
        """Let a module that has lost all of its parameters still have one, a placeholder: models ask a parameter for
        their dtype and device."""
        names = {place: name for place, name, *_ in self._places}
        inside = next(m for m in module.modules() if m in names)
        module.__dict__["parameters"] = lambda recurse=True: iter([inside.__dict__[names[inside]]])


def strip(model: nn.Module, own: set[str], foreign: tuple[str, ...]) -> Placeholders:
    """Take everything out of the model that belongs to other stages. A module that layers of several stages hold has a
    name in each of them; here it has those of this stage, in others it is an attribute."""
    placeholders = Placeholders(model)

    def is_foreign(name: str) -> bool:
        return any(name == f or name.startswith(f + ".") for f in foreign)

    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    elsewhere = {module for module, its_names in names.items() if all(map(is_foreign, its_names))}
    shared = {id(buffer) for module in names.keys() - elsewhere for buffer in module._buffers.values()}
    had_parameters = [module for module in names if next(module.parameters(), None) is not None]
    for module, its_names in names.items():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not any(f"{prefix}.{name}".lstrip(".") in own for prefix in its_names):
                placeholders.put(module, name, parameter)
        if module not in elsewhere:
            continue
        if has_own_train(module):  # which may write into parameters that are not here
            module.__dict__["train"] = MethodType(nn.Module.train, module)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and id(buffer) not in shared:
                placeholders.put(module, name, buffer)
        for name, child in list(module._modules.items()):
            if child is not None and child not in elsewhere:
                module.__dict__[name] = module._modules.pop(name)
    for module in had_parameters:
        if next(module.parameters(), None) is None:
            placeholders.answer_for(module)
    return placeholders


def _stage_around(name: str, plan: Plan) -> int:
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if any(name.startswith(module + ".") for module in layer.modules):
                return index
    return 0
