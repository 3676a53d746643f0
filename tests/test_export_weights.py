"""Weights written by the ranks of any plan, or from a checkpoint, are those of one process, and others read them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.executor import Trainer, export_weights, parallelize
from meshwright.executor.state import weight_files
from meshwright.executor.state.weight_files import WeightFiles, cast
from support.cli import run_plan
from support.ranks import run_ranks
from support.tied_net import PLANS, TiedNet, adamw, loss, plan_of, samples, tied_profile

KINDS = ("safetensors", "torch")


def trained(name: str) -> Trainer:
    """A trainer with a step behind it."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **PLANS[name]), adamw, loss=loss)
    trainer.step(next(trainer.loader(samples)))
    return trainer


def everything_in(folder: Path, kind: str = "safetensors") -> dict[str, torch.Tensor]:
    """All tensors of a folder, as its index names them."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors" if kind == "safetensors" else "*.bin")):
        found |= load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)
    index = list(folder.glob("*.index.json"))
    if index:
        assert json.loads(index[0].read_text())["weight_map"].keys() == found.keys()
    return found


def _written(name: str, folder: Path) -> dict[str, torch.Tensor]:
    weight_files.WeightFiles.__init__.__defaults__ = ("safetensors", 4000, ())  # type: ignore[attr-defined]
    export_weights.PIECE_BYTES = 200  # a few rows
    trainer = trained(name)
    for kind in KINDS:
        trainer.save_pretrained(folder / kind, format=kind)  # type: ignore[arg-type]
    trainer.save(folder / "run")
    trainer.close()
    return trainer.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_ranks_write_what_the_whole_model_is(name: str, tmp_path: Path) -> None:
    ranks = plan_of(tied_profile(), **PLANS[name]).degrees.num_devices

    expected = run_ranks(_written, ranks, name, tmp_path)[0]

    for kind in KINDS:
        found = everything_in(tmp_path / kind, kind)
        assert found.keys() == expected.keys() - {"head.weight"}
        assert [key for key, value in found.items() if not torch.equal(value, expected[key])] == []
        assert len(list((tmp_path / kind).glob("*-of-*"))) > 2
        assert not list((tmp_path / kind).glob(".partial*"))
    for source in ("run", "safetensors"):
        model = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss, weights=tmp_path / source)
        again = model.full_state_dict()
        assert [key for key, value in again.items() if not torch.equal(value, expected[key])] == []


def test_a_checkpoint_is_exported_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trained("one")
    trainer.save(tmp_path / "run")
    trainer.close()
    expected = trainer.full_state_dict()
    target = tmp_path / "weights"

    code = run_plan(
        "export-weights", str(tmp_path / "run"), "-o", str(target), "--dtype", "bf16", "--file-size", "4e-6"
    )

    assert code == 0
    assert "files of the weights after 1 step" in " ".join(capsys.readouterr().out.split())
    found = everything_in(target)
    assert found.keys() == expected.keys() - {"head.weight"}
    for name, value in found.items():
        kept = expected[name]
        assert torch.equal(value, kept.bfloat16() if kept.is_floating_point() else kept)


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trained("one")
    trainer.save(tmp_path / "run")
    trainer.close()
    file = tmp_path / "run" / "step-00000001" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-5])
    (tmp_path / "file").write_text("")

    for words, message in (
        ((str(tmp_path / "run"),), "is cut off: it has"),
        ((str(tmp_path / "nothing"),), "no checkpoint in"),
        ((str(tmp_path / "run"), "--dtype", "fp8"), "--dtype fp8: give one of fp32, bf16, fp16"),
        ((str(tmp_path / "run"), "--format", "onnx"), "--format onnx: give safetensors or torch"),
        ((str(tmp_path / "run"), "-o", str(tmp_path / "file")), "it is a file; give a folder"),
    ):
        assert run_plan("export-weights", *words, *(() if "-o" in words else ("-o", str(tmp_path / "w")))) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "w").exists()


def test_weights_that_were_there_before_are_replaced_whole(tmp_path: Path) -> None:
    small = cast({"a": ((3,), torch.float32)}, None)
    large = cast({"a": ((3,), torch.float32), "b": ((3,), torch.int64)}, None)
    for tensors in (large, small):
        files = WeightFiles(tmp_path, tensors, limit=16)
        files.begin()
        for file, names in files.files.items():
            files.write(file, [(name, 0, torch.full((3,), 7, dtype=tensors[name].dtype)) for name in names])
        files.finish()

    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [7.0] * 3
