"""Checks every limit of a Plan again, without the search and the solver: structure, divisibility, whether it can be
run, memory."""

from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import estimate
from ..cost.layer_parts import unknown_parts
from ..cost.memory_cost import uses_fully_shard
from ..plan.document import KEPT_ON_DEVICE, Plan
from ..plan.legality import (
    can_recompute,
    context_rule,
    divided,
    divides,
    expert_rule,
    micro_batch_rule,
    runs_on_slices,
    sequence_rule,
    sharding_rule,
    zero_bubble_rule,
)
from ..plan.making import shape_of
from ..plan.not_run import not_run
from ..plan.schedules import ZERO_BUBBLE, num_microbatches_rule
from .explain import does_not_fit
from .verdict import Verdict, VerdictKind, not_legal


def check(plan: Plan, profile: ModelProfile | None = None, *, to_run: bool = True) -> list[str]:
    """The limits that a plan violates, in words; empty if there are none. See `violations`."""
    return [
        found.detail if found.kind is VerdictKind.ILLEGAL else str(found)
        for found in violations(plan, profile, to_run=to_run)
    ]


def violations(plan: Plan, profile: ModelProfile | None = None, *, to_run: bool = True) -> list[Verdict]:
    """The limits that a plan violates, each as illegal, not run or too large; empty if there are none.

    Without a profile only what the document itself says is checked. With one, also that the plan has the model's layers
    once and in order, that every cut divides, and that each stage fits its budget. to_run: whether features that the
    executor does not run yet are violations, too.
    """
    found = [not_legal(rule) for rule in (*_structure(plan), *_consistent(plan))]
    if to_run:
        missing = (f"{what}; the executor runs {runs}" for what, runs in not_run(plan).items())
        found += [Verdict(VerdictKind.NOT_RUN, each) for each in missing]
    if profile is None:
        return found
    if plan.model.fingerprint != profile.fingerprint:
        return [*found, not_legal(f"the plan is for {plan.model.name}, whose layers differ from this {profile.name}")]
    rules = *_covers(plan, profile), *_divides(plan, profile), *_runs(plan, profile)
    found += map(not_legal, rules)
    if not found:
        priced = estimate(plan, profile)
        if not priced.fits:
            found.append(does_not_fit(plan, priced))
    return found


def unlike(plan: Plan, profile: ModelProfile) -> list[str]:
    """How the layers and cuts of a plan differ from its model's profile, as they may after somebody edits the document;
    empty if they do not."""
    return [*_covers(plan, profile), *_divides(plan, profile), *_unknown_parts(plan, profile)]


def _structure(plan: Plan) -> list[str]:
    """Violated limits between numbers of the document. Plan checks them when it is made; here they are checked for
    changed copies."""
    found = []
    degrees = plan.degrees
    if degrees.num_devices != plan.cluster.num_devices:
        found.append(f"degrees multiply to {degrees.num_devices}, the cluster has {plan.cluster.num_devices} devices")
    if len(plan.stages) != degrees.pipeline * degrees.virtual_stages:
        found.append(f"pipeline={degrees.pipeline} x {degrees.virtual_stages} but {len(plan.stages)} stages")
    samples = plan.micro_batch * plan.num_microbatches * degrees.data
    if samples != plan.training.global_batch:
        found.append(f"a step takes {samples} samples, global_batch is {plan.training.global_batch}")
    seen: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            if layer.name in seen:
                found.append(f"stage {index} holds layer {layer.name}, which stage {seen[layer.name]} holds")
            seen.setdefault(layer.name, index)
    return found


def _consistent(plan: Plan) -> list[str]:
    """Choices in the plan that do not go together."""
    found = []
    layers = plan.layers
    if plan.schedule in ZERO_BUBBLE and any(layer.recompute != "none" for layer in layers):
        found.append(
            f"{plan.schedule} does a backward in two parts, each of which would recompute a layer again; "
            "use recompute=none, or the schedule 1f1b or interleaved"
        )
    degrees = plan.degrees
    rule = num_microbatches_rule(plan.schedule, degrees.pipeline, plan.num_microbatches, degrees.virtual_stages)
    if rule is not None:
        found.append(rule)
    if plan.degrees.pipeline > 1 and len({layer.reshard for layer in layers}) > 1:
        found.append("in a pipeline either all layers give gathered parameters back or none; the costs know no mix")
    if plan.degrees.sharded_over == 1 and any(layer.reshard for layer in layers):
        found.append("reshard=true needs data_shard or context above 1")
    if plan.schedule in ZERO_BUBBLE and any(layer.offload for layer in layers):
        found.append(
            f"{plan.schedule} does a backward in two parts, each of which would bring back what waits on the host; "
            "use offload=false, or the schedule 1f1b or interleaved"
        )
    for layer in layers:
        if layer.offload and layer.recompute in KEPT_ON_DEVICE:
            found.append(
                f"layer {layer.name} with recompute={layer.recompute} keeps on the device what it keeps: use "
                "offload=false, or recompute=none or full"
            )
        if layer.offload and (len(layer.modules) != 1 or layer.modules[0] != layer.root):
            found.append(f"layer {layer.name} is not one module, so what it keeps cannot wait on the host")
        if layer.recompute != "none" and (len(layer.modules) != 1 or layer.modules[0] != layer.root):
            found.append(f"layer {layer.name} is not one module, so it cannot be recomputed")
    return found


def _covers(plan: Plan, profile: ModelProfile) -> list[str]:
    seen: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for name in {name for layer in stage.layers for name in layer.parameters}:
            if seen.setdefault(name, index) != index:
                return [f"parameter {name} is read on stages {seen[name]} and {index}; it can only live on one"]
    planned = [(layer.name, layer.layer_class) for layer in plan.layers]
    expected = [(layer.name, profile.classes[layer.layer_class].name) for layer in profile.layers]
    if planned == expected:
        return []
    missing = [name for name, _ in expected if name not in {n for n, _ in planned}]
    detail = f"; missing {', '.join(missing[:3])}" if missing else ""
    return [f"the stages do not hold the model's {len(expected)} layers once and in order{detail}"]


def _divides(plan: Plan, profile: ModelProfile) -> list[str]:
    found = []
    tensor = plan.degrees.tensor
    classes = {c.name: c for c in profile.classes}
    for planned in plan.classes:
        layer_class = classes.get(planned.name)
        known = () if layer_class is None else layer_class.cuts
        if layer_class is None or not all(cut in known for cut in planned.cuts):
            found.append(f"class {planned.name} is cut in a way that was not observed in the model")
        elif planned.experts != (layer_class.experts if plan.degrees.expert > 1 else ()):
            found.append(f"class {planned.name} spreads other experts than were observed in the model")
        elif not all(divides(cut, tensor) for cut in planned.cuts):
            units = sorted({size for cut in planned.cuts for size in divided(cut) if size % tensor})
            found.append(f"tensor={tensor} does not divide {', '.join(map(str, units))} of class {planned.name}")
        elif planned.sequence and not runs_on_slices(layer_class, [known.index(cut) for cut in planned.cuts]):
            found.append(f"class {planned.name} does not run on a slice of the sequence")
        elif planned.sequence and (plan.training.seq_len or 0) % tensor:
            found.append(f"tensor={tensor} does not divide the sequence of {plan.training.seq_len}")
    return found


def _runs(plan: Plan, profile: ModelProfile) -> list[str]:
    """Choices in the plan that cannot be run with this model."""
    rules = []
    if uses_fully_shard(shape_of(plan), plan.training) or plan.degrees.tensor > 1:  # as the search has it
        rules.append(sharding_rule(profile, plan.training.precision))
    if plan.sequence_parallel:
        rules.append(sequence_rule(profile, plan.degrees.tensor, plan.degrees.context))
    degrees = plan.degrees
    rules.append(context_rule(profile, degrees.context, degrees.tensor, plan.context_kind))
    rules.append(expert_rule(profile, degrees.expert, plan.sequence_parallel))
    if plan.schedule in ZERO_BUBBLE:
        rules.append(zero_bubble_rule(profile, plan.training))
    rules.append(micro_batch_rule(profile, degrees.data, plan.num_microbatches, pinned=True))
    planned = plan.layers
    for layer, seen in zip(planned, profile.layers, strict=False):
        if layer.recompute != "none" and not can_recompute(profile, seen):
            rules.append(f"layer {layer.name} is not one module, or what goes into it is written over: no recompute")
    return [*(rule for rule in rules if rule is not None), *_unknown_parts(plan, profile)]


def _unknown_parts(plan: Plan, profile: ModelProfile) -> list[str]:
    rules = []
    planned = plan.layers
    for layer, seen in zip(planned, profile.layers, strict=False):
        layer_class = profile.classes[seen.layer_class]
        unknown = unknown_parts(layer_class, layer.recompute)
        if unknown:
            known = ", ".join(part.name for part in layer_class.parts) or "none"
            rules.append(
                f"layer {layer.name} has no part {unknown[0]} that can be run again by itself; its parts: {known}"
            )
    return rules
