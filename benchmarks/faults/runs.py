"""What is trained: small models, their data, and plans of every kind for 1 to 8 ranks."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import gpt

VOCABULARY, LENGTH = 60, 16
GLOBAL_BATCH = 16
SEED = 11
LOSS = 1e-5
"""Relative difference of losses that the order of sums explains, in fp32."""

LOSS_BF16 = 2.0**-9
"""Relative difference of losses that rounding explains in bf16: half of its rounding step."""


class Mixture(nn.Module):
    """A Mixtral of two layers, four experts each."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=LENGTH,
        )
        self.mixture = MixtralForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.mixture(input_ids=tokens, use_cache=False).logits
        return logits


@dataclass(frozen=True, eq=False)
class Job:
    """A model, and plans for it by name: fields of their shape; `stages`: how many, else one."""

    model: Callable[[], nn.Module]
    shapes: dict[str, dict[str, Any]]
    precision: Precision = "fp32"

    @property
    def tolerance(self) -> float:
        """Relative difference of losses of two plans that rounding explains."""
        return LOSS if self.precision == "fp32" else LOSS_BF16

    def plan(self, name: str) -> Plan:
        """The plan of that name, its stages as equal as the layers allow."""
        fields = {"data_replicate": 1, "data_shard": 1, "tensor": 1, "pipeline": 1} | self.shapes[name]
        data = fields["data_replicate"] * fields["data_shard"]
        fields |= {"micro_batch": GLOBAL_BATCH // data // 2, "num_microbatches": 2}
        fields.setdefault("schedule", "1f1b" if fields["pipeline"] > 1 else "none")
        shape = Shape(**fields)
        profile = _profile(self)
        count = shape.pipeline * shape.virtual_stages
        ends = [round(i * len(profile.layers) / count) for i in range(count + 1)]
        return make_plan(
            profile,
            cluster_of(load_device("cpu"), shape.degrees.num_devices),
            TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision=self.precision),
            shape,
            [[LayerOption()] * (ends[i + 1] - ends[i]) for i in range(count)],
        )


def _gpt() -> nn.Module:
    return gpt.GPT(gpt.Config(num_layers=2, num_heads=4, width=32, vocabulary=VOCABULARY, context=LENGTH))


JOBS = {
    "gpt": Job(
        _gpt,
        {
            "one": {},
            "ddp 2": {"data_replicate": 2},
            "fsdp 2": {"data_shard": 2},
            "tp 2": {"tensor": 2},
            "pp 2": {"pipeline": 2},
            "hsdp 4": {"data_replicate": 2, "data_shard": 2},
            "tp x fsdp 4": {"tensor": 2, "data_shard": 2},
            "pp x ddp x tp 8": {"pipeline": 2, "data_replicate": 2, "tensor": 2},
            "fsdp 8": {"data_shard": 8},
        },
    ),
    "mixtral": Job(
        Mixture,
        {
            "one": {},
            "experts 2": {"data_shard": 2, "expert": 2},
            "context 2": {"context": 2},
            "interleaved 2": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
            "zb-v 2": {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2},
            "context x experts 4": {"context": 2, "data_shard": 2, "expert": 4},
            "pp x experts 4": {"pipeline": 2, "data_shard": 2, "expert": 2},
            "tp x sp x experts 4": {"tensor": 2, "sequence": True, "data_shard": 2, "expert": 2},
            "pp x context x experts 8": {"pipeline": 2, "context": 2, "data_shard": 2, "expert": 2},
        },
    ),
    "gpt in bf16": Job(
        _gpt,
        {
            "one": {},
            "ddp 2": {"data_replicate": 2},
            "fsdp 2": {"data_shard": 2},
            "zb-v 2": {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2},
            "context x tp 4": {"context": 2, "tensor": 2},
        },
        "bf16",
    ),
}
"""gpt: fused and tied weights, so that parts of tensors move between plans. mixtral: stacked experts. In bf16 the
optimizer's numbers are in fp32."""


def batch(size: int, seq_len: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch of any tokens."""
    tokens = torch.randint(VOCABULARY, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


loss = gpt.loss


@cache
def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first samples of the data, always the same."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in tokens]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that takes no rounding for a gradient."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


@cache
def _profile(job: Job) -> ModelProfile:
    return trace(load_model(job.model, batch=batch, loss=loss))
