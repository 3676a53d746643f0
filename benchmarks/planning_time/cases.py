"""What is planned to measure planning: models, clusters and jobs, each with its target."""

from dataclasses import dataclass, field
from pathlib import Path

MODELS = Path(__file__).parent.parent / "models"

MIXED = """\
[network]
bandwidth = "40 GB/s"
latency = "20 us"

[[hosts]]
count = 4
device = "h100-80gb"
gpus = 8

[[hosts]]
count = 4
device = "a100-80gb"
gpus = 8
"""
"""A cluster of two kinds of devices, 64 GPUs."""


@dataclass(frozen=True)
class Case:
    """One call of `plan`. search_s: seconds that the search alone may take; shell_s: from the shell to the answer, with
    the model profiled anew; None: no target. cluster: a TOML in place of gpus and device."""

    name: str
    model: str
    gpus: int
    global_batch: int | None = None
    seq_len: int | None = None
    search_s: float | None = None
    shell_s: float | None = None
    device: str = "h100-80gb"
    cluster: str | None = None
    more: tuple[str, ...] = field(default=())

    @property
    def path(self) -> Path:
        """The model's file."""
        return MODELS / self.model if self.model.endswith(".py") else MODELS / self.model / "config.json"

    @property
    def length(self) -> tuple[str, ...]:
        """The flag of the sequence length, if it is not the model's own."""
        return () if self.seq_len is None else ("--seq-len", str(self.seq_len))

    @property
    def job(self) -> tuple[str, ...]:
        """The flags beside model and cluster."""
        batch = () if self.global_batch is None else ("--global-batch", str(self.global_batch))
        return (*batch, *self.length, *self.more)


LAYER_WISE = tuple(f"layer-wise choice, Llama-3-8B, 8 GPUs of {memory} GB" for memory in (40, 80))
"""Names of two cases that differ only in the memory of a GPU: less, then more."""


CASES = (
    Case("GPT-2-sized model.py, 8 GPUs", "gpt.py", 8, search_s=0.5, shell_s=5.0),
    Case("Llama-3-8B, 8 GPUs", "llama3_8b", 8, 64, search_s=0.5, shell_s=8.0),
    Case("Llama-3-8B, 64 GPUs", "llama3_8b", 64, 512, search_s=0.5, shell_s=8.0),
    Case("GPT-3 175B, 1,024 GPUs", "gpt3_175b", 1024, 1536, search_s=2.0),
    Case("Llama-3-70B, 64 GPUs", "llama3_70b", 64, 512),
    Case("Llama-3-70B, 512 GPUs", "llama3_70b", 512, 2048, search_s=2.0),
    Case("DeepSeek-V3, 2,048 GPUs", "deepseek_v3", 2048, 15360, search_s=2.0),
    Case("Llama-3.1-405B, 16,384 GPUs, sequence 8k", "llama31_405b", 16384, 2048, 8192, 3.0, 12.0),
    Case("Llama-3.1-405B, 16,384 GPUs, sequence 131k", "llama31_405b", 16384, 128, 131072, 3.0, 12.0),
    Case("U-Net, 64 GPUs", "unet.py", 64, search_s=10.0),
    Case("T5-3B, 64 GPUs", "t5_3b", 64, search_s=10.0),
    Case("ResNet-50, 64 GPUs", "resnet50.py", 64, search_s=10.0),
    Case("Llama-3-70B, 32 H100 + 32 A100", "llama3_70b", 64, 512, search_s=10.0, cluster=MIXED),
    *(
        Case(
            name,
            *("llama3_8b", 8, 64, None, 2.0),
            device=device,
            more=("--space", "full", "--pin", "data_shard=8"),
        )
        for name, device in zip(LAYER_WISE, ("a100-40gb", "a100-80gb"), strict=True)
    ),
)

SCALES = tuple(
    Case(f"Llama-3-8B, {gpus:,} GPUs", "llama3_8b", gpus, 8 * gpus)
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
)
"""One model over more and more GPUs, eight samples for each."""

MOST_GROWTH = 22.0
"""Search at the most GPUs over search at the fewest: the target."""
