"""What importers share: arguments and files of other frameworks as words, numbers and keys, with names checked."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ...profiler.document import check_ends, parsed
from ...profiler.model.model_profile import ModelProfile
from ..plan.block_row import BlockRow
from .targets import NAMES, Target

_NEAR = 0.87
"""Similarity (difflib's ratio) from which on an unknown name counts as a typing mistake for a known one."""


def text_of(path: Path) -> str:
    """Content of a text file. Raises ValueError if it is not text."""
    check_ends(path)
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text file") from None


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises ValueError if it holds none."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    once = _Once()
    if path.suffix == ".json":
        try:
            found = parsed(lambda text: json.loads(text, object_pairs_hook=once), text_of(path))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error})") from None
    else:
        try:
            yaml = import_module("yaml")  # not among our dependencies; transformers brings it
        except ImportError:
            raise ValueError(f"{path}: reading YAML needs PyYAML (pip install pyyaml)") from None
        try:
            found = parsed(lambda text: yaml.load(text, _loader(yaml, once)), text_of(path))
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{path} is not YAML ({error})") from None
    if once.problem:
        raise ValueError(f"{path}: {once.problem}: leave out one")
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings; a mapping of keys to values is read")
    return found


class _Once:
    """Makes mappings from pairs of key and value, and remembers the first key that has two different values. (Parsers
    would take the last value silently.)"""

    def __init__(self) -> None:
        self.problem = ""

    def __call__(self, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
        """The mapping of these pairs."""
        found: dict[Any, Any] = {}
        for key, value in pairs:
            if key in found and found[key] != value:
                self.problem = (
                    self.problem or f"{key} is there twice, as {found[key]} and as {value}, and the last would count"
                )
            found[key] = value
        return found


def _loader(yaml: Any, once: _Once) -> Any:
    """PyYAML's safe loader, which passes the keys of each mapping to `once` as they are written: keys merged from
    elsewhere may occur again."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Safe loader that checks keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            written = [pair for pair in node.value if pair[0].tag != "tag:yaml.org,2002:merge"]
            found: dict[Any, Any] = super().construct_mapping(node, deep=True)
            once([tuple(self.construct_object(part, deep=True) for part in pair) for pair in written])
            return found

    return Loader


def clash(said: Mapping[str, str], pairs: Iterable[tuple[str, str]], name: str) -> None:
    """Raise ValueError that names both options of a pair of which the framework `name` takes only one."""
    for one, other in pairs:
        if one in said and other in said:
            raise ValueError(f"{_shown(one, said)} and {_shown(other, said)}: {name} takes one of them; leave out one")


def idle(said: Mapping[str, str], needs: Iterable[tuple[str, str, bool]]) -> list[str]:
    """Notes on options that have no effect. needs: (option, in words what it lacks, whether it lacks it)."""
    return [
        f"{_shown(option, said)} has no effect {lacks}" for option, lacks, is_so in needs if is_so and option in said
    ]


def twice(options: Iterable[tuple[str, str, str]]) -> list[str]:
    """Notes on options that are given again with another value. options: (meaning, spelling, value) in order."""
    last: dict[str, tuple[str, str]] = {}
    found = []
    for meaning, spelled, value in options:
        before = last.get(meaning)
        if before is not None and before[1] != value:
            pair = (" ".join(each).strip().removesuffix(" true") for each in (before, (spelled, value)))
            found.append(f"{' and later '.join(pair)}: the last counts")
        last[meaning] = spelled, value
    return found


def _shown(option: str, said: Mapping[str, str]) -> str:
    flag = option if option.startswith("--") else f"--{option}"
    return flag if said[option] == "true" else f"{flag} {said[option]}"


@dataclass(frozen=True)
class Flags:
    """Options of a target that describe a layout, by what they take: sizes one whole number, words one of the listed
    words ((): any), lists several values, switches none. refused: option -> reason, for options that change the cost of
    a step but that no plan can express. left_out: option -> what is priced instead, for options that change it a
    little; a note says so. Exports are checked against the same table."""

    sizes: frozenset[str]
    words: Mapping[str, tuple[str, ...]]
    switches: frozenset[str]
    refused: Mapping[str, str]
    lists: frozenset[str] = field(default=frozenset())
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """All options that are understood."""
        return self.sizes | self.words.keys() | self.switches | self.lists

    @property
    def spelled(self) -> frozenset[str]:
        """All options on which something can be said: those that are understood, refused or left out."""
        return self.known | self.refused.keys() | self.left_out.keys()


class Sizes:
    """Reads whole numbers from options."""

    def __init__(self, said: Mapping[str, str], target: Target) -> None:
        self._said = said
        self._target = target

    def __call__(self, name: str, default: int = 1) -> int:
        """Value of an option as a number; `default` if the option is not given."""
        text = self._said.get(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            flag = name if name.startswith("--") else f"--{name}"
            raise ValueError(f"{flag} {text}: give a whole number of at least 1")
        return int(text)


def left_over(num_devices: int, used: int, what: str) -> int:
    """Number of data ranks left by degrees that multiply to `used`. Raises ValueError unless `used` divides the
    devices."""
    data, rest = divmod(num_devices, used)
    if rest or not data:
        raise ValueError(
            f"{what} = {used} does not divide {num_devices} GPUs: start a multiple of {used} processes (by --gpus or "
            "what launches them), or give other degrees"
        )
    return data


def check_known(name: str, known: Iterable[str]) -> None:
    """Raise ValueError if a name is nearly, but not quite, a known one."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    if near:
        raise ValueError(f"{name} is unknown; did you mean {near[0]}?")


def grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(option, words after it up to the next option) of each option."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, mark, value = word.partition("=")
            found.append((name, [value] if mark else []))
        elif not found:
            raise ValueError(f"cannot read {word!r}: arguments begin with an option such as --seq-length")
        else:
            found[-1][1].append(word)
    return found


def needed_row(row: BlockRow | None, profile: ModelProfile, pipeline: int) -> BlockRow:
    """The row of blocks. Raises ValueError if the model has none, because flags cannot count its blocks then."""
    if row is None:
        raise ValueError(
            f"a pipeline of {pipeline}: the flags count blocks, and {profile.name} is no single row of them; plan it "
            f"with: plan MODEL --pin pipeline={pipeline}"
        )
    return row


def stage_sizes(counts: Sequence[int], row: BlockRow | None) -> tuple[int, ...]:
    """Number of layers on each stage: its blocks, with what comes before the blocks on the first stage and what comes
    after them on the last."""
    if not counts or row is None:
        return ()
    sizes = list(counts)
    sizes[0] += row.before
    sizes[-1] += row.after
    return tuple(sizes)


def unknown_keys(found: Mapping[str, Any], known: Iterable[str], target: Target, where: str) -> list[str]:
    """Keys that are ignored. Raises ValueError for a key that is nearly a known one, or that the target would
    refuse."""
    keys = set(known)
    strange = [key for key in found if key not in keys]
    for key in strange:
        check_known(key, keys)
        if target == "accelerate":
            raise ValueError(f"{where}{key} is no key of {NAMES[target]}, which would refuse the file: leave it out")
    return [f"{where}{key}" for key in strange if key != "_comment"]


def mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The section of a document under a key; empty if there is none."""
    value = found.get(key)
    return value if isinstance(value, Mapping) else {}


def number(found: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """The whole number under a key, `default` if the key is missing. Raises ValueError for other values."""
    value = found.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}: {value}; give a whole number of at least {least}")
    return value
