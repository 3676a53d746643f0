"""Reference training steps: small models run under every set-up of these ranks, which kernels timed alone do not show.

In a step, operands come from memory that something else has used since, outputs from pages that are new, and
collectives with the copies and hooks of FSDP and DTensor around them. `plan calibrate` fits its device to these steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ...planner.answers.search import price_setup
from ...planner.cost.refit import MeasuredStep
from ...planner.plan.setups import parse_setup
from ...planner.plan.training import TrainingSpec
from ...profiler.machine.cluster import Device, cluster_of
from ...profiler.model.load import load_model
from ...profiler.model.loaded import LoadedModel
from ...profiler.model.trace import trace
from .local_ranks import apart
from .measure import measure
from .measurement import Measurement

_VOCABULARY = 512


@dataclass(frozen=True)
class Reference:
    """A model, its samples per rank and step, and the set-ups that several ranks run it in (N stands for the number of
    ranks)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    samples: int
    setups: tuple[str, ...]


class _Wide(nn.Module):
    """A model of three large products: arithmetic, and parameters that take long to gather and to update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, 4 * width)
        self.fc3 = nn.Linear(4 * width, _VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (samples, classes)."""
        logits: torch.Tensor = self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(size, length, 3, self.heads, width // self.heads).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class _Deep(nn.Module):
    """A model of many small layers, which shows what a layer costs whatever its size."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, (samples, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _features(width: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, width), torch.randint(_VOCABULARY, (size,))


def _tokens(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(_VOCABULARY, (size, length))
    return tokens, tokens


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def references(device_type: str) -> dict[str, Reference]:
    """Name -> reference model of such a size that a step takes about a tenth of a second."""
    width, deep, length, samples = (512, 192, 96, 4) if device_type == "cpu" else (4096, 1024, 1024, 4)
    several = ("ddp", "fsdp", "pp=N")
    return {
        "wide": Reference(partial(_Wide, width), partial(_features, width), 32 * samples, several),
        "deep": Reference(partial(_Deep, deep, 6), partial(_tokens, length), 2 * samples, (*several, "tp=N")),
        "heavy": Reference(partial(_Deep, 3 * deep, 2), partial(_tokens, 2 * length), samples, several),
    }


def reference_steps(device: Device, num_ranks: int, device_type: str, repetitions: int) -> list[MeasuredStep]:
    """Measured steps of every reference model under every set-up that these ranks can run; they take turns."""
    runs = []
    for name, reference in references(device_type).items():
        loaded: LoadedModel = load_model(reference.build, batch=reference.batch, loss=_loss)
        profile = apart(trace, loaded)
        cluster = cluster_of(device, num_ranks)
        training = TrainingSpec(
            global_batch=reference.samples * num_ranks,
            seq_len=profile.seq_len,
            precision="fp32" if device_type == "cpu" else "bf16",
        )
        plans = {}
        for setup in reference.setups if num_ranks > 1 else ("ddp",):
            words = setup.replace("N", str(num_ranks))
            candidate = price_setup(parse_setup(words, num_ranks, num_ranks), profile, cluster, training)
            if candidate.plan is not None:
                plans[words] = candidate.plan
        for words, found in measure(plans, loaded, steps=4, repetitions=repetitions).items():
            if isinstance(found, Measurement):
                runs.append(MeasuredStep(f"{name}, {words}", plans[words], profile, found.step_time_s))
    return runs
