"""One step of a plan, as SVG: memory of its GPUs, passes of its pipeline, where the time goes."""

import json

from ...planner.answers.explain import CAUSES
from ...profiler.machine.units import GIB, counted, format_bytes, format_seconds
from .drawing import CAUSE_COLOURS, ITEM_COLOURS, WIDTH, colour_of, figure, legend, line, rect, text, ticks
from .report_facts import Facts, collapsed, stage_of_event

_PASS_COLOURS = {"forward": "blue", "backward": "green", "weight": "violet", "end": "orange"}
_PASS_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "weight": "backward of weights",
    "end": "last gradients and optimizer",
}


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
        noun = plan.degrees.rank_noun
        word = "every GPU" if len(memory) == 1 else f"{noun} {first}" if first == last else f"{noun}s {first}–{last}"
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
    description = "; ".join(
        f"{f'rank {a}' if a == b else f'ranks {a} to {b}'}: {format_bytes(stage.device_bytes)}"
        for a, b, stage in rows[:8]
    )
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
    for rank in range(ranks):
        y = top + rank * row
        marks.append(rect(left, y, played.seconds * scale, bar, class_="idle"))
        if rank % every == 0:
            word = f"{plan.degrees.rank_noun} {rank}" if ranks > 1 else "each GPU"
            marks.append(text(left - 8, y + bar / 2 + 4, word, class_="tick end"))
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
        tip = f"{_PASS_NAMES['end']}|{format_seconds(end - start)} on rank {rank}"
        marks.append(rect(left + start * scale, top + rank * row, (end - start) * scale, bar, class_="o", data_t=tip))
    micro_batches = counted(played.num_microbatches, "micro-batch", "micro-batches")
    description = (
        f"{counted(len(played.events), 'pass', 'passes')} of {micro_batches} on {counted(ranks, 'pipeline rank')}"
    )
    recomputes = any(layer.recompute != "none" for layer in plan.layers)
    backward = ("backward of inputs" if zero_bubble else "backward") + (", with recompute" if recomputes else "")
    names = _PASS_NAMES | {"backward": backward}
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
