"""Plans at random of the whole zoo, each beside one process: loss, gradient norm, every gradient and parameter, and
the loss that `evaluate` gives afterwards.

    python -m benchmarks.execution.matrix --plans 278

Small versions of the models on 2, 4 and 8 gloo ranks, five AdamW steps. Half are in fp32 on equal devices; the rest, by
turns, in bf16 (held against bands), with frozen parameters, with compiled layers, for unequal devices, with dropout,
with adapters, with samples of all lengths, by Muon, or by Adafactor; some more recompute parts of layers, are given
global batches that grow, or keep activations and the optimizer on the host. What has been run is kept in
results/matrix.json with the minute it was run in, and the table is written after every plan, so that a run that was
broken off goes on; --since runs anew what was run before a minute, --again all.
"""

import argparse
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import _muon

from meshwright.executor.measuring.one_process import NamedOptimizers, Training, adamw
from meshwright.executor.measuring.verify import TOLERANCE, VerifyReport, beside_one_process
from meshwright.executor.parallel import delayed_weights

from .drawn import GLOBAL_BATCH, Drawn, Kind, draw, global_batches, names

RESULTS = Path(__file__).parent / "results"
RANKS = (2, 4, 8)
NUM_STEPS = 5

_TIMEOUT_S = 300.0

OTHER_KINDS: tuple[Kind, ...] = (
    "bf16",
    "dropout",
    "frozen",
    "Muon",
    "compiled",
    "adapters",
    "unequal",
    "lengths",
    "Adafactor",
)
"""Half of the plans of each model and number of ranks are of these, by turns."""

_LEARNING_RATE = 1e-3

IN_PARTS = (
    ("bert_large", 2),
    ("deepseek_v3", 4),
    ("deepseek_v3", 8),
    ("dit_xl2", 8),
    ("gpt2", 8),
    ("llama31_405b", 4),
    ("llama31_405b", 8),
    ("mixtral_8x7b", 8),
    ("qwen3_30b_a3b", 4),
    ("resnet50", 2),
    ("t5_3b", 4),
    ("vit_large", 8),
    ("whisper_large_v3", 4),
)
"""(model, ranks) of which one more plan recomputes parts of layers."""

GROWING = (
    ("bert_large", 4),
    ("deepseek_v3", 4),
    ("dit_xl2", 2),
    ("gpt", 4),
    ("gpt2", 8),
    ("llama31_405b", 4),
    ("lstm", 4),
    ("mamba2", 8),
    ("mixtral_8x7b", 8),
    ("qwen3_30b_a3b", 2),
    ("t5_3b", 4),
    ("vit_large", 2),
    ("whisper_large_v3", 2),
)
"""(model, ranks) of which one more plan is given global batches that grow."""

OFFLOADED = (
    ("bert_large", 4),
    ("deepseek_v3", 2),
    ("dit_xl2", 4),
    ("gpt", 8),
    ("gpt2", 2),
    ("llama31_405b", 8),
    ("mamba2", 4),
    ("mixtral_8x7b", 4),
    ("mlp", 2),
    ("qwen3_30b_a3b", 8),
    ("resnet50", 4),
    ("t5_3b", 8),
    ("unet", 2),
    ("vit_large", 4),
    ("whisper_large_v3", 2),
)
"""(model, ranks) of which one more plan keeps activations, the optimizer's state or both on the host."""

ONE_MORE: tuple[tuple[Kind, tuple[tuple[str, int], ...]], ...] = (
    ("parts", IN_PARTS),
    ("growing", GROWING),
    ("offload", OFFLOADED),
)

BANDS = {"loss": 0.03, "gradient norm": 0.1, "evaluation": 0.03}
"""What bf16 may differ by from one process in fp32, relatively. Single gradients say nothing: one process in bf16 has
those of whisper's norms, sums over 1,500 frames, off by nine tenths of their largest element."""

Row = dict[str, Any]


def chosen(num_plans: int) -> list[Drawn]:
    """So many plans, about as many of each model on each number of ranks; fewer where a model has not so many."""
    places = [(name, ranks) for name in names() for ranks in RANKS]
    each, rest = divmod(max(num_plans - sum(len(at) for _, at in ONE_MORE), len(places)), len(places))
    kinds = cycle(OTHER_KINDS)
    found: list[Drawn] = []
    for place, (name, ranks) in enumerate(places):
        count = each + (place * rest // len(places) != (place + 1) * rest // len(places))
        others: list[Drawn] = []
        for _ in OTHER_KINDS:
            if len(others) < count // 2:
                others += draw(name, ranks, 1, next(kinds))
        found += others + draw(name, ranks, count - len(others))
    return found + [drawn for kind, at in ONE_MORE if each > 1 for place in at for drawn in draw(*place, 1, kind)]


def _optimizers(kind: Kind, eps: float) -> NamedOptimizers:
    """Muon and Adafactor of matrices, which look at all of one; AdamW of all else."""
    if kind not in ("Muon", "Adafactor"):
        return adamw(eps)

    def make(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        matrices = [p for _, p in named if p.dim() == 2]
        rest = [(name, p) for name, p in named if p.dim() != 2]
        of = torch.optim.Muon if kind == "Muon" else torch.optim.Adafactor
        return [*([of(matrices, lr=_LEARNING_RATE)] if matrices else []), *(adamw(eps)(rest) if rest else [])]

    return make


def _orthogonal(grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Muon's Newton-Schulz iteration in fp32. In bf16, as torch has it, it takes an ulp of a gradient for more than is
    allowed between two runs (seen: 1.4e-4 of the largest weight)."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def run(drawn: Drawn) -> Row:
    """What became of one plan: largest difference of each kind, the tensor that differs first, or why it did not
    run."""
    started = time.perf_counter()
    loaded = drawn.loaded
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(size) for size in _sizes(drawn)]
    training = Training(
        compile="aot_eager" if drawn.kind == "compiled" else False,
        optimizers=lambda eps: _optimizers(drawn.kind, eps),
        dropout=drawn.kind == "dropout",
    )
    with (
        mock.patch.object(_muon, "_zeropower_via_newtonschulz", _orthogonal),
        mock.patch.object(delayed_weights, "LEAST_BYTES", 0),  # small models, too, do what large ones do
    ):
        report = beside_one_process(
            VerifyReport(drawn.label, (), {}), drawn.plan, loaded, batches, _TIMEOUT_S, training
        )
    failure = report.failure or (None if report.first is None else report.lines[-1])
    judged = report.largest
    if drawn.kind == "bf16" and report.failure is None:
        judged = {kind: found for kind, found in report.largest.items() if kind in BANDS}
        outside = [kind for kind, found in judged.items() if not found.relative <= BANDS[kind]]
        failure = f"outside of the bands for bf16: {', '.join(outside)}" if outside else None
    worst = max(judged.values(), key=lambda d: d.relative, default=None)
    return {
        "model": drawn.model,
        "plan": drawn.label,
        "kind": drawn.kind,
        "ranks": drawn.plan.degrees.num_devices,
        "worst": None if worst is None else worst.relative,
        "where": None if worst is None else worst.what,
        "failure": failure,
        "seconds": round(time.perf_counter() - started, 2),
        "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "key": key_of(drawn),
    }


def _sizes(drawn: Drawn) -> list[int]:
    """Global batch of each step: the plan's, or growing up to it from the smallest that the plan can run."""
    able = global_batches(drawn.plan) if drawn.kind == "growing" else [GLOBAL_BATCH]
    return [able[step * (len(able) - 1) // (NUM_STEPS - 1)] for step in range(NUM_STEPS)]


def key_of(drawn: Drawn) -> str:
    """What tells a run from all others: not where the model's file lies, nor what was observed of it, nor what the plan
    was predicted to take."""
    model = {"source", "fingerprint"}
    told = drawn.plan.model_dump_json(
        exclude={
            "model": model,
            **dict.fromkeys(("cluster", "prediction", "certificate", "alternatives", "versions"), True),
        },
        exclude_none=True,  # so that a field that documents get later makes no plan another one
    )
    return hashlib.sha256(f"{drawn.model} {drawn.kind} evaluated {told}".encode()).hexdigest()[:16]


def run_all(plans: Sequence[Drawn], file: Path, words: Sequence[str] = (), since: str = "") -> Iterator[list[Row]]:
    """All rows known so far, in order, again and again: at first, and after each plan that had to be run.

    Plans that `file` has already are not run again, others are put there at once. words: only plans whose lines hold
    all of them are run. since: a minute in ISO 8601, UTC; what was run before it is run again.
    """
    keys = [key_of(drawn) for drawn in plans]
    known: dict[str, Row] = {}
    if file.exists():
        found = json.loads(file.read_text())["rows"]
        known = {row["key"]: row for row in found if row["failure"] is None and row["key"] in keys}
    yield [known[key] for key in keys if key in known]
    for drawn, key in zip(plans, keys, strict=True):
        if key in known and known[key]["run"] >= since:
            continue
        if not all(word in f"{drawn.model} {drawn.label}" for word in words):
            continue
        known[key] = run(drawn)
        rows = [known[key] for key in keys if key in known]
        head = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "torch": torch.__version__}
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({**head, "tolerance": TOLERANCE, "rows": rows}, indent=1) + "\n")
        print(f"{len(rows):4d}/{len(plans)}  {_line(known[key])}", flush=True)
        yield rows


def _line(row: Row) -> str:
    found = row["failure"] or f"{row['worst']:.1e}"
    return f"{row['seconds']:5.1f} s  {row['model']}: {row['plan']}: {found}"


def summary(rows: list[Row]) -> str:
    """How all stand, in a sentence."""
    good = sum(row["failure"] is None for row in rows)
    worst = max((row["worst"] for row in rows if row["worst"] is not None and row["kind"] != "bf16"), default=0.0)
    of_models, of_ranks = len({row["model"] for row in rows}), sorted({row["ranks"] for row in rows})
    bands = ", ".join(f"{kind} {most:g}" for kind, most in BANDS.items())
    kinds = {kind: sum(row["kind"] == kind for row in rows) for kind in (*OTHER_KINDS, *(kind for kind, _ in ONE_MORE))}
    return (
        f"{good} of {len(rows)} plans of {of_models} models on {', '.join(map(str, of_ranks))} ranks give the numbers "
        f"of one process after {NUM_STEPS} steps, and in an evaluation behind them (largest difference in fp32 "
        f"{worst:.1e}, allowed {TOLERANCE:g}; {kinds['bf16']} of them in bf16, bands: {bands}); "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    )


def _markdown(rows: list[Row], num_plans: int) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.execution.matrix --plans {num_plans}`, {date}, torch {torch.__version__}",
        "",
        f"{summary(rows)}.",
        "",
        "Letters stand for the layers of the stages: recompute none, full, selective or attention, or of so many "
        "parts; gathered parameters kept or given back; h: activations on the host. ResNet-50 is run without kinks, "
        "with SiLU for ReLU and average for max pooling: in one "
        "process rounding alone changes its own numbers by more than is allowed (`python -m "
        "benchmarks.execution.kinks`). Muon orthogonalises in fp32, in both runs.",
        "",
        "| model | ranks | plan | largest difference | run, UTC |",
        "|---|---:|---|---:|---|",
    ]
    for row in rows:
        found = row["failure"] or f"{row['worst']:.1e}"
        plan, minute = row["plan"].replace("|", "/"), row["run"][:16].replace("T", " ")
        lines.append(f"| {row['model']} | {row['ranks']} | {plan} | {found} | {minute} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run them, and write the table; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=278, help="so many")
    parser.add_argument("--again", action="store_true", help="run all, known or not")
    parser.add_argument("--since", default="", metavar="MINUTE", help="run again what was run before it (UTC)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only plans whose lines hold these words")
    arguments = parser.parse_args()
    file = RESULTS / "matrix.json"
    if arguments.again:
        file.unlink(missing_ok=True)
    rows: list[Row] = []
    for rows in run_all(chosen(arguments.plans), file, arguments.only, arguments.since):
        if rows:
            (RESULTS / "matrix.md").write_text(_markdown(rows, arguments.plans))
    print(summary(rows))
    return int(any(row["failure"] is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
