"""How the cases call ``regimes.attach`` and ``regimes.local_steps``: no other file does.

The options of a case are written in the words of the base. A tree whose functions take other words
gets its translation here, by what their signatures say: both trees train with this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regimes
from benchmarks.same_bits.case import BATCH

STARTERS = ("attach", "local_steps")  # of ``regimes``, which imports them at first use


def attach(model: Any, options: Mapping[str, Any]) -> Any:
    """A hook on a wrapped model."""
    return regimes.attach(model, **_without_comparison(regimes.attach), **options)


def local_steps(model: Any, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """The local steps of a model."""
    without = _without_comparison(regimes.local_steps)
    return regimes.local_steps(model, optimizer, **without, **options)


def _without_comparison(starter: Any) -> dict[str, Any]:
    """The processes compare their weights once in a unit, which 596b94b3 does not; the launches of
    a step are compared without that."""
    known = inspect.signature(starter).parameters
    return {"compare_weights": False} if "compare_weights" in known else {}


def record(folder: Path) -> Any:
    """The option ``record``: a record in a folder."""
    return regimes.RecordOptions(folder, batch_size=BATCH, metric="accuracy")
