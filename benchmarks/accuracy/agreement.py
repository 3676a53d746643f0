"""What the planner says of traffic and memory against what the executor does, on ranks of jobs of up to 1,024 GPUs.

python -m benchmarks.accuracy.agreement

No GPU and no second process: every rank is played on fake tensors by the project's own executor (see played.py).
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.planner.cost.comm_cost import CollectiveKind
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.plan.document import Axis, ContextKind, Plan
from meshwright.planner.plan.legality import can_recompute, legal_cuts
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel

from .cases import MODELS, profile_of, whole
from .played import SMALLEST_BYTES, Played, play, ranks_to_play
from .report import Check, off, publish

MOST_BYTES, MEDIAN_PEAK, MOST_PEAK = 0.01, 0.03, 0.08
"""Targets: bytes of every collective; median and worst peak of memory."""

Key = tuple[Axis, CollectiveKind]


@dataclass(frozen=True)
class Case:
    """One plan of one model. recompute: of the layers that can be; "half": of every other one of those."""

    model: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 4
    num_microbatches: int = 1
    schedule: Schedule = "1f1b"
    sequence: bool = False
    reshard: bool = False
    sync: Literal["every", "last"] = "last"
    recompute: Literal["none", "half", "full"] = "none"
    precision: Precision = "bf16"
    context: int = 1
    context_kind: ContextKind = "ring"


def _gpt(**changes: Any) -> Case:
    return Case("gpt", **changes)


def _llama(**changes: Any) -> Case:
    return Case("llama3_8b", **{"micro_batch": 1, **changes})


CASES = (
    _gpt(),
    _gpt(num_microbatches=4),
    _gpt(recompute="full"),
    _gpt(precision="fp32"),
    _gpt(replicate=8),
    _gpt(replicate=8, num_microbatches=4, precision="fp32"),
    _gpt(shard=8, reshard=True),
    _gpt(shard=64, reshard=True, num_microbatches=4, recompute="half"),
    _gpt(shard=8),
    _gpt(shard=8, num_microbatches=4),
    _gpt(shard=8, num_microbatches=4, sync="every"),
    _gpt(replicate=16, shard=8, reshard=True, num_microbatches=2),
    _gpt(tensor=4),
    _gpt(shard=32, tensor=4, sequence=True, reshard=True),
    _gpt(shard=32, tensor=4, sequence=True, recompute="full", num_microbatches=2),
    _gpt(replicate=4, pipeline=4, num_microbatches=8, precision="fp32"),
    _gpt(shard=16, pipeline=4, num_microbatches=8),
    _gpt(shard=16, pipeline=4, num_microbatches=8, schedule="gpipe", recompute="full"),
    _llama(shard=8, reshard=True),
    _llama(shard=8, reshard=True, recompute="full"),
    _llama(shard=256, reshard=True, num_microbatches=2, recompute="half"),
    _llama(shard=64, num_microbatches=4, sync="every"),
    _llama(replicate=32, shard=32, reshard=True),
    _llama(tensor=8, sequence=True, micro_batch=4),
    _llama(shard=128, tensor=8, sequence=True, reshard=True, micro_batch=2),
    _llama(shard=128, tensor=8, reshard=True, micro_batch=2, recompute="full"),
    _llama(shard=8, tensor=2, sequence=True, reshard=True, precision="fp32"),
    _llama(shard=8, pipeline=4, num_microbatches=8),
    _llama(shard=8, pipeline=4, num_microbatches=8, reshard=True, recompute="full"),
    _llama(shard=8, tensor=8, pipeline=8, sequence=True, num_microbatches=8),
    _llama(replicate=4, shard=8, tensor=4, pipeline=8, sequence=True, num_microbatches=8, recompute="half"),
    _llama(replicate=8, pipeline=8, num_microbatches=8, schedule="gpipe"),
    _gpt(shard=4, context=2, reshard=True),
    _gpt(shard=2, context=4, num_microbatches=2),
    _gpt(shard=4, context=2, reshard=True, context_kind="all_to_all"),
    _gpt(shard=4, context=2, reshard=True, context_kind="all_gather", precision="fp32"),
    _llama(shard=4, context=4, reshard=True, recompute="full"),
    _llama(shard=4, context=2, reshard=True, context_kind="all_gather"),
    _llama(shard=4, context=2, reshard=True, context_kind="all_to_all"),
    _llama(shard=32, tensor=2, context=4, sequence=True, reshard=True),
    _llama(shard=2, pipeline=2, context=2, num_microbatches=4),
    Case("bert_large", shard=8, context=2, reshard=True, micro_batch=8, num_microbatches=2),
    Case("bert_large", replicate=64),
    Case("bert_large", replicate=64, num_microbatches=2, precision="fp32"),
    Case("bert_large", shard=64, reshard=True, micro_batch=8),
    Case("bert_large", shard=16, tensor=4, sequence=True),
    Case("bert_large", shard=8, tensor=2, pipeline=2, num_microbatches=4),
    Case("bert_large", pipeline=4, num_microbatches=8, recompute="full", precision="fp32"),
    Case("vit_large", replicate=16, micro_batch=16),
    Case("vit_large", shard=16, reshard=True, micro_batch=16, recompute="full"),
    Case("vit_large", replicate=4, shard=8, micro_batch=16, num_microbatches=2, precision="fp32", reshard=True),
    Case("vit_large", shard=8, tensor=4, micro_batch=16),
    Case("vit_large", shard=4, pipeline=4, micro_batch=8, num_microbatches=8),
    Case("t5_small", replicate=8),
    Case("t5_small", shard=8, reshard=True),
    Case("t5_small", shard=8, tensor=2, num_microbatches=2),
    Case("t5_small", shard=4, pipeline=2, num_microbatches=4),
    Case("mixtral_8x7b", shard=8, reshard=True, micro_batch=1),
    Case("mixtral_8x7b", shard=64, reshard=True, micro_batch=1),
    Case("mixtral_8x7b", shard=64, reshard=True, micro_batch=1, num_microbatches=2, recompute="full"),
    Case("mixtral_8x7b", replicate=8, shard=16, reshard=True, micro_batch=1),
    Case("mixtral_8x7b", shard=16, pipeline=4, micro_batch=1, num_microbatches=8),
    Case("resnet50", replicate=8, micro_batch=32),
    Case("resnet50", replicate=8, micro_batch=32, num_microbatches=2, precision="fp32"),
    Case("resnet50", shard=8, reshard=True, micro_batch=32, precision="fp32"),
    Case("resnet50", pipeline=4, micro_batch=16, num_microbatches=8, precision="fp32"),
    Case("unet", replicate=8, micro_batch=16),
    Case("unet", shard=8, reshard=True, micro_batch=16, precision="fp32"),
    Case("unet", pipeline=3, micro_batch=8, num_microbatches=6, precision="fp32"),
    Case("mlp", replicate=8, micro_batch=64),
    Case("mlp", shard=16, reshard=True, micro_batch=64),
    Case("mlp", shard=4, pipeline=2, micro_batch=64, num_microbatches=4),
    Case("dit_xl2", replicate=8, micro_batch=8),
    Case("dit_xl2", shard=64, reshard=True, micro_batch=8, recompute="full"),
    Case("dit_xl2", shard=8, num_microbatches=2, micro_batch=8, precision="fp32"),
    Case("dit_xl2", shard=8, pipeline=4, micro_batch=8, num_microbatches=8),
)
"""Plans over ten models; job sizes from 1 to 1,024 ranks."""

_SHORT: Mapping[str, tuple[int | None, Mapping[str, object]]] = {
    "llama3_8b": (2048, {"num_hidden_layers": 8}),
    "bert_large": (512, {"num_hidden_layers": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "vit_large": (None, {"num_hidden_layers": 8}),
    "t5_small": (512, {"dropout_rate": 0.0}),
    "mixtral_8x7b": (2048, {"num_hidden_layers": 4}),
}
"""Configs that are played with fewer layers, at their own widths, and without dropout: sequence length, changes."""


@cache
def model_of(name: str) -> LoadedModel:
    """A model of the zoo at its own widths, some with fewer layers."""
    if name not in _SHORT:
        return whole(MODELS / f"{name}.py")
    seq_len, changes = _SHORT[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(json.loads((MODELS / name / "config.json").read_text()) | dict(changes)))
        return replace(load_model(path.parent, seq_len), name=name)


def plan_of(case: Case) -> Plan:
    """The plan of a case: stages of equally many layers, as far as the model may be cut there."""
    profile = profile_of(model_of(case.model))
    shape = Shape(
        data_replicate=case.replicate,
        data_shard=case.shard,
        tensor=case.tensor,
        pipeline=case.pipeline,
        micro_batch=case.micro_batch,
        num_microbatches=case.num_microbatches,
        sequence=case.sequence,
        schedule=case.schedule if case.pipeline > 1 else "none",
        gradient_sync=case.sync,
        reshard=case.reshard,
        context=case.context,
        context_kind=case.context_kind,
    )
    options, candidates = [], 0
    for layer in profile.layers:
        candidate = case.recompute != "none" and can_recompute(profile, layer)
        candidates += candidate
        full = candidate and (case.recompute == "full" or candidates % 2 == 1)
        options.append(LayerOption("full" if full else "none", case.reshard))
    cuts = [0]
    for stage in range(1, case.pipeline):
        wanted = stage * len(options) / case.pipeline
        cuts.append(min((c for c in legal_cuts(profile) if c > cuts[-1]), key=lambda c: abs(c - wanted)))
    ends = [*cuts[1:], len(options)]
    training = TrainingSpec(
        global_batch=case.micro_batch * case.num_microbatches * case.replicate * case.shard,
        seq_len=profile.seq_len,
        precision=case.precision,
    )
    ranks = case.replicate * case.shard * case.tensor * case.context * case.pipeline
    stages = [options[first:end] for first, end in zip(cuts, ends, strict=True)]
    return make_plan(profile, cluster_of(load_device("h100-80gb"), ranks), training, shape, stages)


def rows_of(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(row of the plan, rows of its collectives, rows of its ranks)."""
    plan = plan_of(case)
    predicted = estimate(plan, profile_of(model_of(case.model)))
    ranks = [play(model_of(case.model), plan, rank) for rank in ranks_to_play(plan)]
    head = {"model": case.model, "plan": label(case, plan)}
    traffic = [head | row for row in traffic_rows(predicted, ranks)]
    memory = [head | row for row in memory_rows(predicted, ranks)]
    wrong = [row for row in traffic if row["calls off"]]
    worst = max(memory, key=lambda row: abs(row["off"]))
    row = head | {
        "ranks": plan.degrees.num_devices,
        "played": len(ranks),
        "bytes off": max((row["off"] for row in traffic), key=abs, default=0.0),
        "calls": "exact"
        if not wrong
        else "; ".join(
            f"{row['axis']} {row['collective']} {row['calls, planned']:.0f} for {row['calls, counted']}"
            for row in wrong
        ),
        "worst peak, planned": worst["planned"],
        "counted": worst["counted"],
        "peak off": worst["off"],
    }
    return row, traffic, memory


def label(case: Case, plan: Plan) -> str:
    """What a table calls a plan."""
    words = [shape_of(plan).label, case.precision, f"{case.num_microbatches} x {case.micro_batch}"]
    sharded = max(case.shard, case.tensor, case.context) > 1
    words += ["reshard" if case.reshard else "kept"] if sharded else []
    words += ["reduced every"] if case.sync == "every" else []
    words += [f"recompute {case.recompute}"] if case.recompute != "none" else []
    return ", ".join(words)


def traffic_rows(predicted: Estimate, ranks: Sequence[Played]) -> list[dict[str, Any]]:
    """Bytes and calls by axis and collective, of the rank that passes most."""
    planned: dict[Key, tuple[float, float]] = {
        (item.axis, item.kind): (item.bytes, item.calls)
        for item in predicted.collectives
        if item.bytes >= SMALLEST_BYTES
    }
    counted: dict[Key, tuple[float, float]] = {}
    for rank in ranks:
        for key, passed in rank.passed.items():
            counted[key] = max(counted.get(key, (0, 0)), (passed.bytes, passed.calls))
    rows = []
    for key in sorted(planned.keys() | counted.keys()):
        said, found = planned.get(key, (0.0, 0.0)), counted.get(key, (0.0, 0.0))
        rows.append(
            {
                "axis": key[0],
                "collective": key[1],
                "bytes, planned": said[0],
                "bytes, counted": found[0],
                "off": off(said[0], found[0]),
                "calls, planned": said[1],
                "calls, counted": found[1],
                "calls off": said[1] - found[1],
            }
        )
    return rows


def memory_rows(predicted: Estimate, ranks: Sequence[Played]) -> list[dict[str, Any]]:
    """Peaks by rank."""
    return [
        {
            "rank": str(rank.rank),
            "stage": str(rank.stage),
            "planned": predicted.memory[rank.stage].allocated_bytes,
            "counted": rank.peak_bytes,
            "off": off(predicted.memory[rank.stage].allocated_bytes, rank.peak_bytes),
        }
        for rank in ranks
    ]


def checks(cases: Sequence[Case] = CASES) -> list[Check]:
    """Tables over plans."""
    plans: list[dict[str, Any]] = []
    traffic: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for case in cases:
        row, collectives, ranks = rows_of(case)
        plans.append(row)
        traffic += collectives
        memory += ranks
    far = [row for row in traffic if abs(row["off"]) > MOST_BYTES]
    miscounted = [row for row in traffic if row["calls off"]]
    errors = [abs(row["off"]) for row in memory]
    over = [row["off"] for row in memory if row["off"] > MOST_PEAK]
    under = [row["off"] for row in memory if row["off"] < -MOST_PEAK]
    median = statistics.median(errors)
    return [
        Check(
            name="agreement",
            title="Plans, one rank of each stage played on fake tensors",
            target="bytes of every collective within 1%, calls exact",
            columns={
                "model": "",
                "plan": "",
                "ranks": "n",
                "played": "n",
                "bytes off": "%",
                "calls": "",
                "worst peak, planned": "B",
                "counted": "B",
                "peak off": "%",
            },
            rows=plans,
            verdict=f"{len(plans)} plans, {len(traffic)} pairs of axis and collective: {len(traffic) - len(far)} "
            f"within 1% in bytes, {len(traffic) - len(miscounted)} exact in calls",
            passed=not far and not miscounted,
            notes=(
                "bytes off: of the collective that is furthest off; of the rank that passes most; full tensors, both "
                "ends of a transfer between stages",
                "DDP is played with buckets in the reverse order of the parameters: those that torch makes after the "
                "first step if gradients came in that order",
            ),
        ),
        Check(
            name="agreement",
            title="Peak of live storages by rank",
            target="median within 3%, all within 8%",
            columns={"model": "", "plan": "", "rank": "", "stage": "", "planned": "B", "counted": "B", "off": "%"},
            rows=memory,
            verdict=f"{len(memory)} ranks: median {median:.1%}, {sum(e <= MOST_PEAK for e in errors)} within 8%, "
            f"{len(over)} planned too high (worst {max(over, default=0.0):+.1%}), {len(under)} too low "
            f"(worst {min(under, default=0.0):+.1%})",
            passed=median <= MEDIAN_PEAK and not over and not under,
            notes=(
                "planned: what the estimate says is allocated: the running maximum over the passes of a step and the "
                "layers' turns in them",
                "counted: storages alive at once in the second step, parameters and optimizer state included; memory "
                "inside of kernels is not seen",
            ),
        ),
    ]


def main() -> int:
    """Print and write all tables."""
    return publish(checks())


if __name__ == "__main__":
    sys.exit(main())
