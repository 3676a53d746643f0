"""Models that decide by the integers of their batch are profiled as these lead them, with operators for each sample."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._mode_utils import no_dispatch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from meshwright.profiler.model.layer_run import LayerRun  # noqa: E402
from meshwright.profiler.model.load import load_model  # noqa: E402
from meshwright.profiler.model.observe import observe  # noqa: E402
from meshwright.profiler.model.trace import trace  # noqa: E402
from meshwright.profiler.running.fake import fake_model  # noqa: E402
from meshwright.profiler.running.fake_modes import LeanFakeMode, fake_mode  # noqa: E402
from meshwright.profiler.running.gpu_kernel_emulation import Mode  # noqa: E402
from meshwright.profiler.running.known_numbers import knowing_numbers, known  # noqa: E402
from support import slow  # noqa: E402
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


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_what_is_computed_of_known_numbers_is_known() -> None:
    mode, real = FakeTensorMode(), torch.tensor([[2, 3], [4, 5]])
    with knowing_numbers(mode):
        sizes = known(mode, real)
        position = torch.arange(3) + sizes.prod(-1)[1]

        assert sizes.prod(-1).tolist() == [6, 20]
        assert torch.tensor([position.max(), sizes[0, 0]]).tolist() == [22, 2]
        assert (sizes > 2).nonzero().shape == (3, 2)


def test_fractions_that_are_made_of_no_tensor_are_known_if_they_are_few() -> None:
    """Longformer asks whether any token of the mask that it made itself is attended to by all."""
    mode = FakeTensorMode()
    with knowing_numbers(mode):
        mask = (1.0 - torch.ones(2, 4096)) * torch.finfo(torch.float32).min

        assert not bool((mask > 0).any())
        with pytest.raises(DataDependentOutputException):
            bool((torch.ones(64, 4096) > 0).any())


def test_a_list_of_known_numbers_is_read_at_once() -> None:
    mode, real = FakeTensorMode(), torch.arange(4096).view(2, 2048)
    with knowing_numbers(mode):
        tokens = known(mode, real)
        with _Operators() as run:
            read = tokens.tolist()

        assert read == [list(range(2048)), list(range(2048, 4096))]
        assert not run.operators
        with pytest.raises(DataDependentOutputException):
            torch.empty(3).tolist()


def test_places_of_a_mask_are_known_however_far_it_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.profiler.running.known_numbers.MOST_KNOWN", 16)
    mode, real = FakeTensorMode(), torch.tensor([[7, 1, 7], [1, 7, 1]])
    with knowing_numbers(mode):
        marked = (known(mode, real) == 7).unsqueeze(-1)

        assert torch.empty(2, 3, 5)[marked.expand(2, 3, 5)].shape == (3 * 5,)


@pytest.mark.parametrize("kind", ["interpolated", "too many"])
def test_numbers_that_are_not_kept_are_not_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode()
    with mode:
        table = torch.empty(1, 64, 8, 8)
    places = known(mode, torch.rand(1, 1, 2000, 2))
    row, column = known(mode, torch.zeros(1 << 13, 1)), known(mode, torch.zeros(1, 1 << 13))
    entered: list[str] = []  # real kernels run where dispatch is off, and so does the one line of log of each operator
    dispatch = FakeTensorMode.dispatch
    monkeypatch.setattr(fake_tensor, "no_dispatch", lambda: entered.append("real") or no_dispatch())
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda *args: entered.append("operator") or dispatch(*args))

    with knowing_numbers(mode):
        if kind == "interpolated":
            made = nn.functional.grid_sample(table, places, mode="bicubic", align_corners=False)
        else:
            made = row + column

    assert made.numel() == (64 * 2000 if kind == "interpolated" else 1 << 26)
    assert entered.count("real") == entered.count("operator") > 0
    assert made.constant is None
    assert all(x.constant is not None for x in (places, row, column))


def test_known_numbers_stay_known_where_they_are_interpolated() -> None:
    mode = FakeTensorMode()
    real = torch.arange(16.0).view(1, 1, 4, 4)
    expected = (nn.functional.interpolate(real, scale_factor=2, mode="bilinear") > 7).nonzero()
    picture = known(mode, real)

    with knowing_numbers(mode):
        larger = nn.functional.interpolate(picture, scale_factor=2, mode="bilinear")
        assert (larger > 7).nonzero().tolist() == expected.tolist()


EXPERTS = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 32))
        self.down = nn.Parameter(torch.randn(4, 32, 8))

    def one(self, x, i):
        return (x @ self.up[i]).relu() @ self.down[i]

class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
                                   for _ in range(4))

    def one(self, x, i):
        return self.inner[int(i)](x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), KIND()

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i in nn.functional.one_hot(chosen, 4).sum((0, 1)).nonzero()[:, 0]:
            token, which = torch.where(chosen == i)
            out.index_add_(0, token, self.experts.one(x[token], i) * weights[token, which, None])
        return x + out

def model():
    return nn.Sequential(*(Block() for _ in range(4)))

def batch(size):
    return torch.randn(16 * size, 8), torch.randn(16 * size, 8)

def loss(output, batch):
    return (output - batch[1]).pow(2).mean()
"""


@pytest.mark.parametrize(("kind", "decides"), slow.but_first([("Experts", False), ("Apart", True)], 0))
def test_the_loop_over_chosen_experts_of_a_large_model_is_profiled_as_if_they_were_chosen_evenly(
    kind: str, decides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.profiler.model.trace._MOST_REAL_ELEMENTS", 50)
    (tmp_path / "experts.py").write_text(EXPERTS.replace("KIND", kind))

    profile = trace(load_model(str(tmp_path / "experts.py")))

    products = [op for op in profile.classes[0].whole.operators if op.name == "mm" and op.part == "forward"]
    assert [op.flops[1] for op in products] == [2 * 16 * 2 / 4 * 8 * 32] * 8  # tokens x top-2 / experts
    assert all(op.flops[0] == 0.0 for op in products)
    assert "chosen evenly" in profile.notes[0]
    assert bool(profile.decides_by_values) == decides  # experts that no token of a rank chose have no gradient on it


def test_choices_are_even_in_turn_or_the_first_ones() -> None:
    mode = FakeTensorMode()
    scores = mode.from_tensor(torch.randn(3, 4, 2))
    with knowing_numbers(mode, "even"):
        even = scores.topk(2, dim=1).indices
        assert even[0].tolist() == [[0, 2], [1, 3]]
        assert even.flatten().bincount().tolist() == [3, 3, 3, 3]
        assert scores[..., 0].argmax(-1).tolist() == [0, 1, 2]
    with knowing_numbers(mode, "first"):
        assert scores.topk(2, dim=1).indices[2].tolist() == [[0, 0], [1, 1]]
        assert scores.argmax(1, keepdim=True).flatten().tolist() == [0] * 6


class _Passing(Mode):
    """On top of others, and asks them for everything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})


def test_modes_on_top_get_known_numbers_however_often_they_ask() -> None:
    mode = LeanFakeMode()
    with knowing_numbers(mode, "first"), _Passing():
        ranges = [torch.arange(3) + 1 for _ in range(2)]
        chosen = [torch.empty(2, 4).topk(2)[1].tolist() for _ in range(2)]
        unknown = [torch.empty(3) + 1 for _ in range(2)]

        assert [each.tolist() for each in ranges] == [[1, 2, 3]] * 2
        assert chosen == [[[0, 1], [0, 1]]] * 2
        assert [each.constant for each in unknown] == [None] * 2


COMPUTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "number by number": lambda x, unknown: x * 2 + 1,
    "a part, and a part of that": lambda x, unknown: x[1:, 2:][:, ::2],
    "expanded": lambda x, unknown: x[:1].expand(5, 4),
    "a view of other sizes": lambda x, unknown: (x + 1).view(2, 6),
    "joined": lambda x, unknown: torch.cat([x, torch.stack([x[0], x[2]])]),
    "several at once": lambda x, unknown: x.max(dim=1)[1],
    "as many as the numbers say": lambda x, unknown: (x > 4).nonzero(),
    "in another dtype": lambda x, unknown: x.float().cumsum(1).to(torch.int32),
    "written into through a view": lambda x, unknown: [y := x + 1, y[1:].add_(x[1:]), y][-1],
    "seen through a view that was made before": lambda x, unknown: [y := x + 1, z := y[1:].T, y.mul_(3), z][-1],
    "no longer known": lambda x, unknown: [y := x + 1, z := y[1:], y.copy_(unknown), z][-1],
    "of unknown numbers, too": lambda x, unknown: torch.where(x > 4, unknown, x),
    "looked up": lambda x, unknown: torch.nn.functional.embedding(x, unknown.float().repeat(4, 1)),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_known_numbers_are_computed_as_by_torchs_own_mode(what: str) -> None:
    """Twice, because what was answered before is not asked again."""
    real = torch.arange(12).view(3, 4)
    told = []
    for mode in (FakeTensorMode(), LeanFakeMode()):
        with mode:  # as a batch is made
            x, unknown = known(mode, real), torch.empty(3, 4, dtype=torch.int64)
        with knowing_numbers(mode), _Passing():
            for made in (COMPUTED[what](x, unknown), COMPUTED[what](x, unknown)):
                numbers = None if made.constant is None else made.constant.tolist()
                layout = made.shape, made.stride(), made.storage_offset(), made.dtype, made.untyped_storage().nbytes()
                told.append((numbers, *layout))

    assert told[:2] == told[2:]


def test_a_view_of_known_numbers_is_in_their_storage() -> None:
    """Whoever made it: where torch is asked for several parts, these are parts of what was computed without it."""
    mode, real = LeanFakeMode(), torch.arange(12).view(3, 4)
    with mode:
        given = known(mode, real)
    with knowing_numbers(mode), _Passing():
        x = given + 1
        views = (x[1:], x.expand(2, 3, 4), x.split(2)[0], x.unbind(0)[2], x.view(torch.int32))

        assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)


def test_torch_is_not_asked_for_what_is_computed_of_known_numbers() -> None:
    mode, real = LeanFakeMode(), torch.arange(12).view(3, 4)
    with mode:
        x, scale = known(mode, real), torch.empty(4)
    with knowing_numbers(mode), _Passing():
        x * scale  # torch says once what it makes of such tensors
        with patch.object(FakeTensorMode, "dispatch", side_effect=AssertionError):
            later = ((x + 1)[1:] * 2).expand(2, 2, 4)
            x * scale

            assert later[1].tolist() == [[10, 12, 14, 16], [18, 20, 22, 24]]


def test_torch_is_asked_once_for_rows_of_unknown_numbers_by_known_places_and_for_each_count_of_a_mask() -> None:
    mode = LeanFakeMode()
    masks = [torch.tensor(numbers, dtype=torch.bool) for numbers in ([1, 1, 0], [0, 1, 1], [1, 0, 0])]
    dispatch = FakeTensorMode.dispatch
    with knowing_numbers(mode), patch.object(FakeTensorMode, "dispatch", autospec=True, side_effect=dispatch) as asked:
        places = [known(mode, torch.tensor(numbers)) for numbers in ([2, 0], [1, 1])]
        chosen = [known(mode, mask) for mask in masks]
        x = torch.empty(3, 4)
        rows = [len(x[place]) for _ in range(2) for place in (*places, *chosen)]

    assert rows == 2 * [2, 2, 2, 2, 1]
    assert sum(call.args[1] is torch.ops.aten.index.Tensor for call in asked.call_args_list) == 3


def test_the_same_batch_is_made_once_and_given_in_tensors_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PICTURES)
    loaded = load_model(str(tmp_path / "model.py"))
    asked: list[int] = []

    def batch(size: int) -> Any:
        asked.append(size)
        return loaded.batch(size)

    fake = fake_model(replace(loaded, batch=batch), torch.bfloat16, knows_layout=True)
    (x, grid, _), (again, others, _) = fake.batch(3, None), fake.batch(3, None)

    assert asked == [1, 2]
    assert x is not again
    assert x.shape == again.shape == (18, 8)
    assert x.dtype == torch.bfloat16
    assert grid.constant.tolist() == [[2, 3]] * 3
    assert grid.constant.data_ptr() != others.constant.data_ptr()


def test_a_batch_whose_numbers_count_rows_of_all_samples_is_drawn_and_not_repeated() -> None:
    def batch(size: int) -> Any:
        edges = torch.cat([torch.randint(5, (2, 8)) + 5 * graph for graph in range(size)], dim=1)
        return torch.randn(5 * size, 4), edges, torch.arange(size).repeat_interleave(5), torch.randint(2, (size,))

    loaded = load_model(nn.Linear(4, 2), batch=batch, loss=lambda output, batch: output.sum())
    _, edges, graphs, _ = fake_model(loaded, torch.float32, knows_layout=True).batch(3, None)

    assert graphs.constant.tolist() == 5 * [0] + 5 * [1] + 5 * [2]
    assert 10 <= edges.constant.max() < 15


def test_a_model_that_splits_its_batch_by_sizes_in_it_is_profiled_without_numbers(tmp_path: Path) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)

    profile = trace(load_model(str(tmp_path / "pictures.py")))

    products = [op for op in profile.classes[0].whole.operators if op.name in ("mm", "addmm") and op.part == "forward"]
    assert profile.decides_by_values == ""
    assert "goes the way of its batch function's integers" in profile.notes[0]
    assert [sum(op.flops[i] for op in products) for i in range(2)] == [0.0, 2 * 6 * 8 * 8 + 2 * 2 * 6 * 6 * 8]
    assert len(profile.layers) == 5


def test_a_cut_module_that_is_called_for_each_picture_moves_as_much_for_each(tmp_path: Path) -> None:
    inner = "nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))"
    text = PICTURES.replace("self.inner = nn.Linear(8, 8)", f"self.inner = {inner}")
    (tmp_path / "pictures.py").write_text(
        text.replace("(self.inner(part) @ part.T).softmax(-1) @ part", "self.inner(part)")
    )

    profile = trace(load_model(str(tmp_path / "pictures.py")))

    tensor = profile.classes[0].tensor
    assert tensor is not None
    assert [each.tensor.elements for each in tensor.collectives if each.part == "forward"] == [(0.0, 6.0 * 8, 0.0, 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("pin", ["pipeline=2", "data_shard=2"])
def test_it_trains_in_stages_and_in_shards(pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    monkeypatch.chdir(tmp_path)

    assert run_plan("pictures.py", "--gpus", "2", "--device", "cpu", "-b", "8", "--pin", pin, "-q") == 0

    assert run_plan("verify", "plan.json") == 0


def _error(output: torch.Tensor, given: Any) -> torch.Tensor:
    return (output - given[1]).pow(2).mean()


def _rows(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8), torch.randn(size, 8)


def test_a_layer_is_met_again_at_its_modules_where_a_helper_before_it_does_not_run() -> None:
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

    profile = trace(load_model(Shifts, batch=_rows, loss=_error))

    assert [layer.name for layer in profile.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    parts = [{op.part for op in each.whole.operators if op.kind == "matmul"} for each in profile.classes]
    assert parts == [{"forward", "backward_weight"}, *[{"forward", "backward_input", "backward_weight"}] * 2]


def test_a_layer_that_is_not_met_again_is_refused() -> None:
    loaded = load_model(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), batch=_rows, loss=_error)
    fake = fake_model(loaded, torch.float32)
    chain = observe(fake, 2, None)
    first, last = chain.layers
    other = replace(chain, layers=(replace(first, last_key=("glue", "mul", 1)), replace(last, calls=())))

    with fake.running(), pytest.raises(ValueError, match="so 1 was not found again"):
        LayerRun(fake, other, 1, chain.shapes, 2, None).run()


@pytest.mark.parametrize("make", [LeanFakeMode, fake_mode])
def test_what_is_looked_up_at_unknown_places_is_not_known(make: Callable[[], FakeTensorMode]) -> None:
    mode, real = make(), torch.arange(12).view(6, 2)
    with knowing_numbers(mode):
        rows = known(mode, real)
        drawn = torch.multinomial(torch.ones(6), 4)

        assert rows[torch.arange(4)].constant is not None
        assert rows[drawn].constant is None
        assert rows.index_select(0, drawn).constant is None
        assert rows.gather(0, drawn[:, None]).constant is None
