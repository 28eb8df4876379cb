"""WideResNet-28-10 of the paper's Tables 8 and 9.

Zagoruyko and Komodakis, "Wide Residual Networks" (2016), in the variant of
github.com/meliketoy/wide-resnet.pytorch: convolutions with bias, 1x1 shortcuts with bias and
without BatchNorm, the stride in the second convolution of a block. PyTorch's default init; the
momentum of the last BatchNorm is PyTorch's 0.1 (theirs: 0.9).
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn import functional

from regimes.models.classifier import Classifier, Features, Images, stages

WIDEN = 10
BLOCKS = 4  # per stage: (28 - 4) / 6


class WideBlock(nn.Module):
    """conv(relu(bn(dropout(conv(relu(bn(x))))))) + shortcut(x), a 1x1 one where shapes differ."""

    def __init__(self, channels: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: Images) -> Features:
        y = self.dropout(self.conv1(functional.relu(self.bn1(x))))
        return self.conv2(functional.relu(self.bn2(y))) + self.shortcut(x)


def wideresnet28_10(
    *, classes: int, channels: int, image_size: int, width: int = 16, dropout: float = 0.0
) -> Classifier:
    """36,489,290 parameters for 10 classes, 36,546,980 for 100; stages of 10 w, 20 w, 40 w. The
    authors trained without dropout."""
    stem = nn.Conv2d(channels, width, 3, padding=1)
    widths = [width * WIDEN * multiple for multiple in (1, 2, 4)]
    blocks = stages(partial(WideBlock, dropout=dropout), width, widths, BLOCKS)
    blocks += [nn.BatchNorm2d(widths[-1]), nn.ReLU()]
    return Classifier(stem, nn.Sequential(*blocks), widths[-1], classes)
