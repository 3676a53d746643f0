"""The command `plan glossary`: what words mean."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from ..reporting import terminal
from ..reporting.glossary import TERMS, term
from . import options

glossary_app = options.new_app()


@glossary_app.command()
def _glossary_command(
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="only these, as in ZB-V MFU")] = None,
    as_json: options.Json = False,
) -> None:
    """Say what the words of plans and reports mean: FSDP, ZB-V, gathered, transient, MFU and others."""
    shown = [term(word) for word in words] if words else sorted(TERMS, key=lambda each: each.name.lower())
    if as_json:
        terminal.write_json(json.dumps([asdict(each) for each in shown]))
        return
    console = terminal.make_console()
    for each in shown:
        console.print(terminal.hanging(each.name, Text(each.says), "bold", 17))
