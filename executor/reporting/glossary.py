"""What the words of plans and reports mean: each in a sentence or two, for a reader of blog posts."""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A word of ours, or of the field, with what it means. spellings: how else it is written where it stands."""

    name: str
    says: str
    spellings: tuple[str, ...] = ()

    def pattern(self) -> re.Pattern[str]:
        """Where it stands in a text, as a word of its own."""
        words = "|".join(re.escape(each) for each in sorted((self.name, *self.spellings), key=len, reverse=True))
        return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")


TERMS = (
    Term("DDP", "Distributed data parallel: each GPU has the whole model and its own samples; gradients are averaged."),
    Term(
        "FSDP",
        "Fully sharded data parallel, which is ZeRO-3: every GPU keeps a share of parameters, gradients and optimizer "
        "state, and gathers the parameters of a layer while it is computed.",
    ),
    Term("HSDP", "FSDP within groups of GPUs (a host, say), and replicas of these groups: HSDP 2x4 is 2 groups of 4."),
    Term(
        "ZeRO-1",
        "Optimizer state is sharded over data ranks; parameters and gradients are whole while a step runs "
        "(DeepSpeed's stage 1, Megatron's distributed optimizer).",
    ),
    Term("ZeRO-2", "ZeRO-1, and gradients are sharded, too: they are reduced after every micro-batch."),
    Term("ZeRO-3", "ZeRO-2, and parameters are sharded, too: the same as FSDP."),
    Term(
        "TP",
        "Tensor parallel: the matrices of each layer are cut over GPUs, which exchange activations in every layer; "
        "it wants fast links, so it usually stays inside a host.",
        ("tensor parallelism",),
    ),
    Term(
        "sequence parallel",
        "Between the cut matrices of tensor parallelism each GPU holds a slice of every sequence, so that norms and "
        "dropout are not computed, nor their activations kept, on all of them.",
        ("SP",),
    ),
    Term(
        "PP",
        "Pipeline parallel: consecutive layers form stages on different GPUs; micro-batches pass through them one "
        "after the other.",
        ("pipeline parallelism",),
    ),
    Term(
        "CP",
        "Context parallel: each GPU holds a part of every sequence; attention exchanges keys and values (ring: they "
        "go round; all-to-all: sequence parts become heads, as in Ulysses; all-gather: each collects all of them).",
        ("context parallelism",),
    ),
    Term("EP", "Expert parallel: the experts of a mixture-of-experts layer lie on different GPUs, and tokens travel."),
    Term("stage", "Consecutive layers of the model that one pipeline rank computes.", ("stages",)),
    Term("virtual stage", "One of several stages of the same pipeline rank: PP 4 x 2 is 4 ranks with 2 stages each."),
    Term("micro-batch", "The samples that one data rank passes through the model at once; gradients add up over them."),
    Term("global batch", "Samples of one optimizer step, over all GPUs; the same for every plan that is compared."),
    Term("step", "One optimizer step: forward and backward of the global batch, and the update of the parameters."),
    Term("GPipe", "A pipeline schedule: all micro-batches go forward, then all backward; it keeps most activations."),
    Term("1F1B", "A pipeline schedule: after a start-up each stage alternates one forward and one backward."),
    Term(
        "interleaved",
        "1F1B with several stages on each rank: a smaller bubble for more messages between ranks.",
        ("interleaved 1F1B",),
    ),
    Term(
        "ZB-V",
        "A zero-bubble pipeline schedule: the backward of weights is done apart from that of activations and fills the "
        "gaps; each rank holds two stages, placed in a V, so that first and last share a rank.",
        ("ZBV",),
    ),
    Term("ZB-H1", "A zero-bubble pipeline schedule that keeps no more activations than 1F1B."),
    Term("ZB-H2", "A zero-bubble pipeline schedule that idles less than ZB-H1 and keeps more activations."),
    Term(
        "launch",
        "Time in which a GPU waits for the CPU, which launches its kernels one by one: kernels of small layers end "
        "before the next one is launched. Larger micro-batches, fewer sharded layers and compiled ones wait less.",
    ),
    Term("bubble", "Time in which a pipeline rank has nothing to compute: at the start and the end of a step."),
    Term(
        "offload",
        "Kept in the host's memory instead of the GPU's, and brought back in time: what layers keep for backward, or "
        "the optimizer, whose step is done there, too.",
        ("in host memory",),
    ),
    Term(
        "recompute",
        "Activation checkpointing: what backward needs is not kept but computed again. full: the whole layer; "
        "selective: all but matmuls and attention; attention: its scores only; parts: named submodules.",
        ("activation checkpointing", "recomputed"),
    ),
    Term("activations", "What forward keeps for backward, of all micro-batches that are under way.", ("activ",)),
    Term(
        "gathered",
        "Whole copies of sharded parameters: of the layers just computed (FSDP), or of all (ZeRO-1 and ZeRO-2).",
        ("kept gathered",),
    ),
    Term("reshard", "Give gathered parameters back after a layer's forward, and gather them again for its backward."),
    Term("transient", "Memory that is needed for a moment within a layer and is free after it."),
    Term("exposed", "Communication during which nothing is computed; what runs beside compute costs little."),
    Term("budget", "Device memory less the share left free (--memory-risk, --memory-margin): what a plan may use."),
    Term(
        "MFU",
        "Model FLOPs utilization: the FLOPs that the model itself needs in a step, over what the GPUs could do at "
        "their dense peak in that time. 35-50% is usual for large models.",
    ),
    Term(
        "cost model", "The formulas that predict time and memory of a plan on these devices; plans are compared by it."
    ),
    Term(
        "proof",
        "What the search shows beside the plan: a step time that no other plan can beat under the cost model.",
        ("certificate",),
    ),
    Term("bound", "A step time that no plan in the space can beat under the cost model.", ("proven bound",)),
    Term("gap", "How far the bound is below the step of the fastest plan found, as a share of that step."),
    Term(
        "optimal",
        "The fastest plan found is within 0.1% of the proven bound; otherwise the plan is called feasible.",
        ("feasible",),
    ),
    Term("closed form", "A formula for a pipeline's step; the search narrows by it before it plays the step out."),
    Term("space", "All plans that are searched: degrees, micro-batch, schedule, cut, recompute, axis order."),
    Term("layout", "How a plan splits the work: its degrees and its schedule, as in FSDP 4 + TP 2."),
    Term("band", "Around a prediction: where 8 of 10 published runs of the kind fell."),
    Term("profile", "What a model's layers do and hold, seen on fake tensors once; planning needs nothing else."),
    Term("pin", "A choice that you make and the search keeps: --pin tensor=4."),
    Term(
        "rank",
        "One process of a job, on a GPU of its own. Data ranks train on different samples; tensor, context, expert and "
        "pipeline ranks share the work on the same ones.",
        ("ranks",),
    ),
    Term(
        "host",
        "A machine with its GPUs, also called a node: links inside it are faster than the network between hosts.",
        ("hosts",),
    ),
    Term("degree", "The number of ranks over which one kind of parallelism splits the work: 4 in TP 4.", ("degrees",)),
    Term(
        "axis",
        "The ranks are arranged as a mesh with an axis for each kind of parallelism; those of the last axis are "
        "neighbours, so they have the fastest links.",
        ("axes", "mesh"),
    ),
    Term("schedule", "The order in which the ranks of a pipeline run forwards and backwards: GPipe, 1F1B, ZB-V, ..."),
    Term("replica", "A whole copy of the model, or of a pipeline stage, with samples of its own.", ("replicas",)),
    Term(
        "fake tensors",
        "PyTorch's tensors with shapes and dtypes, but without numbers: a model runs on them without memory or a GPU.",
    ),
    Term(
        "decides by values",
        "Said of a model whose code asks for numbers in its tensors, as an early exit does: what it computes "
        "depends on the data.",
    ),
    Term("shard", "A rank's part of a tensor that several ranks hold together.", ("shards", "sharded")),
    Term(
        "set-up",
        'A layout as people write it, "tp=4 pp=2", fsdp or megatron; what it leaves open is chosen at its best.',
        ("set-ups",),
    ),
)


def term(name: str) -> Term:
    """The term of this name or spelling, in any case. Raises ValueError with the nearest ones."""
    spelled = {spelling.lower(): each for each in TERMS for spelling in (each.name, *each.spellings)}
    wanted = name.strip().lower()
    if wanted not in spelled:
        near = difflib.get_close_matches(wanted, spelled, n=3) or [s for s in spelled if wanted in s][:3]
        hint = f"did you mean {', '.join(near)}?" if near else "`plan glossary` lists all"
        raise ValueError(f"no word {name!r} in the glossary; {hint}")
    return spelled[wanted]


def terms_in(text: str) -> list[Term]:
    """The terms that stand in a text, in the glossary's order."""
    return [each for each in TERMS if each.pattern().search(text)]
