"""Eigenvalues of a `HessianProduct`, of the whole Hessian and of each layer's own block.

As in `traces` and `density`, results are deterministic given `seed` and leave no trace on the
model; they are of the union of the data when the product averages over processes. One
`HessianProduct` serves several calls and builds its graph once.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import regimes.instruments.hessian.pyhessian as pyhessian
from regimes.base.config.arguments import check_arguments
from regimes.base.errors import ConfigError, unexpected_value
from regimes.base.seeding import make_generator
from regimes.instruments.hessian.lanczos import Eigenpairs, lanczos
from regimes.instruments.hessian.operator import HessianProduct, Layers


@check_arguments("tolerance", "start")
def eigenvalues(
    hessian: HessianProduct,
    *,
    largest: int = 1,
    smallest: int = 0,
    tolerance: float = 1e-3,
    start: Eigenpairs | Float[Tensor, "k d"] | None = None,
    max_products: int = 200,
    max_seconds: float | None = None,
    seed: int = 0,
    backend: str = "lanczos",
) -> Eigenpairs:
    """Compute both ends of the spectrum, algebraically (see `lanczos` for tolerance and budgets).

    `start` is the previous measurement of the same model, or its vectors: their sum begins the
    Krylov space. `backend="pyhessian"` runs that library's power iteration instead. Its values are
    the largest in *magnitude*, with their signs; its residuals are NaN; `tolerance` is the relative
    change between two steps. It has no `smallest`, warm start or time budget, and one process.

    Raises:
        ConfigError: as `HessianProduct` and `lanczos`; an option that the backend lacks.
        TrainingError: the loss, its gradient or a product is not finite.
    """
    if pyhessian.is_chosen(backend):
        if smallest or start is not None or max_seconds is not None:
            raise ConfigError("PyHessian has no smallest eigenvalues, warm start or time budget.")
        return pyhessian.eigenvalues(hessian, largest, tolerance, max_products, seed)
    return lanczos(
        hessian,
        hessian.dimension,
        largest=largest,
        smallest=smallest,
        tolerance=tolerance,
        start=None if start is None else warm_start(start),
        max_products=max_products,
        max_seconds=max_seconds,
        generator=make_generator(seed, "lanczos"),
        **_vector_options(hessian),
    )


def warm_start(previous: Eigenpairs | Float[Tensor, "k d"]) -> Float[Tensor, " d"]:
    """Add up the previous eigenvectors, as one start vector; those with NaN are left out.

    A single vector keeps the polynomial degree of a single Krylov sequence. In measurements it
    needed fewer products than a block of all vectors.
    """
    vectors = previous.vectors if isinstance(previous, Eigenpairs) else previous
    if not isinstance(vectors, Tensor) or vectors.dim() != 2:
        raise unexpected_value("start", vectors, "Eigenpairs, or vectors of shape (k, d)")
    return vectors[torch.isfinite(vectors[:, 0])].sum(0)


@check_arguments("tolerance", "start")
def layer_eigenvalues(
    hessian: HessianProduct,
    *,
    layers: Layers = None,
    tolerance: float = 1e-3,
    max_products: int = 50,
    max_seconds: float | None = None,
    seed: int = 0,
) -> dict[str, Eigenpairs]:
    """Computes the top eigenvalue of each layer's own diagonal block of the Hessian.

    The budgets are per layer. A block's product differentiates by that layer alone, and so costs
    less than a full one.

    Args:
        layers: names of parameters, a block for each; or by layer the names of the parameters
            that have one block together. None: each parameter.

    Raises:
        ConfigError: a layer that the model does not have; else as `eigenvalues`.
    """
    pairs = {}
    for name, indices in hessian.locate_layers(layers).items():
        pairs[name] = lanczos(
            hessian.block(*indices),
            sum(hessian.parameters[i].numel() for i in indices),
            tolerance=tolerance,
            max_products=max_products,
            max_seconds=max_seconds,
            generator=make_generator(seed, "lanczos", name),
            **_vector_options(hessian),
        )
    return pairs


def _vector_options(hessian: HessianProduct) -> dict[str, Any]:
    return {"agree": hessian.agree, "dtype": hessian.dtype, "device": hessian.device}
