"""From harm to a schedule: the low level, which sends more, where pulses of the high level have the
largest harm per float saved.

What is assumed: harm adds up. A schedule with the high level in the units of several pulses is then
worse than the trunk by the sum of these pulses' harms (`predicted`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from regimes.errors import RecordError
from regimes.harms import measured
from regimes.records import Record

Windows = list[tuple[int, int]]  # units, first and one past the last


def pulses(runs: Sequence[Record], arm: str) -> pd.DataFrame:
    """One row per pulse of an arm, by onset: onset, length, harm (mean over seeds, see
    `measured.by_run`), saved (floats that the branch sends less than its trunk, mean over seeds).

    Raises:
        RecordError: no such arm, or see `measured.pair_branches`.
    """
    found = [
        (run, trunk) for run, trunk in measured.pair_branches(runs) if measured.arm_of(run) == arm
    ]
    if not found:
        raise RecordError(f"no branch is called {arm!r} in these records")
    saved = pd.DataFrame(
        {"onset": run.config["branch"]["at"], "saved": _floats(trunk) - _floats(run)}
        for run, trunk in found
    )
    harms = measured.by_run(measured.by_unit(found)).groupby("onset")[["length", "harm"]].mean()
    table = harms.join(saved.groupby("onset")["saved"].mean()).reset_index()
    return table.astype({"length": int}).sort_values("onset", ignore_index=True)


def _floats(run: Record) -> float:
    return float(run.epochs["floats"].sum())


def best(table: pd.DataFrame, units: int) -> Windows:
    """The units of the low level: the pulses with the largest harm per float saved (the earlier
    one of two alike), until they have so many units.

    >>> table = pd.DataFrame({"onset": [0, 3, 6], "length": 3, "harm": [1.0, 3.0, 2.0],
    ...                       "saved": 10.0})
    >>> best(table, 6), best(table, 3)
    ([(3, 9)], [(3, 6)])

    Args:
        table: of `pulses`; they do not overlap.
        units: 0, or a number that the first pulses in that order have together.

    Raises:
        RecordError: the pulses overlap, or ``units`` is no such sum.
    """
    ends = table["onset"] + table["length"]
    if (ends[:-1].to_numpy() > table["onset"][1:].to_numpy()).any():
        raise RecordError("pulses overlap: a unit would be counted twice")
    order = (table["harm"] / table["saved"]).sort_values(ascending=False, kind="stable").index
    sums = table["length"][order].cumsum()
    if units not in [0, *sums]:
        raise RecordError(f"units = {units}: expected 0 or one of {', '.join(map(str, sums))}")
    chosen = table.loc[sorted(order[sums.to_numpy() <= units])]
    windows: Windows = []
    for onset, length in zip(chosen["onset"], chosen["length"], strict=True):
        begin = windows.pop()[0] if windows and windows[-1][1] == onset else int(onset)
        windows.append((begin, int(onset + length)))
    return windows


def predicted(table: pd.DataFrame, windows: Windows) -> float:
    """The sum of the harm of all pulses outside the windows of the low level.

    >>> table = pd.DataFrame({"onset": [0, 3, 6], "length": 3, "harm": [1.0, 3.0, 2.0]})
    >>> predicted(table, [(3, 9)])
    1.0

    Raises:
        RecordError: a window has a part of a pulse.
    """
    total = 0.0
    for onset, length, amount in table[["onset", "length", "harm"]].itertuples(index=False):
        inside = {any(a <= unit < b for a, b in windows) for unit in range(onset, onset + length)}
        if len(inside) != 1:
            raise RecordError(f"the windows have a part of the pulse from {onset}")
        total += 0.0 if inside == {True} else float(amount)
    return total
