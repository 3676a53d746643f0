"""What profile and planner say of a model on one device."""

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.planner.estimate import estimate
from meshwright.planner.strategy import LayerOption, Shape, can_recompute, make_plan
from meshwright.planner.training import Precision, TrainingSpec
from meshwright.profiler.cluster import cluster_of, load_device
from meshwright.profiler.model_profile import CrossingTensor, ModelProfile, OpProfile, amount_at


@dataclass(frozen=True)
class Predicted:
    """Bytes of one device's activations: what is kept from forward to backward, and the peak of the step.

    running: the peak if no layer is recomputed and every layer's transient lies on top of what is there when it runs,
    and not of what all layers keep (see _running_peak).
    """

    kept: float
    peak: float
    running: float


def recomputable(profile: ModelProfile) -> list[int]:
    """Layers that may be recomputed."""
    return [i for i, layer in enumerate(profile.layers) if can_recompute(profile, layer)]


def predicted(
    profile: ModelProfile,
    size: int,
    precision: Precision,
    recomputed: Collection[int] = (),
    num_microbatches: int = 1,
) -> Predicted:
    """Activation items of the planner's estimate for one device. recomputed: layers under full recompute."""
    training = TrainingSpec(
        global_batch=size * num_microbatches, seq_len=profile.seq_len, precision=precision, optimizer="sgd"
    )
    cluster = cluster_of(load_device("cpu"), 1)
    shape = Shape(1, 1, 1, 1, micro_batch=size, num_microbatches=num_microbatches)
    options = [LayerOption("full" if i in recomputed else "none") for i in range(len(profile.layers))]
    items = estimate(make_plan(profile, cluster, training, shape, [options]), profile).memory[0].items
    kept = items["activations"]
    return Predicted(kept, kept + items["transient"], _running_peak(profile, size, training.compute_bytes))


def _running_peak(profile: ModelProfile, size: int, element_bytes: int) -> float:
    """Largest sum, over layers in the backward, of what they and those before them keep, gradients of tensors that
    later layers have read already and an earlier one has made, and the layer's own transient."""
    groups: dict[int, list[CrossingTensor]] = {}
    for i, tensor in enumerate(profile.tensors):
        groups.setdefault(i if tensor.same_as is None else tensor.same_as, []).append(tensor)
    saved = peak = 0.0
    for i, layer in enumerate(profile.layers):
        costs = profile.classes[layer.layer_class].whole
        saved += costs.saved.at(size, element_bytes)
        there = saved + max(t.at(size, element_bytes) for t in (costs.forward_transient, costs.backward_transient))
        for group in groups.values():
            passes = group[0].made_by < i
            is_kept = any(reader <= i for tensor in group for reader in tensor.saved_by)
            waits = group[0].requires_grad and any(reader > i for tensor in group for reader in tensor.used_by)
            there += (passes and is_kept) * group[0].size.at(size, element_bytes)
            there += (passes and waits) * group[0].size.at(size, element_bytes)
        peak = max(peak, there)
    return peak


def flops(profile: ModelProfile, size: int) -> tuple[float, float]:
    """(forward, backward) FLOPs of a micro-batch."""
    operators = [op for layer in profile.layers for op in profile.classes[layer.layer_class].whole.operators]
    forward = [op for op in operators if op.part == "forward"]
    return _sum(forward, size), _sum([op for op in operators if op.part != "forward"], size)


def repeated_flops(profile: ModelProfile, recomputed: Collection[int], size: int) -> float:
    """Forward FLOPs that a full recompute of these layers executes again."""
    classes = [profile.classes[profile.layers[i].layer_class] for i in recomputed]
    operators = [op for layer_class in classes for op in layer_class.whole.operators]
    return _sum([op for op in operators if op.part == "forward" and op.repeated], size)


def _sum(operators: Collection[OpProfile], size: int) -> float:
    return sum((amount_at(op.flops, size) for op in operators), 0.0)
