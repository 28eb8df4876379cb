"""Squeeze-and-excitation ResNet-18 for small images, in the two variants of the paper.

Hu et al., "Squeeze-and-Excitation Networks" (2018): each block weighs its channels by a small
network of their means (reduction 16). Table 8 counts the pre-activation variant of
github.com/kuangliu/pytorch-cifar; Table 9, and the traffic of every SENet row in Tables 1-4, belong
to that of github.com/weiaicunzai/pytorch-cifar100: convolutions with bias, ReLU before the
weighing, 516 channels in the last stage. PyTorch's default init.
"""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from regimes.models.classifier import Classifier, Features, Images, conv_stem, stages

REDUCTION = 16


class SqueezeExcite(nn.Module):
    """x * sigmoid(linear(relu(linear(mean of x over the image)))), one factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = max(1, channels // REDUCTION)
        self.squeeze = nn.Linear(channels, squeezed)
        self.excite = nn.Linear(squeezed, channels)

    def forward(self, x: Images) -> Images:
        weights = self.excite(functional.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return x * weights[:, :, None, None]


class Block(nn.Module):
    """relu(se(relu(bn(conv(relu(bn(conv(x))))))) + shortcut(x)); convolutions have biases."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(nn.Conv2d(channels, width, 3, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut.append(nn.Conv2d(channels, width, 1, stride))
            self.shortcut.append(nn.BatchNorm2d(width))
        self.weigh = SqueezeExcite(width)

    def forward(self, x: Images) -> Features:
        return functional.relu(self.weigh(self.residual(x)) + self.shortcut(x))


class PreActivationBlock(nn.Module):
    """se(conv(relu(bn(conv(a))))) + shortcut, a = relu(bn(x)); the shortcut is a 1x1 convolution
    of a where shapes differ, else x. No biases in convolutions, as in He et al., "Identity
    Mappings in Deep Residual Networks" (2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or channels != width:
            self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)
        self.weigh = SqueezeExcite(width)

    def forward(self, x: Images) -> Features:
        a = functional.relu(self.bn1(x))
        y = self.weigh(self.conv2(functional.relu(self.bn2(self.conv1(a)))))
        return y + (x if self.shortcut is None else self.shortcut(a))


def senet18(*, classes: int, channels: int, image_size: int, width: int = 64) -> Classifier:
    """Pre-activation SE-ResNet-18 of Table 8: 11,260,354 parameters for 10 classes."""
    stem = conv_stem(channels, width, bias=False)
    blocks = stages(PreActivationBlock, width, [width, 2 * width, 4 * width, 8 * width], 2)
    return Classifier(stem, nn.Sequential(*blocks), 8 * width, classes)


def se_resnet18(*, classes: int, channels: int, image_size: int, width: int = 64) -> Classifier:
    """SE-ResNet-18 of Table 9: 11,436,256 parameters for 100 classes, 11,389,726 for 10."""
    last = 8 * width + width // 16  # 516 at width 64
    stem = conv_stem(channels, width, bias=True)
    blocks = stages(Block, width, [width, 2 * width, 4 * width, last], 2)
    return Classifier(stem, nn.Sequential(*blocks), last, classes)
