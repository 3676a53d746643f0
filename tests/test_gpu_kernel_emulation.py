"""Fake tensors run as on a GPU, whatever the processor here knows."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.profiler.running import gpu_kernel_emulation as emulation
from meshwright.profiler.running.fake_modes import LeanFakeMode
from meshwright.profiler.running.gpu_kernel_emulation import Mode, as_on_gpu


class Operators(Mode):
    """Counts the operators that run, and what shapes they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            self.seen[func._overloadpacket.__name__, getattr(out, "shape", None)] += 1
        return out


def operators_of(dtype: torch.dtype, **of_layers: Any) -> Counter[tuple[Any, ...]]:
    """Operators of the forward and backward of two LSTM layers."""
    with LeanFakeMode(), as_on_gpu(), Operators() as operators:
        lstm = nn.LSTM(8, 6, num_layers=2, dtype=dtype, **of_layers)
        output, (hidden, cells) = lstm(torch.empty(4, 5, 8, dtype=dtype, requires_grad=True))
        (output.sum() + hidden.sum() + cells.sum()).backward()
    return operators.seen


FUSED = "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "cat", "stack", "mm"
LAYERS: list[dict[str, Any]] = [{}, {"bidirectional": True, "batch_first": True}, {"bias": False, "dropout": 0.5}]


@pytest.mark.parametrize("of_layers", LAYERS)
def test_an_lstm_runs_what_torch_runs_where_it_is_fused(
    of_layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = operators_of(torch.float32, **of_layers)
    monkeypatch.setattr(emulation, "_lstm", torch.lstm)

    by_torch = operators_of(torch.float32, **of_layers)
    assert by_torch[FUSED[0], None] > 0
    assert {key: n for key, n in found.items() if key[0] in FUSED} == {
        key: n for key, n in by_torch.items() if key[0] in FUSED
    }


def test_an_lstm_is_fused_in_bf16_whatever_the_processor_knows() -> None:
    assert operators_of(torch.bfloat16)["mkldnn_rnn_layer", None] == 2


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_an_lstm_with_projections_is_left_to_torch() -> None:
    assert ("mkldnn_rnn_layer", None) not in operators_of(torch.float32, proj_size=3)
