"""Residual networks for small images: ResNet, SENet and WideResNet as the paper trains them, and a
small ResNet for a CPU. All start from PyTorch's default initialisation, and average over the image,
so that every ``image_size`` has the same layers.

- ResNet: He et al., "Deep Residual Learning for Image Recognition" (2016), in the variant of
  github.com/kuangliu/pytorch-cifar (github.com/weiaicunzai/pytorch-cifar100 has the same layers): a
  3x3 stem without max-pool, no biases in convolutions.
- SENet: Hu et al., "Squeeze-and-Excitation Networks" (2018): each block weighs its channels by a
  small network of their means. Table 8 counts the pre-activation variant of kuangliu; Table 9, and
  the traffic of every SENet row in Tables 1-4, belong to the authors' copy of weiaicunzai's:
  convolutions with bias, ReLU before the weighing, 516 channels in the last stage
  (github.com/uw-mad-dash/Accordion; weiaicunzai's has 512).
- WideResNet: Zagoruyko and Komodakis, "Wide Residual Networks" (2016), in the variant of
  github.com/meliketoy/wide-resnet.pytorch: convolutions with bias, 1x1 shortcuts with bias and
  without BatchNorm, the stride in a block's second convolution. The momentum of the last BatchNorm
  is PyTorch's 0.1 (theirs: 0.9).
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn import functional

from regimes.data.models.classifier import Classifier, Features, Images, conv_unit, list_blocks

REDUCTION = 16  # SqueezeExcite divides the channels by it (its paper's)
WIDEN = 10  # times the channels of a plain ResNet, as in WRN-28-10
# On processors with AVX2 and without AVX-512, oneDNN 3.12 (torch 2.13) computes wrong gradients of
# the weights of a 1x1 convolution with a stride and fewer channels, in channels-last memory.
FEWEST = 8  # channels from which on it computes them rightly
WIDE_BLOCKS = 4  # per stage: (28 - 4) / 6


class ResidualBlock(nn.Module):
    """Computes relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); the shortcut is 1x1 where shapes
    differ."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _make_shortcut(channels, width, stride, bias=False)

    def forward(self, x: Images) -> Features:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Shortcut(nn.Conv2d):
    """Convolves 1x1, with a stride."""

    def forward(self, x: Images) -> Features:
        if self.in_channels >= FEWEST or self.stride[0] == 1:
            return super().forward(x)
        across, down = self.stride
        return functional.conv2d(x[:, :, ::across, ::down], self.weight, self.bias)


def _make_shortcut(channels: int, width: int, stride: int, bias: bool) -> nn.Sequential:
    if stride == 1 and channels == width:
        return nn.Sequential()
    return nn.Sequential(Shortcut(channels, width, 1, stride, bias=bias), nn.BatchNorm2d(width))


def resnet18(*, classes: int, channels: int, image_size: int, width: int = 64) -> Classifier:
    """Build ResNet-18 of Tables 8 and 9: 11,173,962 parameters for 10 classes, 11,220,132 for
    100."""
    return _make_resnet(ResidualBlock, classes, channels, [width, 2 * width, 4 * width, 8 * width])


def resnet8(*, classes: int, channels: int, image_size: int, width: int = 16) -> Classifier:
    """Build three blocks (w, 2w, 4w), for tests and laptops: 78,042 parameters for CIFAR-10, width
    16."""
    return _make_resnet(ResidualBlock, classes, channels, [width, 2 * width, 4 * width], count=1)


def resnet20(*, classes: int, channels: int, image_size: int, width: int = 16) -> Classifier:
    """Build nine blocks (w, 2w, 4w), He et al. (2016), Section 4.2, with 1x1 shortcuts (option B):
    272,474 parameters for CIFAR-10, width 16."""
    return _make_resnet(ResidualBlock, classes, channels, [width, 2 * width, 4 * width], count=3)


def _make_resnet(
    block: type[nn.Module],
    classes: int,
    channels: int,
    widths: list[int],
    count: int = 2,
    bias: bool = False,
) -> Classifier:
    stem = conv_unit(channels, widths[0], bias=bias)
    blocks = list_blocks(block, widths[0], widths, count)
    return Classifier(stem, nn.Sequential(*blocks), widths[-1], classes)


# -- SENet -----------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Weighs channels: x * sigmoid(linear(relu(linear(mean of x over the image)))), one factor per
    channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = max(1, channels // REDUCTION)
        self.squeeze = nn.Linear(channels, squeezed)
        self.excite = nn.Linear(squeezed, channels)

    def forward(self, x: Images) -> Images:
        weights = self.excite(functional.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return x * weights[:, :, None, None]


class SqueezeExciteBlock(nn.Module):
    """Computes relu(se(relu(bn(conv(relu(bn(conv(x))))))) + shortcut(x)); convolutions have
    biases."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = conv_unit(channels, width, 3, stride), conv_unit(width, width)
        self.residual = nn.Sequential(*first, *second)
        self.shortcut = _make_shortcut(channels, width, stride, bias=True)
        self.weigh = SqueezeExcite(width)

    def forward(self, x: Images) -> Features:
        return functional.relu(self.weigh(self.residual(x)) + self.shortcut(x))


class PreActivationBlock(nn.Module):
    """Computes se(conv(relu(bn(conv(a))))) + shortcut, a = relu(bn(x)); the shortcut is a 1x1
    convolution of a where shapes differ, else x. Convolutions have no biases, as in He et al.,
    "Identity Mappings in Deep Residual Networks" (2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or channels != width:
            self.shortcut = Shortcut(channels, width, 1, stride, bias=False)
        self.weigh = SqueezeExcite(width)

    def forward(self, x: Images) -> Features:
        a = functional.relu(self.bn1(x))
        y = self.weigh(self.conv2(functional.relu(self.bn2(self.conv1(a)))))
        return y + (x if self.shortcut is None else self.shortcut(a))


def senet18(*, classes: int, channels: int, image_size: int, width: int = 64) -> Classifier:
    """Build the pre-activation SE-ResNet-18 of Table 8: 11,260,354 parameters for 10 classes."""
    widths = [width, 2 * width, 4 * width, 8 * width]
    return _make_resnet(PreActivationBlock, classes, channels, widths)


def se_resnet18(*, classes: int, channels: int, image_size: int, width: int = 64) -> Classifier:
    """Build SE-ResNet-18 of Table 9: 11,436,256 parameters for 100 classes, 11,389,726 for 10."""
    widths = [width, 2 * width, 4 * width, 8 * width + width // 16]  # the last is 516 at width 64
    return _make_resnet(SqueezeExciteBlock, classes, channels, widths, bias=True)


# -- WideResNet ------------------------------------------------------------------------------


class WideBlock(nn.Module):
    """Computes conv(relu(bn(dropout(conv(relu(bn(x))))))) + shortcut(x), a 1x1 one where shapes
    differ."""

    def __init__(self, channels: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = Shortcut(channels, width, 1, stride)

    def forward(self, x: Images) -> Features:
        y = self.dropout(self.conv1(functional.relu(self.bn1(x))))
        return self.conv2(functional.relu(self.bn2(y))) + self.shortcut(x)


def wideresnet28_10(
    *, classes: int, channels: int, image_size: int, width: int = 16, dropout: float = 0.0
) -> Classifier:
    """Build WideResNet-28-10, with 36,489,290 parameters for 10 classes and 36,546,980 for 100, in
    stages of 10 w, 20 w, 40 w. The authors trained without dropout."""
    stem = nn.Conv2d(channels, width, 3, padding=1)
    widths = [width * WIDEN * multiple for multiple in (1, 2, 4)]
    blocks = list_blocks(partial(WideBlock, dropout=dropout), width, widths, WIDE_BLOCKS)
    blocks += [nn.BatchNorm2d(widths[-1]), nn.ReLU()]
    return Classifier(stem, nn.Sequential(*blocks), widths[-1], classes)
