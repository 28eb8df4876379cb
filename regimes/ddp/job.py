"""A job under a hook: its units, what is decided between them, what is recorded.

The same compressors, policies and gauges as the trainer's (``training.loop``), and the same rows of
past units, so that a policy sees here what it would see there. All processes of the model's group
do the same with the same configuration, which is checked at the first bucket of each unit.
"""

from __future__ import annotations

import atexit
import sys
import warnings
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes.collectives.group import GroupWorld
from regimes.collectives.requests import Layer, Traffic
from regimes.compression.reducer import Reducer, check_order, costs_per_step
from regimes.config import DENSE
from regimes.ddp import state, validate
from regimes.ddp.buckets import Buckets
from regimes.ddp.fitting import fit, intact
from regimes.ddp.journal import Journal, open_together
from regimes.ddp.pace import Pace
from regimes.ddp.recording import Recording, header
from regimes.detectors.statistics import Statistic
from regimes.errors import ConfigError
from regimes.instruments.base import MeasurementContext
from regimes.instruments.panel import Panel, Readings, choose
from regimes.policies import Decision
from regimes.policies.controller import Controller, Levels
from regimes.policies.history import level_costs
from regimes.records import provenance
from regimes.training.idle_policy import silence
from regimes.training.rows import layer_entries, of_a_job, sent

FIRST_STEP = 120.0  # seconds until processes wonder who is missing; one may evaluate meanwhile
LONG = 1000  # steps after which it is said that no epoch has ended


@runtime_checkable
class Scaler(Protocol):
    """What the hook wants of a ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class Job:
    """One per model and process.

    Attributes:
        rows: the units (epochs, or of so many steps) so far, as a record has them.
        talks: whether the end of a unit sends something.
        header: of the record, written or not.
        continued: a state was loaded.
        to_open: the record is opened once all processes agree.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        chosen: validate.Choice,
        paced: Pace,
        about: Recording | None,
        seed: int,
        scaler: Scaler | None,
        timeout: float,
    ) -> None:
        rule, signal = chosen.policy, chosen.signal
        self.compressor, self.values = chosen.compressor, chosen.levels
        found = validate.trainable(model)
        self.layers = [Layer(name, tuple(p.shape)) for name, p in found.items()]
        check_order(self.compressor, self.values, self.layers, model.process_group.size())
        compressed = [i for i, layer in enumerate(self.layers) if layer.compressed]
        per_step = costs_per_step(
            self.compressor, self.layers, self.values, model.process_group.size()
        )
        costs = level_costs(per_step, compressed)
        self.controller = Controller(rule, list(found), compressed, signal, costs)
        first = next(iter(found.values()))
        self.world = GroupWorld(model.process_group, first.device, timeout)
        self.world.meter.dtype = first.dtype
        self.reducer = Reducer(self.compressor, self.layers, self.world, seed)
        self.panel = self._choose(model.module, chosen, seed)
        from_updates = {"norms", "msdr"} if signal == "update" else {"msdr"}
        self.talks = not self.panel.gauges.keys() <= from_updates
        self.buckets = buckets = Buckets(
            model,
            list(found.values()),
            self.reducer,
            list(self.panel),
            keep_gradients=self.talks,
            scale=(lambda: 1.0) if scaler is None else scaler.get_scale,
            dense_start=chosen.dense_start,
        )
        self.world.guard.done = lambda: buckets.total
        self.rows: list[dict[str, Any]] = []
        self.pace, self.continued, self.closed, self.to_open = paced, False, False, True
        self.lr: float | None = None
        self.earlier = Traffic(0, 0)
        self._agree_on_all(chosen, seed, scaler is not None)
        self.header = header(about or Recording(""), self, chosen, model.module, seed)
        keeps = about is not None and self.world.rank == 0
        self.journal = Journal(about, self.header) if about and keeps else None
        if self.journal is not None:
            self.world.claim(self.journal.claim)
        self._decide()
        self.buckets.begin = self._begin_step
        receive = self.buckets.receive
        model.register_comm_hook(weakref.ref(model), lambda state, bucket: receive(bucket))
        atexit.register(_at_exit, weakref.ref(self))

    def _choose(self, model: nn.Module, chosen: validate.Choice, seed: int) -> Panel:
        """The gauges of what the policy reads; they see gradients and no data."""
        context = MeasurementContext(
            model,
            validate.no_data,
            self.world,
            self.layers,
            seed,
            False,
            validate.no_data,
            validate.no_data,
            chosen.compressor,
            chosen.levels,
        )
        needs = chosen.policy.needs
        norm = any(Statistic.parse(need).is_norm for need in needs)
        return choose({}, needs, chosen.signal if norm else None, context)

    @property
    def levels(self) -> dict[str, str]:
        """The level that each layer has now; "dense" for those that are never compressed."""
        return dict(zip((layer.name for layer in self.layers), self.decided.names, strict=True))

    @property
    def traffic(self) -> Traffic:
        """What this process has handed to the collectives since training began, detectors'
        signals and the news of non-finite gradients included."""
        return sum(self.world.meter.layers.values(), self.earlier)

    # -- units -------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """The first bucket of a backward pass is full; on every process."""
        steps = self.buckets.steps
        if self.pace.over(steps):
            self._end(*self.pace.rates())
        if self.journal is not None:
            self.journal.flush()
        if not self.buckets.steps:
            self.pace.begin()
        if steps == LONG and not self.rows and self.world.rank == 0:
            warnings.warn(self._no_end(), stacklevel=2)

    def _end(self, lr: float, following: float) -> dict[str, Decision]:
        """A unit is over: its row, and the levels of the next."""
        row, details = self._row(lr, following)
        self.rows.append(row)
        if self.journal is not None and not self.journal.closed:
            self.journal.add(row, self.buckets.clock.seconds, details)
        self.buckets.restart()
        return self._decide()

    def _row(self, lr: float, following: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """The unit as a record has it, and the instruments' details; without statistics when every
        step was skipped."""
        buckets, kept = self.buckets, self.buckets.kept
        if self.talks:
            self.world.guard.enter("the end of an epoch")
        with buckets.on_hook_stream():
            readings = self.panel.read(len(self.rows)) if kept else Readings()
        meter = self.world.meter.take()
        self.earlier = sum(meter.layers.values(), self.earlier)
        size = self.header["config"]["batch_size"]
        rates = lr, following
        row = of_a_job(
            len(self.rows), buckets.steps, buckets.total, rates, size, readings, self.pace.groups
        )
        row |= {"skipped": buckets.steps - kept, **sent(meter, self.decided)}
        return row, readings.details

    def _decide(self) -> dict[str, Decision]:
        self._use(self.controller.decide(self.rows))
        return {self.layers[i].name: d for i, d in self.decided.decisions.items()}

    def _use(self, decided: Levels) -> None:
        self.decided = decided
        self.buckets.levels = [DENSE if x == DENSE else self.values[x] for x in decided.names]
        self.buckets.check = self._agree

    def _continue(self, fitted: state.Fitted) -> None:
        """Go on from a state, at the levels that were in use. One that is damaged further in than
        ``fit`` looks leaves the hook as it was, but within an epoch that cannot be saved."""
        before = None
        with suppress(ConfigError):
            before = fit(self, state.save(self))
        try:
            with intact():
                self._restore(fitted)
        except ConfigError:
            if before is not None:
                self._restore(before)
            raise
        self.continued = self.to_open = True

    def _restore(self, fitted: state.Fitted) -> None:
        levels = state.restore(self, fitted)
        self._use(replace(self.controller.decide(self.rows), names=levels))

    def _agree_on_all(self, chosen: validate.Choice, seed: int, scaled: bool) -> None:
        """Processes whose numbers would not be the same are refused before a hook is registered."""
        model = self.buckets.model
        self.world.agree(
            **validate.facts(chosen),
            **self.pace.facts(),
            seed=seed,
            scaler=scaled,
            dtype=str(self.world.meter.dtype),
            layers=layer_entries(self.layers),
            ddp={name: getattr(model, name) for name in validate.SAME_OF_DDP},
            code=provenance.code_digest(),
            torch=torch.__version__,
        )

    def _agree(self) -> None:
        """Processes in different places, or at different rates, would wait for each other or hold
        other weights."""
        self.world.guard.enter("the first step of an epoch", FIRST_STEP)
        b = self.buckets
        place = {"units": len(self.rows), "steps": [b.steps, b.total], "levels": self.decided.names}
        self.world.agree(state=place, lr=self.pace.all_rates())
        if self.to_open:
            self._open()

    def _open(self) -> None:
        """Begin the record, or go on with it; where process 0 cannot, all hear of it."""
        self.to_open = False
        self.journal = open_together(self.world, self.journal, self.rows, self.continued)

    def _no_end(self) -> str:
        missing = (
            "epoch_end() was not called"
            if self.pace.every == "epoch"
            else ("set_epoch() of the sampler has named no other epoch")
        )
        return (
            f"{self.buckets.steps} steps, and {missing}: all levels are as they began "
            f"({', '.join(sorted({*self.decided.names}))}); end each epoch, or let the hook decide "
            "by itself: attach(..., optimizer=optimizer, every=STEPS)"
        )

    def _close(self, talks: bool, why: str = "") -> None:
        """The end of the job, once; ``talks``: the other processes are there as well."""
        if self.closed:
            return
        self.closed, steps = True, self.buckets.steps
        if self.pace.own and steps and not why and (talks or not self.talks):
            self._end(*self.pace.rates())
        if self.world.rank == 0 and not why:
            said = silence({**self.header, "units": len(self.rows)}, self.rows)
            if steps and not self.rows and type(self.controller.policy).__name__ != "Static":
                said.append(self._no_end())
            for sentence in said:
                print(f"regimes: {sentence}", file=sys.stderr)
        if self.journal is not None:
            self.journal.close(len(self.rows), why)

    def __del__(self) -> None:
        """Nobody has it any more, Python goes on: its record ends here."""
        journal = getattr(self, "journal", None)  # an attach that is refused may have none
        if journal is not None and journal.writer is not None:
            self._close(False)


def _at_exit(found: weakref.ref[Job]) -> None:
    """Python ends: so does the record, well unless an error ends Python."""
    if (hook := found()) is not None:
        error = getattr(sys, "last_value", None)
        hook._close(False, "" if error is None else f"{type(error).__name__} {error}".strip())
