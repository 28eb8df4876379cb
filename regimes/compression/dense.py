"""No compression: the mean of the gradients as a compressor, at once or delayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Layer, Mean, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.config import DENSE, Level
from regimes.errors import ConfigError, require, unexpected


@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Its one level is "dense", which ``Compressor.reduce`` sends."""

    linear: ClassVar[bool] = True
    propagates_nonfinite: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": DENSE}

    def check(self, level: Level) -> None:
        if level != DENSE:
            raise _unknown(level)

    def send(self, delta: Tensor, state: State, level: Level) -> Sending:
        raise _unknown(level)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        raise _unknown(level)


@dataclass(frozen=True, kw_only=True)
class LowPass(Compressor):
    """Sends a share of gradient plus residual in each step; the level is that share. It saves
    nothing: an experiment with the delay of error feedback and without a compressor's selection.
    Of the squared norm of gradient plus residual 1 - (1 - share)^2 is sent."""

    linear: ClassVar[bool] = True
    propagates_nonfinite: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 0.5, "high": 0.1}

    def check(self, level: Level) -> None:
        number = isinstance(level, int | float) and not isinstance(level, bool)
        good = level == DENSE or (number and 0 < float(level) <= 1)
        require(good, "level of low-pass", level, 'a share above 0 and at most 1, or "dense"')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        mean = yield Mean(delta)
        return mean * float(level), delta * float(level)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return Traffic(layer.size, layer.size * itemsize)


def _unknown(level: Level) -> ConfigError:
    return unexpected("level of dense", level, '"dense", there is no other level')
