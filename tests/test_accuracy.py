"""Profiles against real forwards and backwards: the checks of benchmarks/accuracy on a few small models."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.accuracy import cases, counts, flops, interpolation, memory, reality, recompute, report
from benchmarks.accuracy.predicted import predicted
from meshwright.planner.cost.layer_parts import ways_of_parts
from meshwright.planner.plan.training import Precision
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import Bytes
from support import slow
from support.small_models import SEQ_LEN, small_model, small_profile

CLOSED_FORMS = slow.but(("bert_large", "gpt2", "llama3_8b"), {"bert_large", "llama3_8b"})
COUNTED = slow.but(("lstm", "mixtral", "resnet", "t5", "vit"), {"mixtral", "resnet", "t5", "vit"})
REAL = slow.but(("gpt", "llama", "mixtral", "resnet", "t5"), {"llama", "mixtral", "resnet", "t5"})


@cache
def memory_row(name: str) -> dict[str, float]:
    """What was planned and counted of a small model in bf16."""
    return memory.rows_of(name, small_model(name), "bf16")[0]


@pytest.mark.parametrize("name", slow.but_first(["shared block", "gpt", "t5"], 1))
def test_parameters_and_ties_are_those_of_the_module(name: str) -> None:
    row = counts.row(name, small_model(name))

    assert row["same"]
    assert row["profile"] == row["module"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_flops_of_whole_models_are_their_closed_forms(name: str) -> None:
    (row,) = flops.closed_form_rows([cases.MODELS / name])

    assert row["forward off"] == pytest.approx(0.0, abs=1e-6)
    assert row["backward off"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_what_torch_counts_on_real_tensors(name: str) -> None:
    (row,) = flops.counted_rows({name: small_model(name)})

    assert row["forward off"] == pytest.approx(0.0, abs=flops.MOST)
    assert row["backward off"] == pytest.approx(0.0, abs=flops.MOST)


@pytest.mark.parametrize("name", REAL)
def test_kept_bytes_are_those_of_a_real_forward(name: str) -> None:
    assert memory_row(name)["kept off"] == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("name", REAL)
def test_the_planned_peak_is_that_of_a_real_step(name: str) -> None:
    assert memory_row(name)["peak off"] == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("name", slow.but_these(["gpt2", "mixtral", "resnet"], ()))
def test_every_layer_class_saves_what_it_saves_in_reality(name: str) -> None:
    _, classes = memory.rows_of(name, small_model(name), "bf16")

    assert classes
    assert all(row["profile"] == pytest.approx(row["real"], rel=0.01, abs=8) for row in classes)


@pytest.mark.parametrize("name", slow.but(["bert", "gpt", "llama", "resnet"], {"bert", "llama", "resnet"}))
def test_recompute_keeps_and_repeats_what_checkpointing_does(name: str) -> None:
    rows = recompute.rows_of(name, small_model(name))

    assert [row["recompute"] for row in rows] == ["none", "full", "selective", "largest part", "all parts"]
    assert all(abs(row["kept off"]) <= 0.03 for row in rows)
    assert all(abs(row["run again off"]) <= 0.005 for row in rows)


@pytest.mark.parametrize("name", slow.but_these(["bert", "gpt", "llama", "mixtral"], {"gpt"}))
def test_every_choice_of_parts_keeps_and_repeats_what_checkpointing_them_does(name: str) -> None:
    loaded = small_model(name)
    profile = cases.profile_of(loaded)
    block = max(profile.classes, key=lambda c: len(c.parts))
    blocks = [i for i, layer in enumerate(profile.layers) if profile.classes[layer.layer_class] is block]
    chosen = ways_of_parts(block)

    rows = recompute.rows_of_ways(name, loaded, {way: dict.fromkeys(blocks, way) for way in chosen})

    assert len(chosen) == 2 ** len(block.parts) - 1 >= 7
    whole = rows[0]["kept, planned"] - rows[0]["kept, real"]
    for row in rows[1:]:
        assert row["kept, real"] < rows[0]["kept, real"]
        assert abs(row["kept, planned"] - row["kept, real"] - whole) <= 128  # positions, which no layer makes
        assert row["run again, profile"] == row["run again, counted"]
        assert row["peak off"] >= min(-0.01, rows[0]["peak off"])


class _Attention(nn.Module):
    def __init__(self, width: int, is_fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.is_fused = is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (z.view(batch, length, 4, width // 4).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if self.is_fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = functional.dropout((q @ k.transpose(-1, -2) / 4).softmax(-1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, inner: int, dropout: float, is_fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.dropout = _Attention(width, is_fused), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


@pytest.mark.slow
@pytest.mark.parametrize(("is_fused", "inner", "dropout"), [(True, 256, 0.0), (False, 256, 0.1), (False, 32, 0.1)])
def test_what_parts_save_comes_back_one_after_the_other(is_fused: bool, inner: int, dropout: float) -> None:
    """Blocks without a head, so that the peak of a step is in their turn."""
    width, length = 64, 32
    loaded = load_model(
        lambda: nn.Sequential(*(_Block(width, inner, dropout, is_fused) for _ in range(2))),
        batch=lambda samples: (torch.randn(samples, length, width),),
        loss=lambda output, batch: (output.float() ** 2).mean(),
    )
    block = cases.profile_of(loaded).classes[0]
    ways = ways_of_parts(block)

    rows = recompute.rows_of_ways("blocks", loaded, {way: dict.fromkeys(range(2), way) for way in ways})

    assert [part.name for part in block.parts] == ["norm1", "attention", "norm2", "mlp"]
    assert len(rows) == 1 + 15
    assert all(row["kept, planned"] == row["kept, real"] for row in rows)
    assert all(-1e-4 < row["peak off"] < 0.03 for row in rows)


@pytest.mark.slow
def test_a_profile_at_another_length_is_the_one_made_there() -> None:
    row = interpolation.row_of("llama", small_model("llama"))

    assert row["profiled at"] == SEQ_LEN
    assert row["tokens"] != SEQ_LEN
    assert all(abs(row[heading]) <= interpolation.MOST for heading in row if ", " in heading)


def test_a_meter_sees_what_two_linear_layers_keep() -> None:
    width, size = 32, 5
    loaded = load_model(
        lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)),
        batch=lambda samples: (torch.randn(samples, width), torch.randint(width, (samples,))),
        loss=lambda output, batch: functional.cross_entropy(output, batch[1]),
    )
    module, batch = reality.build(loaded, torch.float32), reality.batch_of(loaded, size, torch.float32)

    real = reality.run(loaded, module, batch, ["1"], ["0"])

    activation = 4 * size * width
    scalars = 2 * 4
    product = 2 * size * width * width
    assert real.saved == activation + activation + 4  # tanh and log-softmax; the sum of nll_loss's weights
    assert real.kept == activation + activation + scalars
    assert real.by_module == {"1": 0}
    assert reality.flops(loaded, module, batch) == (2 * product, 3 * product)


def test_a_profile_that_forgets_a_tenth_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = small_profile("gpt")
    shrunk = [
        c.model_copy(update={"whole": c.whole.model_copy(update={"saved": _shrunk(c.whole.saved)})})
        for c in profile.classes
    ]
    monkeypatch.setattr(cases, "profile_of", lambda loaded: profile.model_copy(update={"classes": tuple(shrunk)}))

    whole, classes = memory.checks({"gpt": small_model("gpt")}, precisions=("bf16",))

    assert not whole.passed
    assert not classes.passed


def _shrunk(saved: Bytes) -> Bytes:
    fixed, per_sample, *rest = saved.elements
    return saved.model_copy(update={"elements": (0.9 * fixed, 0.9 * per_sample, *rest)})


@pytest.mark.parametrize(
    ("errors", "passed"),
    [([0.0] * 9 + [0.05], True), ([0.0] * 8 + [0.05] * 2, False), ([0.0] * 9 + [-0.09], False)],
)
def test_a_target_is_a_share_within_and_a_limit_for_all(errors: list[float], passed: bool) -> None:
    assert report.spread(errors, 0.03, 0.9, 0.08)[1] is passed


class _Upcast(nn.Module):
    """Works in fp32 between two casts, like an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return x + self.linear((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype))


class _Turned(nn.Module):
    """Hands on its result with the last two dims swapped in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).transpose(1, 2).contiguous().transpose(1, 2)


class _Biased(nn.Module):
    """Adds what it is given; its own work saves nothing of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + bias)


class _SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(_Biased() for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x)
        for block in self.blocks:
            x = block(x, bias)
        result: torch.Tensor = self.head(x)
        return result


def _chain(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(16, 16), block(), block(), block(), nn.Linear(16, 1))


def _loaded(build: Callable[[], nn.Module]) -> LoadedModel:
    return load_model(
        build,
        batch=lambda size: (torch.randn(size, 8, 16), torch.randn(size, 8, 1)),
        loss=lambda output, batch: functional.mse_loss(output.float(), batch[1].float()),
    )


@cache
def _chained(block: Callable[[], nn.Module]) -> LoadedModel:
    return _loaded(_chain(block))


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("block", [_Upcast, _Turned, _encoder_layer])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_kept_bytes_are_those_of_a_real_run(block: Callable[[], nn.Module], precision: Precision, size: int) -> None:
    """Casts that are none in fp32, memory in another order than the dims, a batch of one that is contiguous by chance,
    and a loss that holds on to its terms."""
    loaded = _chained(block)
    dtype = memory.DTYPES[precision]

    real = reality.run(loaded, reality.build(loaded, dtype), reality.batch_of(loaded, size, dtype))

    assert predicted(cases.profile_of(loaded), size, precision).kept == real.kept


def test_what_several_recomputed_layers_are_given_is_kept_once() -> None:
    loaded = _loaded(_SharedBias)

    rows = {row["recompute"]: row for row in recompute.rows_of("shared bias", loaded)}

    assert rows["full"]["kept, planned"] == rows["full"]["kept, real"]


def test_what_only_code_around_a_module_reads_is_not_kept_for_its_recompute() -> None:
    source = cases.MODELS / "dlrm.py"

    rows = {row["recompute"]: row for row in recompute.rows_of("dlrm", cases.small(source))}

    assert rows["full"]["kept, planned"] == rows["full"]["kept, real"]
