"""Run one layer of a chain alone, forward and backward, and observe what it does and keeps.

The model's own forward runs with every other layer module stubbed and the crossing tensors replaced by fresh leaves;
meters are on only within the layer. It stops after the layer's last event.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from ..running.fake import FakeModel
from ..running.fused_kernels import FusedKernels
from ..running.meters import NOTHING, Op, Recorder, Size, Storages
from ..running.own_backward import has_own_backward, recorded_as_own
from ..running.part_watch import ModuleCalls, PeakOf
from ..running.put_off import PutOff
from ..running.run_shapes import Shapes, TensorSpec
from ..semantics.producers import Producers
from .chain import Crossing, Layer, LayerChain
from .chain_watch import Cursor, stubbed
from .expert_banks import (
    BankCall,
    counts_of,
    groups_of,
    is_linear_in,
    keeps_apart,
    routing_of,
    stacked_of,
    stacked_over,
)
from .model_profile import SELECTIVELY_KEPT, Producer
from .observe import check_unwritten


@dataclass(frozen=True)
class Collective:
    """One collective that a tensor-parallel rank would call. after: how many operators have run before it."""

    kind: str
    part: str
    tensor: Size
    after: int = 0
    entry: str = ""
    call: int = -1
    """Number of the module call that it is in, as ModuleCalls counts them."""


@dataclass
class ExpertBank:
    """One module's matmuls with parameters that are stacked over experts. rows: through all of the experts together."""

    count: int
    rows: float
    parameters: list[str]
    called: Literal["", "routed", "stacked"] = ""
    attributes: tuple[str, ...] = ()
    groups: tuple[int, int] = (1, 1)
    problem: str = ""


@dataclass
class Observation:
    """What one run of a layer did. size: number of samples."""

    size: int
    ops: list[Op] = field(default_factory=list)
    saved: Size = NOTHING
    full: Size = NOTHING
    """Kept under full recompute: what is saved outside the layer's modules, and what is made there and given to one."""
    selective: Size = NOTHING
    """Kept under selective recompute: the same, and what matmuls and attention inside the modules return."""
    inputs: Size = NOTHING
    attention: Size = NOTHING
    """Kept under recompute of attention: all that is saved, without what is made between the scores and the output."""
    saves_arriving: list[bool] = field(default_factory=list)
    """Whether the layer saves each arriving tensor, in the order of the chain's crossings."""
    given_arriving: list[bool] = field(default_factory=list)
    """Whether a module of the layer is given each arriving tensor, which recompute needs then."""
    saves_leaving: list[bool] = field(default_factory=list)
    """Whether the layer saves each of the tensors that it makes for later layers."""
    saves_in_fp32: list[bool] = field(default_factory=list)
    """Whether the layer would save each tensor, leaving ones before arriving ones, if the compute dtype were fp32: a
    layer that casts first then saves what it was given."""
    forward_transient: Size = NOTHING
    backward_transient: Size = NOTHING
    put_off: Size = NOTHING
    """Gradients that are kept between the backward for inputs and the backward for weights, if these are apart."""
    spent: Size = NOTHING
    """Part of what is saved that the backward for weights does not need, if the two are apart."""
    fused: Size = NOTHING
    """Kept for backward if elementwise kernels are fused."""
    fused_inputs: Size = NOTHING
    """Arriving tensors that fused kernels keep, and that the layer does not save without them."""
    collectives: list[Collective] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)
    saved_after: int = 0
    """How many operators had run when the last tensor was saved inside the layer's modules: recompute stops there."""
    arrived: dict[int, bool] = field(default_factory=dict)
    """Storage number of each arriving tensor -> whether it requires a gradient."""
    experts: dict[str, ExpertBank] = field(default_factory=dict)
    writes_into_kept: bool = False
    """Whether a module writes into what a matmul or attention has returned."""
    writes_into_attention: bool = False
    """Whether anything writes into a tensor that unfused attention has read but not made."""
    calls: ModuleCalls | None = None
    """Calls of the layer's modules, and what is saved in them."""
    peak_of: PeakOf | None = None
    """Given two moments of the run: the most memory that was in use at once between them."""


_BATCHED = ("_grouped_mm", "bmm", "baddbmm")

Arrive = Callable[[Crossing, torch.Tensor], torch.Tensor]


class LayerRun:
    """One run of one layer at one batch size; `recorder` and `storages` may be used by hooks while it runs."""

    def __init__(
        self, fake: FakeModel, chain: LayerChain, index: int, shapes: Shapes, size: int, seq_len: int | None
    ) -> None:
        self.fake = fake
        self.chain = chain
        self.index = index
        self.layer: Layer = chain.layers[index]
        self.storages = Storages(fake.dtype)
        self.recorder = Recorder(self.storages, self._where)
        self.calls = ModuleCalls(self.storages)
        self.observation = Observation(size)
        self._shapes = shapes
        self._batch = fake.batch(size, seq_len)
        self._cursor = Cursor([layer.last_key for layer in chain.layers], [layer.calls for layer in chain.layers])
        self.has_own_backward = False
        """Of a run without a backward: whether its backward would run functions or hooks of the model's own."""
        self._began = self._ends_in_loss = False
        self._modules: list[str] = []
        self._saved: set[int] = set()
        self._savers: dict[int, set[int]] = defaultdict(set)
        self._spent: set[int] = set()
        self._put_off: set[int] = set()
        self._outside: set[int] = set()
        self._saved_outside: set[int] = set()
        self._given: set[int] = set()
        self._inside: list[bool] = []
        self._called_in: list[int] = []
        self._arrived_as: dict[int, Producer] = {}
        self._saved_arriving: set[Producer] = set()
        self._leaving_as: dict[Producer, int] = {}
        self._gradients: set[int] = set()
        self._own = set(self.layer.calls)
        self._hooked = {name for name in chain.units.names if fake.module.get_submodule(name)._forward_hooks}
        self._arriving = {crossing.producer: crossing for crossing in chain.arriving(index)}
        self._leaving = dict.fromkeys(crossing.producer for crossing in chain.leaving(index))
        self._outputs: dict[Producer, torch.Tensor] = {}
        self._leaves: dict[Producer, torch.Tensor] = {}
        self._slices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_node: dict[int, str] = {}
        self._bank_calls: dict[str, list[BankCall | None]] = {}

    def run(self, arrive: Arrive = lambda crossing, tensor: tensor, backward: bool = True) -> Observation:
        """Observe the layer. arrive: may cut an arriving tensor (to a slice of the sequence)."""
        self._arrive = arrive
        cut = (self.fake.module.get_parameter(name) for name in self.layer.parameters)
        for tensor in (*self.fake.tensors, *cut):
            self._outside.add(self.storages.number(tensor))
        try:
            with self.fake.running(), self.recorder, recorded_as_own(self.recorder):
                scalars = self._forward()
                forward_end = len(self.storages.log)
                if backward:
                    self._backward(scalars)
                else:
                    self.has_own_backward = self.chain.hooks_gradients or has_own_backward(scalars)
            self._account(forward_end)
        finally:
            self._let_go()
        return self.observation

    def _let_go(self) -> None:
        """Drop references from the run to what refers back to it, so that the run and its operators are freed as soon
        as nobody needs them."""
        del self._arrive
        self.recorder.end()
        self.storages.end()

    def _forward(self) -> list[torch.Tensor]:
        """Run the forward. Returns scalars whose backward hands a gradient to each output, as the next layer's backward
        would."""
        self._producers = Producers(
            self.fake.module, self.chain.units.names, self._replace, self._produced, self._start
        )
        others = {name for layer in self.chain.layers for name, call in layer.calls if (name, call) not in self._own}
        loss = None
        with (
            self._module_names(),
            stubbed(self.fake.module, others, self._producers, self._stub),
            nullcontext() if self.chain.hookless else saved_tensors_hooks(self._pack, self._unpacked),
        ):
            try:
                with self._producers, torch.enable_grad():
                    loss = self.fake.loss(self._batch, before_loss=self._start_loss)
            except _Stop:
                pass
            self._producers = None  # type: ignore[assignment]
        if self.chain.hookless:
            self._saved = set(self.storages.sizes) - self._outside  # all that was made may be kept
        for i, (op, inside) in enumerate(zip(self.recorder.ops, self._inside, strict=True)):
            op.repeated, op.call = inside and i < self.observation.saved_after, self._called_in[i]
        if not self._began or (loss is not None and self._cursor.layer != self.index):
            raise ValueError(
                f"the forward of {self.fake.loaded.source} runs other operations from one call to the next, so "
                f"{self.layer.name} was not found again; make it the same for every batch size and call"
            )
        if loss is not None:
            self._outputs.clear()
            self._ends_in_loss = True
            self.recorder.active = False
            number = self.storages.number(loss)  # the training loop holds it until the backward
            self._saved.add(number)
            self._saved_outside.add(number)
            self.observation.outputs.append(TensorSpec.of(loss))
            return [loss]
        self.recorder.active = False
        scalars = []
        for producer, tensor in self._outputs.items():
            self.observation.outputs.append(TensorSpec.of(tensor))
            self._leaving_as[producer] = self.storages.number(tensor)
            if tensor.grad_fn is not None:
                scalars.append(_Gradient.apply(tensor))
        self._outputs.clear()
        return scalars

    def _backward(self, scalars: list[torch.Tensor]) -> None:
        if not scalars:
            return
        own = [self.fake.module.get_parameter(name) for name in self.layer.parameters]
        handles = [p.register_post_accumulate_grad_hook(self._got_weight_gradient) for p in own if p.requires_grad]
        waiting = PutOff(scalars, self._leaves.values(), own, self._waits)
        if self._ends_in_loss:
            self._spent = {number for number in self._saved if waiting.spent(self._savers[number])}
        gradients = [torch.ones_like(scalar) for scalar in scalars]
        self.recorder.active = self.recorder.backward = True
        torch.autograd.backward(scalars, gradients)
        self.recorder.active = False
        waiting.end()
        for handle in handles:
            handle.remove()
        reached = {self.storages.number(t.grad) for t in self._leaves.values() if t.grad is not None}
        for parameter in own:
            parameter.grad = None
        _name_parts(self.recorder.ops, reached, self._gradients)

    def _account(self, forward_end: int) -> None:
        seen = self.observation
        seen.ops = self.recorder.ops
        returned = set(self._leaving_as.values())  # counts as what arrives in the next layer, once
        elsewhere = returned | self._outside
        seen.saved = self.storages.total(self._saved, elsewhere)
        seen.put_off = self.storages.total(self._put_off, elsewhere | self._saved)
        seen.spent = self.storages.total(self._spent, elsewhere)
        forward = [op for op in seen.ops if not op.backward]
        inside = [op for op, within in zip(forward, self._inside, strict=True) if within and not op.is_view]
        around = self._saved_outside | self._given
        kept = {view.storage for op in inside if op.kind in SELECTIVELY_KEPT for view in op.outputs}
        seen.full = self.storages.total(around, elsewhere)
        seen.selective = self.storages.total(around | kept, elsewhere)
        inner = self._attention_core(forward)
        seen.attention = self.storages.total(self._saved - inner, elsewhere)
        self._fuse(forward, elsewhere)
        seen.writes_into_kept = _writes_after(inside, [op.kind in SELECTIVELY_KEPT for op in inside], kept)
        read = {view.storage for op in forward if op.core for view in op.inputs} - inner
        seen.writes_into_attention = _writes_after(forward, [op.core for op in forward], read)
        seen.saves_arriving = [producer in self._saved_arriving for producer in self._arriving]
        given = {self._arrived_as[number] for number in self._given if number in self._arrived_as}
        seen.given_arriving = [producer in given for producer in self._arriving]
        seen.saves_leaving = [self._leaving_as.get(producer) in self._saved for producer in self._leaving]
        saved = {self.storages.in_fp32(number) for number in self._saved}
        arrived = {self._arrived_as[n] for n in saved if n in self._arrived_as} | self._saved_arriving
        left = {producer for producer, n in self._leaving_as.items() if self.storages.in_fp32(n) in saved}
        seen.saves_in_fp32 = [*(p in left for p in self._leaving), *(p in arrived for p in self._arriving)]
        self._find_experts(forward)
        self.calls.left_out, self.calls.returned, self.calls.arrived = elsewhere, returned, set(self._arrived_as)
        seen.calls = self.calls
        seen.peak_of = partial(_peak_of, self.storages, self.fake.dtype.itemsize, self._gradients)
        seen.arrived = {number: self._leaves[made].requires_grad for number, made in self._arrived_as.items()}
        for tensor in self._leaves.values():
            seen.inputs += self.storages.size(tensor)
        width = self.fake.dtype.itemsize
        end = len(self.storages.log)
        spans = ((0, forward_end, set[int]()), (forward_end, end, self._gradients))
        seen.forward_transient, seen.backward_transient = (
            _above(
                self.storages.peak(start, stop, width, without),
                self.storages.peak_in_fp32(start, stop, without),
                seen.saved,
                width,
            )
            for start, stop, without in spans
        )

    def _fuse(self, forward: list[Op], elsewhere: set[int]) -> None:
        """Note what fused kernels keep. An arriving tensor counts once, even if it was cut in several ways."""
        fused = FusedKernels.of(forward, self._saved)
        self.observation.fused = self.storages.total(self._saved - fused.dropped | fused.entering, elsewhere)
        entering = {self._arrived_as[number] for number in fused.entering if number in self._arrived_as}
        tensors = [self._leaves[made] for made in self._arriving if made in entering - self._saved_arriving]
        self.observation.fused_inputs = self.storages.size(*tensors)

    def _attention_core(self, forward: list[Op]) -> set[int]:
        """Storages made from the scores of unfused attention up to its output; marks the operators that make them.

        Scores are a batched product of activations; what follows from them goes as far as the next such product.
        """
        weights = {self.storages.number(self.fake.module.get_parameter(name)) for name in self.layer.parameters}
        made: set[int] = set()
        scores: set[int] = set()
        for op in forward:
            read = {view.storage for view in op.inputs}
            product = op.name in ("bmm", "baddbmm") and not read & weights
            op.core = product or bool(read & scores)
            if not op.core:
                continue
            outputs = {view.storage for view in op.outputs}
            if product and read & scores:
                continue  # the output of attention
            scores |= outputs
            made |= outputs
        return made

    def _find_experts(self, forward: list[Op]) -> None:
        prefix = self.layer.root + "." if self.layer.root else ""
        stacked = {}
        for name in self.layer.parameters:
            parameter = self.fake.module.get_parameter(name)
            if parameter.dim() == 3:
                stacked[self.storages.number(parameter)] = (name.removeprefix(prefix), parameter.shape[0])
        for op in forward:
            weight = next((stacked[view.storage] for view in op.inputs if view.storage in stacked), None)
            if weight is not None and op.shape is not None and op.name in _BATCHED:
                name, count = weight
                bank = self.observation.experts.setdefault(op.module, ExpertBank(count, op.shape[0], []))
                bank.parameters.append(name)
        for name, calls in self._bank_calls.items():
            path = (prefix + name).removesuffix(".")
            module = self.fake.module.get_submodule(path)
            count, call = stacked_over(module), calls[0]
            if not count or len(calls) > 1 or call is None:
                continue
            inside = [op for op in forward if op.call >= 0 and _is_in(op.module, name)]
            if call.kind == "routed":
                able = is_linear_in(call.weights, call.output, inside)
            else:
                able = keeps_apart(count, inside)
            if able:
                found = [f"{name}.{parameter}".removeprefix(".") for parameter, _ in module.named_parameters()]
                attributes = counts_of(module, count)
                bank = ExpertBank(count, call.rows, found, call.kind, attributes)
                own = {self.storages.number(parameter) for parameter in module.parameters()}
                inner, all_reads = (sum(v.storage in own for op in ops for v in op.inputs) for ops in (inside, forward))
                asked = [where for parameter, where in self.chain.asked if _is_in(parameter, path)]
                if inner < all_reads:
                    bank.problem = "has parameters that are read outside of its forward, where a rank has some of them"
                elif not all(_is_in(where, path) for where in asked):
                    bank.problem = (
                        "has parameters whose size is asked for outside of its forward, where that of a rank's part is "
                        "found; keep the number of experts in an attribute"
                    )
                elif any(op.draws or op.dropout for op in inside):
                    bank.problem = (
                        "draws random numbers (dropout), and rows of other ranks' samples come to it, for which one "
                        "process would draw others"
                    )
                self.observation.experts[name] = bank
        for bank in self.observation.experts.values():
            bank.groups = groups_of(bank.count, forward)

    def _start(self, kind: str, name: str, call: int) -> None:
        self._cursor.start(kind, name, call)
        if self._cursor.layer > self.index:
            raise _Stop
        self.recorder.active = self._cursor.layer == self.index
        self._began |= self.recorder.active

    def _start_loss(self, returned: list[torch.Tensor]) -> None:
        self._start("loss", "loss", 0)

    def _replace(self, producer: Producer, tensor: torch.Tensor) -> torch.Tensor:
        crossing = self._arriving.get(producer)
        if crossing is None:
            return tensor
        active, self.recorder.active = self.recorder.active, False
        spec = self._shapes.tensors[producer]
        blank = spec.blank()
        leaf = self._arrive(crossing, blank).requires_grad_(spec.requires_grad)
        whole, part = (self._arrived(tensor, spec.requires_grad) for tensor in (blank, leaf))
        self._outside |= {self.storages.number(tensor) for tensor in (leaf, part, whole)}
        self._arrived_as.update(dict.fromkeys((self.storages.number(t) for t in (leaf, part, whole)), producer))
        self._leaves[producer] = leaf
        self._slices[id(whole)] = (whole, part)
        self.recorder.active = active
        return whole

    def _arrived(self, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """A tensor as the layer gets it: not a leaf, like one that an earlier layer has made, so that it may be changed
        in place."""
        return tensor.requires_grad_(requires_grad).clone()

    def _slice_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a module of the layer, with slices of the sequence in place of whole tensors. Code before
        the modules still sees whole tensors, whose shapes it may ask for. A list or dict without slices stays the same
        object, for modules may put something into it."""

        def sliced(given: Any) -> Any:
            if not any(id(leaf) in self._slices for leaf in tree_leaves(given)):
                return given
            return tree_map(lambda leaf: self._slices[id(leaf)][1] if id(leaf) in self._slices else leaf, given)

        given = tuple(map(sliced, args)), {name: sliced(value) for name, value in kwargs.items()}
        self._given |= {self.storages.number(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
        return given

    def _produced(self, producer: Producer, tensor: torch.Tensor) -> None:
        self._cursor.end()
        if producer in self._leaving:
            self._outputs[producer] = tensor

    def _stub(self, name: str, call: int) -> Any | None:
        if (name, call) in self._own:
            return None
        if name in self._hooked:  # hooks of the model's own may write into it
            return self._shapes.outputs[name, call].empty()
        return self._shapes.stand_in(name, call)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if self.recorder.active:
            number = self.storages.number(tensor)
            self.calls.save(number, len(self.recorder.ops))
            self._savers[number].add(torch.autograd._get_sequence_nr() - 1)  # type: ignore[attr-defined]
            if self._modules:
                self.observation.saved_after = len(self.recorder.ops)
            else:
                self._saved_outside.add(number)
            if number in self._arrived_as:
                self._saved_arriving.add(self._arrived_as[number])
            if number not in self._outside:
                self._saved.add(number)
        return tensor, tensor._version

    def _unpacked(self, saved: tuple[torch.Tensor, int]) -> torch.Tensor:
        """A tensor that was saved for backward. Raises ValueError if it was written into since."""
        tensor, version = saved
        source = self.fake.loaded.source
        check_unwritten(tensor, version, f"{source} does not train on one device either: in {self.layer.name}")
        return tensor

    def _waits(self, gradient: torch.Tensor) -> None:
        self._put_off.add(self.storages.number(gradient))

    def _got_weight_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._gradients.add(self.storages.number(parameter.grad))

    def _where(self) -> str:
        """Name of the module that the operator which runs now belongs to; in backward, of the module that made its
        node."""
        node = torch._C._current_autograd_node() if self.recorder.backward else None
        if self.recorder.backward:
            return self._of_node.get(node._sequence_nr(), "") if node is not None else ""
        name = self._modules[-1] if self._modules else ""
        self._inside.append(bool(self._modules))
        self._called_in.append(self.calls.innermost)
        self._of_node[torch.autograd._get_sequence_nr() - 1] = name  # type: ignore[attr-defined]
        return name

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        """Keep the stack of running modules of this layer, named relative to its root."""
        handles = []
        prefix = self.layer.root + "." if self.layer.root else ""
        for unit in self.layer.units:
            for name, module in self.fake.module.get_submodule(unit).named_modules(prefix=unit):
                relative = name.removeprefix(prefix) if name != self.layer.root else ""
                handles.append(module.register_forward_pre_hook(self._push(relative), prepend=True))
                handles.append(module.register_forward_hook(self._pop))
                handles.append(module.register_forward_pre_hook(self._begin(relative), with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._end))
                if any(p.dim() == 3 for p in module.parameters(recurse=False)):
                    handles.append(module.register_forward_hook(self._called(relative), with_kwargs=True))
            root = self.fake.module.get_submodule(unit)
            handles.append(root.register_forward_pre_hook(self._slice_inputs, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def running(self) -> str:
        """Name of the innermost module that runs, or that the run broke off in; '' outside of all modules."""
        return self._modules[-1] if self._modules else ""

    def _push(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._modules.append(name)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    def _begin(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = {self.storages.number(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            self.calls.begin(name, given, len(self.recorder.ops))

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.end()

    def _called(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        """A hook that notes how a module with stacked parameters is called."""

        def called(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self.recorder.active:
                return
            routing, stacked = routing_of(args, kwargs), stacked_of(args, kwargs, output)
            call = None
            if routing and isinstance(output, torch.Tensor) and output.shape[:-1] == routing[0].shape[:-1]:
                weights, returned = self.storages.number(routing[2]), self.storages.number(output)
                call = BankCall("routed", routing[1].numel(), weights, returned)
            elif stacked is not None and stacked.shape[0] == stacked_over(module):
                call = BankCall("stacked", stacked.shape[0] * stacked.shape[1])
            self._bank_calls.setdefault(name, []).append(call)

        return called


class _Stop(BaseException):
    """The layer has run; the rest of the model need not. Not an Exception, so that no model catches it."""


def _is_in(module: str, name: str) -> bool:
    """Whether a module is that of a name, or in it."""
    return not name or f"{module}.".startswith(f"{name}.")


def _writes_after(ops: Sequence[Op], begins: Sequence[bool], storages: set[int]) -> bool:
    """Whether an operator writes in place into one of these storages after the first operator for which `begins` is
    true."""
    first = next((i for i, here in enumerate(begins) if here), len(ops))
    return any(
        op.name.endswith("_") and any(view.storage in storages for view in op.outputs) for op in ops[first + 1 :]
    )


class _Gradient(torch.autograd.Function):
    """Stands for everything after the layer: gives its output a gradient that autograd may free once used."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.spec = (tensor.shape, tensor.dtype)
        return tensor.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.spec
        return torch.empty(shape, dtype=dtype)


def _name_parts(ops: list[Op], input_gradients: set[int], weight_gradients: set[int]) -> None:
    """Set `part` of each operator of the backward: "backward_weight" if no gradient of an arriving tensor depends on it
    (or, where none gets a gradient, if it gives that of a weight); "backward" if it gives the gradient of a weight and
    one that others need; else "backward_input"."""
    needed = set(input_gradients)
    for op in reversed(ops):
        if not op.backward:
            break
        made = {view.storage for view in op.outputs}
        for_weights = bool(made & weight_gradients)
        if not input_gradients:
            op.part = "backward_weight" if for_weights else "backward_input"
        elif made & needed:
            op.part = "backward" if for_weights else "backward_input"
            needed |= {view.storage for view in op.inputs}
        else:
            op.part = "backward_weight"


def _peak_of(storages: Storages, element_bytes: int, gradients: set[int], start: int, end: int) -> Size:
    """The most memory in use at once between two moments, without the gradients of weights."""
    peak = storages.peak(start, end, element_bytes, gradients)
    in_fp32 = storages.peak_in_fp32(start, end, gradients)
    return Size(peak.elements, peak.other_bytes, in_fp32 - peak.fp32_bytes)


def _above(peak: Size, peak_in_fp32: float, kept: Size, element_bytes: int) -> Size:
    """How far a peak lies above what is kept. If elements of the compute dtype shrink while other bytes grow, or the
    other way round, the difference in bytes counts."""
    rest = peak - kept
    elements, other = rest.elements, rest.other_bytes
    if elements < 0:
        elements, other = 0.0, other + element_bytes * elements
    elif other < 0:
        elements, other = elements + other / element_bytes, 0.0
    above = Size(max(elements, 0.0), max(other, 0.0))
    in_fp32 = max(peak_in_fp32 - kept.fp32_bytes, 0.0)
    return Size(above.elements, above.other_bytes, in_fp32 - above.fp32_bytes)
