"""What all image families but VGG share: blocks, a mean over the image, one linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor, nn

Images = Float[Tensor, "batch channels height width"]
Features = Float[Tensor, "batch features rows columns"]


class Classifier(nn.Module):
    """Classifies images of any size: a stem, blocks that leave ``features`` channels, their mean
    over the image (with dropout, if any) and a linear layer."""

    def __init__(
        self, stem: nn.Module, blocks: nn.Module, features: int, classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem, self.blocks = stem, blocks
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        return self.head(self.dropout(self.blocks(self.stem(x)).mean((2, 3))))


def conv_unit(
    channels: int, width: int, kernel: int = 3, stride: int = 1, bias: bool = True
) -> nn.Sequential:
    """Make relu(bn(conv(x))); output height and width are the input's divided by ``stride``."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=bias)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())


def list_blocks(
    block: Callable[[int, int, int], nn.Module], features: int, widths: Sequence[int], count: int
) -> list[nn.Module]:
    """Make ``count`` blocks (input channels, output channels, stride) of each width; each stage but
    the first halves the image."""
    layers = []
    for stage, width in enumerate(widths):
        for i in range(count):
            layers.append(block(features, width, 2 if stage > 0 and i == 0 else 1))
            features = width
    return layers
