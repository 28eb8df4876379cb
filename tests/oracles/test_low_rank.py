"""Low-rank compressors. Oracle: the loops that their authors published, written naively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import ACPSGD, PowerSGD
from regimes.compression.reducer import Reducer

F64 = torch.float64
SHAPES = [(9, 14), (14, 9), (64, 27), (32, 288), (64, 16, 1, 1), (10, 64)]  # as in a small ResNet
WORKERS, STEPS = 4, 6


def gradients(shape: tuple[int, ...], step: int) -> Tensor:
    """Of each worker: what all share, slowly turning and of falling spectrum, and noise."""
    generator = torch.Generator().manual_seed(7)
    n, m = shape[0], torch.Size(shape).numel() // shape[0]
    u, v, turn = (torch.randn(k, 8, generator=generator, dtype=F64) for k in (n, m, m))
    shared = u * 0.6 ** torch.arange(8, dtype=F64) @ (v + 0.1 * step * turn).mT / 3
    generator.manual_seed(step)
    return shared + 0.3 * torch.randn(WORKERS, n, m, generator=generator, dtype=F64)


def ours(
    chosen: Compressor, shape: tuple[int, ...], rank: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Updates, last residuals, and the Q that it begins with."""
    world = World(WORKERS)
    world.meter.dtype = F64
    reducer = Reducer(chosen, [Layer("m", shape)], world, seed=5)
    (state,) = reducer.states
    key = {"q" if isinstance(chosen, PowerSGD) else "factor": start(shape, rank)}
    state.load_shared_state(key)
    found = []
    for step in range(STEPS):
        grad = gradients(shape, step)
        losses = torch.zeros(WORKERS, dtype=F64)
        stacked = grad.view(WORKERS, *shape)
        ((update,), _) = Exchange(reducer).exchange_step([stacked], [rank], losses, grad.flatten(1))
        found.append(update.flatten(1).clone())
    (left,) = reducer.residuals()
    assert left is not None
    return found, left, start(shape, rank)


def start(shape: tuple[int, ...], rank: int) -> Tensor:
    m = torch.Size(shape).numel() // shape[0]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(min(rank, shape[0], m), m, generator=generator, dtype=F64)


def orth(columns: Tensor) -> Tensor:
    """Gram-Schmidt."""
    columns = columns.clone()
    for i in range(columns.shape[1]):
        for j in range(i):
            columns[:, i] -= columns[:, j] @ columns[:, i] * columns[:, j]
        columns[:, i] /= columns[:, i].norm()
    return columns


def powersgd(shape: tuple[int, ...], q: Tensor, kept: float) -> tuple[list[Tensor], Tensor]:
    """Vogels et al., algorithm 1; of what is owed a share is kept."""
    found = []
    errors = [torch.zeros_like(x) for x in gradients(shape, 0)]
    for step in range(STEPS):
        deltas = [m + kept * e for m, e in zip(gradients(shape, step), errors, strict=True)]
        p = orth(sum(m @ q for m in deltas) / WORKERS)
        q = sum(m.T @ p for m in deltas) / WORKERS
        found.append(p @ q.T)
        errors = [m - found[-1] for m in deltas]
    return found, torch.stack(errors)


def acp_sgd(shape: tuple[int, ...], q: Tensor) -> tuple[list[Tensor], Tensor]:
    """Zhang et al.: odd steps P, even steps Q; a worker's residual is against its own factor."""
    found, p = [], torch.zeros(0)
    errors = [torch.zeros_like(x) for x in gradients(shape, 0)]
    for step in range(STEPS):
        own = []
        if step % 2 == 0:
            q = orth(q)
        else:
            p = orth(p)
        for worker, m in enumerate(gradients(shape, step)):
            if step % 2 == 0:
                own.append((m + errors[worker]) @ q)
                errors[worker] += m - own[-1] @ q.T
            else:
                own.append((m + errors[worker]).T @ p)
                errors[worker] += m - p @ own[-1].T
        if step % 2 == 0:
            p = sum(own) / WORKERS
        else:
            q = sum(own) / WORKERS
        found.append(p @ q.T)
    return found, torch.stack(errors)


def epfml(shape: tuple[int, ...], q: Tensor, iterations: int) -> tuple[list[Tensor], Tensor]:
    """``BasicPowerSGD.aggregate``, its sides exchanged so that it begins with a given Q: each
    half-iteration takes the worker's own share out, and the next works on what is left."""
    found, p, count = [], torch.zeros(0), 0
    errors = [torch.zeros_like(x) for x in gradients(shape, 0)]
    for step in range(STEPS):
        rest = [m + e for m, e in zip(gradients(shape, step), errors, strict=True)]
        update = torch.zeros_like(rest[0])
        for _ in range(iterations):
            if count % 2 == 0:
                q = orth(q)
                own = [m @ q for m in rest]
                rest = [m - x @ q.T for m, x in zip(rest, own, strict=True)]
                p = sum(own) / WORKERS
            else:
                p = orth(p)
                own = [m.T @ p for m in rest]
                rest = [m - p @ x.T for m, x in zip(rest, own, strict=True)]
                q = sum(own) / WORKERS
            update += p @ q.T
            count += 1
        errors = rest
        found.append(update)
    return found, torch.stack(errors)


def near(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rank", "kept"), [(1, 1), (3, 1), (2, 0.9), (1, 0.9)])
def test_powersgd_is_the_papers(shape: tuple[int, ...], rank: int, kept: float) -> None:
    updates, residual, q = ours(PowerSGD(error_feedback=kept), shape, rank)
    wanted, owed = powersgd(shape, q.T, kept)
    for mine, theirs in zip(updates, wanted, strict=True):
        near(mine, theirs)
    near(residual, owed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_acp_sgd_is_the_authors_loop(shape: tuple[int, ...], rank: int) -> None:
    updates, residual, q = ours(ACPSGD(), shape, rank)
    wanted, owed = acp_sgd(shape, q.T)
    for mine, theirs in zip(updates, wanted, strict=True):
        near(mine, theirs)
    near(residual, owed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rank", "iterations"), [(1, 2), (3, 2), (2, 3)])
def test_half_iterations_are_those_of_epfml(
    shape: tuple[int, ...], rank: int, iterations: int
) -> None:
    updates, residual, q = ours(ACPSGD(iterations=iterations), shape, rank)
    wanted, owed = epfml(shape, q.T, iterations)
    for mine, theirs in zip(updates, wanted, strict=True):
        near(mine, theirs)
    near(residual, owed)


class Products(TorchDispatchMode):
    """The shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            self.shapes.append(found.shape)
        return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_factors_lie_in_rows(rank: int, workers: int) -> None:
    """A product with ``rank`` columns takes some kernels several times as long as one with rows."""
    layer = Layer("m", (512, 1024))
    reducer = Reducer(PowerSGD(), [layer], World(workers), seed=0)
    stack = torch.randn(workers, layer.size, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the second has a residual
        with Products() as products:
            grads = [stack.view(workers, *layer.shape)]
            Exchange(reducer).exchange_step(grads, [rank], torch.zeros(workers), stack)
        assert len(products.shapes) >= 3
        assert all(shape[-1] in layer.shape for shape in products.shapes)


def test_two_halves_cost_a_step_of_powersgd_and_one_half_of_it() -> None:
    for shape in SHAPES:
        whole = PowerSGD().cost(Layer("m", shape), 2, WORKERS)
        assert ACPSGD(iterations=2).cost(Layer("m", shape), 2, WORKERS) == whole
        half = ACPSGD().cost(Layer("m", shape), 2, WORKERS)
        assert half + half == whole
