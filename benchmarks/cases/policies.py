"""What a policy costs beside training: its decisions, and the statistics that they need

Seconds of an epoch of `smoke` and of a unit of `lm-small` with both, against the compute,
compression and communication of the same epochs: a short run by each policy of the tournament at
its thresholds. Instruments are clocked by the run; a decision is timed on the 24 epochs of a whole
run, the run's own repeated. The note has the parts, and what the statistics send, of dense's bytes.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Limits, Row
from regimes.config import RunConfig
from regimes.cost.cases import ITEMSIZE
from regimes.policies import Policy, policy
from regimes.policies.history import PastEpoch
from regimes.presets import cpu, language
from regimes.presets.tournament import arms, policies
from regimes.records import Record
from regimes.replay.replay import past_epochs, signal_cost
from regimes.training.loop import run

TARGET, PAST = 1.01, 24


def decision(rule: Policy, past: Sequence[PastEpoch], layers: Sequence[str], rounds: int) -> float:
    """Seconds, the median over rounds, of one decision after a whole run."""
    long, spent = [past[i % len(past)] for i in range(PAST)], []
    for _ in range(rounds):
        began = time.process_time()
        rule.decide(long, layers)
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def told(record: Record) -> float:
    """Bytes of statistics, as a share of what dense training would have sent: all that travels
    beside the layers but buffers and the loss."""
    item = ITEMSIZE[record.config["dtype"]]
    dense = item * sum(math.prod(layer["shape"]) for layer in record.header["layers"])
    beside = 0
    for line in record.rows:
        own = sum(line["layers"]["bytes"]) + line["collectives"]["bytes"]["broadcast"]
        beside += line["bytes"] - own - item * line["steps"]
    return beside / (dense * sum(line["steps"] for line in record.rows))


def row(name: str, config: RunConfig, folder: Path, rounds: int) -> Row:
    record, rule = run(config, folder), policy(config.policy)
    layers = [layer["name"] for layer in record.header["layers"] if layer["compressed"]]
    decides = decision(rule, past_epochs(record), layers, rounds)
    measures, share = signal_cost(record, rule)
    without = measures / share if share else float("nan")
    needs = ", ".join(dict.fromkeys(need.partition(":")[0] for need in rule.needs))
    return Row(
        f"{name}, {config.name}: {needs}", "training alone", 1e3 * (without + measures + decides),
        1e3 * without, TARGET, rounds=len(record.rows),
        note=f"{name}, {config.name}: decides in {1e3 * decides:.2g} ms, measures in "
        f"{1e3 * measures:.2g} ms, sends {told(record):.1%} of dense's bytes",
    )  # fmt: skip


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    bases = {"smoke": replace(cpu.smoke(), epochs=2 if quick else 6)}
    if not quick:
        bases["lm-small"] = replace(language.lm_small(), steps=150)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, base in bases.items():
            cells = arms(base)
            found += [row(name, cells[arm],
                          Path(folder, name, arm), 5 if quick else 50)
                      for arm in policies()]  # fmt: skip
    return found
