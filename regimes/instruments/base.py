"""The contract of an instrument: hyper-parameters, and the gauge that a run feeds and reads.

Neither may change the run's weights, buffers, ``.grad``, flags or random streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.base.config import AnyLevel
from regimes.base.reduction import Batch, Loss
from regimes.base.torch_compat import foreach_add, foreach_norm
from regimes.collectives.comm import signals
from regimes.collectives.gathered_model import whole_weights
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor


@dataclass(frozen=True)
class MeasurementContext:
    """Holds what an instrument may read.

    Attributes:
        union: gradients come as one row, the mean of the hosted workers (a union pass).
        probe: ``probe(images, batch)`` gives this process's equal share of so many training
            samples, in batches of ``batch`` that are the same for any number of processes: the
            first images (balanced over classes, never augmented), or of a text and of a user's own
            data samples at equal distances. What these draw at random, they draw once.
        samples: ``samples(epoch, count, batch)`` gives ``count`` seeded training batches of
            ``batch`` samples of an epoch, the same on every process.
        compressor, levels: the run's.
        optimizer: the learning rate of the present step and each layer's decoupled weight decay;
            None where the user has a training loop of their own.
        is_local: whether each worker has parameters of its own now; None where workers share every
            step. Between synchronisations a step's "gradients" are the workers' movements since
            the last one.
        weight: by what a batch of the probe counts in the loss of all, where the user says so.
        residuals: gives what each hosted worker owes, per layer ``[rows, ...]``, in units of the
            unscaled loss; None for a layer that owes nothing. None: there is no compressor.
        owned: gradients come as one row, the mean of all workers already, of so many numbers of
            each layer that this process owns, as FSDP2 reduces them. None: as workers have them.
        members: by layer, the names of its trainable parameters; None: each is a layer.
    """

    model: nn.Module
    loss: Loss
    world: World
    layers: Sequence[Layer]
    seed: int
    union: bool
    probe: Callable[[int, int], list[Batch]]
    samples: Callable[[int, int, int], list[Batch]]
    compressor: Compressor | None = None
    levels: Mapping[str, AnyLevel] = field(default_factory=dict)
    optimizer: Callable[[], tuple[float, Sequence[float]]] | None = None
    is_local: Callable[[], bool] | None = None
    weight: Callable[[Batch], Any] | None = None
    residuals: Callable[[], Sequence[Tensor | None]] | None = None
    owned: Sequence[int] | None = None
    members: Mapping[str, Sequence[str]] | None = None

    @property
    def parts(self) -> list[Layer]:
        """Return what this process sees of each layer's gradient."""
        if self.owned is not None:
            pairs = zip(self.layers, self.owned, strict=True)
            return [Layer(layer.name, (1, size)) for layer, size in pairs]
        return self.world.local_layers(self.layers)

    def mean_gradient(self, stack: Float[Tensor, "rows N"]) -> Float[Tensor, " N"]:
        """Average a step's gradients, uncompressed, over all workers."""
        if self.owned is not None:
            return stack[0]
        (mean,) = signals(self.world).mean([stack])
        return mean

    def gather_weights(self) -> AbstractContextManager[None]:
        """Give each process all weights of the model inside, so that it may run the model by
        itself; all processes enter it."""
        return whole_weights(self.model, self.world)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, one per layer unless layers have ``members``."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def sizes(self) -> list[int]:
        """Return the number of parameters of each layer."""
        return [layer.size for layer in self.layers]


@dataclass
class Reading:
    """Holds one epoch's statistics; ``detail`` (plain JSON types) goes to ``instruments.jsonl``."""

    layers: dict[str, list[float]] = field(default_factory=dict)  # one value per layer
    model: dict[str, float] = field(default_factory=dict)  # one for the whole model
    detail: dict[str, Any] = field(default_factory=dict)


@runtime_checkable  # for the type checker that the tests run under
class Gauge(Protocol):
    """Measures during a run: the running part of an instrument."""

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        """See one step's stacked gradients and updates, without changing them."""
        ...

    def read(self, epoch: int) -> Reading:
        """Return the statistics of the epoch just ended; the same on every process."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the next readings depend on, the same on all processes, for the
        checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StatelessGauge:
    """Keeps no state between epochs: the base of such gauges.

    Attributes:
        due: the next ``step`` reads gradients; for gauges that do not read each of them.
        saves_within_unit: ``state_dict`` has all that the reading of a unit under way needs.
        reversible: the last ``step`` may be taken back, by setting all attributes to what they
            were. So ``step`` replaces what it changes and writes to nothing that was there before.
    """

    reversible = False
    saves_within_unit = False

    @property
    def due(self) -> bool:
        return True

    def drop_epoch(self) -> None:
        """Forget the steps of an epoch that ends without a reading: the next reading is of its own
        epoch alone, and a run that is resumed in between knows no others."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class EndOfEpochGauge(StatelessGauge):
    """Does nothing during steps: the base of such gauges."""

    saves_within_unit = True

    @property
    def due(self) -> bool:
        return False

    def step(self, stack: Tensor, updates: Sequence[Tensor]) -> None:
        pass


class StridedGauge(StatelessGauge):
    """Calls ``measure`` in steps 0, stride, 2 stride, ... of an epoch: the base of such gauges."""

    stride: int
    seen = 0  # steps of this epoch; ``read`` and ``drop_epoch`` set it back

    @property
    def due(self) -> bool:
        return self.seen % self.stride == 0

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        if self.due:
            self.measure(stack)
        self.seen += 1

    def drop_epoch(self) -> None:
        self.seen = 0

    def measure(self, stack: Float[Tensor, "rows N"]) -> None:
        raise NotImplementedError


@runtime_checkable
class Instrument(Protocol):
    """Measures statistics, as its fields say: a frozen dataclass, whose fields are the
    configuration's table of that name. At the start of a run it makes one gauge, which is read in
    epochs 0, ``every``, 2 ``every``, ..."""

    @property
    def every(self) -> int: ...

    def start(self, context: MeasurementContext) -> Gauge: ...


def add_sums(sums: list[Tensor], more: Sequence[Tensor], room: list[Tensor]) -> list[Tensor]:
    """Compute ``sums + more`` in other memory than ``sums``.

    Args:
        room: memory that may be written to, where there is some. On a GPU it is not used: the
            allocator keeps memory, and one call adds all.
    """
    if not room or sums[0].device.type != "cpu":
        return list(foreach_add(sums, list(more)))
    return [torch.add(a, b, out=c) for a, b, c in zip(sums, more, room, strict=True)]


def divide_or_nan(above: float, below: float) -> float:
    """Divide; NaN unless the denominator is positive."""
    return above / below if below > 0 else math.nan


def squared_norms(tensors: Sequence[Tensor]) -> Float[Tensor, " n"]:
    return torch.stack(foreach_norm(list(tensors))).double().square()
