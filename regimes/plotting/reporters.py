"""Reporters of a training: a live table in a terminal, plain lines in a log file, and the numbers
of each epoch as curves in TensorBoard and Weights & Biases; their packages are imported late."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TextIO

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from regimes.base.console.stdout import is_terminal
from regimes.base.console.stdout import make_console as new_console
from regimes.base.errors import ConfigError
from regimes.job.reporters import Reporter
from regimes.plotting.text import EPOCHS, at_low, describe_run, epoch_table, format_row
from regimes.records import (
    Header,
    Row,
    count_units,
    describe_uncompressed_layers,
    number_of_units,
    run_name,
    sum_sent,
    unit_name,
)


def terminal_reporter(terminal: bool | None = None) -> Reporter:
    """Make a live table in a terminal, and plain lines elsewhere."""
    terminal = is_terminal() if terminal is None else terminal
    return LiveTable() if terminal else PlainLines()


class LiveTable:
    """Redraws progress bars and the last epochs in place."""

    def __init__(self, console: Console | None = None) -> None:
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
        self.header, self.rows = header, rows[-EPOCHS:]
        self.sent_before = sum_sent(rows[:-EPOCHS])
        self.unit = unit_name(header["config"]).partition(" ")[0]
        self.unit_bar = self.bars.add_task(self.unit, total=None)
        self.run_bar = self.bars.add_task("run", total=number_of_units(header), completed=len(rows))
        self.live = Live(self.draw(), console=self.console, refresh_per_second=4)
        self.live.start()

    def step(self, epoch: int, done: int, steps: int) -> None:
        name = f"{self.unit} {epoch}"
        if done == 1:
            self.bars.reset(self.unit_bar, total=steps, description=name)
        self.bars.update(self.unit_bar, completed=done)
        self.bars.update(self.run_bar, completed=epoch + done / steps)

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.rows.append(row)
        if len(self.rows) > EPOCHS:
            self.sent_before = self.sent_before.after(self.rows.pop(0))
        self.seconds[row["epoch"]] = sum(seconds.values())
        self.live.update(self.draw())

    def stop(self, message: str) -> None:
        self.live.update(self.draw(message), refresh=True)
        self.live.stop()

    def draw(self, message: str = "") -> RenderableType:
        parts: list[RenderableType] = [Text(describe_run(self.header), style="bold")]
        parts += [Text(sentence, "dim") for sentence in describe_uncompressed_layers(self.header)]
        parts.append(self.bars)
        if self.rows:
            parts.append(epoch_table(self.header, self.rows, self.seconds, self.sent_before))
        if message:
            parts.append(Text(message, style="bold red"))
        return Group(*parts)


class PlainLines:
    """Prints one line per epoch, for a log file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout

    def start(self, header: Header, rows: list[Row]) -> None:
        self.header, self.sent = header, sum_sent(rows)
        done = f", the first {len(rows)} done before" if rows else ""
        self._print(f"{describe_run(header)}, {count_units(header, rows)}{done}")
        for sentence in describe_uncompressed_layers(header):
            self._print(sentence)

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Do nothing: there is one line per epoch."""

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.sent = self.sent.after(row)
        text = format_row(self.header, row, sum(seconds.values()), self.sent)
        self._print("  ".join(f"{k} {v}" for k, v in text.items()))

    def stop(self, message: str) -> None:
        if message:
            self._print(message)

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Curves:
    """Draws one point for each epoch: the base of reporters that do. Subclasses define ``put``,
    which draws the numbers of an epoch, and ``stop``."""

    def start(self, header: Header, rows: list[Row]) -> None:
        self.header, self.floats = header, sum(row["floats"] for row in rows)

    def put(self, epoch: int, numbers: dict[str, float]) -> None: ...

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Do nothing: curves have one point per epoch."""

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.floats += row["floats"]
        low, layers = at_low(self.header, row)
        numbers = {
            "loss/train": row["train_loss"],
            "loss/test": row["test_loss"],
            self.header["metric"]: row["metric"],
            "lr": row["lr"],
            "traffic/floats": self.floats,
            "traffic/share of layers at low": low / max(layers, 1),
            **{f"logged/{name}": value for name, value in row.get("logged", {}).items()},
            **{f"seconds/{name}": value for name, value in seconds.items()},
        }
        self.put(row["epoch"], {name: x for name, x in numbers.items() if x is not None})


class Scalars(Curves):
    """Writes TensorBoard scalars into ``<out>/tensorboard``."""

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                'reporters = ["tensorboard"] needs the package tensorboard: '
                "pip install tensorboard, or leave it out"
            ) from None
        self.folder, self.writer_class = Path(out) / "tensorboard", SummaryWriter

    def start(self, header: Header, rows: list[Row]) -> None:
        super().start(header, rows)
        # purge: points of epochs after the checkpoint, which are trained again
        self.writer = self.writer_class(str(self.folder), purge_step=len(rows))

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def stop(self, message: str) -> None:
        self.writer.close()


_RUN_ID = "id-of-the-run"  # by which a service knows it


class Runs(Curves):
    """Writes a run of Weights & Biases into ``<out>/wandb``, offline: ``wandb sync`` sends it
    later, or set ``WANDB_MODE=online``. A run that is resumed is the same one there: ``wandb sync
    --append``."""

    def __init__(self, out: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                'reporters = ["wandb"] needs the package wandb: pip install wandb, or leave it out'
            ) from None
        self.folder, self.wandb = Path(out), wandb

    def start(self, header: Header, rows: list[Row]) -> None:
        super().start(header, rows)
        config, place = header["config"], self.folder / "wandb" / _RUN_ID
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(secrets.token_hex(8))
        self.run = self.wandb.init(
            id=place.read_text(),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "regimes"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            name=run_name(config),
            group=str(self.folder),
            dir=str(self.folder),
            config=config,
            settings=self.wandb.Settings(console="off", silent=True),
        )

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=epoch)

    def stop(self, message: str) -> None:
        self.run.finish(exit_code=1 if message else 0)
