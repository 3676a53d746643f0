"""Whether the chosen layout stays when what it is chosen for changes a little.

    python -m benchmarks.planning_time.stability [--only WORDS | --chains N] [--limit SECONDS] [--out FOLDER]

Ten cases are planned as they are, then with each number of the cluster (FLOP/s, size and bandwidth of memory, bandwidth
of links and network, latency) 2% lower and higher, and with a batch one step smaller and larger: one sample less or
more for each of the plan's own data ranks. A layout is what people call it: degrees, schedule, how sequences are split.
A flip gains nothing if the layout chosen before still fits and takes at most 1% longer than the new one. Profiles are
made on the way, which takes torch.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.planner.answers.search import search
from meshwright.planner.answers.sensitivity import scaled
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import SIMPLE, Explorer
from meshwright.profiler import load_device, load_model
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

from .cases import Case
from .nested import cases

LITTLE = 0.02
"""Relative change of each number of the cluster."""

NUMBERS = ("compute", "device memory", "links in a host", "network", "latency of links")
"""As sensitivity.py calls them."""

LIMIT_S = 20.0
"""Of each search."""

CASES = (
    Case("MLP, 8 GPUs", "mlp.py", 8, 1024),
    Case("GPT-2-sized model.py, 8 GPUs", "gpt.py", 8, 64),
    Case("GPT-2, 8 A100", "gpt2", 8, 64, device="a100-40gb"),
    Case("T5 small, 8 GPUs", "t5_small", 8, 64),
    Case("BERT large, 16 A100", "bert_large", 16, 256, device="a100-40gb"),
    Case("ResNet-50, 16 GPUs", "resnet50.py", 16, 1024),
    Case("ViT large, 32 GPUs", "vit_large", 32, 1024),
    Case("Llama-3-8B, 8 GPUs", "llama3_8b", 8, 64),
    Case("Llama-3-8B, 64 GPUs", "llama3_8b", 64, 512),
    Case("Llama-3-70B, 64 GPUs", "llama3_70b", 64, 512),
)


@dataclass(frozen=True)
class Change:
    """One change of a case and what was chosen then. before_s: the step that the layout of the unchanged case takes
    then, None where it has no plan."""

    what: str
    layout: str
    step_s: float
    before_s: float | None
    flips: bool

    @property
    def gains_nothing(self) -> bool:
        """Whether the layout chosen before would have done as well."""
        return self.flips and self.before_s is not None and self.before_s <= self.step_s * (1 + SIMPLE)


@dataclass(frozen=True)
class Row:
    """A case with all its changes."""

    name: str
    layout: str
    changes: tuple[Change, ...]

    @property
    def flips(self) -> list[Change]:
        """Changes with which another layout was chosen."""
        return [change for change in self.changes if change.flips]


def changed(
    cluster: ClusterSpec, training: TrainingSpec, plan: Plan
) -> Iterator[tuple[str, ClusterSpec, TrainingSpec]]:
    """(what, cluster, job) of every small change."""
    for sign, factor in (("-", 1 - LITTLE), ("+", 1 + LITTLE)):
        for name in NUMBERS:
            if name != "network" or cluster.num_hosts > 1:
                yield f"{name} {sign}{LITTLE:.0%}", scaled(cluster, name, factor), training
        yield f"memory {sign}{LITTLE:.0%}", with_memory(cluster, factor), training
    for step in (-plan.degrees.data, plan.degrees.data):
        batch = training.global_batch + step
        if batch > 0:
            yield f"batch {batch:,}", cluster, training.model_copy(update={"global_batch": batch})


def with_memory(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with the memory of every device multiplied."""
    groups = []
    for group in cluster.hosts:
        device = group.device.model_copy(update={"memory": group.device.memory * factor})
        groups.append(group.model_copy(update={"device": device}))
    return cluster.model_copy(update={"hosts": tuple(groups)})


def row(name: str, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, limit_s: float) -> Row:
    """What is chosen for a case, and with each change of it."""
    plan = search(profile, cluster, training, time_limit_s=limit_s).plan
    shape, found = shape_of(plan), []
    for what, on, job in changed(cluster, training, plan):
        result = search(profile, on, job, time_limit_s=limit_s)
        now, explorer = shape_of(result.plan), Explorer(profile, on, job)
        flips = now.label != shape.label
        before_s = None
        if flips:
            ranks = {"data_replicate": shape.data_replicate, "data_shard": shape.data_shard}
            pins = replace(Pins().as_in(shape), **ranks)
            best = explorer.explore(pins, time.monotonic() + limit_s, near=0).best
            before_s = None if best is None else best.seconds + explorer.model.software.step_s
        found.append(Change(what, now.label, result.estimate.step_time_s, before_s, flips))
    return Row(name, shape.label, tuple(found))


def row_of(case: Case, limit_s: float) -> Row:
    """That of one of the ten."""
    assert case.global_batch is not None
    profile = trace(load_model(str(case.path.parent if case.path.name == "config.json" else case.path)))
    training = TrainingSpec(global_batch=case.global_batch, seq_len=profile.seq_len)
    return row(case.name, profile, cluster_of(load_device(case.device), case.gpus), training, limit_s)


def rows_of_chains(count: int, limit_s: float) -> Iterator[Row]:
    """Those of random chains of unequal layers that fit, as nested.py draws them: few plans are obvious there, and many
    are close."""
    made = 0
    for case in cases(1, []):
        if made == count:
            return
        with contextlib.suppress(ValueError, RuntimeError):
            yield row(case.name, case.profile, case.cluster, case.training, limit_s)
            made += 1


def text_of(rows: list[Row], words: str) -> str:
    """The results as Markdown."""
    lines = [f"| {r.name} | {r.layout} | {len(r.flips)} of {len(r.changes)} | {_flips(r)} |" for r in rows]
    flipping = sum(bool(r.flips) for r in rows)
    vain = sum(change.gains_nothing for r in rows for change in r.flips)
    total = sum(len(r.flips) for r in rows)
    return (
        "# Stability of the chosen layout\n\n"
        f"`python -m benchmarks.planning_time.stability{words}`\n\n"
        f"Another layout is chosen in {flipping} of {len(rows)} cases, with {total} of "
        f"{sum(len(r.changes) for r in rows)} changes; in {vain} of these the layout chosen before would have been "
        f"within {SIMPLE:.0%} of the new one.\n\n"
        "| case | layout | flips | with |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def _flips(row: Row) -> str:
    words = []
    for change in row.flips:
        before = (
            "not legal or does not fit" if change.before_s is None else f"{change.before_s / change.step_s - 1:+.2%}"
        )
        words.append(f"{change.what}: {change.layout} (before: {before})")
    return "; ".join(words)


def main() -> int:
    """Exit code 0 if at most one case in ten flips."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names hold these words")
    parser.add_argument("--chains", type=int, default=0, help="so many random chains in place of the ten cases")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of each search")
    parser.add_argument("--out", type=Path, help="folder for stability.md")
    given = parser.parse_args()
    rows, words = [], f' --only "{given.only}"' if given.only else ""
    found = (row_of(case, given.limit) for case in CASES if given.only in case.name)
    if given.chains:
        found, words = rows_of_chains(given.chains, given.limit), f" --chains {given.chains}"
    for each in found:
        rows.append(each)
        print(f"{each.name}: {len(each.flips)} of {len(each.changes)} flip", file=sys.stderr, flush=True)
    words += "" if given.limit == LIMIT_S else f" --limit {given.limit:g}"
    text = text_of(rows, words)
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "stability.md").write_text(text)
    return int(10 * sum(bool(each.flips) for each in rows) > len(rows))


if __name__ == "__main__":
    sys.exit(main())
