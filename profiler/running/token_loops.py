"""Models that run through a sequence token by token (scans without a fused kernel): how they are found; and profiles of
them, with one row for operators that run as often as there are tokens."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.loaded import LoadedModel
from ..model.model_profile import Amount, Bytes, Costs, LayerClass, ModelProfile, OpProfile
from .fake import FakeModel, fake_model
from .gpu_kernel_emulation import Mode

_FEWEST_TOKENS, _MOST_TOKENS = 8, 32
_FULL_PIECES = (128, 512)
"""Lengths that are tried to find a scan in pieces: two pieces or more fit into the first length from which on more
tokens mean more operators in proportion. Runs then have twice as many tokens or more: with fewer, tensors as large as
weights would outweigh those that grow with tokens."""

_MOST_OPERATORS = 10_000
"""Most operators of one forward: it takes a second or two."""

FEWEST_OPERATORS, OPERATORS_OF_LOOPS = 256, 2048
"""FEWEST_OPERATORS: with fewer operators in a module, or calls of it, it is not asked whether their number grows with
the tokens. OPERATORS_OF_LOOPS: with so many it is always asked, as for a long sequence in pieces."""


@dataclass(frozen=True)
class FewTokens:
    """Lengths of three runs from which costs of longer samples follow. tokens: per sample in the longest run. shorter:
    in the other two. note: how the model goes through its sequence, in words."""

    tokens: int
    shorter: tuple[int, int]
    note: str

    @classmethod
    def of(cls, tokens: int, how: str, each: str) -> "FewTokens":
        """Runs with so many tokens, three quarters and half of them: close enough that what is largest in the shortest
        run is largest in the longest."""
        note = (
            f"goes through a sequence {how}, in kernels for each {each}: a fused scan (as mamba-ssm and "
            "flash-linear-attention have them) would be faster than the plan says"
        )
        return cls(tokens, (3 * tokens // 4, tokens // 2), note)


def few_tokens(loaded: LoadedModel, knows_layout: bool = False, module: str = "") -> FewTokens | None:
    """Lengths for runs with few tokens, if the forward runs operators for each token, or for each piece of so many;
    else None. They are as long as a short forward allows: a peak at other lengths follows only if the same tensors make
    it. module: name of the module that is counted, and taken to stand for all of its type; '': all modules."""
    counting = _Counting(fake_model(loaded, torch.bfloat16, knows_layout), module)
    try:
        for_each = counting.for_each_token(_FEWEST_TOKENS // 2)
        if for_each >= 1:
            tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, int(_MOST_OPERATORS / for_each)))
            return FewTokens.of(1 << (tokens.bit_length() - 1), "token by token", "token")
        for length in _FULL_PIECES:
            for_each = counting.for_each_token(length)
            if for_each > 0 and for_each == counting.for_each_token(2 * length):
                return FewTokens.of(4 * length, "piece by piece", "piece")
    except ValueError:
        pass
    return None


class _Counting:
    """Counts the operators of a forward: of one module, times the number of modules of its type, or of all."""

    def __init__(self, fake: FakeModel, module: str) -> None:
        self._fake = fake
        self._module = fake.module.get_submodule(module) if module else None
        self._times = sum(type(other) is type(self._module) for other in fake.module.modules()) if module else 1
        self._known: dict[int, int] = {}

    def for_each_token(self, length: int) -> float:
        """Number of operators that one more token brings, on average from this length to twice as many."""
        if length < self._fake.loaded.fewest_tokens:
            return 0.0
        return self._times * (self._at(2 * length) - self._at(length)) / length

    def _at(self, seq_len: int) -> int:
        if seq_len not in self._known:
            batch, counter = self._fake.batch(1, seq_len), _Counter()
            with self._fake.running(), counter, self._counted_alone(counter), suppress(_Counted):
                self._fake.loss(batch)
            self._known[seq_len] = counter.operators
        return self._known[seq_len]

    @contextmanager
    def _counted_alone(self, counter: "_Counter") -> Iterator[None]:
        """While it lasts, only the first call of the module is counted, and ends the forward; if no module was named,
        everything is counted."""
        if self._module is None:
            yield
            return

        def begin(module: nn.Module, args: Any) -> None:
            counter.operators = 0

        def end(module: nn.Module, args: Any, output: Any) -> None:
            raise _Counted

        handles = (self._module.register_forward_pre_hook(begin), self._module.register_forward_hook(end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Counted(BaseException):
    """Ends a forward when the counted call has returned. It is not an Exception, so that no model catches it."""


class _Counter(Mode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators += int(func.namespace != "prim")
        return self.run(func, args, kwargs or {})


def merged(profile: ModelProfile) -> ModelProfile:
    """The profile, also at its other lengths, with one row in place of operators that a module runs more often for more
    tokens."""
    runs = (profile, *profile.other_lengths)
    classes = [_merged_classes(same) for same in zip(*(run.classes for run in runs), strict=True)]
    by_run = zip(runs, zip(*classes, strict=True), strict=True)
    first, *others = (run.model_copy(update={"classes": of_run}) for run, of_run in by_run)
    return first.model_copy(update={"other_lengths": tuple(others)})


def _merged_classes(same: Sequence[LayerClass]) -> list[LayerClass]:
    """[run] -> the class of layers in that run, with such operators merged."""
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
    """[run] -> the costs in that run, with such operators merged; as they are if a run has none."""
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
    """The operators in order; those with a key in `merges` become one, where the first of them is."""
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
