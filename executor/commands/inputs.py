"""What the flags and files of commands mean: the machine, the model's profile, the job, a saved plan."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...planner.cost.software import load_software
from ...planner.plan.document import Plan, load_plan
from ...planner.plan.not_run import not_run, refusal
from ...planner.plan.training import REFERENCE, SAMPLES_PER_GPU, TrainingSpec
from ...profiler.document import OURS, check_ends, meant_by
from ...profiler.garbage import without_garbage_collection
from ...profiler.machine.cluster import ClusterSpec, cluster_of, load_cluster, load_device
from ...profiler.machine.instances import instance
from ...profiler.machine.local import local_gpus, preset_of
from ...profiler.machine.units import gpus_in_words
from ...profiler.model.cache import ProfileCache
from ...profiler.model.lengths import at_seq_len
from ...profiler.model.model_profile import ModelProfile, load_profile
from ...profiler.model.source import LORA, PADDED, file_of, is_hub_name, not_in_cache, with_adapters_of
from ..reporting import terminal
from ..reporting.documents import json_kind
from . import options

if TYPE_CHECKING:
    from ...profiler.model.loaded import LoadedModel

DEFAULT_DEVICE = "h100-80gb"
MODEL_RULE = "MODEL is a model.py, file.py:function, config.json, profile.json, or owner/name in the Hugging Face cache"


def read_cluster(machine: options.MachineOptions) -> ClusterSpec:
    """The cluster that the flags describe; what they leave open is taken from this machine, or assumed and noted."""
    found = _of_instances(machine) if machine.instance is not None else _of_devices(machine)
    return with_price(found, machine.price_per_hour)


def with_price(cluster: ClusterSpec, price_per_hour: float | None) -> ClusterSpec:
    """The cluster whose devices cost so much; None: what they cost is as before."""
    if price_per_hour is None:
        return cluster
    price = {"price_per_hour": price_per_hour}
    hosts = (g.model_copy(update={"device": g.device.model_copy(update=price)}) for g in cluster.hosts)
    return cluster.model_copy(update={"hosts": tuple(hosts)})


def _of_instances(machine: options.MachineOptions) -> ClusterSpec:
    """So many instances of a cloud's type."""
    chosen = instance(machine.instance or "")
    flags = {"--cluster": machine.cluster, "--device": machine.device, "--gpus-per-node": machine.gpus_per_node}
    for flag, value in flags.items():
        if value is not None:
            raise ValueError(f"--instance {chosen.name} says which devices there are: leave out {flag}")
    nodes = machine.nodes
    if machine.gpus is not None:
        gpus = whole_number("--gpus", machine.gpus, "8")
        if gpus % chosen.gpus or nodes not in (None, gpus // chosen.gpus):
            whole = (
                f"--nodes {nodes} of {chosen.name} are {gpus_in_words(chosen.gpus * nodes)}"
                if nodes
                else (f"{chosen.name} has {gpus_in_words(chosen.gpus)}")
            )
            raise ValueError(f"--gpus {gpus}, but {whole}: leave out --gpus, or give a multiple of {chosen.gpus}")
        nodes = gpus // chosen.gpus
    return chosen.cluster(nodes or 1)


def _of_devices(machine: options.MachineOptions) -> ClusterSpec:
    """The cluster of a file, or equal hosts of a device."""
    if machine.nodes is not None:
        raise ValueError(f"--nodes {machine.nodes} counts instances: give --instance, too, or --gpus instead")
    device, gpus_per_node, cluster_file = machine.device, machine.gpus_per_node, machine.cluster
    gpus = None if machine.gpus is None else whole_number("--gpus", machine.gpus, "8")
    if cluster_file is not None:
        if device is not None or gpus_per_node is not None:
            extra = "--device" if device is not None else "--gpus-per-node"
            raise ValueError(f"--cluster {cluster_file} says which devices there are: leave out {extra}")
        cluster = load_cluster(cluster_file)
        if gpus is not None and gpus != cluster.num_devices:
            raise ValueError(f"--gpus {gpus}, but {cluster_file} has {cluster.num_devices} devices: leave out --gpus")
        return cluster
    if device is not None:
        if gpus is None:
            raise ValueError("say how many GPUs, for example --gpus 8 (or give a --cluster file)")
        return cluster_of(load_device(device), gpus, gpus_per_node)
    here = local_gpus()
    if gpus is None and not here:
        raise ValueError("no GPU here, so say how many to plan for: for example --gpus 8 (or give a --cluster file)")
    name, assumption = _assumed_device(here, gpus)
    cluster = cluster_of(load_device(name), gpus or len(here), gpus_per_node)
    return cluster.model_copy(update={"assumption": assumption})


def _assumed_device(here: list[tuple[str, float]], gpus: int | None) -> tuple[str, str]:
    """(preset, what is assumed about it) when the user names no device."""
    if not here:
        return DEFAULT_DEVICE, f"{DEFAULT_DEVICE}: no GPU here; --device changes it (`plan devices` lists them)"
    found, memory_mib = here[0]
    preset = preset_of(found, memory_mib)
    if preset is None:
        return DEFAULT_DEVICE, f"{DEFAULT_DEVICE}: no preset for the {found} here; --device takes a preset or your TOML"
    if gpus is None or gpus <= len(here):
        return preset, f"{preset}: found {len(here)} x {found} here; --device changes it"
    return preset, f"{preset}: found {len(here)} x {found} here, the others taken as alike; --device changes it"


def whole_number(flag: str, text: str, example: str) -> int:
    """The number that a flag's text says. Raises ValueError, with an example, for anything but 1, 2, 3, ..."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{flag} {text}: give a whole number of at least 1, for example {flag} {example}")
    return number


@without_garbage_collection()
def read_model(
    source: str,
    seq_len: int | None,
    waiting: terminal.Waiting,
    use_cache: bool = True,
    needs_model: bool = False,
    lengths: bool = False,
) -> tuple[ModelProfile, "LoadedModel | None"]:
    """(profile, the model itself or None). lengths: the profile is to hold at any sequence length.
    needs_model: ranks will run it here.

    The model is None where the source is a saved profile, or where its profile was
    kept from an earlier call and the model is not needed: neither needs torch.
    """
    path = check_source(source, MODEL_RULE)
    kind = json_kind(path)
    if kind == "meshwright-plan":
        raise ValueError(f"{source} is a plan, not a model: look at it with `plan show {source}`")
    if kind is not None and kind.startswith(OURS) and kind != "meshwright-profile":
        raise ValueError(f"{source} is a {kind.removeprefix(OURS)}, not a model: {MODEL_RULE}")
    if kind == "meshwright-profile":
        if PADDED in source:
            raise ValueError(f"{path} is a profile, made with its own vocabulary: give the config.json to --pad-vocab")
        if LORA in source:
            raise ValueError(f"{path} is a profile, made with what adapters it has: give the model itself to --lora")
        profile = load_profile(path)
        return profile if seq_len is None else at_seq_len(profile, seq_len), None
    cache = ProfileCache(source, seq_len, lengths) if use_cache else None
    kept = None if cache is None else cache.look_up()
    if kept is not None:
        waiting.say(f"profile of {terminal.age(kept.age_s)} ago, nothing has changed since; --no-cache makes it anew")
        if not needs_model:
            return kept.profile, None
    waiting("loading torch and the model")
    if LORA in source:
        from ...profiler.model.adapters import import_peft

        import_peft()
    from ...profiler.model.load import load_model
    from ...profiler.model.trace import trace
    from ..measuring.local_ranks import apart, is_local_rank

    if kept is not None:
        return kept.profile, load_model(source, seq_len)
    with nullcontext() if cache is None else cache.recording() as recording:
        loaded = load_model(source, seq_len)
        waiting("profiling the model on fake tensors")

        def progress(layer: str, done: int, total: int) -> None:
            if not is_local_rank():
                waiting(f"profiling {layer}", done / total)

        traced = partial(trace, loaded, lengths=lengths, progress=progress)
        profile = apart(traced) if needs_model else traced()
    reason = "" if cache is None or recording is None else cache.keep(profile, recording)
    if reason:
        waiting.say(f"the profile is not kept for the next call: {reason}")
    return profile, loaded


def check_source(source: str, rule: str) -> Path:
    """The file that `source` names. Raises ValueError with the nearest names if it is not there."""
    path = file_of(source)
    if path.exists():
        check_ends(path)
        return path
    module, colon, function = source.partition(":")
    as_file = Path(module.replace(".", "/") + ".py")  # "package.module:function", as Python names it
    meant = f"{as_file}{colon}{function}" if as_file.is_file() else meant_by(path, (".py", ".json", ""))
    hint = rule if meant is None else f"did you mean {meant}?"
    if is_hub_name(source):
        hint = not_in_cache(source)
    raise ValueError(f"no such file: {path}; {hint}")


def read_training(
    profile: ModelProfile,
    cluster: ClusterSpec,
    global_batch: int | None,
    stack: options.StackOptions,
) -> tuple[TrainingSpec, list[str]]:
    """(the job, what was assumed about it and about the cluster, each with the flag that changes it)."""
    assumptions = [] if cluster.assumption is None else [cluster.assumption]
    batch = global_batch or profile.global_batch
    if batch is None:
        batch = SAMPLES_PER_GPU * cluster.num_devices
        assumptions.append(f"global batch {batch:,}: {SAMPLES_PER_GPU} samples per GPU; --global-batch changes it")
    elif global_batch is None:
        assumptions.append(f"global batch {batch:,}: the model file's own; --global-batch changes it")
    precision = stack.precision
    if precision is None:
        precision = options.Precision.BF16 if cluster.device.computes_bf16 else options.Precision.FP32
    training = TrainingSpec(
        global_batch=batch,
        seq_len=profile.seq_len,
        precision=precision.value,
        optimizer=stack.optimizer.value,
        software=load_software(stack.software or REFERENCE).name,
        memory_margin=_margin(stack, profile, cluster, assumptions),
    )
    return training, assumptions


def _margin(stack: options.StackOptions, profile: ModelProfile, cluster: ClusterSpec, assumptions: list[str]) -> float:
    """The share of memory that is left free, as it was said, or for a risk; what is assumed is added."""
    from ...planner.cost.bands import USUAL_RISK, is_cpu, margin_at, usual_margin

    if stack.memory_margin is not None:
        if stack.memory_risk is not None:
            raise ValueError(
                f"--memory-margin {stack.memory_margin:g} and --memory-risk {stack.memory_risk:g} both say how much "
                "memory is left free: give one of them"
            )
        return stack.memory_margin
    risk = USUAL_RISK if stack.memory_risk is None else stack.memory_risk
    found = margin_at(risk, profile, cluster.device.name)
    if found is not None:
        if stack.memory_risk is None:
            assumptions.append(
                f"{found:.1%} of memory left free, for a risk of {risk:.0%} to run out; --memory-risk changes it"
            )
        return found
    if stack.memory_risk is not None:
        raise ValueError(
            f"--memory-risk {stack.memory_risk:g}: no published run is of such a model and device, so the risk is not "
            "known; give --memory-margin, the share that is left free"
        )
    usual = usual_margin(cluster.device.name)
    if not is_cpu(cluster.device.name):
        assumptions.append(
            f"{usual:.1%} of memory left free, as for models of which there are published runs: there is none of this "
            "kind, so the risk to run out is not known; --memory-margin changes it"
        )
    return usual


def read_plan(path: Path, *, to_run: bool = False) -> Plan:
    """A plan that passes the independent check. to_run: also that the executor runs all of it."""
    from ...planner.answers.check import check

    document = load_plan(path)
    if to_run and (priced_only := not_run(document)):
        raise ValueError(f"{path}: {refusal(document, priced_only)}")
    violations = check(document, to_run=False)
    if violations:
        raise ValueError(f"{path} breaks a limit: {violations[0]}; make it again with: plan MODEL -o {path}")
    return document


def runs_foreign_code(document: Plan, plan_file: Path) -> bool:
    """Whether the model that a plan names is Python from outside of the plan's folder: plans come from anywhere, and
    only what the user has named, or lies beside the plan, is run."""
    path = file_of(document.model.source)
    holds_json = path.suffix == ".json" or path.is_dir()
    return not holds_json and not path.resolve().is_relative_to(plan_file.resolve().parent)


def model_of(document: Plan, model: str | None) -> str:
    """The source of a plan's model. model: where it, or its profile, is now, if that has been said."""
    if model is None:
        return document.model.source
    path = file_of(model)
    is_profile = path.is_file() and json_kind(path) == "meshwright-profile"
    return model if is_profile else with_adapters_of(model, document.model.source)


def profile_of(
    document: Plan, plan_file: Path, model: str | None, waiting: terminal.Waiting, no_cache: bool
) -> ModelProfile:
    """The profile of a plan's model. Raises ValueError if it is not found, is not to be run, or has changed since."""
    source = model_of(document, model)
    check_source(source, where_it_is(source, plan_file, "the model, or its profile.json,"))
    if model is None and runs_foreign_code(document, plan_file):
        raise ValueError(
            f"{plan_file} names the model file {source}, which lies outside of the plan's folder and would be run to "
            f"profile it; if you trust it, say so: --model {source}"
        )
    profile, _ = read_model(source, document.training.seq_len, waiting, not no_cache)
    check_same_model(document, plan_file, profile, source)
    return profile


def where_it_is(source: str, plan_file: str | Path, what: str) -> str:
    """How to say where the model of a plan is, which names it like this."""
    if source.isidentifier() or source == "<lambda>":
        made = f"mw.load({str(plan_file)!r}, model={source}, batch=..., loss=...)"
        return f"the plan was made of a Python object: give it to {made}, or say with --model where {what} is"
    return f"--model says where {what} is"


def check_same_model(document: Plan, plan_file: Path, profile: ModelProfile, source: str) -> None:
    """Raises ValueError if this is not the profile of the model that a plan was made for. source: what it is of."""
    from ...planner.answers.check import unlike

    if profile.fingerprint != document.model.fingerprint:
        raise ValueError(
            f"{source} is not the model that {plan_file} was made for ({document.model.name}, fingerprint "
            f"{document.model.fingerprint[:12]}; found {profile.fingerprint[:12]}): plan again, or give --model"
        )
    changed = unlike(document, profile)
    if profile.seq_len != document.training.seq_len:
        changed.insert(
            0, f"seq_len is {document.training.seq_len}, and {source} has {profile.seq_len} tokens per sample"
        )
    if changed:
        raise ValueError(f"{plan_file} breaks a limit: {changed[0]}; make it again with: plan MODEL -o {plan_file}")
