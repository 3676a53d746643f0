"""Our pick beside the set-ups that people chose as their best: same model, GPUs, batch, precision and software.

    python -m benchmarks.published.experts [--out FOLDER] [--only WORD] [--time-limit S]

Of the published rows of Megatron, Megatron-Bridge, NeMo, MLPerf, torchtitan and Llama 3, the fastest per GPU of each
model and framework is taken for what its authors found best; rows that publish TFLOP/s only, as Llama 3's, are all
asked. Both plans are priced by planner/cost/estimate.py. Theirs ran, so the device is taken to hold what theirs is
predicted to need. Our pick is the fastest plan of the space that was found; `plan` may emit a simpler one that is
up to 1% slower. Where theirs has context or expert ranks that the executor does not run, the space is the full one.

First the best plan of their layout is looked for, with their degrees, schedule and micro-batch pinned; then a faster
one in the whole space. Where time runs out, the best so far is the answer, and the gap to the bound is told.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from meshwright.planner.answers.why_not import priced_answer
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.legality import context_rule, expert_rule, sequence_rule, tensor_rule
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.pins import Pins
from meshwright.planner.solve.explore import TIE, Explorer
from meshwright.planner.solve.nodes import Solved
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.model.model_profile import ModelProfile

from .clusters import place
from .pricing import Pricer
from .rows import DATA, Row, read_folders
from .settings import CannotPriceError, Setting, setting_of

FILES = (
    "sc21_megatron",
    "korthikanti22",
    "megascale",
    "megatron_core_h100",
    "megatron_bridge",
    "nemo_h100",
    "nemo_a100",
    "nemo_automodel",
    "mlperf",
    "torchtitan",
    "misc_papers",
)
"""Rows of people who tuned: papers and guides of the frameworks' authors, and audited submissions."""

MOST_SLOWER = 1.01
"""Our pick takes at most so many times as long as theirs."""

CUTOFFS = (1.0 + 1e-6, 1.01, 1.05, float("inf"))
"""Times the step of theirs, below which plans are looked for."""

TIME_LIMIT_S = 30.0
"""Of the search in their layout, and of the one in the whole space."""


@dataclass(frozen=True)
class Question:
    """A row that people chose as their best, in the planner's words."""

    row: Row
    setting: Setting
    cluster: ClusterSpec

    @property
    def framework(self) -> str:
        """The training stack by its name, without versions."""
        return str(self.row.config["framework"]).split(" (")[0]

    @property
    def samples_per_s(self) -> float:
        """Of one GPU, as measured; 0 where no time is published."""
        if self.row.step_s is None:
            return 0.0
        return self.setting.global_batch / self.row.step_s / self.cluster.num_devices

    @property
    def of_what(self) -> tuple[object, ...]:
        """What rows have in common of which one is asked: model and framework, and the row itself where rows cannot be
        ranked."""
        return self.setting.sizes, self.framework, self.row.id if self.row.step_s is None else ""


@dataclass(frozen=True)
class Beside:
    """Their set-up beside our pick. ratio: our predicted step over theirs; None where we have none, as `why` says."""

    id: str
    model: str
    gpus: int
    device: str
    global_batch: int
    precision: str
    framework: str
    theirs: str
    their_s: float
    measured_s: float | None
    ours: str
    our_s: float | None
    ratio: float | None
    same: bool
    why: str
    outside: tuple[str, ...]
    over_bytes: float
    search_s: float
    proven: bool
    gap: float | None
    """Share by which our pick may be above the fastest of the space; 0 where it is proven to be that, None where time
    ran out before there was a bound."""


@dataclass(frozen=True)
class Pick:
    """The fastest plan that was found, if any, and a bound that no plan of the space is below."""

    solved: Solved | None
    bound_s: float
    complete: bool

    @property
    def gap(self) -> float | None:
        """Share by which the plan is above the bound at most; None where nothing is bounded yet."""
        if self.solved is None:
            return 0.0
        return max(0.0, self.solved.seconds / self.bound_s - 1.0) if self.bound_s > 0.0 else None


def questions(rows: Sequence[Row]) -> list[Question]:
    """The row of most samples per second and GPU of each (model, framework), and every row that has none;
    fewest GPUs first."""
    best: dict[tuple[object, ...], Question] = {}
    for row in rows:
        if row.file not in FILES or row.quality == "C" or row.scoring["superseded"] or row.measured["oom"]:
            continue
        if row.config["global_batch"] is None or (row.step_s is None and row.measured.get("tflops_per_gpu") is None):
            continue
        try:
            asked = Question(row, setting_of(row), place(row).cluster)
        except CannotPriceError:
            continue
        if asked.setting.precision not in asked.cluster.device.flops:
            continue
        if asked.of_what not in best or asked.samples_per_s > best[asked.of_what].samples_per_s:
            best[asked.of_what] = asked
    return sorted(best.values(), key=lambda asked: asked.cluster.num_devices)


def outside_of_space(plan: Plan, profile: ModelProfile, repeated: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What of a plan the search does not choose by itself, in words."""
    layers = plan.layers
    degrees = plan.degrees
    found = {
        "activations in the host's memory": any(layer.offload for layer in layers),
        "recompute of single modules": bool(repeated),
        "virtual stages in a split backward": plan.schedule in ("zb-h1", "zb-h2") and degrees.virtual_stages > 1,
        "1F1B with fewer micro-batches than stages": plan.schedule == "1f1b"
        and plan.num_microbatches < degrees.pipeline,
    }
    rules = (
        tensor_rule(profile, degrees.tensor),
        sequence_rule(profile, degrees.tensor, degrees.context) if plan.sequence_parallel else None,
        context_rule(profile, degrees.context, degrees.tensor, plan.context_kind),
        expert_rule(profile, degrees.expert, plan.sequence_parallel),
    )
    return (*(words for words, holds in found.items() if holds), *(rule for rule in rules if rule is not None))


@cache
def _pricer() -> Pricer:
    """Profiles that a process has made."""
    return Pricer(planning=True)


def answered(asked: Question, time_limit_s: float) -> Beside:
    """Our answer to a question, beside the row's."""
    pricer = _pricer()
    setting, row = asked.setting, asked.row
    profile = pricer.profile(setting)
    priced, theirs = pricer.estimate(setting, asked.cluster)
    over = max(stage.over_bytes for stage in priced.memory)
    cluster = _holding(asked.cluster, over)
    shape = shape_of(theirs)
    start = time.process_time()
    explorer = Explorer(profile, cluster, theirs.training)
    pick = fastest(explorer, theirs, priced, Pins(), time_limit_s)
    seconds = time.process_time() - start
    ours = None if pick.solved is None else explorer.plan_of(pick.solved)
    estimated = None if ours is None else estimate(ours, profile)
    return Beside(
        id=row.id,
        model=setting.name,
        gpus=asked.cluster.num_devices,
        device=asked.cluster.device.name,
        global_batch=setting.global_batch,
        precision=setting.precision,
        framework=asked.framework,
        theirs=_label(theirs),
        their_s=priced.step_time_s,
        measured_s=row.step_s,
        ours="" if ours is None else _label(ours),
        our_s=None if estimated is None else estimated.step_time_s,
        ratio=None if estimated is None else estimated.step_time_s / priced.step_time_s,
        same=ours is not None and shape_of(ours).layout == shape.layout,
        why=_without(pick) if ours is None or estimated is None else _why(theirs, priced, ours, estimated),
        outside=outside_of_space(theirs, profile, setting.repeated),
        over_bytes=max(0.0, over),
        search_s=seconds,
        proven=pick.solved is not None and pick.gap is not None and pick.gap <= TIE,
        gap=pick.gap,
    )


def fastest(explorer: Explorer, theirs: Plan, priced: Estimate, pins: Pins, time_limit_s: float) -> Pick:
    """The fastest plan. Plans of their layout are looked for first, and in the whole space only faster
    ones; where theirs is not in the space, ones faster than theirs first, so that what need not be solved is not."""
    layout = replace(pins.as_in(shape_of(theirs)), micro_batch=theirs.micro_batch)
    alike = explorer.explore(layout, time.monotonic() + time_limit_s, near=0).best
    deadline = time.monotonic() + time_limit_s
    for cutoff_s in [alike.seconds] if alike is not None else [priced.step_time_s * slower for slower in CUTOFFS]:
        outcome = explorer.explore(pins, deadline, near=1, cutoff_s=cutoff_s)
        best = outcome.best or alike
        if best is not None or not outcome.complete:
            return Pick(best, min(cutoff_s, outcome.bound), outcome.complete)
    return Pick(None, float("inf"), True)


def _without(pick: Pick) -> str:
    """Why there is no plan of ours."""
    return "nothing fits" if pick.complete else f"no plan found in time; none is below {pick.bound_s:.4g} s"


def _holding(cluster: ClusterSpec, over_bytes: float) -> ClusterSpec:
    """The cluster with devices that hold so many bytes more, if any are missing."""
    if over_bytes <= 0:
        return cluster
    hosts = tuple(
        group.model_copy(
            update={"device": group.device.model_copy(update={"memory": group.device.memory + over_bytes + 1.0})}
        )
        for group in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts})


def _label(plan: Plan) -> str:
    """Layout, micro-batch and recompute."""
    kinds = Counter(layer.recompute for layer in plan.layers)
    again = [f"{count} x {kind}" for kind, count in kinds.items() if kind != "none"]
    recompute = f", recompute {' + '.join(again)}" if again else ""
    return f"{plan.label}, micro-batch {plan.micro_batch}{recompute}"


def _why(theirs: Plan, priced: Estimate, ours: Plan, found: Estimate) -> str:
    """Where ours differs from theirs, and what that saves; empty where the layout is the same and as fast."""
    ratio = priced.step_time_s / found.step_time_s
    if shape_of(theirs).layout == shape_of(ours).layout and abs(ratio - 1) < 0.0005:
        return ""
    return priced_answer("theirs", theirs, priced, ours, found).sentence


def summary(found: Sequence[Beside]) -> str:
    """The table in Markdown, and what it comes to."""
    with_answer = [each for each in found if each.ratio is not None]
    ratios = sorted(each.ratio for each in with_answer if each.ratio is not None)
    slower = [each for each in with_answer if (each.ratio or 0.0) > MOST_SLOWER]
    outside = Counter(words for each in found for words in each.outside)
    lines = [
        "# Our pick beside published set-ups of experts",
        "",
        "`python -m benchmarks.published.experts --out benchmarks/published/results`",
        "",
        f"{len(found)} questions (model and framework), each with its fastest published row per GPU; "
        f"{len(with_answer)} answered in {sum(each.search_s for each in found):.0f} CPU s of search.",
        f"Predicted step of our pick over predicted step of theirs: median {statistics.median(ratios):.3f}, worst "
        f"{ratios[-1]:.3f}, best {ratios[0]:.3f}; proven to be the fastest of the space in "
        f"{sum(each.proven for each in with_answer)}{_stopped(with_answer)}.",
        f"Same layout in {sum(each.same for each in with_answer)}; more than 1% slower in {len(slower)}.",
        "Theirs is outside of the space in "
        + (", ".join(f"{count} ({words})" for words, count in outside.most_common()) or "none")
        + ".",
        f"Theirs is predicted not to fit in {sum(each.over_bytes > 0 for each in found)}: it ran, so the devices are "
        "given as much memory as it is predicted to need. Both plan with a memory margin of 0.",
        "",
        "Gap: by how much ours may be above the fastest of the space, where the search was stopped.",
        "",
        "| row | GPUs | theirs | ours | theirs s | ours s | ratio | gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in sorted(found, key=lambda each: -(each.ratio or 0.0)):
        ours = (f"{each.our_s:.4g}", f"{each.ratio:.3f}") if each.ratio is not None else ("-", "-")
        lines.append(
            f"| {each.id} | {each.gpus:,} {each.device} | {each.theirs} | {each.ours or 'none'} | {each.their_s:.4g} | "
            f"{ours[0]} | {ours[1]} | {_shown(each)} |"
        )
    lines += ["", "## Where ours differs, and why", ""]
    for each in sorted(with_answer, key=lambda each: each.ratio or 0.0):
        if each.why:
            lines.append(f"- {each.id}: {each.why}.")
    unanswered = [each for each in found if each.ratio is None]
    if unanswered:
        lines += ["", "## Without an answer of ours", ""]
        lines += [f"- {each.id} ({each.theirs}): {each.why}" for each in unanswered]
    return "\n".join(lines) + "\n"


def _stopped(found: Sequence[Beside]) -> str:
    """What is known of the picks whose search ran out of time."""
    stopped = [each.gap for each in found if not each.proven]
    if not stopped:
        return ""
    gaps = [gap for gap in stopped if gap is not None]
    known = f"they may be up to {max(gaps):.1%} above it" if gaps else "how far they are above it is not known"
    less = len(stopped) - len(gaps) if gaps else 0
    return f"; the search for the other {len(stopped)} was stopped, and {known}" + f" ({less}: not known)" * bool(less)


def _shown(each: Beside) -> str:
    if each.proven:
        return "0"
    return "not known" if each.gap is None else f"{each.gap:.1%}"


def main() -> int:
    """Exit code 0 if no pick of ours is more than 1% slower than theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for experts.md")
    parser.add_argument("--only", default="", help="rows whose id holds this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="S", help="of each search")
    arguments = parser.parse_args()
    asked = [each for each in questions(read_folders([DATA])) if arguments.only in each.row.id]
    asked.reverse()  # the largest first, so that no process is left with one of them at the end
    answer = partial(answered, time_limit_s=arguments.time_limit)
    found = []
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        for each in pool.map(answer, asked):
            ratio = "-" if each.ratio is None else f"{each.ratio:.3f}"
            print(f"{ratio:>6} {each.search_s:5.1f}s {each.id}: {each.theirs} | {each.ours or each.why}", flush=True)
            found.append(each)
    text = summary(found)
    print(text.split("| row |")[0])
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "experts.md").write_text(text)
    return int(any((each.ratio or 0.0) > MOST_SLOWER for each in found))


if __name__ == "__main__":
    sys.exit(main())
