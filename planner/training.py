"""TrainingSpec: what the user fixes about the job, the same for every candidate plan."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Precision = Literal["bf16", "fp32"]

SAMPLES_PER_GPU = 8
"""Global batch per GPU that is assumed, and said aloud, when the user gives none."""


class TrainingSpec(BaseModel):
    """Global batch, precision and optimizer of the job.

    bf16 is FSDP2's mixed precision: fp32 parameters, gradients and optimizer state, bf16 compute copies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    global_batch: PositiveInt = Field(description="samples per optimizer step, over all devices")
    seq_len: PositiveInt | None = Field(default=None, description="None: the model has no sequence")
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    memory_margin: float = Field(default=0.05, ge=0, lt=1, description="share of device memory left free")

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of the compute dtype."""
        return 2 if self.precision == "bf16" else 4

    @property
    def state_bytes(self) -> int:
        """Optimizer state per parameter, fp32: two moments for AdamW, none for plain SGD."""
        return 8 if self.optimizer == "adamw" else 0
