"""Pins from the words of the flags: read, checked against each other, and put back into words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast, get_args

from .pins import Pins
from .schedules import ZERO_BUBBLE, Schedule
from .setups import parse_limits, parse_pins

_FORBIDDEN: dict[str, tuple[tuple[str, object], ...]] = {
    "tensor": (("tensor", 1),),
    "pipeline": (("pipeline", 1),),
    "context": (("context", 1),),
    "expert": (("expert", 1),),
    "sequence": (("sequence_ways", 1),),
    "data": (("data_replicate", 1), ("data_shard", 1)),
    "ddp": (("data_replicate", 1),),
    "data_replicate": (("data_replicate", 1),),
    "fsdp": (("data_shard", 1),),
    "data_shard": (("data_shard", 1),),
    "recompute": (("recompute", "none"),),
    "virtual_stages": (("virtual_stages", 1),),
}
"""Word after --forbid -> (field of Pins, value) that it fixes."""

_FORBIDDEN_SCHEDULES: dict[str, tuple[Schedule, ...]] = {
    **{name: (name,) for name in get_args(Schedule) if name != "none"},
    "zero-bubble": ZERO_BUBBLE,
}
"""Word after --forbid -> schedules that it excludes."""

_OF_SCHEDULE: dict[str, tuple[int, int | None]] = {
    "1f1b": (1, 1),
    "gpipe": (1, 1),
    "zb-h1": (1, 1),
    "zb-h2": (1, 1),
    "zb-v": (2, 2),
    "interleaved": (2, None),
}
"""Schedule -> (fewest, most) stages on each rank; None: any number."""


_OF_ZERO: dict[tuple[str, object], str] = {
    ("reshard", True): "zero=3",
    ("reshard", False): "zero below 3",
    ("gradient_sync", "every"): "zero above 1",
    ("gradient_sync", "last"): "zero=1",
}
"""(field of Pins, value), as --pin zero=N sets it -> the same in words."""

_OFFERS = ("everything", "parts", "offload_activations")
"""Fields of Pins that add choices for layers, instead of restricting them."""


@dataclass(frozen=True)
class _Restriction:
    """One thing that the user has said: the flag as written, and the field of Pins with the value that it sets."""

    words: str
    name: str
    value: object


def read_pins(
    pin: Sequence[str] = (),
    most: Sequence[str] = (),
    forbid: Sequence[str] = (),
    recompute: str | None = None,
    micro_batch: int | None = None,
    everything: bool = False,
) -> Pins:
    """Pins that --pin, --max, --forbid, --recompute and --micro-batch set together. everything: --space full.

    Raises ValueError that names the word which is wrong, or the two words which contradict each other.
    """
    said = [_Restriction(f"--pin {text}", name, value) for text in pin for name, value in parse_pins([text]).items()]
    said = _with_data_ranks_as_said(said)
    if recompute is not None:
        ((name, value),) = parse_pins([f"recompute={recompute}"], "--recompute").items()
        said.append(_Restriction(f"--recompute {recompute}", name, value))
    if micro_batch is not None:
        said.append(_Restriction(f"--micro-batch {micro_batch}", "micro_batch", micro_batch))
    without: list[_Restriction] = []
    for name in forbid:
        for choice in _forbidden(name):
            (without if choice.name == "without" else said).append(choice)
    limits = [_Restriction(f"--max {text}", name, value) for text in most for name, value in parse_limits(text).items()]
    for first, second in _contradictions(said, limits, without):
        raise ValueError(f"{first.words} contradicts {second.words}: leave out one of them")
    values = {choice.name: choice.value for choice in said}
    return Pins(
        everything=everything,
        **values,  # type: ignore[arg-type]
        most=tuple(sorted({(choice.name, cast(int, choice.value)) for choice in limits})),
        without=tuple(dict.fromkeys(cast(Schedule, choice.value) for choice in without)),
    )


def _with_data_ranks_as_said(said: list[_Restriction]) -> list[_Restriction]:
    """What was said, without the number of replicas that zero=N implies, if other words give degrees of data ranks."""
    by_zero = {choice.words for choice in said if choice.name == "gradient_sync"}
    others = any(c.name in ("data_replicate", "data_shard") and c.words not in by_zero for c in said)
    return [c for c in said if not (others and c.words in by_zero and c.name == "data_replicate")]


def _forbidden(name: str) -> Iterator[_Restriction]:
    key = name.strip().lower()
    words = f"--forbid {name}"
    pinned = _FORBIDDEN.get(key.replace("-", "_"), ())
    schedules = _FORBIDDEN_SCHEDULES.get(key.replace("_", "-"), ())
    if not pinned and not schedules:
        known = ", ".join(dict.fromkeys((*_FORBIDDEN, *_FORBIDDEN_SCHEDULES)))
        raise ValueError(f"{words}: there is nothing of that name; choose one of {known}")
    yield from (_Restriction(words, field, value) for field, value in pinned)
    yield from (_Restriction(words, "without", schedule) for schedule in schedules)


def _contradictions(
    said: Sequence[_Restriction], limits: Sequence[_Restriction], without: Sequence[_Restriction]
) -> Iterator[tuple[_Restriction, _Restriction]]:
    """Pairs of restrictions that no plan on any cluster can satisfy together."""
    for i, second in enumerate(said):
        yield from ((first, second) for first in said[:i] if first.name == second.name and first.value != second.value)
        yield from ((second, limit) for limit in limits if limit.name == second.name and _above(second, limit))
        yield from ((second, other) for other in without if second.name == "schedule" and second.value == other.value)
    by_name = {choice.name: choice for choice in said}

    def both(first: str, second: str, clash: bool) -> Iterator[tuple[_Restriction, _Restriction]]:
        if clash:
            yield by_name[first], by_name[second]

    value = {name: choice.value for name, choice in by_name.items()}
    schedule, chunks, stages = (value.get(name) for name in ("schedule", "virtual_stages", "pipeline"))
    if schedule is not None and stages is not None:
        yield from both("pipeline", "schedule", (schedule == "none") != (stages == 1))
    if chunks is not None and stages is not None:
        yield from both("pipeline", "virtual_stages", stages == 1 and chunks != 1)
    if chunks is not None and schedule is not None and schedule != "none":
        fewest, most = _OF_SCHEDULE[cast(str, schedule)]
        outside = cast(int, chunks) < fewest or (most is not None and cast(int, chunks) > most)
        yield from both("schedule", "virtual_stages", outside)
    if "recompute" in value and "parts" in value:
        yield from both("recompute", "parts", True)
    if "recompute" in value and schedule is not None:
        yield from both("recompute", "schedule", value["recompute"] != "none" and schedule in ZERO_BUBBLE)
    if "sequence" in value and "tensor" in value:
        yield from both("sequence", "tensor", value["sequence"] is True and value["tensor"] == 1)
    if "context_kind" in value and "context" in value:
        yield from both("context_kind", "context", value["context"] == 1)
    ways = value.get("sequence_ways")
    if ways is None:
        return
    if "sequence" in value:
        yield from both("sequence", "sequence_ways", value["sequence"] is True and ways == 1)
    if "context" in value:
        yield from both("context", "sequence_ways", cast(int, ways) % cast(int, value["context"]) != 0)
    if "tensor" in value and "context" in value:
        context, tensor = cast(int, value["context"]), cast(int, value["tensor"])
        yield from both("tensor", "sequence_ways", ways not in (context, context * tensor))


def _above(choice: _Restriction, limit: _Restriction) -> bool:
    return isinstance(choice.value, int) and choice.value > cast(int, limit.value)


def in_words(pins: Pins) -> dict[str, Pins]:
    """Pin, in words -> all pins except this one."""
    found: dict[str, Pins] = {}
    if pins.framework is not None:
        found[f"--for {pins.framework.target}"] = replace(pins, framework=None)
    for field in fields(pins):
        value = getattr(pins, field.name)
        if field.name == "offload_optimizer" and value:
            found["offload=optimizer"] = replace(pins, offload_optimizer=False)
        if field.name in ("most", "without", "framework", "offload_optimizer", *_OFFERS) or value is None:
            continue
        name = "sequence" if field.name == "sequence_ways" else field.name
        shown = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
        words = _OF_ZERO.get((name, value), f"{name}={shown}")
        found[words] = replace(pins, **{field.name: None})  # type: ignore[arg-type]
    for name, limit in pins.most:
        found[f"{name} at most {limit}"] = replace(pins, most=tuple(m for m in pins.most if m != (name, limit)))
    for schedule in pins.without:
        found[f"no {schedule}"] = replace(pins, without=tuple(s for s in pins.without if s != schedule))
    return found
