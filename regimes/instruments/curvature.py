"""Curvature of the probe loss: eigenvalues, traces and spectral density, whole and per layer.

The public functions over a `HessianProduct`; the paper's Figure 3 sets the top eigenvalue against
the gradient norm. All are deterministic given `seed`, leave no trace on the model, and give the
curvature over the union of the data when the product averages over processes:

    hessian = HessianProduct(model, cross_entropy, batches, mode="eval")
    now = eigenvalues(hessian, largest=5, smallest=1)
    later = eigenvalues(HessianProduct(...), largest=5, start=now)       # warm
    by_layer = layer_traces(hessian, probes=20)

One `HessianProduct` serves several calls and builds its graph once. All of them take the
Gauss-Newton matrix as well (`kind="gauss-newton"`). The Fisher trace, which needs gradients of
single samples rather than products, is in `fisher.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.errors import ConfigError
from regimes.instruments.estimate import Estimate
from regimes.instruments.fisher import FisherTrace, fisher_trace
from regimes.instruments.hvp import HessianProduct
from regimes.instruments.krylov import Krylov
from regimes.instruments.lanczos import Eigenpairs, lanczos, random_direction
from regimes.instruments.probe import cross_entropy
from regimes.seeding import stream

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "FisherTrace",
    "HessianProduct",
    "cross_entropy",
    "density",
    "eigenvalues",
    "fisher_trace",
    "layer_eigenvalues",
    "layer_traces",
    "trace",
]

Backend = str  # "lanczos" or "pyhessian"


def eigenvalues(
    hessian: HessianProduct,
    *,
    largest: int = 1,
    smallest: int = 0,
    tolerance: float = 1e-3,
    start: Eigenpairs | None = None,
    max_products: int = 200,
    max_seconds: float | None = None,
    seed: int = 0,
    backend: Backend = "lanczos",
) -> Eigenpairs:
    """Both ends of the spectrum, algebraically (see `lanczos` for tolerance and budgets).

    `start` is the previous measurement of the same model: its vectors, summed, begin the Krylov
    space. `backend="pyhessian"` runs that library's power iteration instead: its values are the
    largest in *magnitude*, sign kept, it knows no residuals (NaN), no `smallest`, warm start, time
    budget or processes, and `tolerance` is its relative change between two steps.

    Raises:
        ConfigError: as `HessianProduct` and `lanczos`; an option that the backend lacks.
        TrainingError: the loss, its gradient or a product is not finite.
    """
    if backend == "pyhessian":
        from regimes.instruments import pyhessian_backend

        if smallest or start is not None or max_seconds is not None:
            raise ConfigError("PyHessian has no smallest eigenvalues, warm start or time budget.")
        return pyhessian_backend.eigenvalues(hessian, largest, tolerance, max_products, seed)
    if backend != "lanczos":
        raise ConfigError(f"Unknown backend {backend!r}: expected 'lanczos' or 'pyhessian'.")
    return lanczos(
        hessian,
        hessian.dimension,
        largest=largest,
        smallest=smallest,
        tolerance=tolerance,
        start=None if start is None else warm_start(start),
        max_products=max_products,
        max_seconds=max_seconds,
        generator=stream(seed, "lanczos"),
        agree=hessian.agree,
        dtype=hessian.dtype,
        device=hessian.device,
    )


def warm_start(previous: Eigenpairs) -> Float[Tensor, "1 d"]:
    """The sum of the previous eigenvectors (those that exist), as one start vector.

    Measured against a block start of all of them (`benchmarks/curvature.py`): one vector carries
    all of them and keeps the polynomial degree of a single Krylov sequence.
    """
    vectors = previous.vectors[torch.isfinite(previous.vectors[:, 0])]
    if not len(vectors):
        raise ConfigError("The previous measurement has no eigenvectors to start from.")
    return vectors.sum(0, keepdim=True)


def layer_eigenvalues(
    hessian: HessianProduct,
    *,
    layers: list[str] | None = None,
    tolerance: float = 1e-3,
    max_products: int = 50,
    max_seconds: float | None = None,
    seed: int = 0,
) -> dict[str, Eigenpairs]:
    """The top eigenvalue of each layer's own diagonal block (budgets are per layer).

    A block's product differentiates by that layer alone and so costs less than a full one.

    Raises:
        ConfigError: a layer that the model does not have; else as `eigenvalues`.
    """
    chosen = hessian.names if layers is None else layers
    unknown = [name for name in chosen if name not in hessian.names]
    if unknown:
        raise ConfigError(f"No layer {unknown[0]!r} with a gradient; have {hessian.names}.")
    found = {}
    for name in chosen:
        layer = hessian.names.index(name)
        found[name] = lanczos(
            hessian.block(layer),
            hessian.parameters[layer].numel(),
            tolerance=tolerance,
            max_products=max_products,
            max_seconds=max_seconds,
            generator=stream(seed, "lanczos", name),
            agree=hessian.agree,
            dtype=hessian.dtype,
            device=hessian.device,
        )
    return found


def trace(
    hessian: HessianProduct,
    *,
    method: str = "hutchinson",
    products: int = 30,
    seed: int = 0,
    backend: Backend = "lanczos",
) -> Estimate:
    """The trace from `products` products, unbiased, with its standard error.

    "hutchinson" (1990) averages z'Hz over random signs z. "hutch++" (Meyer et al. 2021) spends a
    third of the products on finding the dominant subspace, takes the trace exactly on it with
    another third, and leaves the rest of the spectrum to Hutchinson; better where few eigenvalues
    dominate, at the memory of `products` / 3 vectors. The error covers the random part only.

    Raises:
        ConfigError: fewer than 2 products (hutch++: 6), or an unknown method or backend.
    """
    if backend == "pyhessian":
        from regimes.instruments import pyhessian_backend

        return pyhessian_backend.trace(hessian, products, seed)
    least = {"hutchinson": 2, "hutch++": 6}.get(method)
    if least is None or backend != "lanczos":
        raise ConfigError(f"Unknown method {method!r} or backend {backend!r} for the trace.")
    if products < least:
        raise ConfigError(f"{method} needs at least {least} products, got {products}.")
    generator = stream(seed, "trace")
    if method == "hutchinson":
        samples = [(z * hz).sum() for z, hz in _probes(hessian, products, generator)]
        return Estimate.of([float(s) for s in samples])
    return _hutch_plus_plus(hessian, products // 3, products - 2 * (products // 3), generator)


def layer_traces(
    hessian: HessianProduct, *, probes: int = 30, seed: int = 0
) -> dict[str, Estimate]:
    """The trace of every layer's diagonal block, all from the same full products.

    For random signs z the expectation of z_l'(Hz)_l is the trace of block l: the other blocks
    enter with mean zero. The samples of all layers add up to those of `trace` at the same seed.

    Raises:
        ConfigError: fewer than 2 probes.
    """
    if probes < 2:
        raise ConfigError(f"A standard error needs at least 2 probes, got {probes}.")
    samples: dict[str, list[float]] = {name: [] for name in hessian.names}
    for z, hz in _probes(hessian, probes, stream(seed, "trace")):
        for name, part in hessian.split(z * hz).items():
            samples[name].append(float(part.sum()))
    return {name: Estimate.of(values) for name, values in samples.items()}


@dataclass(frozen=True)
class Density:
    """A spectral density as weighted points; weights are positive and sum to one."""

    nodes: Float[Tensor, " n"]  # eigenvalue estimates, ascending, float64
    weights: Float[Tensor, " n"]
    products: int

    def curve(self, grid: Float[Tensor, " g"], width: float) -> Float[Tensor, " g"]:
        """The density smoothed by a Gaussian of that standard deviation, on a grid."""
        z = (grid[:, None] - self.nodes) / width
        return torch.exp(-0.5 * z**2) @ self.weights / (width * (2 * torch.pi) ** 0.5)


def density(hessian: HessianProduct, *, probes: int = 5, steps: int = 30, seed: int = 0) -> Density:
    """Stochastic Lanczos quadrature (Golub & Welsch 1969; Ubaru et al. 2017).

    Each probe's Krylov space of `steps` products gives a Gauss rule that is exact for polynomials
    up to degree 2 `steps` - 1 as seen by that probe; the rules are averaged.

    Raises:
        ConfigError: no probe or no step.
    """
    if min(probes, steps) < 1:
        raise ConfigError(f"Density needs a probe and a step, got {probes} and {steps}.")
    generator = stream(seed, "density")
    before, nodes, weights = hessian.products, [], []
    for _ in range(probes):
        begin = random_direction(hessian.dimension, generator, hessian.dtype, hessian.device)
        space = Krylov(begin.unsqueeze(0), min(steps, hessian.dimension))
        while not (space.full or space.exhausted):
            space.step(hessian, None)
        nodes.append(space.ritz()[0])
        weights.append(space.weights() / probes)
    order = torch.cat(nodes).argsort()
    return Density(torch.cat(nodes)[order], torch.cat(weights)[order], hessian.products - before)


def _signs(hessian: HessianProduct, n: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    bits = torch.randint(2, (n, hessian.dimension), generator=generator, dtype=torch.int8)
    return (2 * bits - 1).to(hessian.device, hessian.dtype)


def _probes(
    hessian: HessianProduct, n: int, generator: torch.Generator, at_once: int = 4
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random signs and their products; a few at once share a graph that has to be rebuilt."""
    for begin in range(0, n, at_once):
        block = _signs(hessian, min(at_once, n - begin), generator)
        yield from zip(block, hessian(block), strict=True)


def _hutch_plus_plus(
    hessian: HessianProduct, sketch: int, rest: int, generator: torch.Generator
) -> Estimate:
    by_rows: Callable[[Tensor], Tensor] = hessian
    sketch = min(sketch, hessian.dimension)
    q = torch.linalg.qr(by_rows(_signs(hessian, sketch, generator)).mT).Q  # [d, sketch]
    exact = float((q.mT * by_rows(q.mT.contiguous())).sum())
    z = _signs(hessian, rest, generator)
    z = z - (z @ q) @ q.mT
    hz = by_rows(z)
    outside = Estimate.of([float(s) for s in (z * hz).sum(1)])
    return Estimate(exact + outside.value, outside.error, outside.samples)
