"""TrainingSpec: what the user fixes about the job, the same for every candidate plan."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, PositiveInt

from ...profiler.document import Frozen

REFERENCE = "fsdp2-eager"
"""What our executor runs, and what device files are made for."""

COMPILING = "fsdp2-compile"
"""What our executor runs where layers are compiled one by one."""

Precision = Literal["bf16", "fp32", "fp16", "fp8", "fp4"]

LOW_PRECISIONS: tuple[Precision, ...] = ("fp8", "fp4")

EXECUTABLE_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32", "fp8")
"""What the executor runs today; the rest is priced only."""

SAMPLES_PER_GPU = 8
"""Global batch per GPU that is assumed, and said aloud, when the user gives none."""


class Objective(StrEnum):
    """What a plan is to be best at: its throughput, the cost of a token, or the number of GPUs."""

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
        """Whether parameters have copies in a compute dtype of their own."""
        return self.precision != "fp32"

    @property
    def state_bytes(self) -> int:
        """Optimizer state per parameter, fp32: two moments for AdamW, none for plain SGD."""
        return 8 if self.optimizer == "adamw" else 0
