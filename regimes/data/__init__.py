"""What is trained on: images, texts, deficits, and the protocol of a task."""

from __future__ import annotations

from regimes.config import Registry, RunConfig
from regimes.data.deficits import make_deficit
from regimes.data.sources import TEXTS
from regimes.data.task import Task
from regimes.errors import ConfigError, require
from regimes.records import OWN

TASKS = Registry("data set")  # beside images and texts


def load_task(config: RunConfig) -> Task:
    """The task that a configuration names.

    Raises:
        ConfigError: a deficit that is for other data; a task's class cannot be imported.
    """
    name, only_for = config.data.name, make_deficit(config.deficit).only_for
    if name == OWN:
        raise ConfigError(
            f"data.name = {OWN!r}: model and data were passed by a program and are in no file: "
            "call regimes.simulate again with them to continue it, or regimes.branch to branch it"
        )
    if only_for not in (None, name):
        given = (config.deficit or {})["name"]
        expected = f"another deficit, this one is for data.name = {only_for!r}"
        require(False, "deficit.name", given, expected)
    if ":" in name or TASKS.knows(name):
        return TASKS.load(name)(config)
    if name in TEXTS:
        from regimes.data.language import TextTask

        return TextTask(config)
    from regimes.data.classification import ImageTask

    return ImageTask(config)
