"""What the notebooks show: a name for each figure, table and replay, so two imports are enough.

::

    import regimes
    from analysis import notebook

    notebook.show(notebook.figure2b(notebook.records("small")))

A name is imported when it is first used. `NAMES` says where each comes from.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .outputs import agreement, compared, frame, picture, png, reasons, show

if TYPE_CHECKING:
    from regimes.records import Record

REFERENCE = Path("../data/reference")  # seen from the folder of the notebooks
NAMES = {  # "module:name", or a module
    # figures of the paper
    "batch": "analysis.paper.batch:figure",
    "curves": "analysis.paper.curves:figure",
    "figure2a": "analysis.paper.figure2:figure2a",
    "figure2b": "analysis.paper.figure2:figure2b",
    "figure3": "analysis.paper.figure3:figure3",
    "figure4a": "analysis.paper.figure4a:figure4a",
    "level_map": "analysis.paper.figure18_20:level_map",
    "published": "analysis.paper.published",
    "tables": "analysis.paper.tables",
    # comparisons
    "claims": "analysis.findings.claims",
    "comparisons": "analysis.tournament.equal_floats:comparisons",
    "figure_cost": "analysis.cost.cost:figure_cost",
    "schedules": "analysis.common.compare:schedules",
    "tested_by": "regimes.plotting.groups:tested_by",
    "tournament": "analysis.tournament.tournament",
    "yoked": "analysis.tournament.yoked",
    # detectors and replays
    "bands": "analysis.detection.detectors:bands",
    "bench_detectors": "regimes.policies.replay.detect:bench_detectors",
    "explore": "analysis.notebook.explorer:explorer",
    "other_runs": "analysis.detection.unforced:other_runs",
    "replay_rule": "regimes.policies.replay.replay:replay_rule",
    "replay_traffic": "regimes.policies.replay.replay:replay_traffic",
    "scored": "analysis.detection.unforced:scored",
    "signals": "analysis.detection.signals:signals",
    "unforced": "analysis.detection.agreement:figure",
    # LASSO and learning rates
    "Setting": "analysis.lasso.numbers:Setting",
    "edge": "analysis.rates.edge",
    "lasso": "analysis.lasso.lasso:lasso",
    "lasso_table": "analysis.lasso.lasso:table",
    "narrowing": "analysis.rates.narrowing",
    "quadratic": "analysis.rates.quadratic",
    "usable": "analysis.rates.usable",
    # harm
    "criticality": "analysis.criticality.criticality",
    "draw": "analysis.criticality.draw",
    "harm": "analysis.criticality.harm",
    "measured": "analysis.criticality.measured",
    "onset": "analysis.criticality.onset",
    "scores": "analysis.criticality.scores",
}
__all__ = [
    "agreement",
    "compared",
    "frame",
    "picture",
    "png",
    "reasons",
    "records",
    "scratch",
    "show",
]


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = NAMES[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def records(*names: str) -> list[Record]:
    """The committed records of some grids, such as ``records("small")``."""
    from regimes.records import load_all

    return load_all(*(REFERENCE / f"{name}.tar.xz" for name in names))


def scratch() -> str:
    """A new folder for a run that need not be kept."""
    return tempfile.mkdtemp()
