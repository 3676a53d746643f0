"""What one layout takes under each training stack that could run it, because a prediction is always for a layout and a
stack."""

from dataclasses import dataclass

from ...profiler.machine.units import format_bytes, format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import estimate
from ..cost.software import all_software
from ..plan.document import Plan
from ..plan.frameworks import FRAMEWORKS, Asked, Framework, Zero
from ..plan.making import shape_of
from ..plan.not_run import not_run
from ..plan.training import COMPILING, REFERENCE


@dataclass(frozen=True)
class OnStack:
    """A plan's layout under a training stack: seconds of a step, and bytes by which its fullest device exceeds its
    budget."""

    software: str
    description: str
    step_s: float
    over_bytes: float
    is_plans: bool

    def in_words(self, plans_s: float) -> str:
        """A line with the step, and how it compares with the plan's. plans_s: seconds of the plan's step."""
        line = format_seconds(self.step_s)
        if not self.is_plans:
            line += f", {abs(self.step_s / plans_s - 1.0):.0%} {'more' if self.step_s > plans_s else 'less'}"
        if self.over_bytes > 0:
            line += f"; does not fit: {format_bytes(self.over_bytes)} over what may be used"
        return f"{line} ({self.description})"


def under_stacks(plan: Plan, profile: ModelProfile) -> tuple[OnStack, ...]:
    """The plan's layout under its own stack, and then under each of today's stacks that could run it, fastest first.
    Layers recompute as the plan says, so a stack that keeps less gets no credit for recompute that it would not
    need."""
    own = plan.training.software
    others = [_on(plan, name, profile, own) for name in _could_run(plan, profile) if name != own.split("+")[0]]
    return _on(plan, own, profile, own), *sorted(others, key=lambda each: each.step_s)


def _on(plan: Plan, software: str, profile: ModelProfile, own: str) -> OnStack:
    training = plan.training.model_copy(update={"software": software})
    found = estimate(plan.model_copy(update={"training": training}), profile)
    over = max(stage.over_bytes for stage in found.memory)
    name = software.split("+")[0]
    told = all_software()[name].description if name in all_software() else "as its file says"
    return OnStack(software, told, found.step_time_s, max(0.0, over), software == own)


def _could_run(plan: Plan, profile: ModelProfile) -> list[str]:
    """Stacks that could run a layout: those of torch if our executor runs it, and those of frameworks whose settings
    can express it."""
    found = [] if not_run(plan) else [REFERENCE, COMPILING]
    for framework in (FRAMEWORKS["torchtitan"], FRAMEWORKS["megatron"]):
        if framework.software not in found and _runs(framework, plan, profile):
            found.append(framework.software)
    return found


def _runs(framework: Framework, plan: Plan, profile: ModelProfile) -> bool:
    """Whether a framework can split a model and its state as a plan does; which blocks recompute is not considered."""
    shape, pipeline = shape_of(plan), plan.degrees.pipeline
    asked = Asked(shape, profile, plan.training)
    if framework.cannot_run(profile, plan.training) or framework.split_rule(asked) or framework.data_rule(asked):
        return False
    if pipeline > 1 and plan.schedule not in framework.schedules:
        return False
    if framework.schedule_rule(plan.schedule, pipeline, plan.num_microbatches):
        return False
    if plan.degrees.context > 1 and plan.context_kind not in framework.contexts:
        return False
    if plan.degrees.expert > 1 and not framework.experts:
        return False
    modes = framework.zero if pipeline == 1 else framework.zero_in_pipelines
    return shape.sharded_over == 1 or Zero(shape.gradient_sync, shape.reshard) in modes
