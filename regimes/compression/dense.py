"""No compression: the mean of the gradients, as a compressor like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regimes.collectives.requests import Layer, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.config import DENSE, Level
from regimes.errors import ConfigError, unexpected


@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Its one level is "dense", which ``Compressor.reduce`` sends."""

    linear: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": DENSE}

    def check(self, level: Level) -> None:
        if level != DENSE:
            raise _none(level)

    def send(self, delta: Tensor, state: State, level: Level) -> Sending:
        raise _none(level)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        raise _none(level)


def _none(level: Level) -> ConfigError:
    return unexpected("level of dense", level, '"dense", there is no other level')
