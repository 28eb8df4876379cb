"""Numbers of several trees of pulses at once, for the templates."""

from __future__ import annotations

import functools

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.console.units import p_text

from ...criticality import scores, settings
from ..sources import number, record_read, records
from ..verdicts import ALPHA
from .pulses import curve, signal_of_harm


def _split(sources: str) -> list[tuple[str, str]]:
    """Archives and arms of "ARCHIVE; ARCHIVE: ARM"."""
    parts = [words.partition(": ") for words in sources.split("; ")]
    for name, _, _ in parts:
        record_read(f"{name}.tar.xz")
    return [(name, arm or settings.ARM) for name, _, arm in parts]


@functools.cache
def _tree(name: str, arm: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    return settings.of_tree(name, records(name), arm)


def _scored(sources: str) -> pd.DataFrame:
    parts = [_tree(*each)[1] for each in _split(sources)]
    return settings.over_trees(pd.concat([p for p in parts if len(p)], ignore_index=True))


def _marked(pulse: pd.Series, form: str) -> str:
    text = f"{pulse['harm']:{form}}"
    apart = bool(pulse["ci_low"] > 0 or pulse["ci_high"] < 0)
    return text + "*" * (apart + bool(pulse["p_holm"] < ALPHA))


@number
def onsets_table(sources: str, onsets: str) -> str:
    """Harm by onset, a row for each tree and arm. An asterisk: the 95 % interval does not hold 0; a
    second: p after Holm's correction over all pulses of the tree is below 0.05.

    Args:
        onsets: those that have a column, as in "0, 3, 6".
    """
    lines = []
    for name, arm in _split(sources):
        pulses = curve(name).query("arm == @arm").set_index("onset")
        phases, scored = _tree(name, arm)
        about, form = phases.iloc[0], "+.3f" if phases["unit"].iloc[0] == "bits" else "+.2f"
        marked = {at: _marked(pulse, form) for at, pulse in pulses.iterrows()}
        cells = [marked.get(at, "") for at in map(int, onsets.split(", "))]
        without = f"{pulses['without'].iloc[0]:.2f}"
        lines.append([about["setting"], without, *cells, _rank(scored, scores.RATE)])
    heads = ["tree: pulse", "without", *onsets.split(", ")]
    return Table([*heads, "rate ranks"], lines).markdown()


def _rank(scored: pd.DataFrame, signal: str) -> str:
    """A signal's mean rank correlation; an asterisk where its interval does not hold 0."""
    of_signal = scored[scored["signal"] == signal]
    if of_signal.empty:
        return ""
    row = settings.over_trees(of_signal).iloc[0]
    return f"{row['rank']:+.2f}" + "*" * bool(row["rank_ci_low"] > 0 or row["rank_ci_high"] < 0)


@number
def signals_table(sources: str, tree: str, *arms: str) -> str:
    """Signals of the trunk: in how many settings the rank correlation with harm has an interval
    above 0, with 0 in it, below 0, and none (equal in all seeds); and what it is for some arms of
    one tree."""
    every, lines = _scored(sources), []
    for signal in _tree(tree, arms[0])[1]["signal"].unique():
        ends = every.loc[every["signal"] == signal, ["rank_ci_low", "rank_ci_high"]]
        above, below = int((ends["rank_ci_low"] > 0).sum()), int((ends["rank_ci_high"] < 0).sum())
        none = int(ends.isna().any(axis=1).sum())
        line = [signal, *map(str, (above, len(ends) - above - below - none, below, none))]
        for found in (signal_of_harm(tree, arm, signal) for arm in arms):
            line += [found.text(2, sign=True), p_text(found.p_holm)]
        lines.append(line)
    heads = [word for arm in arms for word in (f"{tree}: {arm} [95 %]", "p (Holm)")]
    return Table(["signal", "above 0", "0 inside", "below 0", "none", *heads], lines).markdown()


@number
def settings_above(sources: str, signal: str) -> int:
    """In how many of the settings a signal's rank correlation has an interval above 0."""
    rows = _scored(sources)
    return int((rows.loc[rows["signal"] == signal, "rank_ci_low"] > 0).sum())


@number
def settings_fallen(sources: str) -> list[int]:
    """In how many of the settings with a falling rate the mean harm after its fall is below that in
    the middle of the high rate, and in how many it could be."""
    both = []
    for each in _split(sources):
        harms = _tree(*each)[0].set_index("phase")["harm"]
        if harms[settings.FALLEN] == harms[settings.FALLEN]:  # not nan
            both.append(bool(harms[settings.FALLEN] < harms[settings.HIGH]))
    return [sum(both), len(both)]
