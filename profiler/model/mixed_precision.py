"""Whether a model runs as under fully_shard in bfloat16: parameters and inputs are cast, buffers and targets are
not."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..running.fake import FakeModel, fake_model
from ..running.gpu_kernel_emulation import Mode
from .chain import LayerChain
from .other_runs import run_first_of_each_class


def mixed_precision_problem(fake: FakeModel, chain: LayerChain) -> str:
    """Why the model does not run so, in a few words; '' if it does. Of each class of layers only the first is run."""
    if fake.dtype != torch.bfloat16:
        fake = fake_model(fake.loaded, torch.bfloat16, fake.knows_layout)
    modules = (fake.module.get_submodule(name) for name in ("", *chain.units.names))
    handles = [
        module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        for module in modules
        if next(module.parameters(), None) is not None
    ]
    batch = fake.batch(1, fake.loaded.seq_len, cast=False)
    try:
        with fake.buffers_uncast():
            run_first_of_each_class(fake, chain, batch, _OneDtype())
    except ValueError as error:
        return str(error.__cause__ or error).partition("\n")[0]
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, (args, kwargs))


class _OneDtype(Mode):
    """Raises RuntimeError for products of two floating-point dtypes, which kernels refuse and fake tensors let pass."""

    _PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "_grouped_mm")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self._PRODUCTS or name.startswith("_scaled_dot_product"):
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in given})
            if len(dtypes) > 1:
                raise RuntimeError(f"{name} of {' and '.join(dtypes)}")
        return self.run(func, args, kwargs or {})
