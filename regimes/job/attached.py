"""What a hook and local steps share: the job of a script's own loop, its record and saved state.

Rows of past units have the trainer's form (``job.rows``), so that a policy sees here what it would
see there. All processes of a job make the same calls in the same order: most calls contain a
collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, SupportsFloat, TypeVar, cast

import torch
from torch import Tensor, nn

from regimes import policies
from regimes.base.config import Signal
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.base.torch_compat import uncompiled
from regimes.collectives.claims import Claims
from regimes.collectives.layers import Layer, Traffic
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.sharded_models import is_divided
from regimes.instruments.base import MeasurementContext
from regimes.instruments.gradient_norm import NormsGauge
from regimes.instruments.panel import Panel, Readings, choose_instruments
from regimes.job.choices import Choice
from regimes.job.fit_state import FittedState, damage_as_error, refuse_state
from regimes.job.header import build_header
from regimes.job.job import Job, UnitPlan
from regimes.job.move_residuals import on_processes
from regimes.job.recorder import JobRecorder, RecordOptions, check_undivided
from regimes.job.rows import layer_entries, traffic_columns, unit_columns
from regimes.job.run_warnings import run_warnings
from regimes.job.saved_units import restore_units, saved_units, with_recorded_units
from regimes.job.set_level import apply_set_level, set_entry, was_set
from regimes.job.state import State, check_format, join_states, on_cpu, own_part
from regimes.job.summary import job_summary
from regimes.job.unit_ends import UnitSchedule, describe_optimizer
from regimes.policies.controller import Levels
from regimes.records import Header, Row, describe_uncompressed_layers, provenance

log = logging.getLogger(__name__)
T = TypeVar("T")


class AttachedJob(Job):
    """Runs the units of a script's own training: their rows, record and saved state.

    Attributes:
        claims: to a record that other groups of the job may want; None: there is no other group.
        recorder: writes the record; None without one, and on all processes but 0.
        past_traffic: of units that are over.
        continued: a state was loaded.
        relay: takes logged values, for the record of another group of the job (a pipeline's last
            stage knows the loss); None: there is none.
        shared: other groups leave values for this group's record.
        has_record: process 0 writes the units of this job to a record, which has been opened.
        branched: units that another configuration has trained; the last one may not have ended yet.
            None: this job is no branch.
        manual_level: what the script has set, see ``job.set_level``; None: the policy decides.
        earlier_level: the same for the unit under way, where the script has set another level or
            none within it.
        spent: seconds of the units that were trained since it was made, by name.
        summarizes: process 0 prints a summary as it ends.
    """

    world: ProcessWorld
    summarizes = True
    called = "hook."  # what a script calls it, with a point
    by_process = False  # no process holds whole layers: `sharded_state` alone saves all
    unit_is_open = False  # ``log`` adds to the last row

    def __init__(
        self, world: ProcessWorld, layers: Sequence[Layer], schedule: UnitSchedule
    ) -> None:
        super().__init__(world, layers)
        self.schedule, self.claims = schedule, Claims.of_world(world)
        self._seen: list[Row] = []  # see ``_policy_history``
        self.past_traffic = Traffic(0, 0)
        self.manual_level: dict[str, Any] | None = None
        self.earlier_level: dict[str, Any] | None = None
        self.spent: Counter[str] = Counter()
        self.recorder: JobRecorder | None = None
        self.relay: JobRecorder | None = None
        self.shared = False
        self.closed = self.continued = self.record_opened = self.has_record = False
        self.branched: int | None = None

    def __repr__(self) -> str:
        """One line."""
        world, compressed = self.world, sum(layer.compressed for layer in self.layers)
        state = "closed" if self.closed else f"process {world.rank} of {world.processes}"
        return (
            f"<{type(self).__name__}: {compressed} of {len(self.layers)} layers compressed, "
            f"{state}, {len(self.rows)} units recorded>"
        )

    @property
    def traffic(self) -> Traffic:
        """Return what this process has sent since training began, in floats and bytes as `Traffic`
        counts them. This includes what detectors read and the flags of non-finite gradients, but
        not ``instrument_bytes``."""
        return sum(self.world.meter.layers.values(), self.past_traffic)

    @property
    def instrument_bytes(self) -> int:
        """Return the bytes that instruments have sent besides the exchange of gradients. An
        instrument only measures, such as the curvature."""
        return sum(self.world.instruments.sent.values())

    def log(self, **values: SupportsFloat) -> None:
        """Add numbers to the record. They belong to the unit of the last step. Several values of
        one name in a unit are averaged. "train_loss", "test_loss" and the record's metric have
        columns of their own. Only the values of process 0 are recorded. Without a record nothing
        happens, unless a policy of local steps reads the values.

        Raises:
            ConfigError: a value is not a number, or is a DTensor of which each process has a part.
        """
        check_undivided(values)
        if (recorder := self.recorder or self.relay) is not None:
            recorder.log_values(values)

    def set_level(self, level: str | None, why: str = "") -> None:
        """Set one level for all compressed layers, in place of the policy's decisions. All
        processes call this, between the same two steps. In the middle of a unit it takes effect
        with the next unit, because a record has one level for each unit.

        Args:
            level: a name among the job's levels, or "dense", which sends gradients uncompressed.
                None: the policy decides again.
            why: the reason that the record has beside the level.

        Raises:
            ConfigError: there is no such level. If processes have set different levels, all raise
                it at the first step with the new level.
        """
        begun, unit = self._in_unit(), len(self.rows)
        entry = set_entry(level, why, self._level_names(), unit + begun)
        if begun and self.manual_level is not None and self.manual_level["unit"] <= unit:
            self.earlier_level = self.manual_level
        self.manual_level = entry
        if not begun:
            self._decide_next()

    def _in_unit(self) -> bool:
        """Has the unit under way had a step?"""
        raise NotImplementedError

    def _level_names(self) -> Collection[str]:
        """The names of levels, beside "dense"."""
        raise NotImplementedError

    def _decide_next(self) -> Any:
        """Decide for the unit under way, or for the next one if it is over."""
        raise NotImplementedError

    def _finish_unit(self, rates: tuple[float, float] | None = None) -> Any:
        """End the unit under way and decide for the next.

        Args:
            rates: of the two, at their first steps; None: as the optimiser has them.
        """
        raise NotImplementedError

    def _turn_unit(self, steps: int) -> None:
        """As a step begins: end a unit of so many steps if it is over, write what is known of past
        ones, and begin the next at its first step."""
        if self.schedule.is_over(steps):
            self._finish_unit()
            steps = 0
        self._write_rows()
        if not steps:
            self.schedule.begin_unit()

    def _plan_unit(self) -> UnitPlan:
        """What the policies decide for the unit ``len(rows)``, or the script has set."""
        plan, entry = (
            self.decide_unit(self._policy_history()),
            self.earlier_level or self.manual_level,
        )
        compressed = self.controller.compressed
        return replace(plan, levels=apply_set_level(entry, len(self.rows), plan.levels, compressed))

    def _policy_history(self) -> list[Row]:
        """The units so far as a policy of levels sees them: with levels of its own, also where it
        was a trunk's or the script that chose them."""
        branched = self.branched or 0
        if not branched and not any(map(was_set, self.rows)):
            return self.rows
        for i in range(len(self._seen), len(self.rows)):
            if i < branched or was_set(self.rows[i]):
                self.replay_levels(self._seen, self.rows[: i + 1])
            else:
                self._seen.append(self.rows[i])
        return self._seen

    def _write_rows(self, wait: float = 0.0) -> None:
        """Write the rows of past units, with what other groups have logged; as a step begins. A
        later stage of a pipeline begins its backward pass first, and has then left its values.

        Args:
            wait: seconds for groups that have left none yet.
        """
        unit = f"logged/{len(self.rows) - 1}"
        if self.relay is not None and self.claims is not None and self.unit_is_open:
            with contextlib.suppress(RuntimeError, ValueError):  # the default group has ended
                self.claims.leave_text(
                    self.relay.folder_key, unit, json.dumps(self.relay.take_logged())
                )
        if (recorder := self.recorder) is not None and not recorder.closed:
            if self.shared and self.claims is not None and recorder.row_is_open:
                texts: list[str] = []
                with contextlib.suppress(RuntimeError, ValueError):
                    texts = self.claims.read_texts(recorder.folder_key, unit, wait)
                for values in map(json.loads, texts):
                    recorder.log_values(
                        {k: x for k, x in values.items() if k not in recorder.counts}
                    )
            recorder.write_pending()
        self.unit_is_open = False

    def _agree_on_start(self, chosen: Mapping[str, Any], seed: int, **more: Any) -> None:
        """Refuse, on all processes, a job in which processes would compute different numbers.

        Args:
            chosen: the checked arguments in plain types.
            more: other facts that must be the same on all processes.
        """
        self.world.check_agreement(
            **chosen,
            **self.schedule.shared_facts(),
            seed=seed,
            dtype=str(self.world.meter.dtype),
            layers=layer_entries(self.layers),
            **more,
            code=provenance.code_digest(),
            own_code=provenance.own_code(chosen),
            torch=torch.__version__,
        )

    def _choose_gauges(
        self,
        model: nn.Module,
        seed: int,
        exchange: Choice,
        needs: Collection[str],
        signal: Signal | None,
        residuals: Callable[[], Sequence[Tensor | None]],
        *,
        owned: Sequence[int] | None = None,
        members: Mapping[str, Sequence[str]] | None = None,
        is_local: Callable[[], bool] | None = None,
    ) -> Panel:
        """The gauges of the statistics that a policy needs (they see gradients, or
        pseudo-gradients, and no data), of the exchange, and of a script's probe.

        Args:
            signal: the norm that is read; None: none.
            residuals, owned, members: see ``MeasurementContext``.
            is_local: for local steps, see ``MeasurementContext.is_local``.
        """
        probe = exchange.probe
        if is_divided(model):  # a probe of one process alone would wait for others' weights
            self.world.check_agreement(
                **exchange.instrument_facts(), probe=probe.sample_count if probe else 0
            )
        context = MeasurementContext(
            model,
            loss=cast(Any, probe.mean_loss if probe else no_data),
            world=self.world,
            layers=self.layers,
            seed=seed,
            union=False,
            probe=cast(Any, probe.take_batches if probe else no_data),
            samples=no_data,
            compressor=exchange.compressor,
            levels=exchange.levels,
            is_local=is_local,
            weight=probe.weigh_batch if probe else None,
            residuals=residuals,
            owned=owned,
            members=members,
        )
        return choose_instruments(exchange.instruments, needs, signal, context)

    # -- record ------------------------------------------------------------------------------

    def _make_header(
        self, options: RecordOptions, chosen: Choice, network: nn.Module, seed: int, **more: Any
    ) -> Header:
        """``run.json`` of the record; what is not known is None, or left out.

        Args:
            more: entries of the configuration of this kind of job.
        """
        world, optimizer = self.world, self.schedule.optimizer
        bare = uncompiled(network)
        model_name = type(bare).__name__
        if is_divided(bare):  # `fully_shard` has given it a new class, with a prefix
            model_name = model_name.removeprefix("FSDP")
        config = {
            "name": options.name or policies.REGISTRY.table(chosen.policy)["name"],
            "seed": seed,
            "epochs": None,  # "units" has them
            "unit_steps": self.schedule.steps,
            "workers": world.workers,
            "batch_size": options.batch_size,
            "data": {"name": options.data},
            "model": {"name": model_name},
            "optimizer": (describe_optimizer(optimizer) if optimizer else {"name": None})
            | {"lr": None, "schedule": None},  # the rates are those of the rows
            "dtype": str(world.meter.dtype).removeprefix("torch."),
            **chosen.shared_facts(),
            **more,
        }
        header = build_header(
            config,
            provenance.describe_code(config, {type(part) for part in network.modules()}),
            world,
            world.device,
            self.layers,
            chosen.compressor,
            chosen.levels,
            processes=world.processes,
            shards=world.shards,
            data={"digest": None, "train": None, "test": None},
            metric=options.metric,
            steps_per_epoch=None,
            units=options.units,
            budget=None,
        )
        return cast("Header", {"written_by": "hook", **header})

    def _prepare_record(self, options: RecordOptions | None, header: Header) -> None:
        self.header = header
        if self.world.rank == 0:
            for sentence in describe_uncompressed_layers(header):
                log.warning("regimes: %s", sentence)
        if options is not None and self.world.rank == 0:
            self.recorder = JobRecorder(options, header)
            if self.claims is not None:
                # here, before a forward pass: ``_open_record`` is called in a backward pass, by
                # when all groups that share the forward pass have posted theirs
                self.claims.post_claim(self.recorder.folder_key)

    def _open_record(self) -> None:
        """Start or continue the record. Where several groups of a job have one folder (a group for
        each tensor-parallel rank), the group of the lowest process writes it.

        Raises:
            RecordError: on all processes, if process 0 cannot.
        """
        self.record_opened = True
        if self.recorder is not None and self.claims is not None:
            first, *others = self.claims.list_claimants(self.recorder.folder_key)
            if first == self.claims.first:
                # unless another group was there before this one claimed
                first = self.claims.take_ownership(self.recorder.folder_key)
            if first != self.claims.first:
                # the groups of a tensor-parallel mesh have the same norms, and so the same levels
                missing = "traffic" if self.world.divided else "levels and traffic"
                warnings.warn(
                    f"hook: {self.recorder.folder} has the record of the group of process {first}, "
                    f"without the {missing} of the group of process {self.claims.first}",
                    stacklevel=2,
                )
                self.relay, self.recorder = self.recorder, None
            elif others:
                self.shared = True
                self.recorder.header["world"]["groups"] = 1 + len(others)
        recorder = self.recorder
        on_all_processes(
            self.world,
            lambda: None if recorder is None else recorder.open_record(self.rows, self.continued),
            RecordError,
        )
        # a collective: all processes come here, with and without a record
        self.has_record = any(self.world.gather_object(recorder is not None))

    def _end_unit(
        self,
        span: tuple[int, int],
        rates: tuple[float, float],
        readings: Readings,
        levels: Levels,
        seconds: dict[str, float],
        **more: Any,
    ) -> None:
        """Append the row of a unit and pass it to the recorder.

        Args:
            span: steps of the unit, and of the job so far.
            rates: at the first step of the unit, and of the next unit.
            seconds: of the unit by name, for the record.
            more: columns of this kind of job.
        """
        self.past_traffic = self.traffic
        meter = self.world.take_meter(len(self.layers))
        size, groups = self.header["config"]["batch_size"], self.schedule.groups
        (steps, stop), sent = span, traffic_columns(meter, levels)
        place = len(self.rows), (stop - steps, stop), steps
        columns = unit_columns(*place, rates, size, readings, groups)
        row = cast("Row", columns | {"logged": {}} | more | sent)
        self.rows.append(row)
        self.earlier_level = None
        self.spent.update(seconds)
        self.unit_is_open = True
        if self.recorder is not None and not self.recorder.closed:
            self.recorder.add_row(row, seconds, readings.details)

    def _print_warnings(self, *more: str) -> None:
        """Print on process 0, as the job ends, in what ways its policies made no difference, and
        further sentences."""
        if self.world.rank == 0:
            at_end = cast("Header", {**self.header, "units": len(self.rows)})
            for sentence in (*run_warnings(at_end, self.rows), *more):
                print(f"regimes: {sentence}", file=sys.stderr)

    def _summarize(self) -> None:
        """Print what the job has sent and waited for, once, on process 0."""
        if self.summarizes and self.rows and self.world.rank == 0:
            folder = None if self.recorder is None else self.recorder.folder
            print(job_summary(self.header, self.rows, self.spent, folder), file=sys.stderr)
        self.summarizes = False

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return this process's state, which ``torch.load(weights_only=True)`` reads back."""
        raise NotImplementedError

    def _fit(self, saved: Any, branch: bool) -> FittedState:
        """A saved state of this process as ``_continue_from`` can restore it.

        Raises:
            ConfigError: it is of another process or model, or does not fit otherwise.
        """
        raise NotImplementedError

    def _continue_from(self, fitted: FittedState) -> None:
        """Go on from a state."""
        raise NotImplementedError

    def _end_due_unit(self) -> None:
        """End a unit that is over, if it could not be saved otherwise."""

    def _load_own(self, saved: Any, branch: bool = False) -> None:
        """Continue from the state of this process."""
        self.world.guard.enter_call("load_state_dict()")
        check_format(saved)
        saved = restore_units(saved, self.world, self.recorder)
        self._continue_from(self._fit(saved, branch))

    def full_state_dict(self) -> State | None:
        """Return one state for all processes, on process 0; on the others return None. All
        processes call this. Any number of processes can continue from it; with local steps they can
        only if it was saved right after a synchronisation. Its tensors are on the CPU, and
        ``torch.load(weights_only=True)`` reads it back.

        Call this after ``scheduler.step()``: if the hook ends units after a number of steps and the
        unit has had all of them, the unit ends here. (Otherwise its statistics could not be saved.)

        Raises:
            ConfigError: on all processes, as in ``state_dict``; or the model is divided within
                replicas: then use ``sharded_state``.
        """
        world = self.world
        self._check_undivided("full_state_dict")
        world.guard.enter_call("full_state_dict()")
        self._end_due_unit()
        mine = on_all_processes(world, lambda: on_cpu(self.state_dict()))
        states = world.gather_to_first(mine if world.rank == 0 else {"parts": mine["parts"]})
        return None if states is None else self._join_states(states)

    def _join_states(self, states: Sequence[State]) -> State:
        """The states of all processes as one, with a part for each worker."""
        return join_states(states)

    def _divide_worker(self, state: State) -> State:
        """This process's part of the state of its worker."""
        return state

    def _load_full(self, full: Any, branch: bool = False) -> None:
        """Continue from the states of all processes, which process 0 has."""
        world = self.world
        self._check_undivided("load_full_state_dict")
        world.guard.enter_call("load_full_state_dict()")
        mine = world.scatter_from_first(
            on_all_processes(world, lambda: None if world.rank else self._divide_state(full))
        )
        self._continue_from(
            on_all_processes(world, lambda: self._fit(self._divide_worker(mine), branch))
        )

    def _divide_state(self, full: Any) -> list[State]:
        """A state for each process, from that of all."""
        given = f"{self.called}full_state_dict()"
        if full is None:
            refuse_state(f"process 0 must pass the value that {given} returned there")
        with damage_as_error():
            check_format(full)
            if not isinstance(full, Mapping) or not full.get("parts"):
                refuse_state(f"it was not returned by {given} on process 0")
            saved = [part["process"] for part in full["parts"]]
            if len(saved) == 1 < full["processes"]:
                refuse_state(
                    f"it was not returned by {given} on process 0: it is the state of one process, "
                    f"load it with {self.called}load_state_dict()"
                )
            if saved != [*range(full["processes"])]:
                refuse_state("it does not hold the states of all processes in their order")
            state = with_recorded_units(dict(full), self.recorder)
            each = on_processes(state, self.world.workers)
            # several processes hold one worker: each divides what it has by itself
            return [each[rank // self.world.shards] for rank in range(self.world.processes)]

    def _check_undivided(self, call: str) -> None:
        if (self.world.shards > 1 and not self.world.node) or self.by_process:
            name = self.called.removesuffix(".")
            raise ConfigError(
                f"{call}: this model is sharded, and no process holds whole layers: save "
                f'{{"{name}": {self.called}sharded_state()}} with torch.distributed.checkpoint, '
                "with the model"
            )

    def _job_state(self, all_units: bool = False) -> dict[str, Any]:
        """The entries of a saved state that hooks and local steps have alike.

        Args:
            all_units: with all units, also those that the record has.
        """
        if self.recorder is not None:
            self.recorder.merge_logged()  # into the rows, which are saved next
        elsewhere = self.has_record and self.world.rank > 0
        return {
            **(
                {"rows": self.rows}
                if all_units
                else saved_units(self.rows, self.recorder, elsewhere)
            ),
            "pace": self.schedule.state_dict(),
            "logged": {} if self.recorder is None else self.recorder.state_dict(),
            **({} if self.manual_level is None else {"set": dict(self.manual_level)}),
            **({} if self.earlier_level is None else {"set_before": dict(self.earlier_level)}),
        }

    def _own_state(self) -> dict[str, Any]:
        """Likewise, of this process's part."""
        return {
            "sums": self._norm_sums(),
            "traffic": [self.past_traffic.floats, self.past_traffic.bytes],  # of past units
            "meter": self.world.meter.state_dict(),  # of the unit under way
        }

    def _restore_job(self, state: State) -> None:
        """The inverse of both; the record is opened again at the next step."""
        own = own_part(state)
        sums, device = self._norm_sums(), self.world.device
        sums.clear()
        sums |= {name: [t.to(device) for t in tensors] for name, tensors in own["sums"].items()}
        self.rows, self._seen = state["rows"], []
        self.past_traffic = Traffic(*own["traffic"])
        self.manual_level, self.earlier_level = state.get("set"), state.get("set_before")
        self.world.meter.load_state_dict(own["meter"])
        self.schedule.load_state_dict(state["pace"])
        if self.recorder is not None:
            self.recorder.close_files()
            self.recorder.load_state_dict(state["logged"])

    def _norm_sums(self) -> dict[str, list[Tensor]]:
        """What the norm has accumulated in the unit under way."""
        norms = self.panel.gauges.get("norms")
        return norms.sums if isinstance(norms, NormsGauge) else {}


def on_all_processes(
    world: ProcessWorld,
    action: Callable[[], T],
    error: type[RegimesError] = ConfigError,
) -> T:
    """Run an action on every process, and return its result. If it fails on one, all raise an
    ``error``: the others would wait for that process in their next collective."""
    failure, result = None, None
    try:
        result = action()
    except Exception as raised:
        failure = raised
    sentences = world.gather_object(None if failure is None else str(failure))
    if isinstance(failure, RegimesError):
        raise error(str(failure)) from failure
    if failure is not None:
        raise failure
    for sentence in sentences:
        if sentence is not None:
            raise error(sentence)
    return cast(T, result)


def no_data(*_: Any) -> NoReturn:
    """Stands in for functions of the training data, which a hook does not have."""
    raise ConfigError("a hook has no training data to measure on")
