"""The Hessian of a probe loss, its spectrum and its relatives. Nothing else of a network is needed.

    hessian = HessianProduct(model, cross_entropy, batches, mode="eval")
    now = eigenvalues(hessian, largest=5, smallest=1)
    later = eigenvalues(HessianProduct(...), largest=5, start=now)       # warm
    by_layer = layer_traces(hessian, probes=20)

The two other measures are ``fisher_trace`` and ``critical_sharpness``.
"""

from regimes.instruments.hessian.density import Density, density
from regimes.instruments.hessian.eigenvalues import eigenvalues, layer_eigenvalues
from regimes.instruments.hessian.first_order import (
    CriticalSharpness,
    FisherTrace,
    critical_sharpness,
    fisher_trace,
)
from regimes.instruments.hessian.lanczos import Eigenpairs
from regimes.instruments.hessian.operator import HessianProduct
from regimes.instruments.hessian.probe import Estimate, cross_entropy
from regimes.instruments.hessian.traces import layer_traces, trace

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
