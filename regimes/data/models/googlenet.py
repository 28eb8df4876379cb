"""GoogLeNet (Inception with BatchNorm) for small images, of the paper's Tables 8 and 9.

Szegedy et al., "Going Deeper with Convolutions" (2015), Table 1, in the widely used variant for
32x32 images (github.com/kuangliu/pytorch-cifar; github.com/weiaicunzai/pytorch-cifar100 has the
same layers and dropout 0.4): one 3x3 convolution as the stem, BatchNorm after every convolution
(which keeps its bias), two 3x3 convolutions in place of a 5x5, no auxiliary heads. PyTorch's
default init.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.data.models.classifier import Classifier, Images, conv_unit

STEM = 192  # channels before the first inception; the widths below are for so many
INCEPTIONS = (  # per stage: 1x1, before 3x3, 3x3, before 5x5, 5x5, after the pool
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Computes four branches side by side: 1x1; 1x1, 3x3; 1x1, 3x3, 3x3; 3x3 max-pool, 1x1."""

    def __init__(self, channels: int, widths: list[int]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = widths
        self.one = conv_unit(channels, one, 1)
        self.three = nn.Sequential(
            conv_unit(channels, before_three, 1), conv_unit(before_three, three)
        )
        self.five = nn.Sequential(
            conv_unit(channels, before_five, 1), conv_unit(before_five, five), conv_unit(five, five)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv_unit(channels, pooled, 1))

    def forward(self, x: Images) -> Float[Tensor, "batch features height width"]:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def googlenet(
    *, classes: int, channels: int, image_size: int, width: int = STEM, dropout: float = 0.0
) -> Classifier:
    """Build GoogLeNet, with 6,166,250 parameters for 10 classes (Table 8) and 6,258,500 for 100
    (Table 9, dropout 0.4).

    Args:
        width: channels of the stem; all others are scaled with it (rounded down, at least 1).
        dropout: before the linear layer.
    """
    blocks: list[nn.Module] = []
    stem = conv_unit(channels, width)
    features = width
    for stage, inceptions in enumerate(INCEPTIONS):
        if stage > 0:
            blocks.append(nn.MaxPool2d(3, 2, padding=1))
        for row in inceptions:
            widths = [max(1, w * width // STEM) for w in row]
            blocks.append(Inception(features, widths))
            features = widths[0] + widths[2] + widths[4] + widths[5]
    return Classifier(stem, nn.Sequential(*blocks), features, classes, dropout)
