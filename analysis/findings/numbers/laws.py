"""Numbers of the law of harm (`analysis.criticality.law`) that its page quotes.

Trees are "ARCHIVE" or "ARCHIVE: ARM", separated by semicolons; without an arm it is `settings.ARM`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.search.harms.rates import mean_rates

from ...criticality import fit as laws
from ...criticality import law, lost_time, measured, settings
from ..sources import REFERENCE, number, record_read, records
from ..values import Interval, mean_of


@functools.cache
def _all(source: str, arm: str) -> pd.DataFrame:
    return law.pulses(source, records(source), arm)


def _tree(words: str) -> pd.DataFrame:
    """All pulses of "ARCHIVE: ARM"."""
    source, _, arm = words.partition(": ")
    record_read(f"{source}.tar.xz")
    return _all(source, arm or settings.ARM)


def _pulses(trees: str, first: int = law.FIRST) -> pd.DataFrame:
    found = [law.lasting(_tree(words), first) for words in trees.split("; ")]
    return pd.concat(found, ignore_index=True)


def _interval(exponent: laws.Exponent) -> Interval:
    return Interval(exponent.value, exponent.low, exponent.high, exponent.n)


@number
def law_exponent(trees: str, method: laws.Method = "log", first: int = law.FIRST) -> Interval:
    """The exponent of the rate, over all trunks of some trees."""
    return _interval(law.fitted(_pulses(trees, first), method).exponent)


@number
def law_gap(
    trees: str, others: str, method: laws.Method = "log", first: int = law.FIRST
) -> Interval:
    """Exponents of the first trees minus the others', on the trunks that are in both."""
    return _gap(_pulses(trees, first), _pulses(others, first), method)


def _gap(one: pd.DataFrame, other: pd.DataFrame, method: laws.Method) -> Interval:
    return _interval(
        laws.compare_exponents(law.exponents(one, method), law.exponents(other, method))
    )


@number
def law_level(trees: str) -> float:
    """Harm of a pulse at the peak rate, of the law of some trees."""
    return law.fitted(_pulses(trees)).level


@number
def law_crossing(trees: str, others: str) -> float:
    """The share of the peak rate at which two laws say the same harm."""
    one, other = law.fitted(_pulses(trees)), law.fitted(_pulses(others))
    apart = one.exponent.value - other.exponent.value
    return float((other.level / one.level) ** (1 / apart))


@number
def law_over_trees(trees: str) -> Interval:
    """The mean of the exponents of several trees, each tree a value: what another may have."""
    return mean_of([law.fitted(_pulses(tree)).exponent.value for tree in trees.split("; ")])


@number
def law_kinds_table(kinds: str) -> str:
    """The law of each kind of pulse, fitted both ways.

    Args:
        kinds: "LABEL = TREES", separated by bars.
    """
    rows = []
    for words in kinds.split(" | "):
        label, _, trees = words.partition(" = ")
        table = _pulses(trees)
        by_log, by_harm = (law.fitted(table, method) for method in law.METHODS)
        cells = [_interval(found.exponent).text(2) for found in (by_log, by_harm)]
        counts = [len(by_harm.levels), by_harm.pulses, by_log.left_out]
        rows.append([label, *map(str, counts), *cells, f"{by_log.level:.3f}"])
    heads = ["pulse", "trunks", "pulses", "zero or less"]
    heads += ["exponent, log harm [95 %]", "exponent, harm [95 %]", "at the peak, bits"]
    return Table(heads, rows).markdown()


@number
def law_trees_table(trees: str) -> str:
    """The exponent and the level of each tree alone."""
    rows = []
    for tree in trees.split("; "):
        table = _pulses(tree)
        found = law.fitted(table)
        cells = [_interval(found.exponent).text(2), f"{found.level:.3f}"]
        rows.append([tree, str(len(found.levels)), str(found.pulses), *cells])
    heads = ["tree", "trunks", "pulses", "exponent [95 %]", "at the peak, bits"]
    return Table(heads, rows).markdown()


def _by_first_step(table: pd.DataFrame) -> pd.DataFrame:
    """Pulses with the rate of their first step in place of the mean over their steps."""
    parts = []
    for tree, part in table.groupby("tree", sort=False):
        trunks = {
            t.seed: t for t in measured.list_trunks(measured.pair_branches(records(str(tree))))
        }
        firsts = [
            float(trunks[seed].epochs["lr"].iloc[at]) / mean_rates(trunks[seed]).max()
            for seed, at in zip(part["seed"], part["onset"], strict=True)
        ]
        parts.append(part.assign(rate=firsts))
    return pd.concat(parts, ignore_index=True)


@number
def law_choices_table(trees: str, both: str, others: str) -> str:
    """What the exponents are by other choices than the page's.

    Args:
        trees, both, others: with feedback, all and those that have pulses without it, too; without.
    """
    every = [pd.concat([_tree(x) for x in t.split("; ")]) for t in (trees, both, others)]
    from_six = [table[table["onset"] >= law.FIRST] for table in every]
    usual = [_pulses(x) for x in (trees, both, others)]
    choices: dict[str, tuple[Sequence[pd.DataFrame], laws.Method]] = {
        "as above": (usual, "log"),
        "least squares on harm": (usual, "harm"),
        "pulses from unit 3 on": ([_pulses(x, 3) for x in (trees, both, others)], "log"),
        "pulses from unit 9 on": ([_pulses(x, 9) for x in (trees, both, others)], "log"),
        "with pulses that end with the run": (from_six, "log"),
        "the rate of a pulse's first step": ([_by_first_step(table) for table in usual], "log"),
    }
    rows = []
    for name, ((all_, one, other), method) in choices.items():
        found = [_interval(law.fitted(table, method).exponent) for table in (all_, other)]
        rows.append([name, *(x.text(2) for x in (*found, _gap(one, other, method)))])
    return Table(["choice", "with feedback", "without", "difference"], rows).markdown()


# -- prediction ------------------------------------------------------------------------------

TREES = "harm-lm*.tar.xz"


@number
def law_predictions_table() -> str:
    """What three pulses of each arm on a text (images have no harm to predict) say of its others,
    in the arms that have two others or more."""
    record_read(TREES)
    sources = [path.name.removesuffix(".tar.xz") for path in sorted(REFERENCE.glob(TREES))]
    trees = [lost_time.tree(source, records(source)) for source in sources]
    rows = pd.concat([lost_time.predictions(tree) for tree in trees], ignore_index=True)
    return lost_time.law_table(rows[rows["n"] > 1].drop(columns="why")).markdown()


@number
def law_three(trees: str, first: int = law.FIRST) -> dict[str, float]:
    """How well three pulses of each tree predict its others, all together: r2 (against the mean of
    the three), among (against the mean of all others, which nobody knows before), rank, error, n.
    """
    found = pd.concat([law.from_three(_pulses(tree, first)) for tree in trees.split("; ")])
    score, rest = law.scored(found), found[~found["fitted"]]
    measured, told = rest["harm"].to_list(), rest["predicted"].to_list()
    among = laws.score_predictions(measured, told, float(rest["harm"].mean())).r2
    known = {"r2": score.r2, "among": among, "rank": score.rank}
    return known | {"error": score.error, "n": score.n}


@number
def law_every_three(trees: str) -> list[float]:
    """R2 of each tree's predictions from three pulses, over every choice of three: the lower
    quartile, the median, the upper quartile, and how many choices there are."""
    found = [r2 for tree in trees.split("; ") for r2 in law.every_three(_pulses(tree))]
    return [*map(float, np.percentile(found, [25, 50, 75])), len(found)]


@number
def law_two_trees(trees: str, power: float, first: int) -> list[float]:
    """R2 of harm = c x rate^power with the c that fits two trees best, in the others: the lowest,
    the mean and the highest over the choices of two. The constant is the mean of the others."""
    table = _pulses(trees, first).groupby(["tree", "onset"])[["rate", "harm"]].mean().reset_index()
    found = []
    for two in itertools.combinations(trees.split("; "), 2):
        used = table["tree"].isin(two)
        powers = table["rate"] ** power
        level = (table["harm"] * powers)[used].sum() / (powers**2)[used].sum()
        rest = table.loc[~used, "harm"]
        told = (level * powers)[~used].to_list()
        found.append(laws.score_predictions(rest.to_list(), told, float(rest.mean())).r2)
    return [min(found), float(np.mean(found)), max(found)]


@number
def law_at_peak(source: str) -> Interval:
    """The mean harm of the pulses of a tree from `law.FIRST` on, by seed."""
    by_seed = law.lasting(_tree(source)).groupby("seed")["harm"].mean()
    return mean_of([float(x) for x in by_seed])


@number
def law_of_whole(tree: str) -> float:
    """The harm of a disturbance throughout, by the law of a tree: the sum over all units."""
    table = _pulses(tree)
    trunk = measured.list_trunks(measured.pair_branches(records(tree.partition(": ")[0])))[0]
    shares = law.shares_of(trunk)
    return law.fitted(table).of_schedule(shares, [True] * len(shares))
