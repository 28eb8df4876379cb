"""Which task a configuration names."""

from __future__ import annotations

from regimes.config import RunConfig
from regimes.data.sources import TEXTS
from regimes.data.task import Task


def load(config: RunConfig) -> Task:
    """The task that a configuration names."""
    if config.data.name in TEXTS:
        from regimes.data.language import TextTask

        return TextTask(config)
    from regimes.data.classification import ImageTask

    return ImageTask(config)
