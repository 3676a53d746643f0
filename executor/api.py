"""What programs call, and what the commands go through: plan a model, ask about the plan, write it, use it.

Arguments mean what the flags of the same names mean, and what is wrong is said in the same words.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..planner.plan.document import Plan
from ..planner.plan.not_run import never_run, refusal
from ..planner.plan.training import Objective
from ..profiler.document import write_file
from ..profiler.machine.cluster import ClusterSpec, Device, device_names, load_device
from ..profiler.machine.units import gpus_in_words
from ..profiler.model.adapters import with_lora
from ..profiler.model.model_profile import ModelProfile
from ..profiler.model.source import PADDED
from .commands import inputs
from .commands.options import (
    MARGIN,
    PRICE,
    RISK,
    TIME_LIMIT,
    JobOptions,
    MachineOptions,
    Optimizer,
    PlanOptions,
    Precision,
    SpaceOf,
    StackOptions,
)
from .reporting import terminal
from .reporting.documents import check_document, json_kind
from .reporting.explain_report import Explanation
from .reporting.output_files import check_replaceable, check_writable
from .reporting.report import joined_notes

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from ..planner.answers.fewer import Fewer
    from ..planner.answers.search import SearchResult
    from ..planner.answers.sweep import LeftOut, Point
    from ..planner.answers.why_not import Answer
    from ..planner.cost.estimate import Estimate
    from ..planner.exchange.export import Export
    from ..planner.plan.pins import Pins
    from ..planner.plan.training import TrainingSpec
    from ..profiler.model.loaded import LoadedModel, Loss, MakeBatch
    from .measuring.compare import Comparison
    from .measuring.verify import VerifyReport
    from .reporting.report_facts import Facts
    from .reporting.sweep_report import Worth
    from .tuning.cut_down import ProfileWithout
    from .tuning.record import Record
    from .tuning.rounds import Tuned
    from .tuning.sitting import Venue

    Lora = str | Mapping[str, object]
    Model = str | Path | ModelProfile | nn.Module | Callable[[], nn.Module]
    """What can be planned: the path of a model.py, file.py:function, config.json, its folder, the id of a model
    in the Hugging Face cache, or profile.json; a profile; a module, or what builds one."""

Pinned = str | Iterable[str] | Mapping[str, object]
"""Choices that are kept: "tensor=4 pipeline=2", several such texts, or {"tensor": 4, "pipeline": 2}."""

_Choice = TypeVar("_Choice", Objective, Optimizer, Precision, SpaceOf)

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


@dataclass(frozen=True)
class Request:
    """What is to be planned: the model, the job and the choices, as flags or arguments say them.

    cluster: the devices, where they are not in the flags. batch, loss: of a module or of what builds one. setup: a
    layout in words, instead of a search for one. pad_vocab: words of a config.json are padded to a multiple of it.
    lora: adapters that are put into the model.
    """

    model: "Model"
    job: JobOptions = field(default_factory=JobOptions)
    choices: PlanOptions = field(default_factory=PlanOptions)
    objective: Objective = Objective.THROUGHPUT
    time_limit_s: float = 60.0
    use_cache: bool = True
    cluster: ClusterSpec | None = None
    batch: "MakeBatch | None" = None
    loss: "Loss | None" = None
    setup: str | None = None
    pad_vocab: int | None = None
    lora: "Lora | None" = None


def planned(request: Request, waiting: terminal.Waiting) -> Planned:
    """The plan that a search finds, checked. What is wrong with the flags is said before the model is looked at."""
    machine = request.cluster or inputs.read_cluster(request.job.machine)
    pins = request.choices.pins()
    profile, loaded = profiled(request, waiting)
    stack = request.choices.stack(request.job.stack)
    training, assumptions = inputs.read_training(profile, machine, request.job.global_batch, stack)
    if request.objective is not Objective.THROUGHPUT:
        from ..planner.answers.sweep import cluster_for

        waiting(f"looking for the number of GPUs ({request.objective.value})")
        machine, said = cluster_for(request.objective, profile, machine, training, pins)
        assumptions.append(said)
    if request.job.seq_len is None and profile.seq_len is not None:
        assumptions.append(f"{profile.seq_len:,} tokens per sample: the model's own; --seq-len changes it")
    assumptions.extend(profile.assumes)
    unpadded = request.pad_vocab is None and any("padding to" in note for note in profile.notes)
    if request.choices.made_for == "megatron" and unpadded:
        assumptions.append("the vocabulary as it is, though Megatron-LM pads it; --pad-vocab 128 prices that")
    if request.setup is not None:
        pins = _of_setup(request.setup, profile, machine, training, pins)
    result = searched(profile, machine, training, pins, request.time_limit_s, waiting)
    model = None if loaded is None else lambda: loaded
    return Planned(result.plan, lambda: profile, result=result, assumptions=assumptions, model=model, pins=pins)


def profiled(
    request: Request, waiting: terminal.Waiting, *, needs_model: bool = False, lengths: bool = False
) -> "tuple[ModelProfile, LoadedModel | None]":
    """(profile, the model itself or None), as inputs.read_model has them, of objects, too."""
    model, seq_len = request.model, request.job.seq_len
    if request.pad_vocab is not None:
        if not isinstance(model, str | Path):
            kind = type(model).__name__
            raise ValueError(f"pad_vocab={request.pad_vocab} pads the words of a config.json: give its path, no {kind}")
        model = f"{model}{PADDED}{request.pad_vocab}"
    if isinstance(model, str | Path):
        model = with_lora(str(model), request.lora)
        if request.batch is not None or request.loss is not None:
            raise ValueError(f"batch= and loss= go with a module; {model} defines its own functions batch and loss")
        return inputs.read_model(model, seq_len, waiting, request.use_cache, needs_model, lengths)
    if isinstance(model, ModelProfile):
        if request.lora is not None:
            raise ValueError("the profile has been made, with the adapters that it has: give the model itself to lora=")
        if request.batch is not None or request.loss is not None:
            raise ValueError("the profile has been made, with its own batch and loss: give the module itself to batch=")
        from ..profiler.model.lengths import at_seq_len

        return model if seq_len is None else at_seq_len(model, seq_len), None
    waiting("loading torch and the model")
    from ..profiler.model.load import load_model
    from ..profiler.model.trace import trace

    loaded = load_model(model, seq_len, request.batch, request.loss, request.lora)
    waiting("profiling the model on fake tensors")
    return trace(loaded, lengths=lengths), loaded


def tuned(
    request: Request, setups: Sequence[str], budget_s: float, place: "Venue", waiting: terminal.Waiting
) -> "tuple[Tuned, Record, list[str]]":
    """Candidates raced on the real cluster until no other plan is predicted to come near the best measured one, or the
    budget is spent; (the outcome, the record of it, notes). What is wrong is said before anything is launched.

    setups: layouts that take part whatever their prediction. place: where the plan, the record and the jobs are.
    """
    from .tuning.rounds import Job, Tuning
    from .tuning.sitting import (
        PROBE_S,
        check_budget,
        check_cluster,
        check_here,
        forget,
        header_of,
        memory_for_jobs,
        open_record,
        running_hosts,
        track_of,
    )
    from .tuning.small import SmallTuning, first_that_can

    if not isinstance(request.model, str | Path):
        raise ValueError("plan tune starts the ranks of the model's file: give its path")
    machine = request.cluster or inputs.read_cluster(request.job.machine)
    pins = request.choices.pins()
    running = running_hosts(place, machine)
    check_here(running, place.launcher)
    is_profile = json_kind(Path(request.model)) == "meshwright-profile"
    profile, loaded = profiled(request, waiting, needs_model=place.hosts is not None and not is_profile)
    if is_profile:
        raise ValueError(f"plan tune runs the model, and {request.model} is only its profile: give the model itself")
    stack = request.choices.stack(request.job.stack)
    training, notes = inputs.read_training(profile, machine, request.job.global_batch, stack)
    given, unfit = _given(setups, profile, machine, training)
    result = searched(profile, machine, training, pins, request.time_limit_s, waiting)
    if priced_only := never_run(result.plan):
        raise ValueError(f"plan tune runs what it measures: {refusal(result.plan, priced_only)}")
    profile_without = _profiles_without(loaded, waiting)
    first = result.plan
    if place.hosts is not None:
        first = first_that_can(result, pins, given, profile, running, profile_without).plan
    check_budget(budget_s, first)
    track = track_of(place, running, str(request.model), memory_for_jobs(running))
    hosts = 0 if place.one_gpu else place.hosts
    header = header_of(result.plan.model.name, profile.fingerprint, result.plan, machine, place.launcher, hosts)
    record = open_record(place, header)
    if place.launcher is not None:
        waiting("asking every rank what it sees")
        try:
            notes += check_cluster(track.probe(first, min(budget_s, PROBE_S)), running)
        except BaseException:
            if not place.resume:
                forget(place)
            raise
    if not place.resume:
        result.plan.save(place.plan)
    job = Job(profile, machine, training, pins, given, budget_s, request.time_limit_s)
    tuning = (
        Tuning(job, track, record, waiting.say)
        if hosts is None
        else SmallTuning(job, track, record, waiting.say, None if place.one_gpu else running, profile_without)
    )
    return tuning.run(result), record, [*notes, *unfit]


def _profiles_without(loaded: "LoadedModel | None", waiting: terminal.Waiting) -> "ProfileWithout":
    """Profiles of a model without some of its blocks, each made once."""

    @cache
    def profile_without(blocks: tuple[str, ...]) -> ModelProfile:
        from ..profiler.model.trace import trace
        from .tuning.fewer_layers import without_blocks

        assert loaded is not None, "only jobs for fewer hosts leave blocks out"
        waiting.say(f"profiling the model without {len(blocks)} of its blocks")
        return trace(without_blocks(loaded, blocks))

    return profile_without


def _given(
    setups: Sequence[str], profile: ModelProfile, cluster: ClusterSpec, training: "TrainingSpec"
) -> "tuple[tuple[tuple[str, Plan], ...], list[str]]":
    """(what --setup names and its plan, of those that fit; what became of the others)."""
    from ..planner.answers.verdict import THE_PLAN
    from .measuring.compare import PLANNED, beside, read_setups

    if not setups:
        return (), []
    from ..planner.answers.candidate import Candidate

    first = Candidate(PLANNED, None, None, THE_PLAN)
    asked = read_setups(setups, cluster)
    found = beside(first, None, profile, cluster, training, asked).candidates[1:]
    unfit = [f"--setup {each.label} takes no part: {each.verdict}" for each in found if each.plan is None]
    return tuple((each.label, each.plan) for each in found if each.plan is not None), unfit


def searched(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: "TrainingSpec",
    pins: "Pins",
    time_limit_s: float,
    waiting: terminal.Waiting,
) -> "SearchResult":
    """The plan that a search finds, after the independent check: a violation is a mistake of the planner, never the
    user's."""
    from ..planner.answers.check import check
    from ..planner.answers.search import search

    waiting("searching")
    result = search(profile, cluster, training, pins=pins, time_limit_s=time_limit_s, progress=waiting)
    violations = check(result.plan, profile, to_run=False)
    if violations:
        raise AssertionError("the plan breaks its own limits: " + "; ".join(violations))
    return result


def plan(
    model: "Model",
    *,
    gpus: int | None = None,
    device: str | Path | None = None,
    gpus_per_node: int | None = None,
    cluster: str | Path | ClusterSpec | None = None,
    instance: str | None = None,
    nodes: int | None = None,
    price_per_hour: float | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    software: str | None = None,
    memory_margin: float | None = None,
    memory_risk: float | None = None,
    fits: str | None = None,
    setup: str | None = None,
    pad_vocab: int | None = None,
    lora: "Lora | None" = None,
    pin: Pinned = (),
    at_most: Pinned = (),
    forbid: str | Iterable[str] = (),
    recompute: str | None = None,
    micro_batch: int | None = None,
    space: str = "run",
    objective: str = "throughput",
    time_limit: float = 60.0,
    batch: "MakeBatch | None" = None,
    loss: "Loss | None" = None,
    cache: bool = True,
    progress: bool = False,
) -> Planned:
    """The best plan of a model for so many GPUs, with its proof.

    model: the path of a model.py, file.py:function, config.json or its folder, or profile.json; the id of a model in
        the Hugging Face cache; a profile; or a module or what builds one, whose micro-batches batch(size) makes and
        whose loss(output, batch) is.
    device: a preset (`devices()` lists them) or a device TOML. cluster: a cluster, or its TOML, instead of these.
    instance, nodes: so many of a cloud's instance type, instead of these. price_per_hour: US dollars of one GPU.
    global_batch: samples per optimizer step, over all GPUs; the same for every candidate.
    fits: megatron, torchtitan, accelerate or deepspeed: only what that framework runs, and what it is told of. setup: a
        layout in words, "tp=2 pp=4 zero=1", instead of a search for one. pad_vocab: pad a config.json's vocabulary.
    lora: fine-tune with PEFT's adapters, all else frozen: "r=16,alpha=32,targets=q_proj+v_proj", or a dict of the same;
        base=bf16 for a base in 16 bits, base=nf4 for one in 4 (QLoRA), which is priced, not run.
    pin, at_most, forbid, recompute, micro_batch, space: what is decided already, as the flags --pin, --max, ... say it.
    time_limit: seconds the search may take. cache: use the profile that was kept of an unchanged model.
    progress: show a bar on stderr.

    Raises ValueError for bad input, InfeasibleError where nothing fits, and another RuntimeError where no plan was
    found in time, each with a way out, as the command does.
    """
    known, file = (cluster, None) if isinstance(cluster, ClusterSpec) else (None, cluster)
    if known is not None and any(each is not None for each in (gpus, device, gpus_per_node, instance, nodes)):
        raise ValueError(f"cluster= is {known.name}, which says which devices there are: leave out gpus and device")
    job = JobOptions(
        machine=_machine(gpus, device, gpus_per_node, file, instance, nodes, price_per_hour),
        global_batch=_count("--global-batch", global_batch),
        seq_len=_count("--seq-len", seq_len),
        stack=_stack(precision, optimizer, software, memory_margin, memory_risk),
    )
    choices = _choices(fits, pin, at_most, forbid, recompute, micro_batch, space)
    best_at = _one_of("--objective", objective, Objective)
    padded, seconds = _count("--pad-vocab", pad_vocab), TIME_LIMIT.given(time_limit)
    request = Request(model, job, choices, best_at, seconds, cache, known, batch, loss, setup, padded, lora)
    with terminal.Waiting(quiet=not progress) as waiting:
        return planned(request, waiting)


def load(
    path: str | Path,
    *,
    model: "Model | None" = None,
    batch: "MakeBatch | None" = None,
    loss: "Loss | None" = None,
    lora: "Lora | None" = None,
    cache: bool = True,
    to_run: bool = False,
    waiting: terminal.Waiting | None = None,
) -> Planned:
    """A saved plan, checked. model: where its model or profile is now, or the module or what builds one that it was
    made of, with its batch and loss as for `plan`; it is looked at when an answer needs it.

    to_run: check also that the executor runs all of it. waiting: told what is being done.
    """
    document, told = inputs.read_plan(Path(path), to_run=to_run), waiting or terminal.Waiting(quiet=True)
    seq_len = document.training.seq_len
    given = None if isinstance(model, str | Path) else model
    if given is None and any(each is not None for each in (batch, loss, lora)):
        raise ValueError("batch=, loss= and lora= go with a module, or what builds one, that is given as model=")

    def of_model() -> ModelProfile:
        if given is None:
            return inputs.profile_of(document, Path(path), None if model is None else str(model), told, not cache)
        request = Request(given, JobOptions(seq_len=seq_len), use_cache=cache, batch=batch, loss=loss, lora=lora)
        found, _ = profiled(request, told)
        inputs.check_same_model(document, Path(path), found, f"model={found.name}")
        return found

    def itself() -> "LoadedModel":
        from ..profiler.model.load import load_model

        if isinstance(given, ModelProfile):
            raise ValueError("verify runs the model, and model= is only its profile: give the model itself")
        if given is not None:
            return load_model(given, seq_len, batch, loss, lora)
        source = inputs.model_of(document, str(model))
        if json_kind(inputs.check_source(source, "--model says where the model is")) == "meshwright-profile":
            raise ValueError(f"plan verify runs the model, and {source} is only its profile: give the model itself")
        return load_model(source, seq_len)

    return Planned(document, of_model, model=None if model is None else itself, source=str(path))


def profile(
    model: "Model",
    *,
    seq_len: int | None = None,
    lengths: bool = False,
    batch: "MakeBatch | None" = None,
    loss: "Loss | None" = None,
    lora: "Lora | None" = None,
    cache: bool = True,
) -> ModelProfile:
    """The layers of a model with their FLOPs, bytes and cuts, from a run on fake tensors; `save` keeps it, and planning
    from it needs no torch. lengths: it is to hold at any sequence length. lora: as for `plan`."""
    job = JobOptions(seq_len=_count("--seq-len", seq_len))
    request = Request(model, job, use_cache=cache, batch=batch, loss=loss, lora=lora)
    with terminal.Waiting(quiet=True) as waiting:
        return profiled(request, waiting, lengths=lengths)[0]


@dataclass(frozen=True, repr=False)
class Swept:
    """The points of a sweep in order, questions that could not be asked with the reason, what must be said, and, where
    it was asked for, what more of each resource would be worth at each point."""

    points: "tuple[Point, ...]"
    left_out: "tuple[LeftOut, ...]" = ()
    notes: tuple[str, ...] = ()
    worth: "tuple[Worth, ...]" = ()

    def __iter__(self) -> "Iterator[Point]":
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> "Point":
        return self.points[index]

    @property
    def price_per_hour(self) -> float | None:
        """US dollars of one GPU, if anyone has said them."""
        return self.points[0].cluster.device.price_per_hour

    @property
    def document(self) -> "dict[str, Any]":
        """All of it as plain data, which `plan sweep --json` prints."""
        from .reporting.sweep_report import sweep_document

        return sweep_document(self.points, self.worth, self.notes, self.price_per_hour, self.left_out)

    def write(self, path: str | Path) -> Path:
        """Write it as the file's name says: .png, .html or .json. Raises ValueError where a picture would be empty."""
        from .reporting.sweep_report import check_target, write

        check_target(Path(path))
        write(Path(path), self.points, self.worth, self.document, self.price_per_hour)
        return Path(path)

    def show(self, console: "Console") -> None:
        """Print the tables, and what must be said of them."""
        from ..planner.answers.sweep import left_out_in_words
        from .reporting.sweep_report import print_sweep

        said = [*self.notes, *left_out_in_words(self.left_out)]
        print_sweep(console, self.points, self.worth, said, self.price_per_hour)

    def __str__(self) -> str:
        return terminal.as_text(self.show)

    __repr__ = __str__


def swept(
    model: "Model",
    machine: MachineOptions,
    lengths: Sequence[int | None],
    stack: StackOptions,
    choices: PlanOptions,
    *,
    global_batch: str | None,
    scale_batch: bool,
    prices: bool,
    time_limit_s: float,
    use_cache: bool,
    batch: "MakeBatch | None" = None,
    loss: "Loss | None" = None,
    lora: "Lora | None" = None,
    waiting: terminal.Waiting,
) -> Swept:
    """The best plan at every number of GPUs and length. What cannot be asked at a point ends the sweep only where it
    cannot be asked at any; where nothing fits, the point says so. prices: also what more of each resource is worth."""
    from ..planner.answers.sweep import LeftOut, marginal_prices, robustness
    from ..planner.answers.sweep import sweep as answered
    from .commands.sweep_grid import batches_of, machines_of
    from .reporting.sweep_report import Worth

    pins, stack = choices.pins(), choices.stack(stack)
    machines = machines_of(machine)
    counts = [each.num_devices for each in machines]
    left_out = [each for each in machines if isinstance(each, LeftOut)]
    jobs, errors = [], []
    notes: list[str] = []
    for length in lengths:
        try:
            job = JobOptions(seq_len=length)
            found, _ = profiled(Request(model, job, use_cache=use_cache, batch=batch, loss=loss, lora=lora), waiting)
        except ValueError as error:
            if type(error) is not ValueError:  # a mistake of ours, not of the point
                raise
            errors.append(error)
            left_out += [LeftOut(count, length, str(error)) for count in counts]
            continue
        batches, notes = batches_of(global_batch, counts, found.global_batch, scale_batch)
        for part, samples in zip(machines, batches, strict=True):
            if isinstance(part, ClusterSpec):
                jobs.append((found, part, inputs.read_training(found, part, samples, stack)[0]))
    if not jobs:
        raise errors[0]
    points = answered(jobs, pins, time_limit_s, waiting)
    worth = []
    for point in points if prices else ():
        waiting(f"pricing what more of each resource is worth on {gpus_in_words(point.num_devices)}")
        worth.append(Worth(marginal_prices(point, pins), robustness(point)))
    return Swept(points, tuple(left_out), tuple(notes), tuple(worth))


def sweep(
    model: "Model",
    gpus: int | Iterable[int] | None = None,
    *,
    seq_len: int | Iterable[int] | None = None,
    device: str | Path | None = None,
    gpus_per_node: int | None = None,
    cluster: str | Path | None = None,
    instance: str | None = None,
    nodes: int | None = None,
    price_per_hour: float | None = None,
    global_batch: int | Iterable[int] | None = None,
    scale_batch: bool = False,
    prices: bool = False,
    precision: str | None = None,
    optimizer: str = "adamw",
    software: str | None = None,
    memory_margin: float | None = None,
    memory_risk: float | None = None,
    fits: str | None = None,
    lora: "Lora | None" = None,
    pin: Pinned = (),
    at_most: Pinned = (),
    forbid: str | Iterable[str] = (),
    recompute: str | None = None,
    micro_batch: int | None = None,
    space: str = "run",
    time_limit: float = 60.0,
    batch: "MakeBatch | None" = None,
    loss: "Loss | None" = None,
    cache: bool = True,
    progress: bool = False,
) -> Swept:
    """The best plan at each number of GPUs and each sequence length; a point where nothing fits, or something is wrong,
    says why and does not end the sweep.

    global_batch: of all points, or one for each of `gpus`. scale_batch: it is that of the fewest GPUs, and grows with
        them. prices: also what more memory, bandwidth and compute would be worth at each point.

    The rest is as for `plan`.
    """
    counts = None if gpus is None else ",".join(map(str, _each_of("gpus", gpus)))
    lengths = [None] if seq_len is None else [_count("--seq-len", length) for length in _each_of("seq_len", seq_len)]
    samples = None if global_batch is None else ",".join(map(str, _each_of("global_batch", global_batch)))
    machine = _machine(None, device, gpus_per_node, cluster, instance, nodes, price_per_hour)
    choices = _choices(fits, pin, at_most, forbid, recompute, micro_batch, space)
    with terminal.Waiting(quiet=not progress) as waiting:
        return swept(
            model,
            replace(machine, gpus=counts),
            lengths,
            _stack(precision, optimizer, software, memory_margin, memory_risk),
            choices,
            global_batch=samples,
            scale_batch=scale_batch,
            prices=prices,
            time_limit_s=TIME_LIMIT.given(time_limit),
            use_cache=cache,
            batch=batch,
            loss=loss,
            lora=lora,
            waiting=waiting,
        )


def devices() -> dict[str, Device]:
    """Name -> preset, of all that `device=` takes by name."""
    return {name: load_device(name) for name in device_names()}


def check_report(path: str | Path, trace: str | Path | None) -> Path:
    """Where a report goes. Raises ValueError where it, or its trace, cannot be written."""
    check_writable(Path(path), "-o", ".html")
    if trace is not None:
        check_writable(Path(trace), "--trace", ".json")
        check_replaceable(Path(trace), "--trace", "trace", '"traceEvents"')
    return Path(path)


def _of_setup(text: str, profile: ModelProfile, cluster: ClusterSpec, training: "TrainingSpec", pins: "Pins") -> "Pins":
    """What a set-up in words decides, or the first set-up of a framework's usual ones that fits. pins: of the other
    flags, of which only --for goes with it."""
    from ..planner.answers.blame import blamed
    from ..planner.answers.fitting import fits
    from ..planner.answers.guidance import named_rules
    from ..planner.answers.search import RULE_S, pins_of
    from ..planner.plan.pin_texts import in_words
    from ..planner.plan.setups import IllegalSetupError, parse_setup
    from ..planner.solve.explore import Explorer

    said = [words for words in in_words(pins) if not words.startswith("--for")]
    if said or pins.offered:
        words = ", ".join(said) or "--space full, --recompute parts or --pin offload=activations"
        raise ValueError(f"--setup {text!r} says the layout, and other flags {words}: say all of it in --setup")
    rules = {rule.name: rule for rule in named_rules(cluster, profile)}
    if text.strip().lower() not in rules:
        try:
            decided = pins_of(parse_setup(text, cluster.num_devices, cluster.devices_per_host))
        except IllegalSetupError as error:
            raise ValueError(str(error)) from None
        decided = replace(decided, framework=pins.framework)
        found = blamed(profile, cluster, training, decided)
        if found is not None:
            raise ValueError(f"--setup {text!r}: {found.rule}")
        return decided
    explorer = Explorer(profile, cluster, training)
    attempts = rules[text.strip().lower()].attempts
    fitting = (each for each in attempts if fits(explorer, each, time.monotonic() + RULE_S))
    return replace(next(fitting, attempts[-1]), framework=pins.framework)


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


def _machine(
    gpus: int | None,
    device: str | Path | None,
    gpus_per_node: int | None,
    cluster: str | Path | None,
    instance: str | None = None,
    nodes: int | None = None,
    price_per_hour: float | None = None,
) -> MachineOptions:
    return MachineOptions(
        gpus=None if gpus is None else str(gpus),
        device=None if device is None else str(device),
        gpus_per_node=_count("--gpus-per-node", gpus_per_node),
        cluster=None if cluster is None else Path(cluster),
        instance=instance,
        nodes=_count("--nodes", nodes),
        price_per_hour=None if price_per_hour is None else PRICE.given(price_per_hour),
    )


def _choices(
    fits: str | None,
    pin: Pinned,
    at_most: Pinned,
    forbid: str | Iterable[str],
    recompute: str | None,
    micro_batch: int | None,
    space: str,
) -> PlanOptions:
    return PlanOptions(
        made_for=fits,
        pin=_texts(pin),
        most=_texts(at_most),
        forbid=_texts(forbid),
        recompute=recompute,
        micro_batch=_count("--micro-batch", micro_batch),
        space=_one_of("--space", space, SpaceOf),
    )


def _stack(
    precision: str | None, optimizer: str, software: str | None, memory_margin: float | None, memory_risk: float | None
) -> StackOptions:
    return StackOptions(
        precision=None if precision is None else _one_of("--precision", precision, Precision),
        optimizer=_one_of("--optimizer", optimizer, Optimizer),
        software=software,
        memory_margin=None if memory_margin is None else MARGIN.given(memory_margin),
        memory_risk=None if memory_risk is None else RISK.given(memory_risk),
    )


def _one_of(flag: str, word: str, of: type[_Choice]) -> _Choice:
    try:
        return of(word)
    except ValueError:
        raise ValueError(f"{flag} {word}: choose {', '.join(of)}") from None


def _count(flag: str, number: int | str | None) -> int | None:
    """The number, if there is one and it is at least 1. Raises ValueError."""
    return None if number is None else inputs.whole_number(flag, str(number), "8")


def _each_of(name: str, said: int | str | Iterable[int]) -> list[int | str]:
    """The numbers that a sweep goes through; one, or "8,16" as the flag takes it, will do. Raises ValueError if there
    is none."""
    if isinstance(said, str):
        return [word.strip() for word in said.split(",")]
    found: list[int | str] = [*said] if isinstance(said, Iterable) else [said]
    if not found:
        raise ValueError(f"{name}=[] has no number: give some, for example {name}=[8, 16, 32], or leave it out")
    return found


def _texts(said: Pinned) -> list[str]:
    """Choices as the flags take them."""
    if isinstance(said, str):
        return [said]
    return [f"{name}={value}" for name, value in said.items()] if isinstance(said, Mapping) else list(said)
