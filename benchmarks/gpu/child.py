"""What the campaign does in processes of its own.

``train FOLDER`` one run of ``$REGIMES_CONFIG``; ``alone FOLDER`` the same in a process group of one
process on the device's own backend; ``hook DEVICE [GRAPHS]`` a DDP script with bucket views, a
gradient scaler and clipping; ``island DEVICE SHARDS`` a model of FSDP2 in islands of so many
shards.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.config import RunConfig, from_dict
from regimes.collectives import connect as connecting
from regimes.collectives.world import World
from regimes.training import build


def join(device: str) -> torch.device:
    """The group, unless this process is in one; this process's device.

    NCCL serves processes that have a GPU each; those that share one use gloo.
    """
    local = int(os.environ["LOCAL_RANK"])
    own = device == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    place = torch.device("cuda", local if own else 0) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if own else "gloo")
    return place


def train(folder: str) -> None:
    """One run, continued where there is some of it."""
    config = from_dict(RunConfig, json.loads(os.environ["REGIMES_CONFIG"]))
    regimes.run(config, folder, resume=(Path(folder) / "run.json").exists())


def alone(folder: str) -> None:
    """NCCL without a second GPU: all collectives go through a group of one."""
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ.get("MASTER_PORT", "29517"),
    )

    def connect(workers: int, device: torch.device, timeout: float) -> World:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        membership = connecting.join_group(device, timedelta(seconds=timeout), "alone")
        return connecting.world_of(workers, device, membership)

    build.connect_world = connect  # type: ignore[attr-defined]
    train(folder)


def hook(device: str, graphs: str = "") -> None:
    """Some steps, which prints the first and last loss; with ``graphs`` once more, as so many CUDA
    graphs, to the same bits."""
    place = join(device)
    steps = 40 if graphs else 20
    losses, weights = _hooked(device, place, steps, None)
    everybodys = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, weights, group=dist.new_group(backend="gloo"))
    assert all(torch.equal(weights, other) for other in everybodys), "the replicas differ"
    if graphs:
        _, replayed = _hooked(device, place, steps, int(graphs))
        assert torch.equal(weights, replayed), "graphs have changed the weights"
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], f"the loss rose from {losses[0]} to {losses[-1]}"


def _hooked(
    device: str, place: torch.device, steps: int, graphs: int | None
) -> tuple[list[float], torch.Tensor]:
    """The losses of such steps, and the weights after them."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    ).to(place)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    attached = regimes.attach(
        model, optimizer, policy="accordion", scaler=scaler, every=5, graphs=graphs
    )
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(64, 64, generator=generator).to(place)
    y = x[:, :10].argmax(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    attached.close()
    return losses, torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()


def island(device: str, shards: str = "1") -> None:
    """20 steps in islands of so many shards; prints the first and last loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(device)
    torch.manual_seed(0)
    shape = dist.get_world_size() // int(shards), int(shards)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).to(device)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    attached = regimes.attach_replicas(
        net, mesh["replicate"], optimizer, policy="accordion", every=5
    )
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    attached.close()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], f"the loss rose from {losses[0]} to {losses[-1]}"


if __name__ == "__main__":
    {"train": train, "alone": alone, "hook": hook, "island": island}[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        dist.destroy_process_group()
