"""`plan calibrate`: a device file from measurements on this machine's ranks, and what it predicts beside them."""

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ...planner.cost.compute_cost import layer_seconds
from ...planner.cost.refit import MeasuredStep, refit
from ...profiler.machine.calibrate import (
    DTYPES,
    EFFORTS,
    WARM_UPS,
    Clock,
    Effort,
    Measured,
    Timing,
    fit_device,
    measure,
    merged,
    num_ranks_here,
    summary,
)
from ...profiler.machine.cluster import Device, load_device
from ...profiler.machine.local import local_gpus, preset_of
from ...profiler.machine.units import format_flops_per_s, format_seconds
from ...profiler.model.loaded import LoadedModel, split_inputs
from ...profiler.model.model_profile import ModelProfile
from ..parallel.micro_batches import loss_of
from .local_ranks import RankError, run_local_ranks
from .reference_steps import reference_steps

_TIMEOUT_S = 600.0

REPETITIONS = 4
"""Number of runs of every reference step; the steps take turns."""

QUICK_REPETITIONS = 2

_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp32", "fp16")}
"""Kind of device -> the dtypes that are measured on it; activations have the first one."""

_MODEL_STATES = 4
"""Least number of copies of the parameters in memory when a model's layers are timed: parameters, gradients,
activations."""


@dataclass(frozen=True)
class LayerCheck:
    """The layers of one class, or a whole model whose layers cannot be told apart: predicted and measured seconds of
    one layer."""

    name: str
    count: int
    predicted_forward_s: float
    predicted_backward_s: float
    measured_forward_s: float
    measured_backward_s: float
    spread: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1, of forward and backward together."""
        predicted_s = self.predicted_forward_s + self.predicted_backward_s
        return predicted_s / (self.measured_forward_s + self.measured_backward_s) - 1


@dataclass(frozen=True)
class StepCheck:
    """A measured step. before, error: predicted over measured, minus 1, before the device was fitted to the steps and
    after it."""

    label: str
    measured_s: float
    before: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """The measured device, and how well it predicts reference steps and the layers of a model (no layers without
    one)."""

    device: Device
    num_ranks: int
    batch_size: int
    steps: tuple[StepCheck, ...]
    layers: tuple[LayerCheck, ...]


def calibrate(
    device_kind: str = "auto",
    num_ranks: int | None = None,
    quick: bool = False,
    dtypes: Sequence[str] = (),
    loaded: LoadedModel | None = None,
    profile: ModelProfile | None = None,
    batch_size: int = 4,
) -> Calibration:
    """The device of this machine, measured on as many ranks as will be trained on (default: all GPUs, or all cores).

    With a model: also its layers in micro-batches of `batch_size`, timed on all ranks and priced by the new device.
    Raises ValueError if there is no such device, not as many, or no such dtype.
    """
    device_type, ranks = _where(device_kind, num_ranks)
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise ValueError(f"--dtype {unknown[0]}: unknown; the dtypes are {', '.join(DTYPES)}")
    if loaded is not None and profile is not None:
        _check_model_fits(profile, ranks, device_type)
    effort = EFFORTS[device_type, quick]
    answers: list[tuple[Measured, list[LayersTiming]]] = _on_ranks(
        ranks, device_type, tuple(dtypes) or _DTYPES[device_type], effort, loaded, profile, batch_size
    )
    device = fit_device(_preset(device_type), merged([found for found, _ in answers], ranks=True), ranks, device_type)
    if device_type == "cuda":
        device = _with_properties(device, ranks)
    runs = reference_steps(device, ranks, device_type, QUICK_REPETITIONS if quick else REPETITIONS)
    device, steps = fitted_to(device, runs)
    precision = "fp32" if device_type == "cpu" else "bf16"
    checks = [] if profile is None else _checks(profile, device, precision, batch_size, [times for _, times in answers])
    return Calibration(device, ranks, batch_size, steps, tuple(checks))


def fitted_to(device: Device, runs: Sequence[MeasuredStep]) -> tuple[Device, tuple[StepCheck, ...]]:
    """The device, with constants fitted to measured steps; and for each step the errors before and after the fit."""
    found = refit(device, runs)
    checks = (
        StepCheck(run.label, run.step_s, math.expm1(old), math.expm1(new))
        for run, old, new in zip(found.runs, found.before, found.after, strict=True)
    )
    return found.device, tuple(checks)


def _where(device_kind: str, num_ranks: int | None) -> tuple[str, int]:
    """(device type, number of ranks). Raises ValueError if they are not there."""
    gpus = torch.cuda.device_count()  # leaves CUDA alone, so that ranks can be forked
    if device_kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device-kind {device_kind}: unknown; the kinds are auto, cpu, cuda")
    device_type = device_kind if device_kind != "auto" else "cuda" if gpus else "cpu"
    most = gpus if device_type == "cuda" else (os.cpu_count() or 1)
    if most == 0:
        raise ValueError("--device-kind cuda, but there is no GPU here: leave it out, or give --device-kind cpu")
    ranks = most if num_ranks is None else num_ranks
    if not 1 <= ranks <= most:
        what = "GPUs" if device_type == "cuda" else "cores, and ranks that share one would measure the scheduler"
        raise ValueError(f"--ranks {ranks}: give 1 to {most}, for there are {most} {what}")
    return device_type, ranks


def _check_model_fits(profile: ModelProfile, ranks: int, device_type: str) -> None:
    needed = _MODEL_STATES * 4 * profile.num_parameters
    if device_type == "cuda":
        free = min(mib for _, mib in local_gpus()) * 2**20
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks
    if needed > free:
        raise ValueError(
            f"timing the layers of {profile.name} takes at least {needed / 2**30:.1f} GiB on each rank, and there are "
            f"{free / 2**30:.1f} GiB: give a smaller model, or leave MODEL out"
        )


def _on_ranks(ranks: int, device_type: str, *args: Any) -> list[Any]:
    try:
        return run_local_ranks(_on_rank, ranks, device_type, *args, timeout_s=_TIMEOUT_S, device_type=device_type)
    except RankError as error:
        raise ValueError(f"the measurement ended early: {error}") from None


def _on_rank(
    device_type: str,
    dtypes: Sequence[str],
    effort: Effort,
    loaded: LoadedModel | None,
    profile: ModelProfile | None,
    batch_size: int,
) -> tuple[Measured, "list[LayersTiming]"]:
    """What one rank measures; on CUDA it takes its GPU first and joins the others over nccl."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    found = measure(device_type, dtypes, effort)
    if loaded is None or profile is None:
        return found, []
    return found, time_layers(loaded, profile, device_type, batch_size, effort, dtypes[0])


def _preset(device_type: str) -> Device:
    """The preset that gives the numbers which are not measured."""
    if device_type == "cpu":
        return load_device("cpu")
    name, memory_mib = local_gpus()[0]
    return load_device(preset_of(name, memory_mib) or "h100-80gb")


def _with_properties(device: Device, ranks: int) -> Device:
    """The device, with the memory and the number of multiprocessors that the driver tells."""
    name, memory_mib = local_gpus()[0]
    text = f"measured: what the driver says of {name}"
    return device.model_copy(
        update={
            "memory": memory_mib * 2**20,
            "devices_per_host": ranks,
            "sources": {**device.sources, "memory": text, "devices_per_host": "measured: ranks of the calibration"},
        }
    )


def _checks(
    profile: ModelProfile, device: Device, precision: str, batch_size: int, ranks: Sequence[Sequence["LayersTiming"]]
) -> list[LayerCheck]:
    """One row for each class of layers, or for each combination of classes whose layers were timed together."""
    width = 4 if precision == "fp32" else 2
    prices = [layer_seconds(c.whole, device, precision, width, batch_size, 1) for c in profile.classes]
    rows: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
    for same in zip(*ranks, strict=True):
        key = tuple(profile.layers[index].layer_class for index in same[0].layers)
        rows.setdefault(key, []).extend((t.forward.median_s, t.backward.median_s, t.forward.spread) for t in same)
    checks = []
    for key, found in rows.items():
        forward, backward, spread = (summary(column).median_s for column in zip(*found, strict=True))
        names = list(dict.fromkeys(profile.classes[c].name for c in key))
        checks.append(
            LayerCheck(
                names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
                len(found) // len(ranks),
                sum(prices[c].forward for c in key),
                sum(prices[c].backward for c in key),
                forward,
                backward,
                spread,
            )
        )
    return checks


def print_calibration(console: Console, found: Calibration) -> None:
    """Print the main numbers of the device, and a model's layers with their predictions."""
    device = found.device
    lines = [f"{device.name}, {found.num_ranks} rank{'s' if found.num_ranks > 1 else ''} measured at the same time"]
    measured = [name for name in DTYPES if name in device.matmul_samples]
    lines += [f"  {name:4} matmul, best   {format_flops_per_s(device.flops[name])}" for name in measured]
    lines.append(f"  attention           {device.attention_efficiency:.0%} of that forward")
    if device.attention_backward_efficiency is not None:
        lines[-1] += f", {device.attention_backward_efficiency:.0%} backward"
    lines.append(
        f"  memory, best        {device.bandwidth / 1e9:.1f} GB/s, {device.bandwidth_efficiency:.0%} in additions"
    )
    if device.dispatch:
        lines.append(f"  CPU, per operator   {format_seconds(device.dispatch)}")
    else:
        lines.append(f"  smallest kernel     {format_seconds(device.launch)}")
    if found.num_ranks > 1:
        lines.append(
            f"  link                {device.link.bandwidth / 1e9:.3g} GB/s, {format_seconds(device.link.latency)}"
        )
    for line in lines:
        console.print(line, markup=False, highlight=False)
    print_steps(console, found.steps, "Reference steps, to which the device is fitted", "by kernels alone")
    if not found.layers:
        return
    table = Table(title=f"Layers at micro-batch {found.batch_size}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("layer", "number", "forward: predicted", "measured", "backward: predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for row in found.layers:
        times = (
            row.predicted_forward_s,
            row.measured_forward_s,
            row.predicted_backward_s,
            row.measured_backward_s,
        )
        table.add_row(row.name, str(row.count), *map(format_seconds, times), f"{row.error:+.0%}")
    console.print(table)


def print_steps(console: Console, steps: Sequence[StepCheck], title: str, before: str) -> None:
    """Print measured steps, with the errors of predictions before the fit and after it."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("model, set-up", "measured", before, "after the fit"):
        table.add_column(heading, justify="left" if heading == "model, set-up" else "right")
    for step in steps:
        table.add_row(step.label, format_seconds(step.measured_s), f"{step.before:+.0%}", f"{step.error:+.0%}")
    console.print(table)


# --- layers of a model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayersTiming:
    """Times of neighbouring layers that were timed together. layers: their numbers in the profile's chain."""

    layers: tuple[int, ...]
    forward: Timing
    backward: Timing


def time_layers(
    loaded: LoadedModel, profile: ModelProfile, device_type: str, batch_size: int, effort: Effort, dtype: str
) -> list[LayersTiming]:
    """Times of the chain's layers within passes of the whole model on real data, in bf16 with autocast.

    A layer's forward lasts from the call of its first module to that of the next layer's; its backward from the first
    gradient of its output to that of the layer before. Layers without modules are timed together with the one before
    them. If modules do not run in the chain's order, there is a single entry for the whole chain.
    """
    clock = Clock(device_type)
    with torch.device(device_type):
        model = loaded.build().float()
    model.train()
    batch = tree_map(
        lambda leaf: leaf.to(device_type) if isinstance(leaf, torch.Tensor) else leaf, loaded.batch(batch_size)
    )
    groups = _groups(profile)
    runs = []
    for _ in range(WARM_UPS + effort.layer_runs):
        if num_ranks_here() > 1:
            dist.barrier()
        model.zero_grad(set_to_none=True)
        with nullcontext() if dtype == "fp32" else torch.autocast(device_type, DTYPES[dtype]):
            runs.append(_timed_pass(model, loaded, batch, profile, groups, clock))
    runs = runs[WARM_UPS:]
    count = min(len(run) for run in runs)
    if count == 1:
        groups = [tuple(range(len(profile.layers)))]
        runs = [[(sum(f for f, _ in run), sum(b for _, b in run))] for run in runs]
    return [
        LayersTiming(group, summary([run[i][0] for run in runs]), summary([run[i][1] for run in runs]))
        for i, group in enumerate(groups)
    ]


def _groups(profile: ModelProfile) -> list[tuple[int, ...]]:
    groups: list[list[int]] = []
    for index, layer in enumerate(profile.layers):
        if layer.modules or not groups:
            groups.append([index])
        else:
            groups[-1].append(index)
    return [tuple(group) for group in groups]


def _timed_pass(
    model: nn.Module,
    loaded: LoadedModel,
    batch: Any,
    profile: ModelProfile,
    groups: Sequence[tuple[int, ...]],
    clock: Clock,
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each group; a single pair for all if they do not run in the chain's order."""
    forward: list[tuple[int, Any]] = []
    backward: dict[int, Any] = {}
    handles = []

    def leaving(group: int, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: backward.setdefault(group, clock.mark()) and None)

    for number, group in enumerate(groups):
        modules = [name for index in group for name in profile.layers[index].modules]
        if not modules:
            continue
        first, last = model.get_submodule(modules[0]), model.get_submodule(modules[-1])
        handles.append(first.register_forward_pre_hook(lambda *_, n=number: forward.append((n, clock.mark()))))
        handles.append(last.register_forward_hook(lambda *given, n=number: leaving(n, given[2])))
    start = clock.mark()
    args, kwargs = split_inputs(model, batch, loaded.loss is not None)
    output = model(*args, **kwargs)
    loss = loss_of(output) if loaded.loss is None else loaded.loss(output, batch)
    turn = clock.mark()
    loss.backward()
    end = clock.mark()
    clock.synchronise()
    for handle in handles:
        handle.remove()
    order = list(range(len(groups)))
    if [n for n, _ in forward] != order or list(backward) != [n for n in reversed(order) if n in backward]:
        return [(clock.between(start, turn), clock.between(turn, end))]
    starts = [start, *(mark for _, mark in forward[1:]), turn]
    ends = [end]
    for number in order[:-1]:
        ends.append(backward.get(number, ends[-1]))
    ends.append(turn)
    return [(clock.between(starts[n], starts[n + 1]), clock.between(ends[n + 1], ends[n])) for n in order]
