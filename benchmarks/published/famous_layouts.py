"""Ten famous training set-ups beside what is predicted for them, and what `plan` would run under the same software.

    python -m benchmarks.published.famous_layouts [--out FOLDER] [--seconds N]

Set-ups are rows of the data (data/) or of famous/famous.jsonl, which no fit has seen. Writes famous.md into the folder.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.answers.infeasible import InfeasibleError
from meshwright.planner.answers.search import search
from meshwright.planner.answers.why_not import priced_answer
from meshwright.planner.cost.bands import USUAL_RISK, margin_at
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.not_run import priced_mark
from meshwright.planner.solve.solver import SolverError
from meshwright.profiler.machine.units import format_seconds

from .clusters import place
from .pricing import Pricer
from .rows import DATA, Row, read_folders
from .settings import setting_of

FOLDER = Path(__file__).parent / "famous"

LAYOUTS = {
    "GPT-3 175B, 1,024 A100 (Megatron-LM)": "megascale-175b-megatron-lm-n1024",
    "BLOOM 176B, 384 A100": "bloom-176b-final",
    "MT-NLG 530B, 2,240 A100": "mt-nlg-530b-n2240",
    "Llama-3 8B, 8 H100, fp8 (Megatron-Bridge)": "bridge-25.11-llama3-8b-H100-FP8-CS-pretrain-n8-gbs128",
    "Llama-3 70B, 64 H100, fp8 (Megatron-Bridge)": "bridge-25.11-llama3-70b-H100-FP8-CS-pretrain-n64-gbs128",
    "Llama-3.1 405B, 16,384 H100 (Meta)": "llama3-405b-n16384-cp1",
    "DeepSeek-V3, 2,048 H800": "deepseek-v3-h800-n2048",
    "Mixtral 8x7B, 64 GB200, fp8 (NeMo)": "mixtral-8x7b-gb200-n64",
    "Nemotron-4 340B, 6,144 H100": "nemotron-4-340b-n6144",
    "MegaScale 175B, 12,288 A100": "megascale-175b-megascale-n12288",
}
"""What it is called -> id of its row."""


@dataclass(frozen=True)
class Famous:
    """A set-up as its makers ran it and as it is predicted, and what would be planned instead."""

    name: str
    row: Row
    measured_s: float
    theirs: Plan
    predicted: Estimate
    assumed: tuple[str, ...]
    ours: Plan | None
    sentence: str


def measured_s(row: Row) -> float:
    """Published seconds of a step; where only TFLOP/s are published, from these and the model's FLOPs with causal
    attention."""
    if row.step_s is not None:
        return row.step_s
    tokens = row.config["global_batch"] * row.model["seq_len"]
    flops = 1e9 * float(row.derived["gflops_per_token"]["model_causal_attn"])
    return float(tokens * flops / (row.measured["tflops_per_gpu"] * 1e12 * row.cluster["n_gpus"]))


def famous(name: str, row: Row, seconds: float) -> Famous:
    """The set-up of a row. seconds: for the search of a plan."""
    pricer, setting, cluster = Pricer(planning=True), setting_of(row), place(row).cluster
    predicted, theirs = pricer.estimate(setting, cluster)
    profile = pricer.profile(setting)
    margin = margin_at(USUAL_RISK, profile, cluster.device.name) or 0.0
    training = theirs.training.model_copy(update={"memory_margin": margin})
    given = theirs.training
    try:
        result = search(profile, cluster, training, time_limit_s=seconds)
    except (InfeasibleError, SolverError) as error:
        ours, sentence = None, f"no plan: {str(error).splitlines()[0]}"
    else:
        ours, there = result.plan, theirs.model_copy(update={"training": given})
        sentence = priced_answer("what they ran", there, predicted, ours, result.estimate, _LEFT_OUT).sentence
        sentence = sentence.replace(priced_mark(there), "")
        if not predicted.fits:
            sentence += "; it is predicted not to fit the device"
    return Famous(name, row, measured_s(row), theirs, predicted, setting.assumed, ours, sentence)


_LEFT_OUT = "it leaves less memory free than plans do, or was not found in time"


def page(found: list[Famous]) -> str:
    """The table as Markdown, and a sentence on each."""
    lines = [
        "# Ten famous set-ups",
        "",
        "`python -m benchmarks.published.famous_layouts`. What their makers ran and published, what is predicted for "
        "it, and what `plan` would run under the same software, at a risk of running out of memory of "
        f"{USUAL_RISK:.0%} (which leaves some of theirs too little room). A stack is kernels and what overlaps: "
        "layouts that its programs could not run then (sequence parallelism before 2022, zero bubbles before 2023) are "
        "planned, too. Seconds of a step.",
        "",
        "| set-up | they ran | published | predicted | error | plan would run | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        error = each.predicted.step_time_s / each.measured_s - 1.0
        seconds = f"{format_seconds(each.measured_s)} | {format_seconds(each.predicted.step_time_s)} | {error:+.0%}"
        planned = "|" if each.ours is None else f"{_layout(each.ours)} | {_step(each.ours)}"
        lines.append(f"| {each.name} | {_layout(each.theirs)} | {seconds} | {planned} |")
    lines.append("")
    for each in found:
        assumed = f" Assumed of theirs: {', '.join(each.assumed)}." if each.assumed else ""
        software = each.theirs.training.software
        lines.append(f"- **{each.name}**, as {software}: {each.sentence}.{assumed} Source: {_source(each.row)}")
    return "\n".join(lines) + "\n"


def _source(row: Row) -> str:
    """Where a row is from, without how it was read."""
    return re.split(r"; (?:full row )?read in", row.source)[0]


def _layout(plan: Plan) -> str:
    return f"{plan.label}, micro-batch {plan.micro_batch}"


def _step(plan: Plan) -> str:
    return "" if plan.prediction is None else format_seconds(plan.prediction.step_time_s)


def rows_by_id() -> Mapping[str, Row]:
    """Rows of the data and of the set-ups that no fit has seen, by id."""
    return {row.id: row for row in read_folders([DATA, FOLDER])}


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.famous_layouts", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=80.0, metavar="N", help="for the search of each plan")
    given = parser.parse_args(arguments)
    rows, found = rows_by_id(), []
    for name, row_id in LAYOUTS.items():
        found.append(famous(name, rows[row_id], given.seconds))
        print(f"{name}: {found[-1].sentence}", file=sys.stderr)
    told = page(found)
    print(told)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "famous.md").write_text(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
