"""Plans as flags of torchtitan, and its flags as a Layout; one table of options serves both ways."""

from collections.abc import Mapping, Sequence

from ...profiler.model.model_profile import ModelProfile
from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, Plan, Recompute
from ..plan.legality import has_experts
from ..plan.schedules import Schedule
from ..plan.training import Precision
from .export_notes import (
    blocks_by_stage,
    kept_note,
    order_note,
    ordered,
    recomputed_blocks,
    sync_note,
    whole_layers_notes,
    with_sharded_optimizer,
)
from .from_flags import Flags, Sizes, check_known, grouped, idle, left_over, needed_row, stage_sizes, twice
from .imports import Layout
from .recipes import renamed

_SIZES = frozenset(
    {
        "parallelism.data_parallel_replicate_degree",
        "parallelism.data_parallel_shard_degree",
        "parallelism.tensor_parallel_degree",
        "parallelism.pipeline_parallel_degree",
        "parallelism.context_parallel_degree",
        "parallelism.expert_parallel_degree",
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
        "training.local_batch_size",
        "training.global_batch_size",
        "training.seq_len",
    }
)

_SCHEDULES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
_PRECISION: dict[Precision, str] = {"bf16": "bfloat16", "fp32": "float32"}
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "full": "full", "selective": "selective"}

_WORDS: dict[str, tuple[str, ...]] = {
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.pipeline_parallel_schedule": tuple(_SCHEDULES.values()),
    "training.mixed_precision_param": tuple(_PRECISION.values()),
    "training.dtype": ("float32",),
    "activation_checkpoint.mode": tuple(_RECOMPUTE),
}

_SWITCHES = frozenset({"parallelism.enable_sequence_parallel", "training.disable_cuda_graphs", "compile.enable"})

_LISTS = frozenset({"parallelism.module_fqns_per_model_part"})

_HARMLESS = frozenset(
    {
        "context_parallel_load_balancer",
        "context_parallel_ptrr_mask_key",
        "context_parallel_rotate_method",
        "enable_async_tensor_parallel",
        "enable_fsdp_symm_mem",
        "spmd_backend",
    }
)
"""Flags in the section "parallelism" that do not change what is priced."""

_REFUSED: dict[str, str] = {
    "training.enable_cpu_offload": "parameters and gradients on the host are not priced",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule of your own is not read",
    "activation_checkpoint.memory_budget": "a memory budget leaves recompute to the compiler, which is not priced",
    "activation_checkpoint.selective_ac_option": "recompute of every n-th block was dropped by torchtitan 0.3",
}

FLAGS = Flags(sizes=_SIZES, words=_WORDS, switches=_SWITCHES, refused=_REFUSED, lists=_LISTS)
"""torchtitan's flags, without the leading --; see targets.py for the version."""


def torchtitan_words(plan: Plan, notes: list[str]) -> list[str]:
    """torchtitan's flags for a plan. What they cannot express is added to `notes`. Raises ValueError for what
    torchtitan cannot do."""
    degrees, training, stage = plan.degrees, plan.training, plan.zero_stage
    pipelined = degrees.pipeline > 1
    if training.precision not in _PRECISION:
        raise ValueError(
            f"precision {training.precision} is no flag of torchtitan, but a converter in its config function; plan in "
            "bf16"
        )
    alone = degrees.num_devices in (1, degrees.data_replicate)
    if training.precision == "bf16" and degrees.sharded_over == 1 and not alone:
        raise ValueError(
            "torchtitan computes in bf16 through FSDP (data_shard or context above 1) or plain DDP; this plan has "
            f"tensor={degrees.tensor} and pipeline={degrees.pipeline} without either, and would run in fp32: plan with "
            "--pin data_replicate=1 --pin data_shard=2 or more"
        )
    if pipelined and plan.gradient_sync == "every" and stage and plan.num_microbatches > 1:
        raise ValueError(
            "torchtitan's pipelines reduce gradients once, after the last micro-batch, and hold them unsharded until "
            f"then; the plan reduces after each of {plan.num_microbatches}: plan with --pin pipeline=1, or compare "
            f"with {with_sharded_optimizer(plan)}"
        )
    words: list[str] = []

    def say(name: str, *values: object) -> None:
        words.extend([f"--{name}", *map(str, values)])

    say("parallelism.data_parallel_replicate_degree", degrees.data_replicate)
    say("parallelism.data_parallel_shard_degree", degrees.data_shard)
    if degrees.sharded_over > 1:
        say("parallelism.fsdp_reshard_after_forward", _reshard(plan, notes))
    say("parallelism.tensor_parallel_degree", degrees.tensor)
    if degrees.tensor > 1 and not plan.sequence_parallel:
        say("parallelism.no-enable_sequence_parallel")
    if degrees.context > 1:
        say("parallelism.context_parallel_degree", degrees.context)
        if plan.context_kind != "all_gather":
            notes.append(
                f"context ranks exchange by {plan.context_kind} in the plan; torchtitan 0.3 takes no flag for it"
            )
    if degrees.expert > 1:
        say("parallelism.expert_parallel_degree", degrees.expert)
    notes += _expert_notes(plan)
    say("parallelism.pipeline_parallel_degree", degrees.pipeline)
    if pipelined:
        if plan.schedule not in _SCHEDULES or (plan.schedule == "zb-h1" and degrees.virtual_stages == 1):
            raise ValueError(
                f"schedule {plan.schedule} with {degrees.virtual_stages} stage(s) of each rank: torchtitan runs gpipe, "
                "1f1b, interleaved, zb-h1 with several stages of each rank, and zb-v; plan with --pin schedule=1f1b"
            )
        say("parallelism.pipeline_parallel_schedule", _SCHEDULES[plan.schedule])
        say("parallelism.pipeline_parallel_microbatch_size", plan.micro_batch)
        say("parallelism.module_fqns_per_model_part", *_model_parts(plan, notes))
    if pipelined or degrees.expert > 1:
        say("training.disable_cuda_graphs")
    say("training.local_batch_size", plan.micro_batch * (plan.num_microbatches if pipelined else 1))
    say("training.global_batch_size", training.global_batch)
    if training.seq_len is not None:
        say("training.seq_len", training.seq_len)
    say("training.mixed_precision_param", _PRECISION[training.precision])
    if training.software == "fsdp2-compile":
        say("compile.enable")
    if training.optimizer == "sgd":
        notes.append("the optimizer is SGD in the plan; torchtitan's is set in its config function")
    if not pipelined:
        notes += sync_note(plan, "torchtitan")
    if ordered(plan, plan.mesh_axes) != ordered(plan, AXES):
        notes.append(order_note(plan, "torchtitan"))
    notes += whole_layers_notes(plan)
    words.append(f"activation_checkpoint:{_recompute(plan, notes)}")  # a subcommand, so it comes last
    return words


def _expert_notes(plan: Plan) -> list[str]:
    """Notes on experts beside tensor parallelism: torchtitan spreads them over tensor ranks, too, or cuts each of
    them."""
    degrees = plan.degrees
    if degrees.tensor == 1 or not plan.model.expert_modules:
        return []
    if degrees.expert == 1:
        return [
            f"experts stay whole in the plan, on each of {degrees.tensor} tensor ranks; torchtitan cuts each of them: "
            "less memory, other times"
        ]
    return [
        f"experts are spread over ranks that hold other tokens in the plan; torchtitan counts the {degrees.tensor} "
        "tensor ranks among them, which hold the same ones without sequence parallelism: less memory, more time"
    ] * (not plan.sequence_parallel)


def _reshard(plan: Plan, notes: list[str]) -> str:
    """Value of torchtitan's flag for resharding: "always", "never", or "default", which without a pipeline reshards all
    except the layers after the blocks."""
    layers, row = plan.layers, block_row(plan.layers)
    reshards = [layer.reshard for layer in layers]
    if not any(reshards):
        return "never"
    if row is not None and row.after and plan.degrees.pipeline == 1:
        expected = [place < len(layers) - row.after for place in range(len(layers))]
        if reshards == expected:
            return "default"
    notes += kept_note(plan, "torchtitan")
    return "always"


def _recompute(plan: Plan, notes: list[str]) -> str:
    row = block_row(plan.layers) or BlockRow(0, len(plan.layers), 0)
    kind, counts, sizes = recomputed_blocks(plan, row, "torchtitan", notes)
    if kind == "attention":
        raise ValueError(
            "recompute=attention is no mode of torchtitan; plan with --pin recompute=selective or recompute=full"
        )
    if kind == "selective":
        notes.append("selective of torchtitan also runs every second matmul again; less memory, more time")
    if kind != "none" and counts != sizes:
        notes.append(
            f"recompute of {sum(counts)} of {sum(sizes)} blocks becomes all of them: torchtitan knows no number; "
            f"less memory, more time; plan with --pin recompute={kind} or none for what it does"
        )
    return kind


def _model_parts(plan: Plan, notes: list[str]) -> list[str]:
    """Modules of each stage, joined by commas; with torchtitan's own names if the model is one row of blocks."""
    row = block_row(plan.layers)
    if row is None:
        parts = [[name for layer in stage.layers for name in layer.modules] for stage in plan.stages]
        deep = next((name for part in parts for name in part if name.count(".") > 1), None)
        if deep is not None:
            raise ValueError(
                f"torchtitan cuts a model at its children and at items of its lists, and {deep} lies deeper: plan with "
                "--pin pipeline=1"
            )
        return [",".join(dict.fromkeys(part)) for part in parts]
    counts = blocks_by_stage(plan, row, "torchtitan")
    notes.append(
        "stages are said with the names of torchtitan's own decoders: tok_embeddings, layers.N, norm and lm_head"
    )
    parts, first = [], 0
    for count in counts:
        parts.append([f"layers.{block}" for block in range(first, first + count)])
        first += count
    parts[0] = ["tok_embeddings"] * bool(row.before) + parts[0]
    parts[-1] += ["norm", "lm_head"] if row.after else []
    return [",".join(part) for part in parts]


def read_torchtitan(words: Sequence[str], num_devices: int, profile: ModelProfile) -> Layout:
    """The layout of torchtitan's arguments on a number of GPUs. Flags that are not given have torchtitan's defaults.

    Raises ValueError that names the flag which is wrong or not understood.
    """
    said, ignored, notes = _read_words(words)
    size = Sizes(said, "torchtitan")
    tensor, context = size("parallelism.tensor_parallel_degree"), size("parallelism.context_parallel_degree")
    pipeline, replicas = (
        size("parallelism.pipeline_parallel_degree"),
        size("parallelism.data_parallel_replicate_degree"),
    )
    shards = left_over(num_devices, tensor * pipeline * context * replicas, "replicate x tensor x pipeline x context")
    asked = said.get("parallelism.data_parallel_shard_degree", "-1")
    if asked != "-1" and size("parallelism.data_parallel_shard_degree") != shards:
        raise ValueError(
            f"--parallelism.data_parallel_shard_degree {asked}, but {shards} ranks are left of {num_devices} GPUs; "
            "give --gpus, or -1"
        )
    _check_experts(said, tensor, size("parallelism.expert_parallel_degree"), profile)
    row = block_row(profile.layers)
    schedule = _read_schedule(said) if pipeline > 1 else "none"
    sizes = _read_stages(said, size, pipeline, schedule, row, profile)
    local = size("training.local_batch_size", 8)
    micro = size("parallelism.pipeline_parallel_microbatch_size", 1) if pipeline > 1 else local
    batch = said.get("training.global_batch_size", "-1")
    whole = local * replicas * shards if batch == "-1" else size("training.global_batch_size")
    named = "parallelism.module_fqns_per_model_part" in said
    notes += idle(
        said,
        [
            ("parallelism.pipeline_parallel_schedule", "without pipeline_parallel_degree", pipeline == 1),
            ("parallelism.module_fqns_per_model_part", "without pipeline_parallel_degree", pipeline == 1),
            ("parallelism.pipeline_parallel_layers_per_stage", "beside module_fqns_per_model_part", named),
        ],
    )
    if "--config" in words or any(word.startswith("--config=") for word in words):
        notes.append("what the --config function sets is not read: flags that are not given have torchtitan's defaults")
    if pipeline > 1 and whole > local * replicas * shards:
        notes.append(
            f"torchtitan empties the pipeline after each {local} samples; priced as one pass of {whole} samples"
        )
    reshard = said.get("parallelism.fsdp_reshard_after_forward", "default")
    keeps = reshard == "never" or (reshard == "default" and pipeline > 1)
    recompute = _RECOMPUTE[said.get("activation_checkpoint.mode", "selective")]
    precisions = {word: precision for precision, word in _PRECISION.items()}
    sharded = shards * context > 1
    return Layout(
        target="torchtitan",
        data_replicate=replicas,
        data_shard=shards,
        tensor=tensor,
        context=context,
        expert=size("parallelism.expert_parallel_degree"),
        pipeline=pipeline,
        virtual_stages=max(1, len(sizes) // pipeline),
        context_kind="all_gather",
        sequence=tensor > 1 and said.get("parallelism.enable_sequence_parallel", "true") == "true",
        schedule=schedule,
        sync_every=pipeline == 1,
        reshard="none" if keeps or not sharded else "inner" if reshard == "default" else "all",
        stage_sizes=sizes,
        micro_batch=micro,
        global_batch=whole,
        recompute=recompute,
        seq_len=size("training.seq_len") if "training.seq_len" in said else None,
        precision=precisions[said.get("training.mixed_precision_param", "bfloat16")],
        software="fsdp2-compile" if said.get("compile.enable") == "true" else "fsdp2-eager",
        ignored=tuple(ignored),
        notes=tuple(notes),
    )


def _check_experts(said: Mapping[str, str], tensor: int, expert: int, profile: ModelProfile) -> None:
    """Raise ValueError if torchtitan would cut single experts, or spread experts over ranks that hold the same
    tokens."""
    if tensor == 1 or not has_experts(profile):
        return
    if expert == 1:
        raise ValueError(
            f"--parallelism.tensor_parallel_degree {tensor} without expert parallelism: torchtitan cuts each expert, "
            "which is not priced; give --parallelism.expert_parallel_degree 2 or more"
        )
    if said.get("parallelism.enable_sequence_parallel", "true") == "false":
        raise ValueError(
            "--parallelism.no-enable_sequence_parallel: experts spread over tensor ranks that hold the same tokens are "
            "not priced; leave it out"
        )


def _read_words(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(name -> its value, flags that are ignored, notes on names that are given two values)."""
    values_of: list[tuple[str, str, str]] = []
    said: dict[str, str] = {}
    ignored: list[str] = []
    subcommand = "activation_checkpoint:"
    modes = [word.replace("-", "_") for word in words]
    for mode in modes:
        if mode.startswith(subcommand):
            said["activation_checkpoint.mode"] = mode.removeprefix(subcommand)
            values_of.append(("activation_checkpoint.mode", mode, ""))
    chosen = dict(said)
    rest = [word for word, mode in zip(words, modes, strict=True) if not mode.startswith(subcommand)]
    for flag, values in grouped(rest):
        name = renamed(flag.removeprefix("--").replace("-", "_"))
        section, _, last = name.rpartition(".")
        negated = f"{section}.{last.removeprefix('no_')}"
        if name in FLAGS.refused:
            raise ValueError(f"{flag}: {FLAGS.refused[name]}")
        if last.startswith("no_") and negated in FLAGS.switches:
            said[negated] = "false"
            values_of.append((negated, flag, ""))
            continue
        if name not in FLAGS.known:
            check_known(name, FLAGS.known | FLAGS.refused.keys())
            if section == "parallelism" and last not in _HARMLESS:
                raise ValueError(f"{flag} is no flag of torchtitan's parallelism that is priced; leave it out")
            ignored.append(flag)
        elif name in FLAGS.switches:
            said[name] = (values or ["true"])[0].lower()
        elif name in FLAGS.lists:
            said[name] = " ".join(values)
        elif len(values) != 1:
            raise ValueError(f"{flag} takes one value; found {len(values)}")
        else:
            said[name] = values[0]
        if name in said:
            values_of.append((name, flag, said[name]))
    for name, allowed in FLAGS.words.items():
        if name in said and said[name] not in allowed:
            raise ValueError(f"--{name} {said[name]}: {', '.join(allowed)} can be priced")
    for name, mode in chosen.items():
        if said[name] != mode:
            raise ValueError(f"{subcommand}{mode} and --{name} {said[name]} contradict each other: leave out one")
    return said, ignored, twice(each for each in values_of if each[0] not in chosen)


def _read_schedule(said: Mapping[str, str]) -> Schedule:
    word = said.get("parallelism.pipeline_parallel_schedule", "1F1B")
    return {spelled: schedule for schedule, spelled in _SCHEDULES.items()}[word]


def _read_stages(
    said: Mapping[str, str],
    size: Sizes,
    pipeline: int,
    schedule: Schedule,
    row: BlockRow | None,
    profile: ModelProfile,
) -> tuple[int, ...]:
    """Number of layers on each stage; () without a pipeline."""
    if pipeline == 1:
        return ()
    if "parallelism.module_fqns_per_model_part" in said:
        return _named_stages(said["parallelism.module_fqns_per_model_part"].split(" "), row, profile, pipeline)
    row = needed_row(row, profile, pipeline)
    head = size("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    tail = size("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    stages = pipeline * (1 if schedule in ("1f1b", "gpipe") else 2)
    if "parallelism.pipeline_parallel_layers_per_stage" in said:
        stages = -(-(row.blocks + head + tail) // size("parallelism.pipeline_parallel_layers_per_stage"))
    each, extra = divmod(row.blocks + head + tail, stages)
    counts = [each + (index < extra) for index in range(stages)]
    counts[0] -= head
    counts[-1] -= tail
    if stages % pipeline or min(counts) < 0:
        raise ValueError(
            f"{row.blocks} blocks do not make {stages} stages on {pipeline} ranks; give other "
            "--parallelism.pipeline_parallel_layers_per_stage"
        )
    return stage_sizes(counts, row)


def _named_stages(parts: Sequence[str], row: BlockRow | None, profile: ModelProfile, pipeline: int) -> tuple[int, ...]:
    """Number of layers on each stage, from the names of its modules: blocks by their number, others by the model's own
    names."""
    names = [[name.strip("'\"[] ") for name in part.split(",")] for part in parts]
    if len(names) % pipeline:
        raise ValueError(
            f"--parallelism.module_fqns_per_model_part has {len(names)} parts, no multiple of {pipeline} ranks"
        )
    if row is None:
        held = [{layer.name: None for layer in profile.layers if {*layer.modules} & {*part}} for part in names]
        order = [name for part in held for name in part]
        if order != [layer.name for layer in profile.layers]:
            raise ValueError(
                "--parallelism.module_fqns_per_model_part does not name every module of the model once, in order"
            )
        return tuple(len(part) for part in held)
    numbers = [[int(n.rpartition(".")[2]) for n in part if n.rpartition(".")[2].isdecimal()] for part in names]
    if [number for part in numbers for number in part] != list(range(row.blocks)):
        raise ValueError(
            f"--parallelism.module_fqns_per_model_part must name blocks 0 to {row.blocks - 1} once, in order; found "
            f"{sum(map(len, numbers))} of {row.blocks}"
        )
    return stage_sizes([len(part) for part in numbers], row)
