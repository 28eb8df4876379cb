"""From a configuration to the parts of a run: all is checked and built before any work starts."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regimes.collectives.processes import connect, pick_device
from regimes.collectives.requests import Layer
from regimes.collectives.world import World
from regimes.compression import Compressor, compressor
from regimes.compression.reducer import Reducer, check_order, costs_per_step
from regimes.config import DENSE, Level, RunConfig, to_dict
from regimes.data import registry
from regimes.data.deficits import Deficit, deficit
from regimes.data.task import Batches, Task
from regimes.instruments.base import MeasurementContext
from regimes.instruments.gradient_norm import PER_WORKER
from regimes.instruments.panel import Panel, choose
from regimes.models.loss import Batch
from regimes.policies import Policy, check_levels, policy
from regimes.policies.controller import Controller, WholeController
from regimes.policies.history import level_costs
from regimes.records import provenance
from regimes.training.checks import (
    build_batch_policy,
    build_sync_policy,
    check_numbers,
    check_size,
    check_windows_fit,
)
from regimes.training.gradients import Gradients, draws_random_numbers, layer_table
from regimes.training.learning_rate import LearningRate
from regimes.training.numerics import Numerics
from regimes.training.optimizers import Optimizers
from regimes.training.optimizers import build as build_optimizer
from regimes.training.pruning import Pruning
from regimes.training.rounds import Rounds
from regimes.training.step import TrainingStep, buckets_of
from regimes.training.units import Units


@dataclass
class Run:
    """All that a run is made of."""

    config: RunConfig
    world: World
    device: torch.device
    numerics: Numerics
    task: Task
    batches: Batches
    model: nn.Module
    layers: list[Layer]
    controller: Controller
    compressor: Compressor
    gradients: Gradients
    reducer: Reducer
    step: TrainingStep
    context: MeasurementContext
    panel: Panel
    optimizer: Optimizers
    units: Units
    learning_rate: LearningRate
    batch_controller: WholeController | None
    sync_controller: WholeController | None
    local: Rounds | None
    deficit: Deficit
    pruning: Pruning | None
    header: dict[str, Any] = field(default_factory=dict)  # of the record
    rows: list[dict[str, Any]] = field(default_factory=list)  # the record so far
    saved: float = field(default_factory=time.monotonic)  # when: the start, or the last checkpoint

    @property
    def needs(self) -> list[str]:
        """The statistics that the policies read."""
        whole = [self.batch_controller, self.sync_controller]
        rules = [one.policy for one in (self.controller, *whole) if one is not None]
        return [need for rule in rules for need in rule.needs]

    def batch_size(self, level: str | None) -> int:
        """Samples per worker and step at a level of the batch policy."""
        return self.config.batch_size if level is None else self.config.batch_levels[level]

    def value(self, level: str) -> Level:
        """What a level's name means: ``levels`` of the configuration."""
        return DENSE if level == DENSE else self.config.levels[level]

    def close(self) -> None:
        """Leave the other processes."""
        self.step.close()
        self.world.close()
        self.numerics.close()


def prepare(config: RunConfig) -> Run:
    """Check the whole configuration and build the parts.

    Raises:
        ConfigError, DataError: one sentence.
    """
    chosen, rule = compressor(config.compressor), policy(config.policy)
    batch_rule, worse = build_batch_policy(config), deficit(config.deficit)
    sync_rule = build_sync_policy(config, worse)
    check_numbers(config)
    check_levels(rule, config.levels)
    for level in config.levels.values():
        chosen.check(level)
    device = pick_device(config.device)
    world, numerics = connect(config.workers, device, config.timeout), Numerics(config, device)
    try:
        return _build(config, chosen, (rule, batch_rule, sync_rule), worse, world, device, numerics)
    except BaseException:
        world.abort()
        world.close()
        numerics.close()
        raise


def _build(
    config: RunConfig,
    chosen: Compressor,
    rules: tuple[Policy, Policy | None, Policy | None],
    worse: Deficit,
    world: World,
    device: torch.device,
    numerics: Numerics,
) -> Run:
    """What is built when the processes have met; they check that they mean the same run.

    Args:
        rules: what decides levels, the batch, and the period between synchronisations.
    """
    world.meter.dtype = dtype = getattr(torch, config.dtype)
    task = registry.load(config)
    check_size(config, task)
    world.agree(
        **to_dict(config),
        data_digest=task.digest,
        code=provenance.code_digest(),
        torch=torch.__version__,
    )
    model = task.build(config).to(device, dtype)
    layers = layer_table(model)
    check_order(chosen, config.levels, layers, config.workers)
    batches = task.batches(config, device, dtype)
    gradients = _gradients(config, task, model, world, _union(config, chosen, model, batches))
    if config.compile:
        gradients.check_compiles(*next(iter(batches.epoch(0, world.hosted))))
    buckets = buckets_of(gradients.parameters, config.bucket_mb, config.optimizer.clip is not None)
    reducer = Reducer(chosen, layers, world, config.seed, buckets)
    compressed = [i for i, layer in enumerate(layers) if layer.compressed]
    costs = level_costs(costs_per_step(chosen, layers, config.levels, config.workers), compressed)
    names = [layer.name for layer in layers]
    pruning = Pruning.of(config.pruning, layers, gradients.parameters)
    controller = Controller(rules[0], names, compressed, config.signal, costs)
    batch = None if rules[1] is None else WholeController(rules[1], config.signal, "batch")
    sync = None if rules[2] is None else WholeController(rules[2], config.signal, "sync")
    units = Units.of(config, len(batches))
    check_windows_fit(config, len(units))
    rate = LearningRate(config.optimizer, units.per_epoch, units.total)
    optimizer = build_optimizer(config.optimizer, model, task.classes)
    local = None
    if rules[2] is not None:
        build = functools.partial(build_optimizer, config.optimizer, model, task.classes)
        late = Reducer(chosen, layers, world, config.seed)
        local = Rounds(gradients, optimizer, build, late, config.outer)
    context = _context(task, chosen, gradients, layers, config, batches, optimizer, local)
    needs = [need for rule in rules if rule is not None for need in rule.needs]
    panel = choose(config.instruments, needs, config.signal, context)
    return Run(
        config,
        world,
        device,
        numerics,
        task,
        batches,
        model,
        layers,
        controller,
        chosen,
        gradients,
        reducer,
        TrainingStep(gradients, reducer),
        context,
        panel,
        optimizer,
        units,
        rate,
        batch,
        sync,
        local,
        worse,
        pruning,
    )


def _gradients(
    config: RunConfig, task: Task, model: nn.Module, world: World, union: bool
) -> Gradients:
    return Gradients(
        model,
        task.loss,
        world,
        union=union,
        seed=config.seed,
        micro_batch=config.batch_size,
        clip=config.optimizer.clip,
        autocast=torch.bfloat16 if config.precision == "bfloat16" else None,
        compiled=config.compile,
    )


def _union(config: RunConfig, chosen: Compressor, model: nn.Module, batches: Any) -> bool:
    """May one pass serve all hosted workers? Decided by the configuration alone."""
    per_worker = config.signal in PER_WORKER or config.optimizer.clip is not None
    per_worker |= config.sync_policy is not None
    if not config.union_pass or not chosen.linear or per_worker:
        return False
    x, _ = next(iter(batches.epoch(0, [0])))
    return not draws_random_numbers(model, x[0])


def _context(
    task: Task,
    chosen: Compressor,
    gradients: Gradients,
    layers: Sequence[Layer],
    config: RunConfig,
    batches: Batches,
    optimizer: Optimizers,
    local: Rounds | None,
) -> MeasurementContext:
    """What instruments see of the data: probes of the training set, and an epoch's batches."""
    g = gradients
    decays = optimizer.decoupled_decay(g.parameters)

    def probe(size: int, batch: int) -> list[Batch]:
        return task.probe(batches, g.world, size, batch)

    def samples(epoch: int, count: int, batch: int) -> list[Batch]:
        return task.samples(batches, config.seed, epoch, count, batch)

    return MeasurementContext(
        g.model,
        task.loss,
        g.world,
        layers,
        config.seed,
        g.union,
        probe,
        samples,
        chosen,
        config.levels,
        lambda: (optimizer.lr, decays),
        (lambda: local.is_local) if local else None,
    )
