"""The emulated cluster's own parts: pads of layers, and the figures that sum its results up."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.planned_vs_manual import jobs
from benchmarks.planned_vs_manual.figures import Result, Row, figures
from benchmarks.planned_vs_manual.jobs import Job
from benchmarks.planned_vs_manual.padded import Clock, Pad, PaddedLayer, _pad_layers
from meshwright.executor.measuring.local_ranks import RankError


class Recorder(Clock):
    """Notes pads instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.pads: list[float] = []

    def pad(self, seconds: float) -> None:
        self.pads.append(seconds)


def padded(*layers: PaddedLayer) -> tuple[nn.Sequential, Recorder]:
    model, clock = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Recorder()
    _pad_layers(model, list(layers), clock)
    return model, clock


def test_a_layer_is_padded_once_forward_and_once_backward_and_backward_begins_at_the_end() -> None:
    model, clock = padded(PaddedLayer("0", Pad(1.0, 10.0, 0.0)), PaddedLayer("1", Pad(2.0, 20.0, 0.0)))

    model(torch.ones(1, 2)).sum().backward()

    assert clock.pads == [1.0, 2.0, 20.0, 10.0]


def test_a_backward_for_inputs_is_not_padded_again_when_weights_follow() -> None:
    model, clock = padded(PaddedLayer("1", Pad(1.0, 10.0, 4.0)))
    inputs = torch.ones(1, 2, requires_grad=True)
    output = model(inputs).sum()

    torch.autograd.grad(output, inputs, retain_graph=True)
    torch.autograd.grad(output, [model[1].weight])

    assert clock.pads == [1.0, 6.0, 4.0]


def test_what_runs_outside_of_modules_is_padded_with_the_layer_before_or_else_behind() -> None:
    between = PaddedLayer("", Pad(0.5, 5.0, 0.0))
    model, clock = padded(
        between, PaddedLayer("0", Pad(1.0, 10.0, 0.0)), between, PaddedLayer("1", Pad(2.0, 20.0, 0.0))
    )

    model(torch.ones(1, 2)).sum().backward()

    assert clock.pads == [2.0, 2.0, 20.0, 20.0]


def test_a_set_up_that_hangs_is_left_out_and_the_others_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def together(plans: dict[str, Any], task: Any, steps: int, at: Path) -> dict[str, Job]:
        if "hangs" in plans:
            at.write_text('"hangs"')
            raise RankError("rank 1 is silent")
        return {label: Job((1.0, 1.0), 0.1) for label in plans}

    monkeypatch.setattr(jobs, "_together", together)
    found = jobs.run({"ddp": None, "hangs": None, "fsdp": None}, None, 2, lambda text: None)  # type: ignore[arg-type]

    assert found == {
        "hangs": "it did not run: rank 1 is silent",
        "ddp": Job((1.0, 1.0), 0.1),
        "fsdp": Job((1.0, 1.0), 0.1),
    }


def row(label: str, predicted_s: float, measured_s: float | None, same_as: str | None = None) -> Row:
    return Row(label, "", predicted_s, measured_s, 0.0, 0.1, "", same_as)


def test_figures_count_a_plan_once_and_what_was_not_run_not_at_all() -> None:
    rows = (row("planned", 1.0, 1.0), row("ddp", 1.1, 1.2), row("fsdp", 1.3, 1.1), row("tp", 1.0, 1.0, "planned"))
    result = Result("model", "cluster", (*rows, row("failed", 1.0, None)))

    found = figures([result])

    assert result.ratio == 1.0
    assert result.tau == pytest.approx(1 / 3)  # of three pairs ddp and fsdp are predicted the wrong way round
    assert found["distinct plans run"] == 3
    assert found["predicted over measured, worst error"] == pytest.approx(1.3 / 1.1 - 1)
