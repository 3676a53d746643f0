"""Norms of gradients are those of their numbers, in whatever dtype these are."""

import pytest
import torch

from meshwright.executor.parallel.norms import norms_of


def test_norms_in_16_bits_are_as_exact_as_others() -> None:
    tensors = [
        torch.randn(100, 100, dtype=torch.bfloat16),  # its norm in bfloat16 is up to 0.4% off
        torch.full((4,), 6e4, dtype=torch.float16),  # 120,000 is beyond fp16
        torch.randn(5),
        torch.zeros(0),
        torch.randn(3, dtype=torch.complex64),
        torch.ones(4, dtype=torch.int64),
        torch.randn(7, dtype=torch.float64),
    ]

    norms = norms_of(tensors, torch.device("cpu"))

    assert norms.dtype == torch.float64
    assert norms.tolist() == pytest.approx([float(t.to(torch.complex128).norm()) for t in tensors], rel=1e-6)
