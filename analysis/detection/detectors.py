"""Detectors compared: when each calls a run critical, and how far they agree.

Run, then draw (a minute per run on one core, and 10 seconds)::

    regimes ablate small --seeds 5 --schedules low accordion
    regimes figure detectors runs/small/low runs/small/accordion

The tables are as ``regimes detect`` prints them; the figure has one band per detector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regimes.plotting import panels as drawing
from regimes.plotting import style
from regimes.plotting.words import add_headline
from regimes.policies.replay import detect
from regimes.policies.replay.compare import Comparison
from regimes.records import Record

from ..common.command import Files, Out, Several, name_of


def bands(runs: Sequence[Record], result: Comparison) -> style.Drawing:
    """`regimes.plotting.panels.draw_detectors`, with a caption."""
    fig, numbers = drawing.draw_detectors(runs, result)
    with style.theme():
        add_headline(fig, _title(result))
        style.add_caption(fig, _words(runs, result))
    return style.Drawing(fig, numbers)


def _title(result: Comparison) -> str:
    """Which detectors mark the least and the most."""
    share = result.detectors.groupby("detector")["critical"].mean().sort_values()
    low, high = (
        f"{name} {100 * share[name]:.0f}\xa0%" for name in (share.index[0], share.index[-1])
    )
    if share.iloc[0] == share.iloc[-1]:
        each = f"{100 * share.iloc[0]:.0f}\xa0%"
        return f"Each detector marks {each} of layers and epochs as critical"
    return f"Of layers and epochs detectors mark as critical: at least {low}, at most {high}"


def _words(runs: Sequence[Record], result: Comparison) -> str:
    counts = result.detectors.groupby(["schedule", "detector"]).size().tolist()
    return (
        f"Mean over {style.seeds_in_words(counts)} per schedule. The darker, the more compressed "
        "layers the detector calls critical in the epoch (those of one verdict for the model: the "
        "more seeds), replayed over runs of the schedule named above each panel. Of low: traffic "
        "of spending there and nowhere else, over low compression throughout. "
        f"{style.describe_setting(runs[0])}."
    )


def main(
    runs: Several,
    detectors: tuple[str, ...] = (),
    out: Out = None,
) -> list[Path]:
    """Print the tables of `regimes detect` and draw the bands.

    Args:
        runs: runs, or folders of runs.
        detectors: NAME or NAME:key=value,key=value; default all with a recorded signal.
    """
    files = Files(f"{name_of(runs[0])}/detectors", out)
    result = detect.main(runs, detectors, files.folder)
    files.figure("bands", bands(detect.read_runs(runs), result))
    return files.print_paths()
