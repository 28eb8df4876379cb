"""Critical sharpness as an instrument of a run: no second derivative, a few forward passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from regimes.curvature import critical_sharpness
from regimes.errors import require
from regimes.instruments.base import EndOfEpochGauge, MeasurementContext, Reading, require_at_least
from regimes.instruments.curvature import process_mean


@dataclass(frozen=True)
class Sharpness:
    """Critical sharpness along the gradient of a fixed probe of the training set.

    For SGD that is the direction of a step; an optimiser that rescales it has another sharpness.

    Attributes:
        images, batch: as for ``Curvature``.
        tolerance: how far the critical rate found may lie above the true one, relatively.
    """

    every: int = 1
    images: int = 200
    batch: int = 50
    tolerance: float = 1 / 16

    def __post_init__(self) -> None:
        require_at_least(self, "sharpness", every=1)
        where = "instruments.sharpness.tolerance"
        require(0 < self.tolerance < 1, where, self.tolerance, "a number between 0 and 1")

    def start(self, context: MeasurementContext) -> SharpnessGauge:
        return SharpnessGauge(self, context)


class SharpnessGauge(EndOfEpochGauge):
    """Measures when read; remembers the critical rate, from which the next search starts."""

    def __init__(self, settings: Sharpness, context: MeasurementContext) -> None:
        self.settings, self.context = settings, context
        self.batches = context.probe(settings.images, settings.batch)
        self.rate: float | None = None

    def read(self, epoch: int) -> Reading:
        found = critical_sharpness(
            self.context.model,
            lambda model, batch: self.context.loss(model, *batch),
            self.batches,
            start=self.rate,
            tolerance=self.settings.tolerance,
            mode="eval",
            mean=process_mean(self.context),
        )
        self.rate = found.rate if math.isfinite(found.rate) else None
        return Reading(
            model={"critical_sharpness": found.value}, detail={"forwards": found.forwards}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state.get("rate")
