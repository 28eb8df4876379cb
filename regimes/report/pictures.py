"""What the report shows: figures narrow enough for a phone, as SVG in data URIs.

Their captions are text of the page, not of the picture, so that they stay legible there.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl

from regimes.config import DENSE
from regimes.errors import RecordError, RegimesError
from regimes.plotting import panels, style
from regimes.plotting.curves import curves, ends, has
from regimes.plotting.decays import decay_epochs
from regimes.plotting.groups import BASELINES, Groups, compressed, measured, windows
from regimes.plotting.heatmaps import bands, level_map
from regimes.plotting.looks import style_of
from regimes.plotting.metrics import Metric
from regimes.records.frames import logged
from regimes.replay import detect
from regimes.report.content import Study, below, unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 4.8  # inches; at this width the letters can still be read on a phone
FIXED = ("static", "windows")  # policies whose levels need no map
TRAFFIC = Metric("bytes", "MB sent by a worker", "MB", "MB", 1e-6)
PERIOD = Metric("period", "steps between synchronisations", "period", "steps")
BATCH = Metric("batch_size", "batch per worker", "batch", "samples")


@dataclass(frozen=True)
class Picture:
    """A drawing, or in its place a sentence why there is none."""

    title: str
    caption: str
    uri: str = ""


def draw(study: Study) -> dict[str, list[Picture]]:
    """Pictures by section: curves, decisions."""
    if not study.found:
        return {"curves": [], "decisions": []}
    with mpl.rc_context({"text.parse_math": False}):  # a $ in a name is a $
        traffic = _curves(study, "epoch", TRAFFIC, f"Traffic per {unit(study)}")
        tested = [_curves(study, "epoch"), _curves(study, "floats")]
        return {
            "curves": [*dict.fromkeys(tested), *_logged(study)],
            "decisions": [*_levels(study), traffic, _detectors(study)],
        }


def _picture(fig: Figure, title: str, caption: str) -> Picture:
    buffer = io.BytesIO()
    with style.theme():
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    code = base64.b64encode(buffer.getvalue()).decode()
    return Picture(title, caption, f"data:image/svg+xml;base64,{code}")


# -- curves ----------------------------------------------------------------------------------


def _curves(study: Study, against: str, shown: Metric | None = None, title: str = "") -> Picture:
    """One curve per schedule; the numbers are those of ``curves.curves``. Runs in which nothing of
    it was logged are left out."""
    shown = shown or study.shown
    having = {name: [run for run in runs if has(run, shown)] for name, runs in study.found.items()}
    found = {name: runs for name, runs in having.items() if runs}
    called = shown.label.partition(" (")[0]
    if shown.label != shown.name:  # that of somebody's own stays as they have spelt it
        called = called.capitalize()
    if not found:
        return Picture(called, "Nothing to draw: it was not logged.")
    try:
        fig = _drawn(study, found, against, shown)
    except RecordError as error:
        return Picture(called, f"Nothing: {below(study.root, error)}.")
    left_out = ", ".join(name for name, runs in having.items() if not runs)
    words = _words(study, found, against) + (f" Not logged: {left_out}." if left_out else "")
    axis = unit(study) if against == "epoch" else against
    return _picture(fig, title or f"{called} against {axis}", words)


def _drawn(study: Study, found: Groups, against: str, shown: Metric) -> Figure:
    numbers, last = curves(found, shown), ends(found, shown)
    with style.theme():
        fig = style.figure(2.7 + 0.17 * ((len(found) + 1) // 2), WIDTH)
        ax = fig.add_subplot()
        panels.fill(ax, against, numbers, last, shown)
        panels.format_axis(ax, against, last, study.one.config)
        ax.set_ylabel(shown.label)
        if shown not in (TRAFFIC, BATCH):
            panels.limits(ax, numbers, shown, last)
        elif numbers[shown.name].max() > panels.WIDE * numbers[shown.name].min():
            style.log_axis(ax)
        else:
            ax.set_ylim(bottom=0)
        if against == "epoch":
            style.shade(ax, windows(study.found))
            style.mark_decays(ax, study.one)
        handles, labels = ax.get_legend_handles_labels()
        fig.legend(
            handles,
            labels,
            loc="outside upper left",
            handlelength=3.2,
            columnspacing=1,
            ncols=style.legend_columns(labels, WIDTH, 2),
        )
    return fig


def _logged(study: Study) -> list[Picture]:
    """What a user's own training has logged besides that by which it was tested."""
    runs = [run for run in study.runs if run.hooked]
    losses = ("train_loss", *(("test_loss",) if study.shown.name != "loss" else ()))
    names = dict.fromkeys(name for run in runs for name in (*losses, *logged(run.rows).values()))
    known = [measured(study.one, name) for name in names]
    return [_curves(study, "epoch", shown) for shown in known if any(has(r, shown) for r in runs)]


def _words(study: Study, found: Groups, against: str) -> str:
    """Mean over what, and what the marks are."""
    counts = [len(runs) for runs in found.values()]
    spread = style.intervals_in_words(counts, len(counts)).removesuffix(" of the mean")
    mean = f"Mean over {style.seeds_in_words(counts)}; {spread}"
    end = "the last value" if study.one.hooked else "the end"
    parts = [f"{mean if max(counts) > 1 else 'One seed'}; large marker: {end}"]
    decays = [decay_epochs(run) for run in study.runs]
    if against == "epoch" and any(decays):
        whose = "" if len({*decays}) == 1 else " of most schedules"
        parts.append(f"Dotted: the learning rate{whose} decays")
    if against == "epoch" and windows(study.found):
        parts.append("Shaded: the hand-made critical windows")
    return ". ".join(parts) + "."


# -- levels and detectors --------------------------------------------------------------------


def adaptive(study: Study) -> list[str]:
    """The schedules whose layers' levels training decides; a single run, whatever decides."""
    found = []
    for name, runs in study.found.items():
        names = [layer["name"] for layer in compressed(runs[0])]
        used = {
            level
            for run in runs
            for level in run.layers.loc[run.layers["layer"].isin(names), "level"]
        }
        fixed = runs[0].config["policy"]["name"] in FIXED or len(used) == 1
        if used - {DENSE} and (study.single or not fixed):
            found.append(name)
    return found


def _levels(study: Study) -> list[Picture]:
    """A map per adaptive schedule; batch sizes and periods where they change."""
    found = []
    for name in adaptive(study):
        runs = study.found[name]
        fig, _ = level_map(runs, runs[0], WIDTH)
        many = f", thin: {style.seeds_in_words([len(runs)])}, thick: their mean"
        said = (
            f"Of each compressed layer in the run of seed {runs[0].seed}; below, the share of "
            f"layers at each level but the highest compression{many if len(runs) > 1 else ''}."
        )
        found.append(_picture(fig, f"Levels of {style_of(name).label}", said))
    if any(run.epochs["batch_size"].nunique() > 1 for run in study.runs):
        found.append(_curves(study, "epoch", BATCH, "Batch size"))
    if any(run.epochs.get("period", run.epochs["epoch"] * 0).nunique() > 1 for run in study.runs):
        found.append(_curves(study, "epoch", PERIOD, "Period of synchronisation"))
    return found


def _detectors(study: Study) -> Picture:
    """Bands over runs of the baseline and of adaptive schedules; over all if there are none."""
    names = [name for name in study.found if name in BASELINES or name in adaptive(study)]
    runs = [run for name in names or study.found for run in study.found[name]]
    title = "What detectors say"
    try:
        fig, _ = bands(runs, detect.bench(runs), WIDTH)
    except RegimesError as error:
        return Picture(title, f"Nothing: {below(study.root, error)}.")
    said = (
        f"The darker, the more layers (and seeds) a detector calls critical in the {unit(study)}, "
        "replayed over the runs of the schedule above. Right: the share called critical, and the "
        "traffic of spending there and nowhere else, over low compression throughout (–: not "
        "recorded)."
    )
    return _picture(fig, title, said)
