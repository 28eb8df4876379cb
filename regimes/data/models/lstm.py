"""The two-layer LSTM language model of the paper's Table 10 and Figure 11.

Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), as a word-level model: embedding,
LSTM, linear layer; output and input embedding are one matrix (Press and Wolf, "Using the Output
Embedding to Improve Language Models", 2017).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional as F

from regimes.base.precision import is_half
from regimes.base.torch_compat import flatten_lstm_weights

Hidden = tuple[Float[Tensor, "layers batch width"], Float[Tensor, "layers batch width"]]


class Layers(nn.LSTM):
    """Calls ``nn.LSTM`` layer by layer, so that the dropout between layers is torch's: cuDNN's
    dropout creates its random state once, and later seeds do not change it."""

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "batch time width"], hidden: Hidden | None = None
    ) -> tuple[Float[Tensor, "batch time width"], Hidden]:
        h, c = hidden or (x.new_zeros(self.num_layers, len(x), self.hidden_size),) * 2
        self.check_forward_args(x, (h, c), None)
        x, last = x.transpose(0, 1), []
        for layer, weights in enumerate(self.all_weights):
            state = [t[layer : layer + 1] for t in (h, c)]
            x = F.dropout(x, self.dropout, self.training and layer > 0)
            with _torch_kernels(x):
                x, *state = torch.lstm(
                    x, state, [*weights], True, 1, 0.0, self.training, False, False
                )
            last.append(state)
        h, c = (torch.cat(parts) for parts in zip(*last, strict=True))
        return x.transpose(0, 1), (h, c)

    def flatten_parameters(self) -> None:
        """Make one contiguous piece per layer, because each cuDNN call takes one layer."""
        for weights in self.all_weights:
            if all(cudnn.is_acceptable(weight.data) for weight in weights):
                kind = cudnn.rnn.get_cudnn_mode(self.mode)
                sizes = weights[0].shape[1], kind, self.hidden_size, 0, 1
                with torch.no_grad(), torch.cuda.device_of(weights[0]):
                    flatten_lstm_weights((*weights,), 4, *sizes, True, False)


@contextmanager
def _torch_kernels(x: Tensor) -> Iterator[None]:
    """Use torch's own kernels in half precision on a CPU: oneDNN's LSTM needs a processor that
    computes with bfloat16, and raises a RuntimeError on others."""
    before = torch.backends.mkldnn.enabled
    if x.is_cpu and (is_half(x.dtype) or torch.is_autocast_enabled("cpu")):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


class LSTM(nn.Module):
    """Models words by an LSTM, with 28,949,319 parameters for 34,069 words: 6,770,400 in the LSTM,
    (width + 1) per word.

    The embedding starts uniform in +-0.1, its bias at 0, the LSTM from PyTorch's default.

    Args:
        classes: words in the vocabulary.
        width: of the embedding and of every layer.
        depth: LSTM layers.
        dropout: after the embedding and every layer; 0.4 in the authors' code.
    """

    text: ClassVar[bool] = True

    def __init__(
        self, *, classes: int, width: int = 650, depth: int = 2, dropout: float = 0.4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        between = dropout if depth > 1 else 0.0  # torch warns of a dropout between no layers
        self.lstm = Layers(width, width, depth, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)
        self.head.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, tokens: Int64[Tensor, "batch time"], hidden: Hidden | None = None
    ) -> tuple[Float[Tensor, "batch time words"], Hidden]:
        """Return the logits of each next word, and the state to continue from; ``hidden`` None is
        zeros."""
        x = self.dropout(self.embedding(tokens))
        # cuDNN's LSTM has no backward pass in evaluation mode, nor a second derivative.
        measuring = torch.is_grad_enabled() and not self.training
        with cudnn.flags(enabled=False) if measuring else nullcontext():
            x, hidden = self.lstm(x, hidden)
        return self.head(self.dropout(x)), hidden
