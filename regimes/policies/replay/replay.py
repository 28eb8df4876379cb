"""Policies and detectors replayed over a record, without training. No torch.

The statistics are of the run as trained. A policy replayed over its own run decides exactly
as it did. Replayed over another run it decides from that run's statistics, which would have been
others if the policy itself had chosen the levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from regimes.base.config import DENSE
from regimes.base.errors import ConfigError, RecordError
from regimes.policies import Decision, Detected, Policy
from regimes.policies.controller import Controller
from regimes.policies.detected import signal_values
from regimes.policies.detectors import Detector
from regimes.policies.detectors.statistics import Statistic, measuring_options
from regimes.policies.history import History, level_costs, read_history, whole_history
from regimes.records import Record, count_exchanges

Rule = Policy | Detector
Costs = dict[tuple[str, str], float]  # floats of an exchange, by layer and level
DECIDED = ["epoch", "layer", "level"]
TRAINING = ("seconds_compute", "seconds_compress", "seconds_communicate")


def as_policy(rule: Rule) -> Policy:
    """Turn a detector into the policy with low compression where it is critical, and high
    elsewhere; return a policy as it is."""
    return Detected(rule) if isinstance(rule, Detector) else rule


def per_layer(policy: Policy) -> bool:
    """Return whether a policy decides layer by layer. A policy that reads nothing does not."""
    return policy.rule.per_layer if isinstance(policy, Detected) else bool(policy.needs)


def past_epochs(record: Record) -> History:
    """Read the record as a policy sees it; raise RecordError if the run has no complete epoch."""
    compressed = [i for i, layer in enumerate(record.header["layers"]) if layer["compressed"]]
    if not record.rows:
        raise RecordError(f"{record.folder} has no complete epoch to replay over")
    costs = level_costs(record.header["per_step"], compressed)
    return read_history(record.rows, compressed, record.config["signal"], costs)


def replay_rule(record: Record, rule: Rule) -> pd.DataFrame:
    """Compute what a policy or detector would have decided in each epoch of a run.

    Args:
        rule: a detector stands for the policy ``Detected(rule)`` without a decay rule.

    Returns:
        One row per epoch and compressed layer: epoch, layer, level; critical (whether the level is
        the policy's first); score (what was compared with the threshold after the previous epoch;
        nan if nothing was); why.

    Raises:
        RecordError: the run recorded no such statistic, or compresses no layer.
    """
    return replay_over(past_epochs(record), record, rule)


def replay_over(recorded: History, record: Record, rule: Rule) -> pd.DataFrame:
    """Do what ``replay_rule`` does, over the past epochs of the record, which several rules can
    share."""
    policy = as_policy(rule)
    layers = [layer["name"] for layer in record.header["layers"] if layer["compressed"]]
    if not layers:
        raise RecordError(f"{record.folder} compresses no layer: there is nothing to decide")
    _check_measured(record, policy, recorded)
    return _decisions(policy, recorded, layers)


def replay_batch(record: Record, rule: Rule) -> pd.DataFrame:
    """Do what ``replay_rule`` does for a batch policy: with the whole model as its only layer,
    "batch"."""
    past_epochs(record)  # raises unless there are some
    recorded = whole_history(record.rows, record.config["signal"])
    return _decisions(as_policy(rule), recorded, ["batch"])


def _decisions(policy: Policy, recorded: History, layers: Sequence[str]) -> pd.DataFrame:
    controller = Controller(policy, layers, range(len(layers)), signal="")  # no rows are read
    past = History()
    decided: list[Decision] = []
    for trained in recorded:
        decisions = [*controller.decide_after(past).decisions.values()]
        decided += decisions
        past.append(replace(trained, levels=[d.level for d in decisions]))
    levels, reasons, first = [d.level for d in decided], [d.why for d in decided], policy.names[0]
    columns = {
        "epoch": np.repeat(np.arange(len(recorded)), len(layers)),
        "layer": [*layers] * len(recorded),
        "level": levels,
        "critical": [level == first for level in levels],
        "score": np.array([(why or {}).get("ratio") for why in reasons], dtype=float),
        "why": reasons,
    }
    return pd.DataFrame(columns)


def has_statistics(record: Record, rule: Rule, recorded: History | None = None) -> bool:
    """Return whether the record has the statistics that a rule reads.

    Args:
        recorded: its ``past_epochs``, where they are known.
    """
    try:
        past = past_epochs(record) if recorded is None else recorded
        _check_measured(record, as_policy(rule), past)
    except RecordError:
        return False
    return True


def _check_measured(record: Record, policy: Policy, past: History) -> None:
    for name in policy.needs:
        if isinstance(policy, Detected):
            layers = range(len(past[0].levels)) if per_layer(policy) else [0]
            columns = (signal_values(past, policy.rule, layer) for layer in layers)
            recorded = any(value is not None for column in columns for value in column)
        else:  # of the layers or of the model: a policy may consist of others that read either
            recorded = any(name in (*epoch.statistics, *epoch.model) for epoch in past)
        if recorded:
            continue
        where = "per layer" if per_layer(policy) else "for the whole model"
        known = {n for epoch in past for n in (*epoch.statistics, *epoch.model)}
        try:
            options = measuring_options(name)
        except ConfigError:  # a user's own statistic
            options = "an instrument that measures it"
        raise RecordError(
            f"{record.folder} recorded no {name!r} {where} (it has "
            f"{', '.join(sorted(known)) or 'no statistic'}): train it again with {options}"
        )


def replay_traffic(record: Record, levels: pd.DataFrame) -> float:
    """Compute the floats (the paper's count) that one worker would have sent at other levels, in as
    many exchanges: one in each step, or in each round of local steps. A run that begins
    uncompressed (``start_compressing_after``) still does.

    Args:
        levels: columns epoch, layer, level of every compressed layer, as from ``replay_rule``.

    Raises:
        RecordError: the cost of a level is in neither the header nor the run's own epochs, for
            instance because the run does not have this level.
    """
    names = [layer["name"] for layer in record.header["layers"]]
    costs = {  # those in the header; the oldest headers have none
        (name, level): floats
        for level, cost in record.header["per_step"].items()
        for name, floats in zip(names, cost.get("layers", ()), strict=False)
    }
    total = 0.0
    dense = dict.fromkeys(names, DENSE)
    rows = {row["epoch"]: row for row in record.rows}
    by_epoch: dict[int, dict[str, str]] = {}
    for epoch, layer, level in zip(*(levels[x].tolist() for x in DECIDED), strict=True):
        by_epoch.setdefault(epoch, {})[layer] = level
    for epoch, compressed in sorted(by_epoch.items()):
        counts = count_exchanges(record.header, rows[epoch])
        uncompressed = dict.fromkeys(compressed, DENSE)
        for count, decided in zip(counts, (uncompressed, compressed), strict=True):
            if count:
                total += count * _exchange_floats(record, costs, dense, decided)
    return total


def _exchange_floats(
    record: Record, costs: Costs, dense: dict[str, str], compressed: dict[str, str]
) -> float:
    """Floats of one exchange; `replay_traffic` says which levels have no price. ``costs`` gets
    those of the rows where they are needed."""
    per_step, total = record.header["per_step"], 0.0
    names = {*compressed.values()}
    if len(names) == 1 and (level := names.pop()) in per_step:
        return per_step[level]["floats"]
    for layer, level in (dense | compressed).items():
        if (layer, level) not in costs:
            costs |= _row_costs(record) | costs
        if (layer, level) not in costs:
            if level not in per_step:
                raise RecordError(
                    f"{record.folder} has no level {level!r}, only {', '.join(per_step)}: give "
                    "the policy levels of the run"
                )
            raise RecordError(
                f"{record.folder} is an older record that knows the traffic of level "
                f"{level!r} for all layers together, not for single ones, and never used it: "
                "train it again to price decisions per layer"
            )
        total += costs[layer, level]
    return total


def _row_costs(record: Record) -> Costs:
    """The costs of the levels that the run used, from units that began no step uncompressed."""
    names, known = [layer["name"] for layer in record.header["layers"]], Costs()
    for row in record.rows:
        counts = count_exchanges(record.header, row)
        if counts.dense or not counts.chosen:
            continue
        columns = names, row["layers"]["level"], row["layers"]["floats"]
        for name, level, floats in zip(*columns, strict=True):
            known.setdefault((name, level), floats / counts.chosen)
    return known


def signal_cost(record: Record, rule: Rule) -> tuple[float, float]:
    """Return the seconds per epoch to measure what a rule reads, and their share of the training
    time.

    Training time is compute, compression and communication. An instrument counts in full,
    also if it measures other statistics in the same pass. (nan, nan): the record lacks its seconds.
    """
    needs = as_policy(rule).needs
    if not needs:
        return 0.0, 0.0
    names = {Statistic.parse(need).instrument for need in needs}
    columns = [f"seconds_{'instruments' if n == 'norms' else n}" for n in sorted(names)]
    if not {*columns, *TRAINING} <= set(record.epochs):
        return np.nan, np.nan
    spent, training = (record.epochs[[*x]].sum().sum() for x in (columns, TRAINING))
    return float(spent / len(record.epochs)), float(spent / training)
