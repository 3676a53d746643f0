"""Names of torch functions, for modes that follow tensors through them."""

from collections.abc import Callable
from typing import Any


def name_of(func: Callable[..., Any]) -> str:
    """What a torch function is called; of a property "shape.__get__"."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    return name


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.endswith("__")


SIZES = frozenset(("shape.__get__", "size", "numel", "nelement", "__len__"))
"""Functions that say how large a tensor is."""

UNCONCERNED = frozenset(
    f"{name}.__get__"
    for name in (
        "dtype", "device", "requires_grad", "grad_fn", "is_cuda", "is_cpu", "is_meta", "is_leaf", "layout", "ndim",
        "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_xpu", "is_mps", "_version", "output_nr",
        "is_sparse_csr", "is_mtia", "is_hpu", "is_vulkan", "is_maia", "itemsize", "retains_grad", "_base",
    )
) | frozenset(
    ("is_floating_point", "is_complex", "element_size", "get_device", "is_contiguous", "dim", "ndimension", "__hash__",
     "untyped_storage", "retain_grad", "_is_view", "is_inference", "is_tensor", "is_signed", "record_stream", "is_conj",
     "is_neg", "_is_zerotensor", "_typed_storage", "data_ptr", "stride", "storage_offset")
)  # fmt: skip
"""Functions that return, or do, the same whether all of a dim is here or a part of it."""
