"""Does a compressor keep its contract? For the tests of those who write one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regimes.base.config import AnyLevel
from regimes.base.errors import ConfigError, require
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor, check_level
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import name_uncompressed_layers

# of layers: a matrix, a convolution, and a matrix of rank 1
SHAPES = ((6, 10), (8, 3, 3, 3), (4, 1))
CLOSE = 1e-9  # of a layer's largest number, in float64


def check_compressor(
    compressor: Compressor,
    level: AnyLevel,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    workers: Sequence[int] = (1, 3),
    exact: bool = True,
) -> None:
    """Tries a compressor on random gradients of simulated workers, in float64, and raises an error
    that says what is wrong.

    >>> from regimes.compression.powersgd import PowerSGD
    >>> check_compressor(PowerSGD(), 2)

    Args:
        compressor: The compressor to try.
        level: One of its levels.
        shapes: The shapes of the layers' weights.
        workers: The numbers of simulated workers; each is tried.
        exact: With error feedback the update is the mean of what the workers took out of their
            deltas. This holds for every compressor that neither amplifies nor rounds what it sends
            for some workers alone; pass False for others.

    Raises:
        ConfigError: the level would send more of every layer than it has, so nothing would be
            tried; an update has another size or type; gradients were changed; an update differs
            from what was taken out; ``traffic`` differs from what was counted; or ``linear`` is
            true although the update depends on more than the mean of the gradients.
    """
    known = isinstance(compressor, Compressor)
    require(known, "compressor", compressor, "an object of a subclass of Compressor")
    check_level(compressor, level)
    layers = [Layer(f"layer{i}", shape) for i, shape in enumerate(shapes)]
    _check_sends_less(compressor, layers, level, workers)
    for count in workers:
        reducer = _make(compressor, layers, count)
        owed: list[Tensor | None] = [None] * len(layers)
        for step in range(2 * compressor.phases):
            rows = [_draw(count, shape, step + 100 * i) for i, shape in enumerate(shapes)]
            before = [row.clone() for row in rows]
            bucket, levels = range(len(layers)), [level] * len(layers)
            updates = reducer.reduce(bucket, rows, levels)
            for i, layer in enumerate(layers):
                if not rows[i].equal(before[i]):
                    raise _wrong(compressor, layer, "exchange changed the gradients")
                left, earlier = reducer.states[i].residual, owed[i]
                if exact and left is not None:
                    decay = float(compressor.resolve_level(level)[0].error_feedback)
                    sent = before[i] if earlier is None else before[i] + decay * earlier
                    _check_sent(compressor, layer, updates[i], sent - left.view(sent.shape))
                owed[i] = None if left is None else left.view(rows[i].shape).clone()
        if compressor.linear and count > 1:
            _check_linear(compressor, layers, level, count)


def _check_sends_less(
    compressor: Compressor, layers: Sequence[Layer], level: AnyLevel, workers: Sequence[int]
) -> None:
    tried = {layer.name for layer in layers if layer.compressed}
    for count in workers:
        if tried and tried == {*name_uncompressed_layers(compressor, layers, level, count)}:
            raise ConfigError(
                f"the compressor {type(compressor).__name__}: by its traffic, level {level!r} "
                f"would send more of each layer than it has, so that {count} workers send all "
                "layers whole: give larger shapes, or check traffic"
            )


def _make(compressor: Compressor, layers: Sequence[Layer], workers: int) -> Reducer:
    """Its reducer compares ``traffic`` with what is counted."""
    world = World(workers)
    world.meter.dtype = torch.float64
    return Reducer(compressor, layers, world, seed=0)


def _draw(workers: int, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(workers, *shape, generator=generator, dtype=torch.float64)


def _check_sent(compressor: Compressor, layer: Layer, update: Tensor, sent: Tensor) -> None:
    error = (update - sent.mean(0)).abs().max()
    if not error <= CLOSE * sent.abs().max():
        what = "the update is not the mean of what was taken out of the deltas"
        raise _wrong(compressor, layer, f"{what}: they differ by {float(error):.3g}")


def _check_linear(
    compressor: Compressor, layers: Sequence[Layer], level: AnyLevel, workers: int
) -> None:
    rows = [_draw(workers, layer.shape, i) for i, layer in enumerate(layers)]
    bucket, levels = range(len(layers)), [level] * len(layers)
    ours = _make(compressor, layers, workers).reduce(bucket, rows, levels)
    of_mean = [row.mean(0, keepdim=True) for row in rows]
    theirs = _make(compressor, layers, 1).reduce(bucket, of_mean, levels)
    for i, layer in enumerate(layers):
        if not torch.allclose(ours[i], theirs[i], rtol=1e-6, atol=CLOSE):
            what = "linear, but the update depends on more than the mean of the gradients"
            raise _wrong(compressor, layer, what)


def _wrong(compressor: Compressor, layer: Layer, what: str) -> ConfigError:
    return ConfigError(f"the compressor {type(compressor).__name__}, layer {layer.name}: {what}")
