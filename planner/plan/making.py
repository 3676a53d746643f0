"""A shape and the options of layers made into a plan, and the shape of a plan."""

from collections.abc import Sequence

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from .document import ClassPlan, LayerPlan, ModelReference, Plan, Stage
from .legality import chosen_cuts, is_cut, is_sequence_cut, without_dims
from .shape import Cuts, LayerOption, Shape
from .training import TrainingSpec


def make_plan(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    shape: Shape,
    stages: Sequence[Sequence[LayerOption]],
) -> Plan:
    """The plan of a shape whose stages hold consecutive layers with the given options.

    stages: [stage][layer], in the chain's order. Raises ValueError unless they hold as many layers as the profile.
    """
    num_layers = sum(len(stage) for stage in stages)
    if num_layers != len(profile.layers):
        raise ValueError(f"the stages hold {num_layers} layers, the model has {len(profile.layers)}")
    layers = iter(profile.layers)
    return Plan(
        model=reference_of(profile),
        cluster=cluster.in_order(shape.kind_order),
        training=training,
        degrees=shape.degrees,
        mesh_axes=shape.mesh_axes,
        schedule=shape.schedule,
        micro_batch=shape.micro_batch,
        num_microbatches=shape.num_microbatches,
        gradient_sync=shape.gradient_sync,
        context_kind=shape.context_kind,
        offload_optimizer=shape.offload_optimizer,
        classes=tuple(
            ClassPlan(
                name=c.name,
                cuts=tuple(c.cuts[i] for i in chosen_cuts(c, shape)),
                sequence=is_sequence_cut(c, shape),
                experts=c.experts if shape.expert > 1 else (),
            )
            for c in profile.classes
            if is_cut(c, shape) or (shape.expert > 1 and c.experts)
        ),
        stages=tuple(
            Stage(
                layers=tuple(
                    LayerPlan(
                        name=layer.name,
                        layer_class=profile.classes[layer.layer_class].name,
                        root=layer.root,
                        modules=layer.modules,
                        parameters=layer.parameters,
                        recompute=option.recompute,
                        reshard=option.reshard,
                        offload=option.offload,
                    )
                    for option, layer in zip(stage, layers, strict=False)
                )
            )
            for stage in stages
        ),
    )


def reference_of(profile: ModelProfile) -> ModelReference:
    """What a plan's document records of its model."""
    return ModelReference(
        name=profile.name,
        source=profile.source,
        fingerprint=profile.fingerprint,
        num_parameters=profile.num_parameters,
        ties=profile.ties,
        tensors=profile.tensors,
        layer_modules=tuple(dict.fromkeys(name for layer in profile.layers for name in layer.modules)),
        attention_modules=profile.attention_modules,
        expert_modules=profile.expert_modules,
        packed=profile.packed,
        decides_by_values=bool(profile.decides_by_values),
        without_dims=without_dims(profile),
        returns_loss=profile.returns_loss,
        batch=profile.batch,
    )


def shape_of(plan: Plan) -> Shape:
    """The shape of a plan."""
    return Shape(
        data_replicate=plan.degrees.data_replicate,
        data_shard=plan.degrees.data_shard,
        tensor=plan.degrees.tensor,
        pipeline=plan.degrees.pipeline,
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        sequence=plan.sequence_parallel,
        schedule=plan.schedule,
        virtual_stages=plan.degrees.virtual_stages,
        gradient_sync=plan.gradient_sync,
        reshard=plan.degrees.pipeline > 1 and any(layer.reshard for layer in plan.layers),
        mesh_axes=plan.mesh_axes,
        context=plan.degrees.context,
        context_kind=plan.context_kind,
        expert=plan.degrees.expert,
        offload_optimizer=plan.offload_optimizer,
        cuts=None
        if plan.degrees.tensor == 1
        else Cuts(tuple((c.name, tuple(cut.name for cut in c.cuts)) for c in plan.classes)),
    )
