"""A loaded model on fake tensors: it runs forward and backward with shapes and dtypes, but without numbers."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .load import Batch, LoadedModel, split_inputs


@dataclass(frozen=True)
class FakeModel:
    """A model whose floating-point tensors all have the compute dtype, in its fake mode."""

    loaded: LoadedModel
    module: nn.Module
    mode: FakeTensorMode
    dtype: torch.dtype

    def batch(self, size: int, seq_len: int | None) -> Batch:
        """Fake micro-batch of `size` samples."""
        loaded = self.loaded if seq_len is None else self.loaded.with_seq_len(seq_len)
        real = loaded.batch(size)
        with self.mode:
            made: Batch = tree_map(self._fake, real)
        return made

    def loss(self, batch: Batch, before_loss: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Loss of one forward. Raises ValueError in words when the model cannot take the batch."""
        args, kwargs = split_inputs(self.module, batch, self.loaded.loss is not None)
        output = self.module(*args, **kwargs)
        before_loss()
        if self.loaded.loss is not None:
            output = self.loaded.loss(output, batch)
        return _scalar(output, self.loaded)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fake mode, fused attention as on a GPU, and failures of the model told in a sentence."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled, log.disabled = log.disabled, True
        try:
            with self.mode, _NoAttentionDropout(), _one_sequence_per_sample(), torch.enable_grad():
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"{self.loaded.source} decides by the values of its tensors what to compute ({error}), so it cannot be "
                "profiled by shapes alone; make the decision depend on shapes or on the configuration"
            ) from error
        except (RuntimeError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"{self.loaded.source} does not run with its own micro-batch: {type(error).__name__}: {error}. "
                "Check that the batch function returns what forward takes: (inputs..., targets)"
            ) from error
        finally:
            log.disabled = was_disabled

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=self.dtype if leaf.is_floating_point() else leaf.dtype)


def mixed_precision_problem(loaded: LoadedModel, units: Sequence[str]) -> str:
    """Why the model does not run as under fully_shard in bfloat16, in a few words; '' if it does.

    There parameters, and what enters the model and its `units`, are bfloat16; buffers and targets stay as they are.
    """

    def cast(leaf: Any) -> Any:
        return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    fake = fake_model(loaded, torch.bfloat16, buffers=False)
    for name in ("", *units):
        module = fake.module.get_submodule(name)
        if next(module.parameters(), None) is not None:
            module.register_forward_pre_hook(before, with_kwargs=True)
    batch = tree_map(lambda x: fake.mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, loaded.batch(1))
    try:
        with fake.running(), _OneDtype():
            fake.loss(batch)
    except ValueError as error:
        return str(error.__cause__ or error).partition("\n")[0]
    return ""


class _OneDtype(TorchDispatchMode):
    """What kernels refuse and fake tensors let pass: products of two floating-point dtypes."""

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
        return func(*args, **(kwargs or {}))


def fake_model(loaded: LoadedModel, dtype: torch.dtype, buffers: bool = True) -> FakeModel:
    """The model built on the meta device and turned into fake CPU tensors, in training mode.

    buffers: they have the compute dtype, too.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        module = loaded.build()
    _to_fake(module, mode, dtype, buffers)
    return FakeModel(loaded, module.train(), mode, dtype)


def _to_fake(root: nn.Module, mode: FakeTensorMode, dtype: torch.dtype, buffers: bool) -> None:
    """Replace all tensors of the module in place; Module.to_empty would untie shared parameters."""
    twins: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            to = dtype if tensor.is_floating_point() and (buffers or _is_parameter(tensor)) else tensor.dtype
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=to, device="cpu")
            twins[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if _is_parameter(tensor) else made
        return twins[id(tensor)]

    kept = []
    with mode:
        for module in root.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
            for tensors in places:
                for name, value in list(tensors.items()):
                    if isinstance(value, torch.Tensor):
                        kept.append(value)
                        tensors[name] = twin(value)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


class _NoAttentionDropout(TorchFunctionMode):
    """With dropout the CPU attention kernel falls back to a T x T matrix, which a GPU's does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


@contextmanager
def _one_sequence_per_sample() -> Iterator[None]:
    """From fake positions transformers cannot see that no sample is packed, and would build T x T masks."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    original = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original


def _scalar(output: Any, loaded: LoadedModel) -> torch.Tensor:
    """The loss in what the model (or the loss function) returned."""
    if hasattr(output, "loss") and isinstance(output.loss, torch.Tensor):
        found: torch.Tensor = output.loss
        return found
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        return torch.as_tensor(output["loss"])
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad:
            return leaf
    what = "loss(output, batch)" if loaded.loss is not None else "the module"
    raise ValueError(
        f"{what} of {loaded.source} returned no single number to train on; define in the model file, for example: "
        "def loss(output, batch): return torch.nn.functional.cross_entropy(output, batch[1])"
    )
