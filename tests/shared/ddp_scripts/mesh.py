"""Four processes of which two each share a model's matrices, and two each its data."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import regimes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def norms(rank: int, parallel: bool) -> list[Any]:
    """Norms and levels of two units, with matrices divided among two processes and without."""
    torch.manual_seed(1)
    net: Any = Net().double()
    group: dict[str, Any] = {}
    place = rank
    if parallel:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        net, group = parallelize_module(net, mesh["tensor"], plan), {"device_mesh": mesh["data"]}
        place = mesh["data"].get_local_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = DistributedDataParallel(net, **group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rule = {"name": "accordion", "interval": 1}
    options = {"compressor": "dense", "levels": {"low": "dense", "high": "dense"}}
    hook = regimes.attach(model, optimizer, policy=rule, every=2, **options)
    draw = torch.Generator().manual_seed(place)
    for _ in range(6):
        x = torch.randn(4, 6, generator=draw, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    hook.close()
    return [[row["statistics"]["norm:update"], row["layers"]["level"]] for row in hook.rows]


def trained(rank: int, folder: Path, records: bool) -> dict[str, Any]:
    """What a process has after three units of two steps, and what it has been warned of."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = parallelize_module(Net(), mesh["tensor"], plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedDataParallel(net, device_mesh=mesh["data"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        record = folder / "run" if records else None
        levels = {"low": 2, "high": 1}
        hook = regimes.attach(
            model,
            optimizer,
            policy="static",
            every=2,
            record=record,
            compressor=regimes.PowerSGD(rank=levels),
        )
        draw = torch.Generator().manual_seed(mesh["data"].get_local_rank())
        for _ in range(6):
            x = torch.randn(4, 6, generator=draw)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            hook.log(train_loss=1.0)
        hook.close()
    said = [str(w.message) for w in caught if "regimes" in w.filename or "hook" in str(w.message)]
    weights = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    return {"weights": weights, "rows": copy.deepcopy(hook.rows), "said": said}


def stages(rank: int, folder: Path, late: bool) -> dict[str, Any]:
    """Two stages of a pipeline, each a data-parallel group of its own, with one record; the last
    one knows the loss. With ``late`` the first attaches when the last has trained a step."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    net = nn.Linear(6, 6)
    model = DistributedDataParallel(net, process_group=groups[rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def attached() -> Any:
            return regimes.attach(
                model, optimizer, every=2, record=folder, compressor=regimes.PowerSGD(rank=1)
            )

        hook = None if late and not rank else attached()
        dist.barrier()
        for step in range(6):
            if rank == 0:  # the backward pass of the last stage comes first
                dist.recv(torch.zeros(1), 1)
                hook = hook or attached()
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
            if rank == 1:
                hook.log(train_loss=float(step))
                dist.send(torch.zeros(1), 0)
        hook.close()
    dist.barrier()
    return {"rows": len(hook.rows), "said": [str(w.message) for w in caught]}
