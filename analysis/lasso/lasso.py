"""Lemma 1 of the paper in the LASSO, a sparse mean and a dense noise; from records, in a network.

Draw (15 seconds), and a network below it from records with ``moments`` readings::

    regimes figure lasso --out figures/lasso
    regimes run smoke --set instruments.moments-frozen.every=1
    regimes figure lasso runs/smoke --out figures/lasso

Left: how many nonzero coordinates the mean gradient has at scikit-learn's solution, by lam. Right:
the probability that the noise in the mean of n gradients stays below the smallest nonzero
coordinate of the mean, by sigma, and the lower bound from the lemma's proof (`model`); once with w
halfway between zero and the solution, once at the solution. Below: which share of a gradient's
energy its top 10 % coordinates hold, and where the noise is. The paper only conjectures this for a
network (section 4.3).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import tyro
from scipy.stats import norm

from regimes.base.statistics import LEAST
from regimes.plotting import style
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all, unit_name

from ..common.command import Files, Out, Several
from ..common.estimates import frame_table
from .model import largest_sigma
from .numbers import FAMILIES, Setting, chances, network, shapes, sparsity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLACK, BLUE, RED, GREY = "#000000", "#0173b2", "#d55e00", "#8c8c8c"
ORANGE, GREEN = "#de8f05", "#029e73"
# dashes of lines, matplotlib's: offset, (points on, points off, ...)
LONG, DOTS, MIXED, SHORT = (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1, 1, 1)), (0, (2, 1))
Lines = dict[str, tuple[str, str, Any, str]]  # series: words, colour, dash, marker
SPARSITY: Lines = {
    "|supp w| + |supp μ|": ("|supp w| + |supp μ| (lemma)", GREY, DOTS, ""),
    "|supp E g|": ("mean gradient", BLACK, "-", "s"),
    "|supp w|": ("solution w", BLUE, LONG, "o"),
}
CHANCES: Lines = {
    "halfway: noise below γ": ("halfway: noise < γ", BLACK, "-", "s"),
    "halfway: bound, exact variance": ("its bound, exact variance", BLUE, LONG, ""),
    "halfway: bound, paper's variance": ("its bound, paper's variance", ORANGE, DOTS, ""),
    "halfway: top k is the support": ("halfway: top k = support", GREEN, MIXED, "D"),
    "at the solution: noise below γ": ("at the solution: noise < γ", RED, SHORT, "v"),
}
SHARES: Lines = {
    "mean-top10": ("mean gradient", BLACK, "-", "s"),
    "single-top10": ("one stochastic gradient", BLUE, LONG, "o"),
    "null-top10": ("noise alone", GREY, DOTS, "v"),
}
PLACES: Lines = {
    "noise-in-top10": ("noise in the mean's top 10 %", RED, SHORT, "v"),
    "noise-density": ("participation of the noise", BLUE, LONG, "o"),
    "resolved": ("|mean|² resolved", BLACK, "-", "s"),
}


def lasso(s: Setting, runs: list[Record]) -> style.Drawing:
    """The LASSO's two panels, and the network's two below them if there are runs.

    Raises:
        RecordError: runs without readings, or of several schedules.
    """
    below = network(runs) if runs else None
    above = [sparsity(s), chances(s)]
    with style.theme():
        fig = style.figure(3.7 if below is None else 6.9)
        axes = fig.subplots(1 if below is None else 2, 2, squeeze=False)
        _draw_sparsity(axes[0, 0], above[0], s)
        _draw_chances(axes[0, 1], above[1], s)
        words = _write_caption(s)
        if below is not None:
            _draw_network(axes[1, 0], axes[1, 1], below, runs[0])
            words += " " + _write_network_caption(below, runs)
        add_headline(fig, _title(s, above[1], below))
        style.add_caption(fig, words)
    return style.Drawing(
        fig, pd.concat([*above, *([below] if below is not None else [])], ignore_index=True)
    )


def _title(s: Setting, chances: pd.DataFrame, below: pd.DataFrame | None) -> str:
    """How concentrated a network's noise is beside its mean; without a network, how careful the
    lemma's bound is."""
    if below is not None:
        whole = below[~below["panel"].str.endswith(" in layers")]
        shares = whole.groupby("series")["mean"].mean()
        mean, noise = (f"{100 * shares[f'{name}-top10']:.0f} %" for name in ("mean", "null"))
        return (
            f"The largest 10 % of coordinates hold {mean} of the energy of a network's mean, "
            f"{noise} of its noise"
        )
    by = chances.pivot(index="x", columns="series", values="mean")
    sure = by.index[by["halfway: noise below γ"] >= 1 - s.epsilon]
    bound = largest_sigma(s.halfway, s.n, s.epsilon)
    if not len(sure) or not bound:
        return "Halfway to the solution the lemma's bound on the noise is nowhere right"
    times = f"{float(sure.max()) / bound:.2g} times as large as the lemma's bound allows"
    return f"Halfway to the solution the noise may be {times}"


def _draw(ax: Axes, numbers: pd.DataFrame, lines: Lines) -> None:
    for series, (words, colour, dash, marker) in lines.items():
        rows = numbers[numbers["series"] == series]
        ax.plot(
            rows["x"],
            rows["mean"],
            color=colour,
            linestyle=dash,
            marker=marker,
            label=words,
            markersize=3.5,
            markeredgecolor="white",
            markeredgewidth=0.4,
        )
        ax.fill_between(
            rows["x"], rows["ci_low"], rows["ci_high"], color=colour, alpha=0.15, linewidth=0
        )
    ax.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=2,
        handlelength=2.5,
        columnspacing=1,
        fontsize=6.5,
    )


def _draw_sparsity(ax: Axes, numbers: pd.DataFrame, s: Setting) -> None:
    _draw(ax, numbers, SPARSITY)
    ax.axhline(s.nonzero, color=GREY, linewidth=0.8, zorder=1)
    ax.text(
        0.02,
        s.nonzero,
        "|supp μ|",
        fontsize=7,
        va="bottom",
        color="#444444",
        transform=ax.get_yaxis_transform(),
    )
    ax.set(xscale="log", xlabel=f"λ (at the solution, σ = {s.sigma:g})")
    ax.set_ylabel(f"nonzero coordinates of {s.dimension}")
    style.log_axis(ax)


def _draw_chances(ax: Axes, numbers: pd.DataFrame, s: Setting) -> None:
    _draw(ax, numbers, CHANCES)
    limit = largest_sigma(s.halfway, s.n, s.epsilon)
    ax.axvline(limit, color=BLUE, linewidth=0.8, zorder=1)
    ax.text(limit / 1.1, 0.5, f"σ* = {limit:.2g}", fontsize=7, color=BLUE, ha="right")
    ax.set(xscale="log", ylim=(-0.03, 1.05), xlabel=f"σ (λ = {s.lam:g}, n = {s.n} gradients)")
    ax.set_ylabel("probability")


def _draw_network(left: Axes, right: Axes, numbers: pd.DataFrame, one: Record) -> None:
    flat = 2 * (norm.ppf(0.95) * norm.pdf(norm.ppf(0.95)) + 0.05)  # E z^2 in the top 10 % of |z|
    for ax, lines, height, words in (
        (left, SHARES, flat, "equal Gaussian coordinates"),
        (right, PLACES, 0.1, "dense noise: 0.1"),
    ):
        _draw(ax, numbers[numbers["panel"] == _choose_family(numbers)], lines)
        ax.axhline(height, color=GREY, linewidth=0.8, zorder=1)
        ax.text(
            0.01,
            height + 0.01,
            words,
            fontsize=7,
            va="bottom",
            color="#444444",
            transform=ax.get_yaxis_transform(),
        )
        style.mark_decays(ax, one, labelled=False)
        ax.set_xlabel(f"{unit_name(one.config)} (dotted: learning-rate decay)")
    left.set(ylim=(0, 1.02), ylabel="network: energy in the\ntop 10 % coordinates")
    right.set(ylim=(-0.5, 1.02), ylabel="network: share")


def _choose_family(numbers: pd.DataFrame) -> str:
    """The readings that are drawn of a network: those at the weights at the end of an epoch, as
    equation 1 is written, if there are any."""
    return next(family for family in FAMILIES if family in set(numbers["panel"]))


def _write_caption(s: Setting) -> str:
    p = s.halfway
    left = "95 % t interval" if s.draws >= LEAST else "too few for an interval"
    return (
        f"LASSO: y\xa0=\xa0±1, x\xa0~\xa0N(yμ, σ²I), d\xa0=\xa0{s.dimension}, {s.nonzero} nonzero "
        f"coordinates of μ (1 to 0.5), solved by scikit-learn on {s.train:,} samples. Left: mean "
        f"of {s.draws} data sets, {left}. Right: {s.trials:,} draws per point, 95 % "
        f"Clopper-Pearson interval; γ is the least nonzero |mean coordinate|; halfway: w is half "
        f"the solution at σ\xa0=\xa0{s.sigma:g} (γ there {p.gamma:.2g}), held; at the solution: "
        f"refitted for each σ. A bound below 0 is drawn at 0. σ*: up to it the bound is at least "
        f"{1 - s.epsilon:g}."
    )


def _write_network_caption(numbers: pd.DataFrame, runs: list[Record]) -> str:
    lines = runs[0].details
    line = next(x for x in lines if "gradients" in x and x["family"] == _choose_family(numbers))
    spread = style.intervals_in_words([len(runs)], bars=False)
    return (
        f"Below: a stochastic gradient is of a {line['gradient']}; mean and variance of every "
        f"coordinate over {line['gradients']} of them, whole model. Noise alone: one Gaussian draw "
        "of these variances v. Participation: (Σv)²/(NΣv²), 1 if they are equal. Resolved: what is "
        "not expected in the mean of so many from noise alone (axis cut at -0.5); at 0, the mean "
        f"has the shape of noise. Mean over {style.seeds_in_words([len(runs)])}; {spread}. "
        f"{style.describe_setting(runs[0])}."
    )


def table(s: Setting, runs: list[Record]) -> pd.DataFrame:
    """The LASSO's statistics, and the network's after the first, middle and last epoch that has a
    reading of the kind."""
    columns = shapes(s)
    if runs:
        for panel, rows in network(runs).groupby("panel", sort=False):
            by_epoch = rows.pivot(index="series", columns="x", values="mean")
            epochs = [*by_epoch]
            for epoch in dict.fromkeys((epochs[0], epochs[len(epochs) // 2], epochs[-1])):
                columns[f"{panel}, {epoch:g}"] = by_epoch[epoch]
    return columns


def main(
    records: Several = (),
    out: Out = None,
    setting: Annotated[Setting, tyro.conf.arg(name="")] = Setting(),  # noqa: B008 (frozen)
) -> list[Path]:
    """Draw Lemma 1, and print its table; records are of one schedule, with moments.

    Args:
        setting: the LASSO.
    """
    runs = load_all(*records) if records else []
    files = Files("lasso", out)
    files.figure("lasso", lasso(setting, runs))
    halfway, there = setting.halfway, setting.there
    for words, p in (("halfway", halfway), ("at the solution", there)):
        print(
            f"{words}: |supp w| = {(p.w != 0).sum()}, |supp μ| = {(p.mu != 0).sum()}, |supp E g| = "
            f"{p.support.sum()}, γ = {p.gamma:.3g}, largest noise deviation "
            f"{p.variance.max() ** 0.5:.3g}; w held, the bound is {1 - setting.epsilon:g} up to "
            f"σ = {largest_sigma(p, setting.n, setting.epsilon):.3g}"
        )
    files.show(frame_table(table(setting, runs).rename_axis("statistic").reset_index(), 3))
    return files.print_paths()
