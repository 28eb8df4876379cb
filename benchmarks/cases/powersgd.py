"""PowerSGD on ResNet-18's layers, W processes on one core, gloo over loopback

CPU time of all processes together, which is the time a step takes on one core. Peers: torch's
``powerSGD_hook`` (all layers in one bucket, batched by shape); ``powersgd`` from its authors'
repository (PyPI's 0.0.1 and 0.0.2 hold no code) with its default of one half-iteration per step and
with the two of its README, which are the paper's step and ours; the mean of the dense gradients,
laid end to end first, and *flat*: where they already lie so, as in DDP's buckets. At W = 1 ours
is the world of one process, as in training. Floor: gradient and residual read twice, residual and
update written, or the products if they take longer, and two collectives of one number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Limits, Row, Seconds, Step, compare, interleaved, resnet18
from benchmarks.process_group import added, processes, run_process
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer

RANKS, WORKERS = (1, 2, 4), (1, 2, 4)
TARGETS = {
    "torch powerSGD_hook": 0.35,
    "powersgd": 0.5,
    "powersgd, 2 iterations": None,
    "dense, flat": None,
    "dense": None,
}
WHY_DENSE = (
    "Against dense: over loopback a collective costs two or three copies in memory, no network is "
    "as fast, and there is little that compression could save; what each process computes, here "
    "one after the other on one core, is above."
)
MISSING = "pip install git+https://github.com/epfml/powersgd.git"
DENSE_WORKERS, DENSE_TARGET = 4, 0.6


class Bucket:
    """What `powerSGD_hook` reads of DDP's bucket: all gradients in one."""

    def __init__(self, layers: list[Layer], flat: Tensor) -> None:
        self.flat, self.layers = flat, layers

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([layer.size for layer in self.layers])
        return [p.view(x.shape) for p, x in zip(parts, self.layers, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def torch_hook(layers: list[Layer], flat: Tensor, rank: int) -> Callable[[], Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    state = hook.PowerSGDState(
        dist.group.WORLD, rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=True
    )
    bucket: Any = Bucket(layers, flat)
    for _ in range(2):
        hook.powerSGD_hook(state, bucket).wait()
    return lambda: hook.powerSGD_hook(state, bucket).wait()


def powersgd_library(
    layers: list[Layer], flat: Tensor, rank: int, iterations: int
) -> Callable[[], Any]:
    from powersgd import Config, PowerSGD

    gradients = Bucket(layers, flat).gradients()
    config = Config(rank, num_iters_per_step=iterations, start_compressing_after_num_steps=0)
    peer = PowerSGD(gradients, config)
    return lambda: peer.aggregate(gradients)


def methods(layers: list[Layer], stack: Tensor, rank: int, world: World) -> dict[str, Any]:
    flat = stack[0]
    gradients = Bucket(layers, flat).gradients()

    def dense_flat() -> None:
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())

    def dense() -> None:
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(joined)
        joined.div_(dist.get_world_size())

    library = {"powersgd": 1, "powersgd, 2 iterations": 2} if find_spec("powersgd") else {}
    return {
        "regimes": Step(Reducer(PowerSGD(), layers, world, 0), rank, stack),
        "torch powerSGD_hook": torch_hook(layers, flat, rank),
        **{name: powersgd_library(layers, flat, rank, n) for name, n in library.items()},
        "dense, flat": dense_flat,
        "dense": dense,
    }


def process(rank: int, rounds: int) -> dict[str, Any]:
    """One process: CPU seconds of every method, its collectives' threads included."""
    workers = dist.get_world_size()
    world = World(1) if workers == 1 else ProcessWorld(workers, torch.device("cpu"))
    layers = resnet18()
    generator = torch.Generator().manual_seed(rank)
    fresh = torch.randn(1, sum(layer.size for layer in layers), generator=generator)
    stack, one = fresh.clone(), torch.ones(1)
    seconds: dict[str, Seconds] = {}

    def before() -> None:
        stack.copy_(fresh)  # the peers write over it
        dist.barrier()

    for power in RANKS:
        seconds[str(power)] = interleaved(
            methods(layers, stack, power, world), rounds, before=before
        )
    latency = interleaved({"": lambda: dist.all_reduce(one)}, 50)
    return {"seconds": seconds, "latency": statistics.median(latency[""])}


def floor(layers: list[Layer], power: int, workers: int, limits: Limits, latency: float) -> float:
    """Milliseconds."""
    size = sum(layer.size for layer in layers)
    moved = 6 * 4 * size / limits.bandwidth
    products = 3 * 2 * power * size / limits.flops
    return 1e3 * (workers * max(moved, products) + 2 * workers * latency * (workers > 1))


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    layers, rows = resnet18(), []
    for workers in WORKERS:
        measured = processes("benchmarks.cases.powersgd", workers, 2 if quick else 9)
        for power in RANKS:
            seconds = added([one["seconds"][str(power)] for one in measured])
            least = floor(layers, power, workers, limits, measured[0]["latency"])
            for peer, target in TARGETS.items():
                if peer.startswith("dense") and workers == DENSE_WORKERS:
                    target = DENSE_TARGET
                setting = f"W = {workers}, rank {power}"
                rows.append(
                    compare(
                        setting,
                        seconds,
                        "regimes",
                        peer,
                        target,
                        floor=least,
                        note=WHY_DENSE if peer.startswith("dense") else "",
                    )
                    if peer in seconds
                    else Row(setting, peer, target=target, error=MISSING)
                )
    return rows


if __name__ == "__main__":
    run_process(process)
