"""Training loops as people write them with torch alone: DDP, FSDP2, tensor parallel with and without FSDP2, 1F1B.

The model is a Llama of transformers. Each loop clips the gradient norm and reports loss and norm of every step, as our
trainer does.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

MAX_NORM = 1.0

Step = Callable[[torch.Tensor], tuple[float, float]]
"""Tokens of this rank's share of the batch -> (loss, gradient norm) of the job."""


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both sides. eps is a tenth of a typical gradient, as in the tests of equal numbers (`plan
    verify` takes a whole one): the usual 1e-8 makes whole steps of what is rounding. Norms of TP 2 that are 4e-8 apart
    in step 1 were 1.4e-4 apart after 13, and stay within 4e-7 so."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, foreach=True)


def _built(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def _clipped(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None, alike: Sequence[nn.Parameter] = ()
) -> torch.Tensor:
    """Clip gradients; the norm before. group: ranks that hold other parameters, but for those that are alike on all."""

    def square(some: Sequence[nn.Parameter]) -> torch.Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in some if p.grad is not None], foreach=True)
        total: torch.Tensor = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        return total

    meshes: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    known = {id(p) for p in alike}
    total = torch.stack([square([p for p in own if id(p) not in known]) for own in meshes.values()]).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    if alike:
        total += square(alike)
    norm = total.sqrt()
    for own in meshes.values():
        nn.utils.clip_grads_with_norm_(own, MAX_NORM, norm, foreach=True)
    return norm


def _accumulated(
    model: nn.Module,
    num_microbatches: int,
    tensor: dist.ProcessGroup | None = None,
    precision: torch.dtype | None = None,
) -> Step:
    """The loop around a sharded model. tensor: the group that all but norms are cut over, too. precision: of
    autocast."""
    parameters = list(model.parameters())
    norms = [p for n, p in model.named_parameters() if "norm" in n] if tensor is not None else []
    optimizer = adamw(parameters)

    def step(tokens: torch.Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, part in enumerate(tokens.chunk(num_microbatches)):
            is_last = i == num_microbatches - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
            waits = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waits else nullcontext():
                with nullcontext() if precision is None else torch.autocast("cpu", precision):
                    loss = loss_of(model(input_ids=part, use_cache=False).logits, part) / num_microbatches
                loss.backward()
            total += loss.detach()
        norm = _clipped(parameters, tensor, norms)
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), norm.item()

    return step


def ddp(config: LlamaConfig, num_microbatches: int) -> Step:
    """DistributedDataParallel over all ranks."""
    return _accumulated(DistributedDataParallel(_built(config), gradient_as_bucket_view=True), num_microbatches)


def fsdp(config: LlamaConfig, num_microbatches: int) -> Step:
    """fully_shard of every layer and the rest, over all ranks."""
    model = _built(config)
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _accumulated(model, num_microbatches)


def _shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    for layer in (model.model.embed_tokens, *model.model.layers, model.lm_head):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


class _Alike(Function):
    """Nothing forward, all-reduce backward: before columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(Function):
    """All-reduce forward, nothing backward: after rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(Function):
    """All-gather of features forward, this rank's slice backward: after the head."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        degree = dist.get_world_size(group)
        gathered = x.new_empty(degree * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x, group=group)
        return torch.cat(gathered.chunk(degree), -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)].contiguous(), None


class _Vocabulary(nn.Module):
    """This rank's rows of an embedding; tokens of the other ranks give zeros, and all are summed."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.first = group, dist.get_rank(group) * weight.shape[0]
        self.weight = nn.Parameter(weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens - self.first
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        found = functional.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return _Sum.apply(found.masked_fill(elsewhere[..., None], 0.0), self.group)  # type: ignore[no-any-return]


def _cut(linear: nn.Module, dim: int, group: dist.ProcessGroup) -> None:
    part = linear.weight.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    linear.weight = nn.Parameter(part.detach().clone())


def collectives_and_fsdp(
    config: LlamaConfig, num_microbatches: int, tensor: int, precision: torch.dtype | None = None
) -> Step:
    """Tensor parallelism by collectives of one's own on plain tensors, as Megatron has it, with fully_shard around
    where there are other ranks to shard over. precision: of autocast, over forward and loss."""
    model = _built(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    group = mesh.get_group("tensor")
    rows = model.model.embed_tokens.weight.detach().chunk(tensor)[dist.get_rank(group)].clone()
    model.model.embed_tokens = _Vocabulary(rows, group)
    _cut(model.lm_head, 0, group)
    model.lm_head.register_forward_pre_hook(lambda _, args: (_Alike.apply(args[0], group),))
    model.lm_head.register_forward_hook(lambda _, args, y: _Gather.apply(y, group))
    for layer in model.model.layers:
        for half, columns, row in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj"),
            (layer.mlp, ("gate_proj", "up_proj"), "down_proj"),
        ):
            for name in columns:
                _cut(half.get_submodule(name), 0, group)
            _cut(half.get_submodule(row), 1, group)
            half.get_submodule(row).register_forward_hook(lambda _, args, y: _Sum.apply(y, group))
        layer.input_layernorm.register_forward_hook(lambda _, args, y: _Alike.apply(y, group))
        layer.post_attention_layernorm.register_forward_hook(lambda _, args, y: _Alike.apply(y, group))
    if mesh["data"].size() > 1:
        _shard(model, mesh["data"])
    return _accumulated(model, num_microbatches, group, precision)


class _Stage(nn.Module):
    """Some layers of the model, with the embedding before them or norm and head after them."""

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
