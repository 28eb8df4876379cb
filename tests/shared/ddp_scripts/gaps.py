"""The gaps between workers on processes: of numbers that are known, and of local steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import regimes
from regimes.collectives.group import on_group, on_mesh
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.instruments.base import MeasurementContext
from regimes.instruments.disagreement import Disagreement
from regimes.job.attached import no_data

LAYERS = [Layer("a", (3,)), Layer("b", (1, 4)), Layer("c", (5, 3))]
PERIOD, STEPS = 2, 4


def stack(workers: int) -> list[Tensor]:
    """By layer, each worker's movement ``[workers, *shape]``."""
    generator = torch.Generator().manual_seed(workers)
    return [
        torch.randn(workers, *layer.shape, generator=generator, dtype=torch.float64)
        for layer in LAYERS
    ]


def reading(world: World) -> Any:
    """What a world finds, of which this process has its rows of its workers' movements."""
    context = MeasurementContext(
        nn.Linear(1, 1), no_data, world, LAYERS, 0, False, no_data, no_data, is_local=lambda: True
    )
    gauge, rows = Disagreement().start(context), [*world.hosted]
    parts = []
    for layer, whole in zip(context.parts, stack(world.workers), strict=True):
        here = whole[rows] if layer.shard is None else whole[rows][:, layer.shard.here]
        parts.append(here.flatten(1))
    gauge.step(torch.cat(parts, 1), [])
    found = gauge.read(0)
    return [found.layers, found.model, found.detail]


def on_processes(rank: int) -> dict[str, Any]:
    """What four processes find, as workers, and as two replicas of two."""
    flat = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    device = torch.device("cpu")
    worlds: list[ProcessWorld] = [
        on_group(flat.get_group(), device, 60.0),
        on_mesh(two["a"].get_group(), two["b"].get_group(), device, 60.0),
    ]
    found = {str(world.workers): reading(world) for world in worlds}
    return found | {"local": local(rank, True), "plain": local(rank, False)}


def local(rank: int, measured: bool) -> dict[str, Any]:
    """Local steps: the parameters before each synchronisation, and what the rows say."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"instruments": {"disagreement"}} if measured else {}
    job = regimes.local_steps(
        model,
        optimizer,
        policy=PERIOD,
        every=STEPS,
        record=regimes.RecordOptions(summary=False),
        **options,
    )
    generator, before = torch.Generator().manual_seed(rank), list[Tensor]()
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        before.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        job.step()
    job.close()
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "before": [before[PERIOD - 1], before[STEPS + PERIOD - 1]],
        "end": end,
        "model": [row["model"] for row in job.rows],
    }
