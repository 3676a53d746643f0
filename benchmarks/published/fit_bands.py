"""Writes the bands of predictions from the residuals of published runs: `python -m benchmarks.published.fit_bands`."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from meshwright.planner.cost import bands
from meshwright.planner.cost.bands import Band

from .clusters import PRESETS
from .metrics import memory_error, quantile
from .pricing import Priced, price_all
from .rows import DATA, read_folders

FITTED = Path(__file__).parent / "fitted"

OUT = Path(bands.__file__).with_name("bands.toml")

FEWEST = 15
"""Kinds with fewer runs take the band of all hosts, or of all precisions and hosts, or of all runs, and twice as wide a
one (of logarithms)."""

WIDER = 2.0


def band(errors: Sequence[tuple[float, float]], wider: float) -> Band:
    """Band of signed log(predicted / measured) with weights. wider: factor on the logarithms."""
    values, weights = zip(*errors, strict=True)
    low, high = (math.exp(-wider * quantile(values, weights, share)) for share in (0.9, 0.1))
    return Band(round(low, 3), round(high, 3), len(errors))


def time_bands(found: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Band]:
    """Kind -> band of step time. found: kind -> (log(predicted / measured), weight) of rows that the constants were not
    fitted to."""
    result, everything = {}, [error for part in found.values() for error in part]
    for model, precision in itertools.product(("dense", "experts"), ("16 bit", "low precision")):
        for hosts in ("one host", "several hosts"):
            start = f"{model}, {precision}"
            of_kind = found.get(f"{start}, {hosts}", [])
            of_hosts = [e for kind, part in found.items() if kind.startswith(start) for e in part]
            of_model = [e for kind, part in found.items() if kind.startswith(model) for e in part]
            errors = next((part for part in (of_kind, of_hosts, of_model) if len(part) >= FEWEST), everything)
            result[f"{start}, {hosts}"] = band(errors, 1.0 if errors is of_kind else WIDER)
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
    """Writes the bands: of step time from the rows of fit.json that were left out, of memory from all rows, as much
    wider as errors were larger for rows that the constants had not been fitted to; and what those runs are of."""
    time = json.loads((FITTED / "fit.json").read_text())["bands"]
    memory = json.loads((FITTED / "memory.json").read_text())["errors"]
    lines = [
        "# Measured over predicted, 10% and 90% quantiles, of published runs by kind: of step time, of runs that the",
        "# constants were not fitted to; of memory, as much wider than in sample as errors are outside of it. By",
        f"# python -m benchmarks.published.fit_bands, {datetime.now(UTC):%Y-%m-%d}.",
    ]
    priced = price_all(read_folders([DATA]))
    tables = {
        "time": {kind: Band(*values) for kind, values in time.items()},
        "memory": memory_bands(priced, memory["left out"]["p90"] / memory["in-sample"]["p90"]),
    }
    for what, kinds in tables.items():
        lines += ["", f"[{what}]"]
        lines += [f'"{kind}" = {{ low = {b.low}, high = {b.high}, runs = {b.runs} }}' for kind, b in kinds.items()]
    rows = [one.row for one in priced]
    sizes = [row.model["params_b"] for row in rows if row.model.get("params_b")]
    devices = {PRESETS[name].device for row in rows if (name := str(row.cluster["gpu"])) in PRESETS}
    lines += [
        "",
        "[runs]",
        f"fewest_parameters = {round(min(sizes) * 1e9)}",
        f"devices = {json.dumps(sorted(devices))}",
    ]
    OUT.write_text("\n".join(lines) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    main()
