"""Turn a model into this rank's part of a plan: stage, tensor parallel, recompute, numbers and shards."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from ..planner.cost.sharding import shard_dim
from ..planner.plan.document import LayerPlan, Plan
from ..profiler.model.building import in_training, is_lazy, on_meta, with_dense_gradients, without_compiler
from ..profiler.model.failures import a_type
from ..profiler.model.loaded import without_cache
from ..profiler.running.held_tensors import whole_because
from ..profiler.semantics.token_marks import unseen
from .parallel.casts import Casts
from .parallel.compiled import CompiledForward, compile_around_parts, compile_layers
from .parallel.context import ContextParallel
from .parallel.copies import numbers_of
from .parallel.expert import HeldExperts, shard_experts, spread_experts
from .parallel.float8 import linear_in_float8
from .parallel.mesh import Mechanism, RankMesh, mechanism
from .parallel.micro_batches import Loss
from .parallel.offload import offload
from .parallel.optimizers import without_memory
from .parallel.recompute import check_recompute, recompute
from .parallel.rehearsal import Rehearsal
from .parallel.synced_norms import data_group, sync_norms, synced_norms
from .parallel.tensor import apply_tensor_parallel
from .parallel.tensor_layout import ParameterCut, TensorLayout
from .state.initialise import BUILD_LIMIT_BYTES, Materialiser, Values, initial_values, model_bytes
from .torch_compat import gather_before_any_backward, solid


@dataclass
class AppliedModel:
    """This rank's part of a model.

    module: what to call, and what holds the parameters; `prefix` stands before their original names. model: the
    user's module in it. layout: what tensor parallelism did. units: (fully_shard unit, gives parameters back). experts:
    parameters of which this rank has only some experts. without_dims: parameters that have none, but are held as
    tensors of one element (see without_dims.py). context: this rank's tokens, where sequences are split.
    compiled: forwards of layers, to be switched on. casts: copies to compute with, with mechanism "cast".
    of_model: all parameters of the whole model by each of their names, as on the meta device, tied ones as one.
    Replicas (mechanism "ddp") are not wrapped yet: what DDP must leave out is seen in the first forward.
    """

    module: nn.Module
    model: nn.Module
    prefix: str
    mechanism: Mechanism
    layout: TensorLayout
    units: list[tuple[FSDPModule, bool]]
    experts: dict[str, HeldExperts]
    compiled: list[CompiledForward]
    without_dims: frozenset[str] = frozenset()
    context: ContextParallel | None = None
    casts: Casts | None = None
    of_model: dict[str, nn.Parameter] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank by original name, tied ones under their first; they stay the same objects."""
        return {n.removeprefix(self.prefix): p for n, p in self.module.named_parameters()}

    @property
    def is_divided(self) -> bool:
        """Whether parameters are held as parts, or as DTensors, which plain tensors are not copied into."""
        return bool(self.layout.cuts or self.experts) or any(isinstance(p, DTensor) for p in self.parameters.values())

    def begin_backward(self) -> None:
        """Begin to gather the parameters that the backward needs first, if they were given back."""
        for unit, _ in self.units[-2:-1]:
            unit.unshard(async_op=True)

    def computing(self) -> AbstractContextManager[None]:
        """Around forwards and their backwards. What an autocast around the loop has kept of weights is of an earlier
        step, or of an evaluation, which gave it no gradient."""
        torch.clear_autocast_cache()
        return nullcontext() if self.casts is None else self.casts.in_place()

    def cut(self, name: str) -> ParameterCut | None:
        """How tensor parallelism divided a parameter; None if it is whole."""
        return self.layout.cuts.get(name)


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError if the plan was made for another model. model: on the meta device, whole."""
    found = dict(model.named_parameters(remove_duplicate=False))
    planned = {name for layer in plan.layers for name in layer.parameters}
    missing = sorted(planned - found.keys())
    if missing:
        raise ValueError(
            f"the plan is for {plan.model.name} of {plan.model.source}, with a parameter {missing[0]} that this "
            f"{type(model).__name__} has not; plan this model, or give the model that was planned"
        )
    known = {id(found[name]) for name in planned}
    added = next((name for name, parameter in found.items() if id(parameter) not in known), None)
    if added is not None:
        raise ValueError(
            f"this {type(model).__name__} has a parameter {added}, which the plan for {plan.model.name} of "
            f"{plan.model.source} does not know; plan this model, or give the model that was planned"
        )
    # num_parameters counts tied parameters once, and so does the set of objects.
    count = sum(p.numel() for p in {id(found[n]): found[n] for n in planned}.values())
    if count != plan.model.num_parameters:
        raise ValueError(
            f"the plan is for {plan.model.name} with {plan.model.num_parameters:,} parameters, this "
            f"{type(model).__name__} has {count:,}; plan this model, or give the model that was planned"
        )


def plain(model_fn: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The constructor of what is trained: the module without its compiler and its cache, with dense gradients.

    Raises ValueError, or makes the constructor raise it, if it is none that builds a module whenever it is called.
    """
    if isinstance(model_fn, nn.Module):
        raise ValueError(
            f"parallelize was given {a_type(model_fn)} that is built already: give the function that builds "
            "it, parallelize(MyModel, ...) or parallelize(lambda: MyModel(config), ...), and its numbers as weights=..."
        )
    last: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        made = model_fn()
        if not isinstance(made, nn.Module):
            raise ValueError(f"the function that builds the model returned {a_type(made)}, not an nn.Module")
        if last and last[0]() is made:
            raise ValueError(
                f"the function that builds the model returned the same {type(made).__name__} twice: let it build the "
                "model each time that it is called, and give the numbers of one that is built as weights=..."
            )
        last[:] = [weakref.ref(made)]
        return without_cache(with_dense_gradients(without_compiler(made)))

    return build


def build_on_meta(model_fn: Callable[[], nn.Module], plan: Plan) -> nn.Module:
    """The whole model, without memory. Raises ValueError if the plan is not for it."""
    model = on_meta(plain(model_fn))
    if is_lazy(model):
        raise ValueError(
            f"{type(model).__name__} has lazy modules, whose parameters have no shapes before the first forward: run "
            "one forward in the function that builds the model, before it returns"
        )
    check_model(model, plan)
    if (why := whole_because(model)) and mechanism(plan) in ("fsdp", "cast"):
        raise ValueError(f"the plan shards parameters, but {why}; plan the model again, as it is now")
    return model


def apply_plan(
    model: nn.Module,
    model_fn: Callable[[], nn.Module],
    plan: Plan,
    mesh: RankMesh,
    loss: Loss | None,
    seed: int,
    values: Values | None = None,
    backend: str | None = None,
) -> AppliedModel:
    """This rank's part of `model`, with its numbers. model: of build_on_meta; changed in place.

    values: None for the initial ones. backend: of torch.compile for each layer; None: layers stay eager.
    """
    values = values or initial_values(model_fn, model_bytes(model) > BUILD_LIMIT_BYTES, seed)
    of_model = without_memory(model)
    stages = plan.stages_of(mesh.coordinates["pipeline"])
    # built, not copied: hooks may be closures over the module that they were made for
    copies = [model, *(build_on_meta(model_fn, plan) for _ in stages[1:])]
    context = ContextParallel(plan, mesh) if plan.degrees.context > 1 else None
    rehearsal = Rehearsal(build_on_meta(model_fn, plan), plan, is_own=True) if plan.degrees.pipeline > 1 else None
    if synced_norms(model):
        group = data_group(mesh)
        for own in copies:
            sync_norms(own, group, mesh.device)
    parts = [
        _part(own, values, plan, stage, mesh, loss, backend, context, rehearsal)
        for own, stage in zip(copies, stages, strict=True)
    ]
    if len(parts) == 1:
        return replace(parts[0], of_model=of_model)
    from .parallel.stage_module import Chunks, stages_in

    chunks = Chunks([stage for part in parts for stage in stages_in(part.module)])
    layout = TensorLayout()
    experts: dict[str, HeldExperts] = {}
    for part in parts:
        layout.cuts |= part.layout.cuts
        layout.partial |= part.layout.partial
        experts |= part.experts
    units = [unit for part in parts for unit in part.units]
    compiled = [forward for part in parts for forward in part.compiled]
    without_dims = frozenset[str]().union(*(part.without_dims for part in parts))
    kind = parts[0].mechanism
    return AppliedModel(
        chunks, chunks, "", kind, layout, units, experts, compiled, without_dims, context, of_model=of_model
    )


def _part(
    model: nn.Module,
    values: Values,
    plan: Plan,
    stage_index: int,
    mesh: RankMesh,
    loss: Loss | None,
    backend: str | None,
    context: ContextParallel | None,
    rehearsal: Rehearsal | None,
) -> AppliedModel:
    """One stage of this rank (the whole model, where there is no pipeline).

    The order matters: on meta -> fp8 -> stage -> tensor parallel -> compile -> recompute -> compile around recomputed
    parts -> offload -> per unit: numbers, then fully_shard (so one unit at a time is whole).
    """
    layers = list(plan.stages[stage_index].layers)
    for layer in layers:
        check_recompute(layer, model)

    if plan.training.precision == "fp8":
        linear_in_float8(model)

    module, prefix = model, ""
    if plan.degrees.pipeline > 1:
        from .parallel.stage_module import StageModule

        module, prefix = StageModule(model, plan, stage_index, loss, context, rehearsal), "model."
        model = module.model

    layout = TensorLayout()
    if plan.degrees.tensor > 1:
        following = plan.stages[stage_index + 1].layers[0] if stage_index + 1 < len(plan.stages) else None
        layout = apply_tensor_parallel(model, plan, layers, mesh.tensor_mesh, following)

    experts = spread_experts(model, plan, layers, mesh)
    layout.partial -= experts.keys()
    if context is not None:
        context.leave_alone(model, plan.model.expert_modules)

    if mechanism(plan) in ("fsdp", "cast") and plan.training.is_mixed:
        _keep_norms_in_fp32(model)

    compiled = [] if backend is None else compile_layers(model, layers, backend)
    wrapped = dict.fromkeys(name for layer in layers for name in layer.modules) if context is not None else ()
    passages = [context.pass_through(model.get_submodule(name)) for name in wrapped if context is not None]
    for passage in passages:
        passage.below()
        passage.inside()
    for name, mode in {layer.modules[0]: layer.recompute for layer in layers if layer.recompute != "none"}.items():
        recompute(model.get_submodule(name), mode, context)
    if backend is not None:
        compiled += compile_around_parts(model, layers, backend)
    for passage in passages:
        passage.outside()
    offload([[model.get_submodule(n) for n in layer.modules] for layer in layers if layer.offload], mesh.device)

    materialise = Materialiser(model, values, layout.cuts, mesh.coordinates["tensor"], mesh.device, experts)
    kind = mechanism(plan)
    units: list[tuple[FSDPModule, bool]] = []
    casts: Casts | None = None
    without_dims: frozenset[str] = frozenset()
    if kind == "fsdp":
        without_dims = frozenset(n for n, p in model.named_parameters(remove_duplicate=False) if not p.dim())
        units = _shard(module, model, plan, layers, mesh, materialise)
    else:
        materialise([module])
    if kind == "cast":
        casts = Casts(module, torch.bfloat16)
        readers = _Readers(model, layers)
        for owner in (*(own for layer in layers for own in _owned(model, layer, readers)), module):
            casts.cast_inputs(owner)
    for passage in passages:
        passage.around()
    in_training(model)
    return AppliedModel(module, model, prefix, kind, layout, units, experts, compiled, without_dims, context, casts)


def _keep_norms_in_fp32(model: nn.Module) -> None:
    """Let batch norms scale by fp32, as their running statistics are, though layers are given parameters in bf16."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.forward = partial(_forward_in_fp32, module, module.forward)


def _forward_in_fp32(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    gathered = dict(module._parameters)
    for name, parameter in gathered.items():
        if parameter is not None:
            module.__dict__[name] = parameter.float()
            del module._parameters[name]
    try:
        return forward(*args, **kwargs)
    finally:
        for name in gathered:
            module.__dict__.pop(name, None)
        module._parameters.clear()
        module._parameters.update(gathered)


def _shard(
    module: nn.Module,
    model: nn.Module,
    plan: Plan,
    layers: list[LayerPlan],
    mesh: RankMesh,
    materialise: Callable[[list[nn.Module], DeviceMesh], None],
) -> list[tuple[FSDPModule, bool]]:
    """fully_shard every layer that owns its parameters, then the rest with the root; returns (unit, gives back)."""
    policy = MixedPrecisionPolicy()
    if plan.training.is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(
        fully_shard,
        mesh=mesh.data_mesh,
        mp_policy=policy,
        shard_placement_fn=lambda parameter: Shard(shard_dim(tuple(parameter.shape), plan.degrees.sharded_over)),
    )
    units: list[tuple[FSDPModule, bool]] = []
    readers = _Readers(model, layers)
    for layer in layers:
        for bank in shard_experts(model, plan, layer, mesh, policy, materialise):
            bank.register_forward_hook(_without_views)
            units.append((bank, layer.reshard))  # type: ignore[arg-type]
        owned = _owned(model, layer, readers)
        if not owned:
            continue
        materialise(owned, mesh.data_mesh)
        for owner in owned:
            owner.register_forward_hook(_without_views)
        unit: Any = owned[0]
        shard(unit if len(owned) == 1 else owned, reshard_after_forward=layer.reshard)
        if len(owned) > 1:
            gather_before_any_backward(unit, owned)
        units.append((unit, layer.reshard))
    materialise([module], mesh.data_mesh)
    module.register_forward_hook(_without_views)
    module.register_forward_pre_hook(_cast_anew, prepend=True)
    shard(module, reshard_after_forward=False)
    module.__deepcopy__ = partial(numbers_of, module)  # type: ignore[assignment]  # fully_shard's own refuses
    units.append((module, False))  # type: ignore[arg-type]
    if plan.degrees.pipeline == 1:
        _prefetch_in_backward([unit for unit, _ in units])
    return units


def _cast_anew(*_: Any) -> None:
    """Under an autocast of the user's, around the whole step, weights are cast in each micro-batch: autograd runs what
    was made in an earlier one after the hooks of later ones, which reduce gradients before that has arrived."""
    torch.clear_autocast_cache()


def _owned(model: nn.Module, layer: LayerPlan, readers: "_Readers") -> list[nn.Module]:
    """Modules of a layer that are its own unit; none if others read their parameters, or there are no parameters."""
    found = {name: model.get_submodule(name) for name in layer.modules}
    found = {n: m for n, m in found.items() if next(m.parameters(), None) is not None}
    found = {n: m for n, m in found.items() if not isinstance(m, FSDPModule)}
    names = [f"{n}.{own}" for n, m in found.items() for own, _ in m.named_parameters()]
    return [] if any(readers.outside(name, layer) for name in names) else list(found.values())


def _prefetch_in_backward(units: list[FSDPModule]) -> None:
    """Let every unit gather the one before it while its backward runs. units: in the order of forward (what is inside
    of another one before it), then the root.

    Left alone, fully_shard goes by the order of all forwards since gradients were last reduced: after the backward of
    the first unit it would gather the last one once more in every micro-batch but the first, for nothing. What
    prefetches itself gathers nothing: so does the root, which begins anew whenever one of the model's outputs gets its
    gradient (an encoder's comes late). The trainer gathers the last layer ahead.
    """
    *layers, root = units
    root.set_modules_to_backward_prefetch([root])
    for unit, before in zip(layers, [*layers[:1], *layers], strict=False):
        unit.set_modules_to_backward_prefetch([before])


class _Readers:
    """Which parameters are read outside of a layer, by name: sharding gives them new objects."""

    def __init__(self, model: nn.Module, layers: list[LayerPlan]) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._alike = {name: group for group in names.values() for name in group}
        self._layers: dict[str, set[str]] = {}
        for layer in layers:
            for name in layer.parameters:
                self._layers.setdefault(name, set()).add(layer.name)

    def outside(self, name: str, layer: LayerPlan) -> bool:
        """Whether a parameter is found outside of a layer's modules, too, or read by another layer."""
        prefixes = tuple(module + "." for module in layer.modules)
        alike = self._alike.get(name, [name])
        return any(not n.startswith(prefixes) or self._layers.get(n, set()) - {layer.name} for n in alike)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Output tensors that autograd does not take for views of others.

    fully_shard hangs its backward on a unit's output; a model that writes into that output (x += y) would silently
    take the hook off a view, and gradients would not be reduced.
    """

    if isinstance(output, torch.Tensor):
        return unseen(solid, output)
    return tree_map(lambda x: unseen(solid, x) if isinstance(x, torch.Tensor) else x, output)
