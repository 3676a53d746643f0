"""The chain of layers of a model, and the tensors that cross from one to a later one, seen in one forward run.

Layers follow the elements of the outermost ModuleLists, ModuleDicts and Sequentials; what runs before, between and
after them makes a layer per gap. An element that itself holds several blocks of one type (a stage of a ResNet or Swin,
a level of a U-Net) is opened, unless more bytes cross between its blocks than around it (the experts of a mixture); one
that has no forward (a ModuleList of attention and MLP, nanoGPT's ModuleDict) is in any case.
Without any container every child with parameters is a layer. Code between layer modules ("glue") joins a neighbour,
where the fewest bytes cross.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import networkx as nx
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import stateless
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from ..machine.units import first_of
from ..running.asked_sizes import asked_sizes
from ..running.fake import DecidesByDrawsError, DecidesByValuesError, FakeModel
from ..running.forward_state import Reached, version_of
from ..running.positions import Positions
from ..running.run_shapes import Shapes, TensorSpec
from ..semantics.producers import Producers, is_wrapped
from .building import in_evaluation
from .chain_watch import CallEvent, ChainWatch, Cursor, Key, recording_outputs, stubbed
from .layer_graph import bytes_over, wired
from .layer_spans import LayerSpans, spans_of
from .layer_units import Units, find_units, has_backward_hooks
from .loaded import Batch
from .model_profile import Producer

_MORE_BYTES = 1.1
"""Cutting between the blocks of an opened element may carry this many times what is carried around it."""

_THROWS = 4
"""Forwards that are compared where one draws by Python's random: with two ways to go, 15 of 16 models show it."""

_LONG_THROWS = 8
"""Forwards of which the longest is profiled then: where each of four layers is left out by 30%, 9 of 10 models run all
of them in one."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that is made in one layer and read in a later one."""

    producer: Producer
    made_by: int
    last_used_by: int
    used_by: frozenset[int]
    spec: TensorSpec
    storage: int

    @property
    def num_bytes(self) -> int:
        """Its size in the run in which it was seen."""
        return torch.Size(self.spec.shape).numel() * self.spec.dtype.itemsize


_BATCHES = 3
"""Other batches that are looked at where integers of the first decide what is computed."""


@dataclass(frozen=True)
class Layer:
    """One layer: events first .. last of the run."""

    name: str
    root: str
    units: tuple[str, ...]
    calls: tuple[tuple[str, int], ...]
    parameters: tuple[str, ...]
    first: int
    last: int
    last_key: Key
    writes_input: bool
    input_overwritten: bool


@dataclass(frozen=True)
class LayerChain:
    """The layers of a model in the order in which they run. graph: of them and the crossings, by their numbers."""

    units: Units
    layers: tuple[Layer, ...]
    crossings: tuple[Crossing, ...]
    graph: nx.DiGraph
    signatures: tuple[Any, ...]
    shapes: Shapes
    notes: tuple[str, ...]
    sharding_problem: str = ""
    """Why fully_shard cannot take its modules."""
    hooks_gradients: bool = False
    """Whether layers put hooks on gradients that they compute."""
    repeats_reentrantly: bool = False
    """Whether the model repeats forwards by reentrant checkpoints."""
    repeats_selectively: bool = False
    """Whether it repeats some by checkpoints with contexts of its own, as selective ones."""
    written: frozenset[str] = frozenset()
    """Parameters that the forward writes into, through .data too."""
    read_again: tuple[str, ...] = ()
    """Places of what a forward leaves behind and the next one reads."""
    hookless: bool = False
    """Whether what is saved for backward cannot be watched: torch.func.grad takes no hooks on saved tensors."""
    asked: frozenset[tuple[str, str]] = frozenset()
    """Parameters of three dims, and the modules that run where their sizes are asked for."""
    told: tuple[str, ...] = ()
    """By what the numbers that are trained come to differ with the plan."""

    def arriving(self, layer: int) -> list[Crossing]:
        """The tensors from earlier layers that a layer reads, in the order in which they are made."""
        return [self.crossings[number] for _, number in self.graph.predecessors(layer)]

    def leaving(self, layer: int) -> list[Crossing]:
        """The tensors that a layer makes for later ones, in that order."""
        return [self.crossings[number] for _, number in self.graph.successors(layer)]

    def representatives(self) -> tuple[int, ...]:
        """For each layer the first layer of its class."""
        first: dict[Any, int] = {}
        return tuple(first.setdefault(signature, i) for i, signature in enumerate(self.signatures))


def observe(fake: FakeModel, size: int, seq_len: int | None, most_operators: int | None = None) -> LayerChain:
    """Run the whole model forward (once, and again while stages were opened in vain) and read off its chain.

    most_operators: Raises TokenByTokenError when one module has run so many.
    """
    units = find_units(fake.module)
    buffers = {name: (buffer, buffer._version) for name, buffer in fake.module.named_buffers()}
    parameters = {name: (parameter, parameter._version) for name, parameter in fake.module.named_parameters()}
    every = dict(fake.module.named_parameters(remove_duplicate=False))
    chain = _observe(fake, units, size, seq_len, most_operators)
    throws_dice = fake.throws_dice
    made = [name for name, _ in fake.module.named_parameters() if name not in parameters]
    if made:
        raise ValueError(
            f"the first forward of {fake.loaded.source} makes parameters, {made[0]} for one, which an optimizer made "
            "before it does not train; make them in __init__, or use torch's lazy modules (nn.LazyLinear)"
        )
    now = dict(fake.module.named_parameters(remove_duplicate=False))
    if replaced := [name for name, parameter in every.items() if now.get(name) is not parameter]:
        raise ValueError(
            f"the forward of {fake.loaded.source} puts another tensor in the place of the parameter {replaced[0]}, "
            "which an optimizer made before it does not know; do that in __init__ (head.weight = embedding.weight), or "
            "compute with the other tensor and leave the parameter where it is"
        )
    throws = range(_THROWS) if throws_dice and fake.mode is not None else ()  # real tensors go one way of them
    if any(_thrown(fake, units, size, seq_len, number) != chain.signatures for number in throws):
        raise DecidesByDrawsError("random", f"a draw of Python's or numpy's in {fake.loaded.source}")
    closed = frozenset[str]()
    while in_vain := _opened_in_vain(chain) - closed:
        closed |= in_vain
        units = find_units(fake.module, closed)
        chain = _observe(fake, units, size, seq_len)
    written = [name for name, (x, version) in buffers.items() if x._version != version or name in chain.written]
    for name, (parameter, version) in parameters.items():
        if parameter._version != version or name in chain.written:
            raise ValueError(
                f"the forward writes into the parameter {name}, which under sharding is not there as a whole; change "
                "parameters between steps, in the training loop"
            )
    return replace(chain, told=(*chain.told, *_stateful(fake.module, written), *_left(chain.read_again)))


def _thrown(fake: FakeModel, units: Units, size: int, seq_len: int | None, number: int) -> tuple[Any, ...]:
    """Signatures of a forward whose random numbers of Python and numpy begin from a number."""
    return _observe(replace(fake, dice=number), units, size, seq_len).signatures


def longest_throw(fake: FakeModel, seq_len: int | None) -> int:
    """What Python's and numpy's random numbers may begin from, for a forward to run many operators."""
    units = find_units(fake.module)

    def operators(number: int) -> int:
        return sum(len(of_call) for _, calls, *_ in _thrown(fake, units, 2, seq_len, number) for of_call in calls)

    return max(range(_LONG_THROWS), key=operators)


def _observe(
    fake: FakeModel, units: Units, size: int, seq_len: int | None, most_operators: int | None = None
) -> LayerChain:
    saved: list[tuple[torch.Tensor, int]] = []

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        saved.append((tensor, tensor._version))
        return saved[-1]

    def watched(hooks: AbstractContextManager[Any], saves: bool) -> LayerChain:
        batch = fake.batch(size, seq_len)
        with fake.running(), hooks:
            watch = ChainWatch(fake, units, most_operators)
            swaps = patch.object(stateless, "_functional_call", _noting_swaps(stateless._functional_call, watch))
            grads = patch.object(torch.autograd, "grad", _noting(torch.autograd.grad, watch))
            watch.from_batch = {
                watch.storages.number(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)
            }
            repeats = patch.object(CheckpointFunction, "apply", _noting_reentrant(watch))
            hooked, repeated, sizes = _noting_hooks(watch), watch.noting_repeated(), asked_sizes(fake.module, 3)
            with watch, watch.producers, grads, swaps, repeats, hooked, repeated, sizes as asked:
                loss = fake.loss(batch, before_loss=watch.start_loss, note_left=True)
                _check_loss(fake, watch)
            own = _trained_by_loss(fake, watch, batch, loss) if fake.loaded.loss is not None else ()
            if watch.inputs.overwrites and (not saves or any(x._version != version for x, version in saved)):
                _check_backward(fake, loss)
        if fake.left:
            batches = fake.batch(size, seq_len), fake.batch(size, seq_len)  # here: in fake mode they had no numbers
            with fake.running():
                again = fake.read_again(batches)
            watch.inputs.read_again = [
                place for place, renewed in again.items() if renewed or watch.is_of_numbers(fake.left[place])
            ]
        if fake.left or watch.inputs.gives_objects:
            with fake.running():
                watch.inputs.read_aside = fake.read_aside(units.names, fake.batch(size, seq_len))
        if fake.changed or Reached(fake.module).iterators:
            with fake.running():
                watch.inputs.changed_by_several = fake.changed_by_several(units.names, fake.batch(size, seq_len))
        chain = _build_chain(fake, units, watch)
        return replace(chain, told=own, asked=frozenset(asked))

    try:
        return watched(saved_tensors_hooks(pack, partial(_as_saved, fake)), True)
    except ValueError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return replace(watched(nullcontext(), False), hookless=True)


def _check_loss(fake: FakeModel, watch: ChainWatch) -> None:
    """Raises ValueError where the loss reads parameters that it holds by itself: under a plan the model is another
    object."""
    given = {watch.storages.number(tensor) for tensor in watch.returned}
    named = {name: watch.storages.number(parameter) for name, parameter in fake.module.named_parameters()}
    read = {name for event in watch.events[watch.loss_from :] for name in event.parameters}
    for name in sorted(read - watch.read_before_loss - watch.read_back):
        if fake.loaded.loss is not None and named[name] not in given:
            raise ValueError(
                f"loss(output, batch) of {fake.loaded.source} reads {name}, which is not in the output, from a model "
                "that it holds by itself; a plan trains a model that it builds anew: let forward return what the loss "
                "needs"
            )


def _trained_by_loss(fake: FakeModel, watch: ChainWatch, batch: Batch, loss: torch.Tensor) -> tuple[str, ...]:
    """A note on what the loss would train beside the model's parameters."""
    known = {id(x) for x in (*fake.module.parameters(), *watch.returned, *tree_leaves(batch))}
    nodes, seen = [loss.grad_fn], {tensor.grad_fn for tensor in watch.returned}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = getattr(node, "variable", None)
        if found is not None and id(found) not in known:
            return (
                f"the loss would train a tensor of {list(found.shape)} of its own, which is none of the model's "
                "parameters: no plan averages its gradients or steps it; let forward return what the loss makes of it, "
                "or freeze it (requires_grad_(False))",
            )
        nodes += [following for following, _ in node.next_functions]
    return ()


def _check_backward(fake: FakeModel, loss: torch.Tensor) -> None:
    """Raises ValueError where the backward needs what was written into since: only the whole model shows that of what
    one layer saves and another writes into."""
    loss.backward()
    for parameter in fake.module.parameters():
        parameter.grad = None


def _as_saved(fake: FakeModel, saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    check_unwritten(tensor, version, f"{fake.loaded.source} does not train on one device either:")
    return tensor


def check_unwritten(tensor: torch.Tensor, version: int, whose: str) -> None:
    """Raises ValueError where a tensor was written into since it was saved, as autograd does without hooks on such."""
    if tensor._version != version:
        raise ValueError(
            f"{whose} a tensor of {list(tensor.shape)} that the backward needs is written into after an operator has "
            "saved it; let what writes in place (relu_, x += y, x[:] = y) make a new tensor there"
        )


def _noting(grad: Callable[..., Any], watch: ChainWatch) -> Callable[..., Any]:
    """torch.autograd.grad, noted as an act of the model."""

    @wraps(grad)
    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.inputs.transforms = watch.inputs.transforms or watch.running
        if not any(map(is_wrapped, tree_leaves((args, kwargs)))):
            watch.inputs.differentiates = watch.inputs.differentiates or watch.running
        with watch.reading_back():
            return grad(*args, **kwargs)

    return noted


def _noting_swaps(call: Callable[..., Any], watch: ChainWatch) -> Callable[..., Any]:
    """torch.func.functional_call, noted as an act of the model."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.inputs.swaps = True
        return call(*args, **kwargs)

    return noted


def _noting_reentrant(watch: ChainWatch) -> Callable[..., Any]:
    """What a reentrant checkpoint calls, noted as an act of the model, and seen as other functions are."""

    def noted(*args: Any) -> Any:
        watch.inputs.reentrant = True
        return super(CheckpointFunction, CheckpointFunction).apply(*args)

    return noted


@contextmanager
def _noting_hooks(watch: ChainWatch) -> Iterator[None]:
    """Tensor.register_hook and .retain_grad, noted as acts of the model: inside a layer or between layers."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: torch.Tensor, *args: Any) -> Any:
            if watch.producers.depth:
                watch.inputs.hooks_inside |= bool(args)
            else:
                watch.inputs.hooks_between = True
            return original(tensor, *args)

        return noted

    with (
        patch.object(torch.Tensor, "register_hook", noting(torch.Tensor.register_hook)),
        patch.object(torch.Tensor, "retain_grad", noting(torch.Tensor.retain_grad)),
    ):
        yield


def _opened_in_vain(chain: LayerChain) -> frozenset[str]:
    """Opened elements of containers within which every cut carries more bytes than those around them; of those inside
    of each other the innermost, as others have other cuts once these are closed."""
    crossing = bytes_over(chain.graph)
    in_vain = set()
    blocks = [{u for u in layer.units if u in chain.units.elements} for layer in chain.layers]
    for name in chain.units.opened:
        inside = [i for i, layer in enumerate(chain.layers) if any(u.startswith(f"{name}.") for u in layer.units)]
        first, last = min(inside, default=0), max(inside, default=0)
        within = [crossing[i] for i in range(first + 1, last + 1) if blocks[i - 1] and blocks[i]]
        if not within or min(within) > _MORE_BYTES * max(crossing[first], crossing[last + 1]):
            in_vain.add(name)
    return frozenset(name for name in in_vain if not any(other.startswith(f"{name}.") for other in in_vain))


def _stateful(root: nn.Module, written: list[str]) -> tuple[str, ...]:
    """A note on buffers that the forward writes into; those of batch norms, which it does not read, are told apart."""
    owners = {name: root.get_submodule(name.rpartition(".")[0]) for name in written}
    names = [name for name, owner in owners.items() if not isinstance(owner, nn.modules.batchnorm._NormBase)]
    return _left(names)


def _left(names: Sequence[str]) -> tuple[str, ...]:
    """A note on what a forward leaves behind for the next."""
    if not names:
        return ()
    return (
        f"{first_of(names)} is written in every forward, on each data rank by its own, so "
        "the numbers may change with data parallelism, as in any framework",
    )


def shapes_at(fake: FakeModel, chain: LayerChain, size: int, seq_len: int | None) -> Shapes:
    """Shapes at another batch size or length; of each class only the first layer really runs."""
    positions = Positions(fake.module)
    shapes = run_first_of_each_class(fake, chain, fake.batch(size, seq_len), positions)
    shapes.furthest = positions.furthest
    return shapes


def run_first_of_each_class(
    fake: FakeModel, chain: LayerChain, batch: Batch, watch: AbstractContextManager[Any] | None = None
) -> Shapes:
    """What one forward of `batch` produces, under `watch`; other layers return what the first of their class did."""
    shapes = Shapes()
    cursor = Cursor()
    stand_ins = {}
    for i, first in enumerate(chain.representatives()):
        if i != first:
            pairs = zip(chain.layers[i].calls, chain.layers[first].calls, strict=True)
            stand_ins.update({call: like for call, like in pairs if call != like})

    def produced(producer: Producer, tensor: torch.Tensor) -> None:
        cursor.end()
        shapes.tensors[producer] = TensorSpec.of(tensor)

    producers = Producers(fake.module, chain.units.names, on_produced=produced, on_start=cursor.start)

    def stub(name: str, call: int) -> Any:
        like = stand_ins.get((name, call))
        return None if like is None else shapes.outputs[like].empty()

    with (
        fake.running() as refusals,
        watch or nullcontext(),
        recording_outputs(fake.module, chain.units.names, cursor, shapes),
        stubbed(fake.module, {name for name, _ in stand_ins}, producers, stub),
        producers,
    ):
        fake.loss(batch)
    shapes.refused = bool(refusals)
    return shapes


def unlike_crossings(fake: FakeModel, chain: LayerChain, size: int) -> tuple[str, frozenset[Producer]]:
    """(what would cross a cut and is not the same in every run, in words; all such). '' if nothing is seen to: in its
    size by the numbers of the batch, where integers are known by which the model decides, or at all in evaluation.
    Behind what is of another size nothing crosses: stages would run functions of it on a stand-in of the wrong size.
    All cross none where evaluation writes into parameters, of which a stage has its own alone."""
    if fake.mode is None or len(chain.layers) == 1:
        return "", frozenset()
    told, unlike = "", set[Producer]()
    for draw in range(1, _BATCHES + 1) if fake.knows_layout else ():
        for crossing, seen in _unlike(fake, chain, fake.other_batch(size, draw)):
            unlike |= {later.producer for later in chain.crossings if later.made_by >= crossing.made_by}
            told = told or (
                f"what {crossing.producer.name} returns is {list(crossing.spec.shape)} in one batch of {size} and "
                f"{list(seen.shape) if seen else 'missing'} in another, by their numbers, and stages exchange tensors "
                "of one size, and have stand-ins of one size for what others have made (pad all batches alike)"
            )
    before = {name: version_of(parameter) for name, parameter in fake.module.named_parameters()}
    with in_evaluation(fake.module):
        missed = _unlike(fake, chain, fake.batch(size, fake.loaded.seq_len))
    written = next((n for n, p in fake.module.named_parameters() if version_of(p) != before[n]), "")
    if written:
        unlike |= {crossing.producer for crossing in chain.crossings}
        told = told or (
            f"in evaluation the forward writes into the parameter {written}, and stages have only those of their own "
            "layers (scale what the layer returns instead)"
        )
    for crossing, _ in missed:
        unlike.add(crossing.producer)
        told = told or (
            f"what {crossing.producer.name} returns between layers is not there, or another tensor, in evaluation, and "
            "stages exchange the same as in training (let what goes by self.training be in a layer, or at the end)"
        )
    return told, frozenset(unlike)


def _unlike(fake: FakeModel, chain: LayerChain, batch: Batch) -> list[tuple[Crossing, TensorSpec | None]]:
    """The crossing tensors that are of another shape in a run of that batch, and what they are there. Once a function
    runs more often, or less, between two layers than before, the how-manieth it is says no more which tensor is meant.
    """
    try:
        shapes = run_first_of_each_class(fake, chain, batch).tensors
    except (ValueError, DecidesByValuesError):  # it goes another way, of which nothing is known
        return []
    names = {crossing.producer.name for crossing in chain.crossings if crossing.producer.kind == "glue"}
    miscounted = set[Producer]().union(*(_miscounted(name, chain.shapes.tensors, shapes) for name in names))
    found = [(c, None if c.producer in miscounted else shapes.get(c.producer)) for c in chain.crossings]
    return [(crossing, seen) for crossing, seen in found if seen is None or seen.shape != crossing.spec.shape]


def _miscounted(name: str, before: Iterable[Producer], after: Iterable[Producer]) -> list[Producer]:
    """Results of a function between layers from where it does not run as often between the same layers in both runs."""
    own, others = ([p for p in each if p.kind == "module" or p.name == name] for each in (before, after))
    same = next((i for i, (a, b) in enumerate(zip(own, others, strict=False)) if a != b), min(len(own), len(others)))
    return [producer for producer in own[same:] if producer.kind == "glue"]


def _build_chain(fake: FakeModel, units: Units, watch: ChainWatch) -> LayerChain:
    root, events = fake.module, watch.events
    found = spans_of(units, watch, watch.graph())
    _join_hooked(root, watch, found)
    spans, notes = found.each, [*units.notes, *found.notes]
    if len(spans) == 1 and not any(note.endswith("one layer") for note in notes):
        notes.append(_why_one(root, units, watch))
    crossings = _crossings(watch, spans)
    unread = _UNREAD if fake.mode is not None else _UNREAD_THIS_WAY
    layers = _layers(root, units, watch, spans, notes, unread)
    graph = wired(len(layers), ((c.made_by, c.used_by, c.num_bytes) for c in crossings))
    problem = _sharding_problem(fake, watch, layers)
    chain = LayerChain(units, layers, crossings, graph, (), watch.shapes, tuple(notes), problem)
    chain = replace(chain, hooks_gradients=watch.inputs.hooks_inside, read_again=tuple(watch.inputs.read_again))
    chain = replace(chain, written=frozenset(watch.written()), repeats_reentrantly=watch.inputs.reentrant)
    chain = replace(chain, repeats_selectively=watch.inputs.selective)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    signatures = tuple(_signature(root, parameters, events, chain, index) for index in range(len(layers)))
    return replace(chain, signatures=signatures)


def _why_one(root: nn.Module, units: Units, watch: ChainWatch) -> str:
    """Why a model of which nothing had to be joined is one layer all the same."""
    name = type(root).__name__
    if watch.inputs.transforms:
        who = watch.inputs.transforms
        return f"{who} differentiates or maps the model (autograd.grad, torch.func), so all of it is one layer"
    if any(event.key[1] == "CheckpointFunction" for event in watch.events):
        return (
            f"{name} has its layers repeated by reentrant checkpoints, inside of which they are not seen "
            "(checkpoint(..., use_reentrant=False) shows them), so all of it is one layer"
        )
    if len(watch.ran) > 1:
        seen = {producer.name for producer in watch.shapes.tensors if producer.kind == "module"}
        unseen = next((name for name in watch.ran if name not in seen), None)
        if unseen is not None:
            return (
                f"what {unseen} returns is no tensor, nor a tuple, list or dict with any in it, and what crosses a "
                "cut is seen there only, so all of it is one layer"
            )
        idle = next((name for name in sorted(units.elements) if name not in watch.ran), "none of its layers")
        return f"the forward does not call {idle}, but what is inside of it, if anything, so all of it is one layer"
    if watch.ran:
        return f"{watch.ran[0]} is the only part of {name} that runs as a module, so all of it is one layer"
    return f"{name} computes with its parameters by itself, not through modules of its own, so all of it is one layer"


def _read_early(root: nn.Module, events: list[CallEvent], layers: tuple[Layer, ...]) -> str:
    """A parameter that is read before the first or after the last of its layer's modules runs, and no other layer
    reads; '' if there is none."""
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    alike = {name: group for group in aliases.values() for name in group}
    readers: dict[str, int] = defaultdict(int)
    for layer in layers:
        for name in {alike[name][0] for name in layer.parameters}:
            readers[name] += 1
    for layer in layers:
        span = events[layer.first : layer.last + 1]
        runs = [i for i, event in enumerate(span) if event.key[0] == "module"]
        inside = tuple(f"{unit}." for unit in layer.units)
        for i, event in enumerate(span):
            if runs and runs[0] <= i <= runs[-1]:
                continue
            for name in sorted(event.parameters):
                if readers[alike[name][0]] == 1 and all(n.startswith(inside) for n in alike[name]):
                    return name
    return ""


def _sharding_problem(fake: FakeModel, watch: ChainWatch, layers: tuple[Layer, ...]) -> str:
    """Why fully_shard cannot take the model's modules; '' if it can."""
    if fake.whole_because:
        return fake.whole_because
    if who := watch.inputs.differentiates:
        return f"{who} calls torch.autograd.grad, for which fully_shard does not gather parameters again"
    if watch.inputs.swaps:
        return "the forward calls torch.func.functional_call, whose tensors fully_shard replaces by its parameters"
    if changed := watch.inputs.changes_copies:
        return (
            f"{changed} that it is given, of which fully_shard gives it a copy (but not of a UserList or UserDict of "
            "collections)"
        )
    if early := _read_early(fake.module, watch.events, layers):
        return f"fully_shard gathers {early} when its module runs, and the forward reads it outside of that"
    if len(fake.trained_as) > 1:
        each = " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in fake.trained_as)
        return f"fully_shard takes parameters of one dtype, and {each}"
    for name, dtype in fake.trained_as:
        if dtype.is_complex:
            return f"fully_shard takes real parameters, and {name} is {str(dtype).removeprefix('torch.')}"
    scripted = [name for name, module in fake.module.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        return f"{scripted[0] or 'the model'} is scripted by torch.jit, whose modules take no hooks"
    return ""


def _join_hooked(root: nn.Module, watch: ChainWatch, found: LayerSpans) -> None:
    """What a module with backward hooks returns is known to a stage before torch puts them onto it: join the layers
    that it would cross between."""
    hooked = any(map(has_backward_hooks, root.modules()))
    crossing = next((c for c in _crossings(watch, found.each) if _is_hooked(root, c)), None) if hooked else None
    if crossing is not None:
        first, last = found.each[crossing.made_by][0], found.each[max(crossing.used_by)][1]
        name = crossing.producer.name
        found.join(first, last, f"{name} has hooks on its backward, so it and what reads its output are one layer")
        _join_hooked(root, watch, found)


def _is_hooked(root: nn.Module, crossing: Crossing) -> bool:
    kind, name = crossing.producer.kind, crossing.producer.name
    return kind == "module" and has_backward_hooks(root.get_submodule(name))


def _crossings(watch: ChainWatch, spans: list[tuple[int, int]]) -> tuple[Crossing, ...]:
    layer_of = [i for i, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
    used: dict[Producer, set[int]] = defaultdict(set)
    made_by: dict[Producer, int] = {}
    covered: set[tuple[int, int]] = set()
    by_storage: dict[int, list[tuple[Producer, int]]] = defaultdict(list)
    specs = dict(watch.shapes.tensors)
    for key, made in watch.made.items():
        for producer, _ in made if watch.tensors[key].requires_grad else ():  # by what is written into it later, too
            specs[producer] = replace(specs[producer], requires_grad=True)
        number = watch.storages.number(watch.tensors[key])
        if number not in watch.from_parameters:
            continue
        by_storage[number] += made
        for read in watch.reads.get(key, ()):
            _use(made, layer_of, read, used, made_by)
            covered.add((number, layer_of[read]))
    for number, reads in watch.storage_reads.items():
        for read in reads:
            if (number, layer_of[read]) not in covered and layer_of[watch.storage_made[number]] < layer_of[read]:
                _use(sorted(by_storage.get(number, ()), key=lambda m: m[1]), layer_of, read, used, made_by)
    storage_of = {producer: number for number, made in by_storage.items() for producer, _ in made}
    found = [Crossing(p, made_by[p], max(used[p]), frozenset(used[p]), specs[p], storage_of[p]) for p in used]
    order = {p: i for i, p in enumerate(specs)}
    return tuple(sorted(found, key=lambda c: order[c.producer]))


def _use(
    made: list[tuple[Producer, int]],
    layer_of: list[int],
    read: int,
    used: dict[Producer, set[int]],
    made_by: dict[Producer, int],
) -> None:
    """Book a read on the last producer in an earlier layer; none, if it was made again in the reading layer."""
    reader = layer_of[read]
    earlier = [(producer, event) for producer, event in made if event <= read]
    if earlier and layer_of[earlier[-1][1]] < reader:
        producer, event = earlier[-1]
    else:
        before = [(producer, event) for producer, event in made if layer_of[event] < reader]
        if not before:
            return
        producer, event = before[-1]
    used[producer].add(reader)
    made_by[producer] = layer_of[event]


def _layers(
    root: nn.Module, units: Units, watch: ChainWatch, spans: list[tuple[int, int]], notes: list[str], unread_words: str
) -> tuple[Layer, ...]:
    names = dict(root.named_parameters(remove_duplicate=False))
    order = {name: i for i, name in enumerate(names)}
    canonical = {id(p): name for name, p in root.named_parameters()}
    reads = [{id(names[n]) for e in watch.events[first : last + 1] for n in e.parameters} for first, last in spans]
    read_somewhere = set().union(*reads)
    read_anywhere: set[int] = set()
    lost = watch.inputs.overwritten()
    if Reached(root).iterators:  # what is taken from one cannot be put back
        lost |= {name for name in watch.ran if Reached(root.get_submodule(name)).iterators}
    layers = []
    for (first, last), read_here in zip(spans, reads, strict=True):
        span = watch.events[first : last + 1]
        calls = tuple((e.key[1], e.key[2]) for e in span if e.key[0] == "module")
        own = tuple(dict.fromkeys(name for name, _ in calls))
        within = (root.get_submodule(unit).named_parameters(unit, remove_duplicate=False) for unit in own)
        # A module that many layers hold is part of those that use it.
        parameters = {n: p for found in within for n, p in found if id(p) in read_here or id(p) not in read_somewhere}
        present = {id(p) for p in parameters.values()}
        for event in span:
            for name in event.parameters:
                if id(names[name]) not in present:
                    parameters[canonical[id(names[name])]] = names[name]
        read_anywhere |= {id(p) for p in parameters.values()}
        single = len(own) == 1 and all(n.startswith(own[0] + ".") for n in parameters)
        root_name = own[0] if single else ""
        read = tuple(sorted(parameters, key=order.__getitem__))
        writes, overwritten = (not names.isdisjoint(own) for names in (watch.inputs.writers, lost))
        layers.append(Layer("", root_name, own, calls, read, first, last, span[-1].key, writes, overwritten))
    unread = tuple(name for name, p in names.items() if id(p) not in read_anywhere)
    if unread:
        notes.append(f"{unread_words}, kept with the last layer: {_told(unread, names)}")
        layers[-1] = replace(layers[-1], root="", parameters=(*layers[-1].parameters, *unread))
    return _named([_name(layer, i, len(layers), units, root) for i, layer in enumerate(layers)], layers)


_UNREAD = "never used by the forward"
_UNREAD_THIS_WAY = "not used on the way that this forward took (others may, as it is decided by values or draws)"
"""Of parameters, in words: of all forwards, or of one among several ways."""

_MOST_TOLD = 5
"""Parameters, or modules full of them, that a note names."""


def _told(some: Sequence[str], names: Iterable[str]) -> str:
    """Some of the parameters in words: by the outermost modules that have no others."""
    inside, all_inside = (Counter(place for name in each for place in _places(name)) for each in (some, names))
    groups = Counter(next(place for place in _places(name) if inside[place] == all_inside[place]) for name in some)
    told = [f"{place} ({count} parameters)" if count > 1 else place for place, count in groups.items()]
    more = [f"{len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
    return ", ".join((*told[:_MOST_TOLD], *more))


def _places(name: str) -> list[str]:
    """Modules around a parameter, the outermost first, and itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _named(names: list[str], layers: list[Layer]) -> tuple[Layer, ...]:
    """The layers, each by a name of its own: what runs again between others is told by which run it is."""
    runs = [names[:i].count(name) + 1 for i, name in enumerate(names)]
    return tuple(
        replace(layer, name=name if run == 1 else f"{name} (run {run})")
        for layer, name, run in zip(layers, names, runs, strict=True)
    )


def _name(layer: Layer, index: int, num_layers: int, units: Units, root: nn.Module) -> str:
    if not layer.units:
        return type(root).__name__
    loose = bool(units.elements) and not any(unit in units.elements for unit in layer.units)
    if loose and index == num_layers - 1:
        return "head"
    if len(layer.units) == 1:
        return layer.units[0]
    embeds = any(isinstance(m, nn.Embedding) for unit in layer.units for m in root.get_submodule(unit).modules())
    if loose and index == 0 and embeds:
        return "embedding"
    return "+".join(layer.units) if len(layer.units) <= 3 else f"{layer.units[0]}..{layer.units[-1]}"


def _signature(
    root: nn.Module, parameters: dict[str, nn.Parameter], events: list[CallEvent], chain: LayerChain, index: int
) -> tuple[Any, ...]:
    """What two layers of one class have in common."""
    layer = chain.layers[index]
    prefix = layer.root + "." if layer.root else ""
    return (
        tuple(type(root.get_submodule(unit)) for unit in layer.units),
        tuple(tuple(e.operators) for e in events[layer.first : layer.last + 1]),
        tuple((n.removeprefix(prefix), parameters[n].shape, parameters[n].requires_grad) for n in layer.parameters),
        tuple(crossing.spec for crossing in chain.arriving(index)),
        tuple(crossing.spec for crossing in chain.leaving(index)),
        layer.writes_input,
        layer.input_overwritten,
    )
