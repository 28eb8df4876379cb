"""TensorBoard scalars of a run."""

from __future__ import annotations

from pathlib import Path

from regimes.errors import ConfigError
from regimes.monitor.scalars import Curves
from regimes.monitor.text import Row


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

    def open(self, header: Row, done: int) -> None:
        self.writer = self.writer_class(str(self.folder), purge_step=done)

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def stop(self, message: str) -> None:
        self.writer.close()
