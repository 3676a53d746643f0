"""`python -m benchmarks.planned_vs_manual`: planned against manual set-ups on an emulated cluster, and the table."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.planned_vs_manual import hosts as network
from benchmarks.planned_vs_manual.bench import TOPOLOGIES, calibrate, compare_case, hosts_of
from benchmarks.planned_vs_manual.figures import figures
from benchmarks.planned_vs_manual.models import CASES
from benchmarks.planned_vs_manual.report import markdown, shown, told
from benchmarks.planned_vs_manual.store import Store, Taken

RESULTS = Path(__file__).with_name("results")


def main() -> int:
    """Run what is asked for and not there yet, and write the table of all that is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned_vs_manual", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="models, by name")
    parser.add_argument("--topologies", type=int, nargs="*", default=list(range(len(TOPOLOGIES))), help="by number")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of every set-up")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the table and a file for every model")
    arguments = parser.parse_args()
    problem = network.problem()
    if problem is not None:
        say(f"links are not shaped, for {problem}: all ranks talk over the loopback; only compute is emulated")
    store = Store(arguments.output)
    for number in arguments.topologies:
        topology = replace(TOPOLOGIES[number], shaped=problem is None)
        with hosts_of(topology) as hosts:
            found = None if arguments.again else store.calibration(topology)
            if found is None:
                started = time.monotonic()
                found = calibrate(topology, hosts, arguments.steps, say)
                store.save_calibration(topology, found, Taken.now(started))
                say(told(topology, found))
            for case in CASES:
                if case.name in arguments.cases and (arguments.again or not store.has(topology, case)):
                    started = time.monotonic()
                    result = compare_case(case, topology, found.device, hosts, arguments.steps, say)
                    taken = Taken.now(started)
                    store.save(topology, case, result, taken)
                    say(told(result, taken))
    results, calibrations, taken = store.everything()
    (arguments.output / "results.md").write_text(markdown(results, calibrations, taken))
    for name, value in figures(results).items():
        say(f"{name}: {shown(name, value)}")
    return 0


def say(text: str) -> None:
    """Print at once, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
