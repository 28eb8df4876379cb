"""One table, for a terminal, for Markdown and for a page of HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regimes.base.console.stdout import escape_control

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as Drawn

BROKEN = 12  # letters of a word that a narrow terminal may break


@dataclass(frozen=True)
class Table:
    """Holds text in rows and columns.

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

    @property
    def words(self) -> list[bool]:
        """Answer for each column whether it holds words."""
        last = len(self.heads) - self.ends
        return [i < self.texts or i >= last for i in range(len(self.heads))]

    def filled(self) -> Table:
        """Leave out those columns of numbers in which no row has one.

        >>> Table(("schedule", "n", "p"), [("low", "5", ""), ("high", "5", "")]).filled().heads
        ['schedule', 'n']
        """
        kept = [
            i for i, words in enumerate(self.words) if words or any(row[i] for row in self.rows)
        ]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, heads=[self.heads[i] for i in kept], rows=rows)

    def drawn(self, least: int | None = None, word: int = BROKEN, **options: Any) -> FoldingTable:
        """Draw it for a terminal: words wrap, and numbers do not. No text is read as markup.
        Columns that the width has no room for stand below the others, beside the first words of
        their rows.

        Args:
            least: smallest width of a column, in letters.
            word: words of up to so many letters are not broken.
            options: of ``rich.table.Table``.
        """
        return FoldingTable(self, least or 0, word, options)

    def text(self, width: int = 110) -> str:
        """Write it in plain letters, without colours.

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
        """Write it for a document, without title and note.

        >>> print(Table(("schedule", "n"), [("low", "5")]).markdown())
        | schedule | n |
        | --- | ---: |
        | low | 5 |
        """
        rules = ["---" if is_text else "---:" for is_text in self.words]
        lines = (map(_escape_cell, line) for line in (self.heads, rules, *self.rows))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class FoldingTable:
    """Draws a table by rich, with the columns that fit side by side, and the others below."""

    def __init__(self, table: Table, least: int, word: int, options: dict[str, Any]) -> None:
        self.table, self.least, self.word, self.options = table, least, word, options

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Drawn]:
        parts = self._fold(options.max_width)
        for i, columns in enumerate(parts):
            yield self._draw(columns, options.max_width, i == 0, i == len(parts) - 1)

    def _fold(self, room: int) -> list[list[int]]:
        """The columns of each part. The first columns of words begin each; where these alone leave
        no room, the first of them does."""
        columns = [*range(len(self.table.heads))]

        def fits(part: Sequence[int]) -> bool:
            return sum(self._narrowest(i) for i in part) + self._extra(len(part)) <= room

        if fits(columns):
            return [columns]
        shared = columns[: self.table.texts]
        while len(shared) > 1 and not all(fits([*shared, i]) for i in columns if i not in shared):
            shared.pop()
        parts = [[*shared]]
        for i in columns[len(shared) :]:
            if len(parts[-1]) > len(shared) and not fits([*parts[-1], i]):
                parts.append([*shared])
            parts[-1].append(i)
        return parts

    def _draw(self, columns: Sequence[int], room: int, first: bool, last: bool) -> Drawn:
        from rich.text import Text

        def text(cell: Any) -> Any:
            return Text(escape_control(cell)) if isinstance(cell, str) else cell

        drawing, words = self._empty(), self.table.words
        drawing.title = text(self.table.title) or None if first else None
        drawing.caption = text(self.table.note) or None if last else None
        drawing.title_justify = drawing.caption_justify = "left"
        widths = self._widths(columns, room - self._extra(len(columns)))
        for i, width in zip(columns, widths, strict=True):
            drawing.add_column(
                text(self.table.heads[i]),
                justify="left" if words[i] else "right",
                no_wrap=not words[i],
                overflow="fold",
                min_width=width,
                max_width=width if words[i] else None,
            )
        for row in self.table.rows:
            drawing.add_row(*(text(row[i]) for i in columns))
        return drawing

    def _empty(self) -> Drawn:
        from rich.table import Table as Drawn

        return Drawn(**{"box": None, "header_style": "bold", "pad_edge": False, **self.options})

    def _extra(self, count: int) -> int:
        """Letters of the frame and of the space between so many columns, at most."""
        empty = self._empty()
        return count * (empty.padding[1] + empty.padding[3]) + (count + 1 if empty.box else 0)

    def _widths(self, columns: Sequence[int], room: int) -> list[int]:
        """Letters of each column: numbers take what they need, and words share what is left, the
        widest of them giving way first. rich would also take it from numbers."""
        widths = {i: self._narrowest(i) for i in columns}
        free = room - sum(widths.values())
        wishes = {i: self._widest(i) - widths[i] for i in columns if self.table.words[i]}
        for done, i in enumerate(sorted(wishes, key=lambda i: wishes[i])):
            given = max(0, min(wishes[i], free // (len(wishes) - done)))
            widths[i] += given
            free -= given
        return [*widths.values()]

    def _narrowest(self, column: int) -> int:
        """Letters of a column's longest number; of one of words, its longest word that is kept."""
        if not self.table.words[column]:
            return max(self.least, self._widest(column))
        lengths = [cell_width(word) for cell in self._cells(column) for word in cell.split()]
        return max([1, self.least, *(n for n in lengths if n <= self.word)])

    def _widest(self, column: int) -> int:
        lengths = (cell_width(line) for cell in self._cells(column) for line in cell.splitlines())
        return max([1, *lengths])

    def _cells(self, column: int) -> list[str]:
        """Heading and text of a column; in place of a bar as many letters as it is wide."""
        cells = [self.table.heads[column]]
        for cell in (row[column] for row in self.table.rows):
            if isinstance(cell, str):
                cells.append(escape_control(cell))
            else:
                cells.append(getattr(cell, "plain", None) or "x" * (cell.width or 1))
        return cells


def cell_width(text: str) -> int:
    """Count the letters that a text takes on a terminal."""
    from rich.cells import cell_len

    return cell_len(text)


def _escape_cell(text: str) -> str:
    """A cell of Markdown, which a bar or the end of a line would end."""
    return text.replace("|", "\\|").replace("\n", " ")
