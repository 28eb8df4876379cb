"""Two causal Transformer language models: beyond the paper, which names larger language models as
future work.

`Transformer`: Vaswani et al., "Attention Is All You Need" (2017): decoder blocks of attention and a
perceptron, sinusoidal positions; normalisation in front of each (Xiong et al., "On Layer
Normalization in the Transformer Architecture", 2020), GELU, tied output and input embedding.

`GPT`: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019, GPT-2): blocks
of causal attention and a perceptron with GELU, LayerNorm before each and after the last;
matrices from N(0, 0.02), those that write into the residual stream divided by sqrt(2 depth).
Positions are rotary (Su et al., "RoFormer", 2021) or learned. No layer has a bias, as in PaLM
(Chowdhery et al., 2022, section 2), so all parameters but the LayerNorms' weights are matrices,
which compressors need.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Complex, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from regimes.base.errors import require

HEAD = 32  # width of an attention head of Transformer
MLP = 4  # width of the perceptrons, in multiples of the width
STD = 0.02  # of GPT's initial matrices
BASE = 10_000.0  # of the positions' frequencies
Stream = Float[Tensor, "batch time width"]
Turns = Complex[Tensor, "time pairs"]  # of absolute value 1


class Transformer(nn.Module):
    """Models text with classes w + depth (12 w^2 + 13 w) + 2 w parameters at width w: 3,699,840 for
    10,000 words.

    The embedding starts from N(0, 1 / w), the other matrices from Xavier's uniform distribution.

    Args:
        classes: words in the vocabulary.
        width: a multiple of 32, the width of a head; or an even number below, with one head.
        depth: blocks.
        dropout: after the embedding, of the attention weights, and in and after both halves.
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
        """Return the logits of each next word, from this and earlier words of the same sequence."""
        weight = self.embedding.weight
        width, time = weight.shape[1], tokens.shape[1]
        x = self.dropout(self.embedding(tokens) * math.sqrt(width) + encode_positions(time, weight))
        mask = nn.Transformer.generate_square_subsequent_mask(time, x.device, x.dtype)
        with sdpa_kernel(SDPBackend.MATH):  # other kernels round otherwise than recorded runs
            x = self.blocks(x, mask, is_causal=True)
        return functional.linear(x, weight), None


def encode_positions(
    time: int, like: Float[Tensor, "words width"]
) -> Float[Tensor, "{time} width"]:
    """Compute sin(t / 10,000^(2 i / width)) for all i, then the cosines (Vaswani et al., section
    3.5)."""
    angle = _time_angles(time, like.shape[1], like)
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(like.dtype)


def _time_angles(time: int, size: int, like: Tensor) -> Float[Tensor, "{time} pairs"]:
    """t 10,000^(-2 k / size) for all times t and pairs k, in float32 at least: bfloat16 has no
    odd number above 256."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    place, pair = (torch.arange(n, device=like.device, dtype=dtype) for n in (time, size // 2))
    return place[:, None] * BASE ** -(pair * 2 / size)


class GPT(nn.Module):
    """Models text with classes w + depth (12 w^2 + 2 w) + w parameters at width w with a tied
    output and rotary positions: 115,008 for 256 classes, width 64 and depth 2. An untied output
    adds classes w, learned positions add sequence w.

    Args:
        classes: tokens in the vocabulary.
        sequence: the longest text (learned positions only).
        width: a multiple of ``heads``; with rotary positions of twice that.
        depth: blocks.
        heads: of attention.
        positions: of tokens, added to the embedding ("learned"), or as angles by which queries and
            keys are turned ("rotary").
        tied: the output matrix is the embedding (Press and Wolf, 2017).
        dropout: after the embedding, of the attention weights, and after both halves.
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
        """Return the logits of each next token, from this and earlier tokens of the same sequence.

        Raises:
            ConfigError: a text longer than ``sequence`` and learned positions.
        """
        x, time = self.embedding(tokens), tokens.shape[1]
        if self.places is not None:
            longest = self.places.num_embeddings
            require(time <= longest, "the text's length", time, f"at most {longest} tokens")
            x = x + self.places.weight[:time]
        x = self.dropout(x)
        turns = rotary_angles(time, self.head_size, x) if self.places is None else None
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x)), None


class Block(nn.Module):
    """Computes x + attention(norm(x)), then x + perceptron(norm(x))."""

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
            query_key = rotate_pairs(query_key, turns)  # [batch, time, 2, heads, size]
        parts = (*query_key.unbind(2), value[:, :, 0])
        query, key, value = (part.transpose(1, 2) for part in parts)
        dropped = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropped, is_causal=True
        )
        return mixed.transpose(1, 2).flatten(2)


def rotary_angles(time: int, size: int, like: Tensor) -> Turns:
    """Compute exp(i t 10,000^(-2 k / size)) for all times t and pairs k (Su et al., 2021, section
    3.2.2), in single precision or more."""
    angle = _time_angles(time, size, like)
    return torch.polar(torch.ones_like(angle), angle)


def rotate_pairs(
    x: Float[Tensor, "batch time *which size"], turns: Turns
) -> Float[Tensor, "batch time *which size"]:
    """Rotate each pair (x_2k, x_2k+1) by its time's angle (Su et al., 2021, equation 34). The
    complex product is twice as fast on CPUs as its four real ones."""
    pairs = torch.view_as_complex(x.to(turns.real.dtype).unflatten(-1, (-1, 2)))
    turns = turns.reshape(len(turns), *[1] * (x.dim() - 3), -1)
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
