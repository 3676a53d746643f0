"""Finds the command that trains in a launch script, or takes one as given: its arguments, and the number of GPUs that
it runs on."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .from_flags import text_of
from .shell import Script, is_open, open_names, read_script, shown

_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run", "accelerate.commands.launch", "deepspeed.launcher")
_NODES = ("--nnodes", "--num_machines", "--num_nodes")
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
_IN_ALL = ("--num_processes",)


@dataclass(frozen=True)
class Command:
    """Arguments of a program that trains. num_devices: GPUs that its launcher starts, None if not known. open_values:
    option -> what its value waits for. notes: what was not read in the script, or came from outside. folder: where
    files lie that it names."""

    words: tuple[str, ...]
    num_devices: int | None = None
    open_values: Mapping[str, tuple[str, ...]] | None = None
    notes: tuple[str, ...] = ()
    folder: Path = Path()

    def needed(self, options: Collection[str]) -> None:
        """Raise ValueError if the values of some of these options are known only when the script runs."""
        waits = {name: names for name, names in (self.open_values or {}).items() if name in options}
        if waits:
            each = "; ".join(f"{name} is {' and '.join(_words(names))}" for name, names in waits.items())
            variables = [name for names in waits.values() for name in names if name.isidentifier()]
            way = f", or in the environment ({variables[0]}=8 plan check ...)" if variables else ""
            raise ValueError(f"{each}, which the script alone does not say: write the value into the script{way}")


def _words(names: Iterable[str]) -> list[str]:
    return [f"${{{name}}}" if name.isidentifier() or name in "0123456789@*#" else name for name in names]


def read_command(
    given: str, known: Collection[str], environment: Mapping[str, str] | None, switches: Collection[str]
) -> Command:
    """The command that trains, from arguments, or from a file: a launch script, or only arguments, as `plan export`
    writes them.

    known: options by which the command that trains is told from others; switches: those that take no value.
    environment: variables that a script does not set (None: those of this process). Raises ValueError if no command has
    any of the options.
    """
    text: str = given
    file: Path | None = None
    path = Path(given)
    if not given.lstrip().startswith("-") and "\n" not in given and len(given) < 4096 and path.is_file():
        text, file = text_of(path), path
    elif not given.lstrip().startswith("-") and "\n" not in given and re.fullmatch(r"\S+\.\w+", given.strip()):
        raise ValueError(f"no such file: {given}")
    if given.lstrip().startswith("-") and "$" not in given:
        return Command(tuple(shlex.split(text.replace("\\\n", " "), comments=True)))
    if text.lstrip().startswith("-"):
        text = "program.py " + " ".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    try:
        script = read_script(text, os.environ if environment is None else environment)
    except ValueError as error:
        raise ValueError(f"{file or 'the script'} cannot be read: {error}") from None
    found = max(script.commands, key=lambda words: _known(words, known), default=())
    if not _known(found, known):
        arrays = [values for name, values in script.values.items() if name.endswith(("ARGS", "OPTIONS", "FLAGS"))]
        found = ("program.py", *(word for values in arrays for value in values for word in value.split()))
    if not _known(found, known):
        example = next((name for name in sorted(known) if "tensor" in name), min(known))
        raise ValueError(
            f"{file or 'the script'} holds no command with an option that says a layout, such as {example}: give "
            "the script that calls the training program, or its arguments"
        )
    begins = _program_ends(found, known)
    launcher, words = found[:begins], found[begins:]
    notes = [f"{name}, which the script sources, is not read" for name in script.not_read]
    kept, open_values, more = _opened(words, known, switches)
    notes += [f"more arguments may come from {name}, which is not known here" for name in _words(dict.fromkeys(more))]
    notes += [f"{name}={value} is taken from the environment" for name, value in script.taken.items()]
    return Command(
        tuple(shown(word) for word in kept),
        _devices(launcher, script),
        open_values,
        tuple(notes),
        Path() if file is None else file.parent,
    )


def _known(words: Sequence[str], known: Collection[str]) -> int:
    return sum(word.partition("=")[0] in known for word in words)


def _program_ends(words: Sequence[str], known: Collection[str]) -> int:
    """Index at which the arguments of the training program begin: after its file or module, or else at the first known
    option."""
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if word.endswith(".py") or (before == "-m" and not word.startswith(_LAUNCHERS)):
            return place + 1
    return next(place for place, word in enumerate(words) if word.partition("=")[0] in known)


def _opened(
    words: Sequence[str], known: Collection[str], switches: Collection[str]
) -> tuple[list[str], dict[str, tuple[str, ...]], list[str]]:
    """(the words, option -> names that its value waits for, names of what may hold more arguments). A word of which
    nothing is known is taken as the value of the option before it, if that is known to need one and has none; else it
    may hold any arguments."""
    found: dict[str, tuple[str, ...]] = {}
    kept: list[str] = []
    more: list[str] = []
    option, has_value = "", True
    for word in words:
        if word.startswith("--"):
            option, mark, _ = word.partition("=")
            has_value = bool(mark) or option in switches or option not in known
        elif is_open(word) and has_value:
            more += open_names(word)
            continue
        else:
            has_value = True
        names = tuple(open_names(word))
        if names:
            found[option] = (*found.get(option, ()), *names)
        kept.append(word)
    return kept, found, more


def _devices(launcher: Sequence[str], script: Script) -> int | None:
    """Number of GPUs by the options of a launcher or by #SBATCH lines; None if not known."""

    def said(options: Sequence[str]) -> str | None:
        for place, word in enumerate(launcher):
            name, mark, value = word.partition("=")
            if name in options:
                return value if mark else launcher[place + 1] if place + 1 < len(launcher) else None
        return None

    whole = said(_IN_ALL)
    if whole is not None:
        return int(whole) if whole.isdecimal() else None
    nodes, each = said(_NODES), said(_PER_NODE)
    if nodes is None and each is None:
        slurm = [script.values.get(name, [""])[0] for name in ("SLURM_NNODES", "SLURM_GPUS_PER_NODE")]
        return int(slurm[0]) * int(slurm[1]) if all(value.isdecimal() for value in slurm) else None
    nodes, each = (nodes or "1").rpartition(":")[2], each or "1"
    return int(nodes) * int(each) if nodes.isdecimal() and each.isdecimal() else None
