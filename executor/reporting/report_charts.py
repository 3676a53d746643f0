"""The pictures of a report as SVG: cluster, layers, memory, timeline, waterfall, time against memory, sensitivity."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, gcd, pi, sin

from ...planner.cost.expert_place import expert_place
from ...planner.estimate import Estimate
from ...planner.plan import Axis, Plan
from ...planner.questions.explain import CAUSES
from ...planner.questions.sensitivity import Shift
from ...planner.search import Candidate
from ...profiler.units import GIB, format_bytes, format_seconds
from .drawing import (
    CAUSE_COLOURS,
    ITEM_COLOURS,
    colour_of,
    figure,
    legend,
    line,
    nice_step,
    rect,
    stage_colour,
    tag,
    text,
    ticks,
)
from .report import collapse, gpus_of
from .report_facts import Facts, HostPattern, collapsed, front, stage_of_event

WIDTH = 1000.0
_MOST_CARDS = 12
_PAD, _GAP, _APART = 12.0, 6.0, 12.0
_MOST_MAPPED = 4096
_PASS_COLOURS = {"forward": "blue", "backward": "green", "weight": "violet", "end": "orange"}
PASS_NAMES = {
    "forward": "forward",
    "backward": "backward, with recompute",
    "weight": "backward of weights",
    "end": "last gradients and optimizer",
}


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
        told += [f"recompute: {layer.recompute}"] if layer.recompute != "none" else []
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
    description = f"{len(layers)} layers on {len(plan.stages)} stages"
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
    description = f"{len(patterns)} kinds of hosts; each box is a GPU"
    return figure("hosts", "GPUs of each kind of host", description, WIDTH, height, marks)


def _host_card(plan: Plan, pattern: HostPattern, x: float, y: float, card: _Card) -> str:
    marks = [rect(x, y, card.width, card.height, class_="card", rx=8)]
    first = pattern.hosts[0]
    runs = collapse(str(host) for host in pattern.hosts)
    title = f"host {runs}" if len(pattern.hosts) == 1 else f"hosts {runs}"
    marks.append(text(x + _PAD, y + 20, _cut(title, int(card.width / 8) - 6), class_="label"))
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
            middle, half + (-1 if below else 6), big, class_=f"on mid {'big' if 10 * len(big) < card.cell else 'small'}"
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


def memory_bars(facts: Facts) -> tuple[str, str]:
    """(figure, legend): peak memory of one GPU per pipeline rank, stacked by item, against budget and device."""
    plan, memory = facts.plan, facts.estimate.memory
    rows = collapsed(memory)
    names = [
        name for name in memory[0].items if any(stage.items[name] > 0.0005 * stage.budget_bytes for stage in memory)
    ]
    device = max(group.device.memory for group in plan.cluster.hosts)
    largest = max(device, *(stage.device_bytes for stage in memory))
    left, bar, step = 112.0, 24.0, 36.0
    scale = (WIDTH - left - 130) / largest
    marks: list[str] = []
    height = len(rows) * step + 16
    for value in ticks(largest / GIB):
        x = left + value * GIB * scale
        if value * GIB <= largest * 1.001:
            marks += [line(x, 14, x, height, class_="grid"), text(x, height + 14, f"{value:g}", class_="tick mid")]
    for i, (first, last, stage) in enumerate(rows):
        y, x = 16 + i * step, left
        word = "every GPU" if len(memory) == 1 else f"rank {first}" if first == last else f"ranks {first}–{last}"
        if len(memory) > 1 and plan.degrees.virtual_stages == 1:
            word = word.replace("rank", "stage")
        marks.append(text(left - 10, y + 17, word, class_="label end"))
        for name in names:
            size = stage.items[name] * scale
            share = stage.items[name] / stage.device_bytes
            tip = f"{word}: {name}|{format_bytes(stage.items[name])}, {share:.0%} of {format_bytes(stage.device_bytes)}"
            marks.append(rect(x, y, size, bar, fill=colour_of(name, ITEM_COLOURS, names), data_t=tip))
            if size > 52:
                marks.append(
                    text(
                        x + size / 2,
                        y + 16,
                        f"{stage.items[name] / GIB:.1f}",
                        class_="on mid small",
                        pointer_events="none",
                    )
                )
            x += size
        if stage.budget_bytes < max(other.budget_bytes for other in memory):
            own = left + stage.budget_bytes * scale
            marks.append(line(own, y - 4, own, y + bar + 4, class_="limit"))
        style = "value over" if stage.over_bytes > 0 else "value"
        marks.append(
            text(
                max(x, left + stage.budget_bytes * scale) + 44, y + 17, f"{stage.device_bytes / GIB:.1f}", class_=style
            )
        )
    most = max(stage.budget_bytes for stage in memory)
    budget = left + most * scale
    full = left + device * scale
    marks += [
        line(budget, 4, budget, height, class_="limit"),
        text(budget - 6, 11, f"budget {format_bytes(most)}", class_="tick end limit-t"),
        line(full, 4, full, height, class_="axis"),
        text(full + 5, 11, f"device {format_bytes(device)}", class_="tick"),
    ]
    marks.append(text(left, height + 30, "GiB on one GPU at its peak", class_="note"))
    description = "; ".join(f"ranks {a} to {b}: {format_bytes(stage.device_bytes)}" for a, b, stage in rows[:8])
    picture = figure("memory", "Memory of one GPU by pipeline rank", description, WIDTH, height + 36, marks)
    return picture, legend([(name, colour_of(name, ITEM_COLOURS, names)) for name in names])


def timeline(facts: Facts) -> tuple[str, str]:
    """(figure, legend): the passes of one step on every pipeline rank, as the schedule has them."""
    plan, played = facts.plan, facts.played
    ranks, zero_bubble = plan.degrees.pipeline, any(e.action.kind == "weight" for e in played.events)
    left = 74.0
    row = 44.0 if ranks == 1 else max(7.0, min(30.0, 460.0 / ranks))
    bar = row * 0.84
    scale = (WIDTH - left - 4) / played.seconds
    top = 6.0
    height = top + ranks * row
    marks: list[str] = []
    unit_ticks = ticks(played.seconds, 6)
    for value in unit_ticks:
        x = left + value * scale
        if value <= played.seconds:
            shown = "0" if value == 0 else format_seconds(value)
            marks += [line(x, top, x, height, class_="grid"), text(x, height + 14, shown, class_="tick mid")]
    every = 1 if row >= 13 else -(-ranks // 16)
    word = "stage" if plan.degrees.virtual_stages == 1 else "rank"
    for rank in range(ranks):
        y = top + rank * row
        marks.append(rect(left, y, played.seconds * scale, bar, class_="idle"))
        if rank % every == 0:
            marks.append(
                text(left - 8, y + bar / 2 + 4, f"{word} {rank}" if ranks > 1 else "each GPU", class_="tick end")
            )
    for event in played.events:
        kind = event.action.kind
        x, width = left + event.start_s * scale, (event.end_s - event.start_s) * scale
        y = top + event.rank * row
        shade = None if event.action.chunk % 2 == 0 else ".72"
        facts_of = f"{kind[0]}|{event.action.microbatch}|{stage_of_event(plan, event)}|{format_seconds(event.start_s)}"
        marks.append(rect(x, y, width - min(0.8, width / 8), bar, class_=kind[0], fill_opacity=shade, data_p=facts_of))
        if width >= 15 and bar >= 11:
            marks.append(text(x + width / 2, y + bar / 2 + 4, str(event.action.microbatch), class_="on mid small"))
    for rank, (start, end) in enumerate(zip(played.passes_end_s, played.step_end_s, strict=True)):
        tip = f"{PASS_NAMES['end']}|{format_seconds(end - start)} on rank {rank}"
        marks.append(rect(left + start * scale, top + rank * row, (end - start) * scale, bar, class_="o", data_t=tip))
    description = f"{len(played.events)} passes of {played.num_microbatches} micro-batches on {ranks} pipeline ranks"
    names = PASS_NAMES | ({"backward": "backward of inputs"} if zero_bubble else {})
    told = json.dumps(_told_of_passes(facts, names, zero_bubble))
    picture = figure("timeline", "One step, played out", description, WIDTH, height + 20, marks, data_passes=told)
    kinds = ["forward", "backward", *(["weight"] if zero_bubble else []), "end"]
    entries = [(names[kind], f"var(--{_PASS_COLOURS[kind]})") for kind in kinds]
    return picture, legend([*entries, *([("waiting", "var(--idle)")] if ranks > 1 else [])])


def _told_of_passes(facts: Facts, names: dict[str, str], zero_bubble: bool) -> dict[str, dict[str, list[str]]]:
    """What hovering over a pass tells beside its micro-batch and start: first letter of its kind -> name, and by stage
    its length, with the causes where the pass is not in two parts."""
    plan, played = facts.plan, facts.played
    told: dict[str, dict[str, list[str]]] = {
        kind[0]: {"name": [names[kind]], "stages": [""] * len(plan.stages)}
        for kind in ("forward", "backward", "weight")
    }
    for event in played.events:
        kind, stage = event.action.kind, stage_of_event(plan, event)
        words = format_seconds(event.end_s - event.start_s)
        if kind == "forward" or (kind == "backward" and not zero_bubble):
            words += ": " + _in_words(played.causes[stage][kind])
        told[kind[0]]["stages"][stage] = words
    return told


def _in_words(causes: dict[str, float]) -> str:
    names = {"pipeline": "transfer"}
    return ", ".join(f"{names.get(cause, cause)} {format_seconds(seconds)}" for cause, seconds in causes.items())


def waterfall(facts: Facts) -> str:
    """From the time that the model's FLOPs take at the device's peak to the predicted step, cause by cause."""
    found = facts.estimate
    steps: list[tuple[str, float, str]] = [("FLOPs at peak", facts.ideal_s, "ink2")]
    steps.append(("kernels below peak", found.breakdown["compute"] - facts.ideal_s, "blue"))
    rest = {name: s for name, s in found.breakdown.items() if name != "compute" and s > 0.0005 * found.step_time_s}
    short = {"tensor": "tensor comm.", "data": "data comm.", "pipeline": "bubble, waiting"}
    names = tuple(found.breakdown)
    for name, seconds in sorted(rest.items(), key=lambda item: -item[1]):
        colour = colour_of(name, CAUSE_COLOURS, names).removeprefix("var(--").removesuffix(")")
        steps.append((short.get(name, name), seconds, colour))
    left, top, base = 8.0, 26.0, 250.0
    slot = (WIDTH - left) / (len(steps) + 1)
    bar = min(96.0, slot * 0.72)
    scale = (base - top) / max(found.step_time_s, facts.ideal_s)
    marks = [line(left, base, WIDTH, base, class_="axis")]
    level = 0.0
    for i, (name, seconds, colour) in enumerate([*steps, ("one step", found.step_time_s, "ink")]):
        low = 0.0 if i in (0, len(steps)) else level
        x = left + i * slot + (slot - bar) / 2
        y, tall = base - (low + max(seconds, 0.0)) * scale, abs(seconds) * scale
        if seconds < 0:
            y = base - low * scale
        share = seconds / found.step_time_s
        full = CAUSES.get(next((n for n in found.breakdown if short.get(n, n) == name), ""), name)
        marks.append(
            rect(
                x,
                y,
                bar,
                max(1.5, tall),
                fill=f"var(--{colour})",
                rx=2,
                data_t=f"{full}|{format_seconds(abs(seconds))}, {share:.1%} of the step",
            )
        )
        marks.append(text(x + bar / 2, y - 7, format_seconds(abs(seconds)), class_="value mid"))
        for j, word in enumerate(_two_lines(name)):
            marks.append(text(x + bar / 2, base + 17 + 14 * j, word, class_="tick mid"))
        marks.append(text(x + bar / 2, base + 46, f"{share:.0%}", class_="note mid"))
        level = low + seconds
        if i < len(steps):
            end = base - level * scale
            marks.append(line(x + bar, end, x + slot, end, class_="link"))
    description = "; ".join(f"{name} {format_seconds(seconds)}" for name, seconds, _ in steps)
    return figure("waterfall", "Where the step goes", description, WIDTH, base + 56, marks)


def _two_lines(words: str) -> list[str]:
    head, _, tail = words.partition(" ")
    return [words] if len(words) <= 10 or not tail else [head, tail]


def scatter(facts: Facts) -> str:
    """Step time against memory of the fullest GPU: the plan, what people usually try, and other layouts."""
    found = facts.estimate
    priced = [c for c in facts.alternatives if c.estimate is not None and c.plan is not None]
    mine = (_peak(found), found.step_time_s)
    points = [mine, *((_peak(c.estimate), c.seconds) for c in priced if c.estimate is not None)]
    slowest = 4 * found.step_time_s
    shown = [i for i, (_, seconds) in enumerate(points) if seconds <= slowest]
    budget = max(stage.budget_bytes for stage in found.memory)
    left, right, top, base = 76.0, WIDTH - 24, 16.0, 340.0
    far = max(budget, *(points[i][0] for i in shown)) * 1.03
    least = min(points[i][0] for i in shown)
    near = 0.0 if least < 0.5 * far else least - 0.25 * (far - least)
    longest = max(points[i][1] for i in shown)
    shortest = min(points[i][1] for i in shown)
    low = max(0.0, shortest - 0.18 * max(longest - shortest, 0.2 * shortest))
    high = longest + 0.12 * max(longest - shortest, 0.2 * shortest)

    def across(memory: float) -> float:
        return left + (memory - near) / (far - near) * (right - left)

    def place(i: int) -> tuple[float, float]:
        memory, seconds = points[i]
        return across(memory), base - (seconds - low) / (high - low) * (base - top)

    marks: list[str] = []
    step = nice_step((far - near) / GIB, 8)
    for i in range(int(near / GIB / step), int(far / GIB / step) + 1):
        value, x = i * step, across(i * step * GIB)
        if left <= x <= right:
            marks += [line(x, top, x, base, class_="grid"), text(x, base + 16, f"{value:g}", class_="tick mid")]
    for value in ticks(high, 8):
        y = base - (value - low) / (high - low) * (base - top)
        if top <= y <= base:
            marks += [
                line(left, y, right, y, class_="grid"),
                text(left - 8, y + 4, format_seconds(value) if value else "0", class_="tick end"),
            ]
    edge = across(budget)
    marks += [
        line(edge, top, edge, base, class_="limit"),
        text(edge - 6, top + 10, "budget", class_="tick end limit-t"),
    ]
    best = front([points[i] for i in shown])
    corners = [place(shown[i]) for i in best]
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
    marks.append(tag("path", d=f"M{corners[0][0]:.1f} {corners[0][1]:.1f}{steps}H{edge:.1f}", class_="front"))
    for i in reversed(shown[1:]):
        style, radius = ("rule", 6.0) if _is_rule(priced[i - 1]) else ("other", 4.5)
        x, y = place(i)
        marks.append(tag("circle", cx=x, cy=y, r=radius, class_=style, data_t=_tip(priced[i - 1])))
    x, y = place(0)
    tip = f"the plan|{format_seconds(found.step_time_s)}, {format_bytes(mine[0])}"
    marks.append(tag("path", d=_star(x, y, 11.0), class_="chosen", data_t=tip))
    named = [(*place(i), priced[i - 1].label) for i in shown[1:] if _is_rule(priced[i - 1])]
    marks += _labels([(x, y, "the plan"), *named], left, right, base)
    marks.append(text(left, base + 36, "GiB on the fullest GPU", class_="note"))
    marks.append(text(left, top - 5, "step time", class_="note"))
    description = f"the plan and {len(shown) - 1} alternatives; {len(best)} of them on the Pareto front"
    return figure("scatter", "Time against memory", description, WIDTH, base + 42, marks)


def _is_rule(candidate: Candidate) -> bool:
    return ", micro-batch" not in candidate.label


def _tip(candidate: Candidate) -> str:
    assert candidate.estimate is not None
    figures = f"{format_seconds(candidate.seconds)}, {format_bytes(_peak(candidate.estimate))}"
    return f"{candidate.label}|{figures}|{candidate.verdict}"


def _peak(found: Estimate) -> float:
    return max(stage.device_bytes for stage in found.memory)


def _labels(points: Sequence[tuple[float, float, str]], left: float, right: float, base: float) -> list[str]:
    """Names of points, on the side where there is room, apart from each other, joined to their points by a line."""
    marks: list[str] = []
    for to_left in (False, True):
        side = sorted(p[::-1] for p in points if (p[0] > (left + right) / 2) == to_left)
        side.sort(key=lambda label: label[1])
        lowest = base - 15.0 * (len(side) - 1)
        y = float("-inf")
        for i, (words, at_y, at_x) in enumerate(side):
            y = max(y + 15, min(at_y, lowest + 15 * i))
            x = at_x + (-24 if to_left else 24)
            style = ("label halo strong" if words == "the plan" else "label halo") + (" end" if to_left else "")
            near = at_x + (-9 if to_left else 9)
            marks += [
                line(near, at_y, x + (3 if to_left else -3), y, class_="leader"),
                text(x, y + 4, words, class_=style),
            ]
    return marks


def _star(x: float, y: float, radius: float) -> str:
    corners = []
    for i in range(10):
        r, angle = radius * (1.0 if i % 2 == 0 else 0.45), pi * (i / 5 - 0.5)
        corners.append(f"{x + r * cos(angle):.1f} {y + r * sin(angle):.1f}")
    return "M" + "L".join(corners) + "z"


def tornado(facts: Facts) -> str:
    """Step time with each number of the cluster 20% lower and higher, the plan unchanged."""
    shifts, base_s = facts.shifts, facts.estimate.step_time_s
    left, right, step = 250.0, WIDTH - 20, 40.0
    changes = [abs(s / base_s - 1) for shift in shifts for s in (shift.lower_s, shift.higher_s)]
    most = max(0.02, *changes) * 1.25
    middle, scale = (left + right) / 2, (right - left) / 2 / most
    height = 8 + len(shifts) * step
    marks = [line(middle, 4, middle, height, class_="axis")]
    for i, shift in enumerate(shifts):
        y = 8 + i * step
        marks += [
            text(left - 96, y + 15, shift.name, class_="label end"),
            text(left - 88, y + 15, shift.value, class_="note"),
        ]
        for sign, seconds in (("−20%", shift.lower_s), ("+20%", shift.higher_s)):
            change = seconds / base_s - 1
            x = middle + min(0.0, change) * scale
            colour = "rose" if change > 0 else "green"
            tip = f"{shift.name} {sign}|{format_seconds(seconds)}, {change:+.1%}"
            down = 0.0 if sign.startswith("−") else 12.0
            marks.append(rect(x, y + down, abs(change) * scale, 11, fill=f"var(--{colour})", data_t=tip))
            end = change < 0
            at = middle + change * scale + (-6 if end else 6)
            marks.append(text(at, y + down + 9.5, f"{sign}: {change:+.1%}", class_="tiny end" if end else "tiny"))
    marks += [
        text(middle - 8, height + 16, "faster", class_="note end"),
        text(middle + 8, height + 16, "slower", class_="note"),
    ]
    description = "; ".join(_shift_words(shift, base_s) for shift in shifts)
    return figure("sensitivity", "Sensitivity of the step time", description, WIDTH, height + 22, marks)


def _shift_words(shift: Shift, base_s: float) -> str:
    return f"{shift.name} 20% lower {shift.lower_s / base_s - 1:+.1%}, 20% higher {shift.higher_s / base_s - 1:+.1%}"


def loss_bars(candidates: Sequence[Candidate]) -> tuple[str, str]:
    """(figure, legend): the step of every set-up, stacked by cause; those without a plan say why."""
    priced = [c.estimate for c in candidates if c.estimate is not None]
    names = list(dict.fromkeys(name for found in priced for name in found.breakdown))
    names = [
        name for name in names if any(found.breakdown.get(name, 0.0) > 5e-4 * found.step_time_s for found in priced)
    ]
    longest = max((found.step_time_s for found in priced), default=1.0)
    left, step, bar = 210.0, 40.0, 26.0
    scale = (WIDTH - left - 86) / longest
    height = 10 + len(candidates) * step
    marks: list[str] = []
    for value in ticks(longest):
        x = left + value * scale
        if value <= longest * 1.0001:
            shown = format_seconds(value) if value else "0"
            marks += [line(x, 4, x, height, class_="grid"), text(x, height + 14, shown, class_="tick mid")]
    for i, candidate in enumerate(candidates):
        y, x, found = 10 + i * step, left, candidate.estimate
        chosen = candidate.verdict == "the plan"
        marks.append(
            text(left - 10, y + 18, _cut(candidate.label, 28), class_="label end strong" if chosen else "label end")
        )
        if found is None:
            marks.append(text(left + 6, y + 18, _cut(candidate.verdict, 100), class_="note"))
            continue
        for name in names:
            seconds = found.breakdown.get(name, 0.0)
            tip = f"{candidate.label}: {CAUSES.get(name, name)}|"
            tip += f"{format_seconds(seconds)}, {seconds / found.step_time_s:.1%} of its step"
            marks.append(rect(x, y, seconds * scale, bar, fill=colour_of(name, CAUSE_COLOURS, names), data_t=tip))
            x += seconds * scale
        marks.append(text(x + 8, y + 18, format_seconds(found.step_time_s), class_="value"))
    description = "; ".join(
        f"{c.label}: {format_seconds(c.estimate.step_time_s) if c.estimate else c.verdict}" for c in candidates
    )
    picture = figure("losses", "One step of every set-up by cause", description, WIDTH, height + 20, marks)
    return picture, legend([(CAUSES.get(name, name), colour_of(name, CAUSE_COLOURS, names)) for name in names])


def _cut(words: str, length: int) -> str:
    return words if len(words) <= length else words[: length - 1] + "…"


def stage_places(plan: Plan) -> list[tuple[str, str, str]]:
    """(stages, where, layers) of each pipeline coordinate, in words."""
    rows = []
    for position in range(plan.degrees.pipeline):
        stages = plan.stages_of(position)
        held = collapse(layer.name for stage in stages for layer in plan.stages[stage].layers)
        rows.append((", ".join(str(stage) for stage in stages), gpus_of(plan, position), held))
    return rows
