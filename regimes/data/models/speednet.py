"""A small network that reaches in minutes what residual networks need hours for.

The layers of airbench94 (Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024; after
Page, "How to Train Your ResNet", 2019): 2x2 patches are whitened, then come three blocks of two
convolutions, whose first output channels start as copies of the input, and logits that start
small. In evaluation the logits of an image and of its mirror image are averaged. BatchNorm and the
bias of the whitened patches learn as everywhere here, at the rate of all layers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regimes.data.models.classifier import Features, Images

LEAST = 5e-4  # added to the variances: weak directions are noise
SCALE = 1 / 3  # of the logits
DIGITS = 4  # of the whitening: the last bits of an eigenvector differ between processors


def _conv(channels: int, width: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight[: min(channels, width)])
    return conv


class SpeedBlock(nn.Sequential):
    """Computes two units of gelu(bn(conv(x))); the first halves the image before it normalises."""

    def __init__(self, channels: int, width: int) -> None:
        first, second = _conv(channels, width), _conv(width, width)
        super().__init__(
            *(first, nn.MaxPool2d(2), nn.BatchNorm2d(width), nn.GELU()),
            *(second, nn.BatchNorm2d(width), nn.GELU()),
        )


class SpeedNet(nn.Module):
    """Classifies images by a small network that trains fast, as airbench94 (Jordan, 2024) does.

    A fixed convolution whitens patches of 2x2 pixels. Three blocks follow, with w, 4 w and 4 w
    channels for a width w, and one linear layer. It has 497,816 parameters for 10 classes at width
    32, and 1,972,504 at width 64, which is Jordan's. Images have at least 15 pixels a side.
    """

    whitening: Tensor  # [2 p, channels, 2, 2]: directions of patches, and their opposites

    def __init__(self, *, classes: int, channels: int, image_size: int, width: int = 32) -> None:
        super().__init__()
        self.channels, patch = channels, 4 * channels
        self.register_buffer("whitening", torch.empty(2 * patch, channels, 2, 2))
        self._set_whitening(torch.eye(patch))
        self.bias = nn.Parameter(torch.zeros(2 * patch))
        self.blocks = nn.Sequential(
            SpeedBlock(2 * patch, width),
            SpeedBlock(width, 4 * width),
            SpeedBlock(4 * width, 4 * width),
        )
        self.head = nn.Linear(4 * width, classes, bias=False)

    def start_from(self, x: Images) -> None:
        """Whiten 2x2 patches as these images have them, normalised as in training."""
        patches = functional.unfold(x.double(), 2).transpose(1, 2).flatten(0, 1)
        variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        largest = directions.abs().argmax(0, keepdim=True)  # an eigenvector has either sign
        directions = directions * directions.gather(0, largest).sign()
        self._set_whitening(
            (directions / (variances + LEAST).sqrt()).T.flip(0).round(decimals=DIGITS)
        )

    def _set_whitening(self, rows: Float[Tensor, "patch patch"]) -> None:
        both = torch.cat([rows, -rows]).unflatten(1, (self.channels, 2, 2))
        self.whitening.copy_(both)

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        if self.training:
            return self._logits(x)
        return (self._logits(x) + self._logits(x.flip(-1))) / 2

    def _logits(self, x: Images) -> Float[Tensor, "batch classes"]:
        patches = functional.gelu(functional.conv2d(x, self.whitening, self.bias))
        features: Features = self.blocks(patches)
        return self.head(features.amax((2, 3))) * SCALE
