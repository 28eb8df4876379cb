"""Critical sharpness as an instrument: a few forward passes, no second derivative."""

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

    That is the direction of a step of SGD, but not of an optimiser that rescales the gradient.

    Attributes:
        images, batch: as for ``Curvature``.
        tolerance: largest relative error of the critical rate, which is never too low.
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
    """Measures when read; the next search starts from the last critical rate."""

    def __init__(self, settings: Sharpness, context: MeasurementContext) -> None:
        self.settings, self.context = settings, context
        self.batches = context.probe(settings.images, settings.batch)
        self.rate: float | None = None

    def read(self, epoch: int) -> Reading:
        measured = critical_sharpness(
            self.context.model,
            lambda model, batch: self.context.loss(model, *batch),
            self.batches,
            start=self.rate,
            tolerance=self.settings.tolerance,
            mode="eval",
            mean=process_mean(self.context),
        )
        self.rate = measured.rate if math.isfinite(measured.rate) else None
        return Reading(
            model={"critical_sharpness": measured.value}, detail={"forwards": measured.forwards}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state.get("rate")
