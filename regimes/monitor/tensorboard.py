"""TensorBoard scalars of a run."""

from __future__ import annotations

from pathlib import Path

from regimes.errors import ConfigError
from regimes.monitor.text import Row, at_low


class Scalars:
    """TensorBoard scalars in ``<out>/tensorboard``."""

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
            **{f"logged/{name}": value for name, value in row.get("logged", {}).items()},
            **{f"seconds/{name}": value for name, value in seconds.items()},
        }
        for name, value in scalars.items():
            if value is not None:  # not logged in this epoch
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()

    def stop(self, message: str) -> None:
        self.writer.close()
