"""Every operator of one forward and backward: priced by a fresh calibration, and timed by torch's profiler.

python -m benchmarks.accuracy.calibrated.operators

One rank. Each of an operator's calls counts with the fastest of REPEATS passes, so that what other processes took from
the core in one pass does not count: what is left is the model's own error, by operator.
"""

import collections
import datetime
import os
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.executor.measuring.calibrate import calibrate
from meshwright.planner.cost.compute_cost import operator_s
from meshwright.profiler.machine.cluster import Device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace

FOLDER = Path(__file__).parent
CASES = (("train_gpt", 8), ("mlp", 256))
"""Model, micro-batch."""

REPEATS = 9
WARM_UPS = 3
SHOWN = 10
_SPELLINGS = {"clamp_min": "relu"}
"""What the profiler calls an operator that a profile knows by another name."""


def priced(loaded: LoadedModel, device: Device, batch: int) -> Counter[str]:
    """Operator -> seconds over all layers, forward and backward."""
    seconds: Counter[str] = Counter()
    model = trace(loaded)
    for layer in model.layers:
        for op in model.classes[layer.layer_class].whole.operators:
            seconds[op.name] += operator_s(op, device, "fp32", 4, batch, 1)
    return seconds


def timed(loaded: LoadedModel, batch: int) -> Counter[str]:
    """Operator -> measured seconds over all layers, forward and backward."""
    assert loaded.loss is not None
    module, data = loaded.build(), loaded.batch(batch)

    def one_pass() -> None:
        loaded.loss(module(data[0]), data).backward()
        module.zero_grad()

    for _ in range(WARM_UPS):
        one_pass()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(REPEATS):
            one_pass()
    calls = collections.defaultdict(list)
    for event in seen.events():
        if event.name.startswith("aten::"):
            calls[event.name.removeprefix("aten::")].append((event.time_range.start, event.self_cpu_time_total))
    seconds: Counter[str] = Counter()
    for name, events in calls.items():
        times = [microseconds for _, microseconds in sorted(events)]
        each = len(times) // REPEATS
        best = sum(min(times[i::each]) for i in range(each))
        seconds[_SPELLINGS.get(name, name)] += best * 1e-6
    return seconds


def main() -> None:
    """Measure, print and write operators.md."""
    torch.set_num_threads(1)
    lines = [
        f"`python -m benchmarks.accuracy.calibrated.operators`, {datetime.date.today().isoformat()}, "
        f"torch {torch.__version__}, {os.cpu_count()} shared cores, load {os.getloadavg()[0]:.1f}",
        "",
        f"ms of one forward and backward on one rank; fastest of {REPEATS} passes for each call.",
    ]
    device = calibrate("cpu", 1, quick=True).device
    for name, batch in CASES:
        loaded = load_model(Path(__file__).parents[2] / "models" / f"{name}.py")
        predicted, measured = priced(loaded, device, batch), timed(loaded, batch)
        rows = sorted(measured | predicted, key=lambda op: -max(predicted[op], measured[op]))[:SHOWN]
        shown = [(op, predicted[op], measured[op]) for op in rows]
        total = ("all operators", sum(predicted.values()), sum(measured.values()))
        lines += ["", f"| {name}, micro-batch {batch} | predicted | measured | error |", "|---|---:|---:|---:|"]
        lines += [f"| {op} | {1e3 * p:.2f} | {1e3 * m:.2f} | {p / m - 1:+.0%} |" for op, p, m in [total, *shown] if m]
    text = "\n".join(lines) + "\n"
    (FOLDER / "operators.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
