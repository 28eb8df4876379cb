"""Local steps: each worker steps by itself, and all synchronise every so many steps.

A period of 1 is the ordinary step with shared gradients and one model for all workers, unless the
configuration says otherwise (``outer.period_one``, or an outer optimiser that does more than
average). When shared steps end, every worker starts with a copy of the optimiser's state; when they
begin again, the workers' states become their mean (or are reset, with ``outer.states = "reset"``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Mean
from regimes.compression.reducer import Reducer, loss_with_flag
from regimes.config import Level, OuterConfig
from regimes.instruments.panel import Panel
from regimes.training.clock import Clock
from regimes.training.gradients import Gradients, install
from regimes.training.optimizers import Optimizers
from regimes.training.replicas import OuterStep, Replicas

Loss = tuple[Tensor, Tensor, int, int]  # mean of all workers; [rows] of this process; epoch, step


class Rounds:
    """Rounds of this process's workers: a period of local steps and the synchronisation at its end.
    A new period applies from the next round on.

    Attributes:
        period: of the round under way.
        since: local steps taken in it.
        rounds: synchronisations since ``take_rounds``, shared steps included.
        rates: sum of the learning rates of the round's steps.
        pending: losses that no collective has averaged yet.
    """

    def __init__(
        self,
        gradients: Gradients,
        optimizer: Optimizers,
        build: Callable[[], Optimizers],
        reducer: Reducer,
        config: OuterConfig,
    ) -> None:
        self.gradients, self.world, self.config = gradients, gradients.world, config
        self.optimizer, self._build = optimizer, build
        self.outer = OuterStep(gradients.parameters, reducer, config)
        self.period, self.since, self.rounds, self.rates = 1, 0, 0, 0.0
        self.pending: list[tuple[Tensor, int, int]] = []

    @property
    def replicas(self) -> Replicas | None:
        return self.gradients.replicas

    @property
    def is_local(self) -> bool:
        """Whether each worker has parameters of its own now."""
        return self.replicas is not None

    def begin(self, wanted: int) -> bool:
        """A step begins, and after a round also a new period; returns whether the step is local."""
        if not self.since:
            self.period = wanted
            shares = wanted == 1 and self.config.plain and self.config.period_one == "gradients"
            if shares and self.replicas is not None:  # back to one model
                states = self.config.states
                self.replicas.settle_states("average" if states == "keep" else states, self.world)
                self.gradients.replicas = None
            elif not shares and self.replicas is None:
                # Running statistics of the shared model follow worker 0: only process 0 has them.
                self.world.broadcast(list(self.gradients.model.buffers()))
                self._make_replicas().copy_state(self.optimizer)
        self.rounds += not self.is_local
        return self.is_local

    def step(self, x: Tensor, y: Tensor, epoch: int, step: int, lr: float, clock: Clock) -> bool:
        """One step of each hosted worker on its samples of ``x [L, b, ...]``, ``y [L, b]``; returns
        whether the round's local steps are done."""
        assert self.replicas is not None
        g = self.gradients
        with clock("compute"):
            losses = loss_with_flag(g.compute(x, y, epoch, step), g.stack)
            for row, own in enumerate(self.replicas.each()):
                install(g.parameters, [layer[row] for layer in g.layers])
                own.lr = lr
                own.step()
        self.pending.append((losses, epoch, step))
        self.since += 1
        self.rates += lr
        return self.since >= self.period

    def synchronize(self, levels: Sequence[Level], clock: Clock, panel: Panel) -> list[Loss]:
        """End a round; ``panel`` sees what is exchanged before it is applied. Returns the losses of
        the steps since the last synchronisation or flush."""
        assert self.replicas is not None
        before, g = self.world.seconds, self.gradients
        with clock("compress"):
            self.outer.pseudo_gradients(self.replicas, g.layers)
            updates, means = self.outer.reduce(g.layers, levels, self._losses())
        losses = self._flushed(means)
        self.optimizer.lr = self.rates
        panel.step(g.stack, updates, clock)
        with clock("compress"):
            self.outer.step(updates, self.replicas)
        clock.move(self.world.seconds - before, "compress", "communicate")
        self.since, self.rates = 0, 0.0
        self.rounds += 1
        return losses

    def flush_losses(self) -> list[Loss]:
        """The same within a round, at the end of a unit, which records its mean loss."""
        return self._flushed(self.world.ask(Mean(self._losses()))[0]) if self.pending else []

    def take_rounds(self) -> int:
        """Synchronisations since the last call."""
        taken, self.rounds = self.rounds, 0
        return taken

    def _losses(self) -> Float[Tensor, "rows steps"]:
        return torch.stack([rows for rows, *_ in self.pending], 1)

    def _flushed(self, means: Float[Tensor, " steps"]) -> list[Loss]:
        pending, self.pending = self.pending, []
        return [(mean, *step) for mean, step in zip(means.unbind(), pending, strict=True)]

    def _make_replicas(self) -> Replicas:
        """Every worker gets a model of its own."""
        optimizers = [self.optimizer, *(self._build() for _ in range(self.world.local - 1))]
        buffers = list(self.gradients.model.buffers())
        self.gradients.replicas = Replicas(self.gradients.parameters, buffers, optimizers)
        return self.gradients.replicas

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, own): the same on all processes, and of this process's workers."""
        memories, residuals = self.outer.reducer.state_dict()
        shared = {
            "period": self.period,
            "since": self.since,
            "rates": self.rates,
            "optimizer": self.outer.optimizer.state_dict(),
            "memories": memories,
        }
        workers = [] if self.replicas is None else self.replicas.state_dict()
        return shared, {"residuals": residuals, "workers": workers}

    def load_state_dict(
        self, shared: dict[str, Any], residuals: dict[str, Any], workers: list[dict[str, Any]]
    ) -> None:
        """The inverse; ``workers`` are the hosted ones, or empty if steps were shared."""
        self.period, self.since, self.rates = shared["period"], shared["since"], shared["rates"]
        self.outer.optimizer.load_state_dict(shared["optimizer"])
        self.outer.reducer.load_state_dict(shared["memories"], residuals)
        self.outer.reducer.to(self.gradients.stack.device)
        if workers:
            self._make_replicas().load_state_dict(workers)
