"""What a reader takes in first: the title of a figure, and names at the ends of its lines.

A title is an answer. Where a figure is of a user's own records, `write_answer` computes it from
them.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from regimes.base.config import as_level
from regimes.base.statistics import ANY
from regimes.plotting import canvas
from regimes.plotting.curves import metric_values
from regimes.plotting.groups import BASELINES, Groups, tested_by
from regimes.plotting.looks import Look, Metric, level_text, style_of
from regimes.plotting.said import MeanInterval, format_number
from regimes.records import Record, last_metric

TITLE_LETTERS = 96  # of size 9.5 that fit into 7.2 inches
LINE = 0.145  # inches, of a name next to the axes
LETTERS = 30  # of a line of such a name
LAST = 3  # units whose mean a run has reached, as in tables
SUBJECTS = ("accordion", "accordion-batch")  # of a title
LONGER = ("high-longer", "high-stretched")  # trained until a budget of floats is sent
SPOKEN = {  # a schedule as one says it, by what its levels mean
    "low": "{low}",
    "mid": "{mid}",
    "high": "{high}",
    "accordion": "ACCORDION ({low} or {high})",
    "low-first": "{low} first, then {high}",
    "low-last": "{high} first, then {low}",
    "low-early": "control: {low} early, then {high}",
    "low-late": "control: {high}, then {low} late",
    "low-in-critical": "{low} where critical, else {high}",
    "high-in-critical": "{high} where critical, else dense",
    "dense-deleted": "control: dense, early epochs deleted",
}


# -- names ---------------------------------------------------------------------------------------


def spoken_name(name: str, config: Mapping[str, Any]) -> str:
    """Return a schedule's name in a figure, with the meaning of its levels where they have one.

    >>> spoken_name("low", {"levels": {"low": 4, "high": 1}, "compressor": {"name": "powersgd"}})
    'rank 4'
    """
    form = level_text((config.get("compressor") or {}).get("name", ""))
    said = {level: as_level(value) for level, value in config["levels"].items()}
    known = {level: form.format(value) for level, value in said.items()} if form else {}
    try:
        words = SPOKEN[name].format_map(known)
    except KeyError:  # another schedule, or without these levels
        return style_of(name).label
    first = known.get("low", "").rpartition(" ")[0]  # "rank 4 or 1"
    return words.replace(f"or {first} ", "or ").replace(f"then {first} ", "then ")


def names_of(by_schedule: Groups) -> dict[str, str]:
    """Return `spoken_name` of each schedule. If two would have one name, each has the name of its
    look. A longer run's name says how many floats it has sent: its budget may never have ended
    it."""
    names = {name: spoken_name(name, runs[0].config) for name, runs in by_schedule.items()}
    said = [*names.values()]
    names = {k: v if said.count(v) == 1 else style_of(k).label for k, v in names.items()}
    base = next((name for name in BASELINES if name in by_schedule), None)
    for name in LONGER:
        if base and name in by_schedule:
            share = _sent_by(by_schedule[name]) / (_sent_by(by_schedule[base]) or math.nan)
            as_many = abs(share - 1) < 0.05  # it ends after the unit that reaches its budget
            of_base = f"as many floats as {base}" if as_many else f"{share:.2f} of {base}'s floats"
            names[name] += f", {of_base}" if math.isfinite(share) else ""
    return names


def _sent_by(runs: Sequence[Record]) -> float:
    """Floats of a whole run, the mean over seeds."""
    return float(np.mean([run.epochs["total_floats"].iloc[-1] for run in runs]))


# -- the title -----------------------------------------------------------------------------------

# between a number and its unit no line ends
_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|min|h|%|bits?|[kMG]B|[kMG]bit/s)(?!\w))")


def add_headline(fig: Figure, text: str) -> None:
    """Write the title of a whole figure at its upper left, above a legend that stands there."""
    if canvas.keep_text(fig, headline=text):
        return
    wrapped = canvas.wrap_text(fig, _UNIT.sub("\u00a0", text), TITLE_LETTERS / 7.2, 9.5)
    look: Any = {"fontsize": 9.5, "color": "#111111"}
    if fig.legends:  # the layout makes no room for both
        legend = fig.legends[0]
        legend.set_title(wrapped)
        legend.get_title().set(**look, linespacing=1.3)
        legend.set_alignment("left")
        legend.set_loc("outside upper left")
        return
    fig.suptitle(wrapped, x=0.012, ha="left", linespacing=1.3, **look)  # with y it has no room


def write_answer(
    by_schedule: Groups, metric: Metric, names: Mapping[str, str], baseline: str | None = None
) -> str:
    """Say what curves say, in a sentence with its number: ACCORDION against the best schedule that
    sends no more; without it the cheapest schedule against the usual baseline, or the best. Of runs
    that go on until they have sent as much as low compression: what they end at beside it.

    Args:
        baseline: what it is held against, in place of these.
    """
    ends = {name: _reached(by_schedule[name], metric) for name in by_schedule}
    ends = {name: found for name, found in ends.items() if found}
    if not ends:
        return ""
    mean = {name: float(np.mean([*found.values()])) for name, found in ends.items()}
    sent = {name: _sent_by(by_schedule[name]) for name in ends}
    if len(ends) == 1:
        (name,) = ends
        unit = "%" if metric.name == "accuracy" else _unit(metric)
        return f"{_capitalise(names[name])} ends at {_size(mean[name], metric)}\xa0{unit}"
    if baseline is not None and baseline not in ends:
        return ""
    if baseline is None and "low" in ends and (longer := [n for n in LONGER if n in ends]):
        return _say_longer(by_schedule, ends, longer, names, metric)
    sign = -1.0 if metric.lower else 1.0
    a, b = _pick_two(mean, sent, sign, baseline)
    about = a in SUBJECTS
    gap = _gap(ends, a, b, metric)
    sentence = describe_difference(names[a], names[b], gap, metric, beats=about)
    less, more = (b, a) if about else (a, b)
    if sent[more] > 0:
        share = f"sends {_percent(sent[less] / sent[more])} of its floats"
        if gap.verdict() == "open":
            sentence += f"; {names[b]} {share}" if about else f"; it {share}"
        else:
            sentence += f", which {share}" if about else f", and {share}"
    best = max(mean, key=lambda name: sign * mean[name])
    if about and metric.directed and baseline is None and best not in (a, b):
        lead = _gap(ends, best, a, metric)
        if lead.is_below(0) if metric.lower else lead.is_above(0):  # it sends more
            size = _size(lead.size.value, metric, -1)
            sentence += f"; {names[best].partition(' (')[0]} is {size} {_unit(metric)} better"
    return sentence


def _say_longer(
    by_schedule: Groups,
    ends: Mapping[str, Mapping[int, float]],
    longer: Sequence[str],
    names: Mapping[str, str],
    metric: Metric,
) -> str:
    """What the longer trainings of high compression reach, beside low compression."""
    high = spoken_name("high", by_schedule[longer[0]][0].config)
    sentences: list[str] = []
    for name in longer:
        sent, of_low = _sent_by(by_schedule[name]), _sent_by(by_schedule["low"])
        share = f" with {_percent(sent / of_low)} of {names['low']}'s floats" if of_low else ""
        floats = f"{high}{share}" if share else f"{high}, longer"
        words = floats if name == "high-longer" else f"{floats} and decays stretched"
        one = words if not sentences else "with decays stretched it"
        gap = _gap(ends, name, "low", metric)
        sentence = describe_difference(one, names["low"], gap, metric, numbers=True)
        sentences.append(sentence if not sentences else sentence[:1].lower() + sentence[1:])
    return "; ".join(sentences)


def _gap(ends: Mapping[str, Mapping[int, float]], a: str, b: str, metric: Metric) -> MeanInterval:
    """``a`` minus ``b`` over common seeds; without one, between their means."""
    one, other = ends[a], ends[b]
    if common := sorted(one.keys() & other.keys()):
        within = (-100.0, 100.0) if metric.name == "accuracy" else ANY
        return MeanInterval.of([one[seed] - other[seed] for seed in common], within)
    means = [float(np.mean([*found.values()])) for found in (one, other)]
    return MeanInterval(means[0] - means[1], math.nan, math.nan, 0)


def describe_difference(
    one: str,
    other: str,
    gap: MeanInterval,
    metric: Metric,
    *,
    beats: bool = False,
    numbers: bool = False,
) -> str:
    """Say how a schedule's metric compares with another's, as `MeanInterval.verdict` allows.

    Args:
        one, other: the names of both.
        gap: one minus other, in the unit of the metric's differences.
        beats: whether the question is if the first one is better; else, if it is worse.
        numbers: whether a difference that is not shown has its size.

    >>> from regimes.plotting.looks import find_metric
    >>> describe_difference("A", "B", MeanInterval.of([-1.0, 2.0, 3.0]), find_metric("accuracy"))
    'A is not shown to lose to B'
    >>> describe_difference("A", "B", MeanInterval.of([-1.0, -2.0]), find_metric("accuracy"))
    'Open whether A loses to B: -1.5 points in two seeds'
    """
    form, verdict = f".{max(1, metric.digits - 1)}f" if metric.directed else ".4g", gap.verdict()
    if verdict == "open":
        verb = ("beats" if beats else "loses to") if metric.directed else "differs from"
        return f"Open whether {one} {verb} {other}: {gap.text(f'+{form}', _unit(metric))}"
    one, size = _capitalise(one), gap.size.numbers(form, _unit(metric))
    if verdict == "not shown":
        verb = "beat" if beats else "lose to"
        said = f"{one} is not shown to {verb if metric.directed else 'differ from'} {other}"
        return f"{said} ({gap.numbers(f'+{form}', _unit(metric))})" if numbers else said
    if not metric.directed:
        return f"{one} ends {size} {verdict} {other}"
    if (verdict == "above") != metric.lower:
        return f"{one} is {size} better than {other}"
    return f"{one} loses {size} to {other}"


def _reached(runs: Sequence[Record], metric: Metric) -> dict[int, float]:
    """The mean of each seed's last values. If the runs were tested by this metric, these are the
    values of the last tests, which all have to be finite. Otherwise they are the values of the last
    units that are numbers."""
    reached = {}
    for run in runs:
        if metric == tested_by(run):
            value = metric.factor * last_metric(run, LAST)
        else:
            values = metric_values(run, metric)[-LAST:]
            finite = values[np.isfinite(values)]
            value = float(finite.mean()) if finite.size else math.nan
        if math.isfinite(value):
            reached[run.seed] = value
    return reached


def _pick_two(
    mean: Mapping[str, float], sent: Mapping[str, float], sign: float, baseline: str | None
) -> tuple[str, str]:
    """The schedule that the title is about, and the one that it is held against."""
    rest = [name for name in mean if name != baseline]
    if subject := next((name for name in SUBJECTS if name in rest), None):
        others = [name for name in rest if name != subject]
        cheap = [name for name in others if sent[name] <= 1.001 * sent[subject]]
        return subject, baseline or max(cheap or others, key=lambda name: sign * mean[name])
    cheapest = min(rest, key=lambda name: sent[name])
    others = [name for name in mean if name != cheapest]
    base = baseline or next((name for name in BASELINES if name in others), None)
    return cheapest, base or max(others, key=lambda name: sign * mean[name])


def _percent(share: float) -> str:
    """A share of floats; one that is not 0 is not called so."""
    return f"{100 * share:.0f}\xa0%" if not 0 < share < 0.005 else f"{100 * share:.2g}\xa0%"


def _size(value: float, metric: Metric, more: int = 0) -> str:
    """A value with the digits of its metric, or four where nothing is known of it."""
    return format_number(value, f".{max(1, metric.digits + more)}f" if metric.directed else ".4g")


def _capitalise(words: str) -> str:
    """The words with a capital first letter."""
    return words[:1].upper() + words[1:]


def _unit(metric: Metric) -> str:
    return "bits per byte" if metric.unit == "bits" else metric.unit


# -- names at the ends of lines ------------------------------------------------------------------


def label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, Look]]) -> None:
    """Write names right of the axes, each behind its marker, joined to the end of its line by a
    thin one, and moved apart where they would overlap. Call it when the limits are final. Where
    panels are stacked there is a legend, from the highest end to the lowest: names would take the
    panels' width.

    Args:
        ends: x, y, name, look.
    """
    if canvas.is_stacked(ax.figure):
        ordered = sorted(ends, key=lambda end: end[1], reverse=True)
        handles = [Line2D([], [], label=name, **look.line) for _, _, name, look in ordered]
        canvas.list_above(ax.figure, handles)
        return
    low, high = ax.get_ylim()
    if ax.get_yscale() == "log":
        low, high = math.log(low), math.log(high)
    # the layout is not yet made: title and caption take about a quarter
    height = 0.72 * ax.figure.bbox.height / ax.figure.dpi * ax.get_position().height
    rows = []
    for x, y, name, look in ends:
        at = math.log(y) if ax.get_yscale() == "log" else y
        rows.append(
            ((at - low) / (high - low), x, y, "\n".join(textwrap.wrap(name, LETTERS)), look)
        )
    rows.sort(key=lambda row: row[0])
    room = [LINE * (1 + row[3].count("\n")) / height for row in rows]
    centres = [(a + b) / 2 for a, b in pairwise(room)]
    places = move_apart(np.array([row[0] for row in rows]), np.cumsum([0.0, *centres]))
    here: Any = {"trans": ax.transAxes, "fig": ax.figure, "units": "points"}
    marked, named = offset_copy(x=9, **here), offset_copy(x=15, **here)  # of the right edge
    for (_, x, y, name, look), at in zip(rows, places, strict=True):
        ax.annotate(
            name,
            xy=(x, y),
            xytext=(1, at),
            textcoords=named,
            va="center",
            fontsize=7,
            color=look.colour,
            arrowprops={
                "arrowstyle": "-",
                "color": look.colour,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkB": 3,
            },
        )
        drawn = look.line | {"linestyle": "", "transform": marked, "clip_on": False}
        ax.add_artist(Line2D([1], [at], **drawn))  # told apart in grey


def move_apart(places: np.ndarray, ladder: np.ndarray | float) -> np.ndarray:
    """Move increasing places as little as possible (in squares) to have at least the distances of a
    ladder.

    The differences to the ladder must not decrease: their isotonic regression.

    Args:
        ladder: increasing numbers, one per place; or the distance of each two.

    >>> move_apart(np.array([0.0, 0.1, 0.1]), 0.1).round(3).tolist()
    [-0.033, 0.067, 0.167]
    """
    from scipy.optimize import isotonic_regression

    steps = np.asarray(ladder) * (np.arange(len(places)) if np.ndim(ladder) == 0 else 1.0)
    return np.asarray(isotonic_regression(places - steps).x) + steps
