"""The hook of a model (of DDP or of FSDP2): its units, the levels decided between them, and
its state.

Compressors, policies and gauges are shared with the trainer (``training.loop``). All processes of
the model's group do the same with the same configuration; the first bucket of each unit checks it.
"""

from __future__ import annotations

import atexit
import copy
import sys
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, SupportsFloat, cast

from torch import Tensor

from regimes.base.config import DENSE
from regimes.base.errors import ConfigError, RegimesError, TrainingError
from regimes.base.precision import full_precision
from regimes.collectives.agreement import WeightsReport
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import check_order
from regimes.hook.ddp.loss_scale import LossScale
from regimes.hook.ddp.node_state import check_devices, devices_of, divide_devices, join_devices
from regimes.hook.ddp.state import StateFit
from regimes.hook.ddp.steps import HookSteps, ModelAdapter, Stateful
from regimes.hook.ddp.unit_steps import UnitSteps
from regimes.instruments.base import EndOfEpochGauge
from regimes.instruments.panel import Readings
from regimes.job.attached import AttachedJob
from regimes.job.choices import Choice
from regimes.job.fit_state import FittedState, damage_as_error, describe_compressor
from regimes.job.recorder import RecordOptions
from regimes.job.state import State, by_layer, get_column, own_part
from regimes.job.unit_ends import UnitSchedule
from regimes.job.weights import AttachedWeights
from regimes.policies import Decision
from regimes.policies.controller import Levels
from regimes.policies.detectors.statistics import Statistic

_FIRST_STEP = 120.0  # seconds before a warning that a process is missing; one may still evaluate
_LAST_VALUES = 3.0  # seconds for what other groups have logged, as a job ends
MANY_STEPS = 1000  # without the end of an epoch: then a warning


class Hook(AttachedJob):
    """Exchanges the gradients of one model on one process. ``attach`` makes it.

    Attributes:
        rows: The units that have ended, as a record has them. A unit is an epoch or a number of
            steps. If the hook ends units by itself, a unit ends when the next step begins, because
            the next learning rate is known then, or with ``close``.
        sends_at_end: Whether the end of a unit contains a collective.
    """

    checks_reasons = False  # a row that cannot be written must not end the script's job

    def __init__(
        self,
        source: ModelAdapter,
        chosen: Choice,
        schedule: UnitSchedule,
        options: RecordOptions | None,
        seed: int,
        scaler: Any,
        timeout: float,
        steps_class: type[UnitSteps] = HookSteps,
        *,
        summarizes: bool = True,
        compares_weights: bool = True,
        graphs: int | None = None,
    ) -> None:
        """
        Args:
            steps_class: `HookSteps` or another `UnitSteps`.
            graphs: how many kinds of exchange of a bucket `HookSteps` keeps as CUDA graphs.
        """
        self.source = source
        # in the closure the source alone: a reference to the hook would keep it alive
        self.weights = AttachedWeights(lambda: source.network, source.parameters, source.ignored)
        # without replicas FSDP2 divides whatever the module has, and each process its own rows
        self.compares_weights = compares_weights and source.replicated
        self._seen_weights: WeightsReport | None = None
        self._attached = [*source.parameters.values()]  # those that the optimiser was given with
        layers, network = source.layers, source.network
        super().__init__(source.make_world(timeout), layers, schedule)
        world, self.summarizes = self.world, summarizes
        check_order(chosen.compressor, chosen.levels, layers, world.workers, world.shards)
        self.chosen, self.by_process = chosen, steps_class.by_process
        self.controller = self.make_controller(
            chosen.policy, chosen.signal, (chosen.compressor, chosen.levels)
        )
        world.meter.dtype = full_precision(source.local[0].new_empty(0)).dtype
        self.reducer = Reducer(chosen.compressor, world.local_layers(layers), world, seed)
        needs = chosen.policy.needs
        signal = chosen.signal if any(Statistic.parse(need).is_norm for need in needs) else None
        of_fsdp: Any = source
        self.panel = self._choose_gauges(
            network,
            seed,
            chosen,
            needs,
            signal,
            self._residuals,
            owned=[x.owned_size for x in of_fsdp.layouts] if steps_class.by_process else None,
            members=of_fsdp.member_names if steps_class.by_process else None,
        )
        # these read the shared update alone, the others this process's own gradients as well
        from_updates = {"norms", "msdr"} if chosen.signal == "update" else {"msdr"}
        gauges = self.panel.gauges
        on_steps = {k: x for k, x in gauges.items() if not isinstance(x, EndOfEpochGauge)}
        readers = [gauge for name, gauge in on_steps.items() if name not in from_updates]
        self.sends_at_end = bool(readers) or world.shards > 1 or len(on_steps) < len(gauges)
        self.sends_at_end |= world.divided and bool(on_steps)
        self.steps = steps = cast(Any, steps_class)(
            source,
            self.reducer,
            list(on_steps.values()),
            readers=readers,
            loss_scale=LossScale(scaler),
            dense_start=chosen.dense_start,
            optimizer=schedule.optimizer,
        )
        if graphs is not None:
            steps.use_graphs(graphs)
        self.world.guard.done = lambda: steps.total
        probed: dict[str, Any] = {}
        if chosen.probe is not None:
            weighed = chosen.probe.weight is not None
            probed = {"probe": chosen.probe.sample_count, "probe_weight": weighed}
        scaled = scaler is not None
        self._agree_on_start(
            chosen.shared_facts(), seed, scaler=scaled, **source.shared_facts(), **probed
        )
        about, kept = options or RecordOptions(""), {} if graphs is None else {"graphs": graphs}
        self._prepare_record(
            options, self._make_header(about, chosen, network, seed, **source.config, **kept)
        )
        self.detached = False
        self.diverged = False  # has a whole unit had no finite gradient?
        self._decide_next()
        steps.before_step = self._begin_step
        source.connect_receiver(steps)
        # weak, or no hook would be deleted before Python ends
        atexit.register(_at_exit, weakref.ref(self))

    @property
    def levels(self) -> dict[str, str]:
        """Return the level that each layer has now; "dense" for those that are never compressed."""
        return dict(zip((layer.name for layer in self.layers), self.decided.names, strict=True))

    # -- what a script calls -----------------------------------------------------------------

    def epoch_end(
        self, *, lr: SupportsFloat | None = None, next_lr: SupportsFloat | None = None
    ) -> dict[str, Decision]:
        """End an epoch: measure its statistics, and decide the levels of the next epoch. All
        processes call this once per epoch, unless the hook ends its units by itself.

        Args:
            lr: the learning rate, if the hook does not have the optimiser. Call this after
                ``scheduler.step()``: then it is the rate of the next epoch, and the policy sees a
                decay in time.
            next_lr: the rate of the next epoch, if ``lr`` is still the rate of the epoch that ends.

        Returns:
            The decision for each compressed layer.

        Raises:
            ConfigError: there was no backward pass since the last call; a rate is missing, or is
                not a number from zero up; or the hook ends its units by itself.
        """
        schedule = self.schedule
        if schedule.automatic:
            raise ConfigError(
                "epoch_end: this hook ends its units by itself, because of attach(..., every=...): "
                "leave epoch_end() out"
            )
        self.steps.undo_cleared()
        if not self.steps.in_unit:
            raise ConfigError(
                "epoch_end: no gradient has been reduced since the epoch began: call it once per "
                "epoch, after the training steps (backward under no_sync() reduces nothing)"
            )
        return self._finish_unit(schedule.named_rates(lr, next_lr))

    def close(self) -> None:
        """End the job and its record. All processes call this, or none does: then the record ends
        when Python ends.

        From then on gradients are exchanged as without a hook, uncompressed and uncounted; the
        replicas of a sharded model exchange them as torch's HSDP does. You may attach another hook.

        If the hook ends units by itself, the steps since the last unit become a last, shorter unit.
        """
        self._end_job(together=True)

    def detach(self) -> None:
        """End the job as ``close`` does, and give the model back as it was before ``attach``. All
        processes call this, or none.

        Afterwards nothing of the hook is left on the model or on optimisers, and the replicas of a
        sharded model exchange nothing. A model of DDP keeps an empty communication hook, which
        averages gradients as DDP does, because DDP takes such a hook once and never gives it back.
        The process groups that the hook has made end with torch's default group.
        """
        if self.detached:
            return
        self.detached = True
        self.close()
        self.source.detach()
        self.steps.detach()
        # Not its groups: torch names a new one by the number of those that exist, and would find
        # the addresses of one that has ended.
        self.world.faults.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, which ``torch.load(weights_only=True)`` reads back.
        Each process saves its own state, because residuals differ. Later steps do not change what
        was returned.

        Raises:
            ConfigError: it is the middle of a unit, and the policy reads more than the norm.
        """
        self.steps.undo_cleared()
        return self._save_state()

    def load_state_dict(self, saved: Mapping[str, Any], *, branch: bool = False) -> None:
        """Continue where ``saved`` was taken. All processes call this, each with its own state.

        Layers are matched by name. A layer that ``saved`` lacks, because it was frozen, starts
        without a residual. A layer that is frozen now is left out. Process 0 warns of both. The
        saved levels hold until the end of the unit; then the policy of this hook decides.

        Args:
            saved: what ``state_dict`` gave on this process.
            branch: allow ``saved`` to have another policy, level or compressor than this hook,
                whose own hold from now on. Residuals stay, if the compressor of this hook keeps
                any. Other memory, such as PowerSGD's factors, stays if both compressors are of one
                class. The policy sees the units so far with the levels that it would have chosen
                itself. ``saved`` must be from the end of a unit, and of the same layers.

        Raises:
            ConfigError: ``saved`` is of another model, process or number of processes. Without
                ``branch``: it has another compressor or value of a level, or lacks statistics that
                the policy reads. With ``branch``: it has other layers, or is from the middle of a
                unit.
        """
        self._load_own(saved, branch)

    def load_full_state_dict(self, full: Mapping[str, Any] | None, *, branch: bool = False) -> None:
        """Continue where ``full`` was taken, on any number of processes. All processes call this.

        On the number of processes that saved it, each process continues with the state that it had.
        On another number the residuals are divided such that their mean over the processes is
        preserved, and ``traffic`` goes on from the saved traffic of process 0. Layers are matched
        as in ``load_state_dict``.

        Args:
            full: what ``full_state_dict`` gave, on process 0. What other processes pass is ignored.
            branch: as in ``load_state_dict``.

        Raises:
            ConfigError: on all processes, as in ``load_state_dict``; or the number of processes is
                another one, ``full`` was saved in the middle of a unit, and the signal is not
                "update".
        """
        self._load_full(full, branch)

    def sharded_state(self, *, branch: bool = False, saved: Any = None) -> Stateful:
        """Return the state of all processes as an object for ``torch.distributed.checkpoint``. Save
        and load it together with the model, on all processes.

        Args:
            branch: allow what is loaded to have another policy, level or compressor, as in
                ``load_state_dict``.
            saved: the folder of the checkpoint that you load, or its ``StorageReader``. It is
                needed if another number of processes has saved it (with `attach_replicas`, another
                number of replicas); without it torch then raises "Missing key". The residuals are
                divided such that their mean is preserved.

        Raises:
            ConfigError: ``saved`` is not a checkpoint of a hook.
        """
        return self.source.make_state(self, branch, saved)

    # -- units -------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Begin a step, and end the last unit if it is over. Runs on every process, when the first
        bucket of a backward pass is full."""
        steps = self.steps.in_unit
        self._turn_unit(steps)
        if self.reducer.reads_rates:
            self.reducer.rates = self.schedule.rates_of(self._attached)
        # Here, in the thread of backward: the one that sends the buckets would see steps that an
        # optimiser takes meanwhile.
        self._seen_weights = None
        if self.steps.check is not None and self.compares_weights:
            unit = len(self.rows) - 1  # which has left these weights
            when = f"unit {unit}" if unit >= 0 else "attach()"
            self._seen_weights = self.weights.read(when, may_move=self.source.follows)
        waits = self.schedule.steps is None  # for a call: counted steps end a unit by themselves
        if waits and steps == MANY_STEPS and not self.rows and self.world.rank == 0:
            warnings.warn(self._describe_no_end(), stacklevel=2)

    def _finish_unit(self, rates: tuple[float, float] | None = None) -> dict[str, Decision]:
        """End a unit: its row, without statistics if every step was skipped, and the levels of the
        next."""
        steps = self.steps
        steps.commit_step()
        if self.sends_at_end:
            self.world.guard.enter_call("the end of an epoch")
        with steps.on_hook_stream():
            finite = steps.finite_in_unit
            # a norm is read by all processes that share a layer, or by none
            seen = self.world.min_count(finite) if self.sends_at_end else finite
            if steps.in_unit and not finite and not self.diverged and self.world.rank == 0:
                self.diverged = True
                warnings.warn(
                    f"no step of unit {len(self.rows)} has finite gradients (NaN or infinity): has "
                    "the training diverged?",
                    stacklevel=2,
                )
            steps.show_held()
            if not seen:
                self._norm_sums().clear()
            readings = self.panel.read(len(self.rows)) if seen else Readings()
        self._end_unit(
            (steps.in_unit, steps.total),
            rates or self.schedule.unit_rates(),
            readings,
            self.decided,
            steps.clock.seconds,
            skipped=steps.in_unit - steps.finite_in_unit,
        )
        steps.restart_unit()
        return self._decide_next()

    def _end_due_unit(self) -> None:
        self.steps.undo_cleared()
        if not self._saves_within_unit and self.schedule.is_over(self.steps.in_unit):
            self._finish_unit()

    def _residuals(self) -> list[Tensor | None]:
        """The residual of each layer, in units of the shared gradient, which is a mean, and of the
        unscaled loss."""
        reducer, found = self.reducer, list[Tensor | None]()
        layers = zip(reducer.layers, reducer.compressors, reducer.scales, strict=True)
        for state, (layer, compressor, scale) in zip(reducer.states, layers, strict=True):
            if (residual := state.residual) is not None:
                residual = compressor.numbers(residual, layer) / (scale * state.residual_unit)
            found.append(residual)
        return found

    def _in_unit(self) -> bool:
        self.steps.undo_cleared()
        return self.steps.in_unit > 0

    def _level_names(self) -> Collection[str]:
        return self.chosen.levels.keys()

    def _decide_next(self) -> dict[str, Decision]:
        self._use_levels(self._plan_unit().levels)
        return {self.layers[i].name: d for i, d in self.decided.decisions.items()}

    def _use_levels(self, decided: Levels) -> None:
        self.decided, values = decided, {DENSE: DENSE, **self.chosen.levels}
        # a trunk's unit that is over but for its row may have levels that are not known here
        self.steps.levels = [values.get(name, DENSE) for name in decided.names]
        self.steps.check = self._agree_on_unit

    def _agree_on_unit(self) -> None:
        """Check that all processes are at the same step, with the same levels and rates: at
        different steps they would wait for each other, and at different rates they would have other
        weights. Runs at a unit's first bucket, in the thread that sends the buckets."""
        self.world.guard.enter_call("the first step of an epoch", _FIRST_STEP)
        place = {
            "units": len(self.rows),
            "steps": [self.steps.in_unit, self.steps.total],
            "levels": self.decided.names,
        }
        self.world.check_agreement(self._seen_weights, state=place, lr=self.schedule.all_rates())
        if not self.record_opened:
            self._open_record()
            if self.recorder is not None and self.branched == len(self.rows):
                self.recorder.note_branch(self.branched)

    # -- state -------------------------------------------------------------------------------

    @property
    def _saves_within_unit(self) -> bool:
        """Whether the gauges can be saved within a unit. The norms can: their running sums are
        saved apart."""
        gauges = self.panel.gauges.items()
        return all(
            name == "norms" or getattr(gauge, "saves_within_unit", False) for name, gauge in gauges
        )

    def _save_state(self, all_units: bool = False) -> State:
        """See ``state_dict``.

        Args:
            all_units: save the rows of all units, including those already written to the record.
        """
        steps, counted = self.steps, self.schedule.steps
        if steps.in_unit and not self._saves_within_unit:
            raise ConfigError(
                f"state_dict: {', '.join(self.panel.gauges)} cannot be saved within an epoch: "
                + (
                    f"save with full_state_dict() after a multiple of {counted} steps"
                    if counted
                    else "call it right after epoch_end"
                )
            )
        steps.show_held()
        memories, residuals = self.reducer.state_dict()
        shared = {
            **({"devices": self.world.shards} if self.world.node else {}),
            "compressor": describe_compressor(self.chosen.compressor),
            "gauges": self.panel.state_dict(),  # by instrument
            "steps": [steps.in_unit, steps.finite_in_unit],  # of the unit under way
            "total": steps.total,  # steps of the job
            "values": self.chosen.values,  # by name of a level
            "lr": self.schedule.lr,
            "seconds": {} if self.recorder is None else dict(steps.clock.seconds),
            "branched": self.branched,  # units of the trunk
            **self._job_state(all_units),
            **steps.state_dict(),
        }
        table, own = {"memory": memories, "level": self.levels}, self._own_state()
        # of a device of a node the memories are its own, too
        apart = {"memory": memories} if devices_of(self.world) > 1 else {}
        own |= {"layers": by_layer(residual=residuals, **apart)}
        state = copy.deepcopy(self.lay_out_state(table, shared, own))
        owed = get_column(state["parts"][0]["layers"], "residual")
        for residual, scale in zip(owed.values(), self.reducer.scales, strict=True):
            if residual is not None and scale != 1:
                residual /= scale  # in units of the unscaled loss
        return state

    def _join_states(self, states: Sequence[State]) -> State:
        return join_devices(super()._join_states(states))

    def _divide_worker(self, state: State) -> State:
        with damage_as_error():
            check_devices(state, self.world)
            return divide_devices(state, self.world, self.layers, self.reducer.compressors)

    def _fit(self, saved: Any, branch: bool) -> FittedState:
        return StateFit(self, self.chosen, self.steps).fit_state(saved, branch)

    def _continue_from(self, fitted: FittedState) -> None:
        """Go on from a state, at the levels that were in use. If a part that ``fit_state`` does not
        check is damaged, the hook is put back, unless it is within an epoch that cannot be
        saved."""
        self.steps.undo_cleared()
        self.steps.commit_step()
        before = None
        with suppress(ConfigError):
            before = self._fit(self._save_state(all_units=True), False).state
        try:
            with damage_as_error():
                self._restore_state(fitted.state)
        except ConfigError:
            if before is not None:
                self._restore_state(before)
            raise
        if fitted.warning is not None and self.world.rank == 0:
            warnings.warn(fitted.warning, stacklevel=3)
        self.continued, self.record_opened = True, False

    def _restore_state(self, fitted: State) -> None:
        steps = self.steps
        residuals = get_column(own_part(fitted)["layers"], "residual")
        self.reducer.load_state_dict(get_column(fitted["layers"], "memory"), residuals)
        self.reducer.to(self.world.device)
        steps.load_state_dict(fitted)
        steps.restart_unit()
        steps.clock.seconds |= fitted["seconds"]
        steps.in_unit, steps.finite_in_unit = fitted["steps"]
        steps.total = fitted["total"]
        self.panel.load_state_dict(fitted["gauges"])
        self.schedule.lr = fitted["lr"]
        self._restore_job(fitted)
        self.branched = fitted["branched"]
        if self.branched == len(self.rows):  # a branch begins here: its own policy decides
            self._decide_next()
            return
        levels = get_column(fitted["layers"], "level")
        names = [levels[layer.name] for layer in self.layers]
        decided = self._plan_unit().levels
        if self.branched is not None and self.branched > len(self.rows):
            # the trunk's last unit is over but for its row: its levels are not this policy's
            decided = Levels(names, [None] * len(names), {})
        self._use_levels(replace(decided, names=names))

    # -- the end -----------------------------------------------------------------------------

    def _describe_no_end(self) -> str:
        """Why no unit has ended so far, and what to do."""
        advice = (
            "end each epoch, or let the hook decide by itself: attach(..., optimizer=optimizer, "
            "every=STEPS)"
        )
        if self.schedule.every == "epoch":
            missing = "epoch_end() was not called"
        elif self.schedule.steps is None:
            missing = "set_epoch() of the sampler has named no other epoch"
        else:
            missing = f"a unit has {self.schedule.steps}"
            advice = "call close() at the end, on all processes, or give attach a smaller every"
        return (
            f"{self.steps.in_unit} steps, and {missing}: all levels are as they began "
            f"({', '.join(sorted({*self.decided.names}))}); {advice}"
        )

    def _end_job(self, together: bool, why: str = "") -> None:
        """End the job, once.

        Args:
            together: all processes call this now, so that a last unit may contain a collective.
            why: the error that has ended the job.
        """
        if self.closed:
            return
        self.steps.undo_cleared()
        self.closed, steps = True, self.steps.in_unit
        if self.schedule.automatic and steps and not why and (together or not self.sends_at_end):
            self._finish_unit()
        apart: RegimesError | None = None
        if together and not why and self.steps.total:
            try:
                self.world.guard.enter_call("close()")
                if self.compares_weights:
                    now = self.weights.read("the job", may_move=self.source.follows)
                    self.world.check_agreement(now)
            except (ConfigError, TrainingError) as error:  # raised once the record has ended
                apart, why = error, str(error)
        if not why:
            none = steps and not self.rows and type(self.controller.policy).__name__ != "Static"
            self._print_warnings(*([self._describe_no_end()] if none else []))
        self._write_rows(0.0 if why else _LAST_VALUES)
        if self.recorder is not None:
            self.recorder.end_record(len(self.rows), why)
        if not why:
            self._summarize()
        self.source.close()
        self.steps.graphs = None  # and their memory
        if apart is not None:
            raise apart

    def __del__(self) -> None:
        """The model is gone before Python ends: end the record, without the other processes, which
        may delete theirs at another time."""
        recorder = getattr(self, "recorder", None)  # none where ``__init__`` has raised early
        if recorder is not None and recorder.writer is not None:
            self._end_job(together=False)


def _at_exit(reference: weakref.ref[Hook]) -> None:
    """End the record when Python ends; as broken, if an error has ended Python."""
    if (hook := reference()) is not None:
        error = getattr(sys, "last_value", None)
        if error is None and not hook.closed:
            hook.world.guard.post_end()
        hook._end_job(False, "" if error is None else f"{type(error).__name__} {error}".strip())
