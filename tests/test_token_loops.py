"""Models that go through a sequence token by token: their profile from runs of a few tokens is that of all."""

from pathlib import Path

import pytest

from meshwright.planner.cost.compute_cost import operator_s
from meshwright.profiler.machine.cluster import load_device
from meshwright.profiler.model import trace as tracing
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import Bytes, Costs, OpProfile, amount_at
from meshwright.profiler.model.trace import trace
from meshwright.profiler.running import token_loops
from meshwright.profiler.running.token_loops import few_tokens

SCAN = """
import torch
from torch import nn

class Scan(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.into, self.decay = nn.Linear(width, 2 * width), nn.Parameter(torch.rand(width))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        values, gate = self.into(x).chunk(2, -1)
        state, rows = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + values[:, t]
            rows.append(state * gate[:, t])
        return x + self.out(torch.stack(rows, 1))

class Cells(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x):
        state, rows = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            rows.append(state)
        return x + torch.stack(rows, 1)

def model():
    return nn.Sequential(nn.Embedding(100, 32), Scan(), LAYER(), nn.Linear(32, 100))

def batch(size, seq_len=64):
    tokens = torch.randint(100, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
"""

KEPT = ("saved", "full", "selective", "inputs", "forward_transient")


def sums(costs: Costs) -> list[float]:
    """Kernels, FLOPs, bytes moved and kept, all of two samples."""
    operators = costs.operators
    found = [sum(op.kernels for op in operators), sum(amount_at(op.flops, 2) for op in operators)]
    return [*found, sum(op.moved.at(2, 2) for op in operators), *(getattr(costs, name).at(2, 2) for name in KEPT)]


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["Scan", "Cells"])
def test_a_scan_is_profiled_from_runs_of_a_few_tokens(
    layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scan.py").write_text(SCAN.replace("LAYER", layer))
    loaded = load_model(tmp_path / "scan.py")
    monkeypatch.setattr(token_loops, "_MOST_TOKENS", 16)
    monkeypatch.setattr(tracing, "FEWEST_OPERATORS", 48)
    short = few_tokens(loaded)
    assert short is not None
    assert short.tokens == 16

    profile = trace(loaded)

    with monkeypatch.context() as patched:
        patched.setattr(tracing, "few_tokens", lambda *_: None)
        whole = trace(loaded)
    assert any("token by token" in note for note in profile.notes)
    assert not any("token by token" in note for note in whole.notes)
    for few, every in zip(profile.classes, whole.classes, strict=True):
        assert few.parameters == every.parameters
        assert len(few.whole.operators) < 100
        assert sums(few.whole) == pytest.approx(sums(every.whole), rel=1e-6)
        if few.name != "Cells":  # the gradient of its weights is what is largest with few tokens
            peaks = (costs.whole.backward_transient.at(2, 2) for costs in (few, every))
            assert next(peaks) == pytest.approx(next(peaks), rel=1e-6)
    assert sum(len(c.whole.operators) for c in whole.classes) > 500


PIECES = """
class Scan(nn.Module):
    def __init__(self, width=32, piece=16):
        super().__init__()
        self.out, self.piece = nn.Linear(width, width), piece

    def forward(self, x):
        state, rows = torch.zeros_like(x[:, :1]), []
        for values in x.split(self.piece, 1):
            scores = (values @ values.transpose(1, 2)).tril()
            rows.append(scores @ values + state)
            state = state + values.sum(1, keepdim=True)
        return x + self.out(torch.cat(rows, 1))

"""


@pytest.mark.slow
def test_a_scan_in_pieces_is_profiled_from_runs_of_a_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = SCAN.index("class Scan"), SCAN.index("class Cells")
    text = (
        SCAN[:before]
        + PIECES.lstrip()
        + SCAN[after:].replace("LAYER()", "nn.Tanh()").replace("seq_len=64", "seq_len=256")
    )
    (tmp_path / "pieces.py").write_text(text)
    loaded = load_model(tmp_path / "pieces.py")
    monkeypatch.setattr(token_loops, "_FULL_PIECES", (8, 32))
    monkeypatch.setattr(tracing, "OPERATORS_OF_LOOPS", 64)

    profile = trace(loaded)

    monkeypatch.setattr(tracing, "few_tokens", lambda *_: None)
    whole = trace(loaded)
    assert any("piece by piece" in note for note in profile.notes)
    assert not any("piece by piece" in note for note in whole.notes)
    for few, every in zip(profile.classes, whole.classes, strict=True):
        assert len(few.whole.operators) < 100
        assert sums(few.whole) == pytest.approx(sums(every.whole), rel=1e-6)
    assert sum(len(c.whole.operators) for c in whole.classes) > 200


def test_kernels_of_a_token_are_priced_one_by_one(tmp_path: Path) -> None:
    one = OpProfile(name="add", module="", kind="elementwise", part="forward", moved=Bytes(elements=(0, 1e6, 0, 0)))
    many = one.model_copy(update={"kernels": 10.0, "moved": Bytes(elements=(0, 1e7, 0, 0))})
    small = one.model_copy(update={"kernels": 10.0, "moved": Bytes(elements=(0, 10, 0, 0))})
    device = load_device("h100-80gb")

    one_s, many_s, small_s = (operator_s(op, device, "bf16", 2, 4, 1) for op in (one, many, small))

    assert many_s == pytest.approx(10 * one_s)
    assert small_s == pytest.approx(10 * device.launch)


@pytest.mark.slow
def test_layers_that_are_many_are_no_scan(tmp_path: Path) -> None:
    text = SCAN.replace("Scan(), LAYER()", "*(nn.Linear(32, 32) for _ in range(300))")
    (tmp_path / "deep.py").write_text(text)
    loaded = load_model(tmp_path / "deep.py")

    assert few_tokens(loaded) is None
