"""Recompute a layer's forward in backward instead of keeping its activations."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..planner.plan import LayerPlan


def recompute(module: nn.Module) -> None:
    """From now on `module` keeps its inputs for backward and nothing else.

    Its forward is replaced, not the module, so parameter names stay; hooks on the module itself (FSDP's gathering,
    the slicing of sequence parallelism) run once, outside of what is repeated. Buffers that the forward writes into
    (running statistics) are written once: the repetition finds them as the forward did, and leaves no trace.
    """
    forward = module.forward
    unwritten: set[str] = set()

    def repeated(*args: Any, **kwargs: Any) -> Any:
        before = {n: (b, b._version, b.clone()) for n, b in module.named_buffers() if n not in unwritten}
        written: list[tuple[torch.Tensor, torch.Tensor]] = []

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _with_values(written)

        output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        for name, (buffer, version, value) in before.items():
            if buffer._version == version:
                unwritten.add(name)
            else:
                written.append((buffer, value))
        return output

    module.forward = repeated


@contextmanager
def _with_values(written: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Buffers hold other values, and afterwards again what they held; autograd does not hear of it."""
    after = [buffer.clone() for buffer, _ in written]
    for buffer, value in written:
        buffer.data.copy_(value)
    try:
        yield
    finally:
        for (buffer, _), value in zip(written, after, strict=True):
            buffer.data.copy_(value)


def check_recompute(layer: LayerPlan) -> None:
    """Raise ValueError if a plan asks to recompute a layer that is not one module, so has no forward to repeat."""
    if layer.recompute == "full" and len(layer.modules) != 1:
        raise ValueError(
            f"layer {layer.name} consists of {len(layer.modules)} modules ({', '.join(layer.modules) or 'none'}); "
            'only a layer that is one module can be recomputed. Give it recompute="none"'
        )
