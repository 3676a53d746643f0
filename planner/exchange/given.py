"""Settings of other frameworks in the form in which users have them (a launch script, arguments, a file, a recipe),
read into a Layout."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...profiler.model.model_profile import ModelProfile
from .accelerate import read_accelerate
from .deepspeed import read_deepspeed
from .from_flags import read_document
from .imports import Layout
from .launch import Command, read_command
from .megatron import FLAGS as MEGATRON
from .megatron import read_megatron
from .recipes import nemo_recipe, renamed, titan_function, titan_functions, titan_toml
from .targets import NAMES
from .torchtitan import FLAGS as TORCHTITAN
from .torchtitan import read_torchtitan

Kind = Literal["megatron", "nemo", "torchtitan", "accelerate", "deepspeed"]

_FUNCTION = re.compile(r"(\S+\.py):(\w+)\s*(.*)", re.DOTALL)
_TITAN_FILES = ("--job.config_file", "--job.config-file", "--config_file")
_REGISTRY = "config_registry.py"
_SWITCHES = frozenset(
    f"--{section}.{way}{last}"
    for section, _, last in (name.rpartition(".") for name in TORCHTITAN.switches)
    for way in ("", "no-", "no_")
)


@dataclass(frozen=True)
class Given:
    """Settings that have been read, before the number of GPUs and the model are known. num_devices: number of GPUs by
    the settings, None if they do not say."""

    kind: Kind
    command: Command
    document: Mapping[str, Any] = field(default_factory=dict)
    num_devices: int | None = None

    def layout(self, num_devices: int, profile: ModelProfile) -> Layout:
        """The layout that the settings describe. Raises ValueError for values that are wrong, not understood or open,
        or for another number of GPUs."""
        if self.num_devices is not None and self.num_devices != num_devices:
            raise ValueError(
                f"--gpus {num_devices}, but the settings start {self.num_devices} processes: leave out --gpus, or "
                "change one of them"
            )
        folder = self.command.folder
        if self.kind == "accelerate":
            return read_accelerate(self.document, num_devices, profile, folder)
        if self.kind == "deepspeed":
            return read_deepspeed(self.document, num_devices)
        if self.kind in ("megatron", "nemo"):
            self.command.needed(MEGATRON.known | MEGATRON.refused.keys())
            found = read_megatron(self.command.words, num_devices, profile)
        else:
            self.command.needed(_titan_options(self.command))
            found = read_torchtitan(self.command.words, num_devices, profile)
        return replace(found, notes=(*self.command.notes, *found.notes))


def read_given(kind: Kind, text: str, environment: Mapping[str, str] | None = None) -> Given:
    """Settings from the value of a flag: arguments, or the path of a file. environment: variables for a script that
    does not set them (None: those of this process). Raises ValueError for what cannot be read."""
    path = Path(text)
    if kind in ("accelerate", "deepspeed"):
        document = read_document(path)
        count = document.get("num_processes") if kind == "accelerate" else None
        command = Command((), folder=path.parent)
        return Given(kind, command, document, count if isinstance(count, int) and count > 0 else None)
    if kind == "nemo":
        recipe = nemo_recipe(path)
        return Given(kind, Command(recipe.words, None, recipe.open_values, recipe.notes, path.parent))
    command = (
        _titan(text, environment)
        if kind == "torchtitan"
        else read_command(text, MEGATRON.known, environment, MEGATRON.switches)
    )
    if not command.words:
        raise ValueError(f"{text!r} holds no settings of {NAMES['torchtitan' if kind == 'torchtitan' else 'megatron']}")
    return Given(kind, command, num_devices=command.num_devices)


def _titan_options(command: Command) -> list[str]:
    """Those options of a torchtitan command that have open values and describe a layout, as spelled there."""
    spelled = list(command.open_values or {})
    known = {*TORCHTITAN.known, *TORCHTITAN.refused}
    return [name for name in spelled if renamed(name.removeprefix("--").replace("-", "_")) in known]


def _titan(text: str, environment: Mapping[str, str] | None) -> Command:
    """torchtitan's settings, from arguments or a script, a TOML file, or a function of a configuration file."""
    function = _FUNCTION.fullmatch(text.strip())
    if function is not None:
        file, name, rest = Path(function[1]), function[2], function[3]
        if not file.is_file():
            raise ValueError(f"no such file: {file}")
        own = read_command(rest, _spellings(), environment, _SWITCHES) if rest.strip() else Command(())
        recipe = titan_function(file, name)
        return _joined(recipe.words, recipe.open_values, own, file.parent)
    if text.strip().endswith(".toml"):
        if not Path(text.strip()).is_file():
            raise ValueError(f"no such file: {text.strip()}")
        return Command(titan_toml(Path(text.strip())).words, folder=Path(text.strip()).parent)
    command = read_command(text, _spellings(), environment, _SWITCHES)
    named = _value(command.words, _TITAN_FILES)
    if named is not None:
        candidates = [command.folder / named, Path(named), command.folder / Path(named).name]
        file = next((path for path in candidates if path.is_file()), Path(named))
        if not file.is_file():
            raise ValueError(f"{named}, which holds the settings, is not there: put it beside the script")
        return _joined(titan_toml(file).words, {}, command, command.folder)
    config, registry = _value(command.words, ("--config",)), command.folder / _REGISTRY
    if config is not None and registry.is_file() and config in titan_functions(registry):
        recipe = titan_function(registry, config)
        words = _without(command.words, "--config")
        return _joined(recipe.words, recipe.open_values, replace(command, words=words), command.folder)
    return command


def _joined(words: tuple[str, ...], waits: Mapping[str, tuple[str, ...]], command: Command, folder: Path) -> Command:
    """The command with the words of a file before its own, which take precedence. waits: option of the file -> what its
    value waits for."""
    own = {word.partition("=")[0] for word in command.words if word.startswith("--")}
    left = {name: names for name, names in waits.items() if name not in own}
    mode = [word for word in command.words if word.startswith("activation_checkpoint:")]
    kept = tuple(word for word in words if not (mode and word.startswith("activation_checkpoint:")))
    open_values = left | dict(command.open_values or {})
    return replace(command, words=(*kept, *command.words), open_values=open_values, folder=folder)


def _spellings() -> set[str]:
    """All spellings of torchtitan's options on a command line, with present and earlier names."""
    names = {*TORCHTITAN.known, *TORCHTITAN.refused, "job.config_file", "job.config-file", "config_file", "config"}
    names |= {"training.batch_size", "training.data_parallel_degree", "training.tensor_parallel_degree"}
    names |= {"experimental.pipeline_parallel_degree", "experimental.context_parallel_degree", "training.compile"}
    return {f"--{name}" for name in names} | {f"--{name.replace('_', '-')}" for name in names}


def _value(words: tuple[str, ...], options: tuple[str, ...]) -> str | None:
    for place, word in enumerate(words):
        name, mark, value = word.partition("=")
        if name in options:
            return value if mark else words[place + 1] if place + 1 < len(words) else None
    return None


def _without(words: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The words without an option and its value."""
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    return words[:place] + words[place + (1 if "=" in "".join(words[place : place + 1]) else 2) :]
