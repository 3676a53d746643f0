"""Where a plan puts the model, as SVG: layers by stage, one card for each kind of host, the whole cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from ...planner.cost.expert_place import expert_place
from ...planner.plan.document import Axis, Plan, parts_in_words
from ...profiler.machine.units import counted
from .drawing import WIDTH, colour_of, cut, figure, legend, rect, stage_colour, tag, text
from .report import collapse, gpus_of
from .report_facts import Facts, HostPattern

_MOST_CARDS = 12
_PAD, _GAP, _APART = 12.0, 6.0, 12.0
_MOST_MAPPED = 4096


def layer_strip(plan: Plan) -> tuple[str, str]:
    """(figure, legend): the model's layers in order, one cell each, in the colour of their stage, or of their class
    where there is one stage; recomputed ones are hatched."""
    layers = [(stage, layer) for stage, held in enumerate(plan.stages) for layer in held.layers]
    classes = list(dict.fromkeys(layer.layer_class for _, layer in layers))
    colours = {name: colour_of(name, {}, classes) for name in classes}
    staged = len(plan.stages) > 1
    width, tall = WIDTH / len(layers), 34.0
    marks = [_HATCH]
    for i, (stage, layer) in enumerate(layers):
        told = [layer.name, *([f"stage {stage}"] if staged else []), layer.layer_class]
        again = parts_in_words(layer.recompute) or layer.recompute
        told += [f"recompute: {again}"] if again != "none" else []
        told += ["gives parameters back after forward"] if layer.reshard else []
        place = (i * width, 0, width - min(1.0, width / 6), tall)
        colour = stage_colour(stage, len(plan.stages)) if staged else colours[layer.layer_class]
        marks.append(rect(*place, fill=colour, rx=min(2.0, width / 5), data_t="|".join(told)))
        if layer.recompute != "none":
            marks.append(rect(*place, fill="url(#hatch)", class_="over-all"))
    first = 0.0
    for stage, held in enumerate(plan.stages):
        span = width * len(held.layers)
        if staged and span >= 7.0 * len(str(stage)) + 4:
            marks.append(text(first + span / 2, tall + 17, str(stage), class_="tick mid"))
        first += span
    if staged:
        marks.append(text(0, tall + 34, "stage of each layer, in the order of the model", class_="note"))
    description = f"{counted(len(layers), 'layer')} on {counted(len(plan.stages), 'stage')}"
    picture = figure("layers", "The layers in order", description, WIDTH, tall + (40 if staged else 2), marks)
    return picture, "" if staged else legend(list(colours.items()))


_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="1.6" height="5" fill="#fff" fill-opacity=".34"/></pattern></defs>'
)


@dataclass(frozen=True)
class _Card:
    """Sizes of the picture of one host."""

    across: int
    width: float
    cell: float
    tall: float
    height: float


def host_cards(facts: Facts) -> str:
    """One card for each kind of host: its devices in the colour of their stage, and which hosts are like it."""
    plan, patterns = facts.plan, facts.patterns
    per_host = max(len(pattern.positions) for pattern in patterns)
    across = min(per_host, 8)
    degrees = plan.degrees
    inside = sum(degree > 1 for degree in (degrees.tensor, degrees.context, degrees.expert))
    columns = min(4, 16 // across, len(patterns), 4 if inside < 2 else 8 // across or 1)
    width = (WIDTH + _APART) / columns - _APART
    cell = (width - 2 * _PAD + _GAP) / across - _GAP
    tall = min(cell, 46.0)
    card = _Card(across, width, cell, tall, 30 + -(-per_host // across) * (tall + _GAP) + _PAD - _GAP)
    shown = patterns[:_MOST_CARDS]
    step = card.height + _APART
    marks = [
        _host_card(plan, pattern, i % columns * (width + _APART), i // columns * step, card)
        for i, pattern in enumerate(shown)
    ]
    height = -(-len(shown) // columns) * step - _APART
    if len(patterns) > len(shown):
        left = patterns[len(shown) :]
        hosts = sum(len(pattern.hosts) for pattern in left)
        words = f"and {len(left)} more kinds, {hosts:,} hosts: see the map above and the table below"
        marks.append(text(0, height + 22, words, class_="note"))
        height += 28
    description = f"{counted(len(patterns), 'kind')} of hosts; each box is a GPU"
    return figure("hosts", "GPUs of each kind of host", description, WIDTH, height, marks)


def _host_card(plan: Plan, pattern: HostPattern, x: float, y: float, card: _Card) -> str:
    marks = [rect(x, y, card.width, card.height, class_="card", rx=8)]
    first = pattern.hosts[0]
    runs = collapse(str(host) for host in pattern.hosts)
    title = f"host {runs}" if len(pattern.hosts) == 1 else f"hosts {runs}"
    marks.append(text(x + _PAD, y + 20, cut(title, int(card.width / 8) - 6), class_="label"))
    if len(pattern.hosts) > 1:
        marks.append(text(x + card.width - _PAD, y + 20, f"× {len(pattern.hosts):,}", class_="label end dim"))
    rank = _first_rank(plan, first)
    for device, position in enumerate(pattern.positions):
        left = x + _PAD + device % card.across * (card.cell + _GAP)
        top = y + 30 + device // card.across * (card.tall + _GAP)
        marks.append(_device(plan, position, f"GPU {device} of host {first}", rank + device, left, top, card))
    return "".join(marks)


def _device(plan: Plan, position: int, name: str, rank: int, x: float, y: float, card: _Card) -> str:
    """A GPU: its stages (or number) and place along the axes inside a layer; all its coordinates and layers on
    hovering."""
    stages, coordinates = plan.stages_of(position), plan.coordinates(rank)
    where = [f"{axis.replace('_', ' ')} {i}" for axis, i in coordinates.items() if plan.degrees.of(axis) > 1]
    inside: tuple[tuple[str, Axis], ...] = (("TP", "tensor"), ("CP", "context"))
    short_places = [f"{short} {coordinates[axis]}" for short, axis in inside if plan.degrees.of(axis) > 1]
    if plan.degrees.expert > 1:
        part = expert_place(plan, coordinates).expert
        where.append(f"experts: part {part + 1} of {plan.degrees.expert}")
        short_places.append(f"EP {part}")
    held = collapse(layer.name for stage in stages for layer in plan.stages[stage].layers)
    tip = f"{name}, rank {rank}|{', '.join(where)}|{held}"
    colour = stage_colour(stages[0], len(plan.stages))
    below = _fitting(short_places, card.cell)
    first = f"stage{'s' * (len(stages) > 1)} {_brief(stages)}" if card.cell > 70 else _brief(stages)
    big = first if plan.degrees.pipeline > 1 else name.split()[1]
    middle, half = x + card.cell / 2, y + card.tall / 2
    marks = [
        rect(x, y, card.cell, card.tall, fill=colour, rx=6, data_t=tip),
        text(
            middle, half + (-1 if below else 6), big, class_=f"on mid {'big' if 14 * len(big) < card.cell else 'small'}"
        ),
    ]
    if below:
        marks.append(text(middle, half + 15, below, class_="on mid small"))
    return "".join(marks)


def _fitting(places: Sequence[str], width: float) -> str:
    """As many of the places as a GPU's box has room for, joined."""
    while places and 6.0 * len(" · ".join(places)) > width:
        places = places[:-1]
    return " · ".join(places)


def _brief(stages: Sequence[int]) -> str:
    shown = [str(stage) for stage in stages]
    return "/".join(shown) if len(shown) <= 3 else f"{shown[0]}…{shown[-1]}"


def _first_rank(plan: Plan, host: int) -> int:
    rank = number = 0
    for group in plan.cluster.hosts:
        first = number if group.first is None else group.first
        if first <= host < first + group.count:
            return rank + (host - first) * group.devices_per_host
        rank += group.count * group.devices_per_host
        number += group.count
    raise AssertionError(f"no host {host}")


def cluster_map(facts: Facts) -> str:
    """Every host of a large cluster as a small square, one path per stage; nothing for a few hosts."""
    plan = facts.plan
    hosts = plan.cluster.num_hosts
    if hosts <= _MOST_CARDS:
        return ""
    per_square = -(-hosts // _MOST_MAPPED)
    squares = -(-hosts // per_square)
    across = _columns(squares, max(1, gcd(*(len(pattern.hosts) for pattern in facts.patterns)) // per_square))
    side = min(WIDTH / across, 22.0)
    paths: dict[int, list[str]] = {}
    for pattern in facts.patterns:
        runs = _runs(pattern.positions)
        for host in pattern.hosts:
            if host % per_square:
                continue
            column, row = host // per_square % across, host // per_square // across
            for position, first, length in runs:
                devices = len(pattern.positions)
                top = row * side + (side - 1) * first / devices
                tall = (side - 1) * length / devices
                paths.setdefault(position, []).append(
                    f"M{column * side:.1f} {top:.1f}h{side - 1:.1f}v{tall:.1f}h{1 - side:.1f}z"
                )
    marks = [
        tag(
            "path",
            d="".join(parts),
            fill=stage_colour(plan.stages_of(position)[0], len(plan.stages)),
            data_t=_position_tip(plan, position),
        )
        for position, parts in sorted(paths.items())
    ]
    rows = -(-squares // across)
    each = "one host" if per_square == 1 else f"{per_square} hosts"
    marks.append(text(0, rows * side + 16, f"each square is {each}, in rank order, coloured by stage", class_="note"))
    description = f"{hosts:,} hosts coloured by the pipeline stage that they hold"
    return figure("map", "The whole cluster", description, WIDTH, rows * side + 22, marks)


def _columns(squares: int, alike: int) -> int:
    """Squares in a row: about five times as many as rows, and where possible so that rows end where stages do."""
    wanted = max(24, round((5 * squares) ** 0.5))
    fitting = [n for n in range(wanted // 2, 2 * wanted + 1) if n % alike == 0 or alike % n == 0]
    return min(squares, min(fitting, key=lambda n: abs(n - wanted), default=wanted))


def _position_tip(plan: Plan, position: int) -> str:
    stages = plan.stages_of(position)
    names = "stage " + ", ".join(str(stage) for stage in stages) if plan.degrees.pipeline > 1 else "all layers"
    held = collapse(layer.name for stage in stages for layer in plan.stages[stage].layers)
    return f"{names}|{gpus_of(plan, position)}|{held}"


def _runs(positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position, first device, length) of equal neighbours."""
    runs: list[tuple[int, int, int]] = []
    for device, position in enumerate(positions):
        if runs and runs[-1][0] == position:
            runs[-1] = (position, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((position, device, 1))
    return runs


def stage_places(plan: Plan) -> list[tuple[str, str, str]]:
    """(stages, where, layers) of each pipeline coordinate, in words."""
    rows = []
    for position in range(plan.degrees.pipeline):
        stages = plan.stages_of(position)
        held = collapse(layer.name for stage in stages for layer in plan.stages[stage].layers)
        rows.append((", ".join(str(stage) for stage in stages), gpus_of(plan, position), held))
    return rows
