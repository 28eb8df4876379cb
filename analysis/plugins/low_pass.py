"""A compressor that is late and selects nothing: the study's control of error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regimes.base.config import DENSE, Level
from regimes.base.errors import require
from regimes.collectives.comm import Comm
from regimes.compression.bucket import Bucket
from regimes.compression.elementwise import Dense


@dataclass(frozen=True, kw_only=True)
class LowPass(Dense):
    """Sends a share of gradient plus residual in each step; the level is that share. It saves
    nothing: an experiment with the delay of error feedback and without a compressor's selection.
    Of the squared norm of gradient plus residual 1 - (1 - share)^2 is sent."""

    one_level: ClassVar[bool] = False
    usual: ClassVar[Mapping[str, Level]] = {"low": 0.5, "high": 0.1}

    def check(self, level: Level) -> None:
        number = isinstance(level, int | float) and not isinstance(level, bool)
        good = level == DENSE or (number and 0 < float(level) <= 1)
        require(good, "level of low-pass", level, 'a share above 0 and at most 1, or "dense"')

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        shares = [float(level) for level in bucket.levels]
        means = comm.mean(bucket.deltas)
        bucket.subtract([x * share for x, share in zip(bucket.deltas, shares, strict=True)])
        return [mean * share for mean, share in zip(means, shares, strict=True)]
