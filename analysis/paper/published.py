"""The authors' own curves and tables, as published: for comparison with ours.

``analysis/data/curves.csv.xz`` has the test loss and metric per epoch of 57 runs whose raw logs
the authors released with their code (github.com/uw-mad-dash/Accordion, ``raw_data_files``), one
seed each; ``tables.csv`` the printed Tables 1-6. The names of both are the paper's ("rank 2",
"99%", "512"); `setting` translates a configuration of ours. All logs at once (some seconds; no run
is needed)::

    regimes figure published
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from regimes.base.errors import RecordError
from regimes.plotting import canvas, looks, panels, style
from regimes.plotting.looks import Metric, styles_of
from regimes.plotting.words import add_headline
from regimes.records import Record

from ..common.command import Files, Out
from ..common.estimates import frame_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parents[1] / "data"
KEYS = ["data", "model", "compressor"]
WORDS = {"batch": ("small-batch", "large-batch", "accordion-batch")}  # else low, high, accordion
MODELS = {"senet18": "senet", "se-resnet18": "senet"}  # ours -> the paper's
COLUMNS = 4  # panels side by side


@functools.cache
def _read(name: str) -> pd.DataFrame:
    try:
        return pd.read_csv(FOLDER / name, dtype={"level": str, "printed": str})
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot read the published numbers {FOLDER / name}: {error}; install Regimes again"
        ) from None


def tables() -> pd.DataFrame:
    """The rows of Tables 1-6: table, data, model, compressor, level, accuracy (%), printed (data
    sent, as text), unit ("M" or "G" floats), seconds."""
    return _read("tables.csv").copy()


def runs() -> pd.DataFrame:
    """All logs: data, model, compressor, schedule, level, metric, epoch, test_loss, value."""
    frame = _read("curves.csv.xz").copy()
    frame.insert(3, "schedule", "")
    for (_, _, compressor), group in frame.groupby(KEYS):
        named = _schedules(str(compressor), group["level"].unique().tolist())
        frame.loc[group.index, "schedule"] = group["level"].map(named)
    return frame


def _schedules(compressor: str, levels: list[str]) -> dict[str, str]:
    """What a grid of ours calls the run at each level; the level that sends more is low."""
    static = sorted((x for x in levels if x != "accordion"), key=number)
    low, high = static if compressor == "batch" else reversed(static)
    return dict(
        zip(
            (low, high, "accordion"),
            WORDS.get(compressor, ("low", "high", "accordion")),
            strict=True,
        )
    )


def number(level: str) -> float:
    """The number in "rank 2", "99%" or "512"."""
    return float(level.removeprefix("rank ").removesuffix("%"))


def curves(*, data: str, model: str, compressor: str) -> pd.DataFrame:
    """The authors' logs of one setting.

    Args:
        data, model: as a configuration or the paper has them: "resnet18-cifar10", "resnet18".
        compressor: "powersgd", "topk", or "batch" where the batch size is the level.

    Returns:
        One row per schedule and epoch: schedule, level, epoch, test_loss, and the metric in a
        column of its name (accuracy in %).

    Raises:
        RecordError: there are none.
    """
    model = paper_name(model)
    frame = runs()
    chosen = frame[(frame[KEYS] == [data, model, compressor]).all(axis=1)]
    if chosen.empty:
        there = sorted({", ".join(key) for key in frame[KEYS].itertuples(index=False)})
        raise RecordError(
            f"the authors published no curves for {data}, {model}, {compressor}; there are: "
            f"{'; '.join(there)}"
        )
    shown = looks.find_metric(chosen["metric"].iloc[0])
    values = chosen.assign(**{shown.name: shown.factor * chosen["value"]})
    columns = ["schedule", "level", "epoch", "test_loss", shown.name]
    return values[columns].reset_index(drop=True)


def paper_name(model: str) -> str:
    """ "se-resnet18-cifar100" -> "senet"."""
    name = model.removesuffix("-cifar100").removesuffix("-cifar10")
    return MODELS.get(name, name)


# -- our runs --------------------------------------------------------------------------------


def setting(config: dict[str, Any]) -> tuple[str, str, str]:
    """(data, model, compressor) of a configuration, in the paper's names."""
    compressor = "batch" if config.get("batch_policy") else config["compressor"]["name"]
    return config["data"]["name"], paper_name(config["model"]["name"]), compressor


def level(config: dict[str, Any], name: str) -> str:
    """What a level of a configuration is in the paper: "rank 2", "99%", "512"."""
    if config.get("batch_policy"):
        return str(config["workers"] * config["batch_levels"][name])
    value = config["levels"].get(name, name)
    spelt = f"{value:g}" if isinstance(value, int | float) else str(value)
    return {"powersgd": f"rank {spelt}", "topk": f"{spelt}%"}.get(
        config["compressor"]["name"], spelt
    )


def of(run: Record, shown: Metric) -> pd.DataFrame:
    """`curves` of a run's setting, with the column that is to be shown.

    Raises:
        RecordError: there are none, or of other levels, or without that column.
    """
    data, model, compressor = setting(run.config)
    logs = curves(data=data, model=model, compressor=compressor)
    levels = run.config["batch_levels" if compressor == "batch" else "levels"]
    ours = [level(run.config, name) for name in ("low", "high") if name in levels]
    theirs = [x for x in logs["level"].unique() if x != "accordion"]
    if set(ours) != set(theirs):
        raise RecordError(
            f"{run.folder} has the levels {', '.join(ours)}, the authors' curves of {data}, "
            f"{model}, {compressor} are of {', '.join(theirs)}: nothing to lay over it"
        )
    if shown.name not in logs:
        raise RecordError(
            f"the authors' logs have no {shown.name!r}: choose test_loss or {logs.columns[-1]}"
        )
    return logs


# -- all of them -----------------------------------------------------------------------------


def overlay(ax: Axes, rows: pd.DataFrame, shown: Metric) -> None:
    """Draw the rows of `of`: thin, black, with the dashes of our schedules."""
    for name, look in styles_of(rows["schedule"]).items():
        log, label = rows[rows["schedule"] == name], f"{look.label}: authors' log"
        thin: Any = {"color": "black", "linewidth": 0.6, "alpha": 0.8, "zorder": 5}
        ax.plot(log["epoch"], log[shown.name], linestyle=look.dash, label=label, **thin)


def figure() -> style.Drawing:
    """One small panel per setting, metric against epoch: Figures 6, 11 and 12-17 as logged."""
    frame = runs()
    settings = list(frame[KEYS].drop_duplicates().sort_values(KEYS).itertuples(index=False))
    rows = -(-len(settings) // COLUMNS)
    with style.theme():
        fig = style.figure(1.45 * rows + 0.7, 9.5)
        if narrow := canvas.is_stacked(fig):  # two beside one another: a page has all of them
            rows = -(-len(settings) // 2)
            fig.set_figheight(canvas.HIGHEST)
            axes = fig.add_gridspec(rows, 2).subplots(squeeze=False).ravel()
            layout: Any = fig.get_layout_engine()
            layout.set(hspace=0, h_pad=0.01)
        else:
            axes = fig.subplots(rows, COLUMNS, squeeze=False).ravel()
        for ax, (data, model, compressor) in zip(axes, settings, strict=False):
            logs = curves(data=data, model=model, compressor=compressor)
            shown = looks.find_metric(logs.columns[-1])
            for name, look in styles_of(logs["schedule"]).items():
                log = logs[logs["schedule"] == name]
                word = "ACCORDION" if name.startswith("accordion") else log["level"].iloc[0]
                ax.plot(
                    log["epoch"],
                    log[shown.name],
                    label=word,
                    color=look.colour,
                    linestyle=look.dash,
                    linewidth=0.9,
                )
            words = f"{model}, {data}, {compressor}"
            if narrow:  # the legend is of all panels
                levels = [text for text in ax.get_legend_handles_labels()[1] if text != "ACCORDION"]
                words += f": {', '.join(levels)}"
            ax.set_title(words, fontsize=5 if narrow else 7, pad=2 if narrow else None)
            panels.set_limits(ax, logs[logs["epoch"] > 20], shown)
            if shown.name != "accuracy":
                ax.set_ylabel(shown.label, fontsize=6.5)
            ax.tick_params(labelsize=6)
            if narrow and ax not in axes[len(settings) - 2 : len(settings)]:
                ax.tick_params(labelbottom=False)
                continue
            ax.set_xlabel("epoch", fontsize=6.5, labelpad=1)
            if not narrow:
                at = "best" if shown.log else "lower right"
                ax.legend(fontsize=5.5, loc=at, handlelength=3)
        if narrow:
            names = ("the first level", "the second", "ACCORDION")
            place: Any = {"loc": "outside upper left", "ncols": 3, "handlelength": 3}
            fig.legend(axes[0].lines, names, **place)
        for ax in axes[len(settings) :]:
            ax.set_axis_off()
        fig.supylabel("test accuracy (%, higher is better) unless marked otherwise", fontsize=8)
        add_headline(fig, _title(frame))
        style.add_caption(
            fig,
            f"Metric against epoch in the authors' {frame.groupby([*KEYS, 'level']).ngroups} "
            "published logs, one seed each (n\xa0=\xa01, so no interval); 300 epochs, 90 of the "
            "LSTM, and one SENet log that stops at 234. Vertical axes: what is reached after "
            "epoch 20.",
        )
    return style.Drawing(fig, frame)


def _title(frame: pd.DataFrame) -> str:
    """How often ACCORDION ends within half a point of the best static level, of the accuracies."""
    ends = frame[frame["metric"] == "accuracy"].groupby([*KEYS, "level"])["value"].last()
    wide = 100 * ends.unstack("level")
    short = wide.drop(columns="accordion").max(axis=1) - wide["accordion"]
    near = int((short.dropna() <= 0.5).sum())
    return (
        f"In the authors' logs ACCORDION ends at most 0.5 points below the best static level in "
        f"{near} of {len(short.dropna())} settings"
    )


def main(out: Out = None) -> list[Path]:
    """Draw all curves that the authors published, and print their ends and the tables' values."""
    files, (fig, frame) = Files("published", out), figure()
    files.figure("published", (fig, frame))
    last = frame.groupby([*KEYS, "level"], sort=False)["value"].last().rename("log").reset_index()
    last["log"] *= last["data"].map(lambda name: 1.0 if name == "wikitext-2" else 100.0)
    both = last.merge(tables()[[*KEYS, "level", "accuracy"]], how="left").round(2)
    files.show(frame_table(both.rename(columns={"accuracy": "printed"}), 2, len(KEYS) + 1))
    return files.print_paths()
