"""Residual networks for small images: ResNet-18 as the paper trains it, and a small one for a CPU.

He et al., "Deep Residual Learning for Image Recognition" (2016), in the widely used variant for
32x32 images (github.com/kuangliu/pytorch-cifar; github.com/weiaicunzai/pytorch-cifar100 has the
same layers): a 3x3 stem without max-pool, no biases in convolutions, PyTorch's default init.
"""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from regimes.models.classifier import Classifier, Features, Images, conv_stem, stages


class Block(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); the shortcut is 1x1 where shapes differ."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut.append(nn.Conv2d(channels, width, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(width))

    def forward(self, x: Images) -> Features:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(*, classes: int, channels: int, image_size: int, width: int = 64) -> Classifier:
    """ResNet-18 of Tables 8 and 9: 11,173,962 parameters for 10 classes, 11,220,132 for 100."""
    return _resnet(classes, channels, [width, 2 * width, 4 * width, 8 * width], 2)


def resnet8(*, classes: int, channels: int, image_size: int, width: int = 16) -> Classifier:
    """Three blocks (w, 2w, 4w), for tests and laptops: 78,042 parameters for CIFAR-10, width 16."""
    return _resnet(classes, channels, [width, 2 * width, 4 * width], 1)


def _resnet(classes: int, channels: int, widths: list[int], count: int) -> Classifier:
    stem = conv_stem(channels, widths[0], bias=False)
    blocks = stages(Block, widths[0], widths, count)
    return Classifier(stem, nn.Sequential(*blocks), widths[-1], classes)
