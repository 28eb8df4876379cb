"""From a configuration to the parts of a run: all is checked and built before any work starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regimes import provenance, tasks
from regimes.compression import Compressor, Layer, compressor
from regimes.compression.reducer import Reducer, check_order
from regimes.config import DENSE, Level, RunConfig
from regimes.deficits import Deficit, deficit
from regimes.errors import ConfigError, DataError, nearest
from regimes.exchange import Exchange
from regimes.gradients import Gradients, draws_random_numbers, layer_table
from regimes.instruments import PROVIDES, UNASKED, instruments
from regimes.instruments.base import Batch, Gauge, Scene
from regimes.instruments.gradient_norm import PER_WORKER, Norms
from regimes.policies import Policy, check_levels, policy
from regimes.tasks import Batches, Task
from regimes.world import World, connect, pick_device

AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


@dataclass
class Parts:
    """All that a run is made of."""

    config: RunConfig
    world: World
    device: torch.device
    task: Task
    batches: Batches
    model: nn.Module
    layers: list[Layer]
    policy: Policy
    compressor: Compressor
    gradients: Gradients
    reducer: Reducer
    exchange: Exchange
    scene: Scene
    gauges: dict[str, tuple[int, Gauge]]  # name -> (every so many epochs, gauge)
    optimizer: torch.optim.SGD
    batch_policy: Policy | None
    deficit: Deficit
    header: dict[str, Any] = field(default_factory=dict)  # of the record
    rows: list[dict[str, Any]] = field(default_factory=list)  # the record so far

    @property
    def compressed(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if layer.compressed]

    def batch_size(self, level: str | None) -> int:
        """Samples per worker and step at a level of the batch policy."""
        return self.config.batch_size if level is None else self.config.batch_levels[level]

    def value(self, level: str) -> Level:
        """What a level's name means: ``levels`` of the configuration."""
        return DENSE if level == DENSE else self.config.levels[level]

    def close(self) -> None:
        """Leave the other processes."""
        self.exchange.close()
        self.world.close()


def prepare(config: RunConfig) -> Parts:
    """Check the whole configuration and build the parts.

    Raises:
        ConfigError, DataError: one sentence.
    """
    chosen, rule = compressor(config.compressor), policy(config.policy)
    batch_rule, worse = check_batches(config), deficit(config.deficit)
    check_numbers(config)
    check_levels(rule, config.levels)
    for level in config.levels.values():
        chosen.check(level)
    device = pick_device(config.device)
    world = connect(config.workers, device, config.timeout)
    try:
        return _build(config, chosen, rule, batch_rule, worse, world, device)
    except BaseException:
        world.abort()
        world.close()
        raise


def _build(
    config: RunConfig, chosen: Compressor, rule: Policy, batch_rule: Policy | None, worse: Deficit,
    world: World, device: torch.device,
) -> Parts:  # fmt: skip
    """What is built when the processes have met; they check that they mean the same run."""
    world.meter.dtype = dtype = getattr(torch, config.dtype)
    task = tasks.load(config)
    _check_size(config, task)
    world.agree(configuration=config.digest(), code=provenance.code_digest(), data=task.digest)
    model = task.build(config).to(device, dtype)
    layers = layer_table(model)
    check_order(chosen, config.levels, layers, config.workers)
    batches = task.batches(config, device, dtype)
    union = _union(config, chosen, model, batches)
    gradients = Gradients(
        model,
        task.loss,
        world,
        union=union,
        seed=config.seed,
        micro_batch=config.batch_size,
        clip=config.optimizer.clip,
        autocast=AUTOCAST[config.autocast],
    )
    scene = _scene(task, chosen, model, world, layers, config, union, batches)
    needs = [*rule.needs, *(batch_rule.needs if batch_rule else ())]
    gauges = _gauges(config, needs, scene)
    reducer = Reducer(chosen, layers, world, config.seed)
    exchange = Exchange(gradients, reducer, config.parcel_mb)
    o = config.optimizer
    optimizer = torch.optim.SGD(
        gradients.parameters,
        lr=o.lr,
        momentum=o.momentum,
        nesterov=o.nesterov and o.momentum > 0,
        weight_decay=o.weight_decay,
        foreach=True,
    )
    return Parts(
        config, world, device, task, batches, model, layers, rule, chosen,
        gradients, reducer, exchange, scene, gauges, optimizer, batch_rule, worse,
    )  # fmt: skip


def check_numbers(config: RunConfig) -> None:
    """Raise ConfigError unless the plain numbers make sense."""
    positive = {"epochs": config.epochs, "batch_size": config.batch_size,
                "workers": config.workers, "checkpoint_every": config.checkpoint_every}  # fmt: skip
    for name, value in positive.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if DENSE in config.levels:
        raise ConfigError('levels.dense is always "dense": give the level another name')
    for table in ("policy", "batch_policy", "deficit"):
        for first, _ in (getattr(config, table) or {}).get("windows", ()):
            if first >= config.epochs:
                raise ConfigError(
                    f"{table}.windows: a window starts in epoch {first}, but the run ends after "
                    f"{config.epochs} epochs"
                )
    if config.budget and config.budget.level not in {*config.levels, DENSE}:
        known = ", ".join([*config.levels, DENSE])
        raise ConfigError(f"budget.level = {config.budget.level!r}: expected one of {known}")
    if config.budget and config.budget.epochs < 1:
        raise ConfigError(f"budget.epochs must be at least 1, got {config.budget.epochs}")
    o = config.optimizer
    if not 0 < o.decay_factor < math.inf:
        raise ConfigError(f"optimizer.decay_factor must be a positive number, got {o.decay_factor}")
    if o.warmup_from is not None and not 0 <= o.warmup_from < math.inf:
        raise ConfigError(f"optimizer.warmup_from must be a number from 0 up, got {o.warmup_from}")
    if any(first < 1 for first in o.decay_epochs) or o.warmup_epochs < 1:
        raise ConfigError(
            "optimizer.decay_epochs and optimizer.warmup_epochs must be at least 1, got "
            f"{list(o.decay_epochs)} and {o.warmup_epochs}"
        )
    if not 0 < config.timeout < math.inf:
        raise ConfigError(f"timeout must be a positive number of seconds, got {config.timeout}")
    if not 0 < config.parcel_mb < math.inf:
        raise ConfigError(f"parcel_mb must be a positive number, got {config.parcel_mb}")
    if o.clip is not None and not 0 < o.clip < math.inf:
        raise ConfigError(f"optimizer.clip must be a positive number, got {o.clip}")
    sane = 0 < o.lr < math.inf and 0 <= o.momentum < 1 and 0 <= o.weight_decay < math.inf
    if not sane:
        raise ConfigError(
            "optimizer needs lr > 0, 0 <= momentum < 1 and weight_decay >= 0, got "
            f"lr = {o.lr}, momentum = {o.momentum}, weight_decay = {o.weight_decay}"
        )


def check_batches(config: RunConfig) -> Policy | None:
    """The batch policy, if there is one; ConfigError unless its levels make sense."""
    for name, size in config.batch_levels.items():
        if size < config.batch_size or size % config.batch_size:
            raise ConfigError(
                f"batch_levels.{name} = {size}: expected a multiple of batch_size = "
                f"{config.batch_size}, the micro-batch that is accumulated"
            )
    if config.batch_policy is None:
        return None
    rule = policy(config.batch_policy, "batch_policy")
    check_levels(rule, config.batch_levels, "batch_policy")
    levels = config.batch_levels
    if {"low", "high"} <= set(levels) and levels["low"] > levels["high"]:
        raise ConfigError(
            f"batch_levels.low = {levels['low']} is larger than batch_levels.high = "
            f"{levels['high']}: low is the level that sends more, so the smaller batch; swap them"
        )
    return rule


def _check_size(config: RunConfig, task: Task) -> None:
    if config.batch_policy and not task.splits:
        raise ConfigError(
            "batch_policy: the batch of a text is its number of parallel streams, which cannot "
            "change during a run; leave batch_policy out"
        )
    used = config.batch_levels.values() if config.batch_policy else ()
    for batch in (config.batch_size, *used):
        if task.size < config.workers * batch:
            raise DataError(
                f"{task.size} training samples are too few for one step of {config.workers} "
                f"workers x {batch}: lower the batch size or raise data.train_size"
            )


def _union(config: RunConfig, chosen: Compressor, model: nn.Module, batches: Any) -> bool:
    """May one pass serve all hosted workers? Decided by the configuration alone."""
    per_worker = config.signal in PER_WORKER or config.optimizer.clip is not None
    if not config.union_pass or not chosen.linear or per_worker:
        return False
    x, _ = next(iter(batches.epoch(0, [0])))
    return not draws_random_numbers(model, x[0])


def _gauges(config: RunConfig, needs: Sequence[str], scene: Scene) -> dict[str, tuple[int, Gauge]]:
    """The configured instruments and those whose statistics the policies need."""
    tables = {name: dict(fields) for name, fields in config.instruments.items()}
    for statistic in needs:
        family = statistic.partition(":")[0]  # "eigenvalue:batch" is of the family "eigenvalue"
        if family not in PROVIDES:
            raise ConfigError(
                f"the policy needs the statistic {statistic!r}, which no instrument provides: "
                f"{nearest(family, PROVIDES)}"
            )
        if PROVIDES[family] != "norms":
            tables.setdefault(PROVIDES[family], UNASKED.get(statistic, {}))
    tools = instruments(tables)
    norms = tools.get("norms", Norms(()))
    readings = dict.fromkeys([config.signal, *getattr(norms, "readings", ())])
    tools["norms"] = Norms(tuple(readings))
    return {name: (tool.every, tool.start(scene)) for name, tool in tools.items()}


def _scene(
    task: Task, chosen: Compressor, model: nn.Module, world: World, layers: Sequence[Layer],
    config: RunConfig, union: bool, batches: Batches,
) -> Scene:  # fmt: skip
    """What instruments see of the data: probes of the training set, and an epoch's batches."""

    def probe(size: int, batch: int) -> list[Batch]:
        return task.probe(batches, world, size, batch)

    def samples(epoch: int, count: int, batch: int) -> list[Batch]:
        return task.samples(batches, config.seed, epoch, count, batch)

    return Scene(model, task.loss, world, layers, config.seed, union, probe, samples,
                 chosen, config.levels)  # fmt: skip
