"""Numbers of `analysis.criticality` that the templates of docs/findings/ quote."""

from __future__ import annotations

import functools
from statistics import fmean

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.console.units import p_text
from regimes.base.statistics import correct_by_holm
from regimes.plotting.groups import tested_by

from ...common import markov
from ...criticality import harm, measured, scores
from ..sources import number, record_read, records, row_of
from ..values import Interval, mean_of


@functools.cache
def _tabulate_harms(source: str) -> pd.DataFrame:
    """`measured.by_run` of an archive: a row for each branch."""
    return measured.by_run(measured.by_unit(measured.pair_branches(records(source))))


@functools.cache
def _scores(source: str, first: int = 0) -> pd.DataFrame:
    runs, pulses = records(source), _tabulate_harms(source)
    pulses = pulses[pulses["onset"] >= first]
    return scores.scores(
        pulses, scores.by_seed(measured.list_trunks(measured.pair_branches(runs)), runs)
    )


@functools.cache
def curve(source: str) -> pd.DataFrame:
    """`harm.curve` of all pulses of an archive: p is corrected over them."""
    return harm.curve(_tabulate_harms(source))


def _harms(source: str, arm: str, onset: int) -> pd.Series:
    """The final harm of one pulse by seed."""
    record_read(f"{source}.tar.xz")  # notes the read, even if the table is cached; so below
    runs = _tabulate_harms(source)
    rows = runs[(runs["arm"] == arm) & (runs["onset"] == onset)].sort_values("seed")
    return rows.set_index("seed")["harm"]


def _added(*harms: pd.Series) -> list[float]:
    """The sum of several pulses' harms, a value per seed.

    Raises:
        ValueError: they have other seeds than each other.
    """
    first = harms[0]
    if any(not one.index.equals(first.index) for one in harms):
        raise ValueError(f"pulses of seeds {[one.index.to_list() for one in harms]}: not in pairs")
    return [float(value) for value in sum(harms[1:], first)]


@number
def harm_of_a_pulse(source: str, arm: str, onset: int) -> Interval:
    """How much worse the final metric is with a pulse of an arm, which starts at unit ``onset``,
    than without it."""
    return mean_of(_added(_harms(source, arm, onset)))


@number
def harm_among_all(source: str, arm: str, onset: int) -> Interval:
    """`harm_of_a_pulse` with p after Holm's correction over all pulses of the tree."""
    record_read(f"{source}.tar.xz")
    row = row_of(curve(source), arm=arm, onset=onset)
    ends = row["harm"], row["ci_low"], row["ci_high"]
    return Interval(*ends, int(row["n"]), row["p"], row["p_holm"])


@number
def harm_between(source: str, arm: str, onset: int, other: int) -> Interval:
    """Harm of a pulse minus the harm of the pulse that starts at another unit, by seed."""
    (differences,) = _list_differences(source, arm, onset, other)
    return mean_of(differences)


def _list_differences(sources: str, arm: str, onset: int, other: int) -> list[list[float]]:
    """The differences of `harm_between`, a list for each tree."""
    return [
        _added(_harms(source, arm, onset), -_harms(source, arm, other))
        for source in sources.split("; ")
    ]


@number
def harm_pooled(sources: str, arm: str, onset: int, other: int) -> Interval:
    """`harm_between` over the trunks of several trees, each trunk a value."""
    return mean_of([x for tree in _list_differences(sources, arm, onset, other) for x in tree])


@number
def harm_over_trees(sources: str, arm: str, onset: int, other: int) -> Interval:
    """`harm_between` over several trees, each tree's mean a value: the interval allows for what
    other trees may give. With equally many seeds in each tree it is the mean of a mixed model with
    a random effect of the tree, where trees differ more than seeds do."""
    return mean_of([fmean(tree) for tree in _list_differences(sources, arm, onset, other)])


@number
def pooled_table(sources: str, arm: str, differences: str) -> str:
    """Differences of harm between onsets, of the first tree, over all trunks and over trees; p
    after Holm's correction over the rows of a column.

    Args:
        differences: "ONSET - OTHER", separated by semicolons.
    """
    pairs = [[int(x) for x in words.split(" - ")] for words in differences.split("; ")]
    first = sources.partition("; ")[0]
    columns = {
        first: [harm_between(first, arm, *pair) for pair in pairs],
        "all trunks": [harm_pooled(sources, arm, *pair) for pair in pairs],
        "all trees": [harm_over_trees(sources, arm, *pair) for pair in pairs],
    }
    heads, cells = ["unit"], [[words] for words in differences.split("; ")]
    for name, found in columns.items():
        heads += [f"{name}, n = {found[0].n}, bits [95 %]", "p (Holm)"]
        corrected = correct_by_holm([x.p for x in found])
        for row, x, p in zip(cells, found, corrected, strict=True):
            row += [x.text(3, sign=True), p_text(p)]
    return Table(heads, cells).markdown()


@number
def trunk_ends(source: str) -> Interval:
    """The metric of the trunk in the last unit, in the unit of figures."""
    trunks = measured.list_trunks(measured.pair_branches(records(source)))
    factor = tested_by(trunks[0]).factor
    return mean_of([factor * float(run.epochs["metric"].iloc[-1]) for run in trunks])


@number
def markov_bits(source: str, order: int) -> float:
    """Bits per byte of a Markov model counted on the training text of an archive's first run."""
    record_read(markov.FILE.name)
    counted = markov.of(records(source)[0])
    if counted is None:
        raise ValueError(f"the text of {source} is not in {markov.FILE.name}")
    return counted.bits[str(order)]


@number
def test_bytes(source: str) -> int:
    """Bytes of the test text of an archive's first run."""
    return int(records(source)[0].header["data"]["test"] or 0)


@number
def harm_across(source: str, other: str, arm: str, onset: int) -> Interval:
    """Harm of a pulse minus the harm of the same pulse in another tree of the same seeds."""
    return mean_of(_added(_harms(source, arm, onset), -_harms(other, arm, onset)))


@number
def harm_right_after(source: str, arm: str, onset: int) -> float:
    """Harm in the last unit of a pulse, mean over seeds."""
    record_read(f"{source}.tar.xz")
    return float(row_of(curve(source), arm=arm, onset=onset)["after"])


@number
def harms_added(source: str, pulses: str, minus: str = "", times: float = 1.0) -> Interval:
    """The harms of several pulses added up, by seed; minus ``times`` the harm of another.

    Args:
        pulses, minus: "ARM from ONSET", separated by semicolons.
    """
    terms = [(1.0, pulse) for pulse in pulses.split("; ")]
    terms += [(-times, pulse) for pulse in minus.split("; ") if pulse]
    values = []
    for factor, pulse in terms:
        arm, _, onset = pulse.rpartition(" from ")
        values.append(factor * _harms(source, arm, int(onset)))
    return mean_of(_added(*values))


@number
def signal_of_harm(source: str, arm: str, signal: str, first: int = 0) -> Interval:
    """Rank correlation of a signal with harm over the onsets from ``first`` on, mean over seeds."""
    record_read(f"{source}.tar.xz")
    row = row_of(scores.over_seeds(_scores(source, first)), arm=arm, signal=signal)
    low, high = row["rank_ci_low"], row["rank_ci_high"]
    return Interval(row["rank"], low, high, int(row["n"]), row["p"], row["p_holm"])


@number
def signal_minus(source: str, arm: str, signal: str, dull: str) -> Interval:
    """A signal's rank correlation minus the correlation of one that measures nothing, by seed."""
    record_read(f"{source}.tar.xz")
    table = scores.against_dull(_scores(source))
    row = row_of(table, of=arm, arm=signal, control=dull)
    ends = row["ci_low"], row["ci_high"]
    return Interval(row["difference"], *ends, int(row["n"]), row["p"], row["p_holm"])
