"""Reporters for people: a live table in a terminal, plain lines in a log file. rich imported late.

``watch`` shows the same table from the record alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from regimes.config import RunConfig
from regimes.console.stdout import console as new_console
from regimes.console.stdout import is_terminal
from regimes.monitor.text import cells, epoch_table, headline
from regimes.records import Header, Row, count_units, unit_name, units
from regimes.records import reporters as named

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from regimes.training.reporters import Reporter


def reporters(config: RunConfig, out: Path, terminal: bool | None = None) -> list[Reporter]:
    """A live table in a terminal, else plain lines; and the reporters of the configuration."""
    terminal = is_terminal() if terminal is None else terminal
    chosen: list[Any] = [LiveTable() if terminal else PlainLines()]
    return chosen + named(config.reporters, out)


class LiveTable:
    """Progress bars and the last epochs, redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        from rich import progress

        self.console = console or new_console()
        self.seconds: dict[int, float] = {}
        self.bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=self.console,
        )

    def start(self, header: Header, rows: list[Row]) -> None:
        """Draw first; ``rows`` are those before a resume."""
        from rich.live import Live

        self.header, self.rows = header, list(rows)
        self.unit = unit_name(header["config"]).partition(" ")[0]
        self.now = self.bars.add_task(self.unit, total=None)
        self.all = self.bars.add_task("run", total=units(header), completed=len(rows))
        self.live = Live(self.draw(), console=self.console, refresh_per_second=4)
        self.live.start()

    def step(self, epoch: int, done: int, steps: int) -> None:
        name = f"{self.unit} {epoch}"
        if done == 1:
            self.bars.reset(self.now, total=steps, description=name)
        self.bars.update(self.now, completed=done)
        self.bars.update(self.all, completed=epoch + done / steps)

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.rows.append(row)
        self.seconds[row["epoch"]] = sum(seconds.values())
        self.live.update(self.draw())

    def stop(self, message: str) -> None:
        self.live.update(self.draw(message), refresh=True)
        self.live.stop()

    def draw(self, message: str = "") -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(headline(self.header), style="bold"), self.bars]
        if self.rows:
            parts.append(epoch_table(self.header, self.rows, self.seconds))
        if message:
            parts.append(Text(message, style="bold red"))
        return Group(*parts)


class PlainLines:
    """One line per epoch, for a log file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout

    def start(self, header: Header, rows: list[Row]) -> None:
        self.header, self.rows = header, list(rows)
        done = f", the first {len(rows)} done before" if rows else ""
        self._print(f"{headline(header)}, {count_units(header, rows)}{done}")

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Ignored: one line per epoch."""

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.rows.append(row)
        text = cells(self.header, self.rows, sum(seconds.values()))
        self._print("  ".join(f"{k} {v}" for k, v in text.items()))

    def stop(self, message: str) -> None:
        if message:
            self._print(message)

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)
