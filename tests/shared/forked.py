"""A run on several processes, forked from a server that has torch imported.

`regimes.search.processes` starts Python anew for each, which takes longer than most trainings of
the tests; `test_train` and `test_faults` try that launcher itself.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.trainers import Training
from regimes.base.config import RunConfig


def train(config: RunConfig, out: Path, count: int) -> None:
    """Run one configuration on ``count`` processes; continues what the folder has begun."""
    ends = Training([config] * count, out).ends()
    assert [end.code for end in ends] == [0] * count, ends
