"""A decoder-only Transformer in today's form: beyond the paper, which names larger language models
as future work.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019, GPT-2): blocks of
causal attention and a perceptron of four times the width with GELU, LayerNorm in front of each and
behind the last; matrices from N(0, 0.02), those that write into the residual stream divided by
sqrt(2 depth). Positions are rotary (Su et al., "RoFormer", 2021) or learned. No layer has a bias,
as in PaLM (Chowdhery et al., 2022, section 2): every parameter but the LayerNorms' weights is a
matrix, which is what compressors work on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Complex, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from regimes.errors import require

MLP = 4  # width of the perceptrons, in multiples of the width
STD = 0.02
BASE = 10_000.0  # of the rotary angles
Stream = Float[Tensor, "batch time width"]
Turns = Complex[Tensor, "time pairs"]  # of absolute value 1


class GPT(nn.Module):
    """classes w + depth (12 w^2 + 2 w) + w parameters at width w with a tied output and rotary
    positions: 115,008 for 256 classes, width 64 and depth 2. An untied output adds classes w,
    learned positions add sequence w.

    Args:
        classes: tokens in the vocabulary.
        sequence: the longest text it is given (learned positions only).
        width: a multiple of ``heads``; with rotary positions of twice that.
        depth: blocks.
        heads: of attention.
        positions: of tokens, added to the embedding ("learned"), or as angles by which queries and
            keys are turned ("rotary").
        tied: the output matrix is the embedding (Press and Wolf, 2017).
        dropout: behind the embedding, of the attention weights, and behind both halves.
    """

    text: ClassVar[bool] = True

    def __init__(
        self,
        *,
        classes: int,
        sequence: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        positions: Literal["learned", "rotary"] = "rotary",
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        rotary = positions == "rotary"
        unit = heads * (2 if rotary else 1)
        require(width % unit == 0, "model.width", width, f"a multiple of {unit}")
        self.head_size = width // heads
        self.embedding = nn.Embedding(classes, width)
        self.places = None if rotary else nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=STD / (2 * depth) ** 0.5 if writes else STD)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Int64[Tensor, "batch time"], hidden: None = None
    ) -> tuple[Float[Tensor, "batch time words"], None]:
        """Logits of each next token, from this and earlier tokens of the same sequence.

        Raises:
            ConfigError: a text longer than ``sequence`` and learned positions.
        """
        x, time = self.embedding(tokens), tokens.shape[1]
        if self.places is not None:
            longest = self.places.num_embeddings
            require(time <= longest, "the text's length", time, f"at most {longest} tokens")
            x = x + self.places.weight[:time]
        x = self.dropout(x)
        turns = angles(time, self.head_size, x) if self.places is None else None
        with self._kernels():
            for block in self.blocks:
                x = block(x, turns)
        return self.head(self.norm(x)), None

    def _kernels(self) -> AbstractContextManager[Any]:
        """Instruments take second derivatives in evaluation mode, which only one kernel has."""
        if self.training or not torch.is_grad_enabled():
            return nullcontext()
        return sdpa_kernel(SDPBackend.MATH)


class Block(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, MLP * width, bias=False)
        self.down = nn.Linear(MLP * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Stream, turns: Turns | None) -> Stream:
        x = x + self.dropout(self.out(self._attend(self.norm1(x), turns)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))

    def _attend(self, x: Stream, turns: Turns | None) -> Stream:
        query_key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).split((2, 1), 2)
        if turns is not None:
            query_key = rotate(query_key, turns)  # [batch, time, 2, heads, size]
        parts = (*query_key.unbind(2), value[:, :, 0])
        query, key, value = (part.transpose(1, 2) for part in parts)
        dropped = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropped, is_causal=True
        )
        return mixed.transpose(1, 2).flatten(2)


def angles(time: int, size: int, like: Tensor) -> Turns:
    """exp(i t 10,000^(-2 k / size)) for all times t and pairs k (Su et al., 2021, section 3.2.2),
    in single precision or more."""
    exact = torch.promote_types(like.dtype, torch.float32)
    place = torch.arange(time, device=like.device, dtype=exact)
    rate = BASE ** -(torch.arange(size // 2, device=like.device, dtype=exact) * 2 / size)
    angle = place[:, None] * rate
    return torch.polar(torch.ones_like(angle), angle)


def rotate(
    x: Float[Tensor, "batch time *which size"], turns: Turns
) -> Float[Tensor, "batch time *which size"]:
    """Rotate each pair (x_2k, x_2k+1) by its time's angle (Su et al., 2021, equation 34). The
    complex product is twice as fast on CPUs as its four real ones."""
    pairs = torch.view_as_complex(x.to(turns.real.dtype).unflatten(-1, (-1, 2)))
    turns = turns.reshape(len(turns), *[1] * (x.dim() - 3), -1)
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
