"""From a configuration to the parts of a run: all is checked and built before any work starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regimes import data, models, provenance
from regimes.compression import Compressor, Layer, compressor
from regimes.compression.reducer import Reducer, traffic_table
from regimes.config import DENSE, Level, RunConfig
from regimes.errors import ConfigError, DataError, nearest
from regimes.gradients import Gradients, draws_random_numbers, layer_table
from regimes.instruments import PROVIDES, UNASKED, instruments
from regimes.instruments.base import Batch, Gauge, Scene
from regimes.instruments.gradient_norm import PER_WORKER, Norms
from regimes.policies import Policy, check_levels, policy
from regimes.seeding import derive, stream
from regimes.world import World, connect, pick_device

AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


@dataclass
class Parts:
    """All that a run is made of."""

    config: RunConfig
    world: World
    device: torch.device
    batches: data.Batches
    images: data.Images
    model: nn.Module
    layers: list[Layer]
    policy: Policy
    compressor: Compressor
    gradients: Gradients
    reducer: Reducer
    scene: Scene
    gauges: dict[str, tuple[int, Gauge]]  # name -> (every so many epochs, gauge)
    optimizer: torch.optim.SGD
    rows: list[dict[str, Any]] = field(default_factory=list)  # the record so far

    @property
    def compressed(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if layer.compressed]

    def value(self, level: str) -> Level:
        """What a level's name means: ``levels`` of the configuration."""
        return DENSE if level == DENSE else self.config.levels[level]


def prepare(config: RunConfig) -> Parts:
    """Check the whole configuration and build the parts.

    Raises:
        ConfigError, DataError: one sentence.
    """
    chosen, rule = compressor(config.compressor), policy(config.policy)
    check_numbers(config)
    check_levels(rule, config.levels)
    for level in config.levels.values():
        chosen.check(level)
    device = pick_device(config.device)
    world = connect(config.workers, device)
    world.meter.dtype = dtype = getattr(torch, config.dtype)
    images = data.load(config.data)
    if len(images.train_y) < config.workers * config.batch_size:
        raise DataError(
            f"{len(images.train_y)} training images are too few for one step of "
            f"{config.workers} workers x {config.batch_size}: lower batch_size or raise train_size"
        )
    world.agree(configuration=config.digest(), code=provenance.code_digest(), data=images.digest)
    model = build_model(config, images).to(device, dtype)
    layers = layer_table(model)
    _check_order(config, chosen, layers)
    batches = data.Batches(
        images,
        config.data,
        seed=config.seed,
        workers=config.workers,
        batch_size=config.batch_size,
        device=device,
        dtype=dtype,
        channels_last=config.channels_last,
    )
    union = _union(config, chosen, model, batches)
    gradients = Gradients(
        model,
        cross_entropy,
        world,
        union=union,
        seed=config.seed,
        autocast=AUTOCAST[config.autocast],
    )
    scene = _scene(model, world, layers, config, union, batches, images)
    gauges = _gauges(config, rule, scene)
    reducer = Reducer(chosen, layers, world, config.seed)
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
        config, world, device, batches, images, model, layers, rule, chosen,
        gradients, reducer, scene, gauges, optimizer,
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
    for first, _ in config.policy.get("windows", ()):
        if first >= config.epochs:
            raise ConfigError(
                f"policy.windows: a window starts in epoch {first}, but the run ends after "
                f"{config.epochs} epochs"
            )
    o = config.optimizer
    rates = {
        "decay_factor": o.decay_factor,
        "warmup_from": o.lr if o.warmup_from is None else o.warmup_from,
    }
    for name, rate in rates.items():
        if not 0 < rate < math.inf:
            raise ConfigError(f"optimizer.{name} must be a positive number, got {rate}")
    if any(first < 1 for first in o.decay_epochs) or o.warmup_epochs < 1:
        raise ConfigError(
            "optimizer.decay_epochs and optimizer.warmup_epochs must be at least 1, got "
            f"{list(o.decay_epochs)} and {o.warmup_epochs}"
        )
    sane = 0 < o.lr < math.inf and 0 <= o.momentum < 1 and 0 <= o.weight_decay < math.inf
    if not sane:
        raise ConfigError(
            "optimizer needs lr > 0, 0 <= momentum < 1 and weight_decay >= 0, got "
            f"lr = {o.lr}, momentum = {o.momentum}, weight_decay = {o.weight_decay}"
        )


def _check_order(config: RunConfig, chosen: Compressor, layers: Sequence[Layer]) -> None:
    """ "low" compression must send at least as much as "high"."""
    if {"low", "high"} <= set(config.levels):
        low, high = config.levels["low"], config.levels["high"]
        sent = [traffic_table(chosen, layers, v, config.workers)[0] for v in (low, high)]
        if sent[0] < sent[1]:
            raise ConfigError(
                f"levels.low = {low!r} sends less than levels.high = {high!r}: low and high "
                "qualify compression, so low must be the level that sends more; swap them"
            )


def build_model(config: RunConfig, images: data.Images) -> nn.Module:
    """The network, initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init"))
        return models.build(
            config.model.name,
            classes=len(images.classes),
            channels=images.train_x.shape[1],
            image_size=images.train_x.shape[2],
            width=config.model.width,
        )


def _union(config: RunConfig, chosen: Compressor, model: nn.Module, batches: Any) -> bool:
    """May one pass serve all hosted workers? Decided by the configuration alone."""
    if not config.union_pass or not chosen.linear or config.signal in PER_WORKER:
        return False
    x, _ = next(iter(batches.epoch(0, [0])))
    return not draws_random_numbers(model, x[0])


def _gauges(config: RunConfig, rule: Policy, scene: Scene) -> dict[str, tuple[int, Gauge]]:
    """The configured instruments and those whose statistics the policy needs."""
    tables = {name: dict(fields) for name, fields in config.instruments.items()}
    for statistic in rule.needs:
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
    model: nn.Module,
    world: World,
    layers: Sequence[Layer],
    config: RunConfig,
    union: bool,
    batches: data.Batches,
    images: data.Images,
) -> Scene:
    """What instruments see of the data: probes of the training set, and an epoch's batches."""

    def probe(size: int, batch: int) -> list[Batch]:
        share = batch * world.processes
        if not 0 < size <= len(images.train_y) or size % share:
            raise ConfigError(
                f"a probe of {size} images in batches of {batch}: expected a multiple of {share} "
                f"(batch x processes) of at most {len(images.train_y)}, the training set"
            )
        here = size // world.processes
        mine = slice(world.rank * here, (world.rank + 1) * here)
        x = batches.normalise(images.train_x[mine].to(batches.device))
        y = images.train_y[mine].to(batches.device)
        return list(zip(x.split(batch), y.split(batch), strict=True))

    def samples(epoch: int, count: int, batch: int) -> list[Batch]:
        whole = len(images.train_y) // batch
        if count > whole:
            raise ConfigError(
                f"{count} batches of {batch} images: the training set has {whole} such batches"
            )
        seen = batches.rebatched(batch, workers=1)
        order = torch.randperm(whole, generator=stream(config.seed, "samples", epoch))
        drawn = (next(seen.epoch(epoch, [0], start)) for start in order[:count].tolist())
        return [(x[0], y[0]) for x, y in drawn]

    return Scene(model, cross_entropy, world, layers, config.seed, union, probe, samples)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(model(x), y)
