"""Accelerate's ``ParallelismConfig`` with the class of docs/how-to/islands.md: its own mesh and
preparation of model and optimiser for FSDP2, and the hook between replicas. Run by torchrun on four
processes.

Accelerate turns FSDP on only where it finds an accelerator; it has no setting for a CPU. Therefore
one line, which is marked, names GPUs; all after it is Accelerate's own, on the CPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.nn import functional as F

import regimes


class Replicas(ParallelismConfig):
    @property
    def fsdp_dim_names(self) -> list[str]:
        return ["dp_shard_cp"]  # not "dp_replicate"


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(step))[rank]
    return x, x.argmax(1) % 5


def alone(steps: int, limit: float) -> dict[str, torch.Tensor]:
    """The same on one process, with the batches of all four."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(4):
            x, y = batch(step, rank)
            (F.cross_entropy(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return model.state_dict()


def main(out: str, compressor: str, steps: int = 12, limit: float = 0.5) -> None:
    config = Replicas(dp_replicate_size=2, dp_shard_size=2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # what it finds on GPUs
    accelerator: Any = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    assert accelerator.device.type == "cpu"
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    hook = regimes.attach_replicas(
        model,
        accelerator.torch_device_mesh["dp_replicate"],
        optimizer,
        every=4,
        compressor=compressor,
        record=out,
    )
    for step in range(steps):
        x, y = batch(step, accelerator.process_index)
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        hook.log(train_loss=loss.detach())
    hook.close()
    found = {name: p.full_tensor() for name, p in model.state_dict().items()}
    if accelerator.is_main_process:
        expected = alone(steps, limit)
        print(
            json.dumps({name: float((found[name] - expected[name]).abs().max()) for name in found})
        )
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
