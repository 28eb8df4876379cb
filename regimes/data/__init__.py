"""What is trained on: images, texts, deficits, the protocol of a task; and ``models``, by name.

This room uses collectives, records and base; training, cost and integrations use it.
"""

from __future__ import annotations

from regimes.base.config import Registry, RunConfig
from regimes.base.errors import ConfigError
from regimes.data.sources import TEXTS
from regimes.data.task import Task
from regimes.records import OWN

TASKS = Registry("data set")  # beside images and texts


def load_task(config: RunConfig) -> Task:
    """Load the task that a configuration names.

    Raises:
        ConfigError: a task's class cannot be imported.
    """
    name = config.data.name
    if name == OWN:
        raise ConfigError(
            f"data.name = {OWN!r}: model and data were passed by a program and are in no file: "
            "call regimes.simulate again with them to continue it, or regimes.branch to branch it"
        )
    if ":" in name:
        return TASKS.load(name)(config)
    if name in TEXTS:
        from regimes.data.language import TextTask

        return TextTask(config)
    from regimes.data.classification import ImageTask

    return ImageTask(config)
