"""Training loops as people write them with torch alone: FSDP2, tensor parallel and FSDP2, a 1F1B pipeline.

The model is a Llama of transformers. Each loop clips the gradient norm and reports loss and norm of every step, as our
trainer does.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

MAX_NORM = 1.0

Step = Callable[[torch.Tensor], tuple[float, float]]
"""Tokens of this rank's share of the batch -> (loss, gradient norm) of the job."""


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def _built(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def _clipped(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Clip gradients on whatever meshes they are; the norm before. group: ranks that hold other parameters."""
    meshes: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    squares = []
    for alike in meshes.values():
        norm = nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None], foreach=True)
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2)
    square = torch.stack(squares).sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for alike in meshes.values():
        nn.utils.clip_grads_with_norm_(alike, MAX_NORM, norm, foreach=True)
    return norm


def _accumulated(model: nn.Module, num_microbatches: int) -> Step:
    """The loop around a sharded model."""
    parameters = list(model.parameters())
    optimizer = adamw(parameters)

    def step(tokens: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, part in enumerate(tokens.chunk(num_microbatches)):
            model.set_requires_gradient_sync(i == num_microbatches - 1)  # type: ignore[operator]
            loss = loss_of(model(input_ids=part, use_cache=False).logits, part) / num_microbatches
            loss.backward()
            total += loss.detach()
        norm = _clipped(parameters)
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), norm.item()

    return step


def fsdp(config: LlamaConfig, num_microbatches: int) -> Step:
    """fully_shard of every layer and the rest, over all ranks."""
    model = _built(config)
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _accumulated(model, num_microbatches)


def _shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    for layer in (model.model.embed_tokens, *model.model.layers, model.lm_head):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def tensor_and_fsdp(config: LlamaConfig, num_microbatches: int, tensor: int) -> Step:
    """DTensor's tensor parallelism inside, fully_shard around it."""
    model = _built(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], ends)
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        styles = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh["tensor"], styles)
    _shard(model, mesh["data"])
    return _accumulated(model, num_microbatches)


class _Stage(nn.Module):
    """Some layers of the model, with the embedding before them or norm and head behind them."""

    def __init__(self, model: LlamaForCausalLM, first: int, end: int) -> None:
        super().__init__()
        last = end == len(model.model.layers)
        self.embed = model.model.embed_tokens if first == 0 else None
        self.layers = model.model.layers[first:end]
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        places = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=places)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def one_forward_one_backward(config: LlamaConfig, num_microbatches: int) -> Step:
    """A pipeline of as many stages as ranks, with equally many layers each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _built(config)
    width = config.num_hidden_layers // size
    stage = PipelineStage(_Stage(model, rank * width, (rank + 1) * width), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_of)
    parameters = list(stage.submod.parameters())
    optimizer = adamw(parameters)

    def step(tokens: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        elif rank == size - 1:
            schedule.step(target=tokens, losses=losses)
        else:
            schedule.step()
        norm = _clipped(parameters, dist.group.WORLD)
        optimizer.step()
        total = torch.stack(losses).sum() / num_microbatches if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.item(), norm.item()

    return step
