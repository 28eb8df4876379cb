"""PyHessian (Yao et al. 2020) with the same signatures: its eigenvalues and its trace.

It leaves the model in eval mode with `.grad` filled and draws from the global random stream, so it
runs inside `preserve_model`. Its density no longer runs.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from regimes.base.errors import ConfigError, TrainingError, require
from regimes.base.seeding import derive_seed
from regimes.instruments.hessian.differentiable import twice_differentiable
from regimes.instruments.hessian.lanczos import Eigenpairs, check_options
from regimes.instruments.hessian.native import NativeDoubleBackward
from regimes.instruments.hessian.operator import HessianProduct
from regimes.instruments.hessian.probe import Estimate, preserve_model


def is_chosen(backend: str) -> bool:
    """Answer whether a ``backend`` is PyHessian; ConfigError for one that is neither."""
    require(backend in ("lanczos", "pyhessian"), "backend", backend, "'lanczos' or 'pyhessian'")
    return backend == "pyhessian"


def eigenvalues(
    hessian: HessianProduct, k: int, tolerance: float, max_products: int, seed: int
) -> Eigenpairs:
    """Run PyHessian's power iteration: the k eigenvalues largest in magnitude, in the order it
    found them."""
    check_options(k, 0, tolerance, max_products, None)
    most = min(hessian.dimension, max_products)
    require(0 < k <= most, "largest", k, f"1 to {most}, the dimension or the products")
    began, per_value = time.perf_counter(), max_products // k
    iterations: Counter[int] = Counter()  # by how many values were found before
    with _measuring(hessian, seed) as (peer, count), _counting_iterations(iterations):
        values, vectors = peer.eigenvalues(maxIter=per_value, tol=tolerance, top_n=k)
    largest = torch.tensor(values, dtype=torch.float64)
    if not bool(torch.isfinite(largest).all()):
        raise TrainingError("PyHessian's eigenvalues are not finite; the loss has diverged here.")
    rows = [torch.cat([part.detach().reshape(-1) for part in v]) for v in vectors]
    return Eigenpairs(
        largest=largest,
        smallest=largest[:0],
        residuals=torch.full((k,), math.nan, dtype=torch.float64),
        vectors=torch.stack(rows),
        products=count[0],
        seconds=time.perf_counter() - began,
        stopped="converged" if max(iterations.values()) < per_value else "max_products",
    )


def trace(hessian: HessianProduct, products: int, seed: int) -> Estimate:
    """Run PyHessian's Hutchinson estimate of the trace; it stops early where its running mean
    settles."""
    with _measuring(hessian, seed) as (peer, _):
        samples = peer.trace(maxIter=products, tol=1e-3)
    return Estimate.of([float(s) for s in samples])


class _Batch:
    """Any batch, with the three methods that PyHessian calls on its inputs and targets; its size is
    by what it counts."""

    def __init__(self, batch: Any, weight: float) -> None:
        self.batch, self.weight = batch, weight

    def size(self, _: int) -> float:
        return self.weight

    def to(self, _: str) -> _Batch:
        return self

    def cuda(self) -> _Batch:
        return self


class _Probe(nn.Module):
    """The loss as a model of a batch; the criterion is then the identity."""

    def __init__(self, hessian: HessianProduct) -> None:
        super().__init__()
        self.model, self.loss = hessian.model, hessian.loss

    def forward(self, batch: _Batch) -> Tensor:
        return self.loss(self.model, batch.batch)


@contextmanager
def _counting_iterations(iterations: Counter[int]) -> Iterator[None]:
    """Count the steps of the power iteration for each value: each makes its vector orthogonal to
    those of the values before."""
    library = sys.modules["pyhessian.hessian"]
    original = library.orthnormal

    def orthnormal(vector: list[Tensor], found: list[list[Tensor]]) -> Any:
        iterations[len(found)] += 1
        return original(vector, found)

    with patch.object(library, "orthnormal", orthnormal):
        yield


@contextmanager
def _measuring(hessian: HessianProduct, seed: int) -> Iterator[tuple[Any, list[int]]]:
    """A PyHessian object on the probe and a count of its products; no trace is left."""
    if hessian.mean is not None or hessian.kind != "hessian":
        raise ConfigError("PyHessian measures the Hessian of one process; use backend='lanczos'.")
    try:
        import pyhessian
    except ImportError as error:
        raise ConfigError("PyHessian is missing: pip install pyhessian.") from error
    hessian.check()
    count, library = [0], sys.modules["pyhessian.hessian"]

    def counted(product: Callable) -> Callable:
        def call(*args: Any) -> Any:
            count[0] += 1
            return product(*args)

        return call

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # its backward(create_graph=True) warns of a cycle
        stack.enter_context(preserve_model(hessian.model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(twice_differentiable())
        torch.manual_seed(derive_seed(seed, "pyhessian"))
        if hessian.mode == "batch-statistics":  # else all operations are torch's own
            stack.enter_context(NativeDoubleBackward(batch_statistics=True))
        product = counted(library.hessian_vector_product)
        stack.enter_context(patch.object(library, "hessian_vector_product", product))
        weighted = [(hessian.batches[i], w * hessian.samples) for i, w in hessian.counted.items()]
        batches = [(_Batch(*pair), _Batch(*pair)) for pair in weighted]
        data = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
        cuda = hessian.device.type == "cuda"
        peer = pyhessian.hessian(_Probe(hessian), lambda out, _: out, cuda=cuda, **data)
        peer.dataloader_hv_product = counted(peer.dataloader_hv_product)
        yield peer, count
        hessian.model.zero_grad(set_to_none=True)
