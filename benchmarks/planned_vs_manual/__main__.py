"""`python -m benchmarks.planned_vs_manual`: planned against manual set-ups on an emulated cluster, table and plot."""

import argparse
import json
import time
from pathlib import Path

from benchmarks.planned_vs_manual import hosts as network
from benchmarks.planned_vs_manual.bench import (
    TOPOLOGIES,
    Calibrated,
    Result,
    as_json,
    calibrate,
    compare_case,
    hosts_of,
)
from benchmarks.planned_vs_manual.models import CASES
from benchmarks.planned_vs_manual.report import draw, markdown

RESULTS = Path(__file__).with_name("results")


def main() -> int:
    """Run everything that is asked for, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned_vs_manual", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="models, by name")
    parser.add_argument("--topologies", type=int, nargs="*", default=list(range(len(TOPOLOGIES))), help="by number")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of every set-up")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of table, plot and JSON")
    arguments = parser.parse_args()
    started = time.monotonic()
    problem = network.problem()
    if problem is not None:
        print(f"links are not shaped, for {problem}: all ranks talk over the loopback; only compute is emulated")
    results: list[Result] = []
    calibrations: dict[str, Calibrated] = {}
    for number in arguments.topologies:
        topology = TOPOLOGIES[number]
        with hosts_of(topology, problem is None) as hosts:
            found = calibrations[topology.name] = calibrate(topology, hosts, arguments.steps, print)
            for case in CASES:
                if case.name in arguments.cases:
                    result = compare_case(case, topology, found.device, hosts, arguments.steps)
                    print(f"{topology.name}: {case.name}: planned / best manual {result.ratio:.3f}, tau {result.tau}")
                    for row in result.rows:
                        print(f"    {row}")
                    results.append(result)
    document = as_json(results, calibrations, problem is None, time.monotonic() - started)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "results.md").write_text(markdown(results, document))
    draw(results, arguments.output / "results.png")
    print(json.dumps(document["figures"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
