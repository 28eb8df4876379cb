"""Which task a configuration names."""

from __future__ import annotations

from regimes.config import RunConfig
from regimes.data.deficits import OtherMatrix, deficit
from regimes.data.sources import MATRIX, TEXTS
from regimes.data.task import Task
from regimes.errors import require


def load(config: RunConfig) -> Task:
    if config.data.name == MATRIX:
        from regimes.data.matrix import MatrixTask

        return MatrixTask(config)
    if isinstance(deficit(config.deficit), OtherMatrix):
        require(False, "deficit.name", "other-matrix", "another, the data are no matrix")
    if config.data.name in TEXTS:
        from regimes.data.language import TextTask

        return TextTask(config)
    from regimes.data.classification import ImageTask

    return ImageTask(config)
