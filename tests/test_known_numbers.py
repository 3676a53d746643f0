"""Models that decide by the integers of their batch are profiled as these lead them, with operators for each sample."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from meshwright.profiler.model.known_numbers import knowing_numbers, known  # noqa: E402
from meshwright.profiler.model.load import load_model  # noqa: E402
from meshwright.profiler.model.trace import trace  # noqa: E402
from support.cli import run_plan  # noqa: E402

PICTURES = '''
import torch
from torch import nn

class Block(nn.Module):
    """Mixes the rows of each picture among themselves."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, ends):
        sizes = (ends[1:] - ends[:-1]).tolist()
        return x + torch.cat([(self.inner(part) @ part.T).softmax(-1) @ part for part in x.split(sizes)])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x, grid):
        ends = nn.functional.pad(grid.prod(-1).cumsum(0), (1, 0))
        for block in self.blocks:
            x = block(x, ends)
        return self.head(x)

def model():
    return Model()

def batch(size):
    return torch.randn(6 * size, 8), torch.tensor([[2, 3]] * size), torch.randn(6 * size, 8)

def loss(output, batch):
    return (output - batch[2]).pow(2).mean()
'''


def test_what_is_computed_of_known_numbers_is_known() -> None:
    mode, real = FakeTensorMode(), torch.tensor([[2, 3], [4, 5]])
    with knowing_numbers(mode):
        sizes = known(mode, real)
        position = torch.arange(3) + sizes.prod(-1)[1]

        assert sizes.prod(-1).tolist() == [6, 20]
        assert torch.tensor([position.max(), sizes[0, 0]]).tolist() == [22, 2]
        assert (sizes > 2).nonzero().shape == (3, 2)


def test_a_model_that_splits_its_batch_by_sizes_in_it_is_profiled_without_numbers(tmp_path: Path) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)

    profile = trace(load_model(str(tmp_path / "pictures.py")))

    products = [op for op in profile.classes[0].whole.operators if op.name in ("mm", "addmm") and op.part == "forward"]
    assert profile.decides_by_values == ""
    assert "goes the way of its batch function's integers" in profile.notes[0]
    assert [sum(op.flops[i] for op in products) for i in range(2)] == [0.0, 2 * 6 * 8 * 8 + 2 * 2 * 6 * 6 * 8]
    assert len(profile.layers) == 5


@pytest.mark.slow
@pytest.mark.parametrize("pin", ["pipeline=2", "data_shard=2"])
def test_it_trains_in_stages_and_in_shards(pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    monkeypatch.chdir(tmp_path)

    assert run_plan("pictures.py", "--gpus", "2", "--device", "cpu", "-b", "8", "--pin", pin, "-q") == 0

    assert run_plan("verify", "plan.json") == 0


def test_a_layer_that_is_not_met_again_is_refused() -> None:
    class Shifts(nn.Module):
        """Ends its first layer in the last of as many calls as there are samples."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks[0](x)
            for i in range(x.shape[0]):
                x[i].mul(2.0)
            return self.blocks[2](self.blocks[1](y))

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 8), torch.randn(size, 8)

    with pytest.raises(ValueError, match=r"so blocks\.1 was not found again"):
        trace(load_model(Shifts, batch=batch, loss=lambda output, given: (output - given[1]).pow(2).mean()))
