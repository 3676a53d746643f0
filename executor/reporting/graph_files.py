"""The graph of a model as a file: GraphML by networkx's own writer, or DOT."""

import re
from pathlib import Path
from typing import Any

import networkx as nx

from ...profiler.document import write_file
from ...profiler.machine.units import format_bytes, format_count
from ...profiler.model.layer_graph import layers_of

_SHAPES = {"layer": "box", "tensor": "ellipse", "parameter": "note"}

_UNSPEAKABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML can hold."""


def write_graph(graph: nx.DiGraph, path: Path) -> None:
    """Write the graph of a model, as DOT where the name ends in .dot, else as GraphML."""
    if path.suffix == ".dot":
        write_file(path, dot(graph))
    else:
        write_file(path, "\n".join(nx.generate_graphml(_with_plain_values(graph))) + "\n")


def dot(graph: nx.DiGraph) -> str:
    """The graph in Graphviz's language: layers in the order of the chain, tensors and shared weights, and edges with
    their bytes."""
    nodes = [*layers_of(graph), *(node for node in graph if not isinstance(node, int))]
    lines = ["digraph {"]
    for node in nodes:
        known = graph.nodes[node]
        lines.append(f"  {_quoted(_id(node))} [label={_quoted(_label(node, known))}, shape={_SHAPES[known['kind']]}];")
    for source, target, num_bytes in graph.edges(data="bytes"):
        lines.append(f"  {_quoted(_id(source))} -> {_quoted(_id(target))} [bytes={num_bytes}];")
    return "\n".join([*lines, "}", ""])


def _label(node: Any, known: dict[str, Any]) -> str:
    """What a reader of a picture is told of a node, in two lines."""
    if known["kind"] == "layer":
        return f"{known['name']}\n{known['layer_class']}, {format_count(known['parameters'])} parameters"
    if known["kind"] == "tensor":
        return f"{known['name']}\n{' x '.join(map(str, known['shape']))}, {format_bytes(known['bytes'])}"
    return f"{node[1]}\nshared, {format_bytes(known['bytes'])}"


def _with_plain_values(graph: nx.DiGraph) -> nx.DiGraph:
    """A copy of the graph with names and values that a file of graphs can hold; what is not known is left out."""
    plain = nx.DiGraph()
    for node, known in graph.nodes(data=True):
        values = {name: _plain(value) for name, value in known.items() if value is not None}
        plain.add_node(_speakable(_id(node)), **values)
    for source, target, num_bytes in graph.edges(data="bytes"):
        plain.add_edge(_speakable(_id(source)), _speakable(_id(target)), bytes=num_bytes)
    return plain


def _plain(value: Any) -> str | int | float | bool:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    found: str | int | float | bool = _speakable(value) if isinstance(value, str) else value
    return found


def _id(node: Any) -> str:
    """A node's name in files: "layer 3", "tensor 5", "parameter wte.weight"."""
    return f"layer {node}" if isinstance(node, int) else f"{node[0]} {node[1]}"


def _speakable(words: str) -> str:
    return _UNSPEAKABLE.sub("\ufffd", words)


def _quoted(words: str) -> str:
    escaped = _speakable(words).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
    return f'"{escaped}"'
