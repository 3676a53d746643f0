"""Features of a plan that the executor does not run yet, though they are priced."""

from collections.abc import Iterable

from .document import Plan
from .training import EXECUTABLE_PRECISIONS


def not_run(plan: Plan) -> dict[str, str]:
    """Feature that is priced only -> what the executor runs instead, in words; empty if it runs the whole plan."""
    precision, found = plan.training.precision, never_run(plan)
    if precision == "fp8" and plan.degrees.tensor > 1:
        found["precision fp8 with tensor parallelism"] = "fp8 with tensor=1"
    if precision == "fp8" and plan.model.expert_modules:
        found["precision fp8 of experts that share one tensor"] = "bf16"
    return found


def never_run(plan: Plan) -> dict[str, str]:
    """The same for those features that no layout of the same job could run."""
    precision, found = plan.training.precision, {}
    if precision not in EXECUTABLE_PRECISIONS:
        found[f"precision {precision}"] = " and ".join(EXECUTABLE_PRECISIONS)
    if plan.model.packed:
        found["a base in 4 bits"] = "one in bf16"
    return found


def refusal(plan: Plan, found: Iterable[str]) -> str:
    """Why a plan is not run, and the way out. found: features from `not_run`."""
    way_out = "--lora ...,base=bf16" if plan.model.packed else "--precision bf16"
    return f"the plan has {', '.join(found)}, which is priced, not run yet: plan with {way_out}"


def marked(plan: Plan) -> str:
    """A sentence that names the features which are not run yet; empty if the executor runs the whole plan."""
    found = not_run(plan)
    return f"not run by the executor yet: {', '.join(found)}" if found else ""


def priced_mark(plan: Plan) -> str:
    """A note to put after a plan that the executor does not fully run yet; empty if it does."""
    return " (priced, not run yet)" if not_run(plan) else ""
