"""Output of notebook cells: figures as small PNGs, tables as frames of rounded text.

::

    from analysis.notebook import compared, show

    show(figure2b(runs))                     # the house style, a caption, no pyplot state
    schedules, differences = compared(runs)  # the tables that the commands print

Stands on IPython, which comes with ``pip install -e ".[notebooks]"``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError, suggest_nearest
from regimes.plotting import style
from regimes.policies.replay import detect
from regimes.policies.replay.compare import Comparison
from regimes.records import Record

from ..common import compare

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure

pd.set_option("display.max_colwidth", None)  # tables of sentences are shown whole
DPI = 120  # a figure of two columns is then 864 pixels wide


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """A figure as it is saved to disk, at a screen's resolution and in 256 colours: a third of the
    bytes."""
    from PIL import Image

    drawn, kept = io.BytesIO(), io.BytesIO()
    with style.theme():
        figure.savefig(drawn, dpi=dpi, metadata={"Software": None})
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(kept, "PNG", optimize=True)
    return kept.getvalue()


def show(drawn: Figure | tuple[Any, ...]) -> Image:
    """A figure for the output of a cell; its caption is the alternative text.

    Args:
        drawn: a figure, or what the functions of `analysis` return: (figure, numbers, ...).
    """
    from IPython.display import Image

    figure = drawn[0] if isinstance(drawn, tuple) else drawn
    return Image(png(figure), alt=" ".join(figure.get_supxlabel().split()))


def picture(path: str) -> Image:
    """A figure that is committed, by its path seen from the folder of the notebooks."""
    from IPython.display import Image

    return Image(filename=path)


def frame(table: Table) -> pd.DataFrame:
    """Rounded text, with its first column as the index."""
    return pd.DataFrame(table.rows, columns=list(table.heads)).set_index(table.heads[0])


def compared(
    runs: Iterable[Record], schedules: Sequence[str] = ()
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per schedule, one row per difference): the tables of `common.compare`.

    Args:
        schedules: which ones; default all.
    """
    chosen = [run for run in runs if not schedules or run.name in schedules]
    first, second = compare.as_text(*compare.table(chosen, needed=schedules, all_pairs=True))
    return frame(first), frame(second)


def agreement(result: Comparison) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per detector, one row per pair) of ``replay.detect.bench_detectors``: means over
    seeds."""
    shown = []
    for part, columns in detect.NUMBERS.items():
        rows = detect.over_seeds(getattr(result, part), part)
        shown.append(rows.set_index(detect.KEYS[part])[["n", *columns]].round(2))
    return shown[0], shown[1]


def reasons(record: Record, layer: str) -> pd.DataFrame:
    """Why a layer had its level in each epoch: norm, level, rule, and the numbers that it compared.

    Empty where the level was merely kept.

    Raises:
        RecordError: no such layer.
    """
    names = [known["name"] for known in record.header["layers"]]
    if layer not in names:
        raise RecordError(
            f"{record.folder} has no layer {layer!r}: {suggest_nearest(layer, names)}"
        )
    rows = record.layers[record.layers["layer"] == layer].reset_index(drop=True)
    why = pd.DataFrame([reason or {} for reason in rows["why"]])
    table = rows[["epoch", record.statistic, "level"]].join(why).round(3).astype(object)
    return table.where(table.notna(), "")
