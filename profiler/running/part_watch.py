"""Which submodules of a layer can be run again by themselves in the backward, and what is kept when they are."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise

from ..model.model_profile import MOST_PARTS
from .meters import Op, Size, Storages

PeakOf = Callable[[int, int], Size]

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""(parts inside of which a tensor is saved, parts that are given it), each by number."""

_NARROW = 2
"""Bytes of an element in comparisons of size."""


@dataclass
class _Call:
    """One call of a module. outer: number of the call around it. begin, saved_after: numbers of operators that had run
    when it began, and when it last saved a tensor; moments: lengths of the storages' log at these two times."""

    name: str
    outer: int
    begin: int
    given: set[int]
    moments: tuple[int, int]
    saved_after: int = 0


@dataclass
class ModuleCalls:
    """Calls of the modules in a layer, and where in them tensors were saved.

    Part of a layer: a module that runs once, saves more that nobody else does than it is given, and finds what it was
    given when it runs again. Its forward is repeated by torch.utils.checkpoint: kept are what it is given and what is
    saved elsewhere.
    """

    storages: Storages
    left_out: AbstractSet[int] = frozenset()
    """Storages that count elsewhere: those of parameters, and of tensors that arrive in the layer or leave it."""
    returned: AbstractSet[int] = frozenset()
    arrived: AbstractSet[int] = frozenset()
    _calls: list[_Call] = field(default_factory=list)
    _running: list[int] = field(default_factory=list)
    _saved: list[tuple[int, int]] = field(default_factory=list)
    _places: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    @property
    def innermost(self) -> int:
        """The call that runs now; -1 between modules."""
        return self._running[-1] if self._running else -1

    def begin(self, name: str, given: set[int], num_ops: int) -> None:
        """Note that a module is called with tensors of these storages."""
        moment = len(self.storages.log)
        self._calls.append(_Call(name, self.innermost, num_ops, given, (moment, moment)))
        self._running.append(len(self._calls) - 1)

    def end(self) -> None:
        """Note that the running module has returned."""
        self._running.pop()

    def save(self, storage: int, num_ops: int) -> None:
        """Note that autograd saves a tensor of this storage for backward."""
        self._saved.append((storage, self.innermost))
        for call in self._running:
            item = self._calls[call]
            item.saved_after, item.moments = num_ops, (item.moments[0], len(self.storages.log))

    def parts(self, ops: Sequence[Op]) -> tuple[str, ...]:
        """Names of the layer's parts in the order in which they run: at most so many, those that give up most bytes.
        ops: all of the forward."""
        outermost = [i for i, call in enumerate(self._calls) if call.outer == -1]
        while len(outermost) == 1 and (inside := [i for i, c in enumerate(self._calls) if c.outer == outermost[0]]):
            outermost = inside
        count = defaultdict[str, int](int)
        for call in self._calls:
            count[call.name] += 1
        able = tuple(
            self._calls[i].name for i in outermost if count[self._calls[i].name] == 1 and self._is_able(i, ops)
        )
        sizes = self.sizes(able)
        freed = {name: sizes.get(((i,), ()), Size()) - sizes.get(((), (i,)), Size()) for i, name in enumerate(able)}
        width = {name: _NARROW * size.elements + size.other_bytes for name, size in freed.items()}
        most = sorted((name for name in able if width[name] > 0), key=lambda name: -width[name])[:MOST_PARTS]
        return tuple(name for name in able if name in most)

    def _is_able(self, index: int, ops: Sequence[Op]) -> bool:
        """Whether a module would find its inputs unchanged if it ran again: nothing writes into them, then or later.
        Its name must also be fit to be written in a plan."""
        call = self._calls[index]
        if not call.name or "+" in call.name or any(letter.isspace() for letter in call.name):
            return False
        written = {view.storage for op in ops[call.begin :] if op.name.endswith("_") for view in op.outputs}
        return not call.given & (written | self.returned)

    def reads_arriving(self, part: str) -> bool:
        """Whether a part is given a tensor from an earlier layer."""
        return any(call.name == part and call.given & self.arrived for call in self._calls)

    def sizes(self, parts: tuple[str, ...]) -> dict[Key, Size]:
        """(parts that save a tensor, parts that are given it) -> bytes of all such tensors, without those that are kept
        whatever is recomputed. If some parts are recomputed, a tensor is kept if one of these is given it, or if
        another part saves it."""
        place = self._place_of_calls(parts)
        given: dict[int, set[int]] = defaultdict(set)
        saved: dict[int, set[int]] = defaultdict(set)
        for call in self._calls:
            if call.name in parts:
                for storage in call.given:
                    given[storage].add(parts.index(call.name))
        for storage, call_index in self._saved:
            saved[storage].add(place[call_index])
        found: dict[Key, Size] = defaultdict(Size)
        in_fp32: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for storage in given.keys() | saved.keys():
            root = self.storages.in_fp32(storage)
            in_fp32[root][0].update(saved[storage])
            in_fp32[root][1].update(given[storage])
            if storage not in self.left_out and -1 not in saved[storage]:
                size = self.storages.sizes.get(storage, Size())
                found[_key(saved[storage], given[storage])] += Size(size.elements, size.other_bytes, -size.fp32_bytes)
        for root in in_fp32.keys() - {self.storages.in_fp32(storage) for storage in self.left_out}:
            saved_in, given_to = in_fp32[root]
            if -1 not in saved_in:
                size = self.storages.sizes.get(root, Size())
                found[_key(saved_in, given_to)] += Size(in_fp32=size.fp32_bytes)
        return {key: size for key, size in found.items() if size != Size()}

    def peaks(self, parts: tuple[str, ...], backward: Sequence[Op], peak_of: PeakOf, saved: Size) -> list[Size]:
        """[parts that have not begun their backward] -> the peak beyond `saved` until the next one begins, with what
        the forward of the one that has begun holds for a while, if it runs again first. backward: operators of the
        backward; peak_of: the most that lived between two moments."""
        if not parts or not backward:
            return [Size()] * (len(parts) + 1 if parts else 0)
        ahead = len(parts)
        starts = {ahead: backward[0].moment}
        for before, op in pairwise(backward):
            here = next((i for i, name in enumerate(parts) if f"{op.module}.".startswith(f"{name}.")), ahead)
            if here < ahead:
                ahead = here
                starts[ahead] = before.moment
        found: list[Size] = []
        ends, end = {}, backward[-1].moment
        for number in sorted(starts):
            ends[number], end = end, starts[number]
        sizes = self.sizes(parts)
        for number in range(len(parts), -1, -1):
            if number not in starts:  # no part begins then
                found.append(found[-1] if found else Size())
                continue
            most = peak_of(starts[number], ends[number])
            if number < len(parts):
                call = next(c for c in self._calls if c.name == parts[number])
                level, first = peak_of(starts[number], starts[number]), peak_of(call.moments[0], call.moments[0])
                again = level + peak_of(*call.moments) - first - sizes.get(((number,), ()), Size())
                most = max(most, again, key=lambda size: _NARROW * size.elements + size.other_bytes)
            found.append(most - saved)
        return found[::-1]

    def within(self, call: int, after: int, parts: tuple[str, ...], last: bool = False) -> str:
        """The part that runs an operator again; "" if none does: a part stops after the last tensor that it saves.
        call: number of the module call in which the operator ran. after: number of operators before it. last: whether
        that which comes with this last tensor counts, too."""
        place = self._place_of_calls(parts)[call]
        if place < 0:
            return ""
        saved_after = max(c.saved_after for c in self._calls if c.name == parts[place])
        return parts[place] if after < saved_after + last else ""

    def _place_of_calls(self, parts: tuple[str, ...]) -> list[int]:
        """[number of a call] -> number of the part that it is in, -1 for none; a last entry of -1 stands for "in no
        call"."""
        if parts in self._places:
            return self._places[parts]
        places: list[int] = []
        for call in self._calls:
            around = places[call.outer] if call.outer >= 0 else -1
            places.append(parts.index(call.name) if call.name in parts else around)
        self._places[parts] = [*places, -1]
        return self._places[parts]


def _key(saved: set[int], given: set[int]) -> Key:
    return tuple(sorted(saved)), tuple(sorted(given))
