"""What a compressor sends in a step: by its formula, and compared with what was sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from regimes.base.config import DENSE, AnyLevel, Level
from regimes.base.errors import ConfigError
from regimes.collectives.layers import NO_LAYER, Layer, Traffic
from regimes.collectives.world import World
from regimes.compression.base import Compressor


class TrafficCheck:
    """Compares each compressor's formula with what the world has counted, once for each layer and
    level, as soon as a step of each of its ``phases`` was taken."""

    def __init__(
        self,
        resolve_level: Callable[[int, AnyLevel], tuple[Compressor, Level]],
        layers: Sequence[Layer],
        world: World,
    ) -> None:
        """``resolve_level`` is the method of the `Reducer` with this name."""
        self.resolve_level, self.layers, self.world = resolve_level, layers, world
        # By layer and level: what a step of each phase has sent, until all phases are known.
        # None: compared, or nothing to compare.
        self._counted: dict[tuple[int, AnyLevel], dict[int, Traffic] | None] = {}

    def counted_so_far(
        self, bucket: Sequence[int], gradients: Any, levels: Sequence[AnyLevel]
    ) -> dict[int, Traffic]:
        """Return the traffic so far of those layers of a bucket that are not compared yet."""
        counted, dtype = {}, self.world.meter.dtype
        for i in bucket:
            if i == NO_LAYER:
                continue
            if (i, levels[i]) not in self._counted:
                full = dtype in (torch.float32, torch.float64) and gradients[i].dtype == dtype
                compressor, level = self.resolve_level(i, levels[i])
                sends = full and level != DENSE and self.layers[i].compressed
                # the formula is of a whole matrix; a shard of which no row is here sends nothing
                apart = self.world.shards == 1 or not compressor.joins_shards
                sends = sends and apart and self.layers[i].size > 0
                self._counted[i, levels[i]] = {} if sends else None
            if self._counted[i, levels[i]] is not None:
                counted[i] = self.world.meter.layers[i]
        return counted

    def compare_step(
        self, before: Mapping[int, Traffic], gradients: Any, levels: Sequence[AnyLevel], states: Any
    ) -> None:
        """Add the step that these layers have taken since ``counted_so_far``, and compare it with
        the formulas.

        Raises:
            ConfigError: a compressor's formula gives another number.
        """
        for i, counted in before.items():
            layer, key = self.layers[i], (i, levels[i])
            compressor, level = self.resolve_level(*key)
            now = self.world.meter.layers[i]
            sent = Traffic(now.floats - counted.floats, now.bytes - counted.bytes)
            steps = (self._counted[key] or {}) | {compressor.phase(states[i]): sent}
            self._counted[key] = steps
            if len(steps) == compressor.phases:
                self._counted[key] = None
                itemsize = gradients[i].element_size()
                formula = compressor.traffic(layer, level, self.world.workers, itemsize)
                where = type(compressor).__name__, layer.name
                most = compressor.data_dependent
                _check_traffic(where, levels[i], formula, steps.values(), most)


def _check_traffic(
    where: tuple[str, str],
    level: AnyLevel,
    formula: Traffic,
    steps: Collection[Traffic],
    most: bool = False,
) -> None:
    """Raise ConfigError unless a compressor's formula gives the mean of what steps have sent, or
    with ``most`` no less."""
    floats = sum(step.floats for step in steps) / len(steps)
    sent = sum(step.bytes for step in steps) / len(steps)
    more, room = formula.floats - floats, 1e-6 * max(1.0, floats)
    same = abs(more) <= room and abs(formula.bytes - sent) < 1
    if same or (most and more >= -room and formula.bytes > sent - 1):
        return
    raise ConfigError(
        f"the compressor {where[0]}, layer {where[1]}: traffic says {formula.floats:g} floats and "
        f"{formula.bytes} bytes a step at level {level!r}, exchange has passed on {floats:g} and "
        f"{sent:g}"
    )


# -- formulas of several layers --------------------------------------------------------------


def _worker_cost(
    compressor: Compressor, layer: Layer, level: AnyLevel, workers: int, shards: int = 1
) -> Traffic:
    """What a worker sends of a whole layer in one float32 step, all its shards together."""
    compressor, level = compressor.resolve_level(level)
    if shards == 1 or compressor.joins_shards:
        return compressor.cost(layer, level, workers)
    parts = [part for part in (layer.on(i, shards) for i in range(shards)) if part.size]
    return sum((compressor.cost(part, level, workers) for part in parts), Traffic(0, 0))


def traffic_table(
    compressor: Compressor, layers: Sequence[Layer], level: AnyLevel, workers: int, shards: int = 1
) -> tuple[float, int]:
    """Return (floats, bytes) of one float32 step at one level, by the compressors' formulas."""
    costs = [_worker_cost(compressor, layer, level, workers, shards) for layer in layers]
    return sum(c.floats for c in costs), sum(c.bytes for c in costs)


def name_uncompressed_layers(
    compressor: Compressor, layers: Sequence[Layer], level: AnyLevel, workers: int, shards: int = 1
) -> list[str]:
    """Name the layers that are sent whole at a level (``Compressor.exceeds``)."""
    compressor, level = compressor.resolve_level(level)
    parts = layers if shards == 1 else [layer.on(0, shards) for layer in layers if layer.shape]
    return [part.name for part in parts if compressor.exceeds(part, level, workers)]


def costs_per_step(
    compressor: Compressor,
    layers: Sequence[Layer],
    levels: Mapping[str, AnyLevel],
    workers: int,
    shards: int = 1,
) -> dict[str, dict[str, Any]]:
    """Return the cost of one step at each level and dense, for a record's header. "layers" has the
    floats of each layer. "whole" names the layers that are sent whole, if there are any."""
    table = {}
    for name, level in {**levels, DENSE: DENSE}.items():
        floats, sent = traffic_table(compressor, layers, level, workers, shards)
        costs = [_worker_cost(compressor, layer, level, workers, shards) for layer in layers]
        by_layer = [cost.floats for cost in costs]
        table[name] = {"floats": floats, "bytes": sent, "layers": by_layer}
        if names := name_uncompressed_layers(compressor, layers, level, workers, shards):
            table[name]["whole"] = names
    return table


def check_order(
    chosen: Compressor,
    levels: Mapping[str, AnyLevel],
    layers: Sequence[Layer],
    workers: int,
    shards: int = 1,
) -> None:
    """Raise ConfigError unless "low" compression sends at least as many floats as "high", or at
    equal floats (bits of a quantiser) as many bytes."""
    if {"low", "high"} <= levels.keys():
        low, high = (chosen.resolve_level(levels[name])[1] for name in ("low", "high"))
        sent = traffic_table(chosen, layers, low, workers, shards)
        if chosen.data_dependent:  # the formula is the most at any level
            if DENSE not in (low, high) and float(low) > float(high):
                raise ConfigError(
                    f"levels.low = {low!r} is above levels.high = {high!r}: low and high qualify "
                    "compression, and a higher level of this compressor sends less; swap them"
                )
        elif sent < traffic_table(chosen, layers, high, workers, shards):
            raise ConfigError(
                f"levels.low = {low!r} sends less than levels.high = {high!r}: low and high "
                "qualify compression, so low must be the level that sends more; swap them"
            )
