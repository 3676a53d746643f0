"""What torch is told before it uses a GPU."""

import os

import pytest
import torch

from meshwright.executor.torch_compat import alias, grow_segments


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for NVIDIA GPUs, whose allocator nobody has told anything."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is gone after the test
        monkeypatch.delenv(name)


def test_pieces_of_memory_grow() -> None:
    grow_segments()

    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_said_of_the_allocator_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")

    grow_segments()

    assert os.environ[name] == "max_split_size_mb:512"
    assert len({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ)) == 1


def test_an_allocator_that_is_in_use_is_told_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)

    grow_segments()

    assert told == ["expandable_segments:True"]


def test_nothing_is_said_where_there_is_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)

    grow_segments()

    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("trained", [False, True])
def test_a_part_of_a_tensor_that_a_stage_sends_may_be_detached_in_place(trained: bool) -> None:
    whole = torch.ones(4, requires_grad=trained)

    sent = alias(whole[1:3])

    assert sent.data_ptr() == whole[1:].data_ptr()
    assert not sent.detach_().requires_grad
