"""Fine-tune a Hugging Face model by a plan: its weights, your optimizer and scheduler, checkpoints, telemetry.

python train_hf.py --make gpt2-small                    # a small GPT-2 with weights, as from_pretrained would load
plan gpt2-small/config.json --gpus 2 --device cpu --global-batch 8 --seq-len 64 -o plan.json
torchrun --nproc-per-node 2 train_hf.py gpt2-small --plan plan.json --steps 40
torchrun --nproc-per-node 2 train_hf.py gpt2-small --plan plan.json --steps 80      # goes on from step 40
plan report plan.json --run run.jsonl
"""

import argparse
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, get_cosine_schedule_with_warmup

from meshwright.executor import parallelize


def make(folder: Path) -> None:
    """Write a small GPT-2 over bytes, as Hugging Face stores models."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def samples(length: int) -> list[dict[str, torch.Tensor]]:
    """The source of a module of the standard library in pieces, each its own target."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in pieces[: len(pieces) // length * length].view(-1, length)]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, as Trainer does it; a stage's group may be empty."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def train(folder: Path, plan: str, steps: int, run: Path) -> None:
    """As this rank's part of a plan: go on from the last checkpoint, if there is one."""
    config = AutoConfig.from_pretrained(folder)
    trainer = parallelize(
        lambda: AutoModelForCausalLM.from_config(config),
        plan,
        optimizer,
        weights=folder,  # each rank reads its shards
        max_grad_norm=1.0,
        telemetry=run.with_suffix(".jsonl"),
    )
    scheduler = get_cosine_schedule_with_warmup(trainer.optimizer, 10, 200)
    trainer.resume(run, missing_ok=True, scheduler=scheduler)
    data = samples(config.n_positions)
    while trainer.progress.steps < steps:
        for share in trainer.loader(data):
            metrics = trainer.step(share)
            scheduler.step()
            step = trainer.progress.steps
            if trainer.mesh.rank == 0 and step % 10 == 0:
                print(f"step {step:4d}  loss {metrics.loss:.4f}  rate {scheduler.get_last_lr()[0]:.1e}", flush=True)
            if step % 20 == 0 or step == steps:
                trainer.save(run, wait=False, keep=2, scheduler=scheduler)  # written beside the next steps
            if step >= steps:
                break
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("--make", type=Path, help="write a small model into this folder, and end")
    parser.add_argument("--plan", help="made by: plan MODEL/config.json --gpus N -o plan.json")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--run", type=Path, default=Path("run"), help="folder of checkpoints; telemetry beside it")
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make)
    else:
        train(arguments.model, arguments.plan, arguments.steps, arguments.run)
