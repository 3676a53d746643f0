"""The `plan` command: which subcommand is meant, and how it ends."""

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from .commands import inputs
from .commands.answers import BAD_INPUT
from .commands.compare import compare_app
from .commands.explain import explain_app
from .commands.export import check_app, export_app
from .commands.glossary import glossary_app
from .commands.here import calibrate_app, verify_app
from .commands.learn import learn_app
from .commands.plan import devices_app, plan_app, profile_app, show_app
from .commands.report import diff_app, report_app
from .commands.run import replan_app
from .commands.sweep import sweep_app
from .commands.tune import tune_app
from .commands.weights import weights_app
from .reporting import terminal

SUBCOMMANDS = {
    "plan": plan_app,
    "explain": explain_app,
    "compare": compare_app,
    "sweep": sweep_app,
    "tune": tune_app,
    "show": show_app,
    "report": report_app,
    "diff": diff_app,
    "glossary": glossary_app,
    "export": export_app,
    "export-weights": weights_app,
    "check": check_app,
    "verify": verify_app,
    "replan": replan_app,
    "profile": profile_app,
    "devices": devices_app,
    "calibrate": calibrate_app,
    "learn": learn_app,
}

_PANELS = {
    "Ask": ("plan", "explain", "compare", "sweep", "tune"),
    "Look at a plan": ("show", "report", "diff", "glossary"),
    "Use it": ("export", "export-weights", "check", "verify", "replan"),
    "Models and machines": ("profile", "devices", "calibrate", "learn"),
}
"""Heading in --help -> the commands below it."""

_HELP = (
    "How do I split this model over these GPUs?\n\n"
    "[bold]plan MODEL --gpus 8[/bold] answers, and is short for [bold]plan plan MODEL --gpus 8[/bold]. MODEL is a "
    "model.py, file.py:function, a Hugging Face config.json, its folder or id in the cache, or a saved profile.json."
)
_EPILOG = (
    "Each command has --help; [bold]plan plan --help[/bold] has the flags of planning itself. "
    "[bold]plan --version[/bold] tells the version. [bold]meshwright[/bold] is the same command by another name."
)

_NAMES = {"meshwright": "meshwright", "__main__.py": "python -m meshwright"}
"""How the command was called -> how help calls it; "plan" by any other name."""


def commands() -> typer.Typer:
    """All commands as one, which help and completion go through."""
    root = typer.Typer(
        help=_HELP, epilog=_EPILOG, rich_markup_mode="rich", pretty_exceptions_enable=False, callback=lambda: None
    )
    for panel, names in _PANELS.items():
        for name in names:
            (info,) = SUBCOMMANDS[name].registered_commands
            words = " ".join((inspect.getdoc(info.callback) or "").split())
            brief = f"{words.partition('. ')[0].rstrip('.')}."
            root.command(name, short_help=brief, rich_help_panel=panel)(info.callback)  # type: ignore[type-var]
    return root


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `plan` command. It ends with one of answers.EXIT_CODES."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = "plan" if arguments is not None else _NAMES.get(Path(sys.argv[0]).name, "plan")
    if words == ["--version"]:
        from meshwright import __version__  # absolute: the name lies above this package

        print(f"meshwright {__version__}")
        return
    asks_for_all = words in ([], ["--help"]) or words[0] in ("--install-completion", "--show-completion")
    if asks_for_all or f"_{called.upper()}_COMPLETE" in os.environ:
        commands()(args=words or ["--help"], prog_name=called)
        return
    try:
        with _written_out():
            name, words = route(_one_by_one(words))
            if not name or name in _OF_A_MODEL:
                _check_model(name, words)
            _check_dashes(SUBCOMMANDS[name or "plan"], words)
            _check_repeated(SUBCOMMANDS[name or "plan"], words)
            SUBCOMMANDS[name or "plan"](args=words, prog_name=f"{called} {name}".strip())
    except ValueError as error:
        if type(error) is not ValueError:  # a subclass is not one of our sentences: a bug, let it show
            raise
        terminal.print_error(str(error))
        raise SystemExit(BAD_INPUT) from None
    except OSError as error:
        if type(error) not in _OF_FILES:
            raise
        terminal.print_error(_of_a_file(error))
        raise SystemExit(BAD_INPUT) from None


def _check_dashes(app: typer.Typer, words: Sequence[str]) -> None:
    """Raises ValueError for a long flag with one dash, which would be read as several short ones."""
    for word in words:
        flag = word.partition("=")[0]
        if len(flag) > 2 and flag[0] == "-" != flag[1]:
            known = {flag for option in typer.main.get_command(app).params for flag in option.opts}
            if f"-{flag}" in known:
                raise ValueError(f"{word}: write it with two dashes, -{word}")


def _check_repeated(app: typer.Typer, words: Sequence[str]) -> None:
    """Raises ValueError for an option that is given two values, of which only the last would count."""
    options = (each for each in typer.main.get_command(app).params if each.param_type_name == "option")
    known = {flag: option for option in options for flag in option.opts}
    values: dict[str, str] = {}
    flags = iter(words)
    for word in flags:
        if word == "--":
            return
        flag, mark, value = word.partition("=")
        option = known.get(flag)
        if option is None or getattr(option, "is_flag", False) or getattr(option, "multiple", False):
            continue
        value = value if mark else next(flags, "")
        before = values.setdefault(option.opts[0], value)
        if before != value:
            raise ValueError(f"{flag} is {before!r} and {value!r}: give it once")


_OF_FILES = (OSError, PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""What the system says of files: full disks, names that are too long, folders without permission."""

_LONGEST_NAME = 100


@contextmanager
def _written_out() -> Iterator[None]:
    """What is printed is written out while its failure can still be told; nothing more is tried after one."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is None:  # stdout's; Python would try it again as it exits
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _of_a_file(error: OSError) -> str:
    """An error of the system in a sentence; names that fill a screen are cut."""
    if error.filename is None:
        return f"the output cannot be written: {error.strerror}; send it to another place, for example > a file"
    name = str(error.filename)
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    return f"{shown}: {error.strerror}; give another file"


_OF_A_MODEL = ("compare", "explain", "profile", "sweep", "tune")
"""Subcommands whose first operand is a model, or a plan; planning itself is another."""


def _check_model(name: str, words: Sequence[str]) -> None:
    """Raises ValueError where the first operand names no file, with what may have been meant: a file that is there, or,
    without a subcommand, one of these. name: the subcommand."""
    positions = _positional(words)
    if not positions or "--help" in words:
        return
    word = words[positions[0]]
    near = [] if name or Path(word).suffix else difflib.get_close_matches(word, SUBCOMMANDS, n=1)
    if near and not Path(word).exists():
        raise ValueError(f"no such command or file: {word}; did you mean plan {near[0]}? `plan --help` lists them")
    inputs.check_source(word, inputs.MODEL_RULE)
    if name == "explain" and len(positions) > 1:
        raise ValueError(
            f"plan explain takes one plan or model, and {words[positions[1]]!r} is a word more: ask about a layout "
            f"with --why-not, as in --why-not tp=2; plan explain {word} alone says why the plan is what it is"
        )


def route(words: Sequence[str]) -> tuple[str, list[str]]:
    """(subcommand, its arguments); the subcommand is "" for planning itself.

    The first word that is no option and no option's value decides. A file of a subcommand's name is the model where
    the subcommand would have nothing to work on: `plan compare --gpus 8` beside a file ./compare.
    """
    positions = _positional(words)
    if not positions or words[positions[0]] not in SUBCOMMANDS:
        return "", list(words)
    name = words[positions[0]]
    rest = [*words[: positions[0]], *words[positions[0] + 1 :]]
    no_operand = {"devices": bool(rest), "calibrate": False, "replan": False, "glossary": False}
    lacks_operand = no_operand.get(name, len(positions) == 1)
    if lacks_operand and "--help" not in rest and Path(name).exists():
        return "", list(words)
    return name, rest


def _positional(words: Sequence[str]) -> list[int]:
    """Indices of the words that are neither options nor values of options."""
    flags = _flags()
    positions: list[int] = []
    i = 0
    while i < len(words):
        word = words[i]
        if word == "--":
            return [*positions, *range(i + 1, len(words))]
        if flags.get(word):
            i += 2
            continue
        if not word.startswith("-"):
            positions.append(i)
        i += 1
    return positions


def _one_by_one(words: Sequence[str]) -> list[str]:
    """The words with short flags that are joined, also to a value, apart: -qg8 is -q -g 8."""
    flags = _flags()
    found: list[str] = []
    left = [*words]
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left]
        if len(word) > 2 and word[:2] in flags and f"-{word.partition('=')[0]}" not in flags:
            left = [word[2:] if flags[word[:2]] else f"-{word[2:]}", *left]
            word = word[:2]
        found.append(word)
        if flags.get(word) and left:
            found.append(left.pop(0))
    return found


@functools.cache
def _flags() -> dict[str, bool]:
    """Spelling of an option of any subcommand -> whether the next word is its value."""
    return {
        spelling: not getattr(option, "is_flag", False)
        for app in SUBCOMMANDS.values()
        for option in typer.main.get_command(app).params
        if option.param_type_name == "option"
        for spelling in option.opts
    }


if __name__ == "__main__":
    main()
