"""What a loss is: a function of a model and one batch. Data, instruments and training share it.

It is a mean over the samples of the batch, or says by an attribute ``reduction`` how else it joins
their terms (`regimes.reduction`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs and targets
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of the model, inputs, targets: mean, nats


@runtime_checkable
class CarryingLoss(Protocol):
    """A loss with a hidden state that one batch passes to the next, detached, within an epoch."""

    def carry(self, model: nn.Module, x: Tensor, y: Tensor, hidden: Any) -> tuple[Tensor, Any]: ...
