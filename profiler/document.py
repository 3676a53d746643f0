"""Frozen and strict values at file boundaries; and documents of a known version, which are written whole or not at
all."""

import difflib
import json
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

OURS = "meshwright-"
"""The kind of each document of ours begins so."""


def meant_by(path: Path, suffixes: Collection[str]) -> Path | None:
    """For a path that does not exist: the file or folder beside it with the nearest name and one of these suffixes;
    None if there is none. "" stands for folders and for files without a suffix."""
    folder = path.parent if path.parent.is_dir() else Path()
    try:
        names = [each.name for each in folder.iterdir() if ("" if each.is_dir() else each.suffix) in suffixes]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return folder / near[0] if near else None


class Frozen(BaseModel):
    """A value that is checked when it is made, knows all its fields and never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Frozen):
    """A file of ours: JSON that says of which kind and of which version it is."""

    schema_version: int
    kind: str

    made_by: ClassVar[str]
    """The command that makes such a file, {path}."""

    def save(self, path: Path) -> None:
        """Write the document; the file appears whole or not at all. Raises ValueError where it cannot be written."""
        write_file(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a document. Raises ValueError for missing, broken and foreign files and for those of other versions."""
        check_ends(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            meant = meant_by(path, (".json",))
            way_out = f"; did you mean {meant}?" if meant else f". Make one with: {cls._command(path)}"
            raise ValueError(f"no such {cls.noun()}: {path}{way_out}") from None
        except UnicodeDecodeError as error:
            raise ValueError(cls._not_json(path, error)) from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            cls._check_head(path, text)
            way_out = f"make it again with: {cls._command(path)}"
            raise ValueError(f"{path} is not a valid {cls.noun()}: {in_a_sentence(error)}; {way_out}") from None
        if not {"schema_version", "kind"} <= found.model_fields_set:
            cls._check_head(path, text)
        return found

    @classmethod
    def noun(cls) -> str:
        """How people call such a document: "plan"."""
        return str(cls.model_fields["kind"].default).removeprefix(OURS)

    @classmethod
    def _check_head(cls, path: Path, text: str) -> None:
        """Raises ValueError if the text is no JSON of this kind and version."""
        noun, kind, version = cls.noun(), cls.model_fields["kind"].default, cls.model_fields["schema_version"].default
        try:
            data = parsed(json.loads, text)
        except ValueError as error:
            raise ValueError(cls._not_json(path, error)) from None
        if not isinstance(data, dict) or data.get("kind") != kind:
            raise ValueError(f'{path} is not a Meshwright {noun}; a {noun} says "kind": "{kind}"')
        if data.get("schema_version") != version:
            raise ValueError(
                f"{path} is not a {noun} this version reads: it has schema_version {data.get('schema_version')!r}, "
                f"this version reads {version}; update meshwright, or make it again with: {cls._command(path)}"
            )

    @classmethod
    def _not_json(cls, path: Path, error: ValueError) -> str:
        return f"{path} is not JSON ({error}); make the {cls.noun()} again with: {cls._command(path)}"

    @classmethod
    def _command(cls, path: Path) -> str:
        return cls.made_by.format(path=path)


def check_ends(path: Path) -> None:
    """Raises ValueError for a device (/dev/zero, /dev/full): reading it would never end."""
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path} is a device, which has no end; give a file")


def parsed(parse: Callable[[str], Any], text: str) -> Any:
    """parse(text). Raises ValueError, also for a text that is nested too deep to be parsed."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def in_a_sentence(error: ValidationError) -> str:
    """The first error as "place: what is wrong"."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the document"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


_ENDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_OUT_OF_RANGE = (*_ENDS, "finite_number", "int_parsing_size")


def rule_of(error: ValidationError, model: type[BaseModel]) -> str:
    """What the first wrong value should be, in words; for a number the whole range, and not only the end that it
    exceeds."""
    first = error.errors()[0]
    if first["type"] in _OUT_OF_RANGE:
        ends = _ends(model, list(first["loc"]))
        lows = {"ge": "from {:g}", "gt": "above {:g}"}
        highs = {"le": "to {:g}" if "ge" in ends else "at most {:g}", "lt": "below {:g}"}
        low = next((words.format(ends[name]) for name, words in lows.items() if name in ends), "")
        high = next((words.format(ends[name]) for name, words in highs.items() if name in ends), "")
        if low and high:
            return f"it should be {low} {'' if high.startswith('to') else 'and '}{high}"
    if first["type"] == "missing":
        return "it is missing"
    if first["type"] == "extra_forbidden":
        names = _names_in(model, list(first["loc"][:-1]))
        return "there is nothing of that name" + (f"; there are {', '.join(names)}" if names else "")
    if first["type"] in ("model_type", "dict_type"):
        return "it should be a table of names and values, { name = value, ... }"
    return first["msg"].removeprefix("Value error, ").replace("Input should", "it should")


def _names_in(model: type[BaseModel], where: list[int | str]) -> list[str]:
    """Names of the fields of the table at `where` in a model; [] if anything but tables leads there."""
    for step in where:
        field = model.model_fields.get(str(step))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return sorted(model.model_fields)


def _ends(kind: Any, where: list[int | str]) -> dict[str, float]:
    """Ends of the range of the number at `where` in a model (or in a dictionary or tuple in it): {"ge": 0, "lt": 1},
    with pydantic's names."""
    rules: list[Any] = []
    for step in where:
        rules = []
        while get_origin(kind) in (Union, UnionType):
            kind = next(part for part in get_args(kind) if part is not NoneType)
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(step))
            if field is None:
                return {}
            kind, rules = field.annotation, list(field.metadata)
        else:
            parts = [part for part in get_args(kind) if part is not ...]
            if not parts:
                return {}
            kind = (
                parts[-1] if get_origin(kind) is dict or not isinstance(step, int) else parts[min(step, len(parts) - 1)]
            )
    while get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Annotated:
        rules += [rule for part in get_args(kind)[1:] for rule in getattr(part, "metadata", [part])]
    return {name: getattr(rule, name) for rule in rules for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)}


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all, as `replace_file` does. Raises ValueError where it cannot be."""
    try:
        replace_file(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}; choose another place") from None


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in the place of what is there, at once: readers find the one or the other. Raises OSError, and leaves
    nothing half-written behind. What is there and is no file, as /dev/stdout, is written to as it is."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
