"""Products of the Hessian of a probe loss with vectors, without ever forming the Hessian.

The Hessian is that of the mean loss over a fixed probe set, taken at the model's present weights
with respect to every parameter that requires a gradient. `lanczos.py` and `spectrum.py` need
nothing else of a network.

How a product is made was chosen by measurement (`benchmarks/curvature.py`): double backward
(Pearlmutter 1994) through a *retained* graph, with the convolutions and batch norms of
`double_backward.py` swapped in while the user's unchanged model runs. A rebuilt graph costs one
forward and backward pass more per product, forward-over-reverse still more. Retained graphs are
kept for as many micro-batches as fit a stated amount of memory; the graphs of the others are
rebuilt for each call, so memory does not grow with the probe set.

The Gauss-Newton matrix J' H_L J (`kind="gauss-newton"`) is positive semi-definite for convex
losses of the model's output and equals the Fisher matrix for cross-entropy (Martens 2020,
section 9).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.curvature.isolation import preserved, random_states, same_random_states
from regimes.curvature.probe import (
    Kind,
    LiveBytes,
    Mode,
    ProbeLoss,
    ProcessMean,
    Product,
    batch_size,
    check_deterministic,
    gauss_newton_product,
    hessian_product,
    swapped_in,
)
from regimes.errors import ConfigError, TrainingError, require


class HessianProduct:
    """The Hessian of a probe loss as a function: vector [d] or block [k, d] in, the same out.

    Args:
        model: unchanged by any measurement (see `preserved`).
        loss: `(model, batch) -> mean loss over the batch`, a scalar tensor; runs the model once.
        batches: the probe set, split in micro-batches; each counts by its number of samples.
        mode: how to normalise and drop out. "eval": as in `model.eval()`. "batch-statistics": the
            same, but each BatchNorm uses the statistics of its micro-batch (and updates none).
            None: as the model's flags stand, which must then leave the loss deterministic.
        mean: averages a flat tensor over processes; None if this process is alone. Each process
            must hold equally many samples; the result is the Hessian over their union.
        kind: "hessian", or "gauss-newton" for J' H_L J with J of the model's output.
        memory: bytes that retained graphs may hold; beyond it, graphs are rebuilt per call.

    The weights must not change while it is in use. `products` counts the vectors multiplied
    (a layer's own block counts as one), `gradient` and `loss_value` come free.

    Raises:
        ConfigError: an empty probe set, a parameter without a gradient, a loss that is random or
            moves statistics, weights changed since the first product, a vector of a wrong shape.
        TrainingError: the gradient or a product is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: ProbeLoss,
        batches: Iterable[Any],
        *,
        mode: Mode | None = None,
        mean: ProcessMean | None = None,
        kind: Kind = "hessian",
        memory: int = 2 * 2**30,
    ) -> None:
        self.model, self.loss, self.batches = model, loss, list(batches)
        self.mode, self.mean, self.kind, self.memory = mode, mean, kind, memory
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self._check()
        counts = [batch_size(batch) for batch in self.batches]
        self.samples = sum(counts)
        self.weights = [n / self.samples for n in counts]
        self.dimension = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        ends = accumulate((p.numel() for p in self.parameters), initial=0)
        self.slices = [slice(a, b) for a, b in pairwise(ends)]
        self.products = 0
        self.retained = 0  # micro-batches whose graph is kept
        self._kept: list[Product] = []
        self._prepared = False
        self._versions = [p._version for p in self.parameters]
        self._gradient = torch.empty(0)
        self._loss_value = math.nan

    def _check(self) -> None:
        modes, kinds = (None, "eval", "batch-statistics"), ("hessian", "gauss-newton")
        require(self.mode in modes, "mode", self.mode, f"one of {modes}")
        require(self.kind in kinds, "kind", self.kind, f"one of {kinds}")
        if not self.batches or not sum(map(batch_size, self.batches)):
            raise ConfigError("The probe set is empty; give at least one batch with a sample.")
        if not self.parameters:
            raise ConfigError("No parameter of the model requires a gradient.")
        if self.mode is None:
            check_deterministic(self.model)

    @property
    def gradient(self) -> Float[Tensor, " d"]:
        """Gradient of the probe loss, over all processes."""
        self._prepare()
        return self._gradient

    @property
    def loss_value(self) -> float:
        """The probe loss, over all processes."""
        self._prepare()
        return self._loss_value

    def __call__(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """H v for a vector, or for every row of a block."""
        return self._multiply(vectors, range(len(self.parameters)))

    def block(self, layer: int) -> Callable[[Float[Tensor, "*k n"]], Float[Tensor, "*k n"]]:
        """The product with one layer's diagonal block; differentiates by that layer only."""
        return lambda vectors: self._multiply(vectors, [layer])

    def split(self, flat: Float[Tensor, "*k d"]) -> dict[str, Float[Tensor, "*k _"]]:
        """Views of a flat vector or block, by layer name."""
        return {n: flat[..., s] for n, s in zip(self.names, self.slices, strict=True)}

    def agree(self, number: float) -> float:
        """A number on which all processes agree (their mean), for decisions taken by the clock."""
        if self.mean is None:
            return number
        return float(self.mean(torch.tensor([number], dtype=torch.float64, device=self.device))[0])

    def _multiply(self, vectors: Tensor, layers: Sequence[int]) -> Tensor:
        sizes = [self.parameters[i].numel() for i in layers]
        d, rows = sum(sizes), vectors.ndim in (1, 2) and vectors.shape[-1] == sum(sizes)
        require(rows, "shape of vectors", tuple(vectors.shape), f"({d},) or (k, {d})")
        self._prepare()
        block = vectors.reshape(-1, vectors.shape[-1]).to(self.device, self.dtype)
        out = torch.zeros_like(block)
        shaped = [
            [piece.view_as(self.parameters[i]) for i, piece in zip(layers, row, strict=True)]
            for row in (v.split(sizes) for v in block)
        ]
        for index, weight in enumerate(self.weights):
            product = self._kept[index] if index < self.retained else self._build(index)[0]
            for row, pieces in zip(out, shaped, strict=True):
                for slot, part in zip(row.split(sizes), product(pieces, layers), strict=True):
                    slot.view_as(part).add_(part, alpha=weight)
            del product  # and its graph, unless it is kept
        if self.mean is not None:
            out = self.mean(out.view(-1)).view_as(block)
        self.products += len(block)
        if not bool(out.sum().isfinite()) and not bool(out.isfinite().all()):
            raise TrainingError("A Hessian-vector product is not finite; the loss has diverged.")
        return out.view_as(vectors)

    def _prepare(self) -> None:
        """First pass over the probe set: loss, gradient, and as many graphs as memory allows."""
        if self._versions != [p._version for p in self.parameters]:
            raise ConfigError("The weights changed under a HessianProduct; make a new one.")
        if self._prepared:
            return
        kept: list[Product] = []
        total = torch.zeros(self.dimension + 1, dtype=self.dtype, device=self.device)
        room, needed = self.memory, 0
        for index, weight in enumerate(self.weights):
            keep = index == len(kept) and needed <= room
            product, value, gradient, held = self._build(index, weigh=keep)
            if keep and held <= room:
                kept.append(product)
                room, needed = room - held, held
            flat = torch.cat([value.reshape(1), *(g.reshape(-1) for g in gradient)])
            total.add_(flat, alpha=weight)
            del product  # before the next graph is built: one at a time beside those kept
        if self.mean is not None:
            total = self.mean(total)
        if not bool(torch.isfinite(total).all()):
            raise TrainingError("The probe loss or its gradient is not finite.")
        self._kept, self.retained, self._prepared = kept, len(kept), True
        self._loss_value, self._gradient = float(total[0]), total[1:].clone()

    def _build(self, index: int, weigh: bool = False) -> tuple[Product, Tensor, list[Tensor], int]:
        """A micro-batch's product, loss, gradient, and the bytes its graph holds (if weighed)."""
        with ExitStack() as stack:
            stack.enter_context(preserved(self.model))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(swapped_in(self.model, self.mode, self.dtype, self.device))
            scale = stack.enter_context(LiveBytes()) if weigh else None
            outputs: list[Any] = []
            hook = self.model.register_forward_hook(lambda *call: outputs.append(call[-1]))
            stack.callback(hook.remove)
            before = random_states()
            value = self.loss(self.model, self.batches[index])
            if not same_random_states(before, random_states()):
                raise ConfigError("The loss draws random numbers; pass mode='eval'.")
            gradient = self._differentiate(value)
            if self.kind == "hessian":
                product = hessian_product(gradient, self.parameters)
            else:
                product = gauss_newton_product(value, outputs, self.parameters)
            held = scale.held() if scale else 0
        return product, value.detach(), [g.detach() for g in gradient], held

    def _differentiate(self, value: Tensor) -> list[Tensor]:
        found: Sequence[Tensor | None] = [None] * len(self.parameters)
        if value.requires_grad:
            # create_graph: the products below are derivatives of this gradient
            found = torch.autograd.grad(
                value, self.parameters, create_graph=True, allow_unused=True
            )
        missing = [n for n, g in zip(self.names, found, strict=True) if g is None]
        if missing:
            raise ConfigError(
                f"Parameter {missing[0]!r} gets no gradient from the loss; "
                "use it, or freeze it with requires_grad_(False)."
            )
        return [g for g in found if g is not None]
