"""Local steps in a user's own training loop, of a bare model on each process.

Outer step, compressors, policies and rows of past units are shared with the trainer
(``training.local_rounds``). Gradients are never shared, because there is no
DistributedDataParallel: a period of 1 averages parameters after each step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

import torch
from torch import nn

from regimes.base.config import DENSE
from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives.agreement import WeightsReport
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import check_order
from regimes.hook.local.arguments import LocalChoice, TrainedParameters, local_header
from regimes.instruments.panel import Readings, finite_or_none
from regimes.job.attached import AttachedJob
from regimes.job.clock import Clock
from regimes.job.fit_state import (
    FittedState,
    damage_as_error,
    describe_compressor,
    respell_compressor,
)
from regimes.job.job import UnitPlan
from regimes.job.process_states import ProcessStates
from regimes.job.recorder import RecordOptions, logged_number
from regimes.job.state import (
    State,
    get_column,
    layer_shapes,
    own_part,
)
from regimes.job.unit_ends import UnitSchedule, join_optimizers
from regimes.job.weights import AttachedWeights
from regimes.policies.controller import ModelController
from regimes.records import Row
from regimes.training.gradients import new_stack
from regimes.training.local_rounds import Rounds
from regimes.training.optimizers import Optimizers
from regimes.training.replicas import Replicas


class LocalSteps(AttachedJob):
    """Synchronises the model of one process with the others. ``local_steps`` makes it.

    Attributes:
        rows: The units that have ended, as a record has them.
        total: The number of steps so far.
        ended: The number of steps in units that have ended. ``close`` may end a unit that is
            shorter than the others.
        sync: The rounds. A round is the steps between two synchronisations; ``sync.count`` is the
            number of synchronisations in the present unit.
        compares_weights: Whether processes compare their weights after the last synchronisation of
            each unit, and at the end.
        losses: The sum and the number of the training losses of this process in the present unit,
            if the policy reads them.
    """

    compares_weights = True
    called = "local."

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        trained: TrainedParameters,
        chosen: LocalChoice,
        options: RecordOptions | None,
        seed: int,
        world: ProcessWorld,
    ) -> None:
        self.sharded = trained.sharded
        self.model, tensors, buffers = model, trained.local, list(model.buffers())
        layers = [Layer(name, tuple(p.shape)) for name, p in trained.parameters.items()]
        super().__init__(world, layers, UnitSchedule(chosen.every, join_optimizers(optimizers)))
        self.chosen = chosen
        self.total = self.ended = 0
        self.next_period, self.to_agree = 1, False
        self.reads_loss = bool(getattr(chosen.rule, "reads_loss", False))
        self.losses: list[Any] = [0.0, 0]
        world.meter.dtype = tensors[0].dtype
        world.guard.done = lambda: self.total
        kinds = [[str(t.dtype), *t.shape] for t in buffers]
        self._agree_on_start(chosen.shared_facts(), seed, buffers=kinds, **trained.shared_facts())
        trained.start_alike(world, model)
        # in the closure the model alone: a reference to the job would keep it alive
        self.weights = AttachedWeights(lambda: model, trained.parameters)
        self._seen_weights: WeightsReport | None = None
        own, keys = [Optimizers(optimizers, 0.0)], list(trained.parameters.values())
        self.replicas = replicas = Replicas(tensors, buffers, own, in_place=True, keys=keys)
        exchange = chosen.exchange
        check_order(exchange.compressor, exchange.levels, layers, world.workers)
        reducer = Reducer(exchange.compressor, world.local_layers(layers), world, seed)
        synced, storage = replicas.synced_parameters, new_stack(tensors, 1)
        self.sync = Rounds(synced, reducer, chosen.outer, storage, replicas=replicas)
        self.panel = self._choose_gauges(
            model,
            seed,
            exchange,
            [*chosen.rule.needs, *exchange.policy.needs],
            "update",
            reducer.residuals,
            is_local=lambda: True,
        )
        self.clock = Clock(world.device)
        self._prepare_record(options, local_header(options, self, chosen, model, seed))
        self.sync_controller = ModelController(chosen.rule, "update", "sync")
        self.periods = chosen.periods
        self.controller = self.make_controller(exchange.policy, "update")
        self._decide_next()

    @property
    def period(self) -> int:
        """Return the period: the number of steps in the present round. If the model is synchronised
        in fragments, this is the period of the first fragment."""
        return self.sync.fragments[0].period

    # -- what a script calls -----------------------------------------------------------------

    def step(self) -> None:
        """End a step, and synchronise if the round is over. All processes call this once after each
        iteration, also if a GradScaler has skipped the optimiser's step.

        Raises:
            ConfigError: ``close()`` was called before; or the policy reads the training loss, and
                no process has logged one in the first unit.
            TrainingError: another process has died, or a parameter is not finite.
            RecordError: the record cannot be opened.
        """
        if self.closed:
            raise ConfigError(
                "step: close() has ended these local steps, so nothing would be synchronised any "
                "more: call local_steps() again to go on"
            )
        if not self.record_opened:
            self._open_record()
        self._turn_unit(self.total - self.ended)
        self.sync.begin_step(self.next_period)
        self.total += 1
        self.clock.start_step()
        if self.sync.advance_step():
            with self.clock.count_waiting(self.world):
                self._synchronize()
        self.clock.stop_step()

    def close(self) -> None:
        """Synchronise the last steps and end the record. All processes call this. A second call
        does nothing."""
        if self.closed:
            return
        self.closed = True
        try:
            self._end_rounds()
        except Exception as error:  # the record's folder is free again, and says why
            if self.recorder is not None:
                said = f"{type(error).__name__} {error}"
                self.recorder.end_record(len(self.rows), said)
            raise
        self.sync.close()
        if self.sharded is not None:
            self.sharded.release()
        self._print_warnings()
        if self.recorder is not None:
            self.recorder.end_record(len(self.rows))
        self._summarize()

    def _end_rounds(self) -> None:
        """Synchronise the last steps, and end the last unit."""
        if self.sync.is_between:
            with self.clock.count_waiting(self.world):
                self._synchronize(last=True)
            self.clock.stop_step()
        if self.chosen.outer.mixing:  # all processes end with the same parameters
            self.replicas.receive_synced(range(len(self.layers)), 0.0)
        if self.compares_weights and self.total:
            self.world.guard.enter_call("close()")
            self.world.check_agreement(self.weights.read("the job", may_move=True))
        if self._in_unit():
            self._finish_unit()

    def log(self, **values: SupportsFloat) -> None:
        """Add numbers to the record. They belong to the unit of the last step. Several values of
        one name in a unit are averaged, and only the values of process 0 are recorded. If the
        policy reads the training loss, each process logs its own "train_loss", with a record or
        without: the policy then reads the mean over all processes.

        Raises:
            ConfigError: a value is not a number.
        """
        if self.reads_loss and "train_loss" in values:
            self.losses[0] = self.losses[0] + logged_number("train_loss", values.pop("train_loss"))
            self.losses[1] += 1
        super().log(**values)

    # -- rounds and units --------------------------------------------------------------------

    def _synchronize(self, *, last: bool = False) -> None:
        self.replicas.follow(self.weights.trained(), list(self.model.buffers()))
        self.world.guard.enter_call("a synchronisation")
        if self.to_agree:
            self.sync.wait_for_sent()  # its thread uses the communicator until then
            place: dict[str, Any] = {"units": len(self.rows), "steps": self.total}
            place |= {"period": self.next_period}
            place |= {} if self.manual_level is None else {"level": self.levels.names}
            self.world.check_agreement(
                self._seen_weights, state=place, lr=self.schedule.all_rates()
            )
            self._seen_weights, self.to_agree = None, False
        for mean, flag, *_ in self.sync.synchronize(self.values, self.panel, last=last):
            if not bool(mean.isfinite()):  # on all processes alike
                finite = self.world.gather_object(bool(flag.isfinite()))
                broken = ", ".join(str(rank) for rank, good in enumerate(finite) if not good)
                raise TrainingError(
                    f"a parameter of process {broken} is not finite after step {self.total}: lower "
                    "the learning rate; the record up to the last unit is intact"
                )
        over = self.total - self.ended + self.next_period > self.chosen.every
        outer = self.chosen.outer
        if self.compares_weights and over and not (outer.leaves_apart or outer.mixing):
            # the last synchronisation of the unit, which leaves all processes with the same weights
            self._seen_weights = self.weights.read(f"unit {len(self.rows)}", may_move=True)

    def _in_unit(self) -> bool:
        return self.total > self.ended

    def _level_names(self) -> Collection[str]:
        return self.chosen.exchange.levels.keys()

    def _decide_next(self) -> None:
        """The period from the next round on, and the level; processes compare them at their next
        synchronisation."""
        self.to_agree = True
        plan = self._plan_unit()
        self.levels, self.decided, self.next_period = plan.levels, plan.sync, plan.sync["period"]
        self.values = [self.chosen.exchange.levels.get(name, DENSE) for name in self.levels.names]

    def decide_unit(self, history: Sequence[Row] | None = None) -> UnitPlan:
        """Decide the level and the period of the next unit, ``len(rows)``. If there is only one
        level, its decision has no reason.

        Args:
            history: the past units as the policy of levels is to see them. None: as they are in
                ``rows``.

        Raises:
            ConfigError: a policy returns something other than decisions.
        """
        plan = super().decide_unit(history)
        if self.chosen.varies:
            return plan
        return replace(plan, levels=replace(plan.levels, why=[None] * len(self.layers)))

    def _finish_unit(self, rates: tuple[float, float] | None = None) -> None:
        """End a unit: its row, and the period from the next round on."""
        self.sync.wait_for_sent()  # readings need the communicator that its thread uses
        seen, rounds = self.panel.steps > 0, self.sync.take_count()
        readings = self.panel.read(len(self.rows), seen=seen) if seen else Readings()
        losses = {"train_loss": self._mean_loss()} if self.reads_loss else {}
        steps, self.ended = self.total - self.ended, self.total
        self._end_unit(
            (steps, self.total),
            rates or self.schedule.unit_rates(),
            readings,
            self.levels,
            self.clock.of_unit(steps),
            sync={**self.decided, "rounds": rounds},
            **losses,
        )
        self.clock = self.clock.next_unit(self.chosen.every)
        self._decide_next()

    def _mean_loss(self) -> float | None:
        """The mean over processes of what each has logged in the unit: one small collective, at the
        end of a unit. None where none has logged, or the mean is not finite.

        Raises:
            ConfigError: on all processes: no process has ever logged its loss.
        """
        (total, count), self.losses = self.losses, [0.0, 0]
        self.world.guard.enter_call("the end of a unit")
        gathered = self.world.gather_object(float(total) / count if count else None)
        known = [loss for loss in gathered if loss is not None]
        if known:
            return finite_or_none(math.fsum(known) / len(known))
        if not self.closed and all(row["train_loss"] is None for row in self.rows):
            raise ConfigError(
                f"policy: {type(self.chosen.rule).__name__} decides by the training loss, and none "
                "was reported so far: call log(train_loss=loss) of what local_steps "
                "returns, once per iteration on each process"
            )
        return None

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this process needs to continue, besides the states of its model and its
        optimiser. Save these two on each process as well, because they differ between two
        synchronisations. ``torch.load(weights_only=True)`` reads the state back. Later steps do not
        change what was returned."""
        outer, own = self.sync.state_dict()
        synced, names = self.replicas.synced_tensors, [layer.name for layer in self.layers]
        shared = {
            "compressor": describe_compressor(self.chosen.exchange.compressor),
            "buffers": synced[len(names) :],
            "outer": outer,
            "round": [self.total, self.sync.count],
            "gauges": self.panel.state_dict(),
            **self._job_state(),
        }
        part = {
            "outer": own,
            "seconds": [dict(self.clock.seconds), self.clock.clocked],
            "losses": [float(self.losses[0]), self.losses[1]],
            **self._own_state(),
        }
        table = {"synced": dict(zip(names, synced, strict=False))}
        return copy.deepcopy(self.lay_out_state(table, shared, part))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``saved`` was taken. All processes call this, after they have loaded the
        states of their model and optimiser.

        Args:
            saved: what ``state_dict`` gave on this process.

        Raises:
            ConfigError: ``saved`` is of another process, model or compressor, or has another number
                of fragments.
        """
        self._load_own(saved)

    def load_full_state_dict(self, full: Mapping[str, Any] | None) -> None:
        """Continue where ``full`` was taken, on any number of processes. All processes call this,
        after they have loaded a saved state of the model and the optimiser.

        On the number of processes that saved it, each process continues with the state that it had.
        On another number the parameters are those after the last synchronisation, the residuals are
        divided such that their mean over the processes is preserved, and ``traffic`` goes on from
        the saved traffic of process 0.

        Args:
            full: what ``full_state_dict`` gave, on process 0. What other processes pass is ignored.

        Raises:
            ConfigError: on all processes: ``full`` is of another model or compressor; or the number
                of processes is another one, and ``full`` was saved between two synchronisations.
        """
        self._load_full(full)

    def _continue_from(self, fitted: FittedState) -> None:
        with damage_as_error():
            self._restore_state(fitted.state)
        self.continued, self.record_opened = True, False
        self._decide_next()

    def _restore_state(self, state: State) -> None:
        self.replicas.follow(self.weights.trained(), list(self.model.buffers()))
        own = own_part(state)
        before = [*get_column(state["layers"], "synced").values(), *state["buffers"]]
        for tensor, value in zip(self.replicas.synced_tensors, before, strict=True):
            tensor.copy_(value)
        residuals = get_column(own["outer"]["layers"], "residual")
        self.sync.load_state_dict(state["outer"], residuals, own["outer"]["movements"])
        self.total, self.sync.count = state["round"]
        self.panel.steps = self.sync.count
        self.panel.load_state_dict(state.get("gauges", {}))
        self.clock = Clock(self.world.device)
        seconds, self.clock.clocked = own["seconds"]
        self.clock.seconds |= seconds
        self.losses = own["losses"]
        self._restore_job(state)
        self.ended = sum(row["steps"] for row in self.rows)

    def sharded_state(self, *, saved: Any = None) -> ProcessStates:
        """Return the state of all processes as an object for ``torch.distributed.checkpoint``. Save
        and load it on all processes. A divided model needs the same mesh again. Between two
        synchronisations the replicas differ, so save the model and the optimiser of each replica
        under a name of its own.

        Args:
            saved: the folder of the checkpoint that you load, or its ``StorageReader``. It is
                needed if another number of processes has saved the checkpoint, which must then be
                from right after a synchronisation.
        """
        return ProcessStates(self, saved=saved)

    def _fit(self, saved: Any, branch: bool) -> FittedState:
        compressor = self.chosen.exchange.compressor
        here = describe_compressor(compressor)
        world, buffers = self.world, self.replicas.synced_tensors[len(self.layers) :]
        try:
            place = [own_part(saved)["process"], saved["processes"]]
            layers = get_column(saved["layers"], "shape")
            saved_buffers = [list(t.shape) for t in saved["buffers"]]
            fragments = len(saved["outer"]["fragments"])
            # states of versions up to 0.4 do not name it
            pressed = respell_compressor(saved.get("compressor", here), compressor)
        except (LookupError, TypeError, ValueError, AttributeError):
            place, layers, saved_buffers, fragments, pressed = [None, None], {}, [], 0, here
        for name, theirs, mine in (
            ("process", place, [world.rank, world.processes]),
            ("layers", [*layers.items()], [*layer_shapes(self.layers).items()]),
            ("buffers", saved_buffers, [list(t.shape) for t in buffers]),
            ("outer.fragments", fragments, len(self.sync.fragments)),
            ("compressor", pressed, here),
        ):
            if theirs != mine:
                other = "; a state of full_state_dict() loads on any number of processes"
                raise ConfigError(
                    f"load_state_dict: the state was saved with {name} {theirs}, this job has "
                    f"{mine}{other * (name == 'process')}"
                )
        return FittedState(copy.deepcopy(dict(saved)))
