"""What our trainer costs beside hand-written torch: paired steps of both, in turn, in one process group.

    python -m benchmarks.execution.overhead

Same model, same initial values, same batches, same collectives; losses and norms must agree. Wall time is what counts
on a quiet machine, CPU time (of the process, all threads) where others run beside.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace

from . import by_hand

RESULTS = Path(__file__).parent / "results"
TARGET = 0.02
"""Share of a hand-written step's CPU time."""

_OFF = {"fp32": 1e-4, "bf16": 2**-4}
"""Relative difference of losses and norms that rounding makes; autocast keeps in fp32 what ours has in bf16."""

_WARM_UP = 3
_SEQ_LEN = 128
_VOCABULARY = 2048


@dataclass(frozen=True)
class Case:
    """One set-up. by_hand: makes the hand-written loop of a config."""

    name: str
    ranks: int
    shape: dict[str, Any]
    by_hand: Callable[[LlamaConfig], by_hand.Step]
    reshard: bool = False
    stages: int = 1
    precision: Precision = "fp32"


CASES = (
    Case("DDP", 2, {"data_replicate": 2, "num_microbatches": 2}, lambda c: by_hand.ddp(c, 2)),
    Case("FSDP2", 2, {"data_shard": 2, "num_microbatches": 2}, lambda c: by_hand.fsdp(c, 2), reshard=True),
    Case(
        "TP 2, own collectives",
        2,
        {"tensor": 2, "num_microbatches": 2},
        lambda c: by_hand.collectives_and_fsdp(c, 2, 2),
    ),
    Case(
        "TP 2 in bf16, own collectives",
        2,
        {"tensor": 2, "num_microbatches": 2},
        lambda c: by_hand.collectives_and_fsdp(c, 2, 2, torch.bfloat16),
        precision="bf16",
    ),
    Case(
        "TP 2 + FSDP2, own collectives",
        4,
        {"data_shard": 2, "tensor": 2, "num_microbatches": 2},
        lambda c: by_hand.collectives_and_fsdp(c, 2, 2),
        reshard=True,
    ),
    Case(
        "1F1B",
        2,
        {"pipeline": 2, "schedule": "1f1b", "num_microbatches": 4},
        lambda c: by_hand.one_forward_one_backward(c, 4),
        stages=2,
    ),
)


@dataclass
class Timed:
    """Seconds of each step of one rank."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def config_of(width: int, num_layers: int) -> LlamaConfig:
    """A Llama of that width."""
    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        tie_word_embeddings=False,
        max_position_embeddings=_SEQ_LEN,
    )


class Model(nn.Module):
    """The model as a function of tokens alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.llama(input_ids=tokens, use_cache=False).logits
        return logits


def plan_of(case: Case, config: LlamaConfig) -> Plan:
    """A plan of the set-up that is also run by hand."""
    profile = trace(load_model(lambda: Model(config), batch=_batch, loss=loss_of_logits))
    fields = {"data_replicate": 1, "data_shard": 1, "tensor": 1, "pipeline": 1, "micro_batch": 2} | case.shape
    shape = Shape(**fields)
    training = TrainingSpec(
        global_batch=2 * shape.num_microbatches * shape.data,
        seq_len=_SEQ_LEN,
        precision=case.precision,
        optimizer="adamw",
    )
    machines = cluster_of(load_device("cpu"), case.ranks, case.ranks)
    kinds = [layer.root.endswith("norm") for layer in profile.layers]
    options = [LayerOption(reshard=case.reshard and not norm) for norm in kinds]
    own = config.num_hidden_layers // case.stages
    ends = [1 + own * (i + 1) for i in range(case.stages - 1)]
    stages = [options[a:b] for a, b in zip([0, *ends], [*ends, len(options)], strict=True)]
    return make_plan(profile, machines, training, shape, stages)


def _batch(size: int, seq_len: int = _SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(_VOCABULARY, (size, seq_len))
    return tokens, tokens


def tokens_of(size: int, generator: torch.Generator) -> torch.Tensor:
    """Random texts."""
    return torch.randint(_VOCABULARY, (size, _SEQ_LEN), generator=generator)


def loss_of_logits(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of the next token."""
    return by_hand.loss_of(logits, batch[1])


def paired(case: Case, config: LlamaConfig, plan: Plan, num_pairs: int, telemetry: Path) -> tuple[Timed, Timed]:
    """(ours, by hand) on this rank. Raises AssertionError if their losses or norms differ."""
    ours = parallelize(
        lambda: Model(config),
        plan,
        by_hand.adamw,
        loss=loss_of_logits,
        seed=0,
        max_grad_norm=by_hand.MAX_NORM,
        device="cpu",
        telemetry=telemetry,
    )
    step_by_hand = case.by_hand(config)
    generator = torch.Generator().manual_seed(1)
    count = ours.samples_per_step * ours.data_size

    def step_of_ours(tokens: torch.Tensor) -> tuple[float, float]:
        metrics = ours.step((tokens, tokens))
        return metrics.loss, metrics.grad_norm

    times = Timed(), Timed()
    for pair in range(_WARM_UP + num_pairs):
        tokens = tokens_of(count, generator).chunk(ours.data_size)[ours.data_rank]
        found = {}
        for side in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            found[side] = (step_of_ours, step_by_hand)[side](tokens)
            if pair >= _WARM_UP:
                times[side].wall.append(time.perf_counter() - wall)
                times[side].cpu.append(time.process_time() - cpu)
        torch.testing.assert_close(found[0], found[1], rtol=_OFF[case.precision], atol=0.0)
    ours.close()
    return times


def run(case: Case, width: int, num_layers: int, num_pairs: int) -> dict[str, Any]:
    """A row of the table: medians of both sides in ms over all ranks, and of the ratios of pairs."""
    config = config_of(width, num_layers)
    plan = plan_of(case, config)
    with tempfile.TemporaryDirectory() as folder:
        telemetry = Path(folder, "run.jsonl")
        ranks = run_local_ranks(paired, case.ranks, case, config, plan, num_pairs, telemetry, timeout_s=900.0)
    row: dict[str, Any] = {"set-up": case.name, "ranks": case.ranks, "width": width, "layers": num_layers}
    row["pairs"] = num_pairs
    for kind, joined in (("wall", max), ("cpu", sum)):
        sides = [[joined(values) for values in zip(*(getattr(r[s], kind) for r in ranks), strict=True)] for s in (0, 1)]
        ours, hand = sides
        row[f"{kind}_ours_ms"], row[f"{kind}_by_hand_ms"] = (1e3 * statistics.median(side) for side in sides)
        row[f"{kind}_overhead"] = statistics.median(a / b for a, b in zip(ours, hand, strict=True)) - 1
    return row


def _markdown(rows: list[dict[str, Any]]) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.execution.overhead`, {date}, torch {torch.__version__}",
        "",
        "Medians of pairs of steps, ours and by hand in turn, in one process group on gloo; overhead is the median "
        "of the pairs' ratios; ours with telemetry on. Wall: of the slowest rank. CPU: of all ranks together. Llama of "
        f"transformers, micro-batches of 2 x {_SEQ_LEN} tokens, fp32 unless a row says bf16.",
        "",
        "| set-up | ranks | width | layers | pairs | wall, ours / by hand (ms) | overhead | CPU (ms) | overhead |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['set-up']} | {row['ranks']} | {row['width']} | {row['layers']} | {row['pairs']} "
            f"| {row['wall_ours_ms']:.0f} / {row['wall_by_hand_ms']:.0f} | {row['wall_overhead']:+.1%} "
            f"| {row['cpu_ours_ms']:.0f} / {row['cpu_by_hand_ms']:.0f} | {row['cpu_overhead']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all, or some of them, and write the table of all; 1 if one is above the target in CPU time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", help="set-ups that begin with this")
    arguments = parser.parse_args()
    file = RESULTS / "overhead.json"
    found = json.loads(file.read_text()) if file.exists() else []
    known = {(row["set-up"], row["width"], row["pairs"]): row for row in found}
    for case in CASES:
        for width in arguments.widths:
            if arguments.only is None or case.name.startswith(arguments.only):
                row = run(case, width, arguments.layers, arguments.pairs)
                known[case.name, width, arguments.pairs] = row  # more pairs do not hide what fewer have found
                print(_markdown([row]).splitlines()[-1], flush=True)
    order = [case.name for case in CASES]
    rows = sorted(known.values(), key=lambda row: (order.index(row["set-up"]), row["width"], row["pairs"]))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.md").write_text(_markdown(rows))
    file.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["cpu_overhead"] > TARGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
