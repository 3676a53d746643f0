"""The `plan` command: which subcommand is meant, and how it ends."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from .commands.answers import BAD_INPUT
from .commands.compare import compare_app
from .commands.explain import explain_app
from .commands.export import check_app, export_app
from .commands.here import calibrate_app, verify_app
from .commands.plan import devices_app, plan_app, profile_app, show_app
from .commands.report import diff_app, report_app
from .commands.run import replan_app
from .commands.sweep import sweep_app
from .reporting import terminal

SUBCOMMANDS = {
    "profile": profile_app,
    "export": export_app,
    "check": check_app,
    "devices": devices_app,
    "compare": compare_app,
    "verify": verify_app,
    "show": show_app,
    "calibrate": calibrate_app,
    "report": report_app,
    "diff": diff_app,
    "replan": replan_app,
    "explain": explain_app,
    "sweep": sweep_app,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `plan` command. Exit codes: 0 done, 1 verify found a difference, 2 bad input, 3 no fit."""
    gc.set_threshold(1_000_000, 50, 100)  # a command is short, and imports and traces make millions of objects
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        from meshwright import __version__  # absolute: the name lies above this package

        print(f"meshwright {__version__}")
        return
    name, words = route(words)
    app = SUBCOMMANDS.get(name, plan_app)
    try:
        app(args=words or ["--help"] if app is plan_app else words, prog_name=f"plan {name}".strip())
    except ValueError as error:
        if type(error) is not ValueError:  # a subclass is not one of our sentences: a bug, let it show
            raise
        terminal.print_error(str(error))
        raise SystemExit(BAD_INPUT) from None


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
    lacks_operand = {"devices": bool(rest), "calibrate": False, "replan": False}.get(name, len(positions) == 1)
    if lacks_operand and "--help" not in rest and Path(name).exists():
        return "", list(words)
    return name, rest


def _positional(words: Sequence[str]) -> list[int]:
    """Indices of the words that are neither options nor values of options."""
    with_value = {
        spelling
        for app in (plan_app, *SUBCOMMANDS.values())
        for option in typer.main.get_command(app).params
        if option.param_type_name == "option" and not getattr(option, "is_flag", False)
        for spelling in option.opts
    }
    positions: list[int] = []
    i = 0
    while i < len(words):
        word = words[i]
        if word == "--":
            return [*positions, *range(i + 1, len(words))]
        if word in with_value:
            i += 2
            continue
        if not word.startswith("-"):
            positions.append(i)
        i += 1
    return positions


if __name__ == "__main__":
    main()
