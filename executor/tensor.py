"""Tensor and sequence parallelism of one stage: weights cut, collectives where the cuts begin and end.

Activations are ordinary tensors. Legend: T tensor ranks; "alike": equal on all of them; "sliced": each holds 1/T of
the sequence; "cut": each computes its own features or heads.

    columns   alike -> cut: nothing / all-reduce      sliced -> cut: all-gather / reduce-scatter
    rows      cut -> alike: all-reduce / nothing      cut -> sliced: reduce-scatter / all-gather
    head      columns, then all-gather of the features / slice
    embedding rows outside this rank's vocabulary give 0, then all-reduce / nothing
    edges     alike -> sliced: slice / all-gather      sliced -> alike: all-gather / slice

(forward / backward). Columns that read the same tensor share one collective. Under sequence parallelism slices are
gathered where the cut's `gather` module begins, because attention modules read the sequence's length from their input
before they use it, or else by the columns themselves.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..planner.plan import LayerPlan, Plan
from ..profiler.held_tokens import Held, Mark, divided, mark_of, own_shape, set_mark
from ..profiler.model_profile import CrossingTensor, TensorCut
from .torch_compat import all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class ParameterCut:
    """How a parameter is divided over tensor ranks.

    parts: sizes along `dim` that are divided one by one (a fused qkv); a rank's shard is the concatenation of its
    slices of them. One part: the usual contiguous division.
    """

    dim: int
    parts: tuple[int, ...]
    degree: int

    def local(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of one rank, contiguous."""
        pieces = [
            part.narrow(self.dim, rank * (part.shape[self.dim] // self.degree), part.shape[self.dim] // self.degree)
            for part in full.split(self.parts, self.dim)
        ]
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].contiguous()

    def full(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The whole parameter from the shards of all ranks, in rank order."""
        widths = [part // self.degree for part in self.parts]
        split = [shard.split(widths, self.dim) for shard in shards]
        return torch.cat([piece for part in zip(*split, strict=True) for piece in part], self.dim)


@dataclass
class TensorLayout:
    """What tensor parallelism did to a stage.

    cuts: parameter -> how it is divided. partial: whole parameters of which every tensor rank sees a share of the
    uses (a slice of the sequence, some of the heads), so that their gradients must be summed over tensor ranks.
    """

    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


def apply_tensor_parallel(
    stage: nn.Module, plan: Plan, layers: Iterable[LayerPlan], mesh: DeviceMesh, following: LayerPlan | None
) -> TensorLayout:
    """Cut the stage's weights and attributes in place, and put collectives into the forwards concerned.

    stage: holds the layers under their original names; on the meta device or not. Cut parameters become DTensors on
    `mesh` (one axis). following: the layer behind the stage's last, on another stage; None if there is none.
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
        for cut in plan.class_plan(layer.layer_class).cuts:
            _cut_parameters(stage, prefix, cut, mesh, layout, replaced, names)
            _divide_attributes(stage, prefix, cut, mesh.size())
            _replace_forwards(stage, prefix, cut, region, sliced)
        if sliced:
            layout.partial.update(names[id(stage.get_parameter(name))] for name in layer.parameters)
        region.hook(stage, layer, gather_after=sliced and next_layer is not None and not is_sliced(plan, next_layer))
    layout.partial -= set(layout.cuts)
    _check_partial(layers, layout, plan)
    _set_parameters(stage, replaced)
    return layout


def _check_partial(layers: list[LayerPlan], layout: TensorLayout, plan: Plan) -> None:
    """A gradient is a share on every tensor rank, or whole on every one; never a sum of both kinds."""
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
            sharded = DTensor.from_local(
                local, mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=_contiguous(parameter.shape)
            )
            replaced[id(parameter)] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _is_column(cut: TensorCut, relative: str) -> bool:
    return relative.rpartition(".")[0] in cut.columns


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _set_parameters(stage: nn.Module, replaced: dict[int, nn.Parameter]) -> None:
    """Put the new parameters wherever the old ones were, so that ties stay."""
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                module._parameters[name] = replaced[id(parameter)]


def _divide_attributes(stage: nn.Module, prefix: str, cut: TensorCut, degree: int) -> None:
    for module_name, attributes in cut.attributes.items():
        module = _submodule(stage, prefix, module_name)
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // degree)


def _check_ties(plan: Plan) -> None:
    """A parameter with several names is cut at all of those that are read, wherever in the pipeline they are."""
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


def _replace_forwards(stage: nn.Module, prefix: str, cut: TensorCut, region: "_Region", sliced: bool) -> None:
    around = cut.gather if sliced else ""
    if not around:
        shared = _SharedInput(region.column_input(sliced))
    else:
        shared = _SharedInput(lambda x: x)
        _submodule(stage, prefix, around).register_forward_pre_hook(region.gather_sum, with_kwargs=True)
    for name in cut.columns:
        module = _submodule(stage, prefix, name)
        if cut.kind == "embedding":
            module.forward = _embedding_forward(module, region.group)
        elif cut.kind == "table":
            module.forward = _table_forward(module, region.group)
        else:
            enter = _as_it_is if cut.inputs.get(name) == "" else shared
            forward = _column_forward(module, enter)
            module.forward = _gathered(forward, shared, region.group) if cut.kind == "head" else forward
    for name in () if around else cut.entries:
        module = _submodule(stage, prefix, name)
        module.forward = _entry_forward(module, region.column_input(sliced))
    for name in cut.between:
        module = _submodule(stage, prefix, name)
        module.forward = _norm_forward(module)
    for name in cut.rows:
        module = _submodule(stage, prefix, name)
        module.forward = _row_forward(module, shared, region.row_output(sliced))


def _submodule(stage: nn.Module, prefix: str, name: str) -> nn.Module:
    """The module `name`, relative to the layer's root; '' is the root itself."""
    return stage.get_submodule((prefix + name).removesuffix("."))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


_watch: "SharedGradients | None" = None
"""The watch that is running, if one is."""


class SharedGradients(TorchFunctionMode):
    """Watches the first step for whole parameters that are used between columns and rows.

    There each tensor rank has its own features or heads, and sees only their share of the gradient of, say, a norm of
    the queries. Follows every tensor that differs between ranks through torch functions: a parameter that meets one
    (or meets it as something computed from parameters alone) is added to layout.partial. Anything else that meets one
    and wants a gradient would get a share for the whole without anyone noticing, and so would a parameter that is used
    elsewhere, too: ValueError.

    Where layers run on slices of the sequence nothing is left to find: all their whole parameters are partial.
    """

    def __init__(self, stage: nn.Module, layout: TensorLayout) -> None:
        super().__init__()
        self._stage = stage
        self._layout = layout
        self._differs = WeakIdKeyDictionary()
        self._origins = WeakIdKeyDictionary()
        self._parameters: dict[int, tuple[str, nn.Parameter]] = {}
        self._found: set[str] = set()
        self._used_whole: set[str] = set()
        self._is_muted = False

    def __enter__(self) -> Self:
        global _watch
        _watch = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        global _watch
        super().__exit__(*raised)
        _watch = None
        for name in sorted(self._found & self._used_whole) if raised[0] is None else ():
            raise ValueError(
                f"{name} is read between features that tensor parallelism cuts and outside of them; plan with tensor=1"
            )
        self._layout.partial |= self._found

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Leave out our own functions, which join what differs with what does not and know why."""
        was_muted, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = was_muted

    def differs(self, x: torch.Tensor) -> bool:
        """Whether x differs between tensor ranks."""
        return x in self._differs

    def mark(self, x: torch.Tensor, differs: bool) -> None:
        """Say whether x differs between tensor ranks."""
        if differs:
            self._differs[x] = True
        else:
            self._differs.pop(x, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and follow what goes in and out."""
        output = func(*args, **(kwargs or {}))
        if self._is_muted:
            return output
        read = args[1:] if func is torch.Tensor.copy_ else args  # what is written over counts no more
        given = [x for x in tree_leaves((read, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        if any(self._does_differ(x) for x in given):
            for x in given:
                if x.requires_grad and not self._does_differ(x):
                    self._found |= self._names_behind(x, func)
            for x in made:
                self.mark(x, differs=True)
            if func is torch.Tensor.copy_ and args[0]._base is not None:
                self.mark(args[0]._base, differs=True)
            return output
        known = [self._known(x) for x in given]
        names = frozenset().union(*(names for names in known if names))
        if names and made:
            if all(known):
                for x in made:
                    self._origins[x] = names
            else:
                self._used_whole |= names - self._layout.partial
        return output

    def _does_differ(self, x: torch.Tensor) -> bool:
        """Whether x, or what it is a view of, differs between tensor ranks."""
        return x in self._differs or (x._base is not None and x._base in self._differs)

    def _known(self, x: torch.Tensor) -> frozenset[str]:
        """Names of the parameters that x is, or is computed from alone; none if it is something else."""
        if x in self._origins:
            names: frozenset[str] = self._origins[x]
            return names
        if not isinstance(x, nn.Parameter):
            return frozenset()
        if id(x) not in self._parameters:
            self._parameters = {id(p): (name, p) for name, p in self._stage.named_parameters()}
        return frozenset([self._parameters[id(x)][0]]) if id(x) in self._parameters else frozenset()

    def _names_behind(self, x: torch.Tensor, func: Callable[..., Any]) -> frozenset[str]:
        names = self._known(x)
        if not names:
            raise ValueError(
                f"{getattr(func, '__name__', func)} joins features that tensor parallelism cuts with a whole tensor of "
                f"{tuple(x.shape)} that wants a gradient, of which each rank would see a share; plan with tensor=1"
            )
        return names


def _unwatched(forward: Callable[..., torch.Tensor], differs: bool) -> Callable[..., torch.Tensor]:
    """forward, out of the watch's sight but for whether its result differs between tensor ranks."""

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        watch = _watch
        if watch is None:
            return forward(*args, **kwargs)
        with watch.muted():
            y = forward(*args, **kwargs)
        watch.mark(y, differs)
        return y

    return watched


def _product(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x times the module's local weight, no bias."""
    weight = _local(module.weight)  # type: ignore[arg-type]
    if isinstance(module, nn.Linear):
        return F.linear(x, weight)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module._conv_forward(x, weight, None)
    if type(module).__name__ == "Conv1D":  # transformers: weight is [in, out]
        return x @ weight
    raise ValueError(
        f"cannot cut a {type(module).__name__}; tensor parallelism knows Linear, Conv1D, convolutions, Embedding and "
        "EmbeddingBag"
    )


def _with_bias(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """y and the module's local bias, if it has one."""
    if module.bias is None:
        return y
    bias = _local(module.bias)  # type: ignore[arg-type]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        bias = bias.view(-1, *(1,) * len(module.kernel_size))
    return y + bias


class _SharedInput:
    """Converts the input of a group's columns once per tensor, though each column asks for it."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._convert = convert
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for source, converted in self._converted:
            if source is x:
                return converted
        converted = self._convert(x)
        self._converted.append((x, converted))
        return converted

    def clear(self) -> None:
        """Forget (the group's rows are reached, so its columns have run)."""
        self._converted.clear()


def _column_forward(
    module: nn.Module, enter: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _with_bias(module, _product(module, enter(x)))

    return _unwatched(forward, differs=True)


def _gathered(
    column: Callable[[torch.Tensor], torch.Tensor], shared: _SharedInput, group: dist.ProcessGroup
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A column's forward, then all ranks' features; no row follows."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = column(x)
        shared.clear()
        return _call(_GatherAlike, y, y.ndim - 1, group)

    return _unwatched(forward, differs=False)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _entry_forward(
    module: nn.Module, enter: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A whole module's forward, of whose output each rank reads what its own features need: gradients are shares."""
    forward = module.forward
    return _unwatched(lambda x: enter(forward(x)), differs=True)


def _row_forward(
    module: nn.Module, shared: _SharedInput, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        shared.clear()
        return _with_bias(module, reduce(_product(module, x)))

    return _unwatched(forward, differs=False)


def _embedding_forward(module: nn.Module, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    if (
        not isinstance(module, nn.Embedding)
        or module.max_norm is not None
        or module.scale_grad_by_freq
        or module.sparse
    ):
        raise ValueError(f"cannot cut {module}: only a plain nn.Embedding can be cut by its vocabulary")
    rank = dist.get_rank(group)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        weight = _local(module.weight)
        first = rank * weight.shape[0]
        elsewhere = (tokens < first) | (tokens >= first + weight.shape[0])
        if module.padding_idx is not None:
            ours = (tokens - first).masked_fill(elsewhere, 0)
            here = first <= module.padding_idx < first + weight.shape[0]
            y = F.embedding(ours, weight, module.padding_idx - first if here else None)
        else:
            y = F.embedding((tokens - first).masked_fill(elsewhere, 0), weight)
        return _call(_SumAlike, y.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)

    return _unwatched(forward, differs=False)


def _table_forward(module: nn.Module, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Bags of this rank's features of the rows, then those of all ranks."""
    if (
        not isinstance(module, nn.EmbeddingBag)
        or module.max_norm is not None
        or module.scale_grad_by_freq
        or module.sparse
    ):
        raise ValueError(f"cannot cut {module}: only a plain nn.EmbeddingBag can be cut by its features")

    def forward(
        rows: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = F.embedding_bag(
            rows,
            _local(module.weight),
            offsets,
            mode=module.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )
        return _call(_GatherAlike, y, y.ndim - 1, group)

    return _unwatched(forward, differs=False)


def _norm_forward(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A group norm of this rank's groups of channels."""
    if not isinstance(module, nn.GroupNorm):
        raise ValueError(f"cannot cut {module}: of norms between cut modules only nn.GroupNorm is known")

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, module.num_groups, _local(module.weight), _local(module.bias), module.eps)

    return _unwatched(forward, differs=True)


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
    """Where the sequence is sliced, and what converts at its edges and at the cuts."""

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

    def column_input(self, sliced: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a column does to its input."""
        if sliced:
            return lambda x: _call(_GatherSum, x, self.sequence_dim, self.group)
        return lambda x: _call(_Alike, x, self.group)

    def gather_sum(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook: gather every slice that enters a module; gradients that come back are shares, to be summed."""

        def gather(x: Any) -> Any:
            found = self._length(x)
            if found is None or own_shape(x)[found[0]] == found[1]:
                return x
            return _call(_GatherSum, x, found[0], self.group)

        seen: dict[int, Any] = {}
        return tree_map(lambda x: seen.setdefault(id(x), gather(x)), (args, kwargs))

    def row_output(self, sliced: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a row does to its product."""
        if sliced:
            return lambda y: _call(_SumSlice, y, self.sequence_dim, self.group)
        return lambda y: _call(_SumAlike, y, self.group)

    def hook(self, stage: nn.Module, layer: LayerPlan, gather_after: bool) -> None:
        """Slice or gather what enters the layer's modules, and gather what leaves them if the next layer needs it."""
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
        """(dim, whole length) of a tensor that carries the sequence and a gradient; None for any other."""
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
        return _call(_Slice, x, found[0], self.group) if own_shape(x)[found[0]] == found[1] else x

    def _gather(self, x: Any) -> Any:
        found = self._length(x)
        if found is None or own_shape(x)[found[0]] == found[1]:
            return x
        return _call(_GatherAlike, x, found[0], self.group)


def _before_other_hooks(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Run on the module's output before anything else sees it."""
    return module.register_forward_hook(hook, prepend=True)


def _call(function: type[Function], x: torch.Tensor, *args: Any) -> torch.Tensor:
    mark = mark_of(x)
    if mark is None:
        plain: torch.Tensor = function.apply(x, *args)
        return plain
    with torch._C.DisableTorchFunction():
        result: torch.Tensor = function.apply(x, *args)
    return set_mark(result, _mark_after(function, mark, args))


def _mark_after(function: type[Function], mark: Mark, args: tuple[Any, ...]) -> Mark:
    """Which tokens there are behind a collective; args: its dim, if it has one, and its group."""
    if not isinstance(mark, Held) or len(args) < 2 or args[0] != mark.dim:
        return mark
    group = args[1]
    if function in (_Slice, _SumSlice):
        return divided(mark, dist.get_rank(group), dist.get_world_size(group))
    return replace(mark, spans=mark.within, within=())


def hand_on_difference(made: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """What a function that no watch sees made of something: it differs between tensor ranks if that does."""
    if _watch is not None and any(_watch.differs(x) for x in given):
        _watch.mark(made, differs=True)
    return made


def _all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenation along `dim` of all ranks' tensors."""
    degree = dist.get_world_size(group)
    gathered = x.new_empty(degree * x.shape[0], *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group=group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(degree), dim)


def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's slice along `dim` of the sum of all ranks' tensors."""
    degree = dist.get_world_size(group)
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(degree, dim))
    reduced = stacked.new_empty(stacked.shape[0] // degree, *stacked.shape[1:])
    reduce_scatter_single(reduced, stacked, group=group)
    return reduced


def _own_slice(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Alike(Function):
    """Nothing / all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _SumAlike(Function):
    """All-reduce / nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherSum(Function):
    """All-gather / reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _SumSlice(Function):
    """Reduce-scatter / all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _Slice(Function):
    """Slice / all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_slice(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _GatherAlike(Function):
    """All-gather / slice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_slice(grad, ctx.dim, ctx.group), None, None
