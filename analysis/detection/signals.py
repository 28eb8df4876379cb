"""The signals of one run: gradient norm, Fisher trace, Hessian trace and eigenvalue.

Do Fisher trace and Hessian trace tell the same story around critical periods? In a notebook::

    import regimes
    from analysis.detection.signals import signals

    record = regimes.run(regimes.get_preset("smoke-signals/low"), "runs/signals")
    figure, numbers = signals(record)

or from the command line::

    regimes ablate smoke-signals --schedules low --seeds 1
    regimes figure signals runs/smoke-signals/low/seed-0
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.plotting.words import add_headline
from regimes.records import Record, load, unit_name

from ..common.command import Files, Out
from ..common.compare import whole_norm

PANELS = {  # title: columns of ``record.epochs``, and their words
    "gradient norm": {"norm": "accumulated update"},
    "Fisher trace": {"fisher_trace": "running statistics"},
    "Hessian trace": {
        "hessian_trace": "running statistics",
        "hessian_trace:batch": "batch statistics",
    },
    "top Hessian eigenvalue": {
        "eigenvalue": "running statistics",
        "eigenvalue:batch": "batch statistics",
    },
}
FALLS = {  # of the title
    "the gradient norm": "norm",
    "the eigenvalue": "eigenvalue",
    "the Fisher trace": "fisher_trace",
}
WORDS = ("running statistics", "batch statistics")
LINES = (("#0173b2", "-"), ("#de8f05", (0, (4, 1.5))))


def numbers(record: Record) -> pd.DataFrame:
    """One row per epoch: lr, the whole model's gradient norm, and every model statistic.

    Raises:
        RecordError: the run recorded no norm, or nothing but that.
    """
    known = [c for columns in PANELS.values() for c in columns if c in record.epochs]
    if not known or record.statistic not in record.layers:
        raise RecordError(
            f"{record.folder} recorded no {'curvature' if not known else record.statistic}: switch "
            "it on, e.g. --set instruments.curvature.probes=10 --set instruments.fisher={}"
        )
    return record.epochs[["epoch", "lr", *known]].merge(whole_norm(record), on="epoch")


def signals(record: Record) -> style.Drawing:
    """One panel per signal over the epochs of one run, learning-rate decays marked.

    Raises:
        RecordError: see `numbers`.
    """
    table = numbers(record)
    panels = {t: {c: w for c, w in columns.items() if c in table} for t, columns in PANELS.items()}
    panels = {title: columns for title, columns in panels.items() if columns}
    with style.theme():
        fig = style.figure(1.0 + 1.15 * len(panels))
        for ax, (title, columns) in zip(
            fig.subplots(len(panels), 1, sharex=True), panels.items(), strict=True
        ):
            for (column, words), (colour, dash) in zip(columns.items(), LINES, strict=False):
                rows = table[["epoch", column]].dropna()
                ax.plot(rows["epoch"], rows[column], color=colour, linestyle=dash, label=words)
            if all((table[c].dropna() > 0).all() for c in columns):
                style.log_axis(ax)
            ax.set_ylabel(title.replace(" Hess", "\nHess").replace("nt n", "nt\nn"))
            style.mark_decays(ax, record, labelled=title == "gradient norm")
        ax.set_xlabel(unit_name(record.config))
        handles = {line.get_label(): line for line in ax.lines if line.get_label() in WORDS}
        fig.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper left",
            ncols=2,
            handlelength=4,
        )
        add_headline(fig, _title(table))
        probe = record.config["instruments"].get("curvature", {}).get("images", 200)
        style.add_caption(
            fig,
            f"One run ({record.name}, seed {record.seed}). Norm: of the gradient accumulated over "
            f"an epoch, all compressed layers. Curvature: of the loss on {probe} training images, "
            "with BatchNorm's running or batch statistics. "
            f"{style.describe_setting(record)}.",
        )
    return style.Drawing(fig, table)


def _title(table: pd.DataFrame) -> str:
    """How far each signal falls from its highest value to its last."""
    known = {words: column for words, column in FALLS.items() if column in table}
    series = {words: table[column].dropna() for words, column in known.items()}
    said = [
        f"{words} {values.max() / values.iloc[-1]:.2g} times"
        for words, values in series.items()
        if len(values) and 0 < 1.05 * values.iloc[-1] < values.max() < math.inf
    ]
    if not said:
        return "No signal ends lower than its highest value"
    return f"From its highest value to its last one falls: {', '.join(said)}"


def main(run: Path, out: Out = None) -> list[Path]:
    """Draw the signals of one run.

    Args:
        run: its folder.
    """
    record = load(run)
    files = Files(record.name, out)
    files.figure("signals", signals(record))
    return files.print_paths()
