"""What profile and planner say of a model on one device."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Recompute, parts_of
from meshwright.planner.plan.legality import can_recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile, OpProfile, amount_at


@dataclass(frozen=True)
class Predicted:
    """Bytes of one device's activations: what is kept from forward to backward, and the peak of the step."""

    kept: float
    peak: float


def recomputable(profile: ModelProfile) -> list[int]:
    """Layers that may be recomputed."""
    return [i for i, layer in enumerate(profile.layers) if can_recompute(profile, layer)]


def predicted(
    profile: ModelProfile,
    size: int,
    precision: Precision,
    recomputed: Mapping[int, Recompute] | None = None,
    num_microbatches: int = 1,
) -> Predicted:
    """Activations by the planner's account of one stage. recomputed: layer -> what it recomputes.

    Of a rank of two shards, as autocast, which one device has, keeps more in fp32; and of a model without parameters,
    so that nothing of them is in it.
    """
    training = TrainingSpec(
        global_batch=2 * size * num_microbatches, seq_len=profile.seq_len, precision=precision, optimizer="sgd"
    )
    cluster = cluster_of(load_device("cpu"), 2)
    shape = Shape(1, 2, 1, 1, micro_batch=size, num_microbatches=num_microbatches)
    options = [LayerOption((recomputed or {}).get(i, "none")) for i in range(len(profile.layers))]
    alone = _without_parameters(profile)
    model = CostModel(alone, cluster, training)
    kept = sum(model.cost(kind, shape, option).kept_bytes for kind, option in zip(model.kinds, options, strict=True))
    items = estimate(make_plan(alone, cluster, training, shape, [options]), alone).memory[0].items
    return Predicted(kept, items["activations"] + items["transient"])


def _without_parameters(profile: ModelProfile) -> ModelProfile:
    """A profile with the activations of this one, but with layers without parameters and without a batch."""
    classes = tuple(c.model_copy(update={"parameters": (), "cuts": ()}) for c in profile.classes)
    layers = tuple(layer.model_copy(update={"parameters": ()}) for layer in profile.layers)
    return profile.model_copy(update={"classes": classes, "layers": layers, "ties": (), "batch": ()})


def flops(profile: ModelProfile, size: int) -> tuple[float, float]:
    """(forward, backward) FLOPs of a micro-batch."""
    operators = [op for layer in profile.layers for op in profile.classes[layer.layer_class].whole.operators]
    forward = [op for op in operators if op.part == "forward"]
    return _sum(forward, size), _sum([op for op in operators if op.part != "forward"], size)


def repeated_flops(profile: ModelProfile, recomputed: Mapping[int, Recompute], size: int) -> float:
    """Forward FLOPs that full recompute of layers, or recompute of parts of them, executes again."""
    again: list[OpProfile] = []
    for layer, way in recomputed.items():
        named = parts_of(way)
        operators = profile.classes[profile.layers[layer].layer_class].whole.operators
        again += [op for op in operators if op.part == "forward" and (op.within in named if named else op.repeated)]
    return _sum(again, size)


def _sum(operators: Collection[OpProfile], size: int) -> float:
    return sum((amount_at(op.flops, size) for op in operators), 0.0)
