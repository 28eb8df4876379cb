"""Which collectives a compressor asks for: tried with one step of a small layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from regimes.base.config import DENSE, AnyLevel, Level
from regimes.collectives.comm import Comm, Riders
from regimes.collectives.layers import NO_LAYER, Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket
from regimes.compression.reducer import exchange_layers

SIDE = 256  # rows and columns of the small layer
FEW = 64  # workers at most among which its step is simulated
WIDE = 4  # bytes of a number


def collectives_of(
    chosen: Compressor, level: Level, workers: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, float], dict[str, float]]:
    """Try one step of a compressor on a small layer; return the calls of each kind of collective,
    and each kind's share of the bytes. If steps are of several kinds, as in ACP-SGD, both are the
    means over these kinds."""
    few = min(workers, FEW)
    world = World(few, processes=few)  # the others count as copies of this one worker
    state = chosen.init(Layer("small", (SIDE, SIDE)), 0)
    state.workers = few
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, SIDE, SIDE, generator=generator, dtype=dtype)
    bucket = Bucket([0], [state], [level], bool(chosen.error_feedback))
    for _ in range(chosen.phases):  # even where a level would send more than so small a layer has
        riders = Riders(waiting={NO_LAYER: torch.zeros(1)})
        comm = Comm(world, [0], riders=riders)
        exchange_layers(chosen, bucket, [gradient], comm)
        comm.send_riders()
    meter = world.meter.take_counts()
    sent: dict[str, float] = {kind: size for kind, size in meter.sent.items() if size}
    sent["mean"] -= WIDE * chosen.phases  # the loss, which is sent with it
    if "exchange" in sent:  # a worker gathers the sums of its own part, and sends all others
        sent["gather"] *= few / workers
        sent["exchange"] *= (1 - 1 / workers) / (1 - 1 / few) if few > 1 else 0.0
    total = sum(sent.values())
    shares = {kind: size / total for kind, size in sent.items() if size}
    return {kind: meter.calls.get(kind, 0) / chosen.phases for kind in shares}, shares


def sends_apart(
    chosen: Compressor, levels: Iterable[AnyLevel], dtype: torch.dtype = torch.float32
) -> bool:
    """Return whether, at one of these levels, each worker's bytes reach the others as its own, so
    that more workers behind one link send more over it. Averages are added up on the way: a ring
    crosses each link once, however many workers are behind it."""
    for level in levels:
        compressor, plain = chosen.resolve_level(level)
        if plain != DENSE and collectives_of(compressor, plain, 2, dtype)[1].keys() - {"mean"}:
            return True
    return False
