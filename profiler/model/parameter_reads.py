"""Which parameters a forward reads: ranks that read others, by what their routers choose, reduce other gradients."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .fake import fake_model
from .gpu_kernel_emulation import Mode
from .loaded import LoadedModel


def parameters_read(loaded: LoadedModel) -> set[str]:
    """Names of the parameters that one forward of one sample reads."""
    fake = fake_model(loaded, torch.bfloat16)
    batch, reads = fake.batch(1, loaded.seq_len), _ParameterReads()
    with fake.running(), reads:
        fake.loss(batch)
    return {name for name, parameter in fake.module.named_parameters() if id(parameter) in reads.seen}


class _ParameterReads(Mode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.nn.Parameter))
        return func(*args, **(kwargs or {}))
