"""Weights: files of safetensors and checkpoints become shards under every plan, and no rank reads more than its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from meshwright.executor import apply, parallelize
from meshwright.executor.state import weights
from meshwright.executor.state.weights import Weights
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.tied_net import PLANS, TiedNet, adamw, batch_of, loss, plan_of, samples, tied_profile


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return tied_profile()


def trained() -> dict[str, torch.Tensor]:
    """Some numbers for every parameter and buffer, as a file holds them: tied ones once."""
    torch.manual_seed(7)
    state = {
        name: torch.randn_like(t) if t.is_floating_point() else t + 3 for name, t in TiedNet().state_dict().items()
    }
    del state["head.weight"]
    return state


def save_in_two(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """A folder with two files and their index, as Hugging Face writes large models."""
    names = sorted(state)
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, own in parts.items():
        save_file({name: state[name].contiguous() for name in own}, folder / file)
    where = ", ".join(f'"{name}": "{file}"' for file, own in parts.items() for name in own)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {' + where + "}}")
    return folder


def _loaded(plan: Plan, source: Any, model_fn: Any = TiedNet) -> tuple[dict[str, torch.Tensor], int]:
    """(the whole model, elements that this rank read)."""
    read = 0
    original = weights._Safetensors.read

    def counted(self: Any, boxes: Any) -> None:
        nonlocal read
        read += sum(box.tensor.numel() for box in boxes)
        original(self, boxes)

    weights._Safetensors.read = counted  # type: ignore[method-assign]
    trainer = parallelize(model_fn, plan, adamw, loss=loss, weights=source)
    weights._Safetensors.read = original  # type: ignore[method-assign]
    return trainer.full_state_dict(), read


@pytest.mark.parametrize("name", slow.but_these(PLANS, {"fsdp and tensor"}))
def test_safetensors_become_shards_under_every_plan(profile: ModelProfile, tmp_path: Path, name: str) -> None:
    plan, expected = plan_of(profile, **PLANS[name]), trained()
    source = save_in_two(expected, tmp_path)

    found = run_ranks(_loaded, plan.degrees.num_devices, plan, source)

    assert found[0][0].keys() == TiedNet().state_dict().keys()
    for key, tensor in found[0][0].items():
        assert torch.equal(tensor, expected["tokens.weight" if key == "head.weight" else key])
    whole, buffers = sum(t.numel() for t in expected.values()), 2 * 8 + 1
    shares = plan.degrees.data_shard * plan.degrees.tensor * plan.degrees.pipeline
    if plan.degrees.tensor == 1 and plan.degrees.pipeline == 1:
        assert all(read <= whole / shares + buffers for _, read in found)
    assert plan.degrees.num_devices == 1 or all(read < 0.8 * whole for _, read in found)


def test_a_checkpoint_of_any_plan_is_a_source_of_weights(profile: ModelProfile, tmp_path: Path) -> None:
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    trainer.step(next(trainer.loader(samples)))
    trainer.save(tmp_path)

    found, _ = run_ranks(_loaded, 2, plan_of(profile, shard=2), tmp_path)[0]

    assert all(torch.equal(found[name], tensor) for name, tensor in trainer.full_state_dict().items())


def test_the_model_is_not_built_whole(profile: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_in_two(trained(), tmp_path)
    real: list[int] = []
    reset = nn.Linear.reset_parameters

    def watched(self: nn.Linear) -> None:
        real.append(0 if self.weight.is_meta else self.weight.numel())
        reset(self)

    monkeypatch.setattr(nn.Linear, "reset_parameters", watched)
    monkeypatch.setattr(apply, "initial_values", None)

    parallelize(TiedNet, plan_of(profile), adamw, loss=loss, weights=source)

    assert real
    assert sum(real) == 0


@pytest.mark.parametrize("stored", slow.but_first([GPT2Model, GPT2LMHeadModel], 1), ids=["without head", "with head"])
def test_a_folder_of_hugging_face_is_a_source_of_weights(tmp_path: Path, stored: type[Any]) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    torch.manual_seed(3)
    original = stored(config)
    original.save_pretrained(tmp_path, max_shard_size="20KB")

    def batch(size: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (size, 8))
        return {"input_ids": tokens, "labels": tokens}

    loaded = load_model(lambda: GPT2LMHeadModel(config), batch=batch)
    plan = plan_of(trace(loaded), shard=2)
    found, _ = run_ranks(_loaded, 2, plan, tmp_path, loaded.build)[0]

    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for name, tensor in original.state_dict().items():
        assert torch.equal(found[name if name in found else f"transformer.{name}"], tensor)


class Adapted(TiedNet):
    """A frozen model under another name, with a small new part."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + nn.functional.linear(self.adapter(self.tokens(tokens)), self.head.weight)


@pytest.mark.slow
def test_new_parameters_keep_their_initial_values(tmp_path: Path) -> None:
    plan = plan_of(trace(load_model(Adapted, batch=batch_of, loss=loss)), shard=2)
    expected = trained()
    save_file({f"base.{name}": tensor for name, tensor in expected.items()}, tmp_path / "model.safetensors")
    source = Weights(tmp_path, lambda name: None if name.startswith("adapter") else f"base.{name}")

    (found, _), (_, _) = run_ranks(_loaded, 2, plan, source, Adapted)

    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert 0 < found["adapter.weight"].abs().max() <= 0.25


def _refusal(plan: Plan, source: Any) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        parallelize(TiedNet, plan, adamw, loss=loss, weights=source)
    return str(caught.value)


def test_what_does_not_fit_is_refused_by_name(profile: ModelProfile, tmp_path: Path) -> None:
    plan, state = plan_of(profile), trained()
    save_file({**state, "blocks.0.up.bias": torch.zeros(5)}, tmp_path / "shape.safetensors")
    save_file({n: t for n, t in state.items() if "up" not in n}, tmp_path / "missing.safetensors")
    (tmp_path / "half").mkdir()
    folder = save_in_two(state, tmp_path / "half")
    (folder / "model-00002-of-00002.safetensors").unlink()

    assert "blocks.0.up.bias of shape [5], the model's blocks.0.up.bias is [32]" in _refusal(
        plan, tmp_path / "shape.safetensors"
    )
    missing = _refusal(plan, tmp_path / "missing.safetensors")
    assert "holds no blocks.0.up.weight (4 of 26 parameters are missing)" in missing
    assert f"from {Weights.__module__} import Weights" in missing
    assert "names model-00002-of-00002.safetensors, which is not beside it (1 of 2 missing)" in _refusal(plan, folder)
    assert "no weights at" in _refusal(plan, tmp_path / "nowhere")
