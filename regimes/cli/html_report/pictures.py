"""The figures of the report, narrow enough for a phone, as SVG in data URIs."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.figure import Figure

from regimes.base.config import DENSE
from regimes.base.errors import RecordError, RegimesError
from regimes.cli.html_report.content import Study, name_unit, shorten_paths
from regimes.plotting import style
from regimes.plotting.curves import has_metric
from regimes.plotting.groups import (
    BASELINES,
    Groups,
    critical_windows,
    decay_epochs,
    measured_metric,
)
from regimes.plotting.lines import BATCH, PERIOD, TRAFFIC, WIDTH, draw_lines
from regimes.plotting.looks import Metric, style_of
from regimes.plotting.panels import draw_detectors, level_map, tabulate_levels
from regimes.policies.replay import detect
from regimes.records.reader import logged_values

FIXED = ("static", "windows")  # policies whose levels need no map


@dataclass(frozen=True)
class Picture:
    """Holds a drawing; without a URI, the caption says why there is none."""

    title: str
    caption: str
    uri: str = ""


def draw_pictures(study: Study) -> dict[str, list[Picture]]:
    """Draw the pictures by section of the page."""
    if not study.groups:
        return {"curves": [], "decisions": []}
    with mpl.rc_context({"text.parse_math": False}):  # a $ in a name is a $
        traffic = _draw_curves(study, "epoch", TRAFFIC, f"Traffic per {name_unit(study)}")
        tested = [_draw_curves(study, "epoch"), _draw_curves(study, "floats")]
        return {
            "curves": [*dict.fromkeys(tested), *_logged(study)],
            "decisions": [*_draw_levels(study), traffic, _draw_detectors(study)],
        }


def _draw_picture(fig: Figure, title: str, caption: str) -> Picture:
    code = base64.b64encode(style.render_figure(fig)).decode()
    return Picture(title, caption, f"data:image/svg+xml;base64,{code}")


def _draw_curves(
    study: Study, against: str, metric: Metric | None = None, title: str = ""
) -> Picture:
    """One curve per schedule, of the runs that have logged the metric."""
    metric = metric or study.metric
    logged_by = {
        name: [r for r in runs if has_metric(r, metric)] for name, runs in study.groups.items()
    }
    groups = {name: runs for name, runs in logged_by.items() if runs}
    name = metric.label.partition(" (")[0]
    if metric.label != metric.name:  # else it is a name that a user has chosen
        name = name.capitalize()
    if not groups:
        return Picture(name, "Nothing to draw: it was not logged.")
    try:
        fig, _ = draw_lines(groups, against, metric, study.example)
    except RecordError as error:
        return Picture(name, f"Nothing: {shorten_paths(study.root, error)}.")
    left_out = ", ".join(name for name, runs in logged_by.items() if not runs)
    caption = _caption(study, groups, against) + (f" Not logged: {left_out}." if left_out else "")
    axis = name_unit(study) if against == "epoch" else against
    return _draw_picture(fig, title or f"{name} against {axis}", caption)


def _logged(study: Study) -> list[Picture]:
    """The further values that a user's training has logged."""
    runs = [run for run in study.runs if run.hooked]
    losses = ["train_loss", "test_loss"][: 1 if study.metric.name == "loss" else 2]
    names = dict.fromkeys(
        name for run in runs for name in (*losses, *logged_values(run.rows).values())
    )
    metrics = [measured_metric(study.example, name) for name in names]
    return [
        _draw_curves(study, "epoch", m) for m in metrics if any(has_metric(run, m) for run in runs)
    ]


def _caption(study: Study, groups: Groups, against: str) -> str:
    counts = [len(runs) for runs in groups.values()]
    bands = against == "epoch"
    spread = style.intervals_in_words(counts, len(counts), bands).removesuffix(" of the mean")
    mean = f"Mean over {style.seeds_in_words(counts)}; {spread}"
    end = "the last value" if study.example.hooked else "the end"
    parts = [f"{mean if max(counts) > 1 else 'One seed'}; large marker: {end}"]
    decays = [decay_epochs(run) for run in study.runs]
    if against == "epoch" and any(decays):
        whose = "" if len({*decays}) == 1 else " of most schedules"
        parts.append(f"Dotted: the learning rate{whose} decays")
    if against == "epoch" and critical_windows(study.groups):
        parts.append("Shaded: the hand-made critical windows")
    return ". ".join(parts) + "."


def adaptive_schedules(study: Study) -> list[str]:
    """List the schedules whose levels training decides; a single run also if it was fixed."""
    names = []
    for name, runs in study.groups.items():
        used = {*tabulate_levels(runs)["level"]}
        fixed = runs[0].config["policy"]["name"] in FIXED or len(used) == 1
        if used - {DENSE} and (study.single or not fixed):
            names.append(name)
    return names


def _draw_levels(study: Study) -> list[Picture]:
    """A map per adaptive schedule; batch sizes and periods where they change."""
    pictures = []
    for name in adaptive_schedules(study):
        runs = study.groups[name]
        fig, _ = level_map(runs, runs[0], WIDTH)
        many = f", thin: {style.seeds_in_words([len(runs)])}, thick: their mean"
        caption = (
            f"Of each compressed layer in the run of seed {runs[0].seed}; below, the share of "
            f"layers at each level but the highest compression{many if len(runs) > 1 else ''}."
        )
        pictures.append(_draw_picture(fig, f"Levels of {style_of(name).label}", caption))
    if any(run.epochs["batch_size"].nunique() > 1 for run in study.runs):
        pictures.append(_draw_curves(study, "epoch", BATCH, "Batch size"))
    if any(run.epochs.get("period", run.epochs["epoch"] * 0).nunique() > 1 for run in study.runs):
        pictures.append(_draw_curves(study, "epoch", PERIOD, "Period of synchronisation"))
    return pictures


def _draw_detectors(study: Study) -> Picture:
    """Bands over the runs of baselines and adaptive schedules; over all runs if there are none."""
    names = [
        name for name in study.groups if name in BASELINES or name in adaptive_schedules(study)
    ]
    runs = [run for name in names or study.groups for run in study.groups[name]]
    title = "What detectors say"
    try:
        fig, _ = draw_detectors(runs, detect.bench_detectors(runs), WIDTH)
    except RegimesError as error:
        return Picture(title, f"Nothing: {shorten_paths(study.root, error)}.")
    caption = (
        f"The darker, the more layers (and seeds) a detector calls critical in the "
        f"{name_unit(study)}, "
        "replayed over the runs of the schedule above. Right: the share called critical, and the "
        "traffic of spending there and nowhere else, over low compression throughout (–: not "
        "recorded)."
    )
    return _draw_picture(fig, title, caption)
