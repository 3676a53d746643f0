"""Calls that join many gradients are counted as torch and the executor join them."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.cost.traffic import BUCKET_ELEMENTS, DDP_BUCKET_BYTES, FIRST_DDP_BUCKET_BYTES, num_buffers
from meshwright.planner.cost.traffic import num_ddp_buckets as num_buckets

FP32_BYTES = 4


@given(st.lists(st.integers(1, 3 * DDP_BUCKET_BYTES // FP32_BYTES), min_size=1, max_size=40))
def test_ddp_buckets_are_those_that_torch_makes(elements: list[int]) -> None:
    gradients = [torch.empty(size, device="meta") for size in elements]
    buckets, _ = dist._compute_bucket_assignment_by_size(gradients, [FIRST_DDP_BUCKET_BYTES, DDP_BUCKET_BYTES])

    assert num_buckets([FP32_BYTES * size for size in elements]) == len(buckets)


@pytest.mark.parametrize(
    ("sizes", "buffers"),
    [
        ([], 0),
        ([1, 2, 3], 1),
        ([BUCKET_ELEMENTS, 1], 2),
        ([1, BUCKET_ELEMENTS, 1], 3),
        ([BUCKET_ELEMENTS - 1, 1, 1], 2),
        ([3 * BUCKET_ELEMENTS], 1),
    ],
)
def test_a_flat_buffer_ends_before_the_gradient_that_does_not_fit(sizes: list[float], buffers: int) -> None:
    assert num_buffers(sizes) == buffers
