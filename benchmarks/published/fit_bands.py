"""Writes the bands of predictions from the residuals of published runs: `python -m benchmarks.published.fit_bands`."""

import itertools
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from meshwright.planner.cost import bands
from meshwright.planner.cost.bands import Band, time_kind

from .clusters import place
from .metrics import memory_error, quantile, time_error
from .pricing import Priced, price_all
from .rows import DATA, read_folders

FITTED = Path(__file__).parent / "fitted"

OUT = Path(bands.__file__).with_name("bands.toml")

FEWEST = 12
"""Kinds with fewer runs take the band of all hosts, or of all precisions and hosts, or of all runs."""

OF_FIT = {"dense, 16 bit": "dense 16 bit", "dense, low precision": "dense low precision"} | {
    "experts, 16 bit": "moe 16 bit",
    "experts, low precision": "moe low precision",
}
"""Kind of our bands, without its hosts -> kind of rows in fit.json."""


def band(errors: Sequence[tuple[float, float]], wider: float) -> Band:
    """Band of signed log(predicted / measured) with weights. wider: factor on the logarithms."""
    values, weights = zip(*errors, strict=True)
    low, high = (math.exp(-wider * quantile(values, weights, share)) for share in (0.9, 0.1))
    return Band(round(low, 3), round(high, 3), len(errors))


def time_bands(priced: Sequence[Priced], widths: dict[str, float]) -> dict[str, Band]:
    """Kind -> band of step time. widths: kind without its hosts -> factor on the logarithms."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in priced:
        error = time_error(one)
        if error is not None and one.setting is not None:
            setting = one.setting
            mixture = setting.sizes.mixture is not None
            kind = time_kind(mixture, setting.precision, place(one.row).cluster.num_hosts)
            found.setdefault(kind, []).append((error, one.row.weight))
    result, everything = {}, [error for part in found.values() for error in part]
    for model, precision in itertools.product(("dense", "experts"), ("16 bit", "low precision")):
        for hosts in ("one host", "several hosts"):
            start = f"{model}, {precision}"
            of_kind = found.get(f"{start}, {hosts}", [])
            of_hosts = [e for kind, part in found.items() if kind.startswith(start) for e in part]
            of_model = [e for kind, part in found.items() if kind.startswith(model) for e in part]
            errors = next((part for part in (of_kind, of_hosts, of_model) if len(part) >= FEWEST), everything)
            result[f"{start}, {hosts}"] = band(errors, widths[start])
    return result


def memory_bands(priced: Sequence[Priced], wider: float) -> dict[str, Band]:
    """Metric -> band of peak memory."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in priced:
        error = memory_error(one)
        if error is not None:
            found.setdefault(one.row.memory_metric, []).append((error, one.row.weight))
    return {metric: band(errors, wider) for metric, errors in sorted(found.items())}


def main() -> None:
    """Prices all rows, and writes the bands. They are as much wider than the residuals as errors were larger for rows
    that the constants had not been fitted to."""
    time = json.loads((FITTED / "fit.json").read_text())["errors"]
    memory = json.loads((FITTED / "memory.json").read_text())["errors"]
    widths = {ours: time["groups out"][kind]["p90"] / time["in-sample"][kind]["p90"] for ours, kind in OF_FIT.items()}
    priced = price_all(read_folders([DATA]))
    lines = [
        "# Measured over predicted, 10% and 90% quantiles, of published runs by kind; as much wider than in sample as",
        "# errors are outside of it. Written by python -m benchmarks.published.fit_bands, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
    ]
    tables = {
        "time": time_bands(priced, widths),
        "memory": memory_bands(priced, memory["left out"]["p90"] / memory["in-sample"]["p90"]),
    }
    for what, kinds in tables.items():
        lines += ["", f"[{what}]"]
        lines += [f'"{kind}" = {{ low = {b.low}, high = {b.high}, runs = {b.runs} }}' for kind, b in kinds.items()]
    OUT.write_text("\n".join(lines) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    main()
