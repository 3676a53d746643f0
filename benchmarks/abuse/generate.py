"""Random models with the habits of real ones: trees of blocks with ties, skips, reuse, hooks, odd dtypes and batches.

A model is drawn as plain data (`Tree`), so that it can be written down, taken apart, and built again.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.utils.checkpoint import checkpoint

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel

WIDTH = 16
WORDS = 24
TOKENS = 8


@dataclass(frozen=True)
class Tree:
    """A model as data.

    blocks: kinds of its layers. order: which of them run, one after the other; some twice, some never. ties: pairs of
    blocks with one weight. skips: (from, to) places of the order: what the first returns is added to what the second
    is given. hooks: (block, kind). writes: places after which something is written into what was returned.
    """

    seed: int
    blocks: tuple[str, ...]
    order: tuple[int, ...]
    ties: tuple[tuple[int, int], ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    hooks: tuple[tuple[int, str], ...] = ()
    writes: tuple[int, ...] = ()
    dtype: str = "float32"
    batch: str = "vectors"
    loss: str = "mean"

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "Tree":
        """From its JSON."""
        found = json.loads(text)
        for name in ("blocks", "order", "writes"):
            found[name] = tuple(found[name])
        for name in ("ties", "skips", "hooks"):
            found[name] = tuple(tuple(pair) for pair in found[name])
        return cls(**found)


PLAIN = ("linear", "mlp", "residual", "norm")
BLOCKS = (
    *PLAIN,
    *("gated", "nested", "dict", "attention", "spectral", "orthogonal", "in place", "buffer", "running"),
    *("plain tensor", "listed tensor", "named device", "scalar", "empty", "frozen", "dropout", "noise", "mapped"),
    *("force", "repeated", "compiled", "function", "fft", "batch norm", "synced norm", "group norm", "detached"),
    *("bias only", "experts", "closed over", "kept weight", "hooked gradient", "masked weight", "unregistered"),
)
"""Kinds of layers; all take and return the same shape."""

BATCHES = ("vectors", "tokens", "time first", "rows", "dict", "alone", "table", "offsets", "double targets")
HOOKS = ("keep", "scale", "write", "pre", "backward", "halve")
LOSSES = ("mean", "mean", "mean", "mean", "two", "pairs", "own")


def draw(seed: int) -> Tree:
    """The tree of a seed: mostly plain, with a few habits."""
    dice = random.Random(seed)
    count = dice.randint(2, 6)
    blocks = tuple(dice.choice(BLOCKS if dice.random() < 0.5 else PLAIN) for _ in range(count))
    order = list(range(count))
    if dice.random() < 0.2:
        order.insert(dice.randint(1, count), dice.randrange(count))
    if dice.random() < 0.1 and count > 2:
        order.remove(dice.choice(order))
    places = range(len(order))

    def pairs(chance: float, of: range) -> tuple[tuple[int, int], ...]:
        if dice.random() >= chance or len(of) < 2:
            return ()
        return tuple((min(pair), max(pair)) for pair in (dice.sample(of, 2) for _ in range(dice.randint(1, 2))))

    ties = tuple((a, b) for a, b in pairs(0.2, range(count)) if {blocks[a], blocks[b]} <= {"linear", "residual"})
    hooked = dice.random() < 0.25
    return Tree(
        seed,
        blocks,
        tuple(order),
        ties,
        pairs(0.3, places),
        ((dice.randrange(count), dice.choice(HOOKS)),) if hooked else (),
        (dice.choice(places),) if dice.random() < 0.15 else (),
        dice.choice(("float32",) * 8 + ("float64", "bfloat16")),
        dice.choice(BATCHES if dice.random() < 0.5 else BATCHES[:2]),
        dice.choice(LOSSES),
    )


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def _scaled(held: torch.Tensor, weight: Callable[[], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    return h * held.to(h.dtype) + weight().mean()


class Block(nn.Module):
    """One layer of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH, device="cpu" if kind == "named device" else None)
        if kind in ("mlp", "gated", "force", "experts"):
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if kind == "nested":
            self.inner = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH))
        if kind == "dict":
            self.parts = nn.ModuleDict({"[/b]": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
        if kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        norms = {"batch norm": nn.BatchNorm1d, "synced norm": nn.SyncBatchNorm}
        if kind in norms:
            self.norm = norms[kind](WIDTH)
        if kind == "group norm":
            self.norm = nn.GroupNorm(4, WIDTH)
        if kind == "spectral":
            spectral_norm(self.linear)
        if kind == "orthogonal":
            orthogonal(self.linear)
        if kind in ("buffer", "running"):
            self.register_buffer("held", torch.linspace(0.5, 1.5, WIDTH))
        if kind == "plain tensor":
            self.held = torch.linspace(0.5, 1.5, WIDTH)
        if kind == "listed tensor":
            self.listed = {"a": [torch.linspace(0.5, 1.5, WIDTH)], "b": 2}
        if kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5))
        if kind == "empty":
            self.none = nn.Parameter(torch.zeros(0, WIDTH))
        if kind == "bias only":
            self.bias = nn.Parameter(torch.zeros(WIDTH))
        if kind == "frozen":
            self.linear.requires_grad_(False)
        if kind == "compiled":
            self.linear.compile()
        if kind == "closed over":
            self.scaled = partial(_scaled, torch.linspace(0.5, 1.5, WIDTH), lambda: self.linear.weight)
        if kind == "kept weight":
            self.kept = [self.linear.weight]
        if kind == "unregistered":
            self.hidden = [nn.Linear(WIDTH, WIDTH)]
        if kind == "masked weight":
            mask = torch.linspace(0.5, 1.5, WIDTH)
            self.linear.weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the kind makes of it."""
        h: torch.Tensor = self.linear(x)
        match self.kind:
            case "mlp":
                return x + self.down(functional.gelu(self.up(h)))
            case "gated":
                return x + self.down(self.up(x).sigmoid() * self.up(h))
            case "residual":
                return x + torch.relu(h)
            case "nested":
                return x + self.inner(h)
            case "dict":
                return x + sum(part(h) for part in self.parts.values())
            case "norm":
                return x + torch.tanh(self.norm(h))
            case "batch norm" | "synced norm" | "group norm":
                return x + self.norm(h.reshape(-1, WIDTH)).reshape(h.shape)
            case "attention":
                q = h.reshape(h.shape[0], -1, 2, WIDTH // 2).transpose(1, 2)
                mixed = functional.scaled_dot_product_attention(q, q, q)
                return x + mixed.transpose(1, 2).reshape(h.shape)
            case "in place":
                h.mul_(2).add_(x)
                return h
            case "buffer":
                return h * self.held
            case "running":
                self.held = 0.9 * self.held + 0.1 * h.detach().reshape(-1, WIDTH).mean(0)
                return h - self.held
            case "plain tensor":
                return h * self.held.to(h.dtype)
            case "listed tensor":
                return h * self.listed["a"][0].to(h.dtype) * self.listed["b"]
            case "closed over":
                return x + self.scaled(h)
            case "unregistered":
                return x + self.hidden[0](h.float()).to(h.dtype)
            case "kept weight":
                return h + self.kept[0].square().mean()
            case "hooked gradient":
                if h.requires_grad:
                    h.register_hook(lambda gradient: gradient / 2)
                return x + torch.tanh(h)
            case "scalar":
                return h * self.scale
            case "empty":
                return h + self.none.sum()
            case "bias only":
                return h.detach() + self.bias
            case "dropout":
                return x + functional.dropout(h, 0.2, self.training)
            case "noise":
                return x + h + 0.1 * torch.randn_like(h)
            case "mapped":
                return torch.func.vmap(lambda row: torch.tanh(self.linear(row)))(x)
            case "force":
                return x + torch.func.grad(lambda given: self.down(torch.tanh(self.up(given))).sum())(h)
            case "repeated":
                again: torch.Tensor = checkpoint(self.linear, h, use_reentrant=False)
                return x + again
            case "function":
                return x + _Function.apply(h)
            case "fft":
                return x + torch.fft.irfft(torch.fft.rfft(h.float(), dim=-1), n=WIDTH, dim=-1).to(h.dtype)
            case "detached":
                return x.detach() + h
            case "experts":
                share = h.softmax(-1)[..., :1]
                return x + share * self.down(torch.relu(self.up(h)))
        return h


class Model(nn.Module):
    """The module of a tree."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.tree = tree
        self.embed = nn.Embedding(WORDS, WIDTH) if tree.batch == "tokens" else None
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum") if tree.batch == "offsets" else None
        self.blocks = nn.ModuleList(Block(kind) for kind in tree.blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.kept: dict[int, torch.Tensor] = {}
        for a, b in tree.ties:
            self.blocks[b].linear.weight = self.blocks[a].linear.weight
        for number, kind in tree.hooks:
            self._hook(number, kind)

    def _hook(self, number: int, kind: str) -> None:
        block = self.blocks[number]
        if kind == "keep":
            block.register_forward_hook(lambda module, args, output: self.kept.__setitem__(number, output))
        elif kind == "scale":
            block.register_forward_hook(lambda module, args, output: output * 2)
        elif kind == "write":
            block.register_forward_hook(lambda module, args, output: output.mul_(2))
        elif kind == "pre":
            block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        elif kind == "backward":
            block.register_full_backward_hook(lambda module, grads, given: None)
        else:
            block.register_full_backward_hook(
                lambda module, grads, given: tuple(g if g is None else g / 2 for g in grads)
            )

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> Any:
        """The blocks in their order, then the head."""
        tree = self.tree
        if self.embed is not None:
            x = self.embed(x)
        if self.bag is not None:
            x = self.bag(x, more)
        if tree.batch == "table" and more is not None:
            x = x * more
        outputs: list[torch.Tensor] = []
        for place, number in enumerate(tree.order):
            for start, end in tree.skips:
                if end == place and start < place:
                    x = x + outputs[start]
            x = self.blocks[number](x)
            if place in tree.writes:
                x.mul_(0.5)
            outputs.append(x)
        for kept in self.kept.values():
            x = x + kept
        self.kept = {}
        out = self.head(x)
        if tree.loss == "own":
            return {"loss": out.square().mean(), "out": out}
        return (out, x.mean()) if tree.loss == "two" else out


def batch_of(tree: Tree, size: int) -> Any:
    """A batch of so many samples."""
    dtype = getattr(torch, tree.dtype)
    x, y = (torch.randn(size, WIDTH, dtype=dtype) for _ in range(2))
    match tree.batch:
        case "tokens":
            return torch.randint(WORDS, (size, TOKENS)), torch.randn(size, TOKENS, WIDTH, dtype=dtype)
        case "time first":
            return tuple(torch.randn(TOKENS, size, WIDTH, dtype=dtype) for _ in range(2))
        case "rows":
            return tuple(torch.randn(3 * size, WIDTH, dtype=dtype) for _ in range(2))
        case "dict":
            return {"x": x, "y": y, "name": "a batch"}
        case "alone":
            return x
        case "table":
            return x, torch.linspace(0.5, 1.5, WIDTH, dtype=dtype), y
        case "offsets":
            return torch.randint(WORDS, (3 * size,)), torch.arange(0, 3 * size, 3), y
        case "double targets":
            return x, y.double()
    return x, y


def loss_of(tree: Tree, output: Any, batch: Any) -> torch.Tensor:
    """The loss of a tree's output."""
    if tree.loss == "own":
        found: torch.Tensor = output["loss"]
        return found
    out, extra = output if tree.loss == "two" else (output, 0.0)
    if tree.loss == "pairs":
        flat = functional.normalize(out.reshape(len(out), -1).float(), dim=-1)
        return functional.cross_entropy(4 * flat @ flat.T, torch.arange(len(out)))
    target = batch if tree.batch == "alone" else batch["y"] if tree.batch == "dict" else batch[-1]
    return functional.mse_loss(out, target.to(out.dtype)) + 0.1 * extra


def loaded(tree: Tree) -> LoadedModel:
    """The tree's model, as `plan` would load it."""
    dtype = getattr(torch, tree.dtype)
    made = load_model(
        lambda: Model(tree).to(dtype),
        batch=lambda size: batch_of(tree, size),
        loss=lambda output, batch: loss_of(tree, output, batch),
    )
    return replace(made, name=f"model {tree.seed}", source=f"model {tree.seed}")


FILE = '''"""The least of a generated model that still shows: {what}"""

from benchmarks.abuse import generate

tree = generate.Tree.of(
    {text!r}
)
plan_with = {pins!r}


def model():
    return generate.loaded(tree).build()


def batch(size):
    return generate.batch_of(tree, size)


def loss(output, batch):
    return generate.loss_of(tree, output, batch)
'''


def file_of(tree: Tree, pins: dict[str, Any], what: str) -> str:
    """A model.py with the tree's model."""
    return FILE.format(what=" ".join(what.split())[:300], text=tree.text, pins=pins)
