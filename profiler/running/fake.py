"""A loaded model on fake tensors: it runs forward and backward with shapes and dtypes, but without numbers.

A model that decides by the values of its tensors needs real ones: `real_model` is the same thing with numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..model.batches import counts_rows, named_tensors
from ..model.building import in_training, on_meta
from ..model.failures import IN_LOSS, a_type, failed_run, is_ours, place_of
from ..model.frozen import kept_as
from ..model.loaded import Batch, LoadedModel, split_inputs
from ..model.model_profile import BufferProfile, KeptAs
from ..semantics.draws import SameChoices, dice_apart, seeded_dice
from ..threads import one_thread
from .fake_modes import LeanFakeMode, without_log
from .forward_state import (
    Changeable,
    ReadAside,
    TensorsRead,
    changed,
    places_of,
    put_back,
    random_draws,
    taken,
    undone,
)
from .gpu_kernel_emulation import as_on_gpu
from .held_tensors import HeldTensors, held_beside, unregistered_modules, whole_because
from .kept_results import forget_other_runs
from .known_numbers import MOST_KNOWN, knowing_numbers, known
from .shared_state import SharedState

BeforeLoss = Callable[[list[torch.Tensor]], None]
"""Is called with the tensors that the module has returned."""


class NoLossError(ValueError):
    """What should be the loss is not a number that depends on parameters."""


class TokenByTokenError(Exception):
    """A module has run as many operators as a sample has tokens, or was called as often, or very often. module: its
    name if it runs the operators; '' if it is called so often, or if they are outside of all modules."""

    def __init__(self, module: str = "") -> None:
        super().__init__(module)
        self.module = module


class DecidesByValuesError(Exception):
    """The model reads numbers out of its tensors, which fake ones do not have."""

    def __init__(self, operator: str, place: str) -> None:
        super().__init__(f"{place} ({operator})")


class DecidesByDrawsError(DecidesByValuesError):
    """The model draws from Python's or numpy's random numbers what it computes."""


@dataclass(frozen=True)
class FakeModel:
    """A model whose floating-point tensors all have the compute dtype, in its fake mode; None: with real tensors."""

    loaded: LoadedModel
    module: nn.Module
    mode: FakeTensorMode | None
    dtype: torch.dtype
    buffers: tuple[BufferProfile, ...] = ()
    """The model's buffers in their own dtypes, before they were cast to the compute dtype."""
    uncast: tuple[tuple[dict[str, Any], str, torch.Tensor], ...] = ()
    """(dict, name in it, tensor): tensors in their own dtype, for the places of those that are not parameters."""
    trained_as: tuple[tuple[str, torch.dtype], ...] = ()
    """(name, dtype) of a trained parameter, the first of each dtype in which the model has parameters."""
    whole_because: str = ""
    """Why some parameter must stay a single whole object, in words: it is held elsewhere, too, or its gradient has a
    hook."""
    knows_layout: bool = False
    """Whether numbers are known of integers in a batch, of what the batch function calls layout, and of all that is
    computed from these alone. What the model decides by such numbers it then decides as with real tensors."""
    kept_as: Mapping[str, KeptAs] = field(default_factory=dict)
    """Full name of a frozen parameter -> how it is kept, for those that are not kept like all others."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Attribute that the constructor sets on parameters -> the first parameter that has it."""
    dice: int | None = None
    """Seed of Python's and numpy's random numbers in every run; None: they are not seeded."""
    changed: list[Changeable] = field(default_factory=list)
    """Places that its last forward had changed; they have been put back since."""
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    """Place -> tensor that its last forward left behind in attributes, lists and the like; they have been removed
    since."""
    _laid_out: dict[tuple[int, int | None], Batch] = field(default_factory=dict)
    """(samples, tokens of each) -> the batch of this size whose numbers are known; it is made only once."""

    @contextmanager
    def buffers_uncast(self) -> Iterator[None]:
        """Buffers (and tensors that are attributes) have their own dtype, as under fully_shard."""
        cast = [(where, name, where[name]) for where, name, _ in self.uncast]
        try:
            for where, name, tensor in self.uncast:
                where[name] = tensor
            yield
        finally:
            for where, name, tensor in cast:
                where[name] = tensor

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its parameters and buffers; walking through all modules for them takes long."""
        return (*self.module.parameters(), *self.module.buffers())

    def batch(self, size: int, seq_len: int | None, cast: bool = True) -> Batch:
        """A micro-batch of `size` samples; with real numbers these are all the same, so that the model decides alike in
        all batches. cast: in the compute dtype, and not in the batch's own."""
        loaded = self.loaded if seq_len is None else self.loaded.with_seq_len(seq_len)
        made: Batch
        if self.mode is None:
            return _alike(loaded, size)
        if not self.knows_layout:
            real = loaded.batch(size)
            with self.mode:
                made = tree_map(lambda leaf: self._fake(leaf, cast), real)
            return made
        if (size, loaded.seq_len) not in self._laid_out:
            self._laid_out[size, loaded.seq_len] = _laid_out(loaded, size)
        return self._known_batch(self._laid_out[size, loaded.seq_len], cast)

    def other_batch(self, size: int, draw: int) -> Batch:
        """Another micro-batch of `size` samples whose integers are known. draw: its seed."""
        return self._known_batch(_laid_out(self.loaded, size, seed=draw))

    def _known_batch(self, laid_out: Batch, cast: bool = True) -> Batch:
        assert self.mode is not None
        with self.mode:
            made: Batch = tree_map(
                lambda x: self._fake(x, cast) if not isinstance(x, torch.Tensor) or x.is_meta else self._known(x, cast),
                laid_out,
            )
        return made

    def loss(
        self, batch: Batch, before_loss: BeforeLoss = lambda returned: None, note_left: bool = False
    ) -> torch.Tensor:
        """Loss of one forward in the model's first state. note_left: keep in `left` what the forward leaves behind.
        Raises ValueError with a sentence if the model cannot take the batch."""
        before = taken(self._places)
        try:
            return self.next_loss(batch, before_loss)
        finally:
            left = changed(before)
            self.changed[:] = [place for place, _ in left]
            now = self._held() if left and note_left else {}
            put_back(left)
            known = {id(tensor) for tensor in self._held().values()} if now else set()
            self.left.clear()
            self.left.update((place, tensor) for place, tensor in now.items() if id(tensor) not in known)

    def _held(self) -> dict[str, torch.Tensor]:
        return {**dict(self.module.named_buffers()), **dict(held_beside(self.module))}

    def read_again(self, batches: tuple[Batch, Batch]) -> dict[str, bool]:
        """Place in which one forward leaves something that the next one reads -> whether the next one changes it. (If
        not, it was made for good, as a mask of a length is.)"""
        with undone(self.module):
            self.next_loss(batches[0])
            before = {place: (t, t._version) for place, t in self._held().items() if place in self.left}
            read = TensorsRead({place: tensor for place, (tensor, _) in before.items()})
            with read:
                self.next_loss(batches[1])
            now = self._held()
            kept = {place for place, (t, version) in before.items() if now.get(place) is t and t._version == version}
        return {place: place not in kept for place in read.places}

    def read_aside(self, names: Iterable[str], batch: Batch) -> list[str]:
        """Those of these modules that also keep elsewhere what they return, where something reads it."""
        aside = ReadAside({name: self.module.get_submodule(name) for name in names})
        with undone(self.module), dice_apart(), aside.watched():
            self.next_loss(batch)
        return list(aside.names)

    def changed_by_several(self, names: Iterable[str], batch: Batch) -> dict[str, list[str]]:
        """What several of these modules change in a forward, in words -> these modules, in the order in which they
        ran."""
        shared = SharedState({name: self.module.get_submodule(name) for name in names})
        with undone(self.module), dice_apart(), shared.watched():
            self.next_loss(batch)
        return shared.changed()

    @property
    def throws_dice(self) -> bool:
        """Whether its last forward has drawn from Python's or numpy's own random numbers."""
        return any(place is self._places[-1] for place in self.changed)

    @cached_property
    def _places(self) -> list[Changeable]:
        return [*places_of(self.module, keep_copies=True), random_draws()]

    def next_loss(self, batch: Batch, before_loss: BeforeLoss = lambda returned: None) -> torch.Tensor:
        """Loss of one forward in the state that the last one has left behind."""
        args, kwargs = split_inputs(self.module, batch, self.loaded.loss is not None)
        output = self.module(*args, **kwargs)
        before_loss([leaf for leaf in tree_leaves(_parts(output)) if isinstance(leaf, torch.Tensor)])
        if self.loaded.loss is not None:
            try:
                output = self.loaded.loss(output, batch)
            except Exception as error:
                error.add_note(IN_LOSS)
                raise
            if not isinstance(output, torch.Tensor):
                raise ValueError(
                    f"loss(output, batch) of {self.loaded.source} returned {a_type(output)}, not the one "
                    "tensor that is trained on: return that, and log others from the output"
                )
        return scalar(output, self.loaded)

    @contextmanager
    def running(self) -> Iterator[list[str]]:
        """Fake mode, kernels as on a GPU, and failures told in a sentence. Yields what refused a batch of one."""
        try:
            dice = nullcontext() if self.dice is None else seeded_dice(self.dice)
            with without_log(), self._without_numbers(), as_on_gpu() as refusals, torch.enable_grad(), dice:
                yield refusals
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise DecidesByValuesError(str(error.func), place_of(error)) from error
        except (TokenByTokenError, DecidesByValuesError):
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, ValueError) and is_ours(error):
                raise
            if ".numpy() is not supported" in str(error):
                raise DecidesByValuesError("numpy", place_of(error)) from error
            raise failed_run(self.loaded.source, self.attributes, self.loaded.if_not_run, error) from error

    @contextmanager
    def _without_numbers(self) -> Iterator[None]:
        if self.mode is None:
            with _same_numbers():
                yield
            return
        numbers = knowing_numbers(self.mode, self.loaded.choices) if self.knows_layout else self.mode
        with one_thread(), numbers:  # tensors with known numbers are small
            yield

    def _known(self, real: torch.Tensor, cast: bool) -> torch.Tensor:
        assert self.mode is not None
        return known(self.mode, real, self.dtype if cast and real.is_floating_point() else None)

    def _fake(self, leaf: Any, cast: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype = self.dtype if cast and leaf.is_floating_point() else leaf.dtype
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, requires_grad=leaf.requires_grad)


def fake_model(loaded: LoadedModel, dtype: torch.dtype, knows_layout: bool = False) -> FakeModel:
    """The model built on the meta device and turned into fake CPU tensors, in training mode."""
    forget_other_runs()
    mode = LeanFakeMode()
    module = on_meta(loaded.build)
    _check_layouts(loaded, module)
    _check_memory(loaded, module)
    listed, trained_as, whole, kept = _buffers(module), _trained_as(module), whole_because(module), kept_as(module)
    attributes = {key: name for name, p in reversed(list(module.named_parameters())) for key in vars(p)}
    uncast = _to_fake(module, mode, dtype)
    knows_layout = knows_layout or bool(loaded.layout) or bool(loaded.choices)
    module = in_training(module)
    return FakeModel(loaded, module, mode, dtype, listed, uncast, trained_as, whole, knows_layout, kept, attributes)


def real_model(loaded: LoadedModel) -> FakeModel:
    """The model with real numbers on the CPU, in float32 and in training mode; always the same numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = loaded.build()
    listed, trained_as, whole, kept = _buffers(module), _trained_as(module), whole_because(module), kept_as(module)
    return FakeModel(
        loaded,
        in_training(module.float()),
        None,
        torch.float32,
        listed,
        trained_as=trained_as,
        whole_because=whole,
        kept_as=kept,
    )


def _buffers(module: nn.Module) -> tuple[BufferProfile, ...]:
    return tuple(
        BufferProfile(name=name, shape=tuple(buffer.shape), dtype=str(buffer.dtype).removeprefix("torch."))
        for name, buffer in (*module.named_buffers(), *held_beside(module))
    )


def _check_memory(loaded: LoadedModel, module: nn.Module) -> None:
    """Raises ValueError where two parameters are in one memory; they may be parts of one that do not meet."""
    held: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.layout is not torch.strided or not parameter.numel():
            continue
        first = int(parameter.storage_offset())
        last = first + sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        others = held.setdefault(parameter.untyped_storage()._cdata, [])
        for begins, ends, other in others:
            if first <= ends and begins <= last:
                raise ValueError(
                    f"{name} and {other} of {loaded.source} are two parameters in one memory, into which an optimizer "
                    f"writes twice; let it be one parameter: module.weight = other.weight, without .data"
                )
        others.append((first, last, name))


def _check_layouts(loaded: LoadedModel, module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if buffer.layout not in (torch.strided, torch.sparse_coo):
            raise ValueError(
                f"the buffer {name} of {loaded.source} is {str(buffer.layout).removeprefix('torch.')}, which is not "
                "profiled: keep it as sparse COO (.to_sparse()), or its indices and values as buffers of their own"
            )


def _trained_as(module: nn.Module) -> tuple[tuple[str, torch.dtype], ...]:
    first: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            first.setdefault(parameter.dtype, name)
    return tuple((name, dtype) for dtype, name in first.items())


@contextmanager
def _same_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), SameChoices():
        torch.manual_seed(0)
        yield


def _alike(loaded: LoadedModel, size: int, seed: int = 0) -> Batch:
    """A batch of one sample repeated `size` times, the same at every call. If numbers in it say how many samples there
    are or count rows of all of them, it cannot be repeated: then it is drawn at that size."""
    torch.manual_seed(seed)
    one, two = loaded.batch(1), loaded.batch(2)
    (leaves, tree), (others, its_tree) = tree_flatten(one), tree_flatten(two)
    told = any(isinstance(a, int | float) and a != b for a, b in zip(leaves, others, strict=True))
    if tree != its_tree or told or counts_rows(loaded, one, two):
        torch.manual_seed(seed)
        return loaded.batch(size)
    made: Batch = tree_map(lambda a, b: _repeated(a, b, size) if isinstance(a, torch.Tensor) else a, one, two)
    return made


def _laid_out(loaded: LoadedModel, size: int, seed: int = 0) -> Batch:
    """A batch of `size` equal samples that has numbers only where they are layout: pictures are drawn, and not kept."""
    with torch.random.fork_rng(devices=[]):
        made = _alike(loaded, size, seed)
    layout = [t for name, t in named_tensors(made).items() if not t.is_floating_point() or name in loaded.layout]
    kept = {id(tensor) for tensor in layout if tensor.numel() <= MOST_KNOWN}

    def without_numbers(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in kept:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    laid_out: Batch = tree_map(without_numbers, made)
    return laid_out


def _repeated(one: torch.Tensor, two: torch.Tensor, size: int) -> torch.Tensor:
    """One sample, repeated `size` times along the dim in which a batch of two is longer."""
    longer = [dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return torch.cat([one] * size, dim=longer[0]) if longer else one


def _to_fake(
    root: nn.Module, mode: FakeTensorMode, dtype: torch.dtype
) -> tuple[tuple[dict[str, Any], str, torch.Tensor], ...]:
    """Replace all tensors of the module in place by fake ones; Module.to_empty would untie shared parameters. Returns
    FakeModel.uncast."""
    twins: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            to = dtype if tensor.is_floating_point() else tensor.dtype
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=to, device="cpu")
            if _is_parameter(tensor):
                made = nn.Parameter(made, tensor.requires_grad)
            kept.extend((tensor, made))  # so that no others get their ids
            twins[id(tensor)] = twins[id(made)] = made
        return twins[id(tensor)]

    uncast = []
    own = {id(parameter) for parameter in root.parameters()}
    with mode:
        for module in (*root.modules(), *unregistered_modules(root)):
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for tensors in places:
                for name, value in list(tensors.items()):
                    if isinstance(value, torch.Tensor) and value.is_meta:
                        tensors[name] = twin(value)
                        if value.is_floating_point() and value.dtype != dtype and id(value) not in own:
                            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                            uncast.append((tensors, name, made))
        HeldTensors(lambda place, tensor: twin(tensor)).enter(root)
    return tuple(uncast)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _parts(output: Any) -> Any:
    """The attributes of an object, for those that are no tuple, list, dict or tensor; others as they are."""
    return vars(output) if hasattr(output, "__dict__") and not isinstance(output, torch.Tensor | dict) else output


def scalar(output: Any, loaded: LoadedModel) -> torch.Tensor:
    """The loss in what the model (or the loss function) returned."""
    if hasattr(output, "loss") and isinstance(output.loss, torch.Tensor):
        found: torch.Tensor = output.loss
        return found
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        return torch.as_tensor(output["loss"])
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad:
            return leaf
    what = f"loss(output, batch) of {loaded.source}" if loaded.loss is not None else f"the module of {loaded.source}"
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if any(leaf.numel() == 1 for leaf in tensors):
        raise NoLossError(
            f"{what} returned a number in which no parameter has a part, so that it trains none: leave out detach(), "
            "no_grad() and the like"
        )
    if loaded.loss is not None and tensors:
        raise NoLossError(f"{what} returned a tensor of {list(tensors[0].shape)}, not one number: return its mean")
    raise NoLossError(
        f"{what} returned no single number to train on; define in the model file, for example: "
        "def loss(output, batch): return torch.nn.functional.cross_entropy(output, batch[1])"
    )
