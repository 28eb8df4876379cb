"""How the cases call ``regimes.attach`` and ``regimes.local_steps``: no other file does.

The options of a case are written in the words of the base. A tree whose functions take other words
gets its translation here, by what their signatures say: both trees train with this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regimes
from benchmarks.same_bits.case import BATCH

STARTERS = ("attach", "local_steps")  # of ``regimes``, which imports them at first use


def attach(model: Any, options: Mapping[str, Any]) -> Any:
    """A hook on a wrapped model."""
    return regimes.attach(model, **options)


def local_steps(model: Any, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """The local steps of a model."""
    return regimes.local_steps(model, optimizer, **options)


def record(folder: Path) -> Any:
    """The option ``record``: a record in a folder."""
    return regimes.RecordOptions(folder, batch_size=BATCH, metric="accuracy")
