"""Deficits: training made worse in chosen epochs, which is how critical periods were found.

Achille, Rovere & Soatto (2019) blur the images in a window of early epochs, take the blur away and
see that the accuracy lost does not come back; with a later window it does. A deficit here is a
frozen dataclass with ``windows`` of epochs, like a schedule's, and changes inputs, labels or
updates. What it does is a function of (seed, epoch, sample), never of W, P or the batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from regimes.config import check_windows, plug_in
from regimes.errors import ConfigError
from regimes.seeding import stream

REGISTRY = {
    "blur": "regimes.deficits:Blur",
    "flip": "regimes.deficits:Flip",
    "noise": "regimes.deficits:Noise",
    "labels": "regimes.deficits:Labels",
    "gradient-noise": "regimes.deficits:GradientNoise",
}
BANK = 1024  # different noise images


@dataclass(frozen=True)
class Deficit:
    """None at all; the base of the others.

    Attributes:
        windows: pairs ``[first, stop)`` of epochs in which it acts.

    Raises:
        ConfigError: a window that is none.
    """

    windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_windows("deficit.windows", self.windows)

    def active(self, epoch: int) -> bool:
        return any(first <= epoch < stop for first, stop in self.windows)

    def inputs(
        self, x: Float[Tensor, "n c h w"], index: Int64[Tensor, " n"], seed: int, epoch: int
    ) -> Float[Tensor, "n c h w"]:
        """The normalised images of the samples ``index``, changed."""
        return x

    def labels(
        self, y: Int64[Tensor, " train"], classes: int, seed: int
    ) -> Int64[Tensor, " train"]:
        """The whole training set's labels, changed."""
        return y

    def updates(self, updates: list[Tensor], seed: int, epoch: int, step: int) -> list[Tensor]:
        """A step's aggregated updates, changed alike on every process."""
        return updates


@dataclass(frozen=True)
class Blur(Deficit):
    """Images averaged down by ``factor`` and brought back bilinearly (Achille et al., section 2:
    32 x 32 to 8 x 8)."""

    factor: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 2:
            raise ConfigError(f"deficit.factor must be at least 2, got {self.factor}")

    def inputs(
        self, x: Float[Tensor, "n c h w"], index: Int64[Tensor, " n"], seed: int, epoch: int
    ) -> Float[Tensor, "n c h w"]:
        h, w = x.shape[2:]
        if min(h, w) < self.factor:
            raise ConfigError(f"deficit.factor = {self.factor} is larger than the {h}x{w} images")
        small = F.adaptive_avg_pool2d(x, (h // self.factor, w // self.factor))
        return F.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Flip(Deficit):
    """Images upside down: a high-level deficit, which Achille et al. find harmless."""

    def inputs(
        self, x: Float[Tensor, "n c h w"], index: Int64[Tensor, " n"], seed: int, epoch: int
    ) -> Float[Tensor, "n c h w"]:
        return x.flip(2)


@dataclass(frozen=True)
class Noise(Deficit):
    """White noise in place of the images: sensory deprivation."""

    def inputs(
        self, x: Float[Tensor, "n c h w"], index: Int64[Tensor, " n"], seed: int, epoch: int
    ) -> Float[Tensor, "n c h w"]:
        bank = torch.randn(BANK, *x.shape[1:], generator=stream(seed, "noise images"))
        return bank[(index.cpu() * 7919 + epoch * 104729) % BANK].to(x)


@dataclass(frozen=True)
class Labels(Deficit):
    """A share of the labels, always the same, replaced by random ones."""

    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise ConfigError(f"deficit.share must lie in (0, 1], got {self.share}")

    def labels(
        self, y: Int64[Tensor, " train"], classes: int, seed: int
    ) -> Int64[Tensor, " train"]:
        generator = stream(seed, "wrong labels")
        wrong = torch.randint(0, classes, y.shape, generator=generator)
        hit = torch.rand(y.shape, generator=generator) < self.share
        return torch.where(hit.to(y.device), wrong.to(y.device), y)


@dataclass(frozen=True)
class GradientNoise(Deficit):
    """Gaussian noise on every update, of ``scale`` times its layer's root mean square."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scale > 0:
            raise ConfigError(f"deficit.scale must be positive, got {self.scale}")

    def updates(self, updates: list[Tensor], seed: int, epoch: int, step: int) -> list[Tensor]:
        generator = stream(seed, "gradient noise", epoch, step)
        return [
            u
            + self.scale
            * u.square().mean().sqrt()
            * torch.randn(u.shape, generator=generator).to(u)
            for u in updates
        ]


def deficit(table: dict[str, Any] | None) -> Deficit:
    """The deficit that a configuration table names; one that never acts for None."""
    return Deficit() if table is None else plug_in("deficit", table, REGISTRY)
