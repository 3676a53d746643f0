"""Records what runs under a model: operators with their FLOPs and bytes, and when each storage is born and freed."""

import weakref
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..model.model_profile import FP32_BYTES, OpKind, OpPart
from ..semantics.draws import draws
from ..semantics.producers import unwrapped
from .gpu_kernel_emulation import Mode, device_of, in_dropout, tensors_in

aten = torch.ops.aten


@dataclass(frozen=True)
class Size:
    """Elements of the compute dtype, and bytes of all other dtypes; and what is added to both where the compute dtype
    is fp32 (less than nothing: casts are no copies there)."""

    elements: float = 0.0
    other_bytes: float = 0.0
    in_fp32: float = 0.0

    def __add__(self, more: "Size") -> "Size":
        return Size(self.elements + more.elements, self.other_bytes + more.other_bytes, self.in_fp32 + more.in_fp32)

    def __sub__(self, less: "Size") -> "Size":
        return Size(self.elements - less.elements, self.other_bytes - less.other_bytes, self.in_fp32 - less.in_fp32)

    @property
    def fp32_bytes(self) -> float:
        """Number of bytes if the compute dtype is fp32."""
        return FP32_BYTES * self.elements + self.other_bytes + self.in_fp32


NOTHING = Size()


class View(NamedTuple):
    """A tensor as an operator saw it: the number of its storage, and which part of that it is."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_complex: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> "View":
        """View of a tensor."""
        return cls(storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.is_complex())

    @property
    def in_reals(self) -> "View":
        """The same view in real numbers; of complex ones the last dim holds pairs of them."""
        if not self.is_complex:
            return self
        return View(self.storage, (*self.shape, 2), (*(2 * s for s in self.strides), 1), 2 * self.offset)


OwnCode = Literal["", "function", "hook"]
"""Which code of the model's own an operator of the backward ran in; "": in none."""


@dataclass
class Op:
    """One operator that ran."""

    name: str
    kind: OpKind
    module: str
    backward: bool
    is_view: bool
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    flops: float = 0.0
    moved: Size = NOTHING
    shape: tuple[float, float, float] | None = None
    part: OpPart = "forward"
    repeated: bool = True
    core: bool = False
    call: int = -1
    """Forward only: number of the module call that it ran in, as ModuleCalls counts them."""
    within: str = ""
    kernels: float = 1.0
    """Number of operators that this one stands for, with the FLOPs and bytes of all of them."""
    moment: int = 0
    """Length of the storages' log of births and deaths when it had run."""
    arguments: tuple[Any, ...] = field(default=(), repr=False)
    """Arguments without tensors, keyword arguments last; for torch.tensor the numbers that it makes a tensor of."""
    draws: bool = False
    """Whether it draws random numbers."""
    own: OwnCode = ""
    """Backward only: whether it ran in a function of the model's own, or in a hook on a gradient."""
    dropout: bool = False
    """Whether it ran in one of torch's dropouts, of whose masks each rank takes its own part."""


class Storages:
    """Numbers storages in the order in which they appear (an address may be used again), and logs births and deaths."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.log: list[tuple[int, bool]] = []
        self.sizes: dict[int, Size] = {}
        self._cast_of: dict[int, int] = {}
        self._dtype = dtype
        self._numbers: dict[int, int] = {}
        self._living: dict[int, weakref.ref[Any]] = {}
        self._next = 0

    def number(self, tensor: torch.Tensor, made: bool = False) -> int:
        """Number of a tensor's storage. made: an operator has just returned the tensor; a new storage is then logged as
        born."""
        storage = unwrapped(tensor).untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = self._next
            self._next += 1
            if made:
                self.sizes[number] = self.size_of_bytes(storage.nbytes(), tensor.dtype)
                self.log.append((number, True))
            self._living[number] = weakref.ref(storage, partial(self._died, number, address))
        return number

    def size_of_bytes(self, num_bytes: int, dtype: torch.dtype) -> Size:
        """That many bytes of `dtype`, as a Size."""
        return Size(num_bytes / dtype.itemsize) if dtype == self._dtype else Size(0.0, num_bytes)

    def size(self, *tensors: torch.Tensor) -> Size:
        """What is moved to read or write these tensors; an expanded tensor counts no more than its storage."""
        elements = other_bytes = 0.0
        for tensor in tensors:
            inner, dtype = unwrapped(tensor), tensor.dtype
            num_bytes = min(inner.numel() * dtype.itemsize, inner.untyped_storage().nbytes())
            if dtype == self._dtype:
                elements += num_bytes / dtype.itemsize
            else:
                other_bytes += num_bytes
        return Size(elements, other_bytes)

    def cast(self, source: torch.Tensor, made: torch.Tensor) -> None:
        """Note that an operator has made one tensor from the other in another dtype. If it did nothing else, both are
        one storage in a model whose compute dtype is fp32."""
        if {source.dtype, made.dtype} == {self._dtype, torch.float32} and source.stride() == made.stride():
            self._cast_of[self.number(made)] = self.in_fp32(self.number(source))

    def in_fp32(self, number: int) -> int:
        """Number of the storage that this one is the same as if the compute dtype is fp32."""
        return self._cast_of.get(number, number)

    def total(self, numbers: set[int], without: AbstractSet[int] = frozenset()) -> Size:
        """Total size of these storages, of those that were born under this log. without: storages that are left out; in
        fp32 also those that are the same as one of them."""
        total = Size()
        for number in numbers - without:
            total += self.sizes.get(number, Size())
        there = {self.in_fp32(number) for number in numbers} - {self.in_fp32(number) for number in without}
        in_fp32 = sum(self.sizes[number].fp32_bytes for number in there if number in self.sizes)
        return Size(total.elements, total.other_bytes, in_fp32 - total.fp32_bytes)

    def peak_in_fp32(self, start: int, end: int, without: set[int]) -> float:
        """The most bytes in use at once between two positions of the log, counted as in `peak`, if the compute dtype
        were fp32."""
        living: Counter[int] = Counter()
        left_out = {self.in_fp32(number) for number in without}
        live = best = 0.0
        for i, (number, born) in enumerate(self.log[:end]):
            root = self.in_fp32(number)
            if root in self.sizes and root not in left_out:
                living[root] += 1 if born else -1
                if living[root] == int(born):
                    live += self.sizes[root].fp32_bytes if born else -self.sizes[root].fp32_bytes
            if i >= start - 1:
                best = max(best, live)
        return best

    def peak(self, start: int, end: int, element_bytes: int, without: set[int]) -> Size:
        """The most memory in use at once between two positions of the log. All births since the beginning of the log
        count, but those of storages in `without`."""
        elements = other_bytes = 0.0
        best, best_bytes = (0.0, 0.0), -1.0
        for i, (number, born) in enumerate(self.log[:end]):
            if number not in without:
                size, sign = self.sizes[number], 1 if born else -1
                elements += sign * size.elements
                other_bytes += sign * size.other_bytes
            total = elements * element_bytes + other_bytes
            if i >= start - 1 and total > best_bytes:
                best, best_bytes = (elements, other_bytes), total
        return Size(*best)

    def end(self) -> None:
        """Stop to log births and deaths."""
        self._living.clear()

    def _died(self, number: int, address: int, storage: object) -> None:
        del self._living[number], self._numbers[address]
        if number in self.sizes:
            self.log.append((number, False))


class Recorder(Mode):
    """Writes down every operator while `active`; while `muted` only the storages that operators make. kind: the kind to
    give to all operators; None: as their names say."""

    def __init__(self, storages: Storages, module: Callable[[], str]) -> None:
        super().__init__()
        self.active = False
        self.backward = False
        self.muted = False
        self.own: OwnCode = ""
        """The kind of the model's own code in which the backward is now."""
        self.kind: OpKind | None = None
        self.ops: list[Op] = []
        self.storages = storages
        self._module = module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := device_of(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if not self.active or func.namespace == "prim":
            return self.run(func, args, kwargs)
        inputs = tensors_in((args, kwargs))
        views_in = tuple(View.of(t, self.storages.number(t)) for t in inputs)
        out = self.run(func, args, kwargs)
        outputs = tensors_in(out)
        views_out = tuple(View.of(t, self.storages.number(t, made=True)) for t in outputs)
        if func is aten._to_copy.default:
            self.storages.cast(inputs[0], outputs[0])
        if self.muted:
            return out
        name = func._overloadpacket.__name__
        read = {view.storage for view in views_in}
        is_view = not func._schema.is_mutable and bool(views_out) and all(v.storage in read for v in views_out)
        op = Op(name, self.kind or op_kind(func), self._module(), self.backward, is_view, views_in, views_out)
        if not is_view and name not in _FREE:
            op.flops = op_flops(func, args, kwargs, out)
            op.moved = self._moved(name, inputs, outputs)
            op.shape = product_shape(name, args)
        op.moment = len(self.storages.log)
        op.arguments = tuple(a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor))
        if name == "lift_fresh":
            op.arguments = _written_out(args[0])
        op.own, op.draws, op.dropout = self.own, _draws(func), in_dropout()
        self.ops.append(op)
        return out

    def end(self) -> None:
        """Drop the function that names modules: no operator comes any more."""
        self._module = str

    def _moved(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Size:
        if name == "embedding":  # reads the rows that it looks up, not the table
            return self.storages.size(*outputs, *outputs, inputs[-1])
        return self.storages.size(*outputs, *inputs)


def _written_out(tensor: torch.Tensor) -> tuple[float, ...]:
    """The numbers of a tensor that torch.tensor has just made; () if they are not known."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return ()
    with _disable_current_modes():
        return tuple(tensor.flatten().tolist())


_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}

_MATMUL = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm", "_scaled_mm"}
_NORM = {"_fused_rms_norm", "_fused_rms_norm_backward"}
_LOSS = {"_log_softmax", "_log_softmax_backward_data"}
_COPY = {"_to_copy", "clone", "copy_", "cat", "stack", "zeros_like", "fill_", "zero_", "zeros", "ones_like", "ones"}


_draws = cache(draws)


@cache
def op_kind(func: Any) -> OpKind:
    """Kind of an aten operator."""
    name = func._overloadpacket.__name__
    if name in _MATMUL or "rnn_layer" in name:
        return "matmul"
    if "scaled_dot_product" in name:
        return "attention"
    if name in _NORM or name.startswith(("native_layer_norm", "native_group_norm", "native_batch_norm", "batch_norm")):
        return "norm"
    if name in _LOSS or "_loss" in name:
        return "loss"
    if name.startswith("embedding"):
        return "embedding"
    if name in _COPY:
        return "copy"
    return "elementwise" if torch.Tag.pointwise in func.tags else "other"


def op_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """FLOPs of one operator: torch's formulas, and ours for what torch leaves out.

    Attention counts q k^T and probabilities v in full without a causal flag, and half of that with it (a mask given as
    a tensor is executed in full). Norms, softmax and other elementwise work counts as 0: bytes decide its time.
    """
    name = func._overloadpacket.__name__
    if name in _FLOPS:
        return float(_FLOPS[name](*args))
    if "scaled_dot_product" in name:
        return _attention_flops(func, args, kwargs)
    formula = flop_registry.get(func._overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    given = dict(kwargs)
    given.update(zip((a.name for a in func._schema.arguments), args, strict=False))
    q, k, v = (given[key].shape for key in ("query", "key", "value"))
    k, v = ((*q[:-2], *shape[-2:]) for shape in (k, v))  # of as many heads: torch 2.11's formulas know no groups
    grad = None
    if "backward" in func._overloadpacket.__name__:
        grad = next(given[key] for key in ("grad_out", "grad_out_", "grad") if key in given).shape
    full = _full_attention_flops(grad, q, k, v)
    return full / 2 if given.get("is_causal") else float(full)


@cache
def _full_attention_flops(grad: torch.Size | None, q: torch.Size, k: tuple[int, ...], v: tuple[int, ...]) -> int:
    """By torch's formulas, of these shapes; grad: of the output's gradient, for the backward."""
    return int(sdpa_flop_count(q, k, v) if grad is None else sdpa_backward_flop_count(grad, q, k, v))


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _rnn_flops(x: torch.Tensor, input_weight: torch.Tensor, hidden_weight: torch.Tensor, *_: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _convolution_backward_flops(grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *more: Any) -> int:
    """Of each wanted gradient as many as the forward's; torch's own formula forgets about groups."""
    transposed, wanted = more[4], more[-1]
    positions = image if transposed else grad
    return 2 * positions.shape[0] * positions.shape[2:].numel() * weight.numel() * int(sum(wanted[:2]))


_FLOPS: dict[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward_flops,
    "_grouped_mm": _grouped_flops,
    "mkldnn_rnn_layer": _rnn_flops,
    "mkldnn_rnn_layer_backward": lambda *args: 2 * _rnn_flops(*args),
}


def product_shape(name: str, args: tuple[Any, ...]) -> tuple[float, float, float] | None:
    """(rows, inner, columns) of a matrix product; a convolution as the product it is lowered to; fused attention as its
    product of queries and keys, with the queries of all heads as rows."""
    if "scaled_dot_product" in name:
        queries, keys = args[1:3] if "backward" in name else args[:2]
        return queries.shape[:-1].numel(), queries.shape[-1], keys.shape[-2]
    if name in ("addmm", "baddbmm"):
        args = args[1:]
    if name in ("mm", "addmm"):
        return args[0].shape[0], args[0].shape[1], args[1].shape[1]
    if name in ("bmm", "baddbmm"):
        return args[0].shape[0] * args[0].shape[1], args[0].shape[2], args[1].shape[2]
    if name == "_grouped_mm":
        return args[0].shape[-2], args[0].shape[-1], args[1].shape[-1]
    if name == "convolution":
        image, weight = args[0].shape, args[1].shape
        outputs = _convolution_positions(image, weight, args)
        return image[0] * outputs, weight[1:].numel(), weight[0]
    if name == "convolution_backward":
        gradient, weight = args[0].shape, args[2].shape
        return gradient[0] * gradient[2:].numel(), weight[0], weight[1:].numel()
    return None


def _convolution_positions(image: torch.Size, weight: torch.Size, args: tuple[Any, ...]) -> int:
    stride, padding, dilation, transposed = args[3], args[4], args[5], args[6]
    if transposed:
        return image[2:].numel()
    positions = 1
    for i, (size, kernel) in enumerate(zip(image[2:], weight[2:], strict=True)):
        step, pad, gap = (values[i] if len(values) > 1 else values[0] for values in (stride, padding, dilation))
        positions *= (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
    return positions
