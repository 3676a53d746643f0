"""Tables for notebooks and rich's print; rich is imported only when something is printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Shown:
    """A table of words with a title; columns from `numeric_from` on are aligned to the right."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric_from: int = 1

    def rich(self) -> "Table":
        """The table for rich's print."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i >= self.numeric_from else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def html(self) -> str:
        """The table as HTML, for a notebook's cell."""
        head = self._cells("th", self.headings)
        body = "".join(f"<tr>{self._cells('td', row)}</tr>" for row in self.rows)
        caption = f'<caption style="text-align:left;font-weight:600">{escape(self.title)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self, kind: str, words: Sequence[str]) -> str:
        sides = ("right" if i >= self.numeric_from else "left" for i in range(len(words)))
        return "".join(
            f'<{kind} style="text-align:{side}">{escape(word)}</{kind}>'
            for side, word in zip(sides, words, strict=True)
        )
