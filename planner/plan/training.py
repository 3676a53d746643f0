"""TrainingSpec: what the user fixes about the job; the same for every candidate plan."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, PositiveInt

from ...profiler.document import Frozen

REFERENCE = "fsdp2-eager"
"""Training stack of our executor, which device files describe."""

COMPILING = "fsdp2-compile"
"""Training stack of our executor when it compiles layers one by one."""

Precision = Literal["bf16", "fp32", "fp16", "fp8", "fp4"]

LOW_PRECISIONS: tuple[Precision, ...] = ("fp8", "fp4")

EXECUTABLE_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "fp8")
"""Precisions that the executor runs; the others are only priced."""

SAMPLES_PER_GPU = 8
"""Samples per GPU in the global batch that is assumed, and reported as an assumption, if the user gives none."""


class Objective(StrEnum):
    """What a plan should be best at: throughput, cost of a token, or number of GPUs."""

    THROUGHPUT = "throughput"
    COST = "cost"
    MIN_GPUS = "min-gpus"


class TrainingSpec(Frozen):
    """Global batch, precision and optimizer of the job.

    bf16 is FSDP2's mixed precision: fp32 parameters, gradients and optimizer state, bf16 compute copies. fp8 and fp4
    are the same with the matmuls of weights in that precision. software: the training stack, see software.py.
    """

    global_batch: PositiveInt = Field(description="samples per optimizer step, over all devices")
    seq_len: PositiveInt | None = Field(default=None, description="None: the model has no sequence")
    precision: Precision = "bf16"
    software: str = REFERENCE
    optimizer: Literal["adamw", "sgd"] = "adamw"
    expert_imbalance: float = Field(
        default=1.1, ge=1, description="tokens of the busiest expert-parallel rank over the mean; 1: forced balance"
    )
    memory_margin: float = Field(default=0.05, ge=0, lt=1, description="share of device memory left free")

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of the compute dtype."""
        return 4 if self.precision == "fp32" else 2

    @property
    def is_mixed(self) -> bool:
        """Whether parameters have copies in a compute dtype that is not fp32."""
        return self.precision != "fp32"

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter, in fp32: two moments for AdamW, none for plain SGD."""
        return 8 if self.optimizer == "adamw" else 0
