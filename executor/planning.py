"""From what is asked to the plan that answers it, the same way for commands and for programs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..planner.plan.training import Objective
from ..profiler.machine.cluster import ClusterSpec
from ..profiler.model.adapters import with_lora
from ..profiler.model.model_profile import ModelProfile
from ..profiler.model.source import PADDED
from .commands import inputs
from .commands.options import JobOptions, PlanOptions
from .planned import Planned
from .reporting import terminal

if TYPE_CHECKING:
    from torch import nn

    from ..planner.answers.search import SearchResult
    from ..planner.plan.pins import Pins
    from ..planner.plan.training import TrainingSpec
    from ..profiler.model.loaded import LoadedModel, Loss, MakeBatch

    Lora = str | Mapping[str, object]
    Model = str | Path | ModelProfile | nn.Module | Callable[[], nn.Module]
    """What can be planned: the path of a model.py, file.py:function, config.json, its folder, the id of a model
    in the Hugging Face cache, or profile.json; a profile; a module, or what builds one."""


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
