"""Options that commands share are declared once, and stand where each command wants them."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from meshwright.executor.commands.compare import compare_app
from meshwright.executor.commands.explain import explain_app
from meshwright.executor.commands.option_groups import grouped
from meshwright.executor.commands.plan import plan_app
from meshwright.executor.commands.sweep import sweep_app


@dataclass(frozen=True)
class Inner:
    """A group in a group."""

    colour: Annotated[str, typer.Option("--colour", help="of the group")] = "red"
    size: Annotated[int, typer.Option("--size", "-s")] = 3


@dataclass(frozen=True)
class Outer:
    """A group with one of its own."""

    name: Annotated[str | None, typer.Option("--name")] = None
    inner: Inner = field(default_factory=Inner)


def app_of(seen: list[Any]) -> typer.Typer:
    """A command with its own option before the group, and its own words for one of the group's."""
    app = typer.Typer()

    @app.command()
    @grouped
    def command(
        first: str,
        size: Annotated[int, typer.Option("--size", "-s", help="of the command")] = 7,
        *,
        outer: Outer,
        last: Annotated[bool, typer.Option("--last")] = False,
    ) -> None:
        """Says what it does."""
        seen.append((first, size, outer, last))

    return app


def names_of(app: typer.Typer) -> list[str]:
    """Parameters of a command, in the order in which --help lists them."""
    return [str(parameter.name) for parameter in typer.main.get_command(app).params]


def test_a_group_stands_for_its_options_in_order() -> None:
    assert names_of(app_of([]))[:5] == ["first", "size", "name", "colour", "last"]


@pytest.mark.parametrize(
    ("words", "size", "outer", "last"),
    [
        ([], 7, Outer(None, Inner("red", 7)), False),
        (["--name", "n", "--colour", "blue", "-s", "4", "--last"], 4, Outer("n", Inner("blue", 4)), True),
    ],
)
def test_a_command_is_given_its_groups(words: list[str], size: int, outer: Outer, last: bool) -> None:
    seen: list[Any] = []

    result = CliRunner().invoke(app_of(seen), ["f", *words])

    assert result.exit_code == 0, result.output
    assert seen == [("f", size, outer, last)]


def test_what_a_command_says_of_an_option_wins() -> None:
    shown = CliRunner().invoke(app_of([]), ["--help"]).output

    assert "of the command" in shown
    assert "of the group" in shown
    assert "Says what it does" in shown


def test_the_job_is_asked_for_in_the_same_words_everywhere() -> None:
    stack = ["precision", "optimizer", "software", "memory_margin", "memory_risk"]
    job = ["gpus", "device", "gpus_per_node", "cluster", "global_batch", "seq_len", *stack]

    for app in (plan_app, explain_app):
        assert [name for name in names_of(app) if name in job] == job
    for app in (compare_app, sweep_app):
        assert set(job) <= set(names_of(app))
        assert [name for name in names_of(app) if name in stack] == stack
