"""Who else is told of a run's epochs, by name: TensorBoard, wandb, what other packages offer.

A package offers a reporter by an entry point ::

    [project.entry-points."regimes.reporters"]
    mine = "package.module:Class"

``Class(folder)`` is made for the run in that folder and called as ``training.reporters.Reporter``
says, on process 0. No torch here; what a name stands for is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regimes.config import Registry, offered
from regimes.errors import ConfigError, RegimesError

CALLS = ("start", "step", "epoch", "stop")
GROUP = "regimes.reporters"
OURS = {"tensorboard": "regimes.monitor.tensorboard:Scalars", "wandb": "regimes.monitor.wandb:Runs"}


def registry() -> Registry:
    """All names that are known."""
    return Registry("reporter", offered(GROUP) | OURS)


def check_reporters(names: Sequence[str]) -> None:
    """Raise ConfigError unless all are known, or spelt ``package.module:Class``."""
    known = registry()
    for name in names:
        known.load(name)


def reporters(names: Sequence[str], folder: Path) -> list[Any]:
    """The reporters of these names, for the run in a folder.

    Raises:
        ConfigError: an unknown name; a package that one of them needs is missing; it raises while
            it is made, or lacks one of the calls.
    """
    known = registry()
    return [_made(name, known.load(name), Path(folder)) for name in names]


def _made(name: str, kind: Any, folder: Path) -> Any:
    """A reporter; what its package raises is one sentence."""
    try:
        made = kind(folder)
    except RegimesError:
        raise
    except Exception as error:
        why = f"{type(error).__name__} {error}".strip()
        raise ConfigError(f"the reporter {name} cannot be made: {why}") from error
    for call in CALLS:
        if not callable(getattr(made, call, None)):
            raise ConfigError(f"the reporter {name} has no {call}: it needs {', '.join(CALLS)}")
    return made
