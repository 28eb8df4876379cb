"""Networks and batches that are timed: the paper's and GPT-2, or small ones to rehearse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.gpu.place import Place
from regimes.data.models.transformer import GPT

UNITS = 6  # of a measurement; the first two are not counted


@dataclass(frozen=True)
class Size:
    """Of the network and its batches; ``steps`` in a unit."""

    model: str = "resnet18-cifar10"
    width: int | None = None
    batch: int = 128
    steps: int = 25
    side: int = 32

    @property
    def shape(self) -> tuple[int, ...]:
        return 4 * self.batch, 3, self.side, self.side


def size(place: Place) -> Size:
    """The paper's, or small enough to rehearse."""
    return Size() if place.large else Size("vgg7", 4, 4, 4)


class Logits(nn.Module):
    """A language model's logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)[0]
        return logits


@dataclass(frozen=True)
class TextSize:
    """Of GPT-2 124M and its batches; ``steps`` in a unit."""

    vocabulary: int = 50257
    sequence: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    batch: int = 4
    steps: int = 10

    def network(self) -> nn.Module:
        return Logits(
            GPT(
                classes=self.vocabulary,
                sequence=self.sequence,
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                positions="learned",
            )
        )

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Texts and their next tokens."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(self.vocabulary, (count, self.sequence + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def text_size(place: Place) -> TextSize:
    return TextSize() if place.large else TextSize(300, 8, 16, 1, 2, 2, 4)
