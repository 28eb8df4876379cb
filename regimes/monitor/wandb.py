"""A run in Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path

from regimes.errors import ConfigError
from regimes.monitor.scalars import Curves
from regimes.monitor.text import Row


class Runs(Curves):
    """One run of wandb in ``<out>/wandb``, nothing sent: ``wandb sync`` does that later, and
    ``WANDB_MODE=online`` at once. A run that is resumed is another one, in the same group."""

    def __init__(self, out: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                'reporters = ["wandb"] needs the package wandb: pip install wandb, or leave it out'
            ) from None
        self.folder, self.wandb = Path(out), wandb

    def open(self, header: Row, done: int) -> None:
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
