"""Deficits: training made worse in chosen epochs, to find critical periods.

Achille, Rovere & Soatto (2019) blur the images in a window of early epochs. The lost accuracy does
not come back after it; with a later window it does. What a deficit changes is a function of (seed,
epoch, sample), never of the number of workers, processes or the batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from regimes.base.capabilities import NAMED_TASK
from regimes.base.config import Bounded, Bounds, Registry, check_windows, in_windows
from regimes.base.errors import require
from regimes.base.seeding import make_generator

REGISTRY = Registry(
    "deficit",
    {
        "blur": "regimes.data.deficits:Blur",
        "labels": "regimes.data.deficits:Labels",
    },
    has=("windows", "inputs", "labels"),
)
NEEDS = frozenset({NAMED_TASK})  # of every deficit
Images = Float[Tensor, "n c h w"]
Index = Int64[Tensor, " n"]
Targets = Int64[Tensor, " train"]


@dataclass(frozen=True)
class Deficit(Bounded):
    """Changes nothing: the base class of deficits. ``windows`` are pairs ``[first, stop)`` of
    epochs."""

    bounds_prefix: ClassVar[str] = "deficit."
    windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows("deficit.windows", self.windows)

    def active(self, epoch: int) -> bool:
        return in_windows(self.windows, epoch)

    def inputs(self, x: Images, index: Index, seed: int, epoch: int) -> Images:
        """Change the normalised images of the samples ``index``."""
        return x

    def labels(self, y: Targets, classes: int, seed: int) -> Targets:
        """Change all training labels."""
        return y


@dataclass(frozen=True)
class Blur(Deficit):
    """Averages images down by ``factor`` and resizes them back (Achille et al.)."""

    factor: Annotated[int, Bounds("at least 2", low=2)] = 4

    def inputs(self, x: Images, index: Index, seed: int, epoch: int) -> Images:
        h, w = x.shape[2:]
        fits = self.factor <= min(h, w)
        require(fits, "deficit.factor", self.factor, f"at most the size of the {h}x{w} images")
        small = F.adaptive_avg_pool2d(x, (h // self.factor, w // self.factor))
        return F.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Labels(Deficit):
    """Replaces a fixed random subset of the labels, the same in every epoch, by random labels."""

    share: Annotated[float, Bounds("a share in (0, 1]", above=0, high=1)] = 1.0

    def labels(self, y: Targets, classes: int, seed: int) -> Targets:
        generator = make_generator(seed, "wrong labels")
        wrong = torch.randint(0, classes, y.shape, generator=generator)
        hit = torch.rand(y.shape, generator=generator) < self.share
        return torch.where(hit.to(y.device), wrong.to(y.device), y)


def make_deficit(table: dict[str, Any] | None) -> Deficit:
    """Make the deficit of a configuration table; for None one that never acts."""
    return Deficit() if table is None else REGISTRY.make(table)
