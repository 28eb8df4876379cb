"""Harm of pulses against their learning rate, and the law ``harm = level x rate^exponent`` in it.

Trees of pulses with error feedback and without (`fit` has the law)::

    regimes figure law data/reference/harm-lm.tar.xz data/reference/harm-lm-sgd.tar.xz

A rate is the mean over the steps of a pulse, as a share of the run's peak. The law is about pulses
that start in unit `FIRST` or later and leave units to recover in: before that harm grows from unit
to unit at one rate, and a pulse in the last units has nothing to recover in.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.base.statistics import are_alike
from regimes.plotting import style
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Look, Metric
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all
from regimes.search.harms.rates import mean_rates

from ..common import markov
from ..common.command import Files, Out, Several, by_name
from ..common.estimates import as_table, estimate, mean, number, word
from . import fit as laws
from . import measured
from .settings import Arms

WITH, WITHOUT = ARMS = ("rank 1", "rank 1, no feedback")
FIRST = 6  # unit from which on a pulse may start
COLUMN = 3.5  # inches: one column of a paper
BESIDE = 1.05  # how far apart arms are drawn at one rate
METHODS: tuple[laws.Method, ...] = ("log", "harm")
LOOKS = (  # of the kinds of pulses; markers without a line, and the line of the law
    Look("", "#000000", "-", "o"),
    Look("", "#0173b2", (0, (4, 1.5)), "s"),
    Look("", "#949494", (0, (1.2, 1.2)), "^"),
)


# -- pulses ----------------------------------------------------------------------------------


def pulses(name: str, runs: Sequence[Record], arm: str) -> pd.DataFrame:
    """One row per pulse of an arm: the columns of `measured.by_run`, tree (``name``) and rate.

    Raises:
        RecordError: as `measured.pair_branches`; or the tree has no such arm.
    """
    found = [pair for pair in measured.pair_branches(runs) if measured.arm_of(pair[0]) == arm]
    if not found:
        raise RecordError(f"{name} has no pulses {arm!r}: choose others with --arm")
    shares = {trunk.seed: shares_of(trunk) for _, trunk in found}
    table = measured.by_run(measured.by_unit(found))
    keys = zip(table["seed"], table["onset"], table["length"], strict=True)
    rates = [float(shares[seed][at : at + length].mean()) for seed, at, length in keys]
    return table.assign(tree=name, rate=rates)


def shares_of(trunk: Record) -> np.ndarray:
    """The mean rate of each unit as a share of the highest one, [units]."""
    rates = mean_rates(trunk).to_numpy(float)
    return np.asarray(rates / rates.max())


def lasting(table: pd.DataFrame, first: int = FIRST) -> pd.DataFrame:
    """The pulses that the law is about."""
    return table[(table["onset"] >= first) & (table["left"] > 0)]


def _columns(table: pd.DataFrame) -> tuple[list[float], list[float], list[Hashable]]:
    """Harms, rates and trunks of `pulses`."""
    trunks: list[Hashable] = list(zip(table["tree"], table["seed"], strict=True))
    return table["harm"].to_list(), table["rate"].to_list(), trunks


def fitted(table: pd.DataFrame, method: laws.Method | None = "log") -> laws.Law:
    """The law of some pulses of one length.

    Raises:
        RecordError: as `fit.fit_law`, or the pulses have several lengths.
    """
    lengths = sorted({*table["length"]})
    if len(lengths) > 1:
        raise RecordError(f"pulses of {lengths} units: the law is of one length")
    return laws.fit_law(*_columns(table), length=int(lengths[0]), method=method)


def exponents(table: pd.DataFrame, method: laws.Method = "log") -> dict[Hashable, float]:
    """The exponent of each trunk of some pulses."""
    return laws.fit_exponents(*_columns(table), method=method)


def summary(each: pd.DataFrame) -> pd.DataFrame:
    """One row per arm and way to fit: trunks, pulses, left_out, exponent with interval, level; of
    an arm with many harms of zero or less no row of log harm.

    Args:
        each: of `lasting`, several trees and arms.
    """
    rows = []
    for arm, part in each.groupby("arm", sort=False):
        for method in METHODS if (part["harm"] > 0).mean() >= laws.LEAST_SHARE else METHODS[1:]:
            found = fitted(part, method)
            exponent = found.exponent
            row = {"arm": arm, "method": method, "trunks": len(found.levels)}
            row |= {"pulses": found.pulses, "left_out": found.left_out, "level": found.level}
            ends = {"exponent_ci_low": exponent.low, "exponent_ci_high": exponent.high}
            rows.append(row | {"n": exponent.n, "exponent": exponent.value} | ends)
    return pd.DataFrame(rows)


# -- prediction ------------------------------------------------------------------------------


def means(table: pd.DataFrame) -> pd.DataFrame:
    """Mean harm and rate over seeds of the pulses of one tree and arm, by onset."""
    return table.groupby("onset")[["rate", "harm"]].mean().reset_index()


def from_three(table: pd.DataFrame, onsets: Sequence[int] | None = None) -> pd.DataFrame:
    """What three pulses of a tree say of its others: one row per onset: fitted (is it one of the
    three?), rate, harm, predicted, exponent (of the three), constant (their mean harm).

    Args:
        table: pulses of one tree and arm.
        onsets: of the three; None: chosen by their rates alone (`fit.choose_pilots`).

    Raises:
        RecordError: as `fit.choose_pilots` and `fit.fit_law`; or
            ``onsets`` are not three of the tree's.
    """
    rows = means(table)
    if onsets is None:
        onsets = rows["onset"].iloc[laws.choose_pilots(rows["rate"].to_list())].to_list()
    used = rows["onset"].isin(onsets)
    if used.sum() != 3:
        there = ", ".join(map(str, rows["onset"]))
        raise RecordError(f"three = {', '.join(map(str, onsets))}: expected three of {there}")
    found = fitted(table[table["onset"].isin(onsets)], None)
    return rows.assign(
        fitted=used,
        predicted=found.of_pulses(rows["rate"].to_numpy()),
        exponent=found.exponent.value,
        constant=float(rows.loc[used, "harm"].mean()),
    )


def scored(predicted: pd.DataFrame) -> laws.Score:
    """How well `from_three` says the harm of the pulses that it had not seen, of one tree or more;
    the constant that it is held against is the mean harm of the three of each tree."""
    rest = predicted[~predicted["fitted"].astype(bool)]
    return laws.score_predictions(
        rest["harm"].to_list(), rest["predicted"].to_list(), rest["constant"].to_list()
    )


def every_three(table: pd.DataFrame) -> list[float]:
    """R2 of `from_three` for each choice of three pulses of a tree, of those at two rates."""
    rows = means(table)
    choices = [
        rows[rows["onset"].isin(three)] for three in itertools.combinations(rows["onset"], 3)
    ]
    usable = [
        three["onset"].to_list() for three in choices if not are_alike(three["rate"].to_list())
    ]
    return [scored(from_three(table, three)).r2 for three in usable]


# -- figure ----------------------------------------------------------------------------------


def points(each: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, tree and onset: rate, x (the place of its point: arms stand side by side),
    n, harm (geometric mean) and its 95 % t interval; of the seeds with positive harm.

    Raises:
        RecordError: there is no such seed.
    """
    rows, places = [], {arm: place for place, arm in enumerate(dict.fromkeys(each["arm"]))}
    for (arm, tree, onset), part in each.groupby(["arm", "tree", "onset"], sort=False):
        harms = part.loc[part["harm"] > 0, "harm"]
        if len(harms):
            row = {"arm": arm, "tree": tree, "onset": onset, "rate": part["rate"].mean()}
            row |= {"x": row["rate"] * BESIDE ** (places[arm] - (len(places) - 1) / 2)}
            row |= {"n": len(harms), "not_drawn": len(part) - len(harms)}
            rows.append(row | estimate(np.log(harms).to_list(), "harm", logs=True))
    if not rows:
        raise RecordError("no pulse has a harm above zero, which a logarithmic axis can show")
    return pd.DataFrame(rows)


def lines(each: pd.DataFrame) -> pd.DataFrame:
    """Two rows per arm, the ends of the line of its law: rate, harm, exponent with interval; of log
    harm, or where a harm is zero or less of harm."""
    rows: list[dict[str, Any]] = []
    for arm, part in each.groupby("arm", sort=False):
        found = fitted(part, None)
        exponent = found.exponent
        for rate in (float(part["rate"].min()), float(part["rate"].max())):
            row = {"arm": arm, "rate": rate, "harm": float(found.of_pulses([rate])[0])}
            row |= {"n": exponent.n, "exponent": exponent.value}
            rows.append(row | {"exponent_ci_low": exponent.low, "exponent_ci_high": exponent.high})
    return pd.DataFrame(rows)


def figure(each: pd.DataFrame, trunk: Record) -> style.Drawing:
    """The figure, one column wide, and one row per point or end of a line: ``part`` is "pulses"
    (`points`) or "law" (`lines`).

    Args:
        each: of `lasting`, several trees and arms.
        trunk: any of them, for the metric and the setting.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullLocator

    drawn, law, shown = points(each), lines(each), tested_by(trunk)
    arms = [*dict.fromkeys(drawn["arm"])]
    handles = []
    with style.theme():
        fig = style.figure(4.7, COLUMN)
        ax = fig.subplots()
        for arm, look in zip(arms, LOOKS, strict=False):
            marks = look.line | {"linestyle": "none", "markeredgecolor": look.colour}
            marks |= {"markerfacecolor": look.colour if look is LOOKS[0] else "white"}
            marks |= {"markeredgewidth": 0.9, "markersize": 4}
            part = drawn[drawn["arm"] == arm]
            bars = [part["harm"] - part["harm_ci_low"], part["harm_ci_high"] - part["harm"]]
            look_of_bars: Any = {"elinewidth": 0.7, "capsize": 1.5}
            ax.errorbar(part["x"], part["harm"], np.nan_to_num(bars), **look_of_bars, **marks)
            ends = law[law["arm"] == arm]
            plain: dict[str, Any] = {
                "color": look.colour,
                "linestyle": look.dash,
                "linewidth": look.width,
            }
            ax.plot(ends["rate"], ends["harm"], **plain)
            label = f"{arm}: rate{_power(ends.iloc[0])}"
            handles.append(Line2D([], [], label=label, **(marks | plain)))
        ax.set(xscale="log", xlabel="learning rate of the pulse (share of the peak)")
        ax.set_ylabel(f"harm in the end ({shown.unit})\nlower is better")
        style.log_axis(ax)
        ticks = [x for x in (0.1, 0.2, 0.5, 1.0) if x >= 0.9 * drawn["rate"].min()]
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        place: Any = "outside upper left"
        fig.legend(handles=handles, loc=place, handlelength=3, fontsize=7)
        add_headline(fig, answer(each))
        missing = len(each) - int(drawn["n"].sum())  # also of points without any positive harm
        style.add_caption(fig, _caption(drawn, missing, trunk, shown))
    parts = [drawn.assign(part="pulses"), law.assign(part="law")]
    return style.Drawing(fig, pd.concat(parts, ignore_index=True))


def _power(row: pd.Series) -> str:
    """An exponent with its interval, as a label has it."""
    return f"^{row['exponent']:.1f}{_interval_of(row['exponent_ci_low'], row['exponent_ci_high'])}"


def _interval_of(low: float, high: float) -> str:
    return f" [{low:.1f}, {high:.1f}]" if np.isfinite([low, high]).all() else ""


def _estimate(exponent: laws.Exponent) -> MeanInterval:
    return MeanInterval(exponent.value, exponent.low, exponent.high, exponent.n)


def answer(each: pd.DataFrame) -> str:
    """What the exponents of the first two arms say."""
    arms = [*dict.fromkeys(each["arm"])]
    method: laws.Method = "log" if (each["harm"] > 0).all() else "harm"
    first = fitted(each[each["arm"] == arms[0]], method).exponent
    size = f"{first.value:.1f}{_interval_of(first.low, first.high)}"
    verdict = _estimate(first).verdict()
    if len(arms) == 1 and verdict == "open":
        return f"Open whether harm of {arms[0]} follows the learning rate: to the power {size}"
    if len(arms) == 1 and verdict != "above":
        return f"Harm of {arms[0]} is not shown to follow the learning rate"
    if len(arms) == 1:
        return f"Harm of {arms[0]} grows with the learning rate to the power {size}"
    one, other = (exponents(each[each["arm"] == arm], method) for arm in arms[:2])
    if not one.keys() & other.keys():
        return f"Exponents of the learning rate in harm, of {arms[0]} and {arms[1]}"
    gap = laws.compare_exponents(one, other)
    said = f"Exponents of the learning rate in harm, {arms[0]} minus {arms[1]}:"
    if _estimate(gap).is_above(0):
        said = (
            f"The exponent of the learning rate in harm of {arms[0]}, not {arms[1]}, is higher by"
        )
        if tuple(arms[:2]) == ARMS:
            said = "Error feedback raises the exponent of the learning rate in harm by"
    return f"{said} {gap.value:.1f}{_interval_of(gap.low, gap.high)}"


def _caption(drawn: pd.DataFrame, missing: int, trunk: Record, shown: Metric) -> str:
    counts = drawn["n"].to_list()
    left_out = f"{missing} harms of zero or less are not drawn. " if missing else ""
    trees = len({*drawn["tree"]})
    several = len({*drawn["arm"]}) > 1 and trees > 1
    common = "Title: over trunks that have both. " if several else ""
    return (
        f"Each point: pulses from one unit on, of {trees} tree{'s' if trees > 1 else ''}; "
        f"{shown.label}, geometric mean over seeds, {style.seeds_in_words(counts)}, "
        f"{style.intervals_in_words(counts, bands=False)}. Lines: the law with a level for each "
        f"trunk, exponent [95 %, over trunks]. {common}Pulses from unit {FIRST} on that leave "
        f"units to recover in. {left_out}{markov.caption(trunk)}{style.describe_setting(trunk)}."
    )


def table_of(rows: pd.DataFrame) -> Table:
    """`summary`, rounded."""
    columns = {
        "pulse": word("arm"),
        "fit": word("method"),
        "trunks": word("trunks"),
        "pulses": word("pulses"),
        "left out": word("left_out"),
        "exponent [95 %]": mean("exponent", ".2f"),
        "level": number("level", ".3f"),
    }
    return as_table(rows, columns, 2)


def _trees(records: Sequence[Path], arms: Sequence[str]) -> Iterator[tuple[Record, pd.DataFrame]]:
    """A trunk and `lasting` pulses of each tree and arm that there is."""
    for name, path in by_name(records).items():
        runs = load_all(path)
        there = {measured.arm_of(run): trunk for run, trunk in measured.pair_branches(runs)}
        for arm in [arm for arm in arms if arm in there] or arms[:1]:
            table = lasting(pulses(name, runs, arm))
            if len(table):
                yield there[arm], table


def main(records: Several, out: Out = None, arm: Arms = ()) -> list[Path]:
    """Draw harm against the learning rate of the pulse, and fit the law.

    Args:
        records: folders of branches and their trunk, or archives of them.
        arm: which pulses, at most three kinds; may be given several times; default rank 1 with
            error feedback and without.

    Raises:
        RecordError: too few or too many of them, or two trees of one name.
    """
    arm = tuple(dict.fromkeys(arm or ARMS))
    if not records:
        raise RecordError("give trees of pulses, e.g. the folder of `regimes ablate harm-lm`")
    if len(arm) > len(LOOKS):
        raise RecordError(f"--arm {len(arm)} times: at most {len(LOOKS)} kinds of pulses")
    found = [*_trees(records, arm)]
    if not found:
        raise RecordError(f"no pulse starts in unit {FIRST} or later and leaves units after it")
    # by arm, so that the first is drawn and named first
    each = pd.concat([table for _, table in found], ignore_index=True)
    each = pd.concat([each[each["arm"] == one] for one in arm], ignore_index=True)
    rows = summary(each)
    files = Files(records[0] if len(records) == 1 else "law", out)
    files.figure("law", figure(each, found[0][0]))
    files.table("law-exponents", rows)
    files.table("law-pulses", each)
    files.page("law", "", table_of(rows))
    return files.print_paths()
