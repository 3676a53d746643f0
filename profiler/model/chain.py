"""The chain of layers of a model, and the tensors that cross from one to a later one, as data: observe.py watches the
run in which they are seen, chain_layers.py reads them off.

Layers follow the elements of the outermost ModuleLists, ModuleDicts and Sequentials; what runs before, between and
after them makes a layer per gap. An element that itself holds several blocks of one type (a stage of a ResNet or Swin,
a level of a U-Net) is opened, unless more bytes cross between its blocks than around it (the experts of a mixture); one
that has no forward (a ModuleList of attention and MLP, nanoGPT's ModuleDict) is in any case.
Without any container every child with parameters is a layer. Code between layer modules ("glue") joins a neighbour,
where the fewest bytes cross.
"""

from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch

from ..running.run_shapes import Shapes, TensorSpec
from .chain_watch import Key
from .layer_units import Units
from .model_profile import Producer


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
        """Number of bytes that it had in the run in which it was seen."""
        return torch.Size(self.spec.shape).numel() * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Layer:
    """One layer of the chain. first, last: its first and last event in the run. calls: (module, number of the call) of
    its modules."""

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
    """Parameters that the forward writes into, also through .data."""
    read_again: tuple[str, ...] = ()
    """Places (attributes, lists and the like) where a forward leaves something that the next forward reads."""
    hookless: bool = False
    """Whether what is saved for backward cannot be watched: torch.func.grad takes no hooks on saved tensors."""
    asked: frozenset[tuple[str, str]] = frozenset()
    """(parameter, module): parameters of three dims, and modules that ask for their size."""
    told: tuple[str, ...] = ()
    """Reasons, in words, why the trained numbers depend on the plan."""

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
