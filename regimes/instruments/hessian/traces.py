"""Traces of a `HessianProduct` by Hutchinson's estimate: of the whole Hessian, and of each layer's
own block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import regimes.instruments.hessian.pyhessian as pyhessian
from regimes.base.config.arguments import check_arguments
from regimes.base.errors import require
from regimes.base.seeding import make_generator
from regimes.instruments.hessian.operator import HessianProduct, Layers
from regimes.instruments.hessian.probe import Estimate

AT_ONCE = 4  # products that share a graph where graphs are rebuilt


@check_arguments("tolerance", "start")
def trace(
    hessian: HessianProduct, *, products: int = 30, seed: int = 0, backend: str = "lanczos"
) -> Estimate:
    """Estimate the trace without bias, as Hutchinson (1990) does: the mean of z'Hz over random
    signs z. ConfigError for fewer than 2 products or an unknown backend."""
    require(products >= 2, "products", products, "at least 2, for a standard error")
    if pyhessian.is_chosen(backend):
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
    blocks = hessian.locate_layers(layers)
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    for z, hz in _multiply_signs(hessian, probes, make_generator(seed, "trace")):
        sums = [float(part.sum()) for part in hessian.split(z * hz).values()]
        for name, places in blocks.items():
            samples[name].append(math.fsum(sums[i] for i in places))
    return {name: Estimate.of(values) for name, values in samples.items()}


def _multiply_signs(
    hessian: HessianProduct, n: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random signs z and their products Hz."""
    for begin in range(0, n, AT_ONCE):
        shape = min(AT_ONCE, n - begin), hessian.dimension
        bits = torch.randint(2, shape, generator=generator, dtype=torch.int8)
        signs = (2 * bits - 1).to(hessian.device, hessian.dtype)
        yield from zip(signs, hessian(signs), strict=True)
