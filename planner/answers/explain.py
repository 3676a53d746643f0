"""Why one plan is chosen and not another, in words with numbers."""

import math
from collections.abc import Iterator

from ...profiler.machine.units import counted, format_bytes, format_seconds
from ..cost.bands import is_cpu
from ..cost.estimate import Estimate
from ..cost.software import load_software
from ..cost.stage_models import stage_kinds
from ..plan.document import MeasuredPlan, Plan, Recompute, parts_in_words
from ..plan.layer_counts import blocks_at, parts_kinds, recompute_shares
from ..plan.making import shape_of
from .verdict import Verdict, VerdictKind

_OFFSET = 1.5
"""If a cause costs at least so many times the whole difference, what offsets it is told, too."""

CAUSES = {
    "compute": "compute",
    "recompute": "recompute",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "exchange of tokens with experts",
    "offload": "waiting for the host's memory",
    "launch": "waiting for the CPU to launch kernels",
    "data": "waiting for gradients and parameters",
    "pipeline": "pipeline bubble and waiting for stages",
    "optimizer": "optimizer step",
    "fixed": "time that the host adds to every step",
}
"""Item of a breakdown -> how people call it."""


def does_not_fit(plan: Plan, found: Estimate) -> Verdict:
    """The verdict on a plan that is over its budget: on which stage, by how much, and the largest item there."""
    stage, memory = max(enumerate(found.memory), key=lambda pair: pair[1].over_bytes)
    name, size = max(memory.items.items(), key=lambda item: item[1])
    where = rank_in_words(plan, stage)
    where += f" ({memory.device})" if memory.device and len(found.memory) > 1 else ""
    needs = f"needs {format_bytes(memory.device_bytes)} and may use {format_bytes(memory.budget_bytes)}"
    detail = f"{where} {needs} ({name} alone {format_bytes(size)})"
    return Verdict(VerdictKind.DOES_NOT_FIT, detail, stage=stage, over_bytes=memory.over_bytes)


def rank_in_words(plan: Plan, rank: int) -> str:
    """A pipeline rank as sentences call it: "stage 3"; "pipeline rank 3" if ranks hold several stages; "every GPU"
    without a pipeline."""
    if plan.degrees.pipeline == 1:
        return "every GPU"
    noun = plan.degrees.rank_noun
    return f"{'pipeline ' if noun == 'rank' else ''}{noun} {rank}"


def causes_apart(other: Estimate, best: Estimate) -> dict[str, float]:
    """Item of the breakdown -> seconds that `other` spends on it beyond those of `best`, largest first; negative if it
    spends less."""
    names = (name for name in CAUSES if name in other.breakdown or name in best.breakdown)
    extra = {name: other.breakdown.get(name, 0.0) - best.breakdown.get(name, 0.0) for name in names}
    return dict(sorted(extra.items(), key=lambda item: -item[1]))


def compared(other: Estimate, best: Estimate, why_not: str | None = None) -> Verdict:
    """The verdict on `other`: how much slower it is, and the cause that costs it most. If it is faster, why it is not
    the plan: `why_not`, or a reason from simplicity.py (memory to spare is only one if `other` needs more)."""
    ratio = other.step_time_s / best.step_time_s - 1.0
    if abs(ratio) < 0.0005:
        return Verdict(VerdictKind.AS_FAST, ratio=ratio)
    if ratio < 0:
        needs_more = other.peak_device_bytes > best.peak_device_bytes
        simpler = "less simple or with less memory to spare" if needs_more else "less simple"
        return Verdict(VerdictKind.FASTER, why_not or simpler, ratio)
    return Verdict(VerdictKind.SLOWER, _trade(other, best), ratio)


def unless_measured(measured: MeasuredPlan | None, why_not: str | None = None) -> str | None:
    """Why a layout that is predicted to be faster is not the plan: `why_not`, but for a tuned plan what it was measured
    to take."""
    if measured is None:
        return why_not
    return f"by prediction: the plan was chosen for what it measured, {format_seconds(measured.step_time_s)}"


def _trade(other: Estimate, best: Estimate) -> str:
    """The cause that costs `other` most; with what it saves, if that offsets most of it: "624 ms more compute, 590 ms
    less ..."."""
    apart = causes_apart(other, best)
    (cause, extra_s), (saving, saved_s) = next(iter(apart.items())), list(apart.items())[-1]
    words = f"{format_seconds(extra_s)} more {CAUSES[cause]}"
    longer_s = other.step_time_s - best.step_time_s
    if extra_s <= _OFFSET * longer_s or saved_s >= 0:
        return words
    return f"{words}, {format_seconds(-saved_s)} less {CAUSES[saving]}"


def reason(plan: Plan, found: Estimate, replicas: Verdict | None = None) -> str:
    """Reasons for the plan's main choices, one clause for each.

    replicas: the verdict on plain data parallelism, if it was priced.
    """
    degrees, reasons = plan.degrees, list(_why_on_kinds(plan, found))
    if degrees.sharded_over > 1:
        reasons.append(_why_sharded(replicas))
    if degrees.tensor > 1:
        inside = plan.cluster.group(degrees.tensor, plan.stride("tensor")).hosts == 1
        reasons.append(f"tensor parallelism {'stays inside a node' if inside else 'runs across nodes'}")
    if degrees.context > 1:
        tokens = (plan.training.seq_len or 0) // degrees.context
        reasons.append(
            f"context parallelism leaves {tokens:,} tokens of each sequence to a GPU, and waiting for keys and values "
            f"costs {found.breakdown.get('context', 0.0) / found.step_time_s:.0%}"
        )
    if degrees.expert > 1:
        share = found.breakdown.get("expert", 0.0) / found.step_time_s
        reasons.append(
            f"each GPU holds 1 of {degrees.expert} parts of the experts, and sending it tokens costs {share:.0%}"
        )
    if degrees.pipeline > 1:
        reasons.append(
            "stages send only activations; the bubble and waiting for other stages cost "
            f"{found.breakdown['pipeline'] / found.step_time_s:.0%}"
        )
    shares = recompute_shares(plan, _RECOMPUTED)
    reasons += [f"{share} {_recomputed(kind, share)} to fit" for kind, share in shares.items()]
    of_parts = recompute_shares(plan, parts_kinds(plan))
    reasons += [f"{share} recompute their {parts_in_words(kind)} to fit" for kind, share in of_parts.items()]
    if plan.offload_optimizer:
        reasons.append(
            "the optimizer is in host memory, as was asked for; its step and the way there cost "
            f"{found.breakdown['optimizer'] / found.step_time_s:.0%}"
        )
    if any(layer.offload for layer in plan.layers):
        waited = found.breakdown.get("offload", 0.0) / found.step_time_s
        reasons.append(f"what layers keep for backward is in host memory to fit, and waiting for it costs {waited:.0%}")
    if not reasons and degrees.num_devices == 1:
        return "everything fits on the one GPU, and nothing is recomputed"
    return "; ".join(reasons) or "everything fits without sharding, and replicas communicate least"


def _why_on_kinds(plan: Plan, found: Estimate) -> Iterator[str]:
    """Clauses on how the plan uses unequal devices; none if devices are equal."""
    cluster = plan.cluster
    if len(cluster.kinds) == 1:
        return
    shape = shape_of(plan)
    kinds = stage_kinds(cluster, shape)
    if kinds is None:
        slowest, smallest = cluster.device.name, format_bytes(cluster.device.memory)
        own = cluster.num_devices // math.gcd(*(part.num_devices for part in cluster.kinds))
        if len({(group.devices_per_host, group.device.model_dump_json(), group.link) for group in cluster.hosts}) == 1:
            yield (
                f"every stage has hosts whose links differ, so all count as the slowest "
                f"({cluster.between_hosts.bandwidth / 1e9:,.3g} GB/s per host); a pipeline of {own} stages, or a "
                "multiple, would give each stage hosts that are alike"
            )
            return
        mixed = "every stage has devices of several kinds" if shape.pipeline > 1 else "every GPU waits for all others"
        yield (
            f"{mixed}, so all count as the slowest ({slowest}) with the least memory "
            f"({smallest}); a pipeline of {own} stages, or a multiple, would give each its own kind"
        )
        return
    held: dict[str, tuple[int, int]] = {}
    for position, kind in enumerate(kinds):
        name = cluster.kind_names[kind]
        ranks, layers = held.get(name, (0, 0))
        held[name] = ranks + 1, layers + blocks_at(plan, position)
    each = plan.degrees.virtual_stages
    parts = (
        f"{counted(layers, 'layer')} in {counted(each * ranks, 'stage')} on {name}"
        for name, (ranks, layers) in held.items()
    )
    yield f"each stage is on one kind of device: {', '.join(parts)}"


_RECOMPUTED: dict[Recompute, str] = {
    "full": "are recomputed",
    "selective": "recompute all but matmuls and attention",
    "attention": "recompute their attention",
}


def _recomputed(kind: Recompute, share: str) -> str:
    """A clause on what layers recompute; share: "every layer" or "10 of 32 layers"."""
    if share != "every layer":
        return _RECOMPUTED[kind]
    return _RECOMPUTED[kind].replace("are ", "is ").replace("recompute ", "recomputes ").replace("their", "its")


def _why_sharded(replicas: Verdict | None) -> str:
    if replicas is None:
        return "model state is sharded, as every GPU would otherwise hold all of it"
    if replicas.kind is VerdictKind.DOES_NOT_FIT:
        return f"replicas (DDP) are out: {replicas.detail}"
    if replicas.kind is VerdictKind.SLOWER:
        return f"replicas (DDP) would {'take' if replicas.is_times_as_long else 'be'} {replicas}"
    return "sharding the model state costs no time here and leaves more memory free than replicas (DDP)"


def launch_advice(plan: Plan) -> list[str]:
    """A sentence of advice if the GPU's device file says nothing of its CPU, because it was made before `dispatch`
    existed."""
    device, eager = plan.cluster.device, load_software(plan.training.software).dispatch > 0.0
    if device.dispatch or not eager or is_cpu(device.name):
        return []
    return [
        f"the file of {device.name} has no dispatch, seconds that its CPU takes to launch an operator: small layers "
        "are predicted to be faster than they are; plan calibrate measures it"
    ]


def batch_advice(plan: Plan) -> list[str]:
    """A sentence of advice if the global batch prevents data parallelism over some of the GPUs, with batches that would
    not."""
    gpus, batch = plan.degrees.num_devices, plan.training.global_batch
    if batch % gpus == 0 or plan.degrees.data == gpus:
        return []
    near = [size for size in (batch // gpus * gpus, (batch // gpus + 1) * gpus) if size]
    return [
        f"{batch:,} samples do not split over {gpus:,} data ranks, so that plans of data parallelism alone are left "
        f"out; --global-batch {' or '.join(map(str, near))} would"
    ]
