"""Workers that leave and join during a simulated run.

A mean is over the workers that are present. The samples of an absent one are left out: those of a
present one are keyed by (seed, epoch, worker), whichever others are there.

- **One that leaves** takes with it what it has not sent: its residual and, between two
  synchronisations of local steps, its movement since the last one. The record has both norms. What
  it has sent stays sent, a fragment of streaming DiLoCo that is on its way, too.
- **One that joins** starts with the weights of the last synchronisation, which with shared
  gradients is the last step, from the levels and factors that all share, with a residual of zero
  and, with local steps, with the optimiser's state that ``ChurnConfig.optimizer`` names.

Sums are conserved up to what has left: if E is the sum of the residuals of K present workers and e
that of one that leaves, K - 1 workers go on with the sum E - e. A linear compressor's residuals
drift apart, because what differs between two workers' gradients is never sent; one that leaves
takes all of that. So residuals are those of single workers here, and no union pass serves all,
except where nothing is held back (`build`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from regimes.compression.reducer import Reducer
from regimes.config import ChurnConfig
from regimes.errors import ConfigError
from regimes.training.presence import Presence, Workers

if TYPE_CHECKING:
    from regimes.training.build import Run

T = TypeVar("T")


class Churn:
    """Changes the parts of one run where a worker leaves or joins.

    Attributes:
        worker_steps: of the unit so far, steps times the workers present.
        left, joined: events of the unit so far, in plain types.
    """

    def __init__(self, run: Run) -> None:
        config = run.config.churn
        self.run, self.config = run, config or ChurnConfig()
        self.configured = config is not None
        self.presence = Presence(self.config, run.config.workers, run.config.seed)
        self._start_unit()

    def _start_unit(self) -> None:
        self.worker_steps = 0
        self.left: list[dict[str, Any]] = []
        self.joined: list[dict[str, Any]] = []

    def due(self, unit: int, step: int) -> Workers | None:
        """The workers that are present from this step on, if they are others. Processes host
        workers that are all present (`build`)."""
        if self.run.world.processes > 1:
            return None
        now = self.presence.at(unit if self.config.per == "unit" else step)
        return None if now == tuple(self.run.world.hosted) else now

    def change(self, now: Workers, step: int) -> None:
        """Let workers leave and join before a step.

        Raises:
            ConfigError: no worker stays, so that those that join have none to copy from.
        """
        run, before = self.run, tuple(self.run.world.hosted)
        if not {*now} & {*before}:
            raise ConfigError(
                f"churn: before step {step} no worker stays, so new ones have no source"
            )
        rows = [before.index(w) if w in before else None for w in now]
        for worker in (w for w in before if w not in now):
            self.left.append({"worker": worker, "step": step, **self._taken(before.index(worker))})
        self.joined += [{"worker": w, "step": step} for w in now if w not in before]
        for reducer in self._reducers():
            _move_residuals(reducer, rows, run.gradients.union)
        move_hidden = run.gradients.move_hidden(lambda states: _moved(states, rows))
        if run.local is not None:
            run.local.change(rows, self.config.optimizer)
        self.set_present(now, rows)
        move_hidden()

    def set_present(self, workers: Sequence[int], rows: Sequence[int | None] = ()) -> None:
        """Rows of the run are of these workers from now on.

        Args:
            rows: where each was before, for what is on its way; None: it joins.
        """
        run = self.run
        run.world.set_present(workers)
        run.gradients.set_rows(len(workers))
        for reducer in self._reducers():
            reducer.set_rows(workers)
        if run.local is not None:
            run.local.set_rows(rows)

    def restore(self, workers: Sequence[int]) -> None:
        """Restore the workers that were present when a checkpoint was written."""
        known = list(range(self.run.config.workers))
        if list(workers) == known:
            return
        if not workers or not {*workers} < {*known}:
            raise ValueError(f"its workers are {list(workers)}")
        if self.run.world.processes > 1:
            raise ConfigError(
                f"--processes: only workers {list(workers)} are present where this run continues: "
                "use one process"
            )
        self.set_present(workers)

    def take_row(self) -> dict[str, Any]:
        """The column "churn" of the unit that ends, empty in a run that has none."""
        steps, left, joined = self.worker_steps, self.left, self.joined
        self._start_unit()
        if not (self.configured or left or joined):
            return {}
        norms = {
            name: math.sqrt(math.fsum(event[name] ** 2 for event in left))
            for name in ("residual", "movement")
        }
        present = len(self.run.world.hosted)
        return {
            "churn": {
                "present": present,
                "worker_steps": steps,
                "left": left,
                "joined": joined,
                **norms,
            }
        }

    def _reducers(self) -> Iterator[Reducer]:
        yield self.run.reducer
        if self.run.local is not None:
            yield self.run.local.sync.reducer

    def _taken(self, row: int) -> dict[str, float]:
        """Norms of what a worker has not sent."""
        residuals = [r for reducer in self._reducers() for r in reducer.residuals()]
        norms = [r[row if len(r) > 1 else 0].norm() for r in residuals if r is not None]
        replicas = self.run.gradients.replicas
        return {
            "residual": float(torch.stack(norms).norm()) if norms else 0.0,
            "movement": 0.0 if replicas is None else float(replicas.movement(row)),
        }


def _moved(states: Sequence[T], rows: Sequence[int | None]) -> list[T | None]:
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
