"""Scores the planner's predictions on published measurements.

    python -m benchmarks.published.score [FOLDER ...] [--json FILE] [--out FOLDER] [--processes N]

Prints a page of Markdown; --out also writes it with the points that benchmarks.pictures draws. Exit code 2: bad input.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from .pricing import price_all
from .report import Scores
from .rows import DATA, read_folders


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.score", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=f"holds *.jsonl files; default: {DATA}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write scores.md and points.json")
    parser.add_argument("--processes", type=int, metavar="N", help="price on so many cores; default: all")
    given = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        rows = read_folders(given.folders or [DATA])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    priced = price_all(rows, given.processes)
    scores = Scores(priced, without_score=len(rows) - len(priced))
    page = scores.markdown()
    print(page)
    if given.json:
        given.json.write_text(json.dumps(scores.document(), indent=1) + "\n")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "scores.md").write_text(page)
        (given.out / "points.json").write_text(scores.points())
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
