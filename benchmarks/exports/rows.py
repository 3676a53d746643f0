"""What becomes of a plan at a target: exported, parsed by the target's own parser, and read back."""

from dataclasses import dataclass

from benchmarks.exports import targets
from meshwright.planner.exchange.accelerate import read_accelerate
from meshwright.planner.exchange.deepspeed import read_deepspeed
from meshwright.planner.exchange.export import Export, export
from meshwright.planner.exchange.export_notes import ordered
from meshwright.planner.exchange.imports import plan_of
from meshwright.planner.exchange.megatron import read_megatron
from meshwright.planner.exchange.torchtitan import read_torchtitan
from meshwright.planner.plan.document import AXES, Plan
from meshwright.profiler.model.model_profile import ModelProfile


@dataclass(frozen=True)
class Row:
    """One plan and one target. outcome: same (read back, it is the plan again), said (what differs is said in notes),
    refused (with a reason), or a defect: silent, or not parsed. parsed: by the target's own parser."""

    model: str
    plan: str
    target: str
    outcome: str
    parsed: bool
    note: str


def row_of(name: str, label: str, plan: Plan, profile: ModelProfile, target: str) -> Row:
    """What becomes of a plan at a target."""
    try:
        found = export(plan, target)
    except ValueError as error:
        return Row(name, label, target, "refused", False, str(error))
    unknown = targets.undocumented(found)
    if unknown:
        return Row(name, label, target, "not parsed", False, f"not documented: {', '.join(unknown)}")
    parsed = targets.version(target) is not None
    if parsed:
        try:
            targets.parse(found)
        except Exception as error:
            return Row(name, label, target, "not parsed", False, f"{type(error).__name__}: {error}")
    try:
        same = _said(_read_back(found, plan, profile)) == _said(plan)
    except ValueError:  # what is said of the target's own layout is one that no plan of ours can say
        same = False
    outcome = "same" if same else "said" if found.notes else "silent"
    return Row(name, label, target, outcome, parsed, "; ".join(found.notes))


def _said(plan: Plan) -> Plan:
    """A plan without what was predicted of it, and without the place of mesh axes that split nothing."""
    idle = tuple(axis for axis in AXES if plan.degrees.of(axis) == 1)
    axes = (*idle, *ordered(plan, plan.mesh_axes))
    return plan.model_copy(update={"prediction": None, "certificate": None, "alternatives": (), "mesh_axes": axes})


def _read_back(found: Export, plan: Plan, profile: ModelProfile) -> Plan:
    count = plan.degrees.num_devices
    if found.target == "megatron":
        layout = read_megatron(found.words, count, profile)
    elif found.target == "torchtitan":
        layout = read_torchtitan(found.words, count, profile)
    else:
        layout = (read_accelerate if found.target == "accelerate" else read_deepspeed)(found.document, count)
    layers = plan.layers
    usual = next((layer.recompute for layer in layers if layer.recompute != "none"), "none")
    size = layout.micro_batch or plan.micro_batch
    return plan_of(layout, profile, plan.cluster, plan.training, size, layout.recompute or usual)
