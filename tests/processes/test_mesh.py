"""A hook on each data-parallel group of a mesh, whose other dimension shares the matrices."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.records import find_edit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def measured(rank: int, parallel: bool) -> list[Any]:
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


def test_a_job_of_two_groups_has_one_record(tmp_path: Path) -> None:
    plain, found = group.run_in_turn(4, (trained, tmp_path, False), (trained, tmp_path, True))
    for ours, theirs in zip(found, plain, strict=True):
        for a, b in zip(ours["weights"], theirs["weights"], strict=True):
            assert torch.equal(a, b)
        assert ours["rows"][-1]["floats"] == theirs["rows"][-1]["floats"] > 0
    record = regimes.load(tmp_path / "run")
    assert record.finished
    assert [row["train_loss"] for row in record.rows] == [1.0] * 3
    assert record.header["world"]["groups"] == 2
    assert not find_edit(record.folder)
    said = [process["said"] for process in found]
    assert [len(words) for words in said] == [0, 1, 0, 0]
    assert "run has the record of the group of process 0, without the traffic of the" in said[1][0]


def test_groups_of_a_tensor_parallel_mesh_have_the_norms_and_levels_of_whole_layers() -> None:
    whole = group.run(measured, 2, False)
    for rows in group.run(measured, 4, True):
        assert len(rows) == 3
        for (norms, levels), (expected, theirs) in zip(rows, whole[0], strict=True):
            assert norms == pytest.approx(expected, rel=1e-9)
            assert levels == theirs


@pytest.mark.parametrize("late", [False, True])
def test_stages_of_a_pipeline_have_one_record_with_the_loss(late: bool, tmp_path: Path) -> None:
    """The group that was there first writes it, and the other one warns."""
    first, last = group.run(stages, 2, tmp_path / "run", late)
    record = regimes.load(tmp_path / "run")
    assert record.finished
    assert [row["train_loss"] for row in record.rows] == [0.5, 2.5, 4.5]
    said = (first if late else last)["said"]
    assert [f"has the record of the group of process {int(late)}, without" in x for x in said] == [
        True
    ]
    assert (last if late else first)["said"] == []
