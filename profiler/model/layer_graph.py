"""The graph of a model, as a networkx.DiGraph: its layers, and the tensors and weights that tie them together.

Nodes, and what is known of each:

    3                    the layer at place 3 of the chain: name, layer_class, flops (model FLOPs of one sample, forward
                         and backward), parameters (how many), parameter_bytes
    ("tensor", 5)        the profile's tensor 5, made in one layer and read in later ones: name, bytes, shape, dims,
                         dtype, requires_grad, saved_by (layers that keep it for backward), same_as (the number of
                         the first tensor with this memory, if it is handed on)
    ("parameter", name)  a weight that several layers read, or that has several names: bytes, tied_to (its first name)

Every node has its kind. Edges go as data goes, and carry `bytes`: from a layer to the tensor that it makes, from a
tensor or weight to the layers that read it. Weights that one layer alone reads are in its parameter_bytes.

`wired` makes it bare, with kinds and bytes alone: so the profiler has it of a run's events, among which it looks for
layers, and then of these layers, while it traces. `graph_of` is the whole graph, of a profile.
"""

from collections import defaultdict
from collections.abc import Iterable

import networkx as nx

from .model_profile import ModelProfile, Producer, amount_at

TensorNode = tuple[str, int]


def wired(num_layers: int, tensors: Iterable[tuple[int, Iterable[int], float]]) -> nx.DiGraph:
    """The graph of so many layers and of tensors between them, each of which is (its maker, its readers, its bytes).
    Tensors are numbered in their order, and every layer has its neighbours in that order."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(num_layers), kind="layer")
    for number, (maker, readers, num_bytes) in enumerate(tensors):
        node = ("tensor", number)
        graph.add_node(node, kind="tensor", bytes=num_bytes)
        graph.add_edge(maker, node, bytes=num_bytes)
        graph.add_edges_from(((node, reader) for reader in sorted(readers)), bytes=num_bytes)
    return graph


def graph_of(profile: ModelProfile, element_bytes: int = 2) -> nx.DiGraph:
    """The graph of a profiled model, for one sample. element_bytes: of the dtype that it computes in."""
    tensors = ((t.made_by, {*t.used_by, t.last_used_by}, round(t.size.at(1, element_bytes))) for t in profile.tensors)
    graph = wired(len(profile.layers), tensors)
    for number, tensor in enumerate(profile.tensors):
        graph.nodes["tensor", number].update(
            name=_name_of(tensor.producer),
            shape=tensor.shape,
            dims=tensor.dims,
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            saved_by=tensor.saved_by,
            same_as=tensor.same_as,
        )
    flops = [
        sum(amount_at(op.flops, 2) - amount_at(op.flops, 1) for op in layer_class.whole.operators)
        for layer_class in profile.classes
    ]
    elements: dict[str, int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    for place, layer in enumerate(profile.layers):
        layer_class = profile.classes[layer.layer_class]
        own = [parameter.num_elements for parameter in layer_class.parameters]
        elements |= zip(layer.parameters, own, strict=True)
        graph.nodes[place].update(
            name=layer.name,
            layer_class=layer_class.name,
            flops=flops[layer.layer_class],
            parameters=sum(own),
            parameter_bytes=element_bytes * sum(own),
        )
        for name in dict.fromkeys(layer.parameters):
            readers[name].append(place)
    first_of = {name: group[0] for group in profile.ties for name in group}
    for name, places in readers.items():
        if len(places) > 1 or name in first_of:
            size = element_bytes * elements[name]
            graph.add_node(("parameter", name), kind="parameter", bytes=size, tied_to=first_of.get(name))
            graph.add_edges_from(((("parameter", name), place) for place in places), bytes=size)
    return graph


def layers_of(graph: nx.DiGraph) -> list[int]:
    """The chain: layers in an order in which each finds what it reads, that of their places where several would do."""
    order = nx.lexicographical_topological_sort(graph, key=lambda node: node if isinstance(node, int) else -1)
    return [node for node in order if isinstance(node, int)]


def tensors_of(graph: nx.DiGraph) -> list[TensorNode]:
    """Nodes of the tensors, in the order of their numbers."""
    return [node for node, kind in graph.nodes(data="kind") if kind == "tensor"]


def maker_of(graph: nx.DiGraph, tensor: TensorNode) -> int:
    """The layer that makes a tensor."""
    (maker,) = graph.predecessors(tensor)
    return int(maker)


def bytes_over(graph: nx.DiGraph) -> list[float]:
    """[layer] -> bytes of the tensors that a cut before this layer carries: those made before it, and read by it or
    later. It is 0 for the first layer, and for one place more than there are layers: a cut after the last."""
    carried = [0.0] * (sum(kind == "layer" for _, kind in graph.nodes(data="kind")) + 1)
    for tensor in tensors_of(graph):
        for place in range(maker_of(graph, tensor) + 1, max(graph.successors(tensor)) + 1):
            carried[place] += graph.nodes[tensor]["bytes"]
    return carried


def skips(graph: nx.DiGraph) -> list[TensorNode]:
    """Tensors that are read later than by the layer after their maker, so that they pass a layer by."""
    return [tensor for tensor in tensors_of(graph) if max(graph.successors(tensor)) > maker_of(graph, tensor) + 1]


def cut_points(graph: nx.DiGraph) -> list[int]:
    """Layers before which a stage may begin: all but the first, unless a weight has readers on both sides, which lives
    on one stage. (Tied weights are two of them, with a copy on each side.)"""
    inside: set[int] = set()
    for node, kind in graph.nodes(data="kind"):
        if kind == "parameter":
            inside.update(range(min(graph.successors(node)) + 1, max(graph.successors(node)) + 1))
    return [layer for layer in layers_of(graph)[1:] if layer not in inside]


def _name_of(producer: Producer) -> str:
    name = producer.name if producer.kind == "module" else f"{producer.name}()"
    name += f", call {producer.call + 1}" if producer.call else ""
    return name + (f", leaf {producer.leaf}" if producer.leaf else "")
