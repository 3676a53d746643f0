"""Linear layers whose products run in fp8: torchao's, which scale every operand by its largest number as they go.

Parameters, gradients and the optimizer's state are those of bf16 training, and so is all but these products.
"""

import torch
from torch import nn

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability with which NVIDIA's GPUs multiply fp8 (Ada, Hopper)."""

ALIGNED = 16
"""Input and output features of a layer must be multiples of this, as kernels of fp8 products require."""

EMULATED = False
"""Whether products of fp8 numbers are computed in fp32, for tests on the CPU."""


def check_float8(device: torch.device) -> None:
    """Raise ValueError if the device cannot multiply fp8, or if torchao is not installed."""
    if not EMULATED and device.type == "cpu":
        raise ValueError("precision fp8: the CPU multiplies no fp8; run it on GPUs, or plan with --precision bf16")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise ValueError(
            f"precision fp8: {torch.cuda.get_device_name(device)} (compute capability {'.'.join(map(str, found))}) "
            f"multiplies no fp8, as GPUs from {'.'.join(map(str, LEAST_CAPABILITY))} on do; plan with --precision bf16"
        )
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        raise ValueError(
            "precision fp8 needs torchao's float8 layers: pip install torchao, or plan with --precision bf16"
        ) from None


def linear_in_float8(module: nn.Module) -> None:
    """Let all linear layers inside of a module multiply in fp8, if their sizes allow it. Layers and parameters stay the
    same objects, with their hooks. Subclasses of nn.Linear are left as they are."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = [inner for inner in module.modules() if type(inner) is nn.Linear and _fits(inner)]
    made = nn.ModuleList(layers)
    convert_to_float8_training(made, config=Float8LinearConfig(emulate=EMULATED))
    for layer, in_float8 in zip(layers, made, strict=True):
        layer.__class__ = type(in_float8)  # type: ignore[assignment]
        vars(layer).update({name: value for name, value in vars(in_float8).items() if name not in vars(layer)})


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % ALIGNED == 0 == layer.out_features % ALIGNED
