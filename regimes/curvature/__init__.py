"""The Hessian of a probe loss, its spectrum and its relatives.

    product = HessianProduct(model, cross_entropy, batches, mode="eval")

``HessianProduct``      products with vectors, of the Gauss-Newton matrix as well (``operator``)
``eigenvalues``         both ends of the spectrum, with vectors; ``backend="pyhessian"`` is the peer
``layer_eigenvalues``   the top of each layer's diagonal block
``trace``               Hutchinson's estimate; ``backend="pyhessian"`` as well
``layer_traces``        of each layer's block, all from the same products
``density``             the whole spectrum, by stochastic Lanczos quadrature (all: ``spectrum``)
``fisher_trace``        of the Fisher information, from gradients of single samples (``fisher``)
``critical_sharpness``  2 / the smallest rate at which a step raises the loss (``critical``)

They return ``Eigenpairs``, ``Estimate``, ``Density``, ``FisherTrace``, ``CriticalSharpness``.
"""

from regimes.curvature.critical import CriticalSharpness, critical_sharpness
from regimes.curvature.fisher import FisherTrace, fisher_trace
from regimes.curvature.lanczos import Eigenpairs
from regimes.curvature.operator import HessianProduct
from regimes.curvature.probe import Estimate, cross_entropy
from regimes.curvature.spectrum import (
    Density,
    density,
    eigenvalues,
    layer_eigenvalues,
    layer_traces,
    trace,
)

__all__ = [
    "CriticalSharpness",
    "Density",
    "Eigenpairs",
    "Estimate",
    "FisherTrace",
    "HessianProduct",
    "critical_sharpness",
    "cross_entropy",
    "density",
    "eigenvalues",
    "fisher_trace",
    "layer_eigenvalues",
    "layer_traces",
    "trace",
]
