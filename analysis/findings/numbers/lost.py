"""Is harm lost time, and what does the way back to low compression cost? Numbers of the grids
lost-time-lm, -sgd and -cosine, and of switch-lm, and what was predicted at their heads.

A *source* is the name of an archive; several are separated by semicolons.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from regimes.base.console.tables import Table

from ...criticality import fit as laws
from ...criticality import law, lost_time
from ..sources import number, record_read, records
from ..values import Interval, mean_of
from . import differences, pulses

NEAR, APART = 0.15, 0.2  # how far an exponent, and a difference of two, may be from the prediction
MIDDLE = {"lost-time-cosine": 6}  # onset at the high rate, where it is not 9
LATE = 18
DELETION = "deletion"
SWITCH, WAYS = "switch-lm", ("dropped", "fading")
GAIN = (0.02, 0.05)  # bits that ACCORDION was predicted to gain


@functools.cache
def _tree(source: str) -> lost_time.Tree:
    return lost_time.tree(source, records(source))


def _read(source: str) -> lost_time.Tree:
    record_read(f"{source}.tar.xz")  # notes the read, even if the tree is cached
    return _tree(source)


@number
def lost_time_sources(sources: str) -> list[str]:
    """Those of some sources whose archive exists; a number changes with each that is added."""
    return [name for name in sources.split("; ") if record_read(f"{name}.tar.xz").exists()]


@number
def over_deletion(source: str, arm: str, onset: int) -> Interval:
    """Harm of a pulse minus the harm of leaving its units out, by seed, in bits."""
    both = lost_time.beside_deletion(_read(source))
    part = both[(both["arm"] == arm) & (both["onset"] == onset)]
    return mean_of((part["harm"] - part["harm_deletion"]).to_list())


@number
def ratio_exponent(source: str, arm: str, first: int = lost_time.FIRST, left: int = 0) -> Interval:
    """The exponent of the learning rate in harm over deletion, mean over trunks."""
    return _exponent(source, arm, "ratio", first, left)


@number
def lost_time_ratio(source: str, arm: str, onset: int) -> float:
    """The mean harm of a pulse divided by the mean harm of leaving its units out."""
    both = lost_time.beside_deletion(_read(source))
    return _ratio(both[both["onset"] == onset], arm)


@number
def exponent_of(source: str, name: str, first: int = law.FIRST, left: int = 1) -> Interval:
    """The exponent of the learning rate in the harm of an arm, mean over trunks.

    Args:
        name: the arm; or "deletion".
    """
    arm, column = (law.WITH, name) if name == DELETION else (name, "harm")
    return _exponent(source, arm, column, first, left)


def _exponent(source: str, arm: str, column: str, first: int, left: int) -> Interval:
    """A column of `lost_time.exponents`."""
    rows = lost_time.exponents(_read(source), first, left)
    (row,) = rows[rows["arm"] == arm].to_dict("records")
    return Interval(row[column], row[f"{column}_ci_low"], row[f"{column}_ci_high"], n=row["n"])


@number
def feedback_gap(source: str, left: int = 0) -> Interval:
    """The exponent of harm with feedback minus without, on the same trunks."""
    each = _read(source).pulses
    each = each[(each["onset"] >= lost_time.FIRST) & (each["left"] >= left)]
    one, other = (law.exponents(each[each["arm"] == arm]) for arm in law.ARMS)
    found = laws.compare_exponents(one, other)
    return Interval(found.value, found.low, found.high, n=found.n)


# -- what was predicted ----------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """One of the predictions at the head of each of these grids, and what the records say.

    Attributes:
        says: the prediction.
        found: what was measured.
        holds: by the rule at the head.
    """

    says: str
    found: Interval
    holds: bool


def _near(says: str, found: Interval, value: float, most: float) -> Said:
    """The exponent is near a value, and its interval contains this value."""
    holds = abs(found.mean - value) <= most and found.low <= value <= found.high
    return Said(says, found, holds)


def predictions(source: str) -> list[Said]:
    """The five predictions of a grid with their verdicts."""
    middle = MIDDLE.get(source, 9)
    with_feedback, without = law.ARMS
    more = over_deletion(source, with_feedback, middle)
    less = over_deletion(source, with_feedback, LATE)
    gap = feedback_gap(source)
    return [
        _near("rank 1 over deletion: 1", ratio_exponent(source, with_feedback), 1, NEAR),
        _near("without feedback, over deletion: 0", ratio_exponent(source, without), 0, NEAR),
        Said("feedback adds 1 to the exponent of harm", gap, abs(gap.mean - 1) <= APART),
        Said("from 9 (cosine: 6) rank 1 costs more than deletion", more, more.low > 0),
        Said(f"from {LATE} rank 1 costs less than deletion", less, less.mean < 0),
    ]


@number
def lost_time_predictions(sources: str) -> str:
    """A table of the predictions, a column for each archive that there is."""
    names = lost_time_sources(sources)
    columns = [predictions(source) for source in names]
    rows = [[each[0].says, *map(_verdict, each)] for each in zip(*columns, strict=True)]
    return Table(["predicted", *names], rows).markdown()


def _verdict(said: Said) -> str:
    return f"{said.found.text(3, sign=True)}: {'holds' if said.holds else 'refuted'}"


@number
def lost_time_onsets(source: str) -> str:
    """A table: by onset the rate, what leaving three units out costs, and each arm's harm over it,
    as a ratio of means."""
    both = lost_time.beside_deletion(_read(source))
    rows = []
    for onset, part in both.groupby("onset"):
        cells = [str(onset), f"{part['rate'].mean():.2f}"]
        cells.append(mean_of(_of(part, law.WITH, "harm_deletion")).text(3))
        cells += [f"{_ratio(part, arm):.2f}" for arm in law.ARMS]
        rows.append([*cells, over_deletion(source, law.WITH, int(str(onset))).text(3, sign=True)])
    heads = ["from", "rate, of the peak", "three units left out, bits [95 %]"]
    heads += ["rank 1, of it", "without feedback, of it", "rank 1 minus left out, bits [95 %]"]
    return Table(heads, rows).markdown()


def _of(part: pd.DataFrame, arm: str, column: str) -> Sequence[float]:
    return list(part.loc[part["arm"] == arm, column])


def _ratio(part: pd.DataFrame, arm: str) -> float:
    harm, lost = (sum(_of(part, arm, column)) for column in ("harm", "harm_deletion"))
    return harm / lost


# -- what the way back to low compression costs ----------------------------------------------


def switch_costs(rate: str) -> dict[str, Interval]:
    """What the head of switch-lm is about, at a learning rate: by name the mean over seeds in bits.

    A way back is the harm of rank 1 from 9 whose residual is dropped or fades afterwards, minus
    what its unit costs alone ("rank 4, dropped").
    """
    pulse, left_out = (f"{name} at {rate} from 9" for name in ("rank 1", DELETION))
    found = {"rank 1": pulses.harms_added(SWITCH, pulse)}
    for way in WAYS:
        after, control = (f"rank {k}, {way} at {rate} from {at}" for k, at in ((1, 9), (4, 12)))
        found[f"rank 1 - {way}"] = pulses.harms_added(SWITCH, f"{pulse}; {control}", after)
        both = f"{control}; {left_out}"
        found[f"{way} - {DELETION}"] = pulses.harms_added(SWITCH, after, both)
    trunk, policy = f"trunk at {rate}", f"accordion at {rate}"
    found["accordion - fading"] = differences.effect(SWITCH, policy, f"accordion, fading at {rate}")
    always = f"rank 4 throughout, fading at {rate}"
    found["rank 4, fading - rank 4"] = differences.effect(SWITCH, always, trunk)
    return found


@number
def switch_cost(rate: str, name: str) -> Interval:
    """One of `switch_costs`."""
    return switch_costs(rate)[name]


def switch_predictions(rate: str) -> list[Said]:
    """The five predictions of switch-lm at a learning rate, with their verdicts."""
    found = switch_costs(rate)
    dropped, sooner = found[f"dropped - {DELETION}"], found["accordion - fading"]
    less = [found[f"rank 1 - {way}"] for way in WAYS]
    lost = found["rank 4, fading - rank 4"]
    least, most = GAIN
    return [
        Said("dropped minus deletion: 0 or less", dropped, dropped.mean <= 0),
        Said("rank 1 minus dropped: above 0", less[0], less[0].low > 0),
        Said("rank 1 minus fading: above 0", less[1], less[1].low > 0),
        Said(
            f"ACCORDION minus ACCORDION, fading: {least} to {most}",
            sooner,
            sooner.low > 0 and least <= sooner.mean <= most,
        ),
        Said("rank 4, fading, minus rank 4: not above 0", lost, not lost.low > 0),
    ]


@number
def switch_table(rates: str) -> str:
    """A table of the predictions and verdicts, a column for each learning rate.

    Args:
        rates: separated by semicolons.
    """
    each = rates.split("; ")
    columns = [switch_predictions(rate) for rate in each]
    rows = [[one[0].says, *map(_verdict, one)] for one in zip(*columns, strict=True)]
    return Table(["predicted, bits", *(f"at {rate}" for rate in each)], rows).markdown()
