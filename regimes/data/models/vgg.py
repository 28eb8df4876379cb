"""VGG networks for small images: two that the paper trains, and a small one for a CPU.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition"
(2015), configuration E with batch normalisation (VGG-19bn), in the two widely used variants for
32x32 images with the parameter counts of the paper's Tables 8 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from regimes.base.errors import require
from regimes.data.models.classifier import Images, conv_unit

# stages of convolutions: the channels of each, in multiples of the width
VGG7 = ((1, 1), (2, 2), (4, 4))
VGG19 = ((1, 1), (2, 2), (4, 4, 4, 4), (8, 8, 8, 8), (8, 8, 8, 8))


class VGG(nn.Module):
    """Applies stages of 3x3 convolutions, each stage ended by a 2x2 max-pool; then a head."""

    def __init__(self, features: nn.Sequential, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        return self.head(self.features(x).flatten(1))


def _make_stages(
    multiples: Sequence[Sequence[int]], width: int, channels: int, image_size: int, bias: bool
) -> tuple[nn.Sequential, int]:
    """The convolutional part, and how many numbers it leaves per image."""
    halvings = len(multiples)
    pooled, rest = divmod(image_size, 2**halvings)
    divisible = f"divisible by {2**halvings}, halved {halvings} times"
    own_images = "(data.resize makes images of your own any size)"
    require(pooled > 0 and not rest, "data.image_size", image_size, f"{divisible} {own_images}")
    layers: list[nn.Module] = []
    for stage in multiples:
        for multiple in stage:
            layers += conv_unit(channels, multiple * width, bias=bias)
            channels = multiple * width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers), channels * pooled**2


def vgg7(*, classes: int, channels: int, image_size: int, width: int = 16) -> VGG:
    """Build six convolutions (w, w, 2w, 2w, 4w, 4w; no bias) and one linear layer; default init.

    For tests and laptops: 18,482 parameters for digits (8x8x1, width 8), 74,874 for CIFAR-10 pooled
    to 16x16x3 (width 16).
    """
    features, size = _make_stages(VGG7, width, channels, image_size, bias=False)
    return VGG(features, nn.Linear(size, classes))


def vgg19bn_cifar10(
    *, classes: int, channels: int, image_size: int, width: int = 64, dropout: float = 0.5
) -> VGG:
    """Build VGG-19bn of Table 8: 20,565,834 parameters (10 classes).

    The variant of github.com/chengyangfu/pytorch-vgg-cifar10: convolutions with bias, a head
    512-512-512-10 with dropout 0.5 before its first two layers; convolutions start from
    N(0, 2 / (9 x output channels)) and bias 0, all else from PyTorch's default.
    """
    features, size = _make_stages(VGG19, width, channels, image_size, bias=True)
    hidden = 8 * width
    head = nn.Sequential(
        *(nn.Dropout(dropout), nn.Linear(size, hidden), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )
    for module in features:
        if isinstance(module, nn.Conv2d):
            assert module.bias is not None
            nn.init.normal_(module.weight, std=math.sqrt(2 / (9 * module.out_channels)))
            nn.init.zeros_(module.bias)
    return VGG(features, head)


def vgg19bn_cifar100(
    *, classes: int, channels: int, image_size: int, width: int = 64, dropout: float = 0.5
) -> VGG:
    """Build VGG-19bn of Table 9: 39,327,652 parameters (100 classes).

    The variant of github.com/weiaicunzai/pytorch-cifar100: convolutions with bias, a head
    512-4096-4096-100 with dropout 0.5 after its first two layers; PyTorch's default init.
    """
    features, size = _make_stages(VGG19, width, channels, image_size, bias=True)
    hidden = 64 * width
    head = nn.Sequential(
        *(nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(hidden, classes),
    )
    return VGG(features, head)
