"""Seconds and bytes of a step of each method on a link, with compute and compression timed here."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.base.config import DENSE, AnyLevel, RunConfig
from regimes.cost.methods import Method
from regimes.cost.models import Model
from regimes.cost.nodes import DataParallelJob
from regimes.records import load
from regimes.search import sweep
from regimes.search.plans.probes import configure_probe

if TYPE_CHECKING:
    from regimes.data.task import Task

TIMED = 16  # steps of a run that is timed
LESS = 0.98  # of dense's seconds: what a prediction of 2 to 10 % can tell
RENEWED = 0.9  # of earlier seconds, from which on steps that are timed again count in their place


@dataclass(frozen=True)
class Price:
    """Holds what one step of a method takes.

    Attributes:
        seconds: predicted on the link.
        bytes: that a node's link carries in each direction.
        here: seconds of one simulated step of all workers on this machine.
    """

    seconds: float
    bytes: float
    here: float


def price_methods(
    config: RunConfig,
    methods: Sequence[Method],
    job: DataParallelJob,
    compute: float | None = None,
    task: Task | None = None,
) -> tuple[int, dict[str, Price], float]:
    """Time a few steps of one worker on this machine, and the compression of each method, and
    price them.

    Args:
        job: where the training will run; its model and its seconds do not count.
        compute: seconds of one worker's step there without communication; None: as timed here.

    Returns:
        The steps of an epoch, the prices by a method's label, and the unrest of
        `cost.measure.Timed`.

    Raises:
        ConfigError: what a run would refuse.
    """
    from regimes.cost.measure import time_steps  # torch, so late
    from regimes.training.build import prepare_run

    plain = replace(config, instruments={}, reporters=(), sync_levels={}, sync_policy=None)
    with contextlib.closing(prepare_run(plain, task)):  # no local steps: one copy of the model
        pass  # what a run refuses is refused before anything is timed
    groups: dict[str, list[Method]] = {}
    for method in methods:
        groups.setdefault(repr(sorted(method.table.items())), []).append(method)
    configs = []
    for group in groups.values():
        levels: dict[str, AnyLevel] = {str(m.level): m.level for m in group if m.level != DENSE}
        table = dict(group[0].table) if levels else plain.compressor
        configs.append(replace(plain, compressor=table, levels=levels))
    per_epoch, works, layers, unrest = time_steps(configs, config.workers, task=task)
    job, prices = replace(job, model=Model(config.model.name, layers)), {}
    for group, by_level in zip(groups.values(), works, strict=True):
        for method in group:
            step = by_level[str(method.level)].every(method.period)
            there = step if compute is None else replace(step, compute=compute)
            here = config.workers * step.compute + step.compress
            prices[method.label] = Price(float(job.seconds(there)), job.bytes(there), here)
    return per_epoch, {method.label: prices[method.label] for method in methods}, unrest


def time_short_runs(
    config: RunConfig, methods: Sequence[Method], task: Task | None = None
) -> dict[str, float]:
    """Time the steps of a short run of each method here, with all simulated workers: the seconds of
    a step in the second half of a few. A method whose loss is not finite gets no number.

    Args:
        config: of the short runs, in steps.
    """
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        sweep.make_trainer(1, [config.device], task) as train,
    ):
        for number, method in enumerate(methods):
            few = configure_probe(config, method, TIMED, 0.0, config.seed)
            few = replace(few, unit_steps=TIMED // 2)
            train([(Path(folder, str(number)), few)], lambda folder, error: None)
            clock = load(Path(folder, str(number))).clock
            if len(clock) == 2:
                parts = {k: x for k, x in clock[1].items() if k != "evaluate"}
                found[method.label] = sum(parts.values()) / (TIMED // 2)
    return found


def renew_prices(before: Mapping[str, Price], now: Mapping[str, Price]) -> dict[str, Price]:
    """Choose the prices with which a plan goes on: those of now where a step was slowed down
    before."""
    found = {}
    for name, old in before.items():
        new = now[name] if now[name].seconds < RENEWED * old.seconds else old
        found[name] = replace(new, here=min(old.here, now[name].here))
    return found


def keep_faster(methods: Sequence[Method], prices: Mapping[str, Price]) -> list[Method]:
    """Keep dense, which is the first, and the methods with fewer seconds a step: one that loses
    information and takes as long cannot end lower."""
    dense = methods[0]
    limit = LESS * prices[dense.label].seconds
    return [dense, *(m for m in methods[1:] if prices[m.label].seconds < limit)]
