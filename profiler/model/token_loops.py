"""Models that go through a sequence token by token (scans without a fused kernel): how they are told, and what makes
their operators, as many as there are tokens, one row each."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from .fake import FakeModel, fake_model
from .gpu_kernel_emulation import Mode
from .loaded import LoadedModel
from .model_profile import Amount, Bytes, Costs, LayerClass, ModelProfile, OpProfile

_FEWEST_TOKENS, _MOST_TOKENS = 16, 64
_MOST_OPERATORS = 10_000
"""Of one forward: what a second or two go through."""

FEWEST_OPERATORS = 256
"""Operators of one module, or calls of it, before it is asked whether they are as many as there are tokens."""


class TokenByTokenError(Exception):
    """One module has run at least as many operators, or times, as a sample has tokens."""


def few_tokens(loaded: LoadedModel, knows_layout: bool = False) -> int | None:
    """Tokens per sample of the longest of three runs from which longer samples follow, as many as a short forward goes
    through; a peak follows if what is largest then is so in longer samples. None if the forward does not run an
    operator for each token.
    """
    fake = fake_model(loaded, torch.bfloat16, knows_layout)
    at = (_FEWEST_TOKENS // 4, _FEWEST_TOKENS // 2)
    try:
        few, more = (_num_operators(fake, length) for length in at)
    except ValueError:
        return None
    for_each = (more - few) / (at[1] - at[0])
    if for_each < 1:
        return None
    tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, int(_MOST_OPERATORS / for_each)))
    return 1 << (tokens.bit_length() - 1)


def _num_operators(fake: FakeModel, seq_len: int) -> int:
    batch, counter = fake.batch(1, seq_len), _Counter()
    with fake.running(), counter:
        fake.loss(batch)
    return counter.operators


class _Counter(Mode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators += int(func.namespace != "prim")
        return func(*args, **(kwargs or {}))


def merged(profile: ModelProfile) -> ModelProfile:
    """The profile, and those at other lengths, with one row for operators of a module that are more for more tokens."""
    runs = (profile, *profile.other_lengths)
    classes = [_merged_classes(same) for same in zip(*(run.classes for run in runs), strict=True)]
    by_run = zip(runs, zip(*classes, strict=True), strict=True)
    first, *others = (run.model_copy(update={"classes": of_run}) for run, of_run in by_run)
    return first.model_copy(update={"other_lengths": tuple(others)})


def _merged_classes(same: Sequence[LayerClass]) -> list[LayerClass]:
    """[run] -> the class as it is seen at that length."""
    found: list[dict[str, Any]] = [{} for _ in same]
    for name in ("whole", "tensor", "sequence"):
        for update, costs in zip(found, _merged_costs([getattr(each, name) for each in same]), strict=True):
            update[name] = costs
    for name in ("tensor_alone", "sequence_without"):
        by_cut = [_merged_costs(cut) for cut in zip(*(getattr(each, name) for each in same), strict=True)]
        for i, update in enumerate(found):
            update[name] = tuple(costs[i] for costs in by_cut)
    return [each.model_copy(update=update) for each, update in zip(same, found, strict=True)]


def _merged_costs(same: Sequence[Costs | None]) -> list[Costs | None]:
    """[run] -> the costs; None where one run has none."""
    known = [costs for costs in same if costs is not None]
    counts = [Counter(map(_alike, costs.operators)) for costs in known]
    keys = {key for count in counts for key in count if any(count[key] != other[key] for other in counts)}
    if not keys or len(known) < len(same):
        return list(same)
    return [costs.model_copy(update={"operators": tuple(_rows(costs.operators, keys))}) for costs in known]


_Key = tuple[str, str, str, str, bool, bool, str]


def _alike(op: OpProfile) -> _Key:
    return op.name, op.module, op.kind, op.part, op.repeated, op.core, op.within


def _rows(operators: Sequence[OpProfile], merges: Collection[_Key]) -> Iterator[OpProfile]:
    """The operators in order, those of a key that merges as one, where the first of them is."""
    of_key: dict[_Key, list[OpProfile]] = defaultdict(list)
    for op in operators:
        of_key[_alike(op)].append(op)
    for op in operators:
        key = _alike(op)
        if key not in merges:
            yield op
        elif of_key[key][0] is op:
            yield _sum(of_key[key])


def _sum(operators: Sequence[OpProfile]) -> OpProfile:
    moved = Bytes(
        elements=_added([op.moved.elements for op in operators]),
        other_bytes=_added([op.moved.other_bytes for op in operators]),
    )
    kernels = sum(op.kernels for op in operators)
    update = {"kernels": kernels, "flops": _added([op.flops for op in operators]), "moved": moved}
    return operators[0].model_copy(update=update)


def _added(amounts: Sequence[Amount]) -> Amount:
    fixed, per_sample, cut_fixed, cut_per_sample = (sum(each) for each in zip(*amounts, strict=True))
    return (fixed, per_sample, cut_fixed, cut_per_sample)
