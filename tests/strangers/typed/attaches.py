"""Three ways to attach, to DDP, to replicas of shards and to shards."""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import regimes

Pair = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Pair) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def with_ddp(network: nn.Module, data: TensorDataset, folder: str) -> None:
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    hook = regimes.attach(
        model,
        optimizer,
        policy=regimes.Accordion(
            interval=5,
            low=regimes.PowerSGD(rank=4),
            high=regimes.PowerSGD(rank=1, error_feedback=False),
        ),
        record=regimes.RecordOptions(
            folder,
            metric="accuracy",
            units=20,
            instruments={"curvature": {}},
            probe=(loss, [(torch.zeros(4, 3), torch.zeros(4))]),
        ),
        scaler=torch.amp.GradScaler("cpu"),
    )
    assert_type(hook, regimes.Hook)
    for inputs, targets in DataLoader(data):
        torch.autograd.backward(loss(model, (inputs, targets)))
        optimizer.step()
    hook.log(train_loss=torch.zeros(()), accuracy=0.5)
    scheduler.step()
    decided = hook.epoch_end(lr=scheduler.get_last_lr()[0])
    assert_type(decided, dict[str, regimes.Decision])
    assert_type(hook.levels, dict[str, str])
    assert_type(hook.traffic, regimes.Traffic)
    torch.save(hook.state_dict(), f"{folder}/hook.pt")
    hook.close()


def with_ddp_by_itself(network: nn.Module, data: TensorDataset) -> None:
    model = DistributedDataParallel(network)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())]
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    table = {"name": "accordion", "eta": 0.3}
    regimes.attach(model, optimizers, policy=table, compressor="topk", every=sampler)
    quiet = regimes.RecordOptions(summary=False, check_every=500, instruments={"error"})
    regimes.attach(model, optimizers, compressor=regimes.Dense(), every=len(sampler), record=quiet)
    probe = (lambda model, batch: batch.sum()), torch.ones(3)
    measured = regimes.RecordOptions(probe=probe, instruments={"sharpness": {}})
    regimes.attach(model, compressor=regimes.QuantisedAllReduce(bits=8), record=measured)
    regimes.attach(model, compressor=regimes.TopK(percent=0.5), policy=None)
    table = {"name": "powersgd", "levels": {"low": 4, "high": 1}}
    regimes.attach(model, compressor=table, policy=regimes.Windows(((0, 5),)))


def with_replicas(model: nn.Module) -> regimes.Hook:
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    hook = regimes.attach_replicas(model, mesh["replicate"], compressor=regimes.PowerSGD(rank=4))
    with regimes.whole_model(model, mesh) as mean:
        assert_type(mean(torch.ones(())), Tensor)
    return hook


def with_replicas_and_shards(model: nn.Module) -> regimes.Hook:
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    eight = regimes.QuantisedScatter(bits=8)
    return regimes.attach_replicas(model, mesh["replicate"], scatter=eight, gather={"level": 8})


def with_shards(model: nn.Module) -> regimes.Hook:
    mesh = init_device_mesh("cuda", (8,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    scatter = {"levels": {"low": 8, "high": 4}}
    return regimes.attach_shards(model, mesh, optimizer, scatter=scatter, gather={"level": 8})


def with_whole_gradients(model: nn.Module) -> regimes.Hook:
    mesh = init_device_mesh("cuda", (8,))
    hook = regimes.attach_shards(model, mesh, compressor=regimes.PowerSGD(rank=4))
    hook.detach()
    return hook


def with_local_steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = {"lr": 0.7, "momentum": 0.9}
    sent = regimes.TopK(percent=1)
    local = regimes.local_steps(
        model, optimizer, policy=regimes.PostLocal(), outer=outer, compressor=sent
    )
    assert_type(local, regimes.LocalSteps)
    local.step()
    local.close()
