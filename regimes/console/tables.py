"""One table, for a terminal, for Markdown and for a page of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regimes.console.stdout import escape_control

if TYPE_CHECKING:
    from rich.table import Table as Drawn


@dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        heads: headings of the columns.
        rows: of text; for a terminal also of rich objects, such as a progress bar.
        texts: how many columns from the left hold words; the others hold numbers.
        ends: how many columns from the right hold words, too.
        title: stands above it.
        note: stands below it; in an empty table, the reason.
    """

    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""
    title: str = ""
    texts: int = 1
    ends: int = 0

    def _words(self) -> list[bool]:
        """Does each column hold words?"""
        last = len(self.heads) - self.ends
        return [i < self.texts or i >= last for i in range(len(self.heads))]

    def _longest_word(self, column: int, most: int) -> int:
        """Letters of a column's longest word, of its words with at most ``most`` letters."""
        texts = (row[column] for row in self.rows if isinstance(row[column], str))
        return max((len(x) for text in texts for x in text.split() if len(x) <= most), default=0)

    def drawn(self, least: int | None = None, word: int = 0, **options: Any) -> Drawn:
        """For a terminal: words wrap, numbers do not. No text is read as markup.

        Args:
            least: smallest width of a column, in letters.
            word: words of up to so many letters are not broken; the table may then be wider than
                the terminal.
            options: of ``rich.table.Table``.
        """
        from rich.table import Table as Drawn
        from rich.text import Text

        def text(cell: Any) -> Any:
            return Text(escape_control(cell)) if isinstance(cell, str) else cell

        drawing = Drawn(**{"box": None, "header_style": "bold", "pad_edge": False, **options})
        drawing.title, drawing.caption = text(self.title) or None, text(self.note) or None
        drawing.title_justify = drawing.caption_justify = "left"
        for i, (head, is_text) in enumerate(zip(self.heads, self._words(), strict=True)):
            width = max(least or 0, self._longest_word(i, word) if is_text else 0)
            drawing.add_column(
                text(head),
                justify="left" if is_text else "right",
                no_wrap=not is_text,
                overflow="fold",
                min_width=width or None,
            )
        for row in self.rows:
            drawing.add_row(*map(text, row))
        return drawing

    def text(self, width: int = 110) -> str:
        """In plain letters, without colours.

        Args:
            width: letters of a line.
        """
        from io import StringIO

        from rich.console import Console

        console = Console(
            width=width, file=StringIO(), color_system=None, highlight=False, force_jupyter=False
        )
        with console.capture() as captured:
            console.print(self.drawn())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def markdown(self) -> str:
        """For a document, without title and note.

        >>> print(Table(("schedule", "n"), [("low", "5")]).markdown())
        | schedule | n |
        | --- | ---: |
        | low | 5 |
        """
        rules = ["---" if is_text else "---:" for is_text in self._words()]
        lines = (map(_escape_cell, line) for line in (self.heads, rules, *self.rows))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape_cell(text: str) -> str:
    """A cell of Markdown, which a bar or the end of a line would end."""
    return text.replace("|", "\\|").replace("\n", " ")
