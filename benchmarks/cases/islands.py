"""The hook on ResNet-18 in two islands of two shards, gloo over loopback

CPU time of all four processes together, which is the time a step takes on one core: from the first
gradient that `fully_shard` has reduced to the end of the step, with PowerSGD, ACCORDION's norm and
the test for gradients that are not finite. Against its floor: three passes over the rows that are
here (each reads and writes them once) and the collectives of that step, with as many numbers on the
same groups, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Limits, Row, Seconds, compare, interleaved
from benchmarks.process_group import added, processes, run_process
from regimes.collectives.processes import ProcessWorld
from regimes.data.models import build_model

RANKS, TARGET = (1, 2, 4), 1.8
PROCESSES, ISLANDS = 4, 2
PASSES = 3


def attached(rank: int, mesh: Any) -> Any:
    """A hook on a sharded ResNet-18."""
    from torch.distributed.fsdp import fully_shard

    import regimes

    net = build_model("resnet18-cifar10", classes=10, channels=3, image_size=32)
    fully_shard(net, mesh=mesh["shard"])
    levels = {"low": rank, "high": rank}
    return net, regimes.attach_replicas(
        net, mesh["replicate"], compressor=regimes.PowerSGD(rank=levels)
    )


def step(hook: Any, gradients: list[Tensor]) -> None:
    """What the hook does in a backward pass, last layers first."""
    steps = hook.steps
    steps.begin_step()
    for i in reversed(range(len(gradients))):
        steps.add_gradients({i: gradients[i][None]})
    steps.finish_step()
    steps.settle_step()


def collectives(hook: Any, gradients: list[Tensor]) -> list[Callable[[], Any]]:
    """Those of a step, to be called again with tensors of the same size."""
    found: list[Callable[[], Any]] = []
    original = ProcessWorld._wait_for

    def noted(world: ProcessWorld, collective: Any, *args: Any, **options: Any) -> None:
        if all(isinstance(x, Tensor) for x in args):
            copies = [torch.zeros_like(x) for x in args]
            found.append(lambda: collective(*copies).wait())
        original(world, collective, *args, **options)

    ProcessWorld._wait_for = noted  # type: ignore[method-assign]
    step(hook, gradients)
    ProcessWorld._wait_for = original  # type: ignore[method-assign]
    return found


def process(_: int, rounds: int) -> dict[str, Seconds]:
    """One process: CPU seconds of the hook and of its floor, by rank of PowerSGD."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = ISLANDS, PROCESSES // ISLANDS
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    seconds: dict[str, Seconds] = {}
    for rank in RANKS:
        net, hook = attached(rank, mesh)
        fresh = [torch.randn_like(x) for x in hook.source.local]
        gradients = [x.clone() for x in fresh]
        for _ in range(2):  # the first one agrees on the levels
            step(hook, gradients)
        repeated = collectives(hook, gradients)
        one = torch.randn(sum(x.numel() for x in fresh))
        other = torch.empty_like(one)

        def floor(one: Tensor = one, other: Tensor = other, repeated: Any = repeated) -> None:
            for _ in range(PASSES):
                other.copy_(one)
            for repeat in repeated:
                repeat()

        def before(gradients: Any = gradients, fresh: Any = fresh) -> None:
            torch._foreach_copy_(gradients, fresh)
            dist.barrier()

        tasks = {"regimes": lambda h=hook, g=gradients: step(h, g), "floor": floor}
        seconds[str(rank)] = interleaved(tasks, rounds, before=before)
        del net
    return seconds


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    measured = processes("benchmarks.cases.islands", PROCESSES, 2 if quick else 15)
    return [
        compare(
            f"2 x 2, rank {rank}",
            added([seconds[str(rank)] for seconds in measured]),
            "regimes",
            "floor",
            TARGET,
        )
        for rank in RANKS
    ]


if __name__ == "__main__":
    run_process(process)
