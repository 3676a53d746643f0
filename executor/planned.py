"""A plan together with what it was made from: it can be asked, compared, drawn, written and run beside one process."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..planner.plan.document import Plan
from ..profiler.document import write_file
from ..profiler.model.model_profile import ModelProfile
from .commands import inputs
from .commands.options import TIME_LIMIT
from .reporting import terminal
from .reporting.documents import check_document
from .reporting.explain_report import Explanation
from .reporting.output_files import check_replaceable, check_writable
from .reporting.report import joined_notes

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.answers.fewer import Fewer
    from ..planner.answers.search import SearchResult
    from ..planner.answers.why_not import Answer
    from ..planner.cost.estimate import Estimate
    from ..planner.exchange.export import Export
    from ..planner.plan.pins import Pins
    from ..profiler.model.loaded import LoadedModel
    from .measuring.compare import Comparison
    from .measuring.verify import VerifyReport
    from .reporting.report_facts import Facts

_BYTES_PER_PARAMETER = 4
_WEIGHED_SECONDS = 8.0
"""For pricing rules of thumb, where the plan's document keeps nothing that was weighed beside it."""


class Planned:
    """A plan together with what it was made from, so that it can be asked, compared, drawn and written.

    document: the plan itself, which the executor takes; `save` writes it. assumptions: what was not said.
    """

    def __init__(
        self,
        document: Plan,
        profile: Callable[[], ModelProfile],
        *,
        result: "SearchResult | None" = None,
        assumptions: Sequence[str] = (),
        model: "Callable[[], LoadedModel] | None" = None,
        source: str = "plan.json",
        pins: "Pins | None" = None,
    ) -> None:
        """profile: gives the model's profile when it is asked for. result: what the search found beside the plan; None
        for a plan that was read from a file. model: gives the model itself, where it is not where the plan says. pins:
        what was decided before the search."""
        self.document = document
        self.result = result
        self.assumptions = tuple(assumptions)
        self.source = source
        self._profile, self._model, self._pins = profile, model, pins

    @cached_property
    def profile(self) -> ModelProfile:
        """The profile of the plan's model; that of a saved plan is made, or read, when it is first needed."""
        return self._profile()

    @cached_property
    def estimate(self) -> "Estimate":
        """What the plan is predicted to take, in time and memory, item by item."""
        if self.result is not None:
            return self.result.estimate
        from ..planner.cost.estimate import estimate

        return estimate(self.document, self.profile)

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of an optimizer step."""
        found = self.document.prediction
        return self.estimate.step_time_s if found is None else found.step_time_s

    def explain(self, *layouts: str, time_limit: float = 60.0) -> Explanation:
        """Why the plan is not each of these layouts, as in "tp=8"; without any, all that people are told to ask."""
        from ..planner.answers.decision_path import walk
        from ..planner.answers.guidance import no_candidates
        from ..planner.answers.landscape import weighed
        from ..planner.answers.stacks import under_stacks
        from ..planner.answers.tutorial import lessons

        time_limit = TIME_LIMIT.given(time_limit)
        plan, found, profile = self.document, self.estimate, self.profile
        excluded = no_candidates(_BYTES_PER_PARAMETER * profile.num_parameters, plan.cluster.num_devices)
        if layouts:
            answers = _answers(layouts, plan, found, profile, time_limit)
            return Explanation(plan, found, answers=answers, excluded=excluded)
        steps, taught = walk(plan, found, profile, time_limit), lessons(plan, found, profile)
        listed = weighed(plan, found, profile, _WEIGHED_SECONDS)
        stacks = under_stacks(plan, profile)
        return Explanation(
            plan, found, steps=steps, lessons=taught, excluded=excluded, alternatives=listed, stacks=stacks
        )

    def compare(self, *layouts: str, all_baselines: bool = False) -> "Comparison":
        """The plan beside manual set-ups, each at its best: "ddp", "fsdp", "tp=4 pp=2", "megatron", or another's
        plan.json; without any, the rules of thumb. all_baselines: these and every framework's usual set-up, too."""
        from ..planner.answers.candidate import Candidate
        from ..planner.answers.verdict import THE_PLAN
        from .measuring.compare import PLANNED, beside, read_setups

        plan = self.document
        own = Candidate(PLANNED, plan, self.estimate, THE_PLAN, self.step_time_s)
        setups = read_setups(layouts, plan.cluster)
        return beside(own, self.result, self.profile, plan.cluster, plan.training, setups, all_baselines=all_baselines)

    def report(self, path: str | Path = "report.html", *, trace: str | Path | None = None) -> Path:
        """Draw the plan as one HTML file that needs no network; trace: also one step for ui.perfetto.dev."""
        target = check_report(path, trace)
        self.draw(target, None if trace is None else Path(trace))
        return target

    def draw(
        self, path: Path, trace: Path | None = None, run: str = "", say: Callable[..., None] | None = None
    ) -> "tuple[Facts, int]":
        """Write a report and its trace; (what the report draws, events of the trace). run: markup of a real run's
        table. say: told what is being done."""
        from .reporting.chrome_trace import write_trace
        from .reporting.html_report import report_page
        from .reporting.report_facts import gather

        facts = gather(self.document, self.profile, say or (lambda *_: None))
        write_file(path, report_page(facts, self.source, [*self.profile.told, *self.profile.notes], run))
        return facts, 0 if trace is None else write_trace(self.document, self.profile, trace)

    def export(self, to: str, path: str | Path | None = None) -> "Export":
        """The plan as settings of megatron, torchtitan, accelerate or deepspeed; path: also written there, never over a
        file that is none.

        Raises ValueError for what the target cannot do. `notes` of the answer are what its settings do not say.
        """
        from ..planner.exchange.export import EXPORTED, export

        found = export(self.document, to)
        if path is not None:
            if Path(path).is_dir() or not Path(path).parent.is_dir():
                raise ValueError(f"-o {path}: give a file name in a folder that exists")
            check_replaceable(Path(path), "-o", "exported plan", EXPORTED)
            write_file(Path(path), found.text)
        return found

    def save(self, path: str | Path = "plan.json") -> Path:
        """Write the plan document; never over a file that is none."""
        target = Path(path)
        check_document(target, "meshwright-plan")
        self.document.save(target)
        self.source = str(path)
        return target

    def verify(self, steps: int = 3) -> "VerifyReport":
        """Run the plan on processes of this machine beside one process, a small version of the model where there is
        one: same loss, gradients and parameters, or the first tensor that differs."""
        from ..profiler.model.load import load_model
        from .measuring.verify import verify

        source, seq_len = self.document.model.source, self.document.training.seq_len
        steps = inputs.whole_number("--steps", str(steps), "3")
        if self._model is None:
            inputs.check_source(source, inputs.where_it_is(source, self.source, "the model"))
        loaded = load_model(source, seq_len) if self._model is None else self._model()
        return verify(self.document, loaded, steps=steps)

    @property
    def notes(self) -> list[str]:
        """What could not be cut or recognised of the model, which of its parameters are not trained, by what numbers
        come to differ with the plan, what of the batch keeps plans out, whether fewer GPUs would nearly do, and what
        padding would save; empty for a plan that was read from a file."""
        return [] if self.result is None else [*joined_notes(self.profile.notes), *self._advice]

    @property
    def _advice(self) -> list[str]:
        from ..planner.answers.explain import batch_advice, launch_advice
        from ..planner.answers.padding import padding

        others = filter(None, (self.fewer, padding(self.document, self.estimate, self.profile)))
        return [
            *filter(None, [self.profile.untrained]),
            *self.profile.told,
            *batch_advice(self.document),
            *launch_advice(self.document),
            *map(str, others),
        ]

    @cached_property
    def fewer(self) -> "Fewer | None":
        """Fewer GPUs that would nearly do, if there are any; None for a plan that was read from a file, too."""
        from ..planner.answers.fewer import fewer_gpus
        from ..planner.plan.pins import Pins

        if self.result is None:
            return None
        return fewer_gpus(self.document, self.estimate, self.profile, self._pins or Pins())

    def print(self, console: "Console", written: str | None = None) -> None:
        """The plan on one screen. written: the file that it is in."""
        from .reporting.first_screen import print_first_screen

        result = self.result
        found = None if result is None else result.estimate
        others = () if result is None else result.alternatives
        advice = [] if result is None else self._advice
        if result is not None:
            terminal.print_coupling(console, self.profile.coupling, self.document.micro_batch)
            about = len(joined_notes(self.profile.notes))
            advice += [f"{about} on how the model is seen and what of it stays whole; -v shows them"] if about else []
        print_first_screen(console, self.document, found, others, self.assumptions, written, advice)

    def __str__(self) -> str:
        return terminal.as_text(self.print)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: the first screen of the report."""
        from .reporting.html_report import first_page

        result = self.result
        others = () if result is None else result.alternatives
        return first_page(self.document, None if result is None else result.estimate, others)


def check_report(path: str | Path, trace: str | Path | None) -> Path:
    """Where a report goes. Raises ValueError where it, or its trace, cannot be written."""
    check_writable(Path(path), "-o", ".html")
    if trace is not None:
        check_writable(Path(trace), "--trace", ".json")
        check_replaceable(Path(trace), "--trace", "trace", '"traceEvents"')
    return Path(path)


def _answers(
    texts: Sequence[str], plan: Plan, found: "Estimate", profile: ModelProfile, seconds: float
) -> "tuple[Answer, ...]":
    """Why the plan is not each of these layouts. Raises ValueError that says which word is wrong."""
    from ..planner.answers.guidance import named_rules
    from ..planner.answers.why_not import not_legal, why_not, why_not_plan, why_not_setup
    from ..planner.plan.document import load_plan
    from ..planner.plan.setups import IllegalSetupError, parse_setup
    from ..planner.solve.explore import Explorer

    explorer = Explorer(profile, plan.cluster, plan.training)
    frameworks = {rule.name: rule.attempts for rule in named_rules(plan.cluster, profile)}
    count, per_host = plan.cluster.num_devices, plan.cluster.devices_per_host

    def answer(text: str) -> "Answer":
        if text.strip().endswith(".json"):
            return why_not_plan(explorer, text, load_plan(Path(text.strip())), plan, found)
        attempts = frameworks.get(text.strip().lower())
        if attempts is not None:
            return why_not(explorer, text, attempts, plan, found, seconds)
        try:
            setup = parse_setup(text, count, per_host, "--why-not")
        except IllegalSetupError as error:
            return not_legal(text, error.rule)
        return why_not_setup(explorer, setup, plan, found, seconds)

    return tuple(answer(text) for text in texts)
