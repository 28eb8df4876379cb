"""No compression: the mean of the gradients, as a compressor like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regimes.collectives.requests import Layer, Traffic
from regimes.compression.base import Compressor, Sending, State, reject
from regimes.config import DENSE, Level


@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Its one level is "dense", which ``Compressor.reduce`` sends."""

    linear: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        if level != DENSE:
            raise reject("the dense compressor", level, "no other level")

    def send(self, delta: Tensor, state: State, level: Level) -> Sending:
        raise reject("the dense compressor", level, "no other level")

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        raise reject("the dense compressor", level, "no other level")
