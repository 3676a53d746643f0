"""`python -m benchmarks.tuning`: plan tune on emulated clusters, beside measuring everything."""

import argparse
import json
import time
from pathlib import Path

from benchmarks.planned_vs_manual import hosts as network
from benchmarks.planned_vs_manual.models import CASES
from benchmarks.tuning.bench import CLUSTERS, run_case
from benchmarks.tuning.report import markdown

RESULTS = Path(__file__).with_name("results")


def main() -> int:
    """Run what is asked for and not there yet, a file for each; then the table of all that is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="models, by name")
    parser.add_argument("--clusters", type=int, nargs="*", default=list(range(len(CLUSTERS))), help="by number")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of a race")
    parser.add_argument("--steps", type=int, default=7, help="of every plan, for the truth")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    problem = network.problem()
    if problem is not None:
        parser.error(f"links cannot be shaped, for {problem}: run it as root where ip and tc are")
    given.output.mkdir(parents=True, exist_ok=True)
    for number in given.clusters:
        cluster = CLUSTERS[number]
        for case in CASES:
            file = given.output / f"{number}_{case.name.replace(' ', '_')}.json"
            if case.name not in given.cases or (file.exists() and not given.again):
                continue
            with cluster.up(shaped=True) as hosts:
                say(f"{cluster.name}: {case.name}")
                found = run_case(case, cluster, hosts, given.budget, given.steps, say)
            file.write_text(json.dumps(found, indent=1) + "\n")
            say(f"tuned / best {found['tuned_over_best']}, predicted / best {found['predicted_over_best']}")
    documents = [json.loads(file.read_text()) for file in sorted(given.output.glob("*.json"))]
    (given.output / "results.md").write_text(markdown(documents))
    return 0


def say(text: str) -> None:
    """Print at once, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
