"""Small models of every kind we know, as LoadedModels: what a plan may meet; and a plan beside one process."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.accuracy.cases import profile_of
from meshwright.executor.measuring.one_process import Training
from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from support.ranks import PATIENCE_S
from support.zoo import MODELS

GLOBAL_BATCH = 16
NUM_STEPS = 3
VOCABULARY = 64
SEQ_LEN = 16
WIDTH = 16
CLASSES = 8
NOISE = 0.05
"""Added to all initial values, so that no bias hides behind a zero and no norm behind a one."""


@cache
def small_model(name: str) -> LoadedModel:
    """The model of that name."""
    loaded = MAKERS[name]()
    build = loaded.build

    def noisy() -> nn.Module:
        model = build().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return model

    return replace(loaded, build=noisy, name=name)


def small_profile(name: str) -> ModelProfile:
    """Its profile."""
    return profile_of(small_model(name))


def verified(name: str, plan: Plan, title: str = "", compile: bool | str = False) -> VerifyReport:
    """What differs between a plan's training of that model and one process's. compile: as parallelize takes it."""
    loaded = small_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]
    report = VerifyReport(title or name, (), {})
    return beside_one_process(report, plan, loaded, batches, timeout_s=PATIENCE_S, training=Training(compile=compile))


def _tokens(size: int, seq_len: int = SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _features(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))


def _images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randint(CLASSES, (size,))


def _next_token(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def _class(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), batch[1])


def _of_zoo(name: str) -> LoadedModel:
    small = load_model(MODELS / name).small
    assert small is not None
    return small()


_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _of_config(architecture: str, **config: Any) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        document = {"architectures": [architecture], "dtype": "float32", **config}
        (Path(folder) / "config.json").write_text(json.dumps(document))
        loaded = load_model(Path(folder))
        return loaded if loaded.seq_len is None else loaded.with_seq_len(SEQ_LEN)


class _Attention(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = _Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _Transformer(nn.Module):
    """Positions are a parameter of the model itself; the head is tied."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(SEQ_LEN, WIDTH))
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _large() -> nn.Module:
    return _Transformer(64 * VOCABULARY)


class _WithMask(_Transformer):
    """The mask is made from the batch, and every block reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        mask = self.causal & (tokens != 0)[:, None, None, :] | torch.eye(SEQ_LEN, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class _WithPadding(_Transformer):
    """Every block adds a number to the scores of each word, and is repeated in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        added = torch.zeros(tokens.shape, device=x.device).masked_fill(tokens == 0, -1e4)
        for block in self.blocks:
            x = checkpoint(block, x, added[:, None, None, :], use_reentrant=False)
        return self.head(self.norm(x))


class _Stem(nn.Module):
    """Begins with a layer of three modules, of which the last is not trained, and the others read no output of it."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Embedding(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(functional.gelu(self.narrow(x[..., None])))
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean(1))


class _Shared(_Transformer):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1]])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.tokens(tokens) + self.positions)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(self.norm(x))


def _frozen(*names: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = _Transformer()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return build


class _InPlaceBlock(nn.Module):
    """Writes into what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(x))


class _InPlace(nn.Module):
    """Its first operation writes into the batch's own tensor, its last into the last layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_InPlaceBlock(WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.leave(x)


class _Overwritten(_InPlace):
    """What a block is given is written into behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x += block(x)
        return self.leave(x)


class _Auxiliary(nn.Module):
    """Every block returns a scalar for the loss, too, and an index that later blocks look up."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(_Routed() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens)
        route = self.gate(x).argmax(-1)
        total = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, extra = block(x, route)
            total = total + extra
        return self.head(x), total


class _Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.linear(x) * self.experts[route])
        return x + y, y.square().mean()


def _with_auxiliary(
    output: tuple[torch.Tensor, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    return _next_token(output[0], batch) + 0.1 * output[1].float()


class _Decides(nn.Module):
    """Two ways, by the values of the sample: ranks go different ones in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        return self.end(torch.relu(self.ways[int(x.sum() > 0)](x)))


class _Detached(nn.Module):
    """The first layer gets no gradient, and the second stream none from the last block on."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(_PairBlock() for _ in range(3))
        self.enter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).detach()
        streams = {"left": x, "right": x}
        for block in self.blocks:
            streams = block(streams)
        return self.leave(streams["left"] + streams["right"].detach())


class _Functional(nn.Module):
    """The head multiplies with the embedding's own weight, and scales of all blocks are one parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.scales = nn.Parameter(torch.ones(3, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x) * self.scales[i]
        return functional.linear(x, self.tokens.weight)


def _normalised() -> nn.Module:
    """Spectral norms change their buffers in every forward, and read them."""

    def layer() -> nn.Module:
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(linear, nn.Tanh())

    return nn.Sequential(*(layer() for _ in range(3)), nn.Linear(WIDTH, CLASSES))


class _Buffered(nn.Module):
    """Blocks add an fp32 buffer to what they multiply; the loss is of fp32 targets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_BufferedBlock() for _ in range(3))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class _BufferedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x + self.shift))


def _pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def _squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, batch[1])


def _weight_normed() -> nn.Module:
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers), nn.Linear(WIDTH, CLASSES))


def _nested() -> nn.Module:
    def pair(*extra: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *extra)

    return nn.Sequential(pair(), nn.Sequential(pair(pair()), nn.Sequential(pair())), pair(), nn.Linear(WIDTH, CLASSES))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


def _batch_normed() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    return nn.Sequential(block(3, 8), block(8, 8), block(8, 8), nn.Sequential(nn.Flatten(), nn.Linear(512, CLASSES)))


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(_Residual(8, 8, 1), _Residual(8, 8, 1))
        self.layer2 = nn.Sequential(_Residual(8, 16, 2), _Residual(16, 16, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.layer2(self.layer1(self.stem(x)))).flatten(1))


class _Stock(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.tokens(tokens)))


class _PairBlock(nn.Module):
    """Takes and returns two streams, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, streams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        left, right = streams["left"], streams["right"]
        return {"left": torch.tanh(self.left(left) + right), "right": torch.tanh(self.right(right) - left)}


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(_PairBlock() for _ in range(3))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = {"left": self.enter(x), "right": x * self.scale}
        for block in self.blocks:
            streams = block(streams)
        return self.leave(streams["left"] * streams["right"])


def _valid_tokens(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (batch[1] >= VOCABULARY // 4).sum()


def _mean_of_valid(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    targets = batch[1].masked_fill(batch[1] < VOCABULARY // 4, -100)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


MAKERS: dict[str, Callable[[], LoadedModel]] = {
    "gpt": lambda: _of_zoo("gpt.py"),
    "unet": lambda: _of_zoo("unet.py"),
    "mlp": lambda: _of_zoo("mlp.py"),
    "llama": lambda: _of_config("LlamaForCausalLM", model_type="llama", num_key_value_heads=2, **_CONFIG),
    "qwen3": lambda: _of_config(
        "Qwen3ForCausalLM", model_type="qwen3", num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **_CONFIG
    ),
    "mixtral": lambda: _of_config(
        "MixtralForCausalLM",
        model_type="mixtral",
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_CONFIG,
    ),
    "deepseek": lambda: _of_config(
        "DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        num_key_value_heads=4,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=4,
        **_CONFIG,
    ),
    "bert": lambda: _of_config("BertForMaskedLM", model_type="bert", **_CONFIG),
    "gpt2": lambda: _of_config(
        "GPT2LMHeadModel",
        model_type="gpt2",
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=3,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "vit": lambda: _of_config(
        "ViTForImageClassification",
        model_type="vit",
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    ),
    "t5": lambda: _of_config(
        "T5ForConditionalGeneration",
        model_type="t5",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=4,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "lstm": lambda: load_model(_Recurrent, batch=_tokens, loss=_next_token),
    "resnet": lambda: load_model(_ResNet, batch=_images, loss=_class),
    "batch norm": lambda: load_model(_batch_normed, batch=_images, loss=_class),
    "root parameter": lambda: load_model(_Transformer, batch=_tokens, loss=_next_token),
    "large vocabulary": lambda: load_model(_large, batch=_tokens, loss=_next_token),
    "mask": lambda: load_model(_WithMask, batch=_tokens, loss=_next_token),
    "padding": lambda: load_model(_WithPadding, batch=_tokens, loss=_next_token),
    "stem": lambda: load_model(_Stem, batch=_features, loss=_class),
    "shared block": lambda: load_model(_Shared, batch=_tokens, loss=_next_token),
    "frozen block": lambda: load_model(_frozen("blocks.1"), batch=_tokens, loss=_next_token),
    "frozen start": lambda: load_model(_frozen("tokens", "blocks.0", "norm"), batch=_tokens, loss=_next_token),
    "in place": lambda: load_model(_InPlace, batch=_features, loss=_class),
    "overwritten": lambda: load_model(_Overwritten, batch=_features, loss=_class),
    "auxiliary": lambda: load_model(_Auxiliary, batch=_tokens, loss=_with_auxiliary),
    "decides": lambda: load_model(_Decides, batch=_features, loss=_class),
    "detached": lambda: load_model(_Detached, batch=_features, loss=_class),
    "functional": lambda: load_model(_Functional, batch=_tokens, loss=_next_token),
    "spectral norm": lambda: load_model(_normalised, batch=_features, loss=_class),
    "buffers": lambda: load_model(_Buffered, batch=_pairs, loss=_squares),
    "weight norm": lambda: load_model(_weight_normed, batch=_features, loss=_class),
    "nested": lambda: load_model(_nested, batch=_features, loss=_class),
    "stock": lambda: load_model(_Stock, batch=_tokens, loss=_next_token),
    "pair": lambda: load_model(_Pair, batch=_features, loss=_class),
    "weighted": lambda: replace(load_model(_Transformer, batch=_tokens, loss=_mean_of_valid), weight=_valid_tokens),
}
