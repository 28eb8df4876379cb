"""From a configuration to the parts of a run: all is checked and built before any work starts."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from regimes.collectives.processes import connect, pick_device
from regimes.collectives.requests import Layer
from regimes.collectives.world import World
from regimes.compression import Compressor, compressor
from regimes.compression.reducer import Reducer, check_order, costs_per_step
from regimes.config import DENSE, Level, RunConfig, check_bounds, to_dict
from regimes.data import deficits, registry
from regimes.data.task import Batches, Task
from regimes.instruments.base import MeasurementContext
from regimes.instruments.gradient_norm import PER_WORKER
from regimes.instruments.panel import Panel, choose
from regimes.policies import Policy, check_levels, policy
from regimes.policies.controller import Controller, WholeController
from regimes.policies.history import level_costs
from regimes.records import provenance
from regimes.training.checks import (
    build_batch_policy,
    build_sync_policy,
    check_fields,
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


@dataclass(frozen=True)
class PlugIns:
    """The plug-ins that a configuration names, checked against its levels."""

    compressor: Compressor
    policy: Policy
    batch_policy: Policy | None
    sync_policy: Policy | None
    deficit: deficits.Deficit

    @classmethod
    def of(cls, config: RunConfig) -> PlugIns:
        """Build those of a configuration.

        Raises:
            ConfigError: an unknown name, bad fields, levels that one of them does not have.
        """
        chosen, rule = compressor(config.compressor), policy(config.policy)
        batch_rule, deficit = build_batch_policy(config), deficits.deficit(config.deficit)
        sync_rule = build_sync_policy(config, deficit)
        check_fields(config)
        check_levels(rule, config.levels)
        for level in config.levels.values():
            chosen.check(level)
        return cls(chosen, rule, batch_rule, sync_rule, deficit)

    @property
    def needs(self) -> list[str]:
        """The statistics that the policies read."""
        rules = self.policy, self.batch_policy, self.sync_policy
        return [need for rule in rules if rule is not None for need in rule.needs]


@dataclass
class Run:
    """All parts of a run, and what it has recorded."""

    config: RunConfig
    plug_ins: PlugIns
    world: World
    device: torch.device
    numerics: Numerics
    task: Task
    batches: Batches
    model: nn.Module
    layers: list[Layer]
    gradients: Gradients
    reducer: Reducer
    step: TrainingStep
    pruning: Pruning | None
    controller: Controller
    batch_controller: WholeController | None
    sync_controller: WholeController | None
    units: Units
    learning_rate: LearningRate
    optimizer: Optimizers
    local: Rounds | None
    context: MeasurementContext
    panel: Panel
    header: dict[str, Any] = field(default_factory=dict)  # of the record
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the record, so far
    saved: float = field(default_factory=time.monotonic)  # time of the start or last checkpoint

    def batch_size(self, level: str | None) -> int:
        """Samples per worker and step at a level of the batch policy."""
        return self.config.batch_size if level is None else self.config.batch_levels[level]

    def value(self, level: str) -> Level:
        """The level that a name stands for: ``levels`` of the configuration."""
        return DENSE if level == DENSE else self.config.levels[level]

    def close(self) -> None:
        """Leave the other processes."""
        # the pipeline's thread first: it may be inside a collective of the group
        self.step.close()
        self.world.close()
        self.numerics.close()


def prepare(config: RunConfig) -> Run:
    """Check the whole configuration and build the parts.

    Raises:
        ConfigError, DataError: one sentence.
    """
    check_bounds(config)
    plug_ins = PlugIns.of(config)
    device = pick_device(config.device)
    world, numerics = connect(config.workers, device, config.timeout), Numerics(config, device)
    try:
        return _build(config, plug_ins, world, device, numerics)
    except BaseException:
        world.abort()  # the other processes must not wait for this one
        world.close()
        numerics.close()
        raise


def _build(
    config: RunConfig, plug_ins: PlugIns, world: World, device: torch.device, numerics: Numerics
) -> Run:
    """Build what depends on the data and the model; all processes check that they agree on it."""
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
    chosen = plug_ins.compressor
    check_order(chosen, config.levels, layers, config.workers)
    batches = task.batches(config, device, dtype)
    gradients = _gradients(config, plug_ins, task, model, world, batches)
    buckets = buckets_of(gradients.parameters, config.bucket_mb, config.optimizer.clip is not None)
    reducer = Reducer(chosen, layers, world, config.seed, buckets)
    units = Units.of(config, len(batches))
    check_windows_fit(config, len(units))
    build = functools.partial(build_optimizer, config.optimizer, model, task.classes)
    optimizer, local = build(), None
    if plug_ins.sync_policy is not None:
        late = Reducer(chosen, layers, world, config.seed)
        local = Rounds(gradients, optimizer, build, late, config.outer)
    context = _context(config, chosen, task, batches, layers, gradients, optimizer, local)
    return Run(
        config=config,
        plug_ins=plug_ins,
        world=world,
        device=device,
        numerics=numerics,
        task=task,
        batches=batches,
        model=model,
        layers=layers,
        gradients=gradients,
        reducer=reducer,
        step=TrainingStep(gradients, reducer),
        pruning=Pruning.of(config.pruning, layers, gradients.parameters),
        controller=_controller(config, plug_ins, layers),
        batch_controller=_whole(plug_ins.batch_policy, config.signal, "batch"),
        sync_controller=_whole(plug_ins.sync_policy, config.signal, "sync"),
        units=units,
        learning_rate=LearningRate(config.optimizer, units.per_epoch, units.total),
        optimizer=optimizer,
        local=local,
        context=context,
        panel=choose(config.instruments, plug_ins.needs, config.signal, context),
    )


def _controller(config: RunConfig, plug_ins: PlugIns, layers: Sequence[Layer]) -> Controller:
    compressed = [i for i, layer in enumerate(layers) if layer.compressed]
    per_step = costs_per_step(plug_ins.compressor, layers, config.levels, config.workers)
    costs = level_costs(per_step, compressed)
    names = [layer.name for layer in layers]
    return Controller(plug_ins.policy, names, compressed, config.signal, costs)


def _whole(
    rule: Policy | None, signal: str, table: Literal["batch", "sync"]
) -> WholeController | None:
    return None if rule is None else WholeController(rule, signal, table)


def _gradients(
    config: RunConfig,
    plug_ins: PlugIns,
    task: Task,
    model: nn.Module,
    world: World,
    batches: Batches,
) -> Gradients:
    gradients = Gradients(
        model,
        task.loss,
        world,
        union=_union(config, plug_ins.compressor, model, batches),
        seed=config.seed,
        micro_batch=config.batch_size,
        clip=config.optimizer.clip,
        autocast=torch.bfloat16 if config.precision == "bfloat16" else None,
        compiled=config.compile,
    )
    if config.compile:
        gradients.check_compiles(*next(iter(batches.epoch(0, world.hosted))))
    return gradients


def _union(config: RunConfig, chosen: Compressor, model: nn.Module, batches: Batches) -> bool:
    """May one pass serve all hosted workers? The configuration alone decides, so that the numbers
    do not depend on how many processes share the workers."""
    per_worker = config.signal in PER_WORKER or config.optimizer.clip is not None
    per_worker |= config.sync_policy is not None
    if not config.union_pass or not chosen.linear or per_worker:
        return False
    x, _ = next(iter(batches.epoch(0, [0])))
    return not draws_random_numbers(model, x[0])


def _context(
    config: RunConfig,
    chosen: Compressor,
    task: Task,
    batches: Batches,
    layers: Sequence[Layer],
    gradients: Gradients,
    optimizer: Optimizers,
    local: Rounds | None,
) -> MeasurementContext:
    """What instruments see of the run: probes of the training set, and an epoch's batches."""
    world, decays = gradients.world, optimizer.decoupled_decay(gradients.parameters)
    return MeasurementContext(
        gradients.model,
        task.loss,
        world,
        layers,
        config.seed,
        gradients.union,
        lambda size, batch: task.probe(batches, world, size, batch),
        lambda epoch, count, batch: task.samples(batches, config.seed, epoch, count, batch),
        chosen,
        config.levels,
        lambda: (optimizer.lr, decays),
        (lambda: local.apart) if local else None,
    )
