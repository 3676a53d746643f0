"""Tensor and sequence parallelism of one stage: weights cut, collectives where the cuts begin and end.

Activations are ordinary tensors. Legend: T tensor ranks; "alike": equal on all of them; "sliced": each holds 1/T of
the sequence; "cut": each computes its own features or heads.

    columns   alike -> cut: nothing / all-reduce      sliced -> cut: all-gather / reduce-scatter
    rows      cut -> alike: all-reduce / nothing      cut -> sliced: reduce-scatter / all-gather
    head      columns, then all-gather of the features / slice
    embedding rows outside this rank's vocabulary give 0, then all-reduce / nothing
    edges     alike -> sliced: slice / all-gather      sliced -> alike: all-gather / slice

(forward / backward). Columns that read the same tensor share one collective, beside whose backward the gradients of
their weights are computed (delayed_weights.py). Under sequence parallelism slices are gathered where the cut's `gather`
module begins, because attention modules read the sequence's length from their input before they use it, or else by the
columns themselves.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ...planner.plan.document import LayerPlan, Plan, parts_of
from ...planner.plan.schedules import ZERO_BUBBLE
from ...profiler.model.model_profile import CrossingTensor, TensorCut
from ...profiler.semantics.token_marks import own_shape
from ...profiler.tensor_cuts.tensor_modules import divide_count
from ...profiler.tensor_cuts.tensor_rank import OwnWidth
from ..torch_compat import in_backward
from .delayed_weights import DelayedWeights
from .tensor_collectives import Alike, GatherAlike, GatherSum, PendingCollective, Slice, SumAlike, SumSlice, call
from .tensor_forwards import (
    Collective,
    SharedInput,
    column_forward,
    embedding_forward,
    entry_forward,
    gathered_forward,
    heads_forward,
    norm_forward,
    own_heads,
    row_forward,
    table_forward,
    whole_forward,
)
from .tensor_layout import ParameterCut, TensorLayout
from .tensor_loss import apart_forward


def apply_tensor_parallel(
    stage: nn.Module, plan: Plan, layers: Iterable[LayerPlan], mesh: DeviceMesh, following: LayerPlan | None
) -> TensorLayout:
    """Cut the stage's weights and attributes in place, and put collectives into the forwards concerned.

    stage: holds the layers under their original names; on the meta device or not. Of cut parameters this rank's part
    is left, an ordinary tensor (DTensors cost more than small layers compute). mesh: one axis. following: the layer
    after the stage's last, on another stage; None if there is none.
    Raises ValueError if a tied parameter would be cut in one place and whole in another.
    """
    _check_ties(plan)
    layout = TensorLayout()
    layers = list(layers)
    region = _Region(plan, mesh)
    done: set[str] = set()
    replaced: dict[int, nn.Parameter] = {}
    names = {id(p): n for n, p in stage.named_parameters()}
    for i, layer in enumerate(layers):
        next_layer = layers[i + 1] if i + 1 < len(layers) else following
        sliced = is_sliced(plan, layer)
        if layer.name in done:
            continue
        done.add(layer.name)
        prefix = layer.root + "." if layer.root else ""
        cuts = plan.class_plan(layer.layer_class).cuts
        inputs = _shared_inputs(stage, prefix, cuts, region, sliced)
        for name in layer.modules:
            stage.get_submodule(name).register_forward_pre_hook(_forgetting(inputs.values()))
        for cut in cuts:
            _cut_parameters(stage, prefix, cut, mesh, layout, replaced, names)
            _divide_attributes(stage, prefix, cut, mesh.size())
            _replace_forwards(stage, prefix, cut, inputs[cut.name], region, sliced)
        joint = [shared for shared in inputs.values() if shared.num_rows > 1]
        for part in parts_of(layer.recompute) if joint else ():
            module = _submodule(stage, prefix, part)
            module.forward = _forgetting_after_repetition(module.forward, joint)
        if sliced:
            layout.partial.update(names[id(stage.get_parameter(name))] for name in layer.parameters)
        region.hook(stage, layer, gather_after=sliced and next_layer is not None and not is_sliced(plan, next_layer))
    layout.partial -= set(layout.cuts)
    _check_partial(layers, layout, plan)
    _set_parameters(stage, replaced)
    return layout


def _check_partial(layers: list[LayerPlan], layout: TensorLayout, plan: Plan) -> None:
    """Raises ValueError for a parameter whose gradient would be a sum of shares and of wholes: on every tensor rank it
    must be a share, or whole."""
    whole = {n for layer in layers if not is_sliced(plan, layer) for n in layer.parameters}
    whole |= {n for names in plan.model.ties if whole & set(names) for n in names}
    for name in sorted(layout.partial & whole):
        raise ValueError(
            f"{name} is read by a layer that runs on slices of the sequence and by one that does not; "
            "plan it without sequence parallelism"
        )


def _cut_parameters(
    stage: nn.Module,
    prefix: str,
    cut: TensorCut,
    mesh: DeviceMesh,
    layout: TensorLayout,
    replaced: dict[int, nn.Parameter],
    names: dict[int, str],
) -> None:
    for relative, dim in cut.sharded.items():
        name = prefix + relative
        parameter = stage.get_parameter(name)
        size = parameter.shape[dim]
        widths = cut.parts.get(relative.rpartition(".")[0], (size,)) if _is_column(cut, relative) else (size,)
        if any(width % mesh.size() for width in widths) or sum(widths) != size:
            raise ValueError(f"{name} of {size} along dim {dim} ({widths}) is not divisible by tensor={mesh.size()}")
        division = ParameterCut(dim, tuple(widths), mesh.size())
        if layout.cuts.setdefault(name, division) != division:
            raise ValueError(f"{name} would be cut in two different ways; plan it with tensor=1 or untie it")
        first = names[id(parameter)]
        if layout.cuts.setdefault(first, division) != division:
            raise ValueError(f"{name} is tied to {first}, which is cut differently; plan it with tensor=1 or untie it")
        if id(parameter) not in replaced:
            local = division.local(parameter.detach(), mesh.get_local_rank())
            replaced[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)


def _is_column(cut: TensorCut, relative: str) -> bool:
    return relative.rpartition(".")[0] in cut.columns


def _set_parameters(stage: nn.Module, replaced: dict[int, nn.Parameter]) -> None:
    """Replace parameters in all modules that hold them, so that tied parameters stay tied."""
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                module._parameters[name] = replaced[id(parameter)]


def _divide_attributes(stage: nn.Module, prefix: str, cut: TensorCut, degree: int) -> None:
    for module_name, attributes in cut.attributes.items():
        module = _submodule(stage, prefix, module_name)
        for attribute in attributes:
            divide_count(module, attribute, degree)


def _check_ties(plan: Plan) -> None:
    """Raises ValueError unless a parameter with several names is cut alike under all names that layers read, on all
    stages."""
    layers = [layer for stage in plan.stages for layer in stage.layers]
    ways: dict[str, int | None] = {name: None for layer in layers for name in layer.parameters}
    for layer in layers:
        for cut in plan.class_plan(layer.layer_class).cuts:
            ways |= {(layer.root + "." if layer.root else "") + name: dim for name, dim in cut.sharded.items()}
    for group in plan.model.ties:
        found = {name: ways[name] for name in group if name in ways}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"tied parameters must be cut alike, but the plan cuts {found} (dim, or None for whole); "
                "cut both classes or neither, or untie them"
            )


def _shared_inputs(
    stage: nn.Module, prefix: str, cuts: Sequence[TensorCut], region: "_Region", sliced: bool
) -> dict[str, SharedInput]:
    """Name of a cut -> the input of its columns. Cuts whose columns read the same tensor have the same input object."""
    groups: list[tuple[list[str], set[str]]] = []
    shared: dict[str, SharedInput] = {}
    num_rows = {cut.name: len(cut.rows or cut.columns) for cut in cuts}
    columns = {
        cut.name: [_submodule(stage, prefix, name) for name in cut.columns if not cut.has_entered(name)] for cut in cuts
    }
    for cut in cuts:
        if sliced and cut.gather:
            shared[cut.name] = SharedInput(None, region.delayed(columns[cut.name]), num_rows[cut.name])
            continue
        read = {tensor for column, tensor in cut.inputs.items() if not cut.has_entered(column)}
        same = [group for group in groups if group[1] & read]
        groups = [group for group in groups if group not in same]
        names = [name for members, _ in same for name in members]
        groups.append(([*names, cut.name], read.union(*(tensors for _, tensors in same))))
    for names, _ in groups:
        delayed = region.delayed([column for name in names for column in columns[name]])
        one = SharedInput(region.column_input(sliced), delayed, sum(num_rows[n] for n in names))
        shared |= dict.fromkeys(names, one)
    return shared


def _forgetting(inputs: Iterable[SharedInput]) -> Callable[..., None]:
    """A hook that clears these inputs when a forward begins."""
    every = list(dict.fromkeys(inputs))

    def hook(module: nn.Module, args: Any) -> None:
        for shared in every:
            shared.clear()

    return hook


def _forgetting_after_repetition(forward: Callable[..., Any], inputs: Iterable[SharedInput]) -> Callable[..., Any]:
    """The forward of a part of a layer that is recomputed. When its repetition in backward ends, it forgets what it
    read together with groups outside of the part, which do not run again; also if the repetition stops early."""
    every = list(dict.fromkeys(inputs))

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            for shared in every if in_backward() else ():
                shared.clear()

    return run


def _replace_forwards(
    stage: nn.Module, prefix: str, cut: TensorCut, shared: SharedInput, region: "_Region", sliced: bool
) -> None:
    around = cut.gather if sliced else ""
    if around:
        hook = partial(region.gather_sum, shared)
        _submodule(stage, prefix, around).register_forward_pre_hook(hook, with_kwargs=True)
    for name in cut.columns:
        module = _submodule(stage, prefix, name)
        if cut.kind == "embedding":
            module.forward = embedding_forward(module, region.group)
        elif cut.kind == "table":
            module.forward = table_forward(module, region.group)
        else:
            forward = column_forward(module, shared, cut.has_entered(name))
            if cut.kind == "head":
                forward = (apart_forward if cut.stays_cut else gathered_forward)(forward, shared, region.group)
            module.forward = forward
    if cut.narrowed:
        own_width = OwnWidth(cut.shown, region.degree)
        _submodule(stage, prefix, cut.narrowed).register_forward_pre_hook(own_width.enter, with_kwargs=True)
        for name in cut.columns:
            module = _submodule(stage, prefix, name)
            module.forward = whole_forward(module.forward, own_width)
    for name in cut.entries:
        module = _submodule(stage, prefix, name)
        module.forward = entry_forward(module, (lambda x, pending: x) if around else region.column_input(sliced))
    for name in cut.between:
        module = _submodule(stage, prefix, name)
        module.forward = norm_forward(module)
    for name in cut.tables:
        module = _submodule(stage, prefix, name)
        module.forward = heads_forward(module, region.group)
    if cut.door:
        own = own_heads(cut, region.group)
        door = _submodule(stage, prefix, cut.door)
        door.register_forward_pre_hook(own.enter, with_kwargs=True)
        door.register_forward_hook(own.leave)
    for name in cut.rows:
        module = _submodule(stage, prefix, name)
        module.forward = row_forward(module, shared, region.row_output(sliced))


def _submodule(stage: nn.Module, prefix: str, name: str) -> nn.Module:
    """The module `name`, relative to the layer's root; '' is the root itself."""
    return stage.get_submodule((prefix + name).removesuffix("."))


def is_sliced(plan: Plan, layer: LayerPlan) -> bool:
    """Whether a layer runs on slices of the sequence."""
    return plan.class_plan(layer.layer_class).sequence


def crosses_sliced(tensor: CrossingTensor, plan: Plan) -> bool:
    """Whether a cut of the pipeline sends only a rank's slice of a tensor: made between two layers on slices."""
    if "sequence" not in tensor.dims or not tensor.requires_grad:
        return False
    layers = [layer for stage in plan.stages for layer in stage.layers]
    return all(is_sliced(plan, layer) for layer in layers[tensor.made_by : tensor.made_by + 2])


class _Region:
    """Which modules run on slices of the sequence, and the collectives at the edges of these and at the cuts."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self.plan = plan
        self.group = mesh.get_group()
        self.degree = mesh.size()
        self.sequences = {
            (
                tuple(size for size, dim in zip(t.shape, t.dims, strict=True) if dim == "other"),
                t.dims.index("sequence"),
                t.shape[t.dims.index("sequence")] // plan.degrees.context,
            )
            for t in plan.model.tensors
            if t.requires_grad and "sequence" in t.dims
        }
        dims = {dim for _, dim, _ in self.sequences}
        self.sequence_dim = dims.pop() if len(dims) == 1 else 1

    def delayed(self, columns: Iterable[nn.Module]) -> DelayedWeights:
        """These columns, which read the same tensor, as modules whose weight gradients may be put off; none of them
        under a zero-bubble schedule, which puts these off by itself."""
        return DelayedWeights([] if self.plan.schedule in ZERO_BUBBLE else columns)

    def column_input(self, sliced: bool) -> Collective:
        """The collective on the input of columns: an all-gather of slices, or nothing (with an all-reduce in
        backward)."""
        if sliced:
            return partial(self._gather_sum, self.sequence_dim)
        return lambda x, pending: call(Alike, x, self.group, pending)

    def gather_sum(self, shared: SharedInput, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook: gather all slices that a module is given. The gradients that come back are shares, and are summed."""
        seen: dict[int, Any] = {}

        def gather(x: Any) -> Any:
            if id(x) not in seen:
                found = self._length(x)
                if found is None or own_shape(x)[found[0]] == found[1]:
                    seen[id(x)] = x
                else:
                    seen[id(x)] = shared.enter_early(x, partial(self._gather_sum, found[0]))
            return seen[id(x)]

        return tree_map(gather, (args, kwargs))

    def _gather_sum(self, dim: int, x: torch.Tensor, pending: PendingCollective | None) -> torch.Tensor:
        return call(GatherSum, x, dim, self.group, pending)

    def row_output(self, sliced: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """The collective on the product of a row: a sum over ranks, of which each keeps its slice if `sliced`."""
        if sliced:
            return lambda y: call(SumSlice, y, self.sequence_dim, self.group)
        return lambda y: call(SumAlike, y, self.group)

    def hook(self, stage: nn.Module, layer: LayerPlan, gather_after: bool) -> None:
        """Register hooks on the modules of a layer: slice or gather their inputs as the layer needs them, and gather
        their outputs if the next layer needs them whole."""
        if not self.plan.sequence_parallel:
            return
        enter = self._enter_sliced if is_sliced(self.plan, layer) else self._enter_whole
        for name in layer.modules:
            module = stage.get_submodule(name)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            if gather_after:
                _before_other_hooks(module, lambda module, args, output: tree_map(self._gather, output))

    def _enter_sliced(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not any(self._length(x) for x in tree_leaves((args, kwargs))):
            shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            lengths = sorted({length for _, _, length in self.sequences})
            raise ValueError(
                f"a {type(module).__name__} runs on slices of a sequence of {lengths} by plan, but was given {shapes}; "
                "feed the length that was planned for, or plan again with --seq-len"
            )
        return tree_map(self._slice, (args, kwargs))

    def _enter_whole(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._gather, (args, kwargs))

    def _length(self, x: Any) -> tuple[int, int] | None:
        """(dim, whole length) of the sequence in a tensor that has one and requires a gradient; None for any other
        tensor."""
        if not isinstance(x, torch.Tensor) or not (x.requires_grad or not torch.is_grad_enabled()):
            return None
        shape = own_shape(x)
        for others, dim, length in self.sequences:
            if len(shape) == len(others) + 2 and shape[dim] in (length, length // self.degree):
                rest = [size for i, size in enumerate(shape) if i != dim]
                if tuple(rest[-len(others) :]) == others or tuple(rest[: len(others)]) == others:
                    return dim, length
        return None

    def _slice(self, x: Any) -> Any:
        found = self._length(x)
        if found is None:
            return x
        return call(Slice, x, found[0], self.group) if own_shape(x)[found[0]] == found[1] else x

    def _gather(self, x: Any) -> Any:
        found = self._length(x)
        if found is None or own_shape(x)[found[0]] == found[1]:
            return x
        return call(GatherAlike, x, found[0], self.group)


def _before_other_hooks(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook that sees the module's output before all other hooks."""
    return module.register_forward_hook(hook, prepend=True)
