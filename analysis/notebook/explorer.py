"""The explorer: a recorded run under another detector, threshold and network, in a notebook.

::

    from analysis.notebook.explorer import explorer

    explorer("data/reference/small.tar.xz")

Pick a run and a detector, move eta, interval or the network: bands, level map, traffic and
predicted seconds follow by replay (`cost.whatif`). Stands on ipywidgets, which comes with
``pip install -e ".[notebooks]"``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from matplotlib.patches import Patch

from regimes.base.errors import require, unexpected_value
from regimes.cost.network import Network, format_bandwidth
from regimes.plotting import style
from regimes.plotting.looks import order_schedules
from regimes.plotting.panels import draw_bands, draw_levels, layer_name, level_palette
from regimes.records import Record, load_all, unit_name

from ..cost.whatif import KNOBS, Answer, PricedRuns, Settings
from .outputs import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BANDWIDTHS = tuple(digit * 10.0**power for power in range(6, 11) for digit in (1, 2, 5))
LATENCIES = (0.0, 5e-6, 20e-6, 50e-6, 200e-6, 1e-3, 5e-3)  # seconds, choices of a slider
HEADS = ("", "critical", "floats", "of low", "seconds", "× dense", "signal")
DPI = 100  # pixels per inch: a figure is redrawn at each change
BUSY = "<b class='regimes-busy'>\N{HOURGLASS} replaying ...</b>"
READY = "<span>\N{NO-BREAK SPACE}</span>"  # as high as BUSY, so that nothing jumps
WIDE = widgets.Layout(width="430px")


def explorer(records: str | Path | Iterable[Record], **start: Any) -> widgets.Widget:
    """The view, to be shown by a cell of a notebook.

    Args:
        records: a folder of runs, an archive of them, or runs.
        start: fields of `whatif.Settings` to start from.

    Raises:
        RecordError: no run there, or none with two levels of compression.
        ConfigError: no knob can stand at a value to start from.
    """
    runs = load_all(records) if isinstance(records, str | Path) else list(records)
    return Explorer(PricedRuns(runs), **start).view


class Explorer:
    """The widgets and what joins them.

    Attributes:
        knobs: a widget per field of `Settings`.
        settings, answer: where the knobs stand, and what follows.
        busy: a line that shows while an answer is computed.
        view: the widget that contains all others.
    """

    def __init__(self, study: PricedRuns, **start: Any) -> None:
        self.study = study
        schedules = order_schedules(name for name, _ in study.runs)
        first = "low" if "low" in schedules else schedules[0]
        schedule = start.get("schedule", first)
        require(schedule in schedules, "schedule", schedule, f"one of {', '.join(schedules)}")
        seed = min(seed for name, seed in study.runs if name == schedule)
        self.settings = Settings(**{"schedule": schedule, "seed": seed, **start})
        Network(self.settings.bandwidth, self.settings.latency).checked()
        self.knobs = _knobs(self.settings, schedules)
        self._offer()
        for name, value in start.items():  # a widget takes its nearest value and says nothing
            if self.knobs[name].value != value:
                raise unexpected_value(name, value, _allowed(self.knobs[name]))
        self.numbers, self.picture = widgets.HTML(), widgets.Image(format="png")
        self.busy = widgets.HTML(READY)
        for knob in self.knobs.values():
            knob.observe(self._moved, "value")
        left, right = list(self.knobs.values())[:3], list(self.knobs.values())[3:]
        columns = widgets.HBox([widgets.VBox(left), widgets.VBox(right)])
        self.view = widgets.VBox([columns, self.busy, self.numbers, self.picture])
        self._moving = False
        self._moved(None)

    def _moved(self, _: Any) -> None:
        """A knob was moved: the lists and the answer follow."""
        if self._moving:
            return
        self._moving = True  # what is set from here calls back
        self.busy.value = BUSY
        try:
            self._offer()
            self.settings = replace(self.settings, **{k: w.value for k, w in self.knobs.items()})
            self.answer = self.study.answer(self.settings)
            self.picture.value = png(figure(self.study, self.settings, self.answer), DPI)
            self.numbers.value = as_html(self.answer, self.settings)
        finally:
            self._moving, self.busy.value = False, READY

    def _offer(self) -> None:
        """Offer the seeds and detectors of the chosen run; enable the detector's knobs alone."""
        schedule = self.knobs["schedule"].value
        seeds = sorted(seed for name, seed in self.study.runs if name == schedule)
        _choices(self.knobs["seed"], seeds)
        run = self.study.runs[schedule, self.knobs["seed"].value]
        _choices(self.knobs["detector"], self.study.detectors(run))
        has = self.study.knobs(run, self.knobs["detector"].value)
        for name in KNOBS:
            self.knobs[name].disabled = name not in has


def _knobs(start: Settings, schedules: list[str]) -> dict[str, widgets.Widget]:
    same: dict[str, Any] = {"layout": WIDE, "style": {"description_width": "120px"}}
    slider: dict[str, Any] = {**same, "min": 0.05, "step": 0.05, "readout_format": ".2f"}
    # the start last: of two that are written alike, a slider has it
    bandwidths = {format_bandwidth(b): b for b in (*BANDWIDTHS, start.bandwidth)}
    latencies = {f"{1e6 * s:g} µs": s for s in (*LATENCIES, start.latency)}
    return {
        "schedule": widgets.Dropdown(
            options=schedules, value=start.schedule, description="schedule", **same
        ),
        "seed": widgets.Dropdown(options=[start.seed], description="seed", **same),
        "detector": widgets.Dropdown(options=[start.detector], description="detector", **same),
        "eta": widgets.FloatSlider(start.eta, max=1.5, description="eta", **slider),
        "interval": widgets.IntSlider(
            start.interval, min=1, max=12, description="interval (epochs)", **same
        ),
        "share": widgets.FloatSlider(
            start.share, max=1.0, description="share (controls)", **slider
        ),
        "bandwidth": widgets.SelectionSlider(
            options=sorted(bandwidths.items(), key=_value),
            value=start.bandwidth,
            description="bandwidth",
            **same,
        ),
        "latency": widgets.SelectionSlider(
            options=sorted(latencies.items(), key=_value),
            value=start.latency,
            description="latency",
            **same,
        ),
    }


def _allowed(knob: widgets.Widget) -> str:
    """Where a knob can stand, in words."""
    if isinstance(knob, widgets.Dropdown):
        return f"one of {', '.join(map(str, knob.options))}"
    return f"{knob.min:g} to {knob.max:g}"


def _value(option: tuple[str, float]) -> float:
    return option[1]


def _choices(knob: widgets.Dropdown, known: list[Any]) -> None:
    """Replace the options; the chosen one stays if it is among them."""
    if list(knob.options) != known:
        chosen = knob.value
        knob.options = known
        knob.value = chosen if chosen in known else known[0]


# -- what is shown ---------------------------------------------------------------------------


def as_html(answer: Answer, settings: Settings) -> str:
    """The numbers as a table."""
    rows = [
        (
            name,
            f"{row['low']:.0%}",
            f"{row['floats']:,.0f}",
            f"{row['of_low']:.3f}",
            f"{row['seconds']:.2f}",
            f"{row['speed_up']:.2f}",
            "" if math.isnan(row["signal"]) else f"{row['signal']:.1%}",
        )
        for name, row in answer.numbers.iterrows()
    ]
    lines = [_line(HEADS, "th"), _line(rows[0], "td", " class='regimes-chosen'")]
    lines += [_line(row, "td") for row in rows[1:]]
    network = Network(settings.bandwidth, settings.latency)
    about = (
        f"Critical: share of epochs and layers at low compression. Floats: one worker, the whole "
        f"run, the paper's count. Seconds: predicted for {network} (ring), and how many times as "
        "fast as dense. Signal: share of training time that measuring it took. What was not "
        "trained has no accuracy."
    )
    return (
        f"<table style='line-height:1.5'>{''.join(lines)}</table>"
        f"<div style='font-size:85%;line-height:1.3;max-width:880px'>{about}</div>"
    )


def _line(cells: Sequence[Any], kind: str, attributes: str = "") -> str:
    """A row of an HTML table; all cells but the first are aligned to the right."""
    shown = [
        f"<{kind} style='text-align:{'right' if i else 'left'};padding-left:16px'>"
        f"{html.escape(str(cell))}</{kind}>"
        for i, cell in enumerate(cells)
    ]
    return f"<tr{attributes}>{''.join(shown)}</tr>"


def figure(study: PricedRuns, settings: Settings, answer: Answer) -> Figure:
    """Bands of all detectors, and the chosen one's level map."""
    run, bands, levels = study.runs[settings.schedule, settings.seed], answer.bands, answer.levels
    names = {layer["name"]: layer_name(layer) for layer in run.header["layers"]}
    colours = level_palette(run, {"low", "high"})
    size = 7.5 if len(levels) <= 30 else 4.5
    heights = [0.24 * len(bands) + 0.3, max(1.4, len(levels) * size / 45)]
    with style.theme():
        fig = style.figure(sum(heights) + 1.3, 8.8)
        top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=heights)
        draw_bands(top, bands)
        top.set_yticks(range(len(bands)), list(bands.index), fontsize=7.5)
        top.get_yticklabels()[0].set_fontweight("bold")
        top.set_title(
            "share of layers at low compression: white none, dark all", loc="left", pad=14
        )
        draw_levels(bottom, levels, colours)
        bottom.set_yticks(range(len(levels)), [names[name] for name in levels.index], fontsize=size)
        bottom.set(xlabel=unit_name(run.config))
        bottom.set_title(f"level of each layer by {bands.index[0]}", loc="left")
        entries = [
            Patch(facecolor=colour, edgecolor="#888888", label=f"{level} compression")
            for level, colour in colours.items()
        ]
        bottom.legend(handles=entries, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        for ax in (top, bottom):
            style.mark_decays(ax, run, labelled=ax is top, behind="white")
        style.add_caption(
            fig,
            f"Replayed over one run (n\xa0=\xa01): {run.name}, seed {run.seed}. "
            f"{style.describe_setting(run)}.",
        )
    return fig
