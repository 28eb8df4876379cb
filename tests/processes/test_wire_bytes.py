"""The bytes that are counted are those that leave a worker, of every compressor and several numbers
of workers: of each collective by what was handed to torch.distributed, whose all-reduce and
all-gather are rings, and whose all-to-all sends no process its own part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.collectives import processes
from regimes.compression import REGISTRY
from regimes.cost.network import Work

LEVELS = {"cast": "bf16"}  # of compressors without usual ones
STEPS = 4


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(23, 17), nn.Linear(17, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out


def sent(name: str, tensors: Any, workers: int) -> tuple[float, float]:
    """(what one worker had for others, what left it in a ring), in bytes."""
    size = tensors[-1].numel() * tensors[-1].element_size()
    if name == "all_reduce":
        return size, 2 * (workers - 1) / workers * size
    if name == "all_to_all":
        return size * (workers - 1) / workers, size * (workers - 1) / workers
    return size, size * (workers - 1)  # an all-gather


def counted(rank: int, workers: int) -> list[dict[str, Any]]:
    """By compressor: bytes by the hook, its record and the cost model; and those carried."""
    carried: Counter[str] = Counter()
    wait = processes.ProcessWorld._wait_for

    def noted(self: Any, collective: Any, *tensors: Any, **options: Any) -> Any:
        name = collective.__name__
        if name in ("all_reduce", "all_gather", "all_to_all"):
            held, left = sent(name, tensors, workers)
            carried.update(held=held, left=left)
        return wait(self, collective, *tensors, **options)

    processes.ProcessWorld._wait_for = noted
    found = []
    for kind in REGISTRY:
        torch.manual_seed(0)
        model = DistributedDataParallel(Carried())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        usual = REGISTRY.make({"name": kind}).usual
        hook = regimes.attach(
            model,
            optimizer,
            compressor={"name": kind, "levels": {"high": usual.get("high", LEVELS.get(kind))}},
            policy={"name": "static", "level": "high"},
            every=STEPS,
        )
        carried.clear()
        torch.manual_seed(rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(6, 23)).square().mean().backward()
            optimizer.step()
        all_carried = dict(carried)
        hook.close()
        (row,) = hook.rows
        collectives = row["collectives"]
        work = Work(0.0, 0.0, collectives["calls"], collectives["bytes"])
        found.append(
            {
                "kind": kind,
                "hook": hook.traffic.bytes,
                "row": row["bytes"],
                "kinds": sum(collectives["bytes"].values()),
                "ring": work.crossing(workers),
                **all_carried,
            }
        )
    processes.ProcessWorld._wait_for = wait
    dist.barrier()
    return found


@pytest.mark.parametrize(  # a ring of two sends what is held, so that three tell them apart
    "workers", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_bytes_are_those_that_leave_a_worker(workers: int) -> None:
    for answer in group.run(counted, workers, workers):
        for case in answer:
            assert case["hook"] == case["row"] == case["kinds"] == round(case["held"]), case
            assert case["ring"] == pytest.approx(case["left"], rel=1e-12), case
            if workers == 2:
                assert case["left"] == pytest.approx(case["held"]), case
