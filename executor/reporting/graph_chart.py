"""The graph of a model as SVG: its chain from the top down, tensors that pass by layers beside it, the plan's cuts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import networkx as nx

from ...planner.plan.document import Plan
from ...profiler.machine.units import format_bytes, format_count
from ...profiler.model.layer_graph import bytes_over, layers_of, maker_of, skips, tensors_of
from .drawing import colour_of, cut, figure, line, rect, stage_colour, tag, text
from .report import collapse

_WIDTH = 360.0
"""In units of the view box: what a telephone shows at nearly full size."""

_TALL, _GAP, _LANE, _WORDS = 42.0, 34.0, 11.0, 62.0
"""Of a box, between boxes, between arcs, and for the bytes of an arc."""

_LETTER, _SMALL = 7.6, 6.0
"""Widths of letters, about."""

_MOST_LANES = 8
_ALIKE = 3
"""Stages in a row with layers of one class that are drawn as one box."""


@dataclass(frozen=True)
class _DrawnBox:
    """Layers that are drawn as one: neighbours of one class, on one stage or the same number on each of several."""

    layers: tuple[int, ...]
    stages: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class _Arc:
    """Tensors that pass by layers, from the box that makes them to those that read them."""

    start: int
    ends: tuple[int, ...]
    num_tensors: int
    num_bytes: int


def layer_graph(plan: Plan, graph: nx.DiGraph) -> str:
    """The picture. graph: of the plan's model, with the bytes of one sample."""
    boxes = _boxes(plan, graph)
    arcs, left_out = _arcs(graph, boxes)
    lanes = _lanes(arcs)
    beside = _LANE * (max(lanes, default=-1) + 1) + (_WORDS + 6 if arcs else 0.0)
    width = _WIDTH - beside
    carried = bytes_over(graph)
    marks = [_ARROW]
    for number, box in enumerate(boxes):
        top = number * (_TALL + _GAP)
        if number:
            marks += _joint(graph, boxes[number - 1], box, top, width + beside - (_WORDS + 2 if arcs else 0), carried)
        marks += _drawn(graph, box, top, width, _colour(plan, box), carried)
    for arc, lane in zip(arcs, lanes, strict=True):
        marks += _drawn_arc(arc, width, width + _LANE * (lane + 1), _WIDTH - _WORDS)
    height = len(boxes) * (_TALL + _GAP) - _GAP + 2
    if left_out:
        size = format_bytes(sum(arc.num_bytes for arc in left_out))
        marks.append(text(0, height + 18, f"{len(left_out)} more pass by layers, {size} a sample", class_="note"))
        height += 24
    staged = f", on {len(plan.stages)} stages" if len(plan.stages) > 1 else ""
    description = (
        f"{len(layers_of(graph))} layers in {len(boxes)} boxes{staged}; {len(arcs)} arcs for tensors that skip"
    )
    return figure("graph", "The graph of the model", description, _WIDTH, height, marks)


_ARROW = (
    '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 .8 7 4 0 7.2z" class="tip"/></marker></defs>'
)


def cut_rows(plan: Plan, graph: nx.DiGraph) -> list[tuple[str, str, str]]:
    """(where, tensors, bytes of one sample) of each cut between stages; neighbours that carry the same are one row."""
    carried, first, found = bytes_over(graph), 0, []
    for stage, held in enumerate(plan.stages[:-1]):
        first += len(held.layers)
        crossing = [t for t in tensors_of(graph) if maker_of(graph, t) < first <= max(graph.successors(t))]
        found.append((stage, str(len(crossing)), format_bytes(carried[first])))
    rows = []
    for (count, size), group in groupby(found, key=lambda row: row[1:]):
        stages = [stage for stage, _, _ in group]
        where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}–{stages[-1]}, each"
        rows.append((f"after {where}", count, size))
    return rows


def shared_weights(graph: nx.DiGraph) -> list[str]:
    """In words, which weights several layers read, each with those layers."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for node, known in graph.nodes(data=True):
        if known["kind"] == "parameter":
            groups[known["tied_to"] or node[1]].append(node)
    told = []
    for nodes in groups.values():
        readers = sorted({reader for node in nodes for reader in graph.successors(node)})
        if len(readers) > 1:
            names = collapse(graph.nodes[reader]["name"] for reader in readers)
            told.append(f"{nodes[0][1]} ({format_bytes(graph.nodes[nodes[0]]['bytes'])}) is read by {names}")
    return told


def _boxes(plan: Plan, graph: nx.DiGraph) -> list[_DrawnBox]:
    stage_of = [stage for stage, held in enumerate(plan.stages) for _ in held.layers]
    classes = nx.get_node_attributes(graph, "layer_class")
    runs = [
        (stage, name, tuple(layers))
        for (stage, name), layers in groupby(layers_of(graph), key=lambda layer: (stage_of[layer], classes[layer]))
    ]
    several = {before[0] for before, behind in pairwise(runs) if before[0] == behind[0]}
    boxes = []
    for (name, _), group in groupby(runs, key=lambda run: (run[1], run[0] if run[0] in several else None)):
        alike = [(stage, layers) for stage, _, layers in group]
        if len(alike) < _ALIKE:
            boxes += [_DrawnBox(layers, (stage,), _times(name, [len(layers)])) for stage, layers in alike]
        else:
            stages = tuple(stage for stage, _ in alike)
            words = _times(name, [len(layers) for _, layers in alike])
            boxes.append(_DrawnBox(tuple(layer for _, layers in alike for layer in layers), stages, words))
    return boxes


def _times(name: str, counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return name if counts == [1] else f"{low} × {name}" if low == high else f"{low}–{high} × {name}"


def _arcs(graph: nx.DiGraph, boxes: Sequence[_DrawnBox]) -> tuple[list[_Arc], list[_Arc]]:
    """(those that are drawn, shortest first; those for which there is no room)."""
    box_of = {layer: number for number, box in enumerate(boxes) for layer in box.layers}
    found: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for tensor in skips(graph):
        start = box_of[maker_of(graph, tensor)]
        ends = tuple(sorted({box_of[reader] for reader in graph.successors(tensor)} - {start, start + 1}))
        if ends:
            found[start, ends].append(graph.nodes[tensor]["bytes"])
    arcs = [_Arc(start, ends, len(sizes), sum(sizes)) for (start, ends), sizes in found.items()]
    arcs.sort(key=lambda arc: (arc.ends[-1] - arc.start, arc.start))
    drawn: list[_Arc] = []
    left_out: list[_Arc] = []
    for arc in arcs:
        (left_out if max(_lanes([*drawn, arc])) >= _MOST_LANES else drawn).append(arc)
    return drawn, left_out


def _lanes(arcs: Sequence[_Arc]) -> list[int]:
    """[arc] -> its place beside the boxes: the innermost in which no other is at the same height."""
    taken: list[tuple[int, _Arc]] = []
    for arc in arcs:
        beside = {lane for lane, other in taken if other.start <= arc.ends[-1] and arc.start <= other.ends[-1]}
        taken.append((next(lane for lane in range(len(arcs)) if lane not in beside), arc))
    return [lane for lane, _ in taken]


def _joint(
    graph: nx.DiGraph, before: _DrawnBox, box: _DrawnBox, top: float, width: float, carried: Sequence[float]
) -> Iterator[str]:
    """Between two boxes: an arrow if the lower one reads what the upper one made, and the cut, if there is one; as wide
    as boxes and arcs."""
    middle = top - _GAP / 2
    cuts = before.stages[-1] != box.stages[0]
    made = [t for layer in before.layers for t in graph.successors(layer)]
    read = [t for t in made if not set(graph.successors(t)).isdisjoint(box.layers)]
    if read:
        yield line(24, top - _GAP + 1, 24, top - 1, class_="axis", marker_end="url(#to)")
    if cuts:
        words = f"cut: {format_bytes(carried[box.layers[0]])}"
        behind = 42 + _SMALL * len(words)
        yield line(0, middle, 18, middle, class_="limit") + line(behind, middle, width, middle, class_="limit")
        yield text(36, middle + 4, words, class_="small limit-t")
    elif read:
        size = format_bytes(sum(graph.nodes[t]["bytes"] for t in read))
        yield text(36, middle + 4, size, class_="small dim")


def _colour(plan: Plan, box: _DrawnBox) -> str:
    """That of its stage, or of its class where there is one stage, as in the strip of layers."""
    if len(plan.stages) > 1:
        return stage_colour((box.stages[0] + box.stages[-1]) // 2, len(plan.stages))
    classes = list(dict.fromkeys(layer.layer_class for layer in plan.stages[0].layers))
    return colour_of(plan.stages[0].layers[box.layers[0]].layer_class, {}, classes)


def _drawn(
    graph: nx.DiGraph, box: _DrawnBox, top: float, width: float, colour: str, carried: Sequence[float]
) -> Iterator[str]:
    known = [graph.nodes[layer] for layer in box.layers]
    names = collapse(layer["name"] for layer in known)
    count = format_count(sum(layer["parameters"] for layer in known))
    first, last = box.stages[0], box.stages[-1]
    where = "" if colour.startswith("var") else f"stage {first}" if first == last else f"stages {first}–{last}"
    room = int((width - 20) / _SMALL)
    below = f"{cut(names, room - len(count) - 10)} · {count} params"
    if first != last:
        inside = carried[box.layers[0] + 1 : box.layers[-1] + 1]
        below = cut(f"on each · {format_bytes(max(inside))} over each cut", room)
    told = "|".join(filter(None, (names, f"{count} parameters", where)))
    yield rect(0, top, width, _TALL, fill=colour, rx=6, data_t=told)
    yield text(10, top + 18, cut(box.words, int((width - 32 - _SMALL * len(where)) / _LETTER)), class_="on strong")
    if where:
        yield text(width - 10, top + 18, where, class_="on small end")
    yield text(10, top + 34, below, class_="on small")


def _drawn_arc(arc: _Arc, left: float, right: float, words_at: float) -> Iterator[str]:
    """From the lower half of the box that makes it to the upper half of those that read it."""
    start = arc.start * (_TALL + _GAP) + _TALL * 0.72
    ends = [end * (_TALL + _GAP) + _TALL * 0.3 for end in arc.ends]
    last = ends[-1]
    path = f"M{left:.0f} {start:.0f}H{right - 5:.0f}q5 0 5 5V{last - 5:.0f}q0 5 -5 5H{left + 2:.0f}"
    yield tag("path", d=path, class_="skip", marker_end="url(#to)")
    for end in ends[:-1]:
        yield line(right, end, left + 2, end, class_="skip", marker_end="url(#to)")
    size = format_bytes(arc.num_bytes)
    yield text(words_at, start + 4, size if arc.num_tensors == 1 else f"{arc.num_tensors}: {size}", class_="small dim")
