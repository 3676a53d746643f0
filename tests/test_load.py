"""Every way to name a model loads, and every bad input is told in a sentence with a way out."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.profiler.model.batches import counts_rows
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import split_inputs
from meshwright.profiler.model.trace import trace

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"

GOOD = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def other():
    return nn.Linear(4, 4)

def batch(size):
    return torch.randn(size, 4), torch.randn(size, 2)

def loss(output, batch):
    return (output - batch[1]).pow(2).mean()
"""


def _file(folder: Path, text: str, name: str = "model.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def _refusal(folder: Path, text: str) -> str:
    loaded_from = _file(folder, text)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the caller looks at the message
        _load_and_use(loaded_from)
    return str(refused.value)


def _load_and_use(source: str) -> None:
    loaded = load_model(source)
    loaded.build()
    loaded.batch(1)


@pytest.mark.parametrize(
    ("name", "num_parameters", "seq_len"),
    [
        ("gpt.py", 124_439_808, 1024),
        ("gpt2", 124_439_808, 1024),
        ("llama3_8b", 8_030_261_248, 8192),
        ("llama31_405b/config.json", 405_853_388_800, 8192),
        ("bert_large", 335_174_458, 512),
        ("t5_small", 60_506_624, 512),
        ("mlp.py", 25_191_440, None),
        ("unet.py", 7_788_675, None),
    ],
)
def test_zoo_has_the_published_sizes(name: str, num_parameters: int, seq_len: int | None) -> None:
    loaded = load_model(MODELS / name)

    with torch.device("meta"):
        module = loaded.build()

    assert sum(p.numel() for p in module.parameters()) == num_parameters
    assert loaded.seq_len == seq_len


def test_a_function_of_the_file_is_built(tmp_path: Path) -> None:
    loaded = load_model(_file(tmp_path, GOOD) + ":other")

    assert loaded.name == "other"
    assert loaded.build().out_features == 4


def test_small_has_batches_of_its_own() -> None:
    small = load_model(MODELS / "gpt.py").small

    assert small is not None
    assert small().seq_len == 64
    assert small().batch(3)[0].shape == (3, 64)


def test_the_function_that_fails_is_named_whichever_it_is(tmp_path: Path) -> None:
    text = GOOD + "\ndef small():\n    return misspelt\n\ndef weight(batch):\n    return batch[0]\n"
    loaded = load_model(_file(tmp_path, text))
    assert loaded.small is not None

    with pytest.raises(ValueError, match=r"^small\(\) of .*model.py raised NameError: name 'misspelt'"):
        loaded.small().build()
    with pytest.raises(ValueError, match=r"^Linear\(\) raised TypeError: .* \(in the call itself\)"):
        load_model(nn.Linear, batch=lambda size: torch.ones(size, 3)).build()
    with pytest.raises(ValueError, match=r"^weight\(batch\) of .* gives a tensor of \[2, 4\]; it must give one number"):
        trace(loaded)


def test_a_file_finds_what_lies_beside_it_and_in_its_package_whenever_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    inner = tmp_path / "outer_package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    (inner.parent / "upper.py").write_text("WIDTH = 5\n")
    (inner / "beside_it.py").write_text("WIDTH = 6\n")
    text = GOOD.replace("nn.Linear(4, 2)", "nn.Linear(WIDTH, late())") + "\ndef late():\n    import {}\n    return {}\n"
    relative = text.format("beside_it", "beside_it.WIDTH") + "from ..upper import WIDTH\n"
    absolute = text.format("outer_package.upper", "6") + "from outer_package.inner.beside_it import WIDTH\n"

    built = [load_model(_file(inner, each, f"m{i}.py")).build() for i, each in enumerate((relative, absolute))]

    assert [tuple(each.weight.shape) for each in built] == [(6, 5), (6, 6)]
    with pytest.raises(ValueError, match="imports what is not there: attempted relative import beyond"):
        load_model(_file(inner, "from " + 99 * "." + "upper import WIDTH\n"))


def test_seq_len_reaches_the_batch() -> None:
    assert load_model(MODELS / "gpt.py", seq_len=128).batch(2)[0].shape == (2, 128)


def test_a_module_is_copied_not_shared() -> None:
    module = nn.Linear(3, 3)
    loaded = load_model(module, batch=lambda size: torch.ones(size, 3))

    with torch.device("meta"):
        built = loaded.build()

    assert built.weight.device.type == "meta"
    assert module.weight.device.type == "cpu"
    assert loaded.batch(2).shape == (2, 3)


def test_tied_parameters_stay_tied_in_a_copy() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight

    with torch.device("meta"):
        built = load_model(module, batch=lambda size: torch.ones(size, 3)).build()

    assert built[1].weight is built[0].weight


class _Takes(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x


class _Requires(nn.Module):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return x


def test_targets_are_for_the_loss() -> None:
    assert split_inputs(_Takes(), ("x", "y"), has_loss=True) == (("x",), {})


def test_a_dict_goes_in_whole_where_forward_takes_one_thing_and_names_none_of_its_keys() -> None:
    class TakesBatch(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            return batch["x"] * scale

    given = {"x": "x", "y": "y"}

    assert split_inputs(TakesBatch(), given, has_loss=True) == ((given,), {})
    assert split_inputs(_Takes(), given, has_loss=True) == ((), {"x": "x"})


def test_targets_go_in_where_forward_requires_them() -> None:
    assert split_inputs(_Requires(), ("x", "y"), has_loss=True) == (("x", "y"), {})


def test_without_a_loss_the_whole_tuple_goes_in() -> None:
    assert split_inputs(_Takes(), ("x", "y"), has_loss=False) == (("x", "y"), {})


def test_a_dict_gives_what_forward_names() -> None:
    assert split_inputs(_Takes(), {"x": 1, "y": 2}, has_loss=True) == ((), {"x": 1})


def test_a_dict_gives_all_to_a_forward_that_names_nothing() -> None:
    class TakesAny(nn.Module):
        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            return given["x"]

    assert split_inputs(TakesAny(), {"x": 1, "y": 2}, has_loss=True) == ((), {"x": 1, "y": 2})


def test_a_batch_function_may_be_one_of_torchs_own() -> None:
    batch = load_model(nn.Linear(1, 1), batch=torch.randn, loss=lambda output, batch: output.mean()).batch(3)

    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (3,)


def test_more_than_forward_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 elements, but forward of _Takes takes 2"):
        split_inputs(_Takes(), (1, 2, 3), has_loss=False)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["has no function model", "def batch(size)"]),
        (GOOD.replace("def batch", "def batches"), ["has no function batch", "it has batches"]),
        (GOOD.replace("nn.Linear(4, 2)", "nn.Linear(4)"), ["model()", "TypeError", "model.py:6"]),
        (GOOD.replace("nn.Linear(4, 2)", "7"), ["returned an int", "torch.nn.Module"]),
        (GOOD.replace("return nn.Linear(4, 2)", "nn.Linear(4, 2)"), ["model() of", "returned None; it must return"]),
        (
            GOOD.replace("return torch.randn(size, 4), torch.randn(size, 2)", "return 5"),
            ["batch(1)", "an int", "tuple or a dict"],
        ),
        (GOOD + "\nopen('data/tokens.bin')\n", ["data/tokens.bin", "torch.randn"]),
        (GOOD + "\nimport no_such_package\n", ["no_such_package", "not installed"]),
        (GOOD + "\ndef broken(:\n", ["not valid Python"]),
        (GOOD.replace("def batch(size)", "def batch(size, seq_len)"), ["no default length", "seq_len=1024"]),
        (GOOD + "\nglobal_batch = 'many'\n", ["global_batch", "'many'", "64"]),
        (GOOD + "\nloss = 3\n", ["loss", "must be a function"]),
        (GOOD.replace("def batch(size)", "def batch()"), ["batch of", "takes (), and is called", "def batch(size)"]),
        (GOOD.replace("nn.Linear(4, 2)", "nn.Linear(4, 2).cuda()"), ["moves tensors to a GPU", "leave out .cuda()"]),
        (GOOD.replace("nn.Linear(4, 2)", "nn.DataParallel(nn.Linear(4, 2))"), ["DataParallel around all of it"]),
        (GOOD.replace("nn.Linear(4, 2)", "torch.jit.script(nn.Linear(4, 2))"), ["return it unscripted"]),
    ],
)
def test_bad_files_are_told_in_a_sentence(tmp_path: Path, text: str, words: list[str]) -> None:
    message = _refusal(tmp_path, text)

    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("loss = nn.MSELoss()", r"AttributeError.*inside loss\(output, batch\), which is given .* all of what batch"),
        (
            "def loss(output, batch):\n    return (output - batch[1]).pow(2)",
            r"a tensor of \[2, 2\], not one number",
        ),
        ("def loss(output, batch):\n    return output.detach().sum()", "a number in which no parameter has a part"),
    ],
)
def test_a_loss_that_trains_nothing_is_told_why(tmp_path: Path, loss: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace(load_model(_file(tmp_path, f"{GOOD}\n\n{loss}\n")))


def test_a_loss_of_some_numbers_of_samples_is_told_without_how_a_loss_is_written(tmp_path: Path) -> None:
    text = GOOD.replace("    return (output", "    assert len(output) % 3 == 0, 'threes'\n    return (output")

    with pytest.raises(ValueError, match=r"runs with 3, 6 samples .*\(AssertionError: threes \(.*:\d+\)\): if samples"):
        trace(load_model(_file(tmp_path, text)))


def test_tensors_with_other_dims_for_one_sample_count_no_rows() -> None:
    one, two = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)

    assert not counts_rows(load_model(nn.Linear(4, 2), batch=lambda size: (two,)), (one,), (two,))


def test_a_model_may_be_a_module_that_the_file_has_made(tmp_path: Path) -> None:
    loaded = load_model(_file(tmp_path, GOOD + "\nmodel = nn.Linear(4, 2)\n"))

    built = [loaded.build() for _ in range(2)]

    assert [type(each) for each in built] == [nn.Linear] * 2
    assert built[0].weight is not built[1].weight


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    _file(tmp_path, GOOD, "model.py")

    with pytest.raises(ValueError, match=r"no file modle\.py in .*: did you mean model\.py\?"):
        load_model(tmp_path / "modle.py")


def test_seq_len_needs_a_batch_that_takes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"64 tokens per sample were asked for, but batch\(size\).*takes no seq_len"):
        load_model(_file(tmp_path, GOOD), seq_len=64)


def test_a_module_needs_batches() -> None:
    with pytest.raises(ValueError, match=r"came without micro-batches: give batch="):
        load_model(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", r"is not JSON"),
        ("{}", r'no "model_type"'),
        ('{"model_type": "no_such"}', r'model_type "no_such", which transformers'),
        ('{"model_type": "gpt2", "architectures": ["GPT9Model"]}', r'architecture "GPT9Model"'),
        ('{"model_type": "gpt2", "architectures": ["GPT2Model"]}', r"batches are not known here"),
        ('{"model_type": "flava", "architectures": ["FlavaForPreTraining"]}', r"batches are not known here"),
    ],
)
def test_bad_configs_are_told_in_a_sentence(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ValueError, match=match):
        load_model(tmp_path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ValueError, match=r"pip install 'meshwright\[hf\]'"):
        load_model(tmp_path)
