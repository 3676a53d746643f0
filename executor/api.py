"""What programs call: plan a model, load a saved plan, profile a model, sweep over many questions.

Arguments mean what the flags of the same names mean, and what is wrong is said in the same words.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..planner.plan.training import Objective
from ..profiler.machine.cluster import ClusterSpec, Device, device_names, load_device
from ..profiler.model.model_profile import ModelProfile
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
from .planned import Planned
from .planning import Request, planned, profiled
from .reporting import terminal
from .reporting.documents import json_kind
from .swept import Swept, swept

if TYPE_CHECKING:
    from ..profiler.model.loaded import LoadedModel, Loss, MakeBatch
    from .planning import Lora, Model

Pinned = str | Iterable[str] | Mapping[str, object]
"""Choices that are kept: "tensor=4 pipeline=2", several such texts, or {"tensor": 4, "pipeline": 2}."""

_Choice = TypeVar("_Choice", Objective, Optimizer, Precision, SpaceOf)


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


def _machine(
    gpus: int | None,
    device: str | Path | None,
    gpus_per_node: int | None,
    cluster: str | Path | None,
    instance: str | None,
    nodes: int | None,
    price_per_hour: float | None,
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
