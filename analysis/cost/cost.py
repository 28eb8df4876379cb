"""What compression gains on a network: predicted curves over bandwidth and number of workers.

Run, then draw (seconds)::

    regimes ablate small --seeds 5
    regimes figure cost runs/small --network 1Gbit/s,50us

Left: the speed-up of an epoch over dense against bandwidth, at the runs' W; each curve crosses 1 at
its break-even bandwidth, below which compression pays. Right: seconds per step against W at one
network, at a fixed batch per worker (weak scaling). Both from recorded traffic and measured seconds
(`cost.predict_seconds`); nothing here has been run on such a network. How well
the model does where it has been: ``benchmarks/network.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regimes.base.config import DENSE
from regimes.base.statistics import LEAST, t_interval
from regimes.cost.cases import Case, make_cases
from regimes.cost.network import Network, Values, Work, format_bandwidth
from regimes.cost.predict import predict_seconds
from regimes.plotting import style
from regimes.plotting.looks import style_of
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all

from ..common.command import Files, Out, Records
from ..common.compare import group_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = ("dense", "low", "high", "accordion")
BANDWIDTHS = np.logspace(6, 11, 101)  # bits/s: 1 Mbit/s to 100 Gbit/s
WORKERS = 2.0 ** np.arange(1, 13)


# -- records to numbers ----------------------------------------------------------------------


def curves(
    found: Sequence[Case], network: Network, workers: int, algorithm: str = "ring", buckets: int = 1
) -> pd.DataFrame:
    """Predicted seconds per step of each policy, over bandwidth and over W.

    Columns: panel ("bandwidth" or "workers"), case, x (bits/s or W), n runs, seconds, dense (that
    of an uncompressed step), speed_up and its 95 % t interval over the runs (ci_low, ci_high).
    """
    dense = next(case for case in found if case.name == DENSE and not case.runs).work
    panels: dict[str, tuple[np.ndarray, Network, Values]] = {
        "bandwidth": (BANDWIDTHS, Network(BANDWIDTHS, network.latency), workers),
        "workers": (WORKERS, network, WORKERS),
    }
    frames = []
    for panel, (x, net, w) in panels.items():
        base = dense.seconds(net, w, algorithm, buckets)
        for case in found:
            if not case.runs:
                continue
            seconds = np.array([_per_step(run, net, w, algorithm, buckets) for run in case.by_run])
            spread = [t_interval(column.tolist()) for column in (base / seconds).T]
            frames.append(
                pd.DataFrame(
                    {
                        "panel": panel,
                        "case": case.name,
                        "x": x,
                        "n": case.runs,
                        "seconds": seconds.mean(0),
                        "dense": base,
                        **{
                            name: [s[i] for s in spread]
                            for i, name in enumerate(("speed_up", "ci_low", "ci_high"))
                        },
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def _per_step(
    epochs: list[tuple[float, Work]],
    net: Network,
    workers: Values,
    algorithm: str,
    buckets: int,
) -> np.ndarray:
    total = sum(n * np.asarray(w.seconds(net, workers, algorithm, buckets)) for n, w in epochs)
    return np.asarray(total / sum(n for n, _ in epochs))


# -- the figure ------------------------------------------------------------------------------


def figure_cost(
    runs: Iterable[Record],
    network: Network,
    workers: int | None = None,
    *,
    algorithm: str = "ring",
    buckets: int = 1,
    shown: Sequence[str] = SHOWN,
) -> style.Drawing:
    """The two panels; the break-even bandwidths are marked on the left.

    Raises:
        RecordError: runs of different settings, or a schedule of ``shown`` that is missing.
    """
    known = group_runs(runs, shown)
    chosen = [run for name in shown for run in known[name]]
    workers = int(chosen[0].config["workers"]) if workers is None else workers
    every = make_cases([run for group in known.values() for run in group], workers)
    chosen_cases = [case for case in every if not case.runs or case.name in shown]
    numbers = curves(chosen_cases, network, workers, algorithm, buckets)
    table = predict_seconds(chosen_cases, network, workers, algorithm, buckets)
    with style.theme():
        fig = style.figure(3.4)
        left, right = fig.subplots(1, 2)
        for name in shown:
            _draw(left, numbers, "bandwidth", name, "speed_up")
            _draw(right, numbers, "workers", name, "seconds")
        marked = _mark(left, table)
        left.axhline(1, color="#555555", linewidth=0.8, zorder=1)
        left.set(
            xscale="log",
            xlabel=f"bandwidth of a link (bit/s), W = {workers}",
            ylabel="speed-up over dense\nhigher is better",
        )
        left.set_xticks(
            ticks := [10**k for k in range(6, 12)], [format_bandwidth(t)[:-5] for t in ticks]
        )
        style.log_axis(left)
        right.set_xscale("log", base=2)
        right.set_xticks(ticks := [4**k for k in range(1, 7)], [f"{t:,}" for t in ticks])
        right.set(
            yscale="log",
            xlabel=f"workers W, at {network}",
            ylabel="seconds per step\nlower is better",
        )
        handles, labels = right.get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside upper left", ncols=4, handlelength=3.4)
        add_headline(fig, _title(table))
        style.add_caption(fig, _caption(chosen_cases, chosen, network, algorithm, buckets))
    return style.Drawing(fig, pd.concat([numbers.drop(columns="dense"), marked], ignore_index=True))


def _title(table: pd.DataFrame) -> str:
    """Below which bandwidth each policy is faster than dense, also where the axis has ended."""
    faster = table[(table["kind"] == "policy") & (table["break_even"] >= BANDWIDTHS[0])]
    said = [
        f"{style_of(case).label} "
        + ("at any bandwidth" if math.isinf(at) else f"below {format_bandwidth(at)}")
        for case, at in faster.sort_values("break_even")[["case", "break_even"]].to_numpy()
    ]
    if not said:
        slowest = format_bandwidth(BANDWIDTHS[0])
        return f"No schedule is faster than dense at {slowest} or any higher bandwidth (predicted)"
    return f"Faster than dense: {', '.join(said)} (predicted)"


def _draw(ax: Axes, numbers: pd.DataFrame, panel: str, name: str, y: str) -> None:
    rows = numbers[(numbers["panel"] == panel) & (numbers["case"] == name)]
    look = style_of(name)
    every = 20 if panel == "bandwidth" else 2
    ax.plot(rows["x"], rows[y], label=look.label, markevery=every, **look.line)
    if y == "speed_up":
        ax.fill_between(
            rows["x"], rows["ci_low"], rows["ci_high"], color=look.colour, alpha=0.15, linewidth=0
        )


def _mark(ax: Axes, table: pd.DataFrame) -> pd.DataFrame:
    """A tick on the line of no gain at each policy's break-even bandwidth; and where they are."""
    within = table["break_even"].between(BANDWIDTHS[0], BANDWIDTHS[-1])
    marks = table.loc[within & (table["kind"] == "policy"), ["case", "break_even"]]
    for case, at in marks.itertuples(index=False):
        ax.plot(
            [at],
            [1],
            marker="|",
            markersize=11,
            markeredgewidth=1.6,
            color=style_of(case).colour,
            zorder=5,
        )
    return marks.rename(columns={"break_even": "x"}).assign(panel="break-even", speed_up=1.0)


def _caption(
    found: Sequence[Case], runs: Sequence[Record], network: Network, algorithm: str, buckets: int
) -> str:
    """What is measured, what is predicted, and from what."""
    dense = next(case for case in found if case.name == DENSE and not case.runs).work
    seeds = [case.runs for case in found if case.runs]
    spread = style.intervals_in_words(seeds, bars=False)
    if max(seeds) >= LEAST:
        spread += " (traffic alone differs between seeds, so most are too narrow to see)"
    overlap = (
        "no overlap of backward and communication"
        if buckets == 1
        else f"{buckets} buckets reduced during the backward pass"
    )
    header, size = runs[0].header, runs[0].config.get("batch_size")
    batch = f" of {size}" if size else ""
    return (
        f"Predicted, not measured: recorded traffic and measured seconds on the cost model of "
        f"regimes.cost ({algorithm}, latency {float(network.latency) * 1e6:g} µs, {overlap}). "
        f"Left: of an epoch; the ticks on the line of no gain are the break-even bandwidths. "
        f"Right: each worker keeps its batch{batch}. Compute "
        f"{1e3 * dense.compute:.1f} ms per worker and step on one core of "
        f"{header['machine'].get('processor') or 'the machine'}. Mean over "
        f"{style.seeds_in_words(seeds)}; {spread}. {style.describe_setting(runs[0])}."
    )


# -- the command -----------------------------------------------------------------------------


def main(
    records: Records,
    network: str = "1Gbit/s,50us",
    workers: int | None = None,
    algorithm: str = "ring",
    buckets: int = 1,
    out: Out = None,
) -> list[Path]:
    """Draw the predicted cost of the runs under RECORDS on a network, and print the table.

    Args:
        network: bandwidth and latency.
        workers: W of the left panel and the table; default the runs'.
        algorithm: of the collectives: ring, gloo or tree.
        buckets: parts of the gradient that are reduced during the backward pass.
    """
    from regimes.cost.predict import main as show

    files, runs, net = Files(records, out), load_all(records), Network.parse(network)
    fig, numbers = figure_cost(runs, net, workers, algorithm=algorithm, buckets=buckets)
    show([str(records)], None, net, workers, algorithm=algorithm, buckets=buckets)
    files.figure("cost", (fig, numbers))
    return files.print_paths()
