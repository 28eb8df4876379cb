"""Eigenvalues, traces and spectral density of a `HessianProduct`, whole and per layer.

All functions are deterministic given `seed`, leave no trace on the model, and give the curvature
over the union of the data when the product averages over processes. One `HessianProduct` serves
several calls and builds its graph once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import ConfigError, require, unexpected_value
from regimes.base.seeding import make_generator
from regimes.instruments.hessian import pyhessian
from regimes.instruments.hessian.lanczos import Eigenpairs, Krylov, lanczos, random_direction
from regimes.instruments.hessian.operator import HessianProduct
from regimes.instruments.hessian.probe import Estimate

# names of parameters, a block for each; or by layer the names of the parameters that have one block
# together; None: each parameter
Layers = Sequence[str] | Mapping[str, Sequence[str]] | None
AT_ONCE = 4  # products per graph, where graphs are rebuilt


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
    if _uses_pyhessian(backend):
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
    for name, indices in _locate_layers(hessian, layers).items():
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


@check_arguments("tolerance", "start")
def trace(
    hessian: HessianProduct, *, products: int = 30, seed: int = 0, backend: str = "lanczos"
) -> Estimate:
    """Estimate the trace without bias, as Hutchinson (1990) does: the mean of z'Hz over random
    signs z. ConfigError for fewer than 2 products or an unknown backend."""
    require(products >= 2, "products", products, "at least 2, for a standard error")
    if _uses_pyhessian(backend):
        return pyhessian.trace(hessian, products, seed)
    samples = [
        (z * hz).sum()
        for z, hz in _multiply_signs(hessian, products, make_generator(seed, "trace"))
    ]
    return Estimate.of([float(s) for s in samples])


@check_arguments("tolerance", "start")
def layer_traces(
    hessian: HessianProduct, *, layers: Layers = None, probes: int = 30, seed: int = 0
) -> dict[str, Estimate]:
    """Estimate the trace of every layer's diagonal block, all from the same full products.

    For random signs z the expectation of z_l'(Hz)_l is the trace of block l: the other blocks
    enter with mean zero. The layers add up to `trace` at the same seed. ``layers`` as in
    `layer_eigenvalues`. ConfigError: as there.
    """
    require(probes >= 2, "probes", probes, "at least 2, for a standard error")
    blocks = _locate_layers(hessian, layers)
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    for z, hz in _multiply_signs(hessian, probes, make_generator(seed, "trace")):
        sums = [float(part.sum()) for part in hessian.split(z * hz).values()]
        for name, places in blocks.items():
            samples[name].append(math.fsum(sums[i] for i in places))
    return {name: Estimate.of(values) for name, values in samples.items()}


def _locate_layers(hessian: HessianProduct, layers: Layers) -> dict[str, list[int]]:
    """By layer the indices of its parameters; ConfigError for a name that no parameter has."""
    if not isinstance(layers, Mapping):
        layers = {name: [name] for name in (hessian.names if layers is None else layers)}
    for name in (name for names in layers.values() for name in names):
        if name not in hessian.names:
            raise ConfigError(f"No layer {name!r} with a gradient; have {hessian.names}.")
    places = {name: i for i, name in enumerate(hessian.names)}
    # once each: the traces and products of a parameter that is named twice would be added up
    return {
        layer: [places[name] for name in dict.fromkeys(names)] for layer, names in layers.items()
    }


@dataclass(frozen=True)
class Density:
    """Holds a spectral density as weighted points; weights are positive and sum to one."""

    nodes: Float[Tensor, " n"]  # eigenvalue estimates, ascending, float64
    weights: Float[Tensor, " n"]
    products: int

    def curve(self, grid: Float[Tensor, " g"], width: float) -> Float[Tensor, " g"]:
        """Smooth the density by a Gaussian of that standard deviation, on a grid. ConfigError
        unless the width is positive."""
        require(width > 0, "width", width, "a positive number")
        z = (grid[:, None] - self.nodes) / width
        return torch.exp(-0.5 * z**2) @ self.weights / (width * (2 * torch.pi) ** 0.5)


@check_arguments("tolerance", "start")
def density(hessian: HessianProduct, *, probes: int = 5, steps: int = 30, seed: int = 0) -> Density:
    """Estimate the spectral density by stochastic Lanczos quadrature (Golub & Welsch 1969; Ubaru et
    al. 2017).

    Each probe's Krylov space of `steps` products gives a Gauss rule that is exact for polynomials
    up to degree 2 `steps` - 1 as seen by that probe; the rules are averaged.
    """
    require(probes >= 1, "probes", probes, "at least 1")
    require(steps >= 1, "steps", steps, "at least 1")
    generator = make_generator(seed, "density")
    before, nodes, weights = hessian.products, [], []
    for _ in range(probes):
        begin = random_direction(hessian.dimension, generator, hessian.dtype, hessian.device)
        space = Krylov(begin, min(steps, hessian.dimension))
        while not (space.full or space.exhausted):
            space.step(hessian)
        nodes.append(space.ritz()[0])
        weights.append(space.weights() / probes)
    order = torch.cat(nodes).argsort()
    return Density(torch.cat(nodes)[order], torch.cat(weights)[order], hessian.products - before)


def _uses_pyhessian(backend: str) -> bool:
    require(backend in ("lanczos", "pyhessian"), "backend", backend, "'lanczos' or 'pyhessian'")
    return backend == "pyhessian"


def _vector_options(hessian: HessianProduct) -> dict[str, Any]:
    return {"agree": hessian.agree, "dtype": hessian.dtype, "device": hessian.device}


def _multiply_signs(
    hessian: HessianProduct, n: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random signs z and their products Hz."""
    for begin in range(0, n, AT_ONCE):
        shape = min(AT_ONCE, n - begin), hessian.dimension
        bits = torch.randint(2, shape, generator=generator, dtype=torch.int8)
        signs = (2 * bits - 1).to(hessian.device, hessian.dtype)
        yield from zip(signs, hessian(signs), strict=True)
