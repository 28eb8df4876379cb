"""A guard: now and then the update beside the mean gradient that no compression would have lost.

With u the update of a measured step and g the workers' mean gradient, ``cosine`` is <u, g> / (|u|
|g|) per layer and of the model, which a change of scale does not change. With error feedback u
also has what earlier steps owed, so that it is below 1 where nothing is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import Bounded, Bounds
from regimes.base.config.bounds import Count
from regimes.instruments.base import MeasurementContext, Reading, StatelessGauge, divide_or_nan


@dataclass(frozen=True)
class Cosine(Bounded):
    """Measures the cosine between the update and the uncompressed gradient, and warns if it is too
    small.

    Attributes:
        stride: Measure every this many steps, counted over the whole job. On several processes a
            measured step exchanges its gradient a second time, uncompressed, which counts as signal
            bytes.
        least: Process 0 warns of each measured step in which the cosine of the model is below this.
        every: Record at the end of every this many units.
    """

    bounds_prefix = "instruments.cosine."
    requires = frozenset[str]()

    stride: Count = 500
    least: Annotated[float, Bounds("a number from -1 to 1", low=-1, high=1)] = 0.3
    every: Count = 1

    def start(self, context: MeasurementContext) -> CosineGauge:
        return CosineGauge(self, context)


class CosineGauge(StatelessGauge):
    """Keeps the last measured step of a unit.

    Attributes:
        seen: steps since the job began.
        last: of the unit under way, the cosines of the layers and of the model; None: no step was
            measured.
    """

    saves_within_unit = True

    def __init__(self, settings: Cosine, context: MeasurementContext) -> None:
        self.settings, self.context, self.seen = settings, context, 0
        self.last: list[float] | None = None

    @property
    def due(self) -> bool:
        return (self.seen + 1) % self.settings.stride == 0

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        due, self.seen = self.due, self.seen + 1
        if not due:
            return
        self.last = self._cosines(self.context.mean_gradient(stack), updates)
        least, found = self.settings.least, self.last[-1]
        if not found >= least and self.context.world.rank == 0:
            warnings.warn(
                f"step {self.seen}: the compressed gradient has a cosine of {found:.2f} with the "
                f"uncompressed one, less than {least:g}: send more (a level of low compression, or "
                'hook.set_level("dense") for now), or expect less',
                stacklevel=2,
            )

    def _cosines(self, mean: Float[Tensor, " N"], updates: Sequence[Tensor]) -> list[float]:
        context = self.context
        parts = mean.split([layer.size for layer in context.parts])
        pairs = [(u.flatten().to(g), g) for u, g in zip(updates, parts, strict=True)]
        norms = [torch.stack([u.norm(), g.norm(), (u - g).norm()]) for u, g in pairs]
        columns = [context.world.whole_norms(x).square() for x in torch.stack(norms).double().T]
        rows = torch.stack(columns, dim=1).tolist()
        rows.append([sum(column) for column in zip(*rows, strict=True)])
        # <u, g> of squares, because norms are what is added up over parts of a layer
        return [divide_or_nan((u + g - apart) / 2, (u * g) ** 0.5) for u, g, apart in rows]

    def read(self, epoch: int) -> Reading:
        """Return ``cosine`` of the unit's last measured step; nothing where there is none."""
        last = self.last
        self.drop_epoch()
        if last is None:
            return Reading()
        return Reading({"cosine": last[:-1]}, {"cosine": last[-1]}, {"step": self.seen})

    def drop_epoch(self) -> None:
        self.last = None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.last = state.get("seen", 0), state.get("last")
