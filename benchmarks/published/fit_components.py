"""Fits the numbers of kernels.toml to public measurements of single kernels, with whole shapes left out.

    python -m benchmarks.published.fit_components FOLDER [--write]

Minimises sum_i rho(log predicted_i - log measured_i) + WEIGHT sum_k (log number_k / prior_k)^2 over the logarithms of a
family's numbers of one kind and dtype, by Levenberg-Marquardt with the robust rho of Huber, all devices of the family
alike. Folds: shapes (N and K; heads and their width; sizes of an expert layer or an exchange) are dealt to five, and
each is predicted by a fit without it.
--write puts the numbers into planner/cost/kernels.toml, and the errors into fitted/components.md beside this file.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.cost import kernels
from meshwright.planner.cost.kernels import (
    AttentionRates,
    ExchangeRates,
    ExpertRates,
    KernelFamily,
    ProductRates,
    RingRates,
)

from .components import KINDS, Part, parts_of, predicted_s, read

Floats = NDArray[np.float64]
Rates = ProductRates | AttentionRates | ExpertRates | RingRates | ExchangeRates

HUBER = 0.1
"""Residual (of a logarithm) from which a row pulls no harder."""

WEIGHT = 5.0
"""Rows that a prior is worth."""

FOLDS = 5

FAMILIES = {
    "ampere": ("a100-80gb",),
    "hopper": ("h100-80gb", "h200", "h800-80gb"),
    "ada": ("l40s",),
    "blackwell": ("b200", "gb200"),
    "blackwell-ultra": ("b300", "gb300"),
}

PRIORS: dict[str, dict[str, tuple[float, float]]] = {
    "products": {
        "speed": (0.85, 0.1),
        "fill": (150.0, 0.7),
        "launch": (3e-6, 0.7),
        "cast_bytes": (5.0, 0.4),
        "power": (0.1, 1.0),
    },
    "attention": {
        "speed": (0.75, 0.2),
        "head": (40.0, 0.7),
        "fill": (300.0, 0.7),
        "tail": (0.6, 0.5),
        "traffic": (1.0, 0.5),
        "launch": (8e-6, 0.7),
    },
    "experts": {
        "speed": (0.75, 0.1),
        "fill": (150.0, 0.7),
        "weights": (1.25, 0.15),
        "traffic": (0.5, 1.0),
        "permute": (2.0, 0.5),
        "passing": (1.0, 0.7),
        "launch": (4e-5, 0.5),
    },
    "rings": {
        "reach": (1.1, 0.15),
        "pairs": (0.5, 0.5),
        "shared": (1.5, 0.5),
        "reduced": (1.2, 0.15),
        "exchanged": (0.95, 0.15),
        "hop": (1.0, 0.5),
        "base": (6e-6, 0.5),
        "ramp": (0.6, 0.5),
    },
    "exchange": {
        "unit": (40e9, 0.5),
        "own": (4.0, 0.5),
        "header": (4000.0, 0.7),
        "reach": (0.9, 0.15),
        "network": (0.9, 0.15),
        "launch": (4e-5, 0.5),
    },
}
"""Number -> (what is likely before any data, standard deviation of its logarithm)."""

_KINDS = {
    "GEMM": "products",
    "attention": "attention",
    "expert layer": "experts",
    KINDS[3]: "exchange",
    KINDS[4]: "rings",
}
TYPES: dict[str, type[Rates]] = {
    "products": ProductRates,
    "attention": AttentionRates,
    "experts": ExpertRates,
    "rings": RingRates,
    "exchange": ExchangeRates,
}
_FITTED = {"GEMM": "layer", "attention": "inference", "expert layer": "layer"}
"""Which rows of a kind the rates are fitted to: the wide tables of one source."""

ONE_TABLE = ("rings", "exchange")
"""Kinds with one set of numbers for all dtypes."""

SHARED_LINKS = ("ada",)
"""Families whose devices share the links of a host: PCIe, where bandwidth falls with the ranks."""


@dataclass(frozen=True)
class Problem:
    """What one fit is of. dtype: "" where one set of numbers is for all."""

    family: str
    kind: str
    dtype: str
    parts: tuple[Part, ...]

    @property
    def table(self) -> str:
        """Its table in a family."""
        return _KINDS[self.kind]

    @property
    def names(self) -> list[str]:
        """The numbers that are fitted: all that the rows can tell."""
        left_out = set()
        if self.kind == "GEMM" and self.dtype == "bf16":
            left_out = {"cast_bytes"}
        elif self.table == "rings":
            left_out = {"pairs"} if self.family in SHARED_LINKS else {"shared"}
        return [name for name in PRIORS[self.table] if name not in left_out]

    def rates(self, logarithms: Floats) -> Rates:
        """The rates at a point."""
        return TYPES[self.table].model_construct(**dict(zip(self.names, np.exp(logarithms).tolist(), strict=True)))

    def residuals(self, logarithms: Floats, parts: Sequence[Part]) -> Floats:
        """log(predicted / measured) of the rows of parts."""
        rates = self.rates(logarithms)
        family = KernelFamily.model_construct(**{self.table: {self.dtype: rates} if self.dtype else rates}, source="")
        return np.concatenate([np.log(predicted_s(part, family) / part.measured_s) for part in parts])

    def fitted(self, parts: Sequence[Part], start: Floats | None = None) -> Floats:
        """Logarithms of the numbers of least error over the rows of parts. start: where to begin to look."""
        priors = np.array([PRIORS[self.table][name] for name in self.names])
        return least(lambda x: self.residuals(x, parts), np.log(priors[:, 0]), priors[:, 1], start)


def least(residuals: Callable[[Floats], Floats], prior: Floats, spread: Floats, start: Floats | None = None) -> Floats:
    """The point of least robust error plus distance from the prior."""
    here, damping = (prior if start is None else start).copy(), 1e-2
    left = residuals(here)
    cost = _cost(left, here, prior, spread)
    for _ in range(60):
        slopes = np.stack([(residuals(here + step) - left) / 1e-4 for step in 1e-4 * np.eye(len(here))], axis=1)
        pull = np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-12)) / HUBER**2
        matrix = slopes.T @ (pull[:, None] * slopes) + np.diag(WEIGHT / spread**2)
        vector = slopes.T @ (pull * left) + WEIGHT * (here - prior) / spread**2
        for _ in range(8):
            step = np.clip(-np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), vector), -0.5, 0.5)
            moved = residuals(here + step)
            found = _cost(moved, here + step, prior, spread)
            if found < cost:
                break
            damping *= 4.0
        else:
            return here
        gained, here, left, cost, damping = cost - found, here + step, moved, found, max(damping / 5.0, 1e-6)
        if gained < 1e-7 * cost:
            return here
    return here


def _cost(residuals: Floats, here: Floats, prior: Floats, spread: Floats) -> float:
    sizes = np.abs(residuals)
    robust = np.where(sizes < HUBER, sizes**2 / 2, HUBER * (sizes - HUBER / 2)).sum() / HUBER**2
    return float(robust + WEIGHT * (((here - prior) / spread) ** 2).sum() / 2)


def some(part: Part, keep: NDArray[np.bool_]) -> Part:
    """The rows of a part that are kept."""
    shapes = tuple(shape for shape, kept in zip(part.shapes, keep.tolist(), strict=True) if kept)
    sizes = {name: values[keep] for name, values in part.sizes.items()}
    return replace(part, measured_s=part.measured_s[keep], sizes=sizes, shapes=shapes)


def fold_of(part: Part) -> NDArray[np.int64]:
    """[row] -> the fold of its shape."""
    return np.array([crc32(shape.encode()) % FOLDS for shape in part.shapes])


def out_of_fold(problem: Problem, start: Floats | None = None) -> list[tuple[Part, Floats]]:
    """(part, residuals of its rows) by fits without the shapes of their fold. start: where they begin to look."""
    found = [(part, np.zeros(len(part.measured_s))) for part in problem.parts]
    for fold in range(FOLDS):
        within = [fold_of(part) == fold for part in problem.parts]
        point = problem.fitted([some(p, ~w) for p, w in zip(problem.parts, within, strict=True) if (~w).any()], start)
        for (part, residuals), rows in zip(found, within, strict=True):
            if rows.any():
                residuals[rows] = problem.residuals(point, [some(part, rows)])
    return found


def problems_of(parts: Sequence[Part]) -> list[Problem]:
    """What there is to fit."""
    found = []
    for family, devices in FAMILIES.items():
        mine = [part for part in parts if part.device.name in devices]
        for kind, table in _KINDS.items():
            fitting = [part for part in mine if part.kind == kind and part.what == _FITTED.get(kind, part.what)]
            dtypes = sorted({part.dtype for part in fitting}) if table not in ONE_TABLE else [""] if fitting else []
            for dtype in dtypes:
                found.append(Problem(family, kind, dtype, tuple(p for p in fitting if p.dtype == dtype or not dtype)))
    return found


def generations_of(family: str, parts: Sequence[Part], rates: Mapping[str, Rates]) -> tuple[dict[str, float], float]:
    """(speed of attention by generation of its kernels over that of the rates, speed of its backward over its
    forward's): the medians of what rows of training kernels of that family take."""
    mine = [p for p in parts if p.kind == "attention" and p.what != "inference" and p.device.name in FAMILIES[family]]
    mine = [part for part in mine if part.dtype == "bf16"]
    names = sorted({part.what for part in mine})
    found, backward = dict.fromkeys(names, 1.0), 0.8
    for _ in range(4):
        kernels = KernelFamily.model_construct(attention=rates, generations=found, backward=backward, source="")
        back = [_logs(part, kernels, "backward") for part in mine]
        ahead = {name: [_logs(part, kernels, "forward") for part in mine if part.what == name] for name in names}
        both = {name: [_logs(part, kernels, "both") for part in mine if part.what == name] for name in names}
        for name in names:
            alone = np.concatenate(ahead[name])
            found[name] *= math.exp(float(np.median(alone if len(alone) else np.concatenate(both[name]))))
        if any(len(logs) for logs in back):
            backward *= math.exp(float(np.median(np.concatenate(back))))
    return found, backward


def _logs(part: Part, kernels: KernelFamily, which: str) -> Floats:
    """log(predicted / measured) of the rows of a part that are of one pass, or of both."""
    ahead, back = part.sizes["forward"] > 0, part.sizes["backward"] > 0
    rows = ahead & back if which == "both" else (ahead & ~back if which == "forward" else back & ~ahead)
    return np.log(predicted_s(part, kernels) / part.measured_s)[rows]


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.fit_components", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="into planner/cost/kernels.toml and fitted/components.md")
    given = parser.parse_args(arguments)
    try:
        parts, _ = parts_of(read(given.folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    tables: dict[str, dict[str, dict[str, Rates]]] = defaultdict(lambda: defaultdict(dict))
    lines = []
    for problem in problems_of(parts):
        point = problem.fitted(problem.parts)
        inside = np.abs(problem.residuals(point, problem.parts))
        outside = np.abs(np.concatenate([residuals for _, residuals in out_of_fold(problem, point)]))
        tables[problem.family][problem.table][problem.dtype] = problem.rates(point)
        name = f"{problem.family} | {problem.kind} | {problem.dtype or 'all'} | {len(inside)}"
        lines.append(f"| {name} | {_shown(inside)} | {_shown(outside)} |")
    page = "\n".join([_HEAD, *lines, "", _notes(tables), "", _between_hosts(parts, tables), ""])
    print(page)
    if given.write:
        kernels.FILE.write_text(_toml(tables, parts))
        (Path(__file__).parent / "fitted" / "components.md").write_text(page)
    return 0


_HEAD = """# Fit to public measurements of single kernels

`python -m benchmarks.published.fit_components FOLDER --write`. Median / 90th percentile of |ln(predicted / measured)|,
in sample, and of shapes by a fit without them (five folds).

| family | kind | dtype | rows | in sample | shapes left out |
|---|---|---|---|---|---|"""


def _shown(sizes: Floats) -> str:
    return f"{100 * np.median(sizes):.1f}% / {100 * np.quantile(sizes, 0.9):.0f}%"


def _notes(tables: Mapping[str, Mapping[str, Mapping[str, Rates]]]) -> str:
    lines = ["Every number, its range, what was likely before any data, and what it came to:", ""]
    lines += ["| kind | number | range | before | by family (and dtype) |", "|---|---|---|---|---|"]
    for kind, table in _KINDS.items():
        for name, (prior, _) in PRIORS[table].items():
            low, high = bounds(table, name)
            found = [
                f"{family} {dtype} {getattr(rates, name):.3g}".replace("  ", " ")
                for family, kinds in tables.items()
                for dtype, rates in kinds.get(table, {}).items()
                if getattr(rates, name, 0.0)
            ]
            lines.append(f"| {kind} | {name} | {low:g} to {high:g} | {prior:g} | {', '.join(found)} |")
    return "\n".join(lines)


NETWORK_LATENCIES = (0.5e-6, 2e-6, 5e-6, 7.5e-6, 10e-6, 15e-6)
"""Seconds of a hop between hosts that are tried."""


def _between_hosts(parts: Sequence[Part], tables: Mapping[str, Mapping[str, Mapping[str, Rates]]]) -> str:
    """How far collectives between hosts are off by the seconds of a hop, with links in hosts as they were fitted."""
    lines = ["Collectives between hosts by the latency of a hop (comm_cost.py has the rest); presets have 7.5 us:"]
    lines += ["", "| a hop | rows | error | bias |", "|---|---|---|---|"]
    mine = [part for part in parts if part.kind == KINDS[5]]
    for latency in NETWORK_LATENCIES:
        logs = []
        for part in mine:
            network = part.device.network.model_copy(update={"latency": latency})
            there = replace(part, device=part.device.model_copy(update={"network": network}))
            rings = tables[part.device.kernels]["rings"][""]
            logs.append(
                np.log(predicted_s(there, KernelFamily.model_construct(rings=rings, source="")) / part.measured_s)
            )
        found = np.concatenate(logs)
        shown = f"{len(found)} | {_shown(np.abs(found))} | {100 * np.median(found):+.1f}%"
        lines.append(f"| {1e6 * latency:g} us | {shown} |")
    return "\n".join(lines)


def bounds(table: str, name: str) -> tuple[float, float]:
    """The physical range of a number."""
    low = high = math.nan
    for rule in TYPES[table].model_fields[name].metadata:
        low, high = getattr(rule, "ge", low), getattr(rule, "le", high)
    return low, high


def _toml(tables: Mapping[str, Mapping[str, Mapping[str, Rates]]], parts: Sequence[Part]) -> str:
    lines = ["# Kernels by family of devices; planner/cost/kernels.py says what each number means, and its range."]
    lines += ["# Written by `python -m benchmarks.published.fit_components FOLDER --write`."]
    for family, kinds in tables.items():
        attention: Mapping[str, Rates] = kinds["attention"]
        generations, backward = generations_of(family, parts, attention)
        lines += ["", f"[{family}]", f'source = "{_SOURCE}"', f"backward = {backward:.3g}"]
        lines += ["", f"[{family}.generations]", *(f"{name} = {speed:.3g}" for name, speed in generations.items())]
        unaligned = kernels.families()[family].unaligned  # measured apart, by benchmarks.one_gpu.products
        if unaligned.model_fields_set:
            lines += ["", f"[{family}.unaligned]", f"odd = {unaligned.odd}", f"even = {unaligned.even}"]
            lines += [f'source = "{unaligned.source}"']
        for table, by_dtype in kinds.items():
            for dtype, rates in by_dtype.items():
                lines += ["", f"[{family}.{table}{'.' if dtype else ''}{dtype}]"]
                names = [name for name in TYPES[table].model_fields if name in rates.model_fields_set]
                lines += [f"{name} = {getattr(rates, name):.4g}" for name in names]
    return "\n".join(lines) + "\n"


_SOURCE = (
    "fit to public measurements of single kernels (aiconfigurator's tables; attention of training by cuDNN's and "
    "FlashAttention's): benchmarks/published/fitted/components.md"
)


if __name__ == "__main__":
    sys.exit(main())
