"""Local steps in a user's own training loop, of a bare model on each process.

The same rounds, outer step, compressors and policies as the trainer's (``training.rounds``), and
the same rows of past units. There is no DistributedDataParallel, so nothing is shared at a step: a
period of 1 averages parameters after each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regimes.collectives.group import GroupWorld, default_group
from regimes.collectives.requests import Layer, Traffic
from regimes.compression.reducer import Reducer, loss_with_flag
from regimes.config import DENSE, Level, OuterConfig
from regimes.ddp import recording, validate
from regimes.ddp.journal import Journal, open_together
from regimes.ddp.pace import Pace
from regimes.errors import TrainingError
from regimes.instruments.base import MeasurementContext
from regimes.instruments.panel import Readings, choose
from regimes.local import arguments, state
from regimes.local.recording import UnitClock, header
from regimes.policies.controller import WholeController
from regimes.policies.periods import period_of
from regimes.records import provenance
from regimes.training.optimizers import Optimizers
from regimes.training.outer import OuterStep, pseudo_gradients
from regimes.training.replicas import Replicas
from regimes.training.rows import layer_entries, of_a_job, sent


def local_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    policy: Any = 32,
    periods: Mapping[str, int] | None = None,
    outer: OuterConfig | Mapping[str, Any] | None = None,
    compressor: Any = "dense",
    level: Level = DENSE,
    every: int = 100,
    record: str | Path | recording.Recording | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> LocalSteps:
    """Let each process train ``model`` by itself, and all meet every so many steps.

    Call it on every process, after ``init_process_group`` and instead of wrapping the model: all
    begin with process 0's parameters. Call ``step()`` once per iteration, after
    ``optimizer.step()``, and ``close()`` at the end, which brings the last steps together.

    Args:
        model: the bare model.
        optimizer: this process's, over its parameters.
        policy: a period in steps, or what decides it: a name, a table or an object.
        periods: what the policy's words mean, by default ``{"low": 1, "high": 32}``.
        outer: what a synchronisation does, by default the mean; ``{"lr": 0.7, "momentum": 0.9,
            "nesterov": True}`` is DiLoCo.
        compressor, level: of the movement that is exchanged, e.g. "topk" and 1 (per cent).
        every: steps of a unit, after which the policy decides and a row is recorded.
        record: a folder for a record of the job; process 0 writes it.
        seed: of the compressor's random numbers.
        timeout: seconds until a process that the others wait for counts as lost.

    Raises:
        ConfigError: one sentence, before anything travels.
    """
    chosen = arguments.choose(policy, periods, outer, compressor, level, every)
    layers = arguments.trainable(model, optimizer)
    validate.check_wait(timeout, None)
    about = recording.recording(record)
    return LocalSteps(model, optimizer, layers, chosen, about, seed, float(timeout))


class LocalSteps:
    """Made by ``local_steps``; one per process.

    Attributes:
        period: of the round under way.
        rows: the units so far, as a record has them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        found: dict[str, nn.Parameter],
        chosen: arguments.Chosen,
        about: recording.Recording | None,
        seed: int,
        timeout: float,
    ) -> None:
        self.chosen, self.layers = chosen, [Layer(n, tuple(p.shape)) for n, p in found.items()]
        parameters, buffers = list(found.values()), list(model.buffers())
        first = parameters[0]
        self.world = GroupWorld(default_group(), first.device, timeout, "local_steps()")
        self.world.meter.dtype = first.dtype
        self.world.guard.done = lambda: self.total
        self.pace = Pace(chosen.every, optimizer)
        self.world.agree(
            **arguments.facts(chosen),
            **self.pace.facts(),
            seed=seed,
            dtype=str(first.dtype),
            layers=layer_entries(self.layers),
            buffers=[[str(t.dtype), *t.shape] for t in buffers],
            code=provenance.code_digest(),
            torch=torch.__version__,
        )
        self.world.broadcast([p.data for p in parameters] + buffers)
        self.replicas = Replicas(parameters, buffers, [Optimizers([optimizer], 0.0)], theirs=True)
        reducer = Reducer(chosen.exchange.compressor, self.layers, self.world, seed)
        self.outer = OuterStep(self.replicas.common, reducer, chosen.outer)
        size = sum(p.numel() for p in parameters)
        self.stack = first.detach().new_empty(1, size)
        parts = self.stack.split([p.numel() for p in parameters], dim=1)
        self.parts = [t.view(1, *p.shape) for t, p in zip(parts, parameters, strict=True)]
        self.levels = chosen.levels(self.layers)
        self.panel = choose({}, chosen.rule.needs, "update", self._context(model, seed))
        self.total, self.since, self.rounds = 0, 0, 0
        self.clock = UnitClock(self.world)
        self.rows: list[dict[str, Any]] = []
        self.earlier, self.closed = Traffic(0, 0), False
        self.header = header(about, self, chosen, model, seed)
        self.journal = Journal(about, self.header) if about and self.world.rank == 0 else None
        self.opened = self.continued = self.to_agree = False
        self.controller = WholeController(chosen.rule, "update", "sync")
        self.wanted_period = 1
        self._decide()
        self.period = self.wanted_period

    def _context(self, model: nn.Module, seed: int) -> MeasurementContext:
        exchange = self.chosen.exchange
        return MeasurementContext(
            model,
            validate.no_data,
            self.world,
            self.layers,
            seed,
            False,
            validate.no_data,
            validate.no_data,
            exchange.compressor,
            exchange.levels,
            apart=lambda: True,
        )

    @property
    def traffic(self) -> Traffic:
        """What this process has handed to the collectives so far."""
        return sum(self.world.meter.layers.values(), self.earlier)

    # -- what a script calls -----------------------------------------------------------------

    def step(self) -> None:
        """An iteration is over; all processes call this after each, an optimiser's step that a
        GradScaler has skipped included.

        Raises:
            TrainingError: another process has died, or a parameter is not finite.
            RecordError: the record cannot be opened.
        """
        if not self.opened:
            self._open()
        if self.total % self.chosen.every == 0:
            self._next_unit()
        if not self.since:
            self.period = self.wanted_period
        self.total += 1
        self.since += 1
        self.clock.start()
        if self.since >= self.period:
            with self.clock.waiting():
                self._meet()
        self.clock.stop()

    def log(self, **values: Any) -> None:
        """Add numbers to the record, as ``Hook.log`` does."""
        if self.journal is not None:
            self.journal.log(values)

    def close(self) -> None:
        """Bring the last steps together and end the record; all processes call this."""
        if self.closed:
            return
        self.closed = True
        if self.since:
            with self.clock.waiting():
                self._meet()
            self.clock.stop()
        if self.total > len(self.rows) * self.chosen.every:
            self._end()
        if self.journal is not None:
            self.journal.close(len(self.rows))

    # -- rounds and units --------------------------------------------------------------------

    def _meet(self) -> None:
        self.world.guard.enter("a synchronisation")
        if self.to_agree:
            place = {"units": len(self.rows), "steps": self.total, "period": self.period}
            self.world.agree(state=place, lr=self.pace.all_rates())
            self.to_agree = False
        pseudo_gradients(self.replicas.common, self.replicas.rows, self.parts)
        flags = loss_with_flag(self.stack.new_zeros(1), self.stack)[:, None]
        values = [self.chosen.value(name) for name in self.levels.names]
        updates, (flag,) = self.outer.reduce(self.parts, values, flags)
        if not bool(flag.isfinite()):
            self._not_finite(bool(flags.isfinite()))
        self.panel.step(self.stack, updates)
        self.outer.step(updates, self.replicas)
        self.since = 0
        self.rounds += 1

    def _not_finite(self, mine: bool) -> None:
        odd = [rank for rank, fine in enumerate(self.world.gather_object(mine)) if not fine]
        raise TrainingError(
            f"a parameter of process {', '.join(map(str, odd))} is not finite after step "
            f"{self.total}: lower the learning rate; the record up to the last unit is intact"
        )

    def _decide(self) -> None:
        self.to_agree = True
        decision = self.controller.decide(self.rows)
        self.wanted_period = steps = period_of(decision.level, self.chosen.periods)
        self.wanted = {"level": decision.level, "why": decision.why, "period": steps}

    def _next_unit(self) -> None:
        if self.total:
            self._end()
        if self.journal is not None:
            self.journal.flush()
        self.pace.begin()

    def _end(self) -> None:
        """A unit is over: its row, and the period from the next synchronisation on."""
        seen, rounds = self.panel.steps > 0, self.rounds
        readings = self.panel.read(len(self.rows), seen=seen) if seen else Readings()
        meter, self.rounds = self.world.meter.take(), 0
        self.earlier = sum(meter.layers.values(), self.earlier)
        number, size = len(self.rows), self.header["config"]["batch_size"]
        steps = self.total - number * self.chosen.every
        rates = self.pace.rates()
        row = of_a_job(number, steps, self.total, rates, size, readings, self.pace.groups)
        row |= {"sync": {**self.wanted, "rounds": rounds}, **sent(meter, self.levels)}
        self.rows.append(row)
        if self.journal is not None:
            self.journal.add(row, self.clock.of_unit(steps), readings.details)
        self.clock = self.clock.next_unit(self.chosen.every)
        self._decide()

    def _open(self) -> None:
        """Begin the record, or go on with it; where process 0 cannot, all hear of it."""
        self.opened = True
        self.journal = open_together(self.world, self.journal, self.rows, self.continued)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this process needs to go on, besides its model's and its optimiser's state, which
        are its own as well between two synchronisations; ``torch.load(weights_only=True)`` reads it
        back. Nothing in it changes afterwards."""
        return state.save(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``saved`` was taken, once the model and its optimiser have their own
        states again; all processes call this.

        Raises:
            ConfigError: it is of another process, or of another model.
        """
        state.check(self, saved)
        self.world.guard.enter("load_state_dict()")
        state.restore(self, saved)
        self.opened, self.continued = False, True
        self._decide()
