"""A rank's part of a run in the form in which a checkpoint holds it: boxes of tensors, and what is not a tensor."""

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...planner.plan.document import Plan
from ..apply import AppliedModel
from ..parallel.host_optimizer import HostParameters
from ..parallel.mesh import RankMesh
from ..parallel.optimizers import optimizers_inside
from ..parallel.whole_matrices import WholeMatrices
from .boxes import Box, boxes
from .extra_state import Extra, Place, Refill, Stateful, extra_key, extra_of, like_place, loader_state, places_of
from .random_state import random_state


class ModelState:
    """A rank's part of a model, by the names in the whole model; a tied parameter may be in it twice."""

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
        self._model, self._plan, self._mesh = model, plan, mesh
        first = {name: names[0] for names in plan.model.ties for name in names}
        self._parameters = places_of(model.parameters, first)

    def model_boxes(self) -> list[Box]:
        """Boxes of this rank's parameters and persistent buffers."""
        found = [box for p in self._parameters for box in self._boxes(f"model.{p.name}", p.own_name, p.tensor)]
        return found + [
            Box(f"model.{name}", buffer.shape, (0,) * buffer.dim(), buffer) for name, buffer in self._buffers().items()
        ]

    def _boxes(self, key: str, own_name: str, tensor: torch.Tensor) -> list[Box]:
        part = self._model.experts.get(own_name)
        if part is not None:
            held = boxes(key, tensor, None, 0, part.place.shard, part.num_shards)
            whole = torch.Size((part.count, *tensor.shape[1:]))
            return [replace(b, whole=whole, offsets=(b.offsets[0] + part.first, *b.offsets[1:])) for b in held]
        at, degrees = self._mesh.coordinates, self._plan.degrees
        shard_rank = at["data_shard"] * degrees.context + at["context"]
        found = boxes(key, tensor, self._model.cut(own_name), at["tensor"], shard_rank, degrees.sharded_over)
        if own_name in self._model.without_dims:
            return [Box(key, torch.Size(), (), box.tensor.view(())) for box in found]
        return found

    def _buffers(self) -> dict[str, torch.Tensor]:
        persistent = self._model.module.state_dict().keys()
        named = self._model.module.named_buffers()
        return {n.removeprefix(self._model.prefix): b for n, b in named if n in persistent}


class State(ModelState):
    """A rank's part of a run: the model and its optimizer. instead: what the optimizer steps in place of the model's
    parameters; None: these."""

    def __init__(
        self,
        model: AppliedModel,
        plan: Plan,
        mesh: RankMesh,
        optimizer: Optimizer,
        instead: WholeMatrices | HostParameters | None = None,
    ) -> None:
        super().__init__(model, plan, mesh)
        self._optimizer = optimizer
        self._inside = optimizers_inside(optimizer)
        self._whole = instead if isinstance(instead, WholeMatrices) else None
        self.begin_anew()
        given = model.parameters if instead is None else instead.parameters
        self._stepped = {p.own_name: given[p.own_name] for p in self._parameters}  # what the optimizer has

    def extras(self, stateful: Mapping[str, Stateful]) -> dict[str, Extra]:
        """Name of a source -> what it saves on this rank, beside model and optimizer."""
        buffers = places_of(self._buffers(), {})
        return {n: extra_of(source, self._parameters, buffers, self._model.prefix) for n, source in stateful.items()}

    def refill(self, name: str, source: Stateful, tree: Any, saved: Metadata) -> Refill:
        """What to read from a checkpoint to restore a source."""
        buffers = places_of(self._buffers(), {})
        return Refill(name, source, tree, saved, self._parameters, buffers, self._model.prefix, self._place_boxes)

    def begin_anew(self) -> None:
        """Note that all ranks hold the same buffers now."""
        in_stages = self._plan.degrees.pipeline > 1
        self._begun = {name: b.detach().clone() for name, b in self._buffers().items()} if in_stages else {}

    def written_buffers(self) -> set[str]:
        """Names of the buffers of a pipeline stage that have changed since all ranks held the same. (Values are
        compared, for batch norm's kernels write without a change of version.)"""
        now = self._buffers()
        return {name for name, before in self._begun.items() if not torch.equal(_dense(now[name]), _dense(before))}

    def saved_boxes(self, extras: Mapping[str, Extra], elsewhere: Collection[str] = ()) -> list[Box]:
        """All boxes that this rank can write. Only the first replica writes its buffers, for each has its own.
        elsewhere: names of buffers that other stages write."""
        tensors, _ = self._optimizer_state()
        found = [
            box
            for p in self._parameters
            for kind, tensor in tensors[p.own_name].items()
            for box in self._optimizer_boxes(f"optimizer.{p.name}.{kind}", p, tensor)
        ]
        writes_buffers = self._mesh.is_first_of_stage
        buffers = self._buffers()
        mine = {name for name in buffers if writes_buffers and name not in elsewhere}
        for name, extra in extras.items():
            for path, place, value in extra.shards:
                if place.own_name in mine or place.own_name not in buffers:
                    found += self._place_boxes(extra_key(name, path, place), place, like_place(value, place))
        left_out = {f"model.{name}" for name in buffers.keys() - mine}
        return found + [box for box in self.model_boxes() if box.key not in left_out]

    def _place_boxes(self, key: str, place: Place, tensor: torch.Tensor) -> list[Box]:
        if place.own_name in self._buffers():
            return [Box(key, tensor.shape, (0,) * tensor.dim(), tensor)]
        return self._boxes(key, place.own_name, tensor)

    def saved_objects(self, extras: Mapping[str, Extra], loaders: Mapping[str, Stateful]) -> dict[str, Any]:
        """Key -> what is not a tensor, on the ranks that write it. loaders: data loaders of this data rank."""
        stage = self._mesh.coordinates["pipeline"]
        found: dict[str, Any] = {}
        if self._mesh.is_first_of_share:
            found[f"rng.{self._mesh.data_rank}.{stage}"] = random_state(self._mesh.device)
        states = {name: loader_state(name, source) for name, source in loaders.items()}  # on all: each may raise
        if self._mesh.is_first_of_share and stage == 0:
            found |= {f"loader.{name}.{self._mesh.data_rank}": state for name, state in states.items()}
        if self._mesh.is_first_of_stage or self._whole is not None:
            _, scalars = self._optimizer_state()
            owner = "" if self._whole is None else f".{self._mesh.rank}"
            found[f"optimizer.stage{stage}{owner}"] = {"scalars": scalars, "groups": self._groups()}
        if self._mesh.rank == 0:
            found |= {f"more.{name}": extra.tree for name, extra in extras.items()}
        return found

    def optimizer_boxes(self, saved: Metadata) -> tuple[list[Box], dict[str, dict[str, torch.Tensor]]]:
        """(boxes to read a saved optimizer state into, name on this rank -> state -> the tensor that is filled
        then)."""
        kinds: dict[str, list[str]] = {}
        have_dims: set[str] = set()
        for key, entry in saved.state_dict_metadata.items():
            name, _, kind = key.removeprefix("optimizer.").rpartition(".")
            if key.startswith("optimizer.") and isinstance(entry, TensorStorageMetadata):
                kinds.setdefault(name, []).append(kind)
                have_dims |= {kind} if entry.size else set()
        found: list[Box] = []
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for p in self._parameters:
            own = tensors[p.own_name] = {}
            for kind in kinds.get(p.name, ()) if self._is_here(p) else ():
                key = f"optimizer.{p.name}.{kind}"
                entry = saved.state_dict_metadata[key]
                assert isinstance(entry, TensorStorageMetadata)
                stepped = self._stepped[p.own_name]
                if not entry.size and _is_one_value(kind, have_dims):
                    own[kind] = torch.zeros((), dtype=entry.properties.dtype)
                    found.append(Box(key, entry.size, (), own[kind]))
                    continue
                if self._is_whole(p):
                    own[kind] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=stepped.device)
                else:
                    own[kind] = torch.zeros_like(stepped, dtype=entry.properties.dtype, requires_grad=False)
                to_read = self._optimizer_boxes(key, p, own[kind])
                for box in to_read[:1]:
                    if box.whole != entry.size:
                        raise ValueError(
                            f"the checkpoint's optimizer has {kind!r} of shape {list(entry.size)} for {p.name} of "
                            f"shape {list(box.whole)}, which {type(self._optimizer).__name__} cannot be given in "
                            "shards: it was saved by another optimizer"
                        )
                found += to_read
        return found, tensors

    def _is_here(self, p: Place) -> bool:
        """Whether the optimizer of this rank steps a parameter."""
        return self._whole is None or self._whole.owns(p.own_name)

    def _is_whole(self, p: Place) -> bool:
        """Whether the optimizer of this rank holds all of a parameter; only then may its state have any shape."""
        is_divided = isinstance(p.tensor, DTensor) or self._model.cut(p.own_name) is not None
        return self._whole is not None or not is_divided

    def _optimizer_boxes(self, key: str, p: Place, tensor: torch.Tensor) -> list[Box]:
        if self._is_whole(p):
            return [Box(key, tensor.shape, (0,) * tensor.dim(), tensor)]
        return self._boxes(key, p.own_name, tensor)

    def load_optimizer(self, tensors: dict[str, dict[str, torch.Tensor]], stages: Iterable[dict[str, Any]]) -> None:
        """Restore the optimizer's state. tensors: those of this rank, as of `optimizer_boxes`. stages: what each stage
        saved beside tensors.

        Raises ValueError if parameters of one group were saved in groups with different options, or if a trained
        parameter with a saved state is in no group here.
        """
        scalars: dict[str, dict[str, Any]] = {}
        options: dict[str, dict[str, Any]] = {}
        of_places: list[dict[str, Any]] = []
        for stage in stages:
            scalars |= stage["scalars"]
            options |= {name: group["options"] for group in stage["groups"] for name in group["names"]}
            if len(stage["groups"]) == len(self._optimizer.param_groups):
                of_places = [group["options"] for group in stage["groups"]]
        known = {id(self._stepped[p.own_name]): p for p in self._parameters}
        document: dict[str, Any] = {"state": {}, "param_groups": []}
        count = 0
        for place, group in enumerate(self._optimizer.param_groups):
            own = [known[id(p)] for p in group["params"]]
            different = {repr(options[p.name]): options[p.name] for p in own if p.name in options}
            if len(different) > 1:
                raise ValueError(
                    f"the optimizer has {own[0].name} and {own[-1].name} in one parameter group, the checkpoint was "
                    f"saved with different options for them: {' and '.join(different)}; make the groups as they were"
                )
            kept = {key: value for key, value in group.items() if key != "params"}
            kept |= next(iter(different.values()), {}) if own or not of_places else of_places[place]
            document["param_groups"].append({**kept, "params": list(range(count, count + len(own)))})
            for index, p in enumerate(own, count):
                # Tied parameters were saved once, but each counts its own steps.
                state = {**tensors[p.own_name], **copy.deepcopy(scalars.get(p.name, {}))}
                if state and self._is_here(p):
                    document["state"][index] = state
            count += len(own)
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for p in self._parameters:
            if id(self._stepped[p.own_name]) in stepped or not p.tensor.requires_grad or not self._is_here(p):
                continue
            if tensors[p.own_name] or p.name in scalars:
                raise ValueError(
                    f"the checkpoint's optimizer has a state for {p.name}, which is in no parameter group here, and "
                    "would lose it: add groups that the optimizer got later (add_param_group) before resume(), or "
                    "freeze what is not to be trained any more (requires_grad_(False))"
                )
        if not self._inside:
            self._optimizer.load_state_dict(document)
            return
        for prefix, optimizer in {"": self._optimizer, **{f"{n}:": inner for n, inner in self._inside.items()}}.items():
            _fill(optimizer, document, prefix)

    def _optimizer_state(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
        """(name on this rank -> state -> tensor in the parameter's shape, first name -> state -> single value)."""
        tensors: dict[str, dict[str, torch.Tensor]] = {p.own_name: {} for p in self._parameters}
        scalars: dict[str, dict[str, Any]] = {}
        for p in self._parameters:
            for kind, value in self._states(p).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0 < self._stepped[p.own_name].dim():
                    scalars.setdefault(p.name, {})[kind] = value
                elif value.shape == p.tensor.shape or self._is_whole(p):
                    tensors[p.own_name][kind] = value
                else:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} keeps {kind!r} of shape {list(value.shape)} for {p.name} of "
                        f"shape {list(p.tensor.shape)}: only states like the parameter, or of one value, can be saved "
                        "for other plans"
                    )
        return tensors, scalars

    def _states(self, p: Place) -> dict[str, Any]:
        """State -> what the optimizer keeps for a parameter. That of an optimizer inside of it has the inner one's name
        before: "base:exp_avg"."""
        stepped = self._stepped[p.own_name]
        found = dict(self._optimizer.state.get(stepped, {}))
        for name, inner in self._inside.items():
            found |= {f"{name}:{kind}": value for kind, value in inner.state.get(stepped, {}).items()}
        return found

    def _groups(self) -> list[dict[str, Any]]:
        names = {id(self._stepped[p.own_name]): p.name for p in self._parameters}
        return [
            {
                "names": [names[id(p)] for p in group["params"]],
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in self._optimizer.param_groups
        ]


def _fill(optimizer: Optimizer, document: dict[str, Any], prefix: str) -> None:
    """Set the options of groups, and those states of parameters whose kind begins with `prefix`, in an optimizer that
    exists. Optimizers that wrap others share groups with them, and torch's load_state_dict would make new groups."""
    for group, saved in zip(optimizer.param_groups, document["param_groups"], strict=True):
        group |= {key: value for key, value in saved.items() if key != "params"}
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            kept = document["state"].get(index, {}).items()
            own = {kind.removeprefix(prefix): v for kind, v in kept if kind.rpartition(":")[0] == prefix.rstrip(":")}
            if own:
                optimizer.state[parameter] = own


def _is_one_value(kind: str, have_dims: set[str]) -> bool:
    """Whether a state without dims, of a parameter without dims, is a single value such as a count, and not a tensor in
    the parameter's shape. have_dims: states that have dims for other parameters. If there are none, only torch's own
    name for a count is one (Optimizer.load_state_dict goes by it, too)."""
    return kind not in have_dims if have_dims else kind.rpartition(":")[2] == "step"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that torch can compare: for a sparse one its places and values."""
    if not tensor.is_sparse:
        return tensor
    found = tensor.coalesce()
    return torch.cat([found.indices().to(torch.float64).reshape(-1), found.values().to(torch.float64).reshape(-1)])
