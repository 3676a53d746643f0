"""What of a plan the executor does not run yet: the evaluator prices more, as `--space full` and plan files may say."""

from .document import CONTEXT_NAMES, EXECUTABLE_CONTEXTS, EXECUTABLE_SCHEDULES, EXECUTES_EXPERTS, Plan
from .schedules import SCHEDULE_NAMES
from .training import EXECUTABLE_PRECISIONS


def not_run(plan: Plan) -> dict[str, str]:
    """What is priced only -> what the executor runs instead, in words; empty if it runs all of the plan."""
    degrees, layers = plan.degrees, [layer for stage in plan.stages for layer in stage.layers]
    found: dict[str, str] = {}
    if degrees.context > 1 and plan.context_kind not in EXECUTABLE_CONTEXTS:
        kinds = [CONTEXT_NAMES[kind] for kind in EXECUTABLE_CONTEXTS]
        found[f"context parallelism (context={degrees.context}, {CONTEXT_NAMES[plan.context_kind]})"] = (
            " and ".join(kinds) or "context=1"
        )
    if degrees.expert > 1 and not EXECUTES_EXPERTS:
        found[f"expert parallelism (expert={degrees.expert})"] = "expert=1"
    if plan.schedule not in EXECUTABLE_SCHEDULES:
        found[f"schedule {SCHEDULE_NAMES[plan.schedule]}"] = ", ".join(EXECUTABLE_SCHEDULES)
    if plan.training.precision not in EXECUTABLE_PRECISIONS:
        found[f"precision {plan.training.precision}"] = " and ".join(EXECUTABLE_PRECISIONS)
    if plan.offload_optimizer or any(layer.offload for layer in layers):
        found["offload to the host"] = "everything on the device"
    if plan.recompute_parts:
        found["recompute_parts"] = "recompute of whole layers"
    return found


def marked(plan: Plan) -> str:
    """A sentence that says what of a plan is not run yet; empty if it runs all of it."""
    found = not_run(plan)
    return f"not run by the executor yet: {', '.join(found)}" if found else ""


def priced_only(plan: Plan, verdict: str) -> str:
    """A verdict on a plan, with a mark if the executor does not run all of it yet."""
    return f"{verdict} (priced, not run yet)" if not_run(plan) else verdict
