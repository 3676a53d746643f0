"""Compares the plan with manual set-ups, by the same profile, cluster, global batch and cost model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...planner.answers.explain import compared
from ...planner.answers.guidance import RuleOfThumb, named_rules, rules_of_thumb
from ...planner.answers.verdict import FITS, THE_PLAN, Verdict, VerdictKind, not_legal
from ...planner.plan.document import Plan, load_plan
from ...planner.plan.not_run import marked, priced_mark
from ...planner.plan.setups import IllegalSetupError, Setup, parse_setup
from ...planner.plan.training import TrainingSpec
from ...profiler.document import write_file
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import gpus_in_words
from ...profiler.model.model_profile import ModelProfile

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...planner.answers.candidate import Candidate
    from ...planner.answers.search import SearchResult
    from ...planner.cost.estimate import Estimate
    from ...profiler.model.loaded import LoadedModel
    from ..reporting.measured_report import Times
    from .measurement import Measurement

PLANNED = "planned"

_RULE_SECONDS = 20.0


@dataclass(frozen=True)
class SavedPlan:
    """A plan document that is set beside the planned layout."""

    label: str
    plan: Plan


@dataclass(frozen=True)
class Illegal:
    """A set-up that is not possible on these GPUs, and the rule against it."""

    label: str
    rule: str


Asked = Setup | RuleOfThumb | SavedPlan | Illegal
"""One thing to compare with: a set-up in words, possible or not; a rule of thumb or a framework's; or a plan
document."""


def read_setups(texts: Sequence[str], cluster: ClusterSpec) -> list[Asked]:
    """What --setup strings name: a framework of NAMED_RULES, a plan.json, or the words of parse_setup.

    Raises ValueError that says which word is wrong.
    """
    frameworks = {rule.name: rule for rule in named_rules(cluster)}
    return [_read_setup(text.strip(), cluster, frameworks) for text in texts]


def _read_setup(text: str, cluster: ClusterSpec, frameworks: dict[str, RuleOfThumb]) -> Asked:
    if text.lower() in frameworks:
        return frameworks[text.lower()]
    if not text.endswith(".json"):
        try:
            return parse_setup(text, cluster.num_devices, cluster.devices_per_host)
        except IllegalSetupError as error:
            return Illegal(" ".join(text.split()), error.rule)
    plan = load_plan(Path(text))
    if plan.degrees.num_devices != cluster.num_devices:
        raise ValueError(
            f"--setup {text}: the plan is for {gpus_in_words(plan.degrees.num_devices)}, the comparison for "
            f"{cluster.num_devices}: give --gpus {plan.degrees.num_devices}"
        )
    return SavedPlan(text, plan)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The planned layout first, and then all set-ups in the order in which they were asked for."""

    candidates: tuple["Candidate", ...]
    planned: "SearchResult | None"

    @property
    def plans(self) -> dict[str, "Plan"]:
        """Label -> plan, of those that fit."""
        return {c.label: c.plan for c in self.candidates if c.plan is not None and c.estimate is not None}

    def page(self, times: "Times | None" = None) -> str:
        """An HTML page with all tables and bars. times: what set-ups really took. Raises ValueError if none of them
        fits."""
        from ..reporting.compare_page import comparison_page
        from ..reporting.measured_report import measured_table

        plan = next(iter(self.plans.values()), None)
        if plan is None:
            raise ValueError("no set-up fits, so there is nothing to draw; the verdicts say by how much")
        measured = None if times is None else measured_table(self.candidates, times, PLANNED)
        return comparison_page(self.candidates, plan, plan.cluster.price_per_hour, measured)

    def __rich__(self) -> "RenderableType":
        """The comparison as tables, for rich's print and for notebooks' terminals."""
        from ..reporting.terminal import comparison_tables

        return comparison_tables(self.candidates)

    def __str__(self) -> str:
        from ..reporting.terminal import as_text

        return as_text(lambda console: console.print(self.__rich__()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from ..reporting.compare_page import comparison_fragment

        return comparison_fragment(self.candidates)


def compare(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    setups: Sequence[Asked],
    *,
    all_baselines: bool = False,
    time_limit_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> Comparison:
    """Price the best plan and every set-up; if no set-ups are given, the rules of thumb that the search prices anyway.

    all_baselines: also price the rules of thumb and what every framework would choose, unless it is among the set-ups.
    """
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.search import InfeasibleError, adopted, search

    planned: SearchResult | None = None
    try:
        planned = search(profile, cluster, training, time_limit_s=time_limit_s, progress=progress)
        first = Candidate(label=PLANNED, plan=planned.plan, estimate=planned.estimate, verdict=THE_PLAN)
    except InfeasibleError as error:
        verdict = Verdict(VerdictKind.DOES_NOT_FIT, str(error), stage=error.stage, over_bytes=error.over_bytes)
        first = Candidate(label=PLANNED, plan=None, estimate=None, verdict=verdict)
    found = beside(first, planned, profile, cluster, training, setups, all_baselines=all_baselines)
    best = None if planned is None else adopted(planned, found.candidates[1:])
    if best is None or best is planned:
        return found
    first = replace(first, plan=best.plan, estimate=best.estimate)
    manual = [_against(candidate, best.estimate) for candidate in found.candidates[1:]]
    return Comparison(candidates=(first, *manual), planned=best)


def beside(
    first: "Candidate",
    planned: "SearchResult | None",
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    setups: Sequence[Asked],
    *,
    all_baselines: bool = False,
) -> Comparison:
    """Set-ups priced beside what was planned, as `compare` does. planned: what the search found, if there was one."""
    from ...planner.answers.search import Candidate, price_setup
    from ...planner.answers.why_not import followed
    from ...planner.solve.explore import Explorer

    explorer = Explorer(profile, cluster, training)
    rules = {rule.name: rule for rule in named_rules(cluster, profile)}
    setups = [rules[asked.name] if isinstance(asked, RuleOfThumb) else asked for asked in setups]
    named = {asked.name for asked in setups if isinstance(asked, RuleOfThumb)}
    frameworks = [rule for rule in rules.values() if all_baselines and rule.name not in named]
    manual: list[Candidate] = []
    for asked in (*setups, *frameworks):
        if isinstance(asked, Setup):
            manual.append(_with_its_replicas(asked, price_setup(asked, profile, cluster, training)))
        elif isinstance(asked, Illegal):
            manual.append(Candidate(asked.label, None, None, not_legal(asked.rule)))
        elif isinstance(asked, SavedPlan):
            manual.append(_price_plan(asked, profile, cluster, training))
        else:
            manual.append(followed(explorer, asked, time.monotonic() + _RULE_SECONDS))
    if first.estimate is not None:
        manual = [_against(candidate, first.estimate) for candidate in manual]
    if (all_baselines or not setups) and planned is not None:
        manual += planned.baselines
    elif (all_baselines or not setups) and first.estimate is not None:
        usual = rules_of_thumb(cluster, training)
        priced = (followed(explorer, rule, time.monotonic() + _RULE_SECONDS) for rule in usual)
        manual += [_against(candidate, first.estimate) for candidate in priced]
    return Comparison(candidates=(first, *manual), planned=planned)


def _with_its_replicas(setup: Setup, candidate: "Candidate") -> "Candidate":
    """The candidate; if it does not fit, and its data ranks are replicas only because the set-up did not say otherwise,
    its verdict says so."""
    if not (setup.replicas_assumed and candidate.verdict.kind is VerdictKind.DOES_NOT_FIT):
        return candidate
    ways = f"its {setup.data_replicate} data ranks are replicas; {setup.label} fsdp shards over them"
    return replace(candidate, verdict=candidate.verdict.noted(f"; {ways}"))


def _price_plan(saved: SavedPlan, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec) -> "Candidate":
    """A plan document, priced for this cluster and job. Raises ValueError if it is for another model or batch."""
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.check import violations
    from ...planner.cost.estimate import estimate

    if saved.plan.training.global_batch != training.global_batch:
        raise ValueError(
            f"--setup {saved.label}: its global batch is {saved.plan.training.global_batch:,}, the others' "
            f"{training.global_batch:,}; layouts are compared at equal work: give --global-batch "
            f"{saved.plan.training.global_batch}"
        )
    plan = saved.plan.model_copy(update={"cluster": cluster, "training": training})
    found = estimate(plan, profile)
    violated = violations(plan, profile, to_run=False)
    if violated:
        return Candidate(saved.label, None, None, violated[0])
    return Candidate(saved.label, plan, found, FITS, found.step_time_s)


def _against(candidate: "Candidate", planned: "Estimate") -> "Candidate":
    """The candidate with a verdict that says how far it is from the plan, and what costs it most."""
    if candidate.estimate is None:
        return candidate
    verdict = compared(candidate.estimate, planned).noted(candidate.verdict.note)
    return replace(candidate, verdict=verdict if candidate.plan is None else verdict.noted(priced_mark(candidate.plan)))


def measured(
    comparison: Comparison, loaded: "LoadedModel", *, steps: int = 5, repetitions: int = 5
) -> dict[str, "Measurement | str"]:
    """Label -> what the set-up really took on local devices, or a sentence on why it could not be run."""
    from .measure import measure

    apart = {label: marked(plan) for label, plan in comparison.plans.items() if marked(plan)}
    run = {label: plan for label, plan in comparison.plans.items() if label not in apart}
    return {**measure(run, loaded, steps=steps, repetitions=repetitions), **apart}


def save_picture(path: Path, comparison: Comparison, times: "Times | None" = None) -> None:
    """Draw bars of what each set-up spends its step on. A file that ends in .html also has all tables and measured
    times."""
    if path.suffix == ".html":
        write_file(path, comparison.page(times))
        return
    from ..reporting.compare_png import draw

    draw(path, comparison.candidates)
