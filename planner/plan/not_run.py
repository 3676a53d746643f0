"""What of a plan the executor does not run yet: the evaluator prices more."""

from .document import Plan
from .training import EXECUTABLE_PRECISIONS


def not_run(plan: Plan) -> dict[str, str]:
    """What is priced only -> what the executor runs instead, in words; empty if it runs all of the plan."""
    precision = plan.training.precision
    return {} if precision in EXECUTABLE_PRECISIONS else {f"precision {precision}": " and ".join(EXECUTABLE_PRECISIONS)}


def marked(plan: Plan) -> str:
    """A sentence that says what of a plan is not run yet; empty if it runs all of it."""
    found = not_run(plan)
    return f"not run by the executor yet: {', '.join(found)}" if found else ""


def priced_mark(plan: Plan) -> str:
    """What is said after a plan that the executor does not run all of yet; empty if it does."""
    return " (priced, not run yet)" if not_run(plan) else ""
