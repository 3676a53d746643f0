"""Train a byte-level GPT on the source of Python's standard library: on one device, or by a plan on many.

    python train_gpt.py --steps 60
    plan train_gpt.py --gpus 4 --device cpu -o plan.json
    torchrun --nproc-per-node 4 train_gpt.py --plan plan.json --steps 60

Both print the same losses.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, Config
from torch import nn

from meshwright.executor import parallelize

CONFIG = Config(num_layers=4, num_heads=4, width=128, vocabulary=256, context=128)

global_batch = 16


def model() -> nn.Module:
    """Four blocks of 128 features over bytes."""
    return GPT(CONFIG)


def batch(size: int, seq_len: int = CONFIG.context) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, following bytes): what a micro-batch looks like, for the planner."""
    tokens = torch.randint(CONFIG.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def samples() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(bytes, following bytes) from places all over the standard library, without end, always in the same order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        start = int(torch.randint(len(text) - CONFIG.context, (), generator=generator))
        window = text[start : start + CONFIG.context + 1]
        yield window[:-1], window[1:]


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, on whatever part of the parameters this process has."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def train_on_one_device(steps: int) -> None:
    """Plain PyTorch."""
    torch.manual_seed(0)
    gpt = model()
    step_optimizer = optimizer(list(gpt.parameters()))
    stream = samples()
    for step in range(steps):
        inputs, targets = torch.utils.data.default_collate([next(stream) for _ in range(global_batch)])
        value = loss(gpt(inputs), (inputs, targets))
        value.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        step_optimizer.step()
        step_optimizer.zero_grad()
        print(f"step {step + 1:4d}  loss {value.item():.4f}", flush=True)


def train_by_plan(steps: int, plan: str) -> None:
    """Training by a plan, of which this process runs its rank's part."""
    trainer = parallelize(model, plan, optimizer, loss=loss, seed=0, max_grad_norm=1.0)  # 1. instead of the model
    for step, share in zip(range(steps), trainer.loader(samples), strict=False):  # 2. this rank's samples
        metrics = trainer.step(share)  # 3. forward, backward, clip, update
        if trainer.mesh.rank == 0:
            print(f"step {step + 1:4d}  loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s", flush=True)
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="made by: plan train_gpt.py --gpus N -o plan.json")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.plan:
        train_by_plan(arguments.steps, arguments.plan)
    else:
        train_on_one_device(arguments.steps)
