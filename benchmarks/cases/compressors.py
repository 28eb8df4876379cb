"""A step of every compressor over three copies of the gradients

CPU time of all processes together, one worker in each, gloo over loopback; at W = 1 the world of
one process, as in training. A step takes stacked gradients to updates
(`Exchange.exchange_step`), with the compressor's own defaults.
The floor is what must be read and written: each process copies its gradients three times. Each
compressor has rounds of its own, in which it and the floor take turns. Peers: torch's hooks.
torchft's quantised all-reduce needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases.powersgd import Bucket, torch_hook
from benchmarks.harness import Limits, Row, Seconds, Step, compare, interleaved, resnet18
from benchmarks.large import gpt2
from benchmarks.process_group import added, processes, run_process
from regimes.base.config import DENSE, Level
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer

FLOOR = "three copies"
NETWORKS = {"ResNet-18": resnet18, "GPT-2, two blocks": lambda: gpt2(768, 2)}
ROUNDS = {1: 7, 4: 3}
LEVELS: dict[str, dict[Level, float | None]] = {  # with the target at W = 1
    "dense": {DENSE: None},
    "powersgd": {1: 1.9, 4: 1.9},
    "acp-sgd": {4: None},
    "cast": {"bf16": None, "fp16": None},
    "topk": {1: 3.5, 10: 3.5},
    "randomk": {1: 3},
    "chunked-topk": {1: 5},
    "sign": {1: 4},
    "quantise": {8: 5},
    "quantised-all-reduce": {8: 5, 4: 5},
}


def peers(name: str, level: Level, layers: list[Layer], flat: Tensor) -> dict[str, Any]:
    """Others' steps beside which a compressor is shown."""
    if name == "powersgd":
        return {"torch powerSGD_hook": torch_hook(layers, flat, int(level))}
    if name == "cast":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{level}_compress_hook")
        bucket: Any = Bucket(layers, flat)
        return {f"torch {level}_compress_hook": lambda: hook(dist.group.WORLD, bucket).wait()}
    return {}


def process(rank: int, quick: int) -> dict[str, Seconds]:
    """One process: CPU seconds of each compressor, its peers and the floor, by setting."""
    workers, found = dist.get_world_size(), {}
    world = World(1) if workers == 1 else ProcessWorld(workers, torch.device("cpu"))
    for network, make in NETWORKS.items():
        if workers > 1 and network != "ResNet-18":
            continue
        layers = make()
        generator = torch.Generator().manual_seed(rank)
        fresh = torch.randn(1, sum(layer.size for layer in layers), generator=generator)
        stack, other = fresh.clone(), torch.empty_like(fresh)

        def before(stack: Tensor = stack, fresh: Tensor = fresh) -> None:
            stack.copy_(fresh)  # the peers write over it
            dist.barrier()

        def floor(stack: Tensor = stack, other: Tensor = other) -> None:
            for _ in range(3):
                other.copy_(stack)

        for name, levels in LEVELS.items():
            for level in levels:
                reducer = Reducer(make_compressor({"name": name}), layers, world, 0)
                tasks: dict[str, Any] = {"regimes": Step(reducer, level, stack), FLOOR: floor}
                tasks |= peers(name, level, layers, stack[0])
                rounds = 1 if quick else ROUNDS[workers]
                key = f"{network}, W = {workers}, {name} {level}"
                found[key] = interleaved(tasks, rounds, before=before)
    return found


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    rows = []
    for workers in ROUNDS:
        measured = processes("benchmarks.cases.compressors", workers, int(quick))
        for setting in measured[0]:
            seconds = added([one[setting] for one in measured])
            targets = {
                f"{name} {level}": target
                for name, levels in LEVELS.items()
                for level, target in levels.items()
            }
            target = targets[setting.rsplit(", ", 1)[1]] if workers == 1 else None
            rows += [
                compare(setting, seconds, "regimes", peer, target if peer == FLOOR else None)
                for peer in seconds
                if peer != "regimes"
            ]
    return rows


if __name__ == "__main__":
    run_process(process)
