"""A profile at another sequence length, from profiles at three: every amount by a parabola through them."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .model_profile import ModelProfile, fingerprint_of

_OWN = ("seq_len", "fingerprint", "torch_version", "told", "notes", "other_lengths")
"""Fields of the profile at a new length that are not mixed from all runs."""


def at_seq_len(profile: ModelProfile, seq_len: int) -> ModelProfile:
    """The profile at `seq_len` tokens per sample.

    Exact where amounts grow with 1, s and s^2 (and any mixture); in between for others (padding, chunks, the peak of
    several operators). Raises ValueError where the profile holds one length only.
    """
    if seq_len == profile.seq_len:
        return profile
    if seq_len < 1:
        raise ValueError(f"--seq-len is {seq_len}; it must be at least 1, for example --seq-len 1024")
    if profile.seq_len is None:
        raise ValueError(f"--seq-len {seq_len} was given, but {profile.name} has no sequence; leave --seq-len out")
    if profile.longest_seq_len is not None and seq_len > profile.longest_seq_len:
        raise ValueError(
            f"--seq-len {seq_len}, but the table of positions of {profile.name} ends at {profile.longest_seq_len}: "
            f"give --seq-len {profile.longest_seq_len} or less, or profile a model with a longer table"
        )
    if not profile.other_lengths:
        raise ValueError(
            f"--seq-len {seq_len}, but the profile of {profile.name} holds {profile.seq_len} tokens per sample and no "
            "other length; make one that does: plan profile MODEL --lengths -o profile.json"
        )
    runs = (profile, *profile.other_lengths)
    weights = _lagrange([run.seq_len or 0 for run in runs], seq_len)
    documents = [run.model_dump(exclude=set(_OWN)) for run in runs]
    note = f"at {seq_len} tokens per sample: from runs at {', '.join(str(r.seq_len) for r in runs)}"
    found = ModelProfile.model_validate(
        {
            **_mixed(documents, weights),
            "seq_len": seq_len,
            "fingerprint": "",
            "torch_version": profile.torch_version,
            "told": profile.told,
            "notes": (*profile.notes, note),
        }
    )
    return found.model_copy(update={"fingerprint": fingerprint_of(found)})


class _WeightsOfRuns(NamedTuple):
    """Weights of several values: whole numerators over one denominator, so that whole amounts stay whole."""

    numerators: tuple[int, ...]
    over: int

    def of(self, values: Sequence[float]) -> float:
        """The sum of the values, each times its weight."""
        return sum(weight * value for weight, value in zip(self.numerators, values, strict=True)) / self.over


def _lagrange(points: Sequence[int], at: int) -> _WeightsOfRuns:
    """Weights of values at `points` that give the value of the polynomial through them at `at`."""
    others = [[other for other in points if other != point] for point in points]
    below = [math.prod(point - other for other in rest) for point, rest in zip(points, others, strict=True)]
    over = math.lcm(*below)
    above = (math.prod(at - other for other in rest) for rest in others)
    return _WeightsOfRuns(tuple(over // own * each for own, each in zip(below, above, strict=True)), over)


def _mixed(values: Sequence[Any], weights: _WeightsOfRuns) -> Any:
    """Numbers mixed with these weights, and everything else from the first run. Operators are matched by name, module
    and part."""
    first = values[0]
    if isinstance(first, bool | str) or any(value is None for value in values):
        return first
    if isinstance(first, int | float):
        mixed = first if all(v == first for v in values) else weights.of(values)
        return round(mixed) if isinstance(first, int) else mixed
    if isinstance(first, dict):
        return {key: _MIXED.get(key, _mixed)([v[key] for v in values], weights) for key in first}
    if any(len(v) != len(first) for v in values):
        raise ValueError("the model runs other layers at other lengths, so that no length follows from three of them")
    return tuple(_mixed(items, weights) for items in zip(*values, strict=True))


def _mixed_operators(runs: Sequence[Sequence[dict[str, Any]]], weights: _WeightsOfRuns) -> tuple[Any, ...]:
    """The operators of the first run, mixed. One that is missing in another run counts there as it is in the first."""
    tables = [_numbered(run) for run in runs]
    return tuple(_mixed([table.get(key, op) for table in tables], weights) for key, op in tables[0].items())


def _mixed_part_bytes(runs: Sequence[Sequence[dict[str, Any]]], weights: _WeightsOfRuns) -> tuple[Any, ...]:
    """The bytes that parts of a layer save and are given, mixed; matched by which parts these are. The entries are
    those of the first run; one that is missing in another run counts there as it is in the first."""
    tables = [{(item["saved_in"], item["given_to"]): item for item in run} for run in runs]
    return tuple(_mixed([table.get(key, item) for table in tables], weights) for key, item in tables[0].items())


_MIXED = {"operators": _mixed_operators, "part_bytes": _mixed_part_bytes}
"""Field of a document -> how its items are matched and mixed, if not in their order."""


def _numbered(operators: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    count: Counter[tuple[str, str, str]] = Counter()
    table = {}
    for op in operators:
        key = (op["name"], op["module"], op["part"])
        table[*key, count[key]] = op
        count[key] += 1
    return table
