"""Plans as arguments of Megatron-LM, and its arguments as a Layout; one table of options serves both ways."""

import itertools
from collections.abc import Mapping, Sequence

from ...profiler.model.model_profile import ModelProfile
from ...profiler.model.source import LORA, PADDED
from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, ContextKind, Plan, Recompute, parts_in_words, parts_of, recompute_of_parts
from ..plan.frameworks import DATA_OUTERMOST
from ..plan.legality import has_experts
from ..plan.training import Precision
from .export_notes import (
    blocks_by_stage,
    kept_note,
    order_note,
    ordered,
    recomputed_blocks,
    row_of,
    sync_note,
    whole_layers_notes,
    with_sharded_optimizer,
)
from .from_flags import Flags, Sizes, check_known, clash, grouped, idle, left_over, needed_row, stage_sizes, twice
from .imports import Layout
from .megatron_layout import layout_string, parse_layout

_SIZES = frozenset(
    {
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--num-distributed-optimizer-instances",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--micro-batch-size",
        "--global-batch-size",
        "--seq-length",
        "--num-layers",
        "--recompute-num-layers",
        "--make-vocab-size-divisible-by",
    }
)

FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
"""Names that models have for the part of a block that --recompute-modules calls mlp, or moe if it has experts."""

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""[ZeRO stage] -> --data-parallel-sharding-strategy of Megatron FSDP."""

_WORDS: dict[str, tuple[str, ...]] = {
    "--pipeline-model-parallel-layout": (),
    "--cp-comm-type": ("p2p", "a2a", "allgather"),
    "--data-parallel-sharding-strategy": _STRATEGIES,
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-modules": ("core_attn", "mlp", "moe"),
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp4-format": ("e2m1",),
    "--optimizer": ("adam", "sgd"),
    "--ckpt-format": (),
    "--optimizer-offload-fraction": (),
}

_SWITCHES = frozenset(
    {
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--torch-fsdp2-no-reshard-after-forward",
        "--no-gradient-accumulation-fusion",
        "--use-tp-pp-dp-mapping",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--recompute-activations",
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
        "--bf16",
        "--fp16",
    }
)

_REFUSED: dict[str, str] = {
    "--hierarchical-context-parallel-sizes": "context ranks in several levels are not priced",
    "--distribute-saved-activations": "saved activations spread over tensor ranks are not priced",
    "--cpu-offloading-num-layers": "activations that wait on the host are not priced by number of layers",
    "--main-grads-dtype": "gradients in another dtype than fp32 are not priced",
    "--main-params-dtype": "main parameters in another dtype than fp32 are not priced",
    "--exp-avg-dtype": "optimizer state in another dtype than fp32 is not priced",
    "--exp-avg-sq-dtype": "optimizer state in another dtype than fp32 is not priced",
    "--microbatch-group-size-per-virtual-pipeline-stage": "interleaving in groups of another size is not priced",
    "--mtp-num-layers": "multi-token prediction layers are priced where the model has them, not by a flag",
    "--enable-full-sharding-in-hsdp": "optimizer state sharded further than gradients is not priced",
    "--heterogeneous-layers-config-path": "blocks that a file makes unequal are not read; give the model itself",
    "--yaml-cfg": "a YAML file is not read; give its settings as flags",
    "--pipeline-model-parallel-split-rank": "encoder and decoder on pipelines of their own are not priced",
    "--model-parallel-size": "Megatron-LM has dropped it; use --tensor-model-parallel-size",
    "--batch-size": "Megatron-LM has dropped it; use --micro-batch-size",
    "--checkpoint-activations": "Megatron-LM has dropped it; use --recompute-granularity full",
}

_LEFT_OUT: dict[str, str] = {
    "--rampup-batch-size": "steps are priced at the whole global batch, to which it grows",
    "--decrease-batch-size-if-needed": "steps are priced at the global batch that is said",
    "--grad-reduce-in-bf16": "gradients are priced as reduced in fp32, at twice the bytes",
    "--fp8-param-gather": "parameters are priced as gathered in bf16, at twice the bytes",
    "--defer-embedding-wgrad-compute": "the head's weight gradients are priced where they fall due",
}
"""Option that is read, but not priced -> what is priced instead."""

FLAGS = Flags(sizes=_SIZES, words=_WORDS, switches=_SWITCHES, refused=_REFUSED, left_out=_LEFT_OUT)
"""Megatron-LM's options as of megatron/training/arguments.py; see targets.py for the version."""

_CONTEXT: dict[ContextKind, str] = {"ring": "p2p", "all_to_all": "a2a", "all_gather": "allgather"}
_PRECISION: dict[Precision, tuple[str, ...]] = {
    "fp8": ("--bf16", "--fp8-format", "hybrid"),
    "fp4": ("--bf16", "--fp4-format", "e2m1"),
    "bf16": ("--bf16",),
    "fp16": ("--fp16",),
    "fp32": (),
}


def megatron_words(plan: Plan, notes: list[str]) -> list[str]:
    """Megatron-LM's arguments for a plan. What they cannot express is added to `notes`. Raises ValueError for what
    Megatron-LM cannot do."""
    degrees, stage, row = plan.degrees, plan.zero_stage, row_of(plan, "megatron")
    pipelined = degrees.pipeline > 1
    if plan.schedule not in ("none", "1f1b", "interleaved"):
        raise ValueError(
            f"schedule {plan.schedule}: Megatron-LM runs 1f1b and interleaved; plan with --pin schedule=1f1b"
        )
    if plan.schedule == "interleaved" and plan.num_microbatches % degrees.pipeline:
        raise ValueError(
            f"{plan.num_microbatches} micro-batches on {degrees.pipeline} stages: Megatron-LM interleaves in groups of "
            f"{degrees.pipeline}; plan with --pin schedule=1f1b, or another --global-batch"
        )
    if stage >= 2 and pipelined:
        raise ValueError(
            f"ZeRO-{stage} in a pipeline of {degrees.pipeline}: Megatron FSDP goes with tensor, context and expert "
            "parallelism, and its pipelines shard the optimizer only; plan with --pin pipeline=1, or compare with "
            + with_sharded_optimizer(plan)
        )
    words = ["--tensor-model-parallel-size", str(degrees.tensor)]
    words += ["--sequence-parallel"] if plan.sequence_parallel else []
    words += ["--pipeline-model-parallel-size", str(degrees.pipeline), "--num-layers", str(row.blocks)]
    words += _cuts(plan, row)
    if degrees.context > 1:
        words += ["--context-parallel-size", str(degrees.context), "--cp-comm-type", _CONTEXT[plan.context_kind]]
    words += _experts(plan)
    words += _data(plan, stage, notes)
    words += ["--micro-batch-size", str(plan.micro_batch), "--global-batch-size", str(plan.training.global_batch)]
    if plan.training.seq_len is not None:
        words += ["--seq-length", str(plan.training.seq_len)]
    multiple = plan.model.source.partition(PADDED)[2].partition(LORA)[0]
    if multiple.isdecimal() and int(multiple) % degrees.tensor == 0:
        words += ["--make-vocab-size-divisible-by", str(int(multiple) // degrees.tensor)]  # it multiplies by the ranks
    words += _PRECISION[plan.training.precision]
    words += _recompute(plan, row, notes)
    words += ["--optimizer", "adam" if plan.training.optimizer == "adamw" else "sgd"]
    if plan.offload_optimizer:
        words += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0", "--use-precision-aware-optimizer"]
    fixed = (AXES,) if stage >= 2 or degrees.context > 1 else (AXES, DATA_OUTERMOST)
    if ordered(plan, plan.mesh_axes) == ordered(plan, AXES):
        pass
    elif DATA_OUTERMOST in fixed and ordered(plan, plan.mesh_axes) == ordered(plan, DATA_OUTERMOST):
        words.append("--use-tp-pp-dp-mapping")
    else:
        notes.append(order_note(plan, "megatron"))
    notes += whole_layers_notes(plan)
    return words


def _cuts(plan: Plan, row: BlockRow) -> list[str]:
    """Arguments that say which stage holds which blocks: none if stages are even, else the layout string."""
    degrees = plan.degrees
    if degrees.pipeline == 1:
        return []
    counts = blocks_by_stage(plan, row, "megatron")
    if len(set(counts)) == 1:
        return ["--num-layers-per-virtual-pipeline-stage", str(counts[0])] if degrees.virtual_stages > 1 else []
    return ["--pipeline-model-parallel-layout", layout_string(counts)]


def _experts(plan: Plan) -> list[str]:
    """Arguments on experts. They stay whole; beside tensor parallelism that has to be said, as Megatron-LM would cut
    each of them."""
    degrees = plan.degrees
    words = ["--expert-model-parallel-size", str(degrees.expert)] if degrees.expert > 1 else []
    if degrees.tensor == 1 or not plan.model.expert_modules:
        return words
    if not plan.sequence_parallel:
        raise ValueError(
            f"tensor={degrees.tensor} without sequence parallelism: Megatron-LM trains mixtures of experts on tensor "
            "ranks only with it; plan with --pin sequence=on or --pin tensor=1"
        )
    return [*words, "--expert-tensor-parallel-size", "1"]


def _data(plan: Plan, stage: int, notes: list[str]) -> list[str]:
    """Arguments on how state is sharded over data ranks, and on what hides behind compute."""
    degrees = plan.degrees
    if degrees.data * degrees.context == 1:
        return []
    words = ["--overlap-grad-reduce"]
    if stage == 0:
        return words
    words += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if degrees.data_replicate > 1:
        words += ["--num-distributed-optimizer-instances", str(degrees.data_replicate)]
    if stage >= 2:
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", _STRATEGIES[stage]]
        words += ["--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor"]
        notes += kept_note(plan, "megatron") + sync_note(plan, "megatron")
    return words


def _recompute(plan: Plan, row: BlockRow, notes: list[str]) -> list[str]:
    kind, counts, sizes = recomputed_blocks(plan, row, "megatron", notes)
    if kind == "none":
        return []
    if kind == "selective":
        raise ValueError(
            "recompute=selective (all but matmuls and attention) is no --recompute-modules of Megatron-LM; plan with "
            "--pin recompute=attention, its core_attn, or --pin recompute=full"
        )
    if kind == "attention" or parts_of(kind):
        module = _module_of(plan, row, kind) if parts_of(kind) else ""
        if counts != sizes:
            notes.append(
                f"recompute of {module or kind} in {sum(counts)} of {sum(sizes)} blocks becomes all of them: "
                "'selective' of Megatron-LM is for every block; less memory, more time"
            )
        notes += [f"{module} of Megatron-LM also runs the norm before it again, where that is fused into it"] * bool(
            module
        )
        return ["--recompute-granularity", "selective", *(["--recompute-modules", module] if module else [])]
    if counts == sizes:
        return ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    most = max(counts)
    if not _recomputes_first(plan, row):
        notes.append(
            f"the plan recomputes other blocks than the first {most} of each stage, which is what Megatron-LM's block "
            "method takes: the peak may be higher; plan check --megatron-args tells"
        )
    if any(count != min(most, size) for count, size in zip(counts, sizes, strict=True)):
        notes.append(
            f"recompute of {', '.join(map(str, counts))} blocks of the stages becomes {most} of each: "
            "--recompute-num-layers is one number for all stages; less memory, more time"
        )
    return ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", str(most)]


def _module_of(plan: Plan, row: BlockRow, recompute: Recompute) -> str:
    """Name that --recompute-modules has for the part which is recomputed. Raises ValueError if it has none."""
    named = parts_of(recompute)
    blocks = [layer for place, layer in enumerate(plan.layers) if row.holds(place)]
    routed = [any(f"{bank}.".startswith(f"{x.root}.{named[0]}.") for bank in plan.model.expert_modules) for x in blocks]
    if len(named) > 1 or named[0] not in FEED_FORWARD or len(set(routed)) > 1:
        why = "dense in some blocks and of experts in others" if len(set(routed)) > 1 else "not the feed-forward alone"
        raise ValueError(
            f"recompute of {parts_in_words(recompute)}: {why}, so no --recompute-modules of Megatron-LM that does the "
            "same; plan with --pin recompute=attention, its core_attn, or --pin recompute=full"
        )
    return "moe" if routed[0] else "mlp"


def _part_of(module: str, profile: ModelProfile) -> Recompute:
    """The recompute that a word of --recompute-modules means for a model. Raises ValueError if the model has no such
    part."""
    blocks = [c for c in profile.classes if any(part.name in FEED_FORWARD for part in c.parts)]
    names = {part.name for c in blocks for part in c.parts if part.name in FEED_FORWARD}
    routed = {any(f"{bank.module}.".startswith(f"{name}.") for bank in c.experts for name in names) for c in blocks}
    if len(names) != 1 or routed != {module == "moe"}:
        raise ValueError(f"--recompute-modules {module}: {profile.name} has no row of blocks with such a part alone")
    return recompute_of_parts(sorted(names))


def _recomputes_first(plan: Plan, row: BlockRow) -> bool:
    """Whether on every stage the blocks that recompute are its first ones."""
    place = 0
    for stage in plan.stages:
        again = [x.recompute != "none" for p, x in enumerate(stage.layers, place) if row.holds(p)]
        if again != sorted(again, reverse=True):
            return False
        place += len(stage.layers)
    return True


def read_megatron(words: Sequence[str], num_devices: int, profile: ModelProfile) -> Layout:
    """The layout of Megatron-LM arguments on a number of GPUs.

    Raises ValueError that names the option which is wrong, not understood, or for another model.
    """
    said, ignored, notes = _read_words(words)
    size = Sizes(said, "megatron")
    tensor, context = size("--tensor-model-parallel-size"), size("--context-parallel-size")
    pipeline = size("--pipeline-model-parallel-size")
    notes += _check_together(said, tensor, context, pipeline)
    data = left_over(num_devices, tensor * pipeline * context, "tensor x pipeline x context")
    row = block_row(profile.layers)
    if row is not None and size("--num-layers", row.blocks) != row.blocks:
        raise ValueError(
            f"--num-layers {size('--num-layers')}, but {profile.name} has {row.blocks} blocks: give the model that the "
            "arguments are for"
        )
    zero, replicas = _read_zero(said, size, data, context)
    _check_experts(said, size, zero, profile)
    counts = _read_blocks(said, size, pipeline, row, profile)
    virtual = len(counts) // pipeline if counts else 1
    recompute, recomputed = _read_recompute(said, size, profile)
    if "--micro-batch-size" not in said:
        notes.append("--micro-batch-size is not given: chosen at its best")
    precision = _read_precision(said)
    if precision == "fp32":
        notes.append("neither --bf16 nor --fp16 is given, so Megatron-LM trains in fp32")
    micro = size("--micro-batch-size") if "--micro-batch-size" in said else None
    batch = size("--global-batch-size") if "--global-batch-size" in said else None
    return Layout(
        target="megatron",
        data_replicate=replicas if zero else data,
        data_shard=data // replicas if zero else 1,
        tensor=tensor,
        context=context,
        expert=size("--expert-model-parallel-size"),
        pipeline=pipeline,
        virtual_stages=virtual,
        context_kind={word: kind for kind, word in _CONTEXT.items()}[said.get("--cp-comm-type", "p2p")],
        sequence="--sequence-parallel" in said and tensor > 1,
        schedule="none" if pipeline == 1 else "interleaved" if virtual > 1 else "1f1b",
        reshard="all" if zero == 3 else "none",
        sync_every=zero >= 2,
        mesh_axes=DATA_OUTERMOST if "--use-tp-pp-dp-mapping" in said else AXES,
        stage_sizes=stage_sizes(counts, row),
        micro_batch=micro,
        global_batch=batch if batch is not None or micro is None else micro * data,
        recompute=recompute,
        recomputed=recomputed,
        seq_len=size("--seq-length") if "--seq-length" in said else None,
        precision=precision,
        software="megatron-core",
        sgd=said["--optimizer"] == "sgd" if "--optimizer" in said else None,
        offload_optimizer="--optimizer-cpu-offload" in said,
        ignored=tuple(ignored),
        notes=tuple(notes),
    )


_VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_ONE_OF = (
    ("--bf16", "--fp16"),
    ("--use-torch-fsdp2", "--use-megatron-fsdp"),
    ("--use-torch-fsdp2", "--use-distributed-optimizer"),
    *(("--pipeline-model-parallel-layout", other) for other in (*_ENDS, *_COUNTED)),
    *itertools.product(_ENDS, _COUNTED),
)
"""Pairs of options that Megatron-LM refuses together."""


def _check_together(said: Mapping[str, str], tensor: int, context: int, pipeline: int) -> list[str]:
    """Notes on options that have no effect. Raises ValueError that names two options which contradict each other."""
    clash(said, _ONE_OF, "Megatron-LM")
    granularity = said.get("--recompute-granularity")
    if granularity == "full" and "--recompute-activations" in said:
        clash(said, [("--recompute-activations", "--recompute-granularity")], "Megatron-LM, as selective and full,")
    if granularity == "selective":
        clash(said, [("--recompute-granularity", "--recompute-method")], "Megatron-LM, whose method goes with full,")
    virtual = next((name for name in _VIRTUAL if name in said), None)
    if virtual is not None and pipeline == 1:
        raise ValueError(
            f"{virtual} {said[virtual]} and --pipeline-model-parallel-size 1: chunks of stages need a pipeline; leave "
            "one out"
        )
    sharded = "--use-distributed-optimizer" in said or "--use-megatron-fsdp" in said
    unsaid = granularity is None and "--recompute-activations" not in said
    return idle(
        said,
        [
            ("--sequence-parallel", "without tensor parallelism", tensor == 1),
            ("--cp-comm-type", "without --context-parallel-size", context == 1),
            ("--recompute-method", "without --recompute-granularity", unsaid),
            ("--recompute-num-layers", "without --recompute-granularity", unsaid),
            ("--data-parallel-sharding-strategy", "without --use-megatron-fsdp", "--use-megatron-fsdp" not in said),
            (
                "--torch-fsdp2-no-reshard-after-forward",
                "without --use-torch-fsdp2",
                "--use-torch-fsdp2" not in said,
            ),
            ("--num-distributed-optimizer-instances", "without --use-distributed-optimizer", not sharded),
        ],
    )


def _read_words(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(option -> its value, options that are ignored, notes on options that are given twice or not priced). Raises
    ValueError for options that are refused."""
    said: dict[str, str] = {}
    ignored: list[str] = []
    options = grouped(words)
    notes = twice((name, name, " ".join(values)) for name, values in options if name in FLAGS.known)
    for name, values in options:
        if name in FLAGS.refused:
            raise ValueError(f"{name}: {FLAGS.refused[name]}")
        if name in FLAGS.left_out:
            notes.append(f"{' '.join((name, *values))} is not priced: {FLAGS.left_out[name]}")
            continue
        if name not in FLAGS.known:
            check_known(name, FLAGS.spelled)
            ignored.append(name)
            continue
        if name in FLAGS.switches:
            if values:
                raise ValueError(f"{name} {values[0]}: it takes no value")
            said[name] = "true"
            continue
        if len(set(values)) != 1:
            raise ValueError(f"{name} {' '.join(values)}: give one value; a value for each layer is not read")
        allowed = FLAGS.words.get(name, ())
        if allowed and values[0] not in allowed:
            raise ValueError(f"{name} {values[0]}: {' and '.join(allowed)} can be priced")
        said[name] = values[0]
    return said, ignored, notes


def _read_zero(said: Mapping[str, str], size: Sizes, data: int, context: int) -> tuple[int, int]:
    """(ZeRO stage, number of replicas of the shards)."""
    replicas = size("--num-distributed-optimizer-instances")
    if data % replicas:
        raise ValueError(f"--num-distributed-optimizer-instances {replicas} does not divide {data} data ranks")
    if "--use-torch-fsdp2" in said:
        return (2 if "--torch-fsdp2-no-reshard-after-forward" in said else 3), replicas
    if "--use-megatron-fsdp" in said:
        stage = _STRATEGIES.index(said.get("--data-parallel-sharding-strategy", _STRATEGIES[0]))
    else:
        stage = int("--use-distributed-optimizer" in said and data * context > 1)
    if stage == 0 and context > 1:
        raise ValueError(
            f"--context-parallel-size {context} without --use-distributed-optimizer: context ranks that each hold all "
            "of the optimizer's state are not priced; add --use-distributed-optimizer"
        )
    return stage, replicas


def _check_experts(said: Mapping[str, str], size: Sizes, zero: int, profile: ModelProfile) -> None:
    """Raise ValueError if single experts are cut, or if ranks share experts but no optimizer state."""
    tensor, expert = size("--tensor-model-parallel-size"), size("--expert-model-parallel-size")
    each = size("--expert-tensor-parallel-size", tensor)
    if has_experts(profile) and each > 1:
        raise ValueError(
            f"--expert-tensor-parallel-size {each}{'' if '--expert-tensor-parallel-size' in said else ' (the default)'}"
            ": experts that are cut are not priced; give --expert-tensor-parallel-size 1"
        )
    if expert > 1 and zero == 0:
        raise ValueError(
            f"--expert-model-parallel-size {expert} without --use-distributed-optimizer: data ranks that share experts "
            "and nothing else are not priced; add --use-distributed-optimizer"
        )


def _read_precision(said: Mapping[str, str]) -> Precision:
    """The first precision whose own option is given, such as --fp8-format for fp8. fp8 and fp4 are looked for first,
    because --bf16 is given with them, too."""
    own = {name: [word for word in words if word.startswith("--")][-1:] for name, words in _PRECISION.items()}
    return next(name for name, words in own.items() if said.keys() >= set(words))


def _read_recompute(said: Mapping[str, str], size: Sizes, profile: ModelProfile) -> tuple[Recompute, int | None]:
    """(kind of recompute, number of blocks on each stage that recompute; None: all)."""
    kind = "selective" if "--recompute-activations" in said else said.get("--recompute-granularity")
    if kind is None:
        return "none", None
    if kind == "selective":
        module = said.get("--recompute-modules", "core_attn")
        return "attention" if module == "core_attn" else _part_of(module, profile), None
    method = said.get("--recompute-method")
    if method is None or "--recompute-num-layers" not in said:
        raise ValueError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    count = size("--recompute-num-layers")
    if method == "uniform" and count > 1:
        raise ValueError(
            f"--recompute-method uniform with --recompute-num-layers {count}: groups of several blocks are not priced; "
            "give 1, or --recompute-method block"
        )
    return "full", None if method == "uniform" else count


def _read_blocks(
    said: Mapping[str, str], size: Sizes, pipeline: int, row: BlockRow | None, profile: ModelProfile
) -> tuple[int, ...]:
    """Number of blocks on each stage, in the order of the chain; () without a pipeline."""
    ways = [
        name
        for name in (
            "--pipeline-model-parallel-layout",
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
        )
        if name in said
    ]
    if len(ways) > 1:
        raise ValueError(f"{' and '.join(ways)}: Megatron-LM takes one of them")
    if pipeline == 1:
        return ()
    row = needed_row(row, profile, pipeline)
    if "--pipeline-model-parallel-layout" in said:
        return parse_layout(said["--pipeline-model-parallel-layout"], pipeline, row.blocks)
    head = int("--account-for-embedding-in-pipeline-split" in said)
    tail = int("--account-for-loss-in-pipeline-split" in said)
    ends = {
        index: size(name)
        for index, name in ((0, "--decoder-first-pipeline-num-layers"), (-1, "--decoder-last-pipeline-num-layers"))
        if name in said
    }
    virtual = size("--num-virtual-stages-per-pipeline-rank")
    each, rest = divmod(row.blocks + head + tail - sum(ends.values()), pipeline - len(ends))
    if "--num-layers-per-virtual-pipeline-stage" in said:
        of_chunk = size("--num-layers-per-virtual-pipeline-stage")
        virtual, over = divmod(each, of_chunk)
        rest += over
    if rest or each % virtual or any(count % virtual for count in ends.values()) or each < 1:
        raise ValueError(
            f"{row.blocks} blocks do not spread evenly over {pipeline} stages x {virtual}; Megatron-LM takes uneven "
            "ones as --pipeline-model-parallel-layout"
        )
    counts = [each // virtual] * (pipeline * virtual)
    for index, count in ends.items():
        for chunk in range(virtual):
            counts[chunk * pipeline + index % pipeline] = count // virtual
    counts[0] -= head
    counts[-1] -= tail
    return tuple(counts)
