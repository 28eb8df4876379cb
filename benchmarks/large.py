"""One step of PowerSGD on GPT-2's matrices, alone and on two processes of gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.harness import Step, peak_memory
from benchmarks.process_group import processes, run_process
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer

RANK = 4
SHAPES = {"GPT-2 124M": (768, 12), "GPT-2, embedding and a block of width 2,048": (2_048, 1)}


def steps() -> Iterator[tuple[str, int, int, float, float]]:
    """Of each model and number of workers: its name, W, numbers, and the CPU seconds of a step and
    the MB above gradients and residuals of the process that needs most."""
    for i, (name, shape) in enumerate(SHAPES.items()):
        size = sum(layer.size for layer in gpt2(*shape))
        for workers in (1, 2):
            measured = processes("benchmarks.large", workers, i)
            seconds, megabytes = (max(values) for values in zip(*measured, strict=True))
            print(f"{name}, W = {workers}: {seconds:.3g} s", flush=True)
            yield name, workers, size, seconds, megabytes


def gpt2(width: int, blocks: int) -> list[Layer]:
    """GPT-2's parameters; its head is tied to the embedding."""
    matrices = [("wte", 50_257, width), ("wpe", 1_024, width)]
    for i in range(blocks):
        shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
        matrices += [(f"{i}.{name}", n * width, m * width) for name, (n, m) in shapes.items()]
    vectors = [Layer(f"{i}.norm", (2 * width,)) for i in range(2 * blocks + 1)]
    return [Layer(name, (n, m)) for name, n, m in matrices] + vectors


def process(place: int, which: int) -> tuple[float, float]:
    """CPU seconds of this process's second step, the threads of gloo included, and MB."""
    workers, layers = dist.get_world_size(), gpt2(*list(SHAPES.values())[which])
    world = World(1) if workers == 1 else ProcessWorld(workers, torch.device("cpu"))
    generator = torch.Generator().manual_seed(place)
    stack = torch.ones(1, sum(layer.size for layer in layers)).normal_(generator=generator)
    before = peak_memory()
    step = Step(Reducer(PowerSGD(), layers, world, 0), RANK, stack)
    step()  # of which the residuals remain
    began = time.process_time()
    step()
    taken = time.process_time() - began
    return taken, peak_memory() - before - stack.nbytes / 2**20


if __name__ == "__main__":
    run_process(process)
