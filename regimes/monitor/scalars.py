"""The numbers of each epoch as curves in TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path

from regimes.errors import ConfigError
from regimes.monitor.text import at_low
from regimes.records import Header, Row


class Curves:
    """A reporter of whole epochs. Subclasses define ``open``, ``put`` and ``stop``."""

    def open(self, header: Header, done: int) -> None:
        """A run begins, or continues after ``done`` epochs."""

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        """Draw the numbers of one epoch, by name."""

    def start(self, header: Header, rows: list[Row]) -> None:
        self.header, self.floats = header, sum(row["floats"] for row in rows)
        self.open(header, len(rows))

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Ignored: curves have one point per epoch."""

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
    """TensorBoard scalars in ``<out>/tensorboard``."""

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                'reporters = ["tensorboard"] needs the package tensorboard: '
                "pip install tensorboard, or leave it out"
            ) from None
        self.folder, self.writer_class = Path(out) / "tensorboard", SummaryWriter

    def open(self, header: Header, done: int) -> None:
        self.writer = self.writer_class(str(self.folder), purge_step=done)

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def stop(self, message: str) -> None:
        self.writer.close()


class Runs(Curves):
    """A run of Weights & Biases in ``<out>/wandb``, offline: ``wandb sync`` sends it later, or set
    ``WANDB_MODE=online``. A resumed run is a new one in the same group."""

    def __init__(self, out: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                'reporters = ["wandb"] needs the package wandb: pip install wandb, or leave it out'
            ) from None
        self.folder, self.wandb = Path(out), wandb

    def open(self, header: Header, done: int) -> None:
        config = header["config"]
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "regimes"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            name=f"{config['name']} seed {config['seed']}",
            group=str(self.folder),
            dir=str(self.folder),
            config=config,
            settings=self.wandb.Settings(console="off", silent=True),
        )

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=epoch)

    def stop(self, message: str) -> None:
        self.run.finish(exit_code=1 if message else 0)
