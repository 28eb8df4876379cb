"""A compressor of a user."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import regimes


@dataclass(frozen=True, kw_only=True)
class RowMean(regimes.Compressor):
    linear = True
    strength: float = 1.0

    def check(self, level: float | int | str) -> None:
        if level != 1:
            raise regimes.ConfigError(f"level = {level!r}: expected 1")

    def exchange(self, bucket: regimes.Bucket, comm: regimes.Comm) -> Sequence[Tensor]:
        rows = [delta.mean(2) for delta in bucket.deltas]
        means = comm.mean(rows)
        bucket.subtract([row[..., None] for row in rows])
        shapes = [delta.shape[1:] for delta in bucket.deltas]
        return [mean[:, None].expand(shape) for mean, shape in zip(means, shapes, strict=True)]

    def traffic(
        self, layer: regimes.Layer, level: float | int | str, workers: int, itemsize: int = 4
    ) -> regimes.Traffic:
        assert_type(layer.matrix, tuple[int, int])
        return regimes.Traffic(layer.matrix[0], layer.matrix[0] * itemsize)


def use(model: DistributedDataParallel) -> regimes.Hook:
    regimes.check_compressor(RowMean(), 1, workers=(1, 2))
    return regimes.attach(model, compressor=RowMean(strength=0.5, error_feedback=False, level=1))
