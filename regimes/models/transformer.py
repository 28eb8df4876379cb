"""A small causal Transformer language model: beyond the paper, which names larger language models
as future work.

Vaswani et al., "Attention Is All You Need" (2017): decoder blocks of attention and a perceptron,
sinusoidal positions; normalisation in front of each (Xiong et al., "On Layer Normalization in the
Transformer Architecture", 2020), GELU, output and input embedding one matrix.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from regimes.errors import require

HEAD = 32  # width of an attention head
MLP = 4  # width of the perceptrons, in multiples of the width


class Transformer(nn.Module):
    """classes w + depth (12 w^2 + 13 w) + 2 w parameters at width w: 3,699,840 for 10,000 words.

    The embedding starts from N(0, 1 / w), the other matrices from Xavier's uniform distribution.

    Args:
        classes: words in the vocabulary.
        width: a multiple of 32, the width of a head; or an even number below, with one head.
        depth: blocks.
        dropout: behind the embedding, of the attention weights, and in and behind both halves.
    """

    text: ClassVar[bool] = True
    head: ClassVar[None] = None  # the logits are products with the embedding

    def __init__(
        self, *, classes: int, width: int = 192, depth: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        heads_fit = width % (HEAD if width > HEAD else 2) == 0
        require(heads_fit, "model.width", width, f"a multiple of {HEAD}, or even and below {HEAD}")
        self.embedding = nn.Embedding(classes, width)
        self.dropout = nn.Dropout(dropout)
        heads = max(1, width // HEAD)
        block = nn.TransformerEncoderLayer(
            width, heads, MLP * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for parameter in self.blocks.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)  # torch's blocks are copies of one
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(
        self, tokens: Int64[Tensor, "batch time"], hidden: None = None
    ) -> tuple[Float[Tensor, "batch time words"], None]:
        """Logits of each next word, from this and earlier words of the same sequence."""
        weight = self.embedding.weight
        width, time = weight.shape[1], tokens.shape[1]
        x = self.dropout(self.embedding(tokens) * math.sqrt(width) + positions(time, weight))
        mask = nn.Transformer.generate_square_subsequent_mask(time, x.device, x.dtype)
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            x = self.blocks(x, mask, is_causal=True)
        return functional.linear(x, weight), None


def positions(time: int, like: Float[Tensor, "words width"]) -> Float[Tensor, "{time} width"]:
    """sin(t / 10,000^(2 i / width)) for all i, then the cosines (Vaswani et al., section 3.5)."""
    half = like.shape[1] // 2
    place = torch.arange(time, device=like.device, dtype=like.dtype)
    rate = 10_000 ** -(torch.arange(half, device=like.device, dtype=like.dtype) / half)
    angle = place[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)
