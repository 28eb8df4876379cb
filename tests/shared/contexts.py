"""What an instrument is given at the start of a run, for tests that feed it gradients by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.instruments.base import MeasurementContext
from regimes.training.gradients import layer_table


class Vector(nn.Module):
    """Two layers whose gradient is the mean of the batch: loss = w . mean(x)."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(first)), nn.Parameter(torch.zeros(second))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([self.a, self.b]) * x.mean(0)).sum()


def with_gradients(gradients: list[list[float]], first: int, world: World) -> MeasurementContext:
    """Batch i of any size has the gradient ``gradients[i]``."""
    model = Vector(first, len(gradients[0]) - first)

    def samples(epoch: int, count: int, batch: int) -> list[tuple[Tensor, Tensor]]:
        if count > len(gradients):
            raise ConfigError("too many")
        return [(torch.tensor([g] * batch), torch.zeros(batch)) for g in gradients[:count]]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x)

    def probe(images: int, batch: int) -> list[Any]:
        raise AssertionError("the instrument asks for the probe")

    return MeasurementContext(
        model=model,
        loss=loss,
        world=world,
        layers=layer_table(model),
        seed=0,
        union=False,
        probe=probe,
        samples=samples,
    )


def without_data(workers: int, sizes: list[int], union: bool = False) -> MeasurementContext:
    """Layers of these sizes; no model, no samples."""
    layers = [Layer(f"layer{i}", (n,)) for i, n in enumerate(sizes)]

    def nothing(*_: Any) -> Any:
        raise AssertionError("the instrument asks for samples")

    return MeasurementContext(
        model=nn.Identity(),
        loss=nothing,
        world=World(workers),
        layers=layers,
        seed=0,
        union=union,
        probe=nothing,
        samples=nothing,
    )
