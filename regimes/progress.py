"""Reporters (``train.Reporter``): a live table in a terminal, plain lines, TensorBoard scalars.

The loop tells them what happens. ``watch.py`` shows the same table from the record alone. No torch
here; rich is imported late.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from regimes.config import RunConfig
from regimes.errors import ConfigError
from regimes.terminal import console as new_console
from regimes.terminal import is_terminal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from regimes.train import Reporter

Row = dict[str, Any]
SHOWN = 8  # epochs in the table
BUSY = ("running", "starting")


def reporters(config: RunConfig, out: Path, terminal: bool | None = None) -> list[Reporter]:
    """Who watches a run: a live table in a terminal or else plain lines; TensorBoard if asked.

    Raises:
        ConfigError: ``tensorboard = true`` without the package.
    """
    terminal = is_terminal() if terminal is None else terminal
    chosen: list[Reporter] = [LiveTable() if terminal else PlainLines()]
    return [*chosen, Scalars(out)] if config.tensorboard else chosen


# -- numbers as text -------------------------------------------------------------------------


def human(count: float | int) -> str:
    """Three digits and a unit: 1,080,000 -> "1.08 M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * factor:
            scaled = count / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{count:.0f}"


def metric(header: Row, value: float | int) -> tuple[str, str]:
    """(short name, value): accuracy as a percentage, any other metric as it is."""
    if header["metric"] == "accuracy":
        return "acc %", f"{100 * value:.1f}"
    return header["metric"], f"{value:.4g}"


def ratio(header: Row, rows: Sequence[Row]) -> float | None:
    """Floats sent so far over those of low compression in the same steps; None without a low."""
    low = header["per_step"].get("low", {}).get("floats")
    steps = sum(row["steps"] for row in rows)
    return sum(row["floats"] for row in rows) / (low * steps) if low and steps else None


def at_low(header: Row, row: Row) -> tuple[int, int]:
    """(compressed layers at low compression, compressed layers) in an epoch."""
    pairs = zip(header["layers"], row["layers"]["level"], strict=True)
    levels = [level for layer, level in pairs if layer["compressed"]]
    return levels.count("low"), len(levels)


def headline(header: Row) -> str:
    """Name, seed, model, data, workers, compressor and levels in one line."""
    c, world = header["config"], header["world"]
    levels = ", ".join(f"{name} {value}" for name, value in c["levels"].items())
    plural = "" if world["processes"] == 1 else "es"
    return (
        f"{c['name']} (seed {c['seed']}): {c['model']['name']}, {c['data']['name']}, "
        f"{world['workers']} workers on {world['processes']} process{plural}, "
        f"{c['compressor']['name']} {levels}"
    )


def cells(header: Row, rows: Sequence[Row], seconds: float | None) -> dict[str, str]:
    """The last of ``rows`` as text, one entry per column of the table."""
    row, of_low = rows[-1], ratio(header, rows)
    low, layers = at_low(header, row)
    name, value = metric(header, row["metric"])
    return {
        "epoch": str(row["epoch"]),  # from 0, as in the record and in ``decay_epochs``
        "lr": f"{row['lr']:.3g}",
        "train loss": f"{row['train_loss']:.3f}",
        "test loss": f"{row['test_loss']:.3f}",
        name: value,
        "floats": human(sum(r["floats"] for r in rows)),
        "of low": "-" if of_low is None else f"{of_low:.2f}",
        "at low": f"{low}/{layers}",
        "s": "-" if seconds is None else f"{seconds:.1f}",
    }


def epoch_table(header: Row, rows: Sequence[Row], seconds: dict[int, float]) -> Table:
    """The last epochs: fits 80 columns."""
    from rich import box
    from rich.table import Table

    titles = ("epoch", "lr", "train loss", "test loss", metric(header, 0)[0], "floats", "of low",
              "at low", "s")  # fmt: skip
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="floats: sent so far (the paper's count); of low: over low throughout;\n"
        "at low: layers at low compression; epochs count from 0",
        caption_justify="left",
    )
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, min_width=5)
    for i in range(max(0, len(rows) - SHOWN), len(rows)):
        took = seconds.get(rows[i]["epoch"])
        table.add_row(*cells(header, rows[: i + 1], took).values())
    return table


# -- reporters -------------------------------------------------------------------------------


class LiveTable:
    """Progress bars and the last epochs, redrawn in place in a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.console = console or new_console()
        self.seconds: dict[int, float] = {}
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )

    def start(self, header: Row, rows: list[Row]) -> None:
        """Draw for the first time; ``rows`` are those of the epochs done before a resume."""
        from rich.live import Live

        self.header, self.rows = header, list(rows)
        steps, epochs = header["steps_per_epoch"], header["config"]["epochs"]
        self.now = self.bars.add_task("epoch", total=steps)
        self.all = self.bars.add_task("run", total=steps * epochs, completed=steps * len(rows))
        self.live = Live(self.draw(), console=self.console, refresh_per_second=4)
        self.live.start()

    def step(self, epoch: int, done: int, steps: int) -> None:
        """One optimiser step is done."""
        name = f"epoch {epoch}"
        if done == 1:
            self.bars.reset(self.now, total=steps, description=name)
        self.bars.update(self.now, completed=done)
        self.bars.update(self.all, completed=epoch * steps + done)

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        """One epoch is recorded."""
        self.rows.append(row)
        self.seconds[row["epoch"]] = sum(seconds.values())
        self.live.update(self.draw())

    def stop(self, message: str) -> None:
        """Draw for the last time and give the terminal back."""
        self.live.update(self.draw(message), refresh=True)
        self.live.stop()

    def draw(self, message: str = "") -> RenderableType:
        """All that is shown."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(headline(self.header), style="bold"), self.bars]
        if self.rows:
            parts.append(epoch_table(self.header, self.rows, self.seconds))
        if message:
            parts.append(Text(message, style="bold red"))
        return Group(*parts)


@runtime_checkable
class Stream(Protocol):
    """Anything to print to."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class PlainLines:
    """One line per epoch, for a log file."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream or sys.stdout

    def start(self, header: Row, rows: list[Row]) -> None:
        self.header, self.rows = header, list(rows)
        again = f", the first {len(rows)} done before" if rows else ""
        epochs = f", {header['config']['epochs']} epochs{again}"
        print(headline(header) + epochs, file=self.stream, flush=True)

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Says nothing."""

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.rows.append(row)
        text = cells(self.header, self.rows, sum(seconds.values()))
        print("  ".join(f"{k} {v}" for k, v in text.items()), file=self.stream, flush=True)

    def stop(self, message: str) -> None:
        if message:
            print(message, file=self.stream, flush=True)


class Scalars:
    """TensorBoard scalars in ``<out>/tensorboard``.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "tensorboard = true needs the package tensorboard: "
                "pip install tensorboard, or set tensorboard = false"
            ) from None
        self.folder, self.writer_class = Path(out) / "tensorboard", SummaryWriter

    def start(self, header: Row, rows: list[Row]) -> None:
        self.header, self.floats = header, sum(row["floats"] for row in rows)
        self.writer = self.writer_class(str(self.folder), purge_step=len(rows))

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Says nothing: the scalars are those of whole epochs."""

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.floats += row["floats"]
        low, layers = at_low(self.header, row)
        scalars = {
            "loss/train": row["train_loss"],
            "loss/test": row["test_loss"],
            self.header["metric"]: row["metric"],
            "lr": row["lr"],
            "traffic/floats": self.floats,
            "traffic/share of layers at low": low / max(layers, 1),
            **{f"seconds/{name}": value for name, value in seconds.items()},
        }
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()

    def stop(self, message: str) -> None:
        self.writer.close()
