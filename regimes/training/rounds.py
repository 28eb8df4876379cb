"""Local steps: each worker steps by itself, and all synchronise every so many steps.

A period of 1 is the ordinary step with shared gradients and one model for all workers, unless the
configuration says otherwise (``outer.period_one``, or an outer optimiser that does more than
average). When shared steps end, every worker starts with a copy of the optimiser's state; when they
begin again, the workers' states become their mean (or are reset, with ``outer.states = "reset"``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.comm import signals
from regimes.compression.reducer import Reducer
from regimes.config import AnyLevel, OuterConfig
from regimes.exchange.exchange import loss_with_flag
from regimes.instruments.panel import Panel
from regimes.job.clock import Clock
from regimes.training.gradients import Gradients, new_stack, set_gradients
from regimes.training.optimizers import Optimizers
from regimes.training.replicas import Replicas
from regimes.training.streaming import Fragment, SyncRounds

_Loss = tuple[Tensor, Tensor, int, int]  # mean of all workers; [rows] of this process; epoch, step


class Rounds:
    """Rounds of this process's workers: a period of local steps and the synchronisation at its end.
    A new period applies from the next round on.

    Attributes:
        rounds: synchronisations since ``take_rounds``, shared steps included; of fragments the
            last one of each period counts.
        rates: sum of the learning rates of the round's steps.
        pending: losses that no collective has averaged yet.
        sent: those that went with a fragment, for each that is on its way.
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
        # The pseudo-gradients are measured in the gradients' own tensors, unless a fragment's must
        # outlive the next gradient.
        storage = gradients.stack, gradients.layers
        if config.streams:
            storage = new_stack(gradients.parameters, len(gradients.stack))
        self.sync = SyncRounds(gradients.parameters, reducer, config, storage)
        self.rounds, self.rates = 0, 0.0
        self.pending: list[tuple[Tensor, int, int]] = []
        self.sent: deque[list[tuple[Tensor, int, int]]] = deque()

    @property
    def replicas(self) -> Replicas | None:
        return self.gradients.replicas

    @property
    def is_local(self) -> bool:
        """Whether each worker has parameters of its own now."""
        return self.replicas is not None

    def begin_step(self, wanted: int) -> bool:
        """A step begins, and after a round also a new period; returns whether the step is local."""
        if not self.sync.is_between:
            shares = wanted == 1 and self.config.plain and self.config.period_one == "gradients"
            if shares and self.replicas is not None:  # back to one model
                states = self.config.states
                self.replicas.settle_states("average" if states == "keep" else states, self.world)
                self.gradients.replicas = None
            elif not shares and self.replicas is None:
                # Running statistics of the shared model follow worker 0: only process 0 has them.
                self.world.broadcast(list(self.gradients.model.buffers()))
                self._make_replicas().copy_state(self.optimizer)
        if self.is_local:
            self.sync.begin_step(wanted)
        self.rounds += not self.is_local
        return self.is_local

    def step_workers(
        self, x: Tensor, y: Tensor, epoch: int, step: int, lr: float, clock: Clock
    ) -> bool:
        """One step of each hosted worker on its samples of ``x [L, b, ...]``, ``y [L, b]``; returns
        whether anything is to be synchronised now."""
        assert self.replicas is not None
        g = self.gradients
        with clock("compute"):
            losses = loss_with_flag(g.compute_gradients(x, y, epoch, step), g.stack)
            for row, own in enumerate(self.replicas.each_worker()):
                set_gradients(g.parameters, [layer[row] for layer in g.layers], g.unused[row])
                own.lr = lr
                own.step()
        self.pending.append((losses, epoch, step))
        self.rates += lr
        return self.sync.advance_step()

    def synchronize(
        self, levels: Sequence[AnyLevel], clock: Clock, panel: Panel, *, last: bool = False
    ) -> list[_Loss]:
        """Send what has completed its period, and apply what has come back: at the ``last`` step
        all. ``panel`` sees what is exchanged before it is applied. Returns the losses that were
        averaged on the way."""
        # at the last step receive before sending: sending a fragment again while it is on its way
        # would lose what it carries
        losses = self._receive_fragments(clock, panel, last) if last else []
        assert self.replicas is not None
        self.world.take_marks()  # of collectives that the clock does not count here
        with clock.count_exchange(self.world), clock("compress"):
            for fragment in self.sync.leaving_fragments(last):
                self._send_fragment(fragment, levels)
        return losses + self._receive_fragments(clock, panel, last)

    def _send_fragment(self, fragment: Fragment, levels: Sequence[AnyLevel]) -> None:
        assert self.replicas is not None
        losses = None
        if self.pending:
            losses = self._pending_losses()
            self.sent.append(self.pending)
            self.pending = []
        self.sync.measure_pseudo_gradients(fragment, self.replicas)
        self.sync.send_fragment(fragment, levels, losses)

    def _receive_fragments(self, clock: Clock, panel: Panel, last: bool) -> list[_Loss]:
        assert self.replicas is not None
        losses: list[_Loss] = []
        if self.sync.exchange.background is not None:
            with clock("communicate"):
                self.sync.wait_for_sent()
        for fragment, flight in self.sync.arriving_fragments(last):
            losses += self._delivered_losses()
            if self.sync.is_last(fragment):
                # the rate that instruments see: the pseudo-gradient is of all steps of the round
                self.optimizer.lr = self.rates
                panel.step(*self.sync.take_seen(), clock)
                self.rates = 0.0
                self.rounds += 1
            with clock.count_exchange(self.world), clock("compress"):
                self.sync.apply_fragment(fragment, flight, self.replicas)
        return losses

    def flush_losses(self) -> list[_Loss]:
        """The losses of steps that are in no list so far; at the end of a unit, which records its
        mean loss."""
        losses = self._delivered_losses()
        if self.pending:
            means = signals(self.world).mean([self._pending_losses()])[0]
            losses += [(m, *step) for m, step in zip(means.unbind(), self.pending, strict=True)]
            self.pending = []
        return losses

    def take_rounds(self) -> int:
        """Synchronisations since the last call."""
        taken, self.rounds = self.rounds, 0
        return taken

    def _pending_losses(self) -> Float[Tensor, "rows steps"]:
        return torch.stack([rows for rows, *_ in self.pending], 1)

    def _delivered_losses(self) -> list[_Loss]:
        """Losses with means that have come back."""
        return [
            (mean, *step)
            for means in self.sync.deliver_means()
            for mean, step in zip(means.unbind(), self.sent.popleft(), strict=True)
        ]

    def _make_replicas(self) -> Replicas:
        """Every worker gets a model of its own."""
        optimizers = [self.optimizer, *(self._build() for _ in range(self.world.hosted_count - 1))]
        buffers = list(self.gradients.model.buffers())
        self.gradients.replicas = Replicas(self.gradients.parameters, buffers, optimizers)
        return self.gradients.replicas

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, own): entries of a state, and of this process's part (``job.state``)."""
        outer, own = self.sync.state_dict()
        if self.replicas is None:  # nothing is on its way
            own["movements"] = []
        workers = [] if self.replicas is None else self.replicas.state_dict()
        return {"outer": {**outer, "rates": self.rates}}, {"outer": own, "replicas": workers}

    def load_state_dict(
        self,
        outer: dict[str, Any],
        residuals: dict[str, Any],
        movements: list[dict[str, Any]],
        workers: list[dict[str, Any]],
    ) -> None:
        """The inverse; ``movements`` and ``workers`` are of the hosted workers, ``workers`` empty
        if steps were shared."""
        self.rates = outer["rates"]
        self.sync.load_state_dict(outer, residuals, movements if workers else ())
        if workers:
            self._make_replicas().load_state_dict(workers)
