"""Reporters: TensorBoard, wandb, and a user's own, ``package.module:Class``.

``Class(folder)`` is made for the run in that folder, on process 0, and called as
``job.reporters.Reporter`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regimes.base.config import Registry
from regimes.base.errors import ConfigError, RegimesError

CALLS = ("start", "step", "epoch", "stop")
REPORTERS = Registry(
    "reporter",
    {
        "tensorboard": "regimes.plotting.reporters:Scalars",
        "wandb": "regimes.plotting.reporters:Runs",
    },
)


def check_reporters(names: Sequence[str]) -> None:
    """Raise ConfigError unless each is a known name or ``package.module:Class``."""
    for name in names:
        REPORTERS.load(name)


def make_reporters(names: Sequence[str], folder: Path) -> list[Any]:
    """Make the reporters of these names, for the run in a folder. ConfigError for an unknown name,
    a missing package or method, or an exception while one is made."""
    instances = []
    for name in names:
        cls = REPORTERS.load(name)
        try:
            reporter = cls(Path(folder))
        except RegimesError:
            raise
        except Exception as error:
            why = f"{type(error).__name__} {error}".strip()
            raise ConfigError(f"the reporter {name} cannot be made: {why}") from error
        for call in CALLS:
            if not callable(getattr(reporter, call, None)):
                raise ConfigError(f"the reporter {name} has no {call}: it needs {', '.join(CALLS)}")
        instances.append(reporter)
    return instances
