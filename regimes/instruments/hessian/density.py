"""The spectral density of a `HessianProduct`: how its eigenvalues are spread, without each of
them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import require
from regimes.base.seeding import make_generator
from regimes.instruments.hessian.lanczos import Krylov, random_direction
from regimes.instruments.hessian.operator import HessianProduct


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
