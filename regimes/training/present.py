"""Simulated workers leave and join a run.

A mean is over the workers that are present. The samples of an absent one are left out. Samples are
keyed by (seed, epoch, worker), so a present worker's do not depend on the others.

- **One that leaves** takes with it what it has not sent: its residual and, between two
  synchronisations of local steps, its pseudo-gradient so far. What it has sent stays sent, a
  fragment of streaming DiLoCo that is on its way, too.
- **One that joins** starts with the weights of the last synchronisation, which with shared
  gradients is the last step, from the levels and factors that all share, with a residual of zero
  and, with local steps, with an optimiser's state.

Sums are conserved up to what has left: if E is the sum of the residuals of K present workers and e
the residual of one that leaves, K - 1 workers go on with the sum E - e. A linear compressor's
residuals drift apart, because what differs between two workers' gradients is never sent; one that
leaves takes all of that. So residuals are kept worker by worker where an intervention changes the
workers, and no union pass serves all, except where nothing is held back (`build`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from regimes.compression.reducer import Reducer
from regimes.errors import ConfigError

if TYPE_CHECKING:
    from regimes.training.build import Run

T = TypeVar("T")


def set_present(run: Run, workers: Sequence[int], optimizer: str) -> dict[int, dict[str, float]]:
    """Let a run have the rows of these workers from now on.

    Args:
        workers: in ascending order.
        optimizer: with local steps, where the optimiser of one that joins starts: a "copy" of the
            state of the first worker that stays, their "average", or "reset".

    Returns:
        By worker that has left: the norms of its "residual" and "movement", which were not sent.

    Raises:
        ConfigError: no worker stays.
    """
    before, union = run.present, run.gradients.union
    if not {*workers} & {*before}:
        raise ConfigError(
            f"workers {list(before)} all leave, so {list(workers)} have none to start from"
        )
    run.flush_losses()  # they are of other workers, whose rows an error would name
    rows = [before.index(w) if w in before else None for w in workers]
    reducers = [run.reducer, *([] if run.local is None else [run.local.sync.reducer])]
    unsent = {w: _unsent_norms(run, reducers, before.index(w)) for w in before if w not in workers}
    for reducer in reducers:
        _move_residuals(reducer, rows, union)
    # reads the states by the present rows, and writes them once there are other rows
    move_hidden = run.gradients.move_hidden(lambda states: _move_rows(states, rows))
    if run.local is not None:
        run.local.change_workers(rows, optimizer)
    run.world.set_present(workers)
    run.gradients.set_rows(len(workers))
    for reducer in reducers:
        reducer.set_rows(workers)
    if run.local is not None:
        run.local.set_rows(rows)
    move_hidden()
    return unsent


def _unsent_norms(run: Run, reducers: Sequence[Reducer], row: int) -> dict[str, float]:
    """Norms of what a worker has not sent."""
    residuals = [r for reducer in reducers for r in reducer.residuals()]
    norms = [r[row if len(r) > 1 else 0].norm() for r in residuals if r is not None]
    replicas = run.gradients.replicas
    return {
        "residual": float(torch.stack(norms).norm()) if norms else 0.0,
        "movement": 0.0 if replicas is None else float(replicas.drift_norm(row)),
    }


def _move_rows(states: Sequence[T], rows: Sequence[int | None]) -> list[T | None]:
    return [None if row is None else states[row] for row in rows]


def _move_residuals(reducer: Reducer, rows: Sequence[int | None], union: bool) -> None:
    """Rows of the workers that stay, and zeros. The single row of a union pass is the workers'
    mean: one that leaves takes as much, which changes no mean, and one that joins lowers it."""
    staying = [row for row in rows if row is not None]
    for state in reducer.states:
        if (residual := state.residual) is None:
            continue
        if union:
            state.residual = residual * (len(staying) / len(rows))
        else:
            moved = residual.new_zeros(len(rows), *residual.shape[1:])
            moved[[i for i, row in enumerate(rows) if row is not None]] = residual[staying]
            state.residual = moved
