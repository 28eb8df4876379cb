"""A case: one training, in one or more stages, each on new processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BATCH = 8  # samples of a worker in a user's own loop


@dataclass(frozen=True)
class Place:
    """Where one process of a case is.

    Attributes:
        folder: of the case; all that is in it at the end is compared.
        text: a folder with a text like WikiText-2.
        stage: which part of the case this is.
    """

    folder: Path
    text: Path
    rank: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        quick: this case belongs to the subset of ``--quick``.
        counts: processes of each stage. The second stage continues what the first one has saved.
        counted: the step before which counting begins, from 0, and the number of steps that are
            counted; of the last stage. With a background thread nothing may be under way at either
            end.
    """

    name: str
    quick: bool = False
    counts: tuple[int, ...] = (1,)
    counted: tuple[int, int] = (2, 1)

    def train(self, at: Place) -> None:
        """Train one stage; every process calls this."""
        raise NotImplementedError

    def is_last(self, at: Place) -> bool:
        """Is this the stage that is measured and ends the case?"""
        return at.stage == len(self.counts) - 1
