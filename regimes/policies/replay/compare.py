"""Policies and detectors compared over one run: critical epochs, agreement, cost. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.errors import RecordError
from regimes.base.statistics import Calls, jaccard, kappa
from regimes.policies.replay.replay import (
    Rule,
    as_policy,
    past_epochs,
    per_layer,
    replay_over,
    replay_traffic,
    signal_cost,
)
from regimes.records import Record, count_exchanges, low_floats

FARTHEST = 5  # the largest lead or lag that is tried, in epochs


@dataclass(frozen=True)
class Comparison:
    """Holds how detectors compare over one run or several.

    Attributes:
        detectors: per detector: share of epochs (and layers) critical, floats, their ratio to
            low in all of the run's exchanges, seconds per epoch and share of training time of its
            signal.
        pairs: per pair: granularity, jaccard, kappa, lag (epochs by which b follows a), best
            (the Jaccard index at that lag).
        epochs: per detector and epoch: share of layers critical.
        notes: what could not be computed, in sentences.
    """

    detectors: pd.DataFrame
    pairs: pd.DataFrame
    epochs: pd.DataFrame
    notes: tuple[str, ...] = ()


def compare_rules(record: Record, rules: Mapping[str, Rule]) -> Comparison:
    """Replay rules over one run and compare all pairs.

    Two rules per layer are compared by epoch and layer. Otherwise by epoch, where a rule per
    layer counts as critical when at least half of the layers are.
    """
    recorded = past_epochs(record)
    frames = {name: replay_over(recorded, record, rule) for name, rule in rules.items()}
    calls: dict[str, Calls] = {}
    for name, frame in frames.items():
        table = _by_epoch(frame)
        calls[name] = table if per_layer(as_policy(rules[name])) else table[:, 0]
    notes: list[str] = []
    rows = [_row(record, name, rules[name], frame, notes) for name, frame in frames.items()]
    pairs = [(a, b, *_agreement(calls[a], calls[b])) for a, b in combinations(rules, 2)]
    columns = ["a", "b", "granularity", "jaccard", "kappa", "lag", "best"]
    shares = {name: _shares(frame) for name, frame in frames.items()}
    epochs = pd.concat(shares, names=["detector"]).reset_index()
    pairs_frame = pd.DataFrame(pairs, columns=columns)
    return Comparison(pd.DataFrame(rows), pairs_frame, epochs, tuple(dict.fromkeys(notes)))


def _by_epoch(frame: pd.DataFrame) -> np.ndarray:
    """What is critical: a row per epoch, a column per layer, in the order of `replay`."""
    return frame["critical"].to_numpy(dtype=bool).reshape(frame["epoch"].iloc[-1] + 1, -1)


def _shares(frame: pd.DataFrame) -> pd.Series:
    """Per epoch, the share of layers that are critical."""
    mean = _by_epoch(frame).mean(1)
    return pd.Series(mean, pd.RangeIndex(len(mean), name="epoch"), name="critical")


def _agreement(a: Calls, b: Calls) -> tuple[str, float, float, float, float]:
    """(granularity, Jaccard index, kappa, lag, Jaccard index at that lag)."""
    by_layer = a.ndim == b.ndim == 2
    if not by_layer:  # is it critical in at least half of the layers?
        a, b = (calls if calls.ndim == 1 else calls.mean(1) >= 0.5 for calls in (a, b))
    return "epoch x layer" if by_layer else "epoch", jaccard(a, b), kappa(a, b), *find_lag(a, b)


def find_lag(a: Calls, b: Calls) -> tuple[float, float]:
    """Find by how many epochs ``b`` follows ``a`` (negative: leads it), and the agreement there.

    The shift s of at most `FARTHEST` epochs, and at most a quarter of the run, that maximises
    the Jaccard index of ``a[e]`` with ``b[e + s]`` over the epochs that both have. Of equally good
    shifts it is the smallest, and of s and -s the lead. (nan, nan) if no shift has a critical call.
    """
    best, where = math.nan, math.nan
    reach = min(FARTHEST, len(a) // 4)
    for shift in sorted(range(-reach, reach + 1), key=abs):
        early, late = (a, b) if shift >= 0 else (b, a)
        overlapping = len(a) - abs(shift)
        value = jaccard(early[:overlapping], late[len(a) - overlapping :])
        if not math.isnan(value) and (math.isnan(best) or value > best + 1e-12):
            best, where = value, float(shift)
    return where, best


def _row(
    record: Record, name: str, rule: Rule, frame: pd.DataFrame, notes: list[str]
) -> dict[str, Any]:
    """A row of ``Comparison.detectors``; what cannot be computed goes to ``notes``."""
    try:
        floats = replay_traffic(record, frame)
    except RecordError as error:
        floats = np.nan
        notes.append(str(error))
    exchanges = sum(sum(count_exchanges(record.header, row)) for row in record.rows)
    low = exchanges * low_floats(record.header) or np.nan
    seconds, share = signal_cost(record, rule)
    return {
        "detector": name,
        "critical": float(frame["critical"].mean()),
        "floats": floats,
        "of_low": floats / low,
        "seconds_per_epoch": seconds,
        "share_of_training": share,
    }
