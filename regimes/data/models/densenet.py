"""DenseNet with 121 layers and growth 12, of the paper's Tables 8 and 9.

Huang et al., "Densely Connected Convolutional Networks" (2017), DenseNet-BC (bottlenecks,
reduction 0.5), in the variant of github.com/kuangliu/pytorch-cifar for 32x32 images: a 3x3 stem
without normalisation, no biases in convolutions, PyTorch's default init.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regimes.base.errors import require
from regimes.data.models.classifier import Classifier, Images

BLOCKS = (6, 12, 24, 16)  # layers of each dense block, as in DenseNet-121
BOTTLENECK = 4  # width of the 1x1 convolution, in multiples of the growth


class DenseLayer(nn.Module):
    """Appends ``growth`` channels to x: conv3x3(relu(bn(conv1x1(relu(bn(x))))))."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        inner = BOTTLENECK * growth
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, growth, 3, padding=1, bias=False)

    def forward(self, x: Images) -> Float[Tensor, "batch more height width"]:
        y = self.conv1(functional.relu(self.bn1(x)))
        return torch.cat([x, self.conv2(functional.relu(self.bn2(y)))], dim=1)


def densenet121(*, classes: int, channels: int, image_size: int, width: int = 24) -> Classifier:
    """Build DenseNet-121, with 1,000,618 parameters for 10 classes and 1,035,268 for 100; the
    growth is half the width."""
    require(width % 2 == 0, "model.width", width, "an even one: DenseNet grows by half its width")
    require(image_size >= 8, "data.image_size", image_size, "at least 8, halved 3 times")
    growth, features = width // 2, width
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    blocks: list[nn.Module] = []
    for stage, count in enumerate(BLOCKS):
        if stage > 0:  # a transition that halves the image: mean2x2(conv1x1(relu(bn(x))))
            narrow = nn.Conv2d(features, features // 2, 1, bias=False)
            halve = (nn.BatchNorm2d(features), nn.ReLU(), narrow, nn.AvgPool2d(2))
            blocks.append(nn.Sequential(*halve))
            features //= 2
        for _ in range(count):
            blocks.append(DenseLayer(features, growth))
            features += growth
    blocks += [nn.BatchNorm2d(features), nn.ReLU()]
    return Classifier(stem, nn.Sequential(*blocks), features, classes)
