"""The saved state of a hook (``job.state``): written, fitted to another hook, and restored."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regimes.config import DENSE
from regimes.ddp.branching import continue_as_branch
from regimes.ddp.node_state import check_devices, devices_of, divide_devices, join_devices
from regimes.ddp.unit_steps import UnitSteps
from regimes.detectors.statistics import Statistic
from regimes.errors import ConfigError
from regimes.instruments.compression_loss import CompressionLossGauge
from regimes.job.choices import Choice
from regimes.job.full_state import collect_full_state, divide_full_state
from regimes.job.job import Job, on_all_processes
from regimes.job.refit import (
    LayerMatch,
    damage_refused,
    describe_compressor,
    list_names,
    refuse_state,
    with_default_fields,
)
from regimes.job.state import (
    FORMAT,
    State,
    by_layer,
    get_column,
    layer_shapes,
    own_part,
    with_column,
)
from regimes.policies.controller import Controller
from regimes.records import kinds
from regimes.records.kinds import Items, Nullable, Object

_CLOCKS = Object(extra=kinds.SECONDS)
_PENDING = Object({"epoch": kinds.COUNT, "seconds": _CLOCKS, "details": kinds.FREE})
_RATE = Nullable(kinds.AMOUNT)
_ROW = Object(
    {"lr": kinds.AMOUNT, "next_lr": kinds.AMOUNT}, {"epoch": kinds.COUNT, "steps": kinds.STEPS}
)
_SCHEDULE = Object(
    {}, {"first": _RATE, "epoch": Nullable(kinds.WHOLE), "groups": Nullable(kinds.NUMBERS)}
)
_SET = Object({"level": kinds.NAME, "unit": kinds.COUNT, "why": kinds.TEXT})
_PLAIN = {  # entries whose form is checked, because the file may be damaged
    "steps": Items(kinds.COUNT),
    "total": kinds.COUNT,
    "lr": _RATE,
    "pace": _SCHEDULE,  # UnitSchedule.state_dict()
    "seconds": _CLOCKS,
    "logged": Object({}, {"waiting": Items(_PENDING)}),
    "rows": Items(_ROW),
    "branched": Nullable(kinds.COUNT),
    "set": _SET,
    "set_before": _SET,
    "traffic": kinds.AMOUNTS,  # of a part
}


@dataclass(frozen=True)
class Fitted:
    """A state that fits a hook.

    Attributes:
        warning: a sentence that names layers that are new or left out, if there are any.
    """

    state: State
    warning: str | None


@dataclass(frozen=True)
class StateCodec:
    """Saves the parts of one hook, and makes a saved state fit them."""

    job: Job
    chosen: Choice
    steps: UnitSteps
    controller: Controller

    # -- save and restore --------------------------------------------------------------------

    def save_state(self, levels: Mapping[str, str], whole: bool = False) -> State:
        """See ``Hook.state_dict``.

        Args:
            levels: the present level of each layer.
            whole: save the rows of all units, including those already written to the record.
        """
        job, steps = self.job, self.steps
        if steps.in_unit and not self.within_unit:
            counted = job.schedule.steps
            raise ConfigError(
                f"state_dict: {', '.join(job.panel.gauges)} cannot be saved within an epoch: "
                + (
                    f"save with full_state_dict() after a multiple of {counted} steps"
                    if counted
                    else "call it right after epoch_end"
                )
            )
        steps.show_held()
        memories, residuals = steps.reducer.state_dict()
        here = layer_shapes(job.layers)
        state = copy.deepcopy(
            {
                **self._own_identity(),
                "layers": by_layer(shape=here, memory=memories, level=levels),
                "gauges": job.panel.state_dict(),  # by instrument
                "steps": [steps.in_unit, steps.finite_in_unit],  # of the unit under way
                "total": steps.total,  # steps of the job
                "values": self.chosen.values,  # by name of a level
                "lr": job.schedule.lr,
                "seconds": {} if job.recorder is None else dict(steps.clock.seconds),
                "branched": job.branched,  # units of the trunk
                **job._job_state(whole),
                **steps.state_dict(),
                "parts": [
                    {
                        "process": job.world.rank,
                        "workers": [*job.world.hosted],
                        "layers": by_layer(residual=residuals),
                        **job._own_state(),
                    }
                ],
            }
        )
        owed = get_column(state["parts"][0]["layers"], "residual")
        for residual, scale in zip(owed.values(), steps.reducer.scales, strict=True):
            if residual is not None and scale != 1:
                residual /= scale  # in units of the unscaled loss
        return state

    @property
    def within_unit(self) -> bool:
        """Whether the gauges can be saved within a unit. The norms can: their running sums are
        saved apart."""
        gauges = self.job.panel.gauges.items()
        return all(
            name == "norms" or getattr(gauge, "saves_within_unit", False) for name, gauge in gauges
        )

    def restore_state(self, state: State) -> None:
        """Restore everything from a fitted state except the levels."""
        job, steps = self.job, self.steps
        residuals = get_column(own_part(state)["layers"], "residual")
        steps.reducer.load_state_dict(get_column(state["layers"], "memory"), residuals)
        steps.reducer.to(job.world.device)
        steps.load_state_dict(state)
        steps.restart_unit()
        steps.clock.seconds |= state["seconds"]
        steps.in_unit, steps.finite_in_unit = state["steps"]
        steps.total = state["total"]
        job.panel.load_state_dict(state["gauges"])
        job.schedule.lr = state["lr"]
        job._restore_job(state)

    # -- all processes -----------------------------------------------------------------------

    def collect_states(self, levels: Mapping[str, str]) -> State | None:
        """See ``Hook.full_state_dict``."""
        self._check_whole("full_state_dict")
        full = collect_full_state(self.job.world, lambda: self._save_part(levels))
        return None if full is None else join_devices(full)

    def _save_part(self, levels: Mapping[str, str]) -> State:
        """This process's state; of a device of a node its memories are in its part, too."""
        state = self.save_state(levels)
        if devices_of(self.job.world) > 1:
            part = own_part(state)
            memories = get_column(state["layers"], "memory")
            state["parts"] = [{**part, "layers": with_column(part["layers"], "memory", memories)}]
        return state

    def scatter_states(self, full: Mapping[str, Any] | None, branch: bool = False) -> Fitted:
        """This process's part of the full state of process 0, see ``Hook.load_full_state_dict``."""
        world = self.job.world
        self._check_whole("load_full_state_dict")
        mine = divide_full_state(world, self.job.recorder, full)

        def fit() -> Fitted:
            with damage_refused():
                check_devices(mine, world)
                compressors = self.steps.reducer.compressors
                own = divide_devices(mine, world, self.job.layers, compressors)
            return self.fit_state(own, branch)

        return on_all_processes(world, fit)

    def _check_whole(self, call: str) -> None:
        if (self.job.world.shards > 1 and not self.job.world.node) or self.steps.by_process:
            raise ConfigError(
                f"{call}: this model is sharded, and no process holds whole layers: save "
                '{"hook": hook.sharded_state()} with torch.distributed.checkpoint, with the model'
            )

    # -- fit ---------------------------------------------------------------------------------

    def fit_state(self, saved: Mapping[str, Any], branch: bool = False) -> Fitted:
        """A copy of what ``save_state`` gave, made to fit the hook's layers.

        Args:
            branch: the state may have been saved with another compressor, level or policy.

        Raises:
            ConfigError: the state was saved by another process or for another model; without
                ``branch``, also if it was saved with another compressor or
                value of a level, or lacks statistics that the policy reads.
        """
        with damage_refused():
            here = self._own_identity()
            self._check_process(saved)
            check_devices(saved, self.job.world)
            state = copy.deepcopy(dict(saved))
            state["compressor"] = with_default_fields(state["compressor"], self.chosen.compressor)
            self._check_plain(state)
            if branch:
                for key in ("set", "set_before"):  # levels are another configuration's from here on
                    state.pop(key, None)
                return Fitted(
                    continue_as_branch(state, here, self.job, self.chosen, self.steps), None
                )
            self._check_kind(here, state)
            match = LayerMatch(get_column(state["layers"], "shape"), self.job.layers)
            if not match.is_same:
                state = state | self._match_layers(match, state)
            return Fitted(state, match.warning)

    def _own_identity(self) -> dict[str, Any]:
        """Facts that must be the same in the hook that loads the state."""
        world = self.job.world
        return {
            "format": FORMAT,
            "processes": world.processes,
            "workers": world.workers,
            **({"devices": world.shards} if world.node else {}),
            "compressor": describe_compressor(self.chosen.compressor),
        }

    def _check_kind(self, here: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Raise if the state was saved with another compressor, other values of levels, or
        without statistics that this hook's policy reads."""
        values = self.chosen.values
        if state["compressor"] != here["compressor"]:
            saved, mine = state["compressor"], here["compressor"]
            refuse_state(f"it was saved with compressor {saved}, this hook has {mine}")
        levels = get_column(state["layers"], "level")
        used = {*levels.values(), state.get("set", {"level": DENSE})["level"]}
        if unknown := used - {*values, DENSE}:
            mine = ", ".join(values) or "none"
            refuse_state(f"it uses level {min(unknown)!r}, this hook's levels are: {mine}")
        for level, value in state["values"].items():
            if values.get(level, value) != value:
                refuse_state(f"its level {level} is {value!r}, this hook's is {values[level]!r}")
        read = {Statistic.parse(need).instrument for need in self.chosen.policy.needs}
        if read & (state["gauges"].keys() ^ self.job.panel.gauges.keys()):
            refuse_state("it was saved with a policy that reads other statistics than this hook's")

    def _match_layers(self, match: LayerMatch, state: dict[str, Any]) -> dict[str, Any]:
        """The state's per-layer entries, reordered and completed for the hook's layers.

        In past units a new layer has the level that the policy gives at the very start; now, the
        one that the policy gives it after these units.
        """
        reducer, decide = self.steps.reducer, self.controller.decide
        parts = zip(self.job.layers, reducer.compressors, reducer.states, strict=True)
        fresh = {x.name: c.init(x, s.key[0], s.first_worker).shared_state() for x, c, s in parts}
        table, own = state["layers"], own_part(state)
        rows, levels = match.match_rows(state["rows"], decide([]).names), get_column(table, "level")
        if match.new_layers:
            levels = dict(zip(fresh, decide(rows).names, strict=True)) | levels
        memories = fresh | get_column(table, "memory")
        owed = dict.fromkeys(fresh) | get_column(own["layers"], "residual")
        here = layer_shapes(self.job.layers)
        # The meter counts by a layer's place, which has changed: its counts become past traffic.
        floats, sent = own["traffic"]
        counts = own["meter"]["layers"].values()
        part = {
            **own,
            "layers": {name: {"residual": owed[name]} for name in here},
            "sums": match.match_sums(own["sums"]),
            "traffic": [floats + sum(f for f, _ in counts), sent + sum(b for _, b in counts)],
            "meter": {"layers": {}, "calls": {}, "sent": {}},
        }
        return {
            "layers": by_layer(shape=here, memory=memories, level=levels),
            "gauges": self._match_gauges(match, state["gauges"]),
            "rows": rows,
            "parts": [part],
        }

    def _match_gauges(self, match: LayerMatch, gauges: dict[str, Any]) -> dict[str, Any]:
        """The gauges' state for matched layers; only ``error:<level>`` keeps one per layer, beside
        the cosines of a step that was measured in the unit under way."""
        if "cosine" in gauges:
            gauges = gauges | {"cosine": gauges["cosine"] | {"last": None}}
        error = self.job.panel.gauges.get("error")
        if not isinstance(error, CompressionLossGauge) or "error" not in gauges:
            return gauges
        seed = self.steps.reducer.states[0].key[0]
        fresh = [error.compressor.init(layer, seed).shared_state() for layer in self.job.layers]
        levels = gauges["error"].items()
        return gauges | {
            "error": {level: match.match_values(saved, fresh) for level, saved in levels}
        }

    # -- refuse ----------------------------------------------------------------------------------

    def _check_process(self, state: Any) -> None:
        """Raise unless this is a hook's state, saved by this process."""
        world = self.job.world
        if not isinstance(state, Mapping) or not {"layers", "compressor", "rows"} <= state.keys():
            refuse_state("it was not returned by hook.state_dict()")
        if len(state["parts"]) != 1:
            refuse_state(
                "it was not returned by hook.state_dict(): it is the state of all processes, load "
                "it with hook.load_full_state_dict()"
            )
        saved = own_part(state)["process"], state["processes"]
        if saved != (world.rank, world.processes):
            refuse_state(
                f"it was saved by process {saved[0]} of {saved[1]}, this is process {world.rank} "
                f"of {world.processes}: every process loads its own file, on the same number of "
                "processes, or its residuals would be lost"
                + (
                    ""
                    if self.steps.by_process
                    else "; a state of hook.full_state_dict() loads on any number of processes"
                )
            )

    def _check_plain(self, state: State) -> None:
        """Raise if the state was saved for another model, or has damaged numbers."""
        self._check_shapes(state)
        plain = {k: v for k, v in {**own_part(state), **state}.items() if k in _PLAIN}
        if problem := kinds.find_fault(plain, Object({}, _PLAIN)):
            raise ValueError(problem)
        for number, row in enumerate(state["rows"]):
            if row["epoch"] != number:
                raise ValueError(
                    f"rows out of order: expected unit {number}, found unit {row['epoch']}"
                )

    def _check_shapes(self, state: State) -> None:
        """Raise if the state was saved for another model."""
        here, saved = layer_shapes(self.job.layers), get_column(state["layers"], "shape")
        parts = zip(
            self.job.world.local_layers(self.job.layers),
            self.steps.reducer.compressors,
            strict=True,
        )
        local = {x.name: math.prod(c.residual_shape(x)) for x, c in parts}
        if not here.keys() & saved.keys():
            refuse_state(
                "it was saved for another model and has no layer in common with this one: the "
                f"state has {list_names(list(saved))}, the model has {list_names(list(here))}"
            )
        owed = get_column(own_part(state)["layers"], "residual")
        for name, shape in here.items():
            if saved.get(name, shape) != shape:
                refuse_state(
                    f"it was saved for another model: layer {name!r} has shape {saved[name]} in "
                    f"the state and shape {shape} in this model"
                )
            residual = owed.get(name)
            if residual is not None and residual.numel() != local[name]:
                raise ValueError(f"the residual of layer {name!r} has shape {[*residual.shape]}")
