"""Figures 18-20: the level of each compressed layer in each epoch, as a map.

Run any grid with an adaptive policy, then draw (some seconds)::

    regimes ablate small --seeds 5
    regimes figure levels runs/small --schedule accordion

The darker, the more a level sends. The paper shows the rank of each layer of ResNet-18 on CIFAR-100
in three figures; here one map has all layers, in network order, whatever their number of levels.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from regimes.base.errors import RecordError
from regimes.plotting import panels as drawing
from regimes.plotting import style
from regimes.plotting.looks import style_of
from regimes.plotting.panels import layer_name as layer_name
from regimes.plotting.panels import level_palette as level_palette
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all

from ..common.command import Files, Out, Records
from ..common.compare import group_runs


def level_map(
    runs: Iterable[Record], schedule: str = "accordion", seed: int | None = None
) -> style.Drawing:
    """`regimes.plotting.panels.level_map` of one schedule, with a caption.

    Args:
        seed: of the run in the map; default the first.

    Raises:
        RecordError: no run of that schedule or seed.
    """
    chosen = group_runs(runs, [schedule], only=True)[schedule]
    shown = next((run for run in chosen if seed in (None, run.seed)), None)
    if shown is None:
        raise RecordError(
            f"no {schedule!r} run of seed {seed}: there are {[r.seed for r in chosen]}"
        )
    fig, numbers = drawing.level_map(chosen, shown)
    with style.theme():
        add_headline(
            fig, f"{style_of(schedule).label} chose {drawing.level_share(chosen, numbers)}"
        )
        style.add_caption(
            fig,
            f"Top: compression level of each compressed layer (network order){_of_run(shown)}. "
            f"Bottom: share of layers at each level but the "
            f"highest compression{_seeds(len(chosen))}. {style.describe_setting(shown)}.",
        )
    return style.Drawing(fig, numbers)


def _of_run(shown: Record) -> str:
    """Seed and schedule, which a job with the hook has none of."""
    return "" if shown.hooked else f" in the run of seed {shown.seed}, schedule {shown.name!r}"


def _seeds(count: int) -> str:
    """The meaning of thick and thin lines, where there are several."""
    if count == 1:
        return ""
    return f", thick: mean over {style.seeds_in_words([count])}, thin: each seed"


def main(
    records: Records,
    out: Out = None,
    schedule: str = "accordion",
    seed: int | None = None,
    name: str = "levels",
) -> list[Path]:
    """Draw the map of levels of one schedule's runs.

    Args:
        schedule: whose runs.
        seed: of the run in the map; default the first.
        name: of the files.
    """
    files = Files(records, out)
    files.figure(name, level_map(load_all(records), schedule, seed))
    return files.print_paths()
