"""What a policy costs beside training: its decisions, and the statistics that they need

Seconds of an epoch of `smoke` and of a unit of `lm-small` with both, against the compute,
compression and communication of the same epochs: a short run by each policy of the tournament at
its thresholds. Instruments are clocked by the run; a decision is timed after 24 epochs, the run's
own repeated, and a late one after 1,000 and 20,000, against that after 24. The note has the parts,
and what the statistics send, of dense's bytes. The last rows of `smoke` measure less often.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Limits, Row
from regimes.base.config import RunConfig
from regimes.cost.cases import ITEMSIZE
from regimes.policies import Policy, make_policy
from regimes.policies.controller import Controller
from regimes.policies.history import level_costs
from regimes.policies.replay.replay import signal_cost
from regimes.presets import select_schedules
from regimes.records import Record
from regimes.training.loop import run

TARGET, LATE_TARGET = 1.01, 2.0
ARMS = (
    "accordion",
    "forced",
    "accordion-ladder",
    "sharpness",
    "adaqs",
    "error-ladder",
    "l-greco",
    "l-greco accordion",
    "gravac",
)
FEWER = {  # settings that measure on fewer steps or epochs, by arm
    "error-ladder": ["instruments.error.stride=16"],
    "sharpness": [f"instruments.sharpness.every={every}" for every in (2, 4, 8)],
}
UNITS = (24, 1_000, 20_000)  # after which a decision is timed; the first is a whole run


def decision(rule: Policy, record: Record, units: int, rounds: int) -> float:
    """Seconds of a decision in a run of so many units, the mean of that many and the next ones."""
    layers = record.header["layers"]
    compressed = [i for i, layer in enumerate(layers) if layer["compressed"]]
    controller = Controller(
        rule,
        [layer["name"] for layer in layers],
        compressed,
        record.config["signal"],
        level_costs(record.header["per_step"], compressed),
    )
    rows = [record.rows[i % len(record.rows)] for i in range(units - 1)]
    controller.decide(rows)
    spent = []
    for more in range(rounds):
        rows.append(record.rows[more % len(record.rows)])
        began = time.process_time()
        controller.decide(rows)
        spent.append(time.process_time() - began)
    return statistics.fmean(spent)


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


def rows(name: str, config: RunConfig, folder: Path, rounds: int) -> list[Row]:
    """The policy beside training; its decisions late in a run beside early ones."""
    record, rule = run(config, folder), make_policy(config.policy)
    decides, *late = (decision(rule, record, units, rounds) for units in UNITS)
    measures, share = signal_cost(record, rule)
    without = measures / share if share else float("nan")
    needs = ", ".join(dict.fromkeys(need.partition(":")[0] for need in rule.needs))
    whole = Row(
        f"{name}, {config.name}: {needs}",
        "training alone",
        1e3 * (without + measures + decides),
        1e3 * without,
        TARGET,
        rounds=len(record.rows),
        note=f"{name}, {config.name}: decides in {1e3 * decides:.2g} ms, measures in "
        f"{1e3 * measures:.2g} ms, sends {told(record):.1%} of dense's bytes",
    )
    return [
        whole,
        *(
            Row(
                f"{name}, {config.name}: a decision after {units:,} units",
                f"after {UNITS[0]}",
                1e3 * taken,
                1e3 * decides,
                LATE_TARGET,
                rounds=rounds,
            )
            for units, taken in zip(UNITS[1:], late, strict=True)
        ),
    ]


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    grids = {"smoke": ("tournament-smoke", f"epochs={2 if quick else 6}")}
    if not quick:
        grids["lm-small"] = ("tournament-lm", "steps=150")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (grid, length) in grids.items():
            for arm, cell in select_schedules(grid, ARMS, [length]).items():
                found += rows(name, cell, Path(folder, name, arm), 6 if quick else 60)
        grid, length = grids["smoke"][0], "epochs=8"  # a multiple of each `every`
        for arm, settings in FEWER.items():
            for setting in settings:
                cell = select_schedules(grid, [arm], [length, setting])[arm]
                whole, *_ = rows(f"smoke, {setting}", cell, Path(folder, setting, arm), 6)
                found.append(whole)
    return found
