"""Generated models, each asked for several plans: planned and verified, or refused with a rule.

    python -m benchmarks.abuse --models 1000
    python -m benchmarks.abuse --folder models/
    python -m benchmarks.abuse --inputs 3000

prints a line for each failure and a table, and writes both, with every refusal counted by its rule; failures are shrunk
to a minimal model file each. Exit code 1 if there are any.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from . import words
from .folder import Answer, is_well, table_of, written
from .generate import file_of
from .outcomes import FAILURES, Outcome, drawn, outcomes, shrunken

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the models of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("--models", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--plans", type=int, default=3, help="plans of each (default 3)")
    parser.add_argument("--inputs", type=int, help="so many corrupted documents and command lines instead")
    parser.add_argument("--folder", type=Path, help="a folder of model files to ask instead of generated models")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder (default: beside this file)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.folder is not None:
        return _of_a_folder(given.folder, given.plans, given.output)
    if given.inputs is not None:
        return _of_inputs(given.first, given.inputs, given.output)
    started, found = time.monotonic(), list[Outcome]()
    models = 0
    for tree in drawn(given.first, given.models):
        if time.monotonic() - started > 60 * given.minutes:
            break
        models += 1
        for outcome in outcomes(tree, given.plans):
            found.append(outcome)
            if outcome.kind in FAILURES:
                _tell(outcome, given.output)
    summary = summarised(found, models, given.first)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "abuse.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 1 if any(outcome.kind in FAILURES for outcome in found) else 0


def _of_a_folder(folder: Path, plans: int, output: Path) -> int:
    table: dict[str, list[Answer]] = {}
    for name, answers in table_of(sorted(folder.glob("*.py")), plans):
        table[name] = answers
        print(f"{name}: {'well' if is_well(answers, plans) else 'NOT WELL'}", flush=True)
        for answer in answers:
            print(f"  {answer.asked}: {answer.kind}, {answer.said.strip().splitlines()[-1][:300]}", flush=True)
        written(table, output)
    well = sum(is_well(answers, plans) for answers in table.values())
    print(f"{well} of {len(table)} models: profiled, planned and verified, or refused by a rule")
    return 0 if well == len(table) else 1


def _of_inputs(first: int, count: int, output: Path) -> int:
    def tell(found: words.Found) -> None:
        last = found.words.strip().splitlines()[-1][:200]
        print(f"{found.wrong} at seed {found.case.seed}: plan {' '.join(found.case.typed)[:200]}: {last}", flush=True)

    found = words.run(first, count, tell)
    wrong = [each for each in found if each.wrong]
    summary = {
        "inputs": len(found),
        "first_seed": first,
        "exit_codes": dict(sorted(Counter(str(each.code) for each in found).items())),
        "wrong": dict(Counter(each.wrong for each in wrong)),
        "failures": [
            {"seed": each.case.seed, "typed": each.case.typed, "wrong": each.wrong, "words": each.words[-400:]}
            for each in wrong
        ],
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "inputs.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({name: value for name, value in summary.items() if name != "failures"}, indent=1))
    return 1 if wrong else 0


def summarised(found: list[Outcome], models: int, first: int) -> dict[str, object]:
    """Counts of outcomes, and of refusals by rule."""
    rules = Counter(_rule(outcome.words) for outcome in found if outcome.kind == "refused")
    return {
        "models": models,
        "first_seed": first,
        "plans": len(found),
        **dict(sorted(Counter(outcome.kind for outcome in found).items())),
        "refused_by": dict(rules.most_common()),
        "failures": [
            {"seed": o.tree.seed, "pins": o.pins, "kind": o.kind, "words": o.words.strip().splitlines()[-1][:300]}
            for o in found
            if o.kind in FAILURES
        ],
    }


def _rule(said: str) -> str:
    """A refusal without what differs from model to model."""
    said = re.sub(r"^no layout of \d+ GPUs is legal( with [^:]*)?: ", "", said)
    return re.sub(r"\d[\d.e+-]*", "N", said)[:110]


def _tell(outcome: Outcome, folder: Path) -> None:
    least = shrunken(outcome)
    path = folder / f"seed_{outcome.tree.seed}_{outcome.kind}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file_of(least.tree, least.pins, least.words.strip().splitlines()[-1]))
    last = outcome.words.strip().splitlines()[-1][:300]
    print(f"{outcome.kind} at seed {outcome.tree.seed} with {outcome.pins}: {last}\n  least: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
