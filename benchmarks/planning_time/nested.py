"""Narrower questions against wider ones: no pinned plan may be faster than what the open search says of all plans.

    python -m benchmarks.planning_time.nested [--questions 2000] [--out FOLDER]

Random chains of unequal layers and small real models, on 2 to 64 GPUs, equal and unequal, over networks from 0.1 GB/s
to NVLink. Each is first planned with nothing decided, then with schedule, pipeline degree, micro-batch and virtual
stages pinned, alone and together. A pinned plan that is faster than the open search's proven bound is a fault, and so
is one more than 0.1% faster than a plan that was called optimal. Profiles of real models are made on the way, which
takes torch.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from meshwright.planner.answers.search import search
from meshwright.planner.plan.legality import divisors
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.solver import SolverError
from meshwright.profiler import load_device, load_model
from meshwright.profiler.machine.cluster import ClusterSpec, HostGroup, Link
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

from .instances import random_layers

FASTER = 1e-3
"""A pinned plan may be so much faster than an `optimal` one."""

NETWORKS = (1e8, 1e9, 1e10, 5e10, 4e11)
"""Bytes per second between hosts: from 0.1 GB/s to NVLink."""

CLUSTERS = ((1, 2), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 4), (2, 8), (8, 4), (8, 8))
"""(hosts, devices of each)."""

SCHEDULES: tuple[Schedule, ...] = ("none", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v")

MODELS = ("gpt.py", "mlp.py", "unet.py", "resnet50.py", "gpt2", "t5_small")
"""Small real ones, of benchmarks/models."""

ONE_IN = 4
"""So many questions are of random chains for one of a real model."""

MOST_PINS = 24
"""Narrower questions of one case."""

LIMIT_S = 20.0
"""Of the open search; a narrower one ends by itself, or at the same limit."""


@dataclass(frozen=True)
class Case:
    """A model on a cluster with a batch."""

    name: str
    profile: ModelProfile
    cluster: ClusterSpec
    training: TrainingSpec


@dataclass(frozen=True)
class Narrower:
    """A question with something decided, beside the open one. Seconds of steps."""

    case: str
    pins: str
    found_s: float
    open_s: float
    bound_s: float
    status: str

    @property
    def is_fault(self) -> bool:
        """Whether it is faster than the open search said any plan can be."""
        too_fast = self.found_s < self.bound_s * (1 - 1e-9)
        return too_fast or (self.status == "optimal" and self.found_s < self.open_s * (1 - FASTER))


def cases(seed: int, real: list[tuple[str, ModelProfile]]) -> Iterator[Case]:
    """Random cases without end; one in so many with a real model."""
    draw = random.Random(seed)
    for number in range(sys.maxsize):
        hosts, per_host = draw.choice(CLUSTERS)
        network = Link(bandwidth=draw.choice(NETWORKS), latency=draw.choice((5e-6, 2e-5)))
        if real and number % ONE_IN == 0:
            name, profile = draw.choice(real)
        else:
            name, profile = f"chain {number}", random_layers(draw, draw.randint(6, 16))
        kinds = [draw.choice(("a100-80gb", "h100-80gb"))]
        if hosts % 2 == 0 and draw.random() < 0.25:
            kinds = ["a100-80gb", "h100-80gb"]
        memory = draw.choice((1.0, 0.25, 0.05, 0.02))
        devices = [device.model_copy(update={"memory": device.memory * memory}) for device in map(load_device, kinds)]
        groups = tuple(
            HostGroup(count=hosts // len(kinds), devices_per_host=per_host, device=each, link=each.link)
            for each in devices
        )
        on = ClusterSpec(name="nested", hosts=groups, network=network)
        batch = hosts * per_host * draw.choice((1, 2, 4))
        training = TrainingSpec(global_batch=batch, seq_len=profile.seq_len, memory_margin=0.0)
        yield Case(f"{name}, {hosts} x {per_host}, {network.bandwidth / 1e9:g} GB/s", profile, on, training)


def pins_of(case: Case, draw: random.Random) -> list[Pins]:
    """Some of the questions with schedule, pipeline degree and micro-batch decided, alone and together."""
    number = case.cluster.num_devices
    pipelines = [None, *(d for d in divisors(number) if 1 < d <= len(case.profile.layers))]
    sizes = [None, *divisors(case.training.global_batch)[:4]]
    pairs = product((None, *SCHEDULES), pipelines, sizes, (None, 2))
    found = [
        Pins(schedule=schedule, pipeline=pipeline, micro_batch=size, virtual_stages=virtual)
        for schedule, pipeline, size, virtual in pairs
        if (schedule, pipeline, size) != (None, None, None) and (virtual is None or schedule == "interleaved")
    ]
    return draw.sample(found, min(MOST_PINS, len(found)))


def narrower(case: Case, draw: random.Random) -> tuple[float, str, list[Narrower]] | None:
    """(gap, status, every narrower question with a plan) of a case; None where nothing fits."""
    try:
        widest = search(case.profile, case.cluster, case.training, time_limit_s=LIMIT_S)
    except (ValueError, SolverError, RuntimeError):
        return None
    certificate, found = widest.certificate, []
    for pins in pins_of(case, draw):
        explorer = Explorer(case.profile, case.cluster, case.training)
        best = explorer.explore(pins, time.monotonic() + LIMIT_S).best
        if best is not None:
            seconds = best.seconds + explorer.model.software.step_s
            words = f"{pins.schedule} {pins.pipeline} {pins.micro_batch} {pins.virtual_stages}: {best.shape.label}"
            found.append(
                Narrower(case.name, words, seconds, certificate.fastest_s, certificate.bound, certificate.status)
            )
    return certificate.gap, certificate.status, found


def real_profiles() -> list[tuple[str, ModelProfile]]:
    """Profiles of the small real models."""
    folder = Path(__file__).parent.parent / "models"
    return [(name, trace(load_model(str(folder / name)))) for name in MODELS]


def main() -> int:
    """Exit code 0 if no narrower question has a faster answer than the open one allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chains-only", action="store_true", help="no real models, and so no torch")
    parser.add_argument("--out", type=Path, help="folder for nested.md")
    given = parser.parse_args()
    start, draw = time.process_time(), random.Random(given.seed)
    asked: list[Narrower] = []
    gaps: list[float] = []
    num_optimal = 0
    for case in cases(given.seed, [] if given.chains_only else real_profiles()):
        if len(asked) >= given.questions:
            break
        found = narrower(case, draw)
        if found is None:
            continue
        gaps.append(found[0])
        num_optimal += found[1] == "optimal"
        asked += found[2]
        for each in found[2]:
            if each.is_fault:
                print(each, file=sys.stderr, flush=True)
    faults = [each for each in asked if each.is_fault]
    faster = [1 - each.found_s / each.open_s for each in asked]
    told = "none is faster than the open search said any plan can be" if not faults else f"{len(faults)} are FAULTS"
    text = (
        "# Narrower questions against wider ones\n\n"
        f"`python -m benchmarks.planning_time.nested --questions {given.questions}`\n\n"
        f"{len(asked):,} pinned questions of {len(gaps)} cases in {time.process_time() - start:.0f} CPU s: {told}.\n"
        f"Open searches called optimal: {num_optimal} of {len(gaps)}; stated gap {median(gaps):.2%} in the median, "
        f"{max(gaps):.1%} at worst. Pinned plans faster than the open search's by more than 0.1%: "
        f"{sum(share > FASTER for share in faster)}, at most by {max(faster, default=0.0):.1%}.\n"
    )
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "nested.md").write_text(text)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
