"""Seconds and bytes of a step of each method on a link, with compute and compression timed here."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regimes.base.config import DENSE, AnyLevel, RunConfig
from regimes.base.errors import ConfigError
from regimes.cost.job import DataParallelJob
from regimes.cost.methods import Method
from regimes.cost.models import Model
from regimes.cost.network import FASTEST, Network, Work
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
    """One step of a method.

    Attributes:
        seconds: predicted on the link.
        bytes: that a node's link carries in each direction.
        here: seconds of one simulated step of all workers on this machine.
    """

    seconds: float
    bytes: float
    here: float


@dataclass(frozen=True)
class Links:
    """Where the training will run.

    Attributes:
        between: the link of a node to the others.
        within: of a device to the others of its node.
        gpus: devices of a node; the workers are divided among as many nodes as are needed.
        compute: seconds of one worker's step without communication; None: timed here.
    """

    between: Network
    within: Network
    gpus: int = 1
    compute: float | None = None


class Priced(NamedTuple):
    """What the steps of a training take.

    Attributes:
        per_epoch: steps of an epoch.
        prices: by a method's label.
        unrest: of `cost.measure.Timed`.
    """

    per_epoch: int
    prices: dict[str, Price]
    unrest: float


def price_methods(
    config: RunConfig, methods: Sequence[Method], links: Links, task: Task | None = None
) -> Priced:
    """Time a few steps of one worker on this machine, and the compression of each method, and
    price them.

    Raises:
        ConfigError: workers that do not fill their nodes, or what a run would refuse.
    """
    from regimes.cost.measure import time_steps  # torch, so late
    from regimes.training.build import prepare_run

    workers = config.workers
    if workers % links.gpus:
        raise ConfigError(f"gpus {links.gpus} does not divide the {workers} workers")
    plain = replace(config, instruments={}, reporters=(), sync_levels={}, sync_policy=None)
    with contextlib.closing(prepare_run(plain, task)):  # no local steps: one copy of the model
        pass  # what a run refuses is refused before anything is timed
    groups, configs = _by_compressor(methods), []
    for group in groups:
        levels: dict[str, AnyLevel] = {
            str(method.level): method.level for method in group if method.level != DENSE
        }
        table = dict(group[0].table)
        configs.append(
            replace(plain, compressor=table if levels else plain.compressor, levels=levels)
        )
    per_epoch, found, layers, unrest = time_steps(configs, workers, task=task)
    works = {
        method.label: by_level[str(method.level)]
        for group, by_level in zip(groups, found, strict=True)
        for method in group
    }
    job = DataParallelJob(
        Model(config.model.name, layers),
        1.0,  # a step has its own seconds
        1.0,
        nodes=workers // links.gpus,
        gpus=links.gpus,
        within=links.within,
        between=links.between,
        algorithm=FASTEST,
    )
    prices = {m.label: _price(job, works[m.label], m, links.compute) for m in methods}
    return Priced(per_epoch, prices, unrest)


def _price(job: DataParallelJob, once: Work, method: Method, compute: float | None) -> Price:
    """The price of a method whose step without local steps is ``once``.

    Args:
        compute: seconds of one worker's step on the device of the training; None: as timed here.
            ``here`` is of this machine all the same, on which the probes are trained.
    """
    step = once.every(method.period)
    here = job.nodes * job.gpus * step.compute + step.compress
    there = step if compute is None else replace(step, compute=compute)
    return Price(float(job.seconds(there)), job.bytes(there), here)


def _by_compressor(methods: Sequence[Method]) -> list[list[Method]]:
    found: dict[str, list[Method]] = {}
    for method in methods:
        found.setdefault(repr(sorted(method.table.items())), []).append(method)
    return list(found.values())


def time_short_runs(
    config: RunConfig, methods: Sequence[Method], task: Task | None = None
) -> dict[str, float]:
    """Seconds of a step of a short run here, with all simulated workers: of the second half of a
    few steps of each method; none of one whose loss is not finite.

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
    """The prices of a plan that goes on: those of now, where a step was slowed down before."""
    found = {}
    for name, old in before.items():
        new = now[name] if now[name].seconds < RENEWED * old.seconds else old
        found[name] = replace(new, here=min(old.here, now[name].here))
    return found


def keep_faster(methods: Sequence[Method], prices: Mapping[str, Price]) -> list[Method]:
    """Those with fewer seconds a step than dense, which is the first and stays: a method that loses
    information and takes as long cannot end lower."""
    dense = methods[0]
    limit = LESS * prices[dense.label].seconds
    return [dense, *(m for m in methods[1:] if prices[m.label].seconds < limit)]
