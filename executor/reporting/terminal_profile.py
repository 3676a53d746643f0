"""What people see of a profile: layers, classes with their costs, and operators."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...profiler.machine.units import format_bytes, format_count, format_flops_per_s
from ...profiler.model.dimensions import dimensions
from ...profiler.model.model_profile import ModelProfile, amount_at
from .report import collapse
from .terminal import hanging, make_table, print_notes, print_titled


def print_profile(console: Console, profile: ModelProfile) -> None:
    """What was found in a model: its layers by class, parameters and FLOPs."""
    sequence = "no sequence" if profile.seq_len is None else f"sequences of {profile.seq_len:,}"
    per_sample = format_flops_per_s(profile.flops_per_sample()).removesuffix("/s")
    console.print(
        Text(
            f"{profile.name}, {format_count(profile.num_parameters)} parameters, {sequence}, "
            f"{per_sample} per sample, forward and backward",
            style="bold",
        )
    )
    table = make_table()
    table.add_column("layers", ratio=3, overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("class", ratio=2)
    table.add_column("params of one", justify="right", no_wrap=True)
    table.add_column("tensor parallel", ratio=2)
    runs: list[tuple[int, list[str]]] = []
    for layer in profile.layers:
        if runs and runs[-1][0] == layer.layer_class:
            runs[-1][1].append(layer.name)
        else:
            runs.append((layer.layer_class, [layer.name]))
    for index, names in runs:
        layer_class = profile.classes[index]
        cuts = ", ".join(dict.fromkeys(cut.kind for cut in layer_class.cuts)) or "stays whole"
        num_parameters = sum(parameter.num_elements for parameter in layer_class.parameters)
        table.add_row(collapse(names), str(len(names)), layer_class.name, format_count(num_parameters), cuts)
    print_titled(console, "Layers in execution order", table)
    print_titled(console, "One layer of each class, one sample in bf16", _class_table(profile))
    for label, told in _special(profile):
        console.print(hanging(label, Text(told), "dim"))
    print_notes(console, [*filter(None, [profile.untrained]), *profile.told, *profile.notes])


def _class_table(profile: ModelProfile) -> Table:
    """FLOPs of a layer, and what it keeps for backward under each way to recompute."""
    table = make_table()
    table.add_column("class", overflow="fold")
    for name in ("forward", "backward"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kept", "selective", "full", "peak above"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer_class in profile.classes:
        costs = layer_class.whole
        flops = dict.fromkeys(("forward", "backward"), 0.0)
        for op in costs.operators:
            flops["forward" if op.part == "forward" else "backward"] += amount_at(op.flops, 1)
        peak = max(costs.forward_transient.at(1, 2), costs.backward_transient.at(1, 2))
        table.add_row(
            layer_class.name,
            *(format_flops_per_s(count).removesuffix("/s") for count in flops.values()),
            *(format_bytes(kept.at(1, 2)) for kept in (costs.saved, costs.selective, costs.full)),
            format_bytes(peak),
        )
    return table


def _special(profile: ModelProfile) -> list[tuple[str, str]]:
    """(label, sentence) on what decides memory and parallelism and is seen in no column."""
    fused = [c.name for c in profile.classes if any(op.kind == "attention" for op in c.whole.operators)]
    tokens = profile.tokens_per_sample
    banks = [
        f"{bank.count} in {bank.module} of {c.name}, {amount_at(bank.routed, 1) / tokens:g} for each token"
        for c in profile.classes
        for bank in c.experts
    ]
    told = [("attention", f"fused in {', '.join(fused)}")] if fused else []
    parts = {", ".join(part.name for part in c.parts): c.name for c in reversed(profile.classes) if c.parts}
    told += [("parts", f"{names} of {name}, for recompute=parts:...") for names, name in reversed(parts.items())]
    return told + [("experts", bank) for bank in banks]


_SHORT = {"batch": "b", "sequence": "s", "vocabulary": "vocab"}


def print_operators(console: Console, profile: ModelProfile) -> None:
    """Every operator of every class: what it is, where, what it does, and over which dims."""
    for index, layer_class in enumerate(profile.classes):
        table = make_table()
        for name in ("operator", "kind", "module", "part"):
            table.add_column(name)
        for name in ("FLOPs", "moved"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("grows with")
        for number, op in enumerate(layer_class.whole.operators):
            found = dimensions(profile, index, number)
            flops = amount_at(op.flops, 1)
            table.add_row(
                op.name if op.kernels == 1.0 else f"{op.name} x {op.kernels:,.0f}",
                op.kind,
                op.module or "-",
                op.part,
                format_flops_per_s(flops).removesuffix("/s") if flops else "-",
                format_bytes(op.moved.at(1, 2)),
                " ".join(
                    _SHORT.get(name, name) + ("" if power == 1 else f"^{power:g}") for name, power in found.items()
                ),
            )
        print_titled(console, f"Operators of {layer_class.name}, one sample in bf16 (b: batch, s: sequence)", table)
