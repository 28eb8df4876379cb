"""How far the workers of local steps lie apart, and along how many directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from regimes.base.capabilities import OWN_COLLECTIVES, SEVERAL_WORKERS, WORKER_MODELS
from regimes.collectives.comm import signals
from regimes.instruments.base import MeasurementContext, Reading, StatelessGauge, divide_or_nan

TINY = 1e-12  # of the largest squared singular value: zero but for rounding


@dataclass(frozen=True)
class Disagreement:
    """Measures the gaps d_w between each worker's parameters and their mean, right before the first
    synchronisation of a unit. Workers disagree along the sharp directions of the loss, so that the
    gaps span a part of the Hessian's dominant subspace (Dimlioglu, Topollai & Choromanska 2026,
    arXiv 2605.27739); no further pass through the model is needed.

    - ``disagreement``, per layer and of the model: the root mean square of |d_w|.
    - ``disagreement:top``, likewise: the share of the squared gaps along their leading direction,
      s_1^2 / sum s_i^2 with the singular values s_i of the gaps as rows. From 1 / (W - 1), where
      all directions are alike, to 1 for a single one, which two workers always have. NaN without
      gaps.
    - in detail: ``singular``, the model's W - 1 singular values, and ``mean_share``, the share of
      the squared mean movement that lies in the span of the gaps.

    All follow from inner products between workers, W x W for each layer. For them a worker sends
    each part of its movement to another worker, once a unit (as signal bytes), and all add up W x W
    numbers per layer.
    """

    requires = frozenset({WORKER_MODELS, SEVERAL_WORKERS, OWN_COLLECTIVES})

    every: int = field(default=1, init=False)

    def start(self, context: MeasurementContext) -> DisagreementGauge:
        return DisagreementGauge(context)


class DisagreementGauge(StatelessGauge):
    """Measures once per unit.

    Attributes:
        products: inner products of the workers' movements per layer, ``[layers, W, W]``, of this
            unit; None: there was no synchronisation yet.
    """

    saves_within_unit = True

    def __init__(self, context: MeasurementContext) -> None:
        self.context = context
        self.products: Tensor | None = None

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        """Measure the movements ``stack`` of the workers since the last synchronisation, once a
        unit."""
        if self.products is not None:
            return
        context, workers = self.context, self.context.world.workers
        assert context.is_local is not None  # WORKER_MODELS
        if context.is_local():
            self.products = self._products(stack).cpu()
        else:  # the workers share each step
            self.products = torch.zeros(len(context.layers), workers, workers, dtype=torch.float64)

    def _products(self, stack: Float[Tensor, "rows N"]) -> Float[Tensor, "layers W W"]:
        """Each worker multiplies all workers' numbers of its part of the coordinates."""
        world, parts = self.context.world, []
        for part in stack.split([layer.size for layer in self.context.parts], dim=1):
            chunk = max(1, -(-part.shape[1] // world.workers))
            padded = functional.pad(part, (0, chunk * world.workers - part.shape[1]))
            parts.append(padded.unflatten(1, (world.workers, chunk)))
        parts = signals(world, range(len(parts))).all_to_all(parts)  # each [rows, W, chunk]
        own = torch.stack([part.double() @ part.double().mT for part in parts], dim=1)
        (mean,) = signals(world).mean([own])
        return world.add_shards(mean * world.workers)

    def read(self, epoch: int) -> Reading:
        products, self.products = self.products, None
        if products is None or not bool(products.isfinite().all()):
            return Reading()
        found = [_gaps(one) for one in (*products, products.sum(0))]
        sizes = [math.sqrt(max(0.0, float(s.sum())) / len(s)) for s, _ in found]
        top = [divide_or_nan(float(s[-1]), float(s.sum())) for s, _ in found]
        singular = found[-1][0].clamp(min=0).sqrt().flip(0)[:-1].tolist()
        return Reading(
            {"disagreement": sizes[:-1], "disagreement:top": top[:-1]},
            {"disagreement": sizes[-1], "disagreement:top": top[-1]},
            {"singular": singular, "mean_share": _mean_share(products.sum(0), *found[-1])},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"products": self.products}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.products = state.get("products")


def _gaps(products: Float[Tensor, "W W"]) -> tuple[Float[Tensor, " W"], Float[Tensor, "W W"]]:
    """Squared singular values of the gaps, ascending (the first is zero, because gaps add up to
    zero), and how each direction is made of the gaps."""
    centred = products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()
    values, vectors = torch.linalg.eigh(centred)
    return values, vectors


def _mean_share(
    products: Float[Tensor, "W W"], squares: Float[Tensor, " W"], ways: Float[Tensor, "W W"]
) -> float | None:
    """|P m|^2 / |m|^2, with the mean movement m and the projection P on the span of the gaps. None
    where the mean or all gaps are zero."""
    along = products.mean(1) - products.mean()  # <d_w, m>
    real = squares > TINY * squares[-1].clamp(min=0)
    # u_i = sum_w ways[w, i] d_w / s_i are orthonormal, so |P m|^2 is the sum of <u_i, m>^2
    inside = ((ways.T @ along)[real].square() / squares[real]).sum()
    size = float(products.mean())
    return float(inside) / size if size > 0 and bool(real.any()) else None
