"""How near the edge of stability does each level train? The top Hessian eigenvalue times the rate.

Train with curvature at constant rates, then draw (`grids/rates-edge.toml` is the grid)::

    regimes ablate rates-edge --seeds 8 --first-seed 4000
    regimes figure edge runs/rates-edge

On a quadratic SGD with Nesterov's momentum m is stable while an eigenvalue times the rate is below
2 (1 + m) / (1 + 2 m), the *edge*; networks that are trained without compression come near it by
themselves (Cohen et al., 2021). Compression changes the gradient and may move that edge. If
training at a level stays below the edge where dense training reaches it, something else limits its
rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.plotting.looks import styles_of
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all

from ..common.command import Files, Out, Records
from ..common.estimates import as_table, estimate, mean, number, word
from .usable import arm_of, check_arms
from .usable_figure import legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN = "eigenvalue:batch"
NEAR = 0.75  # of the edge, from where on a mean over training is called near it


def edge(momentum: float) -> float:
    """The largest stable product on a quadratic, of Nesterov's SGD.

    >>> edge(0.0), round(edge(0.9), 3)
    (2.0, 1.357)
    """
    return 2 * (1 + momentum) / (1 + 2 * momentum)


def edge_of(runs: Sequence[Record]) -> float:
    """`edge` of the momentum that all have.

    Raises:
        RecordError: they differ in it, or are not all of SGD with Nesterov's momentum, or none.
    """
    settings = {
        (o.get("name"), o.get("momentum"), o.get("nesterov") or not o.get("momentum"))
        for o in (run.config["optimizer"] for run in runs)
    }
    name, momentum, good = settings.pop()
    if settings or name != "sgd" or not good:
        raise RecordError("the edge is drawn for runs of SGD with one Nesterov momentum alone")
    return edge(momentum)


def products(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per run and measured epoch: arm, rate, seed, epoch, and the eigenvalue of the loss
    with batch statistics times the epoch's rate.

    Raises:
        RecordError: an unfinished run, one without such eigenvalues, or without a rate in its name.
    """
    rows = []
    for run in runs:
        run.check_finished()
        arm, at = arm_of(run)
        if not at or COLUMN not in run.epochs:
            form = f"the name {run.name!r} does not have the form 'ARM at RATE'"
            lacks = f"no {COLUMN} was recorded" if at else form
            raise RecordError(f"{run.folder}: {lacks}: see `regimes presets rates-edge`")
        kept = run.epochs[["epoch", "lr", COLUMN]].dropna()
        rows.append(
            pd.DataFrame(
                {
                    "arm": arm,
                    "rate": run.rate,
                    "seed": run.seed,
                    "epoch": kept["epoch"],
                    "product": kept[COLUMN] * kept["lr"],
                }
            )
        )
    return pd.concat(rows, ignore_index=True)


def table(by_epoch: pd.DataFrame, warm: int) -> pd.DataFrame:
    """One row per rate and arm: n; the mean product from epoch ``warm`` on, with its 95 % t
    interval over seeds; the largest of any seed."""
    rows = []
    warmed = by_epoch[by_epoch["epoch"] >= warm]
    for key, runs in warmed.groupby(["rate", "arm"], sort=False):
        rate, arm = key
        by_seed = runs.groupby("seed")["product"].mean().to_list()
        row = {"rate": rate, "arm": arm, "n": len(by_seed), "largest": runs["product"].max()}
        rows.append(row | estimate(by_seed, "product"))
    return pd.DataFrame(rows).sort_values(["rate", "arm"], ignore_index=True)


def as_text(rows: pd.DataFrame) -> Table:
    """`table`, rounded."""
    columns = {
        "rate": number("rate", "g"),
        "arm": word("arm"),
        "n": word("n"),
        "eigenvalue x rate [95 %]": mean("product", ".2f"),
        "largest": number("largest", ".2f"),
    }
    return as_table(rows, columns, texts=2)


def figure(runs: Sequence[Record]) -> style.Drawing:
    """A panel per rate: the product over the epochs, by arm, and the edge."""
    limit, by_epoch = edge_of(runs), products(runs)
    check_arms(runs)
    rates = sorted(by_epoch["rate"].unique())
    with style.theme():
        fig = style.figure(3.4)
        panels = fig.subplots(1, len(rates), sharey=True, squeeze=False)[0]
        for ax, rate in zip(panels, rates, strict=True):
            _panel(ax, by_epoch[by_epoch["rate"] == rate])
            ax.axhline(limit, color="black", linewidth=0.8, linestyle=style.DOTTED)
            ax.set_title(f"learning rate {rate:g}", loc="left")
            ax.set(xlabel="epoch", yscale="log")
        panels[0].set_ylabel("top eigenvalue x learning rate")
        low, high = by_epoch["product"].quantile([0.01, 1.0])
        panels[0].set_ylim(0.7 * low, max(1.3 * limit, 1.2 * high))
        look: Any = {"fontsize": 6.5, "va": "bottom", "ha": "left"}
        along = panels[0].get_yaxis_transform()
        panels[0].text(0.03, 1.03 * limit, "unstable above", transform=along, **look)
        legend(fig, styles_of(by_epoch["arm"]))
        add_headline(fig, _title(by_epoch, limit))
        counts = by_epoch.groupby(["arm", "rate"])["seed"].nunique().to_list()
        style.add_caption(
            fig,
            "Top Hessian eigenvalue of the training loss, of batch statistics, times the "
            f"learning rate{_how_often(runs[0])}. Dotted: where a quadratic becomes unstable with "
            f"this momentum, without compression. Mean over {style.seeds_in_words(counts)}, thin: "
            f"each seed. Rank: of PowerSGD. {style.describe_setting(runs[0], compression=False)}.",
        )
    return style.Drawing(fig, by_epoch)


def _title(by_epoch: pd.DataFrame, limit: float) -> str:
    """Which arm first trains near the edge, and where dense is then."""
    by_seed = by_epoch.groupby(["rate", "arm", "seed"], as_index=False)["product"].mean()
    means: dict[Any, MeanInterval] = {}  # by rate and arm
    for key, values in by_seed.groupby(["rate", "arm"]):
        means[key] = MeanInterval.of(values["product"].to_list())
    arms = {key: mean for key, mean in means.items() if key[1] != "dense"}
    near = [key for key, mean in arms.items() if mean.value >= NEAR * limit]
    if not near:
        return f"No level is shown to train near the edge of stability, {limit:.2f}"
    sure = [key for key in near if arms[key].is_above(NEAR * limit)]
    rate, arm = (sure or near)[0]
    mean, name = arms[rate, arm], str(arm)
    dense = means.get((rate, "dense"))
    beside = f", dense at {dense.numbers('.2f')}" if dense else ""
    if sure:
        return (
            f"{name[:1].upper()}{name[1:]} trains at {mean.numbers('.2f')}, near the edge of "
            f"stability of {limit:.2f}, from a learning rate of {rate:g}{beside}"
        )
    said = f"{mean.text('.2f')} at a learning rate of {rate:g}{beside}"
    if mean.verdict(NEAR * limit) == "open":
        return f"Open whether {arm} trains near the edge of stability of {limit:.2f}: {said}"
    return f"No level is shown to train near the edge of stability, {limit:.2f}: {arm} {said}"


def _how_often(run: Record) -> str:
    every = int(run.config["instruments"]["curvature"].get("every", 1))
    return "" if every == 1 else f", every {every} epochs"


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    for arm, look in styles_of(rows["arm"]).items():
        own = rows[rows["arm"] == arm]
        for _, one in own.groupby("seed"):
            ax.plot(one["epoch"], one["product"], color=look.colour, linewidth=0.4, alpha=0.3)
        mean = own.groupby("epoch")["product"].mean()
        ax.plot(mean.index, mean, label=look.label, **look.line)


def main(records: Records, out: Out = None) -> list[Path]:
    """Draw eigenvalue times rate over training, and print its mean after the warm-up."""
    files, runs = Files(records, out), load_all(records)
    drawn, by_epoch = figure(runs)
    text = as_text(table(by_epoch, math.ceil(runs[0].config["optimizer"]["warmup_epochs"])))
    files.page("edge", "", text)
    print(f"edge: {edge_of(runs):.2f}")
    files.figure("edge", (drawn, by_epoch))
    return files.print_paths()
