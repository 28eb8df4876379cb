"""Deficits: training made worse in chosen epochs, to find critical periods.

Achille, Rovere & Soatto (2019) blur the images in a window of early epochs. The lost accuracy does
not come back after it; with a later window it does. What a deficit changes is a function of (seed,
epoch, sample), never of the number of workers, processes or the batch size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from regimes.base.capabilities import NAMED_TASK, SHARED_UPDATES
from regimes.base.config import Bounded, Bounds, Registry, check_windows, in_windows
from regimes.base.config.bounds import Count, Positive
from regimes.base.errors import require
from regimes.base.seeding import make_generator

REGISTRY = Registry(
    "deficit",
    {
        "blur": "regimes.data.deficits:Blur",
        "flip": "regimes.data.deficits:Flip",
        "noise": "regimes.data.deficits:ImageNoise",
        "other-task": "regimes.data.deficits:OtherTask",
        "labels": "regimes.data.deficits:Labels",
        "gradient-noise": "regimes.data.deficits:GradientNoise",
    },
    has=("windows", "inputs", "labels", "updates"),
)
UNDECLARED = frozenset({NAMED_TASK, SHARED_UPDATES})  # needed without ``requires``
BANK = 1024  # different noise images
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

    @property
    def requires(self) -> frozenset[str]:
        """Return what it needs of a job (``capabilities``)."""
        changes_updates = type(self).updates is not Deficit.updates
        return UNDECLARED if changes_updates else frozenset({NAMED_TASK})

    def active(self, epoch: int) -> bool:
        return in_windows(self.windows, epoch)

    def inputs(self, x: Images, index: Index, seed: int, epoch: int) -> Images:
        """Change the normalised images of the samples ``index``."""
        return x

    def labels(self, y: Targets, classes: int, seed: int) -> Targets:
        """Change all training labels."""
        return y

    def updates(self, updates: list[Tensor], seed: int, epoch: int, step: int) -> list[Tensor]:
        """Change a step's aggregated updates, in the same way on every process."""
        return updates


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
class Flip(Deficit):
    """Turns images upside down: a high-level deficit, which Achille et al. find harmless."""

    def inputs(self, x: Images, index: Index, seed: int, epoch: int) -> Images:
        return x.flip(2)


@dataclass(frozen=True)
class OtherTask(Flip):
    """Sets another task on the same samples: images upside down, each label replaced by (label +
    ``by``) mod classes."""

    by: Count = 3

    def labels(self, y: Targets, classes: int, seed: int) -> Targets:
        return (y + self.by) % classes


@dataclass(frozen=True)
class ImageNoise(Deficit):
    """Puts white noise in place of the images: sensory deprivation."""

    def inputs(self, x: Images, index: Index, seed: int, epoch: int) -> Images:
        bank = _noise_images(seed, x.shape[1:], x.dtype, x.device)
        return bank[(index.to(x.device) * 7919 + epoch * 104729) % BANK]


@functools.lru_cache(maxsize=1)
def _noise_images(
    seed: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "bank c h w"]:
    """A bank, because noise for each sample and epoch would cost a generator per sample."""
    return torch.randn(BANK, *shape, generator=make_generator(seed, "noise images")).to(
        device, dtype
    )


@dataclass(frozen=True)
class Labels(Deficit):
    """Replaces a fixed random subset of the labels, the same in every epoch, by random labels."""

    share: Annotated[float, Bounds("a share in (0, 1]", above=0, high=1)] = 1.0

    def labels(self, y: Targets, classes: int, seed: int) -> Targets:
        generator = make_generator(seed, "wrong labels")
        wrong = torch.randint(0, classes, y.shape, generator=generator)
        hit = torch.rand(y.shape, generator=generator) < self.share
        return torch.where(hit.to(y.device), wrong.to(y.device), y)


@dataclass(frozen=True)
class GradientNoise(Deficit):
    """Adds Gaussian noise to every update, of ``scale`` times its layer's root mean square."""

    scale: Positive = 1.0

    def updates(self, updates: list[Tensor], seed: int, epoch: int, step: int) -> list[Tensor]:
        generator = make_generator(seed, "gradient noise", epoch, step)
        noise = [torch.randn(u.shape, generator=generator) for u in updates]
        if updates[0].device.type == "cuda":  # one non-blocking copy for all layers
            flat = torch.cat([n.flatten() for n in noise]).pin_memory()
            there = flat.to(updates[0].device, non_blocking=True)
            noise = list(there.split([u.numel() for u in updates]))
        return [
            u + self.scale * u.square().mean().sqrt() * n.view(u.shape).to(u.dtype)
            for u, n in zip(updates, noise, strict=True)
        ]


def make_deficit(table: dict[str, Any] | None) -> Deficit:
    """Make the deficit of a configuration table; for None one that never acts."""
    return Deficit() if table is None else REGISTRY.make(table)
