"""What tensor parallelism cuts of every model of the zoo, and the shares of work and weights that it divides.

python -m benchmarks.accuracy.cuts
"""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.cost.tensor_costs import mode_costs
from meshwright.planner.plan.legality import chosen_cuts, is_sequence_cut
from meshwright.planner.plan.shape import Shape
from meshwright.profiler.model.model_profile import Costs, LayerClass, ModelProfile, TensorCut, amount_at

from . import cases
from .report import Check, publish

DEGREES = (2, 4, 8)

Sums = tuple[float, float, float, float]
"""(FLOPs, those that are divided, parameters, those that are divided)"""


def _flops(costs: Costs, tensor: int) -> float:
    """FLOPs of one sample, forward and backward."""
    return sum(amount_at(op.flops, 2, tensor) - amount_at(op.flops, 1, tensor) for op in costs.operators)


def sums(layer_class: LayerClass, degree: int) -> Sums:
    """Of one layer, with everything cut that the degree divides."""
    chosen = chosen_cuts(layer_class, Shape(1, 1, degree, 1, 1, 1))
    whole = _flops(layer_class.whole, 1)
    left = _flops(mode_costs(layer_class, chosen, False), degree)
    cut = {name for i in chosen for name in layer_class.cuts[i].sharded}
    elements = sum(p.num_elements for p in layer_class.parameters)
    divided = sum(p.num_elements for p in layer_class.parameters if p.name in cut)
    return whole, (whole - left) / (1 - 1 / degree), elements, divided


def _added(every: Sequence[Sums]) -> Sums:
    flops, cut_flops, elements, cut_elements = (sum(values) for values in zip(*every, strict=True))
    return flops, cut_flops, elements, cut_elements


def _shares(every: Mapping[int, Sums]) -> dict[str, str]:
    def share(part: float, of: float) -> str:
        return f"{part / of:.0%}" if of else "-"

    work = {f"work /{degree}": share(s[1], s[0]) for degree, s in every.items()}
    return work | {f"weights /{degree}": share(s[3], s[2]) for degree, s in every.items()}


def _words(cut: TensorCut) -> str:
    """A cut as a table shows it: columns, what lies between, and the row after them."""

    def last(names: Sequence[str]) -> str:
        return ", ".join(name.rpartition(".")[2] or "the layer" for name in names)

    between = f" ({last(cut.between)})" if cut.between else ""
    rows = f" > {last(cut.rows)}" if cut.rows else ""
    entries = f", after {last(cut.entries)}" if cut.entries else ""
    return f"{cut.kind}: {last(cut.columns)}{between}{rows}{entries}"


def rows_of(name: str, profile: ModelProfile) -> list[dict[str, Any]]:
    """One row for each kind of layer that holds weights (classes that differ in sizes only are one), and their sum."""
    counts: dict[int, int] = defaultdict(int)
    for layer in profile.layers:
        counts[layer.layer_class] += 1
    alike: dict[tuple[str, str, str], list[tuple[int, LayerClass]]] = defaultdict(list)
    for index, layer_class in enumerate(profile.classes):
        if any(len(p.shape) > 1 for p in layer_class.parameters):
            base = re.sub(r"\.\d+$", "", layer_class.name)
            cuts = "; ".join(map(_words, layer_class.cuts)) or "whole"
            on_slices = is_sequence_cut(layer_class, Shape(1, 1, 2, 1, 1, 1, sequence=True))
            alike[base, cuts, "yes" if on_slices else ""].append((counts[index], layer_class))
    rows, everything = [], []
    for (base, cuts, on_slices), members in alike.items():
        held = {d: _added([tuple(n * x for x in sums(c, d)) for n, c in members]) for d in DEGREES}  # type: ignore[misc]
        everything.append(held)
        rows.append(
            {"model": name, "layers": f"{sum(n for n, _ in members)} {base}", "cut": cuts, "on slices": on_slices}
            | _shares(held)
        )
    total = {d: _added([held[d] for held in everything]) for d in DEGREES}
    return [*rows, {"model": name, "layers": "in all", "cut": "", "on slices": ""} | _shares(total)]


def reasons(name: str, profile: ModelProfile) -> list[str]:
    """Why modules stay whole, each reason once, layer numbers left out."""
    told = (re.sub(r"\.\d+\.", ".*.", note) for note in profile.notes if "not cut" in note)
    return [f"{name}: {note}" for note in dict.fromkeys(told)]


def checks(profiles: Mapping[str, ModelProfile]) -> list[Check]:
    """The table of some models."""
    rows = [row for name, profile in profiles.items() for row in rows_of(name, profile)]
    totals = [row for row in rows if row["layers"] == "in all"]
    most = [row["model"] for row in totals if row["work /2"] != "-" and int(row["work /2"].rstrip("%")) >= 90]
    shares = {f"{what} /{degree}": "" for what in ("work", "weights") for degree in DEGREES}
    return [
        Check(
            name="cuts",
            title="Tensor parallelism by model and kind of layer",
            target="none: what is cut trains as in one process (tests/test_cut_models.py, tests/test_equal_numbers.py)",
            columns={"model": "", "layers": "", "cut": "", "on slices": "", **shares},
            rows=rows,
            verdict=f"{len(totals)} models: at least 90% of the FLOPs of {len(most)} are divided at tensor=2",
            passed=True,
            notes=[
                "work: FLOPs, forward and backward, that 1/tensor of is left on each rank, of all; weights: parameters",
                "on slices: runs on slices of the sequence between its cuts",
                "cut: with everything applied that the degree divides; the search leaves whole what is not worth it",
                *(reason for name, profile in profiles.items() for reason in reasons(name, profile)),
            ],
        )
    ]


def main() -> int:
    """Print and write the table."""
    return publish(checks({name: cases.profile_of(loaded) for name, loaded in cases.whole_models().items()}))


if __name__ == "__main__":
    sys.exit(main())
