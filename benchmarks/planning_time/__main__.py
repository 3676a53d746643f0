"""Seconds and memory of planning beside their targets: of the search alone, and from the shell; Markdown, JSON, a plot.

    python -m benchmarks.planning_time [--only WORDS] [--out FOLDER]
    python -m benchmarks.planning_time --without BOUND [BOUND ...]

Search alone: `certificate.search_seconds` of `plan` on a saved profile, the median of three runs, of fewer where they
take long. From the shell: one run with the model profiled anew. Rows are printed as they come. On a machine that does
nothing else: under ten minutes.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.profiler.model.model_profile import load_profile

from . import without
from .cases import CASES, LAYER_WISE, MOST_GROWTH, SCALES, Case
from .layer_wise import Choice, choice

RUNS = 3
"""Of each search."""

ENOUGH_S = 6.0
"""Wall seconds of a case's searches after which it is not run again."""

TIME_LIMIT_S = 30
"""Of each search."""

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """What one case took. shapes: total, rejected, pruned, solved; the plan as words; peak_gib: of the largest of its
    processes, with the model's trace where that is timed, too."""

    name: str
    plan: str
    status: str
    gap: float | None
    shapes: dict[str, int]
    search_s: float | None
    search_target_s: float | None
    shell_s: float | None
    shell_target_s: float | None
    peak_gib: float | None

    @classmethod
    def failed(cls, case: Case, said: str) -> "Timing":
        """That of a case without an answer."""
        return cls(case.name, said, "no plan", None, {}, None, case.search_s, None, case.shell_s, None)

    @property
    def is_met(self) -> bool | None:
        """Whether the targets are met; None where there are none."""
        if self.search_s is None:
            return False
        pairs = ((self.search_s, self.search_target_s), (self.shell_s, self.shell_target_s))
        met = [found <= target for found, target in pairs if found is not None and target is not None]
        return all(met) if met else None


class FailedError(RuntimeError):
    """What `plan` said instead of an answer."""


def run(arguments: Sequence[str], out: Path) -> tuple[float, float]:
    """(wall seconds, peak GiB) of one run of `plan` as a process of its own, whose output goes to a file. Raises
    FailedError."""
    command = shutil.which("plan")
    if command is None:
        raise SystemExit("no `plan` on PATH: pip install -e . first")
    errors = out.with_suffix(".errors")
    with out.open("w") as told, errors.open("w") as refused:
        start = time.monotonic()
        actions = [(os.POSIX_SPAWN_DUP2, told.fileno(), 1), (os.POSIX_SPAWN_DUP2, refused.fileno(), 2)]
        environment = {**os.environ, "MESHWRIGHT_CACHE": "off"}  # what a first call takes
        process = os.posix_spawn(command, [command, *arguments], environment, file_actions=actions)
        _, status, usage = os.wait4(process, 0)
        wall_s = time.monotonic() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise FailedError(" ".join(errors.read_text().split()) or f"plan {' '.join(arguments)} failed")
    return wall_s, usage.ru_maxrss / 2**20


def timed(case: Case, folder: Path, from_shell: bool) -> Timing:
    """What a case takes. folder: keeps profiles for the cases that share them."""
    profile = folder / f"{case.model}_{case.seq_len}.json"
    if not profile.exists():
        run(["profile", str(case.path), "-o", str(profile), *case.length], folder / "said")
    where = ["--gpus", str(case.gpus), "--device", case.device]
    if case.cluster is not None:
        (folder / "cluster.toml").write_text(case.cluster)
        where = ["--cluster", str(folder / "cluster.toml")]
    job = [*where, *case.job, "--time-limit", str(TIME_LIMIT_S), "--json", "-o", str(folder / "plan.json")]
    found, peaks, spent_s = [], [], 0.0
    while len(found) < RUNS and spent_s < ENOUGH_S:
        wall_s, peak_gib = run([str(profile), *job], folder / "said")
        found.append(json.loads((folder / "said").read_text()))
        peaks.append(peak_gib)
        spent_s += wall_s
    shell_s = None
    if from_shell:
        shell_s, peak_gib = run([str(case.path), *job], folder / "said")
        peaks.append(peak_gib)
    certificate = found[0]["certificate"]
    return Timing(
        name=case.name,
        plan=Plan.load(folder / "plan.json").label,
        status=certificate["status"],
        gap=certificate["gap"],
        shapes=certificate["shapes"],
        search_s=statistics.median(each["certificate"]["search_seconds"] for each in found),
        search_target_s=case.search_s,
        shell_s=shell_s,
        shell_target_s=case.shell_s,
        peak_gib=max(peaks),
    )


ELSEWHERE = """
The optimum against brute force, CBC, HiGHS and dynamic programming: [brute_force.md](brute_force.md). Plans for
published set-ups of experts: [experts.md](../../published/results/experts.md). Unequal devices against all as the
slowest: [unequal.md](unequal.md).
"""


HEAD = (
    "| work | plan | gap | shapes | rejected | pruned | solved | search s | target s | from the shell s | target s "
    "| peak GiB | met |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(each: Timing) -> str:
    """A line of the table."""
    known = ("total", "rejected", "pruned", "solved")
    counts = " | ".join(f"{each.shapes[name]:,}" if each.shapes else "" for name in known)
    times = (each.search_s, each.search_target_s, each.shell_s, each.shell_target_s, each.peak_gib)
    numbers = " | ".join("" if value is None else f"{value:.2f}" for value in times)
    met = {None: "", True: "yes", False: "**no**"}[each.is_met]
    met += "" if each.status == "optimal" else f" ({each.status})"
    gap = "" if each.gap is None else f"{each.gap:.2%}"
    return f"| {each.name} | {each.plan} | {gap} | {counts} | {numbers} | {met} |"


def table(timings: Sequence[Timing]) -> str:
    """Markdown, a line for each case."""
    return "\n".join([HEAD, *map(line, timings)])


def growth(scales: Sequence[Timing]) -> str:
    """How much longer the search takes on the most GPUs than on the fewest."""
    most, fewest = scales[-1].search_s, scales[0].search_s
    told = f"{scales[-1].name} / {scales[0].name}"
    if most is None or fewest is None:
        return f"{told}: no plan; target at most {MOST_GROWTH:.0f} times as long: **not met**"
    met = "met" if most <= MOST_GROWTH * fewest else "**not met**"
    return f"{told}: {most / fewest:.1f} times as long; target at most {MOST_GROWTH:.0f}: {met}"


def more_memory(timings: Sequence[Timing]) -> str:
    """How long the layer-wise choice takes with more memory beside how long with less."""
    less, more = (next(each for each in timings if each.name == name) for name in LAYER_WISE)
    if more.search_s is None or less.search_s is None:
        return f"{more.name} / of 40 GB: no plan; **not met**"
    met = "met" if more.search_s <= less.search_s else "**not met**"
    return (
        f"{more.name} / of 40 GB: {more.search_s:.2f} s / {less.search_s:.2f} s, {more.shapes['solved']} / "
        f"{less.shapes['solved']} shapes solved; target at most as long: {met}"
    )


WIDER = (Pins(), Pins(parts=True), Pins(everything=True))
"""Pins under which the options of a layer are counted, and chosen from."""


def told_choices(choices: Sequence[Choice]) -> str:
    """How many options a block has, and what the choice alone takes, in words."""
    usual, with_parts, everything = choices
    met = "met" if everything.more_s <= everything.less_s else "**not met**"
    return (
        f"Options of each of the 32 blocks there: {everything.options}, of which {usual.options} are in the usual "
        f"search and {with_parts.options} in that with recompute of parts. The choice alone, for one shape "
        f"(micro-batches of 1), 80 GB / 40 GB: {1e3 * everything.more_s:.1f} ms / {1e3 * everything.less_s:.1f} ms, "
        f"{met}; with recompute of parts {1e3 * with_parts.more_s:.1f} ms / {1e3 * with_parts.less_s:.1f} ms"
    )


def main() -> None:
    """Time all cases, or those whose name holds some words."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning_time", description=__doc__)
    parser.add_argument("--only", metavar="WORDS", default="", help="cases whose name holds these words")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=RESULTS,
        help="where results are written; with --only nothing is without it",
    )
    parser.add_argument(
        "--without", metavar="BOUND", nargs="+", help="only measure what these bounds buy (`each`: all in turn)"
    )
    asked = parser.parse_args()
    if asked.without:
        asked.out.mkdir(parents=True, exist_ok=True)
        command = f"`python -m benchmarks.planning_time --without {' '.join(asked.without)}`"
        text = f"# What bounds buy\n\n{command}\n\n{without.told(asked.without)}\n"
        (asked.out / "without.md").write_text(text)
        return
    begun = time.monotonic()
    cases = [case for case in CASES if asked.only.lower() in case.name.lower()]
    with tempfile.TemporaryDirectory() as name:
        print(HEAD, flush=True)
        timings = [_told(case, Path(name), from_shell=True) for case in cases]
        block = Path(name) / "llama3_8b_None.json"
        choices = [choice(load_profile(block), pins) for pins in WIDER] if block.exists() else []
        scales = [] if asked.only else [_told(case, Path(name), from_shell=False) for case in SCALES]
    took_min = (time.monotonic() - begun) / 60
    if asked.only and asked.out == RESULTS:
        return  # rows have been printed; a table of these alone would take the place of the whole one
    asked.out.mkdir(parents=True, exist_ok=True)
    text = (
        "# Planning time\n\n"
        f"`python -m benchmarks.planning_time`, {os.cpu_count()} cores, {took_min:.0f} minutes\n\n{table(timings)}\n"
    )
    if scales:
        text += f"\n{more_memory(timings)}\n\n{told_choices(choices)}\n{ELSEWHERE}\n"
        text += f"## More GPUs\n\n{growth(scales)}\n\n{table(scales)}\n"
        text += "\n![Search time over GPUs](scaling.svg)\n"
    (asked.out / "planning_time.md").write_text(text)
    document = {"cases": [asdict(each) for each in timings], "scales": [asdict(each) for each in scales]}
    (asked.out / "planning_time.json").write_text(json.dumps(document, indent=1) + "\n")
    if scales:
        print(f"\n{growth(scales)}\n{more_memory(timings)}\n{took_min:.0f} minutes")


def _told(case: Case, folder: Path, from_shell: bool) -> Timing:
    """What a case takes, or says instead of an answer; its line is printed."""
    try:
        timing = timed(case, folder, from_shell)
    except FailedError as error:
        timing = Timing.failed(case, str(error))
    print(line(timing), flush=True)
    return timing


if __name__ == "__main__":
    main()
