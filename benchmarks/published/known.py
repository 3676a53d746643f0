"""What is known of published models beside their rows: configurations by name, and typical ones by size."""

from dataclasses import dataclass

from .models import StateSpace


@dataclass(frozen=True)
class Known:
    """Numbers of a model, by the names that rows give them; None where the row has to say."""

    n_layers: int | None = None
    hidden: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    gated_mlp: bool | None = None
    tied_embeddings: bool | None = None
    n_experts: int | None = None
    topk: int | None = None
    moe_ffn_hidden: int | None = None
    n_shared_experts: int | None = None
    n_dense_layers: int | None = None
    n_groups: int = 1
    topk_groups: int = 1
    pattern: str = ""
    mamba: StateSpace | None = None


KNOWN: dict[str, Known] = {
    "DeepSeek-V3": Known(n_groups=8, topk_groups=4),
    "Nemotron-3-Nano": Known(
        n_layers=52,
        hidden=2688,
        n_heads=32,
        n_kv_heads=2,
        head_dim=128,
        ffn_hidden=1856,
        vocab=131072,
        gated_mlp=False,
        tied_embeddings=False,
        n_experts=128,
        topk=6,
        moe_ffn_hidden=1856,
        n_shared_experts=2,  # one of twice the width
        n_dense_layers=0,
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        mamba=StateSpace(num_heads=64, head_width=64, state=128, groups=8),
    ),
}
"""First words of a model's name -> its configuration, as its authors publish it on Hugging Face."""

_LLAMAS = (
    (1.3e9, 24, 2048),
    (2.7e9, 32, 2560),
    (6.7e9, 32, 4096),
    (13e9, 40, 5120),
    (33e9, 60, 6656),
    (70e9, 80, 8192),
)
_LARGEST = (405e9, 126, 16384)


def like_parameters(num_parameters: float) -> Known:
    """A Llama that is as deep and wide as those of about as many parameters are."""
    _, layers, hidden = min((*_LLAMAS, _LARGEST), key=lambda known: abs(known[0] / num_parameters - 1))
    width = (num_parameters / (12 * layers)) ** 0.5
    hidden = max(128, round(width / 128) * 128)
    return Known(n_layers=layers, hidden=hidden, ffn_hidden=round(8 * hidden / 3 / 128) * 128, gated_mlp=True)
