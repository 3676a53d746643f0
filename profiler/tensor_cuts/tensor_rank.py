"""Runs a layer as one of several tensor-parallel ranks: with cut weights, and with copies in place of collectives."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..model.chain import Crossing, LayerChain
from ..model.layer_run import Collective, LayerRun, Observation
from ..model.model_profile import TensorCut
from ..running.fake import FakeModel
from ..running.meters import Op, Recorder, Size
from ..running.run_shapes import Shapes
from ..semantics.logit_shards import shard_logits
from .tensor_modules import divide_count


class CutRunError(ValueError):
    """A layer does not run with its weights cut. module: name of its module that failed."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


def run_cut(
    fake: FakeModel,
    chain: LayerChain,
    index: int,
    shapes: Shapes,
    size: int,
    seq_len: int | None,
    cuts: Sequence[TensorCut],
    degree: int,
    sequence_dims: dict[Any, int] | None = None,
    backward: bool = True,
) -> Observation:
    """One run of a layer as one of `degree` tensor-parallel ranks runs it.

    sequence_dims: producer of each arriving tensor -> its sequence dim, to run between the cuts on a slice of the
    sequence; None: on the whole.
    Raises CutRunError where it does not run.
    """
    run = LayerRun(fake, chain, index, shapes, size, seq_len)
    rank = TensorRank(run, cuts, degree, seq_len, sequence_dims)
    with fake.mode or nullcontext(), rank.applied(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loss of a slice warns that targets are whole
        try:
            seen = run.run(arrive=rank.arrive, backward=backward)
        except ValueError as error:
            raise CutRunError(str(error), run.running) from error.__cause__
    if read := rank.read_narrowed(run.recorder.ops):
        raise CutRunError(f"{read.name} reads features of an input of which only columns have the whole", read.module)
    seen.collectives = rank.collectives
    return seen


def layer_modules(fake: FakeModel, chain: LayerChain, index: int) -> dict[str, nn.Module]:
    """Modules of a layer by name relative to its root."""
    layer = chain.layers[index]
    prefix = layer.root + "." if layer.root else ""
    found = {}
    for unit in layer.units:
        for name, module in fake.module.get_submodule(unit).named_modules(prefix=unit):
            found["" if name == layer.root else name.removeprefix(prefix)] = module
    return found


class TensorRank:
    """One tensor-parallel rank's version of a layer: cut parameters, divided attributes, collectives as copies."""

    def __init__(
        self,
        run: LayerRun,
        cuts: Sequence[TensorCut],
        degree: int,
        seq_len: int | None,
        sequence_dims: dict[Any, int] | None,
    ) -> None:
        self.collectives: list[Collective] = []
        self._run = run
        self._cuts = cuts
        self._degree = degree
        self._sequence_dims = sequence_dims
        self._sequence_dim = next(iter(sequence_dims.values())) if sequence_dims else None
        self._slice_length = (seq_len or 0) // degree
        self._modules = layer_modules(run.fake, run.chain, run.index)
        self._entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._narrowed: set[int] = set()

    def arrive(self, crossing: Crossing, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that arrives in place of one from an earlier layer: a slice of it, if it is in `sequence_dims`."""
        dim = None if self._sequence_dims is None else self._sequence_dims.get(crossing.producer)
        if dim is None:
            return tensor
        shape = list(tensor.shape)
        shape[dim] //= self._degree
        return torch.empty(shape, dtype=tensor.dtype)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While it lasts, the layer's weights and attributes are cut, and its hooks are there."""
        with ExitStack() as undo:
            for cut in self._cuts:
                self._cut_parameters(cut, undo)
                self._without_padding(cut, undo)
                for name, attributes in cut.attributes.items():
                    for attribute in attributes:
                        undo.callback(divide_count(self._modules[name], attribute, self._degree))
                self._hook(cut, undo)
            try:
                yield
            finally:
                self._entered.clear()

    def _cut_parameters(self, cut: TensorCut, undo: ExitStack) -> None:
        for name, dim in cut.sharded.items():
            of, _, key = name.rpartition(".")
            if of not in self._modules:  # another name of one of the layer's, in a module that it does not run
                continue
            parameters = self._modules[of]._parameters
            whole = parameters[key]
            assert whole is not None
            shape = list(whole.shape)
            shape[dim] //= self._degree
            parameters[key] = nn.Parameter(torch.empty(shape, dtype=whole.dtype), whole.requires_grad)
            undo.callback(parameters.__setitem__, key, whole)

    def _without_padding(self, cut: TensorCut, undo: ExitStack) -> None:
        """Let modules have no padding row, which may be on another rank."""
        for name in cut.columns:
            module = self._modules[name]
            if getattr(module, "padding_idx", None) is not None:
                undo.callback(setattr, module, "padding_idx", module.padding_idx)
                setattr(module, "padding_idx", None)  # noqa: B010

    def read_narrowed(self, ops: Sequence[Op]) -> Op | None:
        """The first operator that reads an input in the narrow form in which only its shape counts; None if none
        does."""
        return next((op for op in ops if any(view.storage in self._narrowed for view in op.inputs)), None)

    def _narrow(self, cut: TensorCut, undo: ExitStack) -> None:
        own, storages = OwnWidth(cut.shown, self._degree), self._run.storages

        def show(module: nn.Module, args: Any, kwargs: Any) -> Any:
            with self._muted():
                shown = own.enter(module, args, kwargs)
            leaves = tree_leaves(shown)
            self._narrowed |= {storages.number(leaves[place]) for place in cut.shown}
            return shown

        undo.callback(self._modules[cut.narrowed].register_forward_pre_hook(show, with_kwargs=True).remove)
        for name in cut.columns:
            hook = self._modules[name].register_forward_pre_hook(lambda module, args: (own.whole(args[0]), *args[1:]))
            undo.callback(hook.remove)

    @contextmanager
    def _muted(self) -> Iterator[None]:
        recorder = self._run.recorder
        before, recorder.muted = recorder.muted, True
        try:
            yield
        finally:
            recorder.muted = before

    def _hook(self, cut: TensorCut, undo: ExitStack) -> None:
        gathered_outside = self._sequence_dim is not None and bool(cut.gather)
        if gathered_outside:
            door = self._modules[cut.gather]
            undo.callback(door.register_forward_pre_hook(self._module_input(cut.gather), with_kwargs=True).remove)
        if cut.narrowed:
            self._narrow(cut, undo)
        for name in cut.columns:
            module = self._modules[name]
            if cut.kind == "embedding":
                undo.callback(module.register_forward_hook(self._reduce_output).remove)
                continue
            if cut.kind == "table":
                undo.callback(module.register_forward_hook(self._gather_output).remove)
                continue
            if not gathered_outside and not cut.has_entered(name):
                hook = self._column_input(cut.inputs.get(name, name))
                undo.callback(module.register_forward_pre_hook(hook).remove)
            if cut.kind == "head":
                leave = self._shard_output if cut.stays_cut else self._gather_output
                undo.callback(module.register_forward_hook(leave).remove)
        for name in () if gathered_outside else cut.entries:
            undo.callback(self._modules[name].register_forward_hook(self._entry_output(name)).remove)
        for name in cut.rows:
            undo.callback(self._modules[name].register_forward_hook(self._reduce_output).remove)
        for name in cut.tables:
            undo.callback(self._modules[name].register_forward_hook(self._table_output).remove)
        if cut.door:
            door, own = self._modules[cut.door], OwnHeads(cut, self._take_heads, self.gather)
            undo.callback(door.register_forward_pre_hook(own.enter, with_kwargs=True).remove)
            undo.callback(door.register_forward_hook(own.leave).remove)

    def _table_output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return self._take_heads(output, output.dim() - 1)

    def _take_heads(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor along dim; in backward the gradients of all ranks are gathered."""
        if x.requires_grad:
            self.collectives.append(Collective("all_gather", "backward", self._run.storages.size(x)))
        own: torch.Tensor = _Scatter.apply(x, dim, self._degree, self._run.recorder)
        return own

    def _column_input(self, entry: str) -> Callable[..., tuple[Any, ...]]:
        return lambda module, args: (self._entering(args[0], entry), *args[1:])

    def _entry_output(self, entry: str) -> Callable[..., torch.Tensor]:
        return lambda module, args, output: self._entering(output, entry)

    def _module_input(self, door: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tree_map(
                lambda leaf: self._entering(leaf, door) if self._has_length(leaf, self._slice_length) else leaf,
                (args, kwargs),
            )

        return hook

    def _entering(self, given: torch.Tensor, entry: str) -> torch.Tensor:
        """What columns read for a tensor: each tensor is gathered once if it is a slice of the sequence, and its
        gradient is summed once."""
        if id(given) in self._entered:
            return self._entered[id(given)][1]
        dim = self._sequence_dim if self._has_length(given, self._slice_length) else None
        full = given if dim is None else _Gather.apply(given, dim, self._degree, self._run.recorder)
        self._entered[id(given)] = (given, full)
        size = self._run.storages.size(full)
        if dim is not None:
            self._forward("all_gather", size, entry)
        if given.requires_grad:
            kind = "all_reduce" if dim is None else "reduce_scatter"
            self.collectives.append(Collective(kind, "backward", size, entry=entry))
        return full

    def _reduce_output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        size = self._run.storages.size(output)
        if self._sequence_dim is None or not self._has_length(output, self._slice_length * self._degree):
            self._forward("all_reduce", size)
            return None
        self._forward("reduce_scatter", size)
        self.collectives.append(Collective("all_gather", "backward", size))
        sliced: torch.Tensor = _Scatter.apply(output, self._sequence_dim, self._degree, self._run.recorder)
        return sliced

    def _forward(self, kind: str, size: Size, entry: str = "") -> None:
        """Note a collective of the forward."""
        run = self._run
        self.collectives.append(Collective(kind, "forward", size, len(run.recorder.ops), entry, run.calls.innermost))

    def _gather_output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return self.gather(output, output.dim() - 1)

    def _shard_output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return shard_logits(output, self)

    @property
    def rank(self) -> int:
        """Number of the rank that this one stands for."""
        return 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self._degree

    def max_(self, x: torch.Tensor) -> None:
        """Note the all-reduce of the loss."""
        self._forward("all_reduce", self._run.storages.size(x))

    def sum_(self, x: torch.Tensor) -> None:
        """Note the all-reduce of a sum, of as many elements as x has."""
        self._forward("all_reduce", self._run.storages.size(x))

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensor of all ranks along dim."""
        full: torch.Tensor = _Gather.apply(x, dim, self._degree, self._run.recorder)
        self._forward("all_gather", self._run.storages.size(full))
        return full

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around operators of the loss."""
        recorder = self._run.recorder
        before, recorder.kind = recorder.kind, "loss"
        try:
            yield
        finally:
            recorder.kind = before

    def _has_length(self, value: Any, length: int) -> bool:
        """Whether a trained tensor has this length along the dim in which the layer's inputs have the sequence."""
        dim = self._sequence_dim
        return (
            dim is not None
            and isinstance(value, torch.Tensor)
            and value.requires_grad
            and value.dim() > dim
            and value.shape[dim] == length
        )


class OwnHeads:
    """Hooks of a module that is given or returns tensors with a row for each head: its code sees this rank's rows.

    take(tensor, dim): this rank's part. join(tensor, dim): the parts of all ranks. A tensor that the module returns as
    it was given stays whole, and nothing is sent for it.
    """

    def __init__(
        self,
        cut: TensorCut,
        take: Callable[[torch.Tensor, int], torch.Tensor],
        join: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        self._cut, self._take, self._join = cut, take, join
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before the forward: put this rank's rows in the place of whole tensors."""
        self._taken = []  # a repetition in backward ends before `leave`
        leaves, tree = tree_flatten((args, kwargs))
        for place, dim in self._cut.given.items():
            whole = leaves[place]
            leaves[place] = self._own(whole, dim)
            self._taken.append((whole, leaves[place]))
        return tree_unflatten(leaves, tree)

    def _own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's heads; of every sample, if samples and heads share the first dim."""
        heads = self._cut.units[0]
        if dim or whole.shape[0] == heads:
            return self._take(whole, dim)
        return self._take(whole.unflatten(0, (-1, heads)), 1).flatten(0, 1)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after the forward: put whole tensors in the place of this rank's rows."""
        leaves, tree = tree_flatten(output)
        taken, self._taken = self._taken, []
        for place, dim in self._cut.returned.items():
            as_given = next((whole for whole, own in taken if own is leaves[place]), None)
            leaves[place] = self._join(leaves[place], dim) if as_given is None else as_given
        return tree_unflatten(leaves, tree)


class OwnWidth:
    """Hooks of a module whose code takes the number of features from the shape of its inputs (B, T, C = x.shape). The
    code is shown tensors with one rank's features, which have a shape and no numbers; its columns read the whole
    inputs. What is shown carries the tensor that it stands for, because repetitions in backward are given only what was
    shown."""

    def __init__(self, places: Sequence[int], degree: int) -> None:
        self._places, self._degree = places, degree

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before the forward: put narrow tensors in the place of whole ones."""
        leaves, tree = tree_flatten((args, kwargs))
        for place in self._places:
            given = leaves[place]
            leaves[place] = given.new_empty(()).expand(*given.shape[:-1], given.shape[-1] // self._degree)
            setattr(leaves[place], _STANDS_FOR, given)
        return tree_unflatten(leaves, tree)

    @staticmethod
    def whole(x: torch.Tensor) -> torch.Tensor:
        """The whole tensor that x stands for; x itself if it stands for no other."""
        found: torch.Tensor = getattr(x, _STANDS_FOR, x)
        return found


_STANDS_FOR = "stands_for"


class _Gather(torch.autograd.Function):
    """A copy in place of an all-gather: its memory is real, its operators are the collective's own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
        ctx.dim, ctx.degree, ctx.recorder = dim, degree, recorder
        return _repeated(tensor, dim, degree, recorder)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _slice(gradient, ctx.dim, ctx.degree, ctx.recorder), None, None, None


class _Scatter(torch.autograd.Function):
    """A slice in place of a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
        ctx.dim, ctx.degree, ctx.recorder = dim, degree, recorder
        return _slice(tensor, dim, degree, recorder)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _repeated(gradient, ctx.dim, ctx.degree, ctx.recorder), None, None, None


def _repeated(tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
    recorder.muted = True
    try:
        return torch.cat([tensor] * degree, dim)
    finally:
        recorder.muted = False


def _slice(tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
    recorder.muted = True
    try:
        return tensor.narrow(dim, 0, tensor.shape[dim] // degree).clone()
    finally:
        recorder.muted = False
