"""A saved state (``job.state``) made to fit a hook, and the state that a branch begins with: the
hook continues it under another configuration. What becomes of its parts is as in a branch of the
trainer (`regimes.training.changes`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regimes.base.config import DENSE
from regimes.compression.bucket import restart_memories
from regimes.hook.ddp.node_state import check_devices
from regimes.hook.ddp.unit_steps import UnitSteps
from regimes.instruments.compression_loss import CompressionLossGauge
from regimes.job.attached import AttachedJob
from regimes.job.choices import Choice
from regimes.job.fit_state import (
    FittedState,
    LayerMatch,
    damage_as_error,
    describe_compressor,
    list_names,
    refuse_state,
    respell_compressor,
)
from regimes.job.state import (
    State,
    by_layer,
    get_column,
    layer_shapes,
    own_part,
    with_column,
)
from regimes.policies.detectors.statistics import Statistic
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
class StateFit:
    """Makes a saved state fit the parts of one hook."""

    job: AttachedJob
    chosen: Choice
    steps: UnitSteps

    def fit_state(self, saved: Mapping[str, Any], branch: bool = False) -> FittedState:
        """Copy what `Hook.state_dict` gave, and make the copy fit the hook's layers.

        Args:
            branch: the state may have been saved with another compressor, level or policy.

        Raises:
            ConfigError: the state was saved by another process or for another model; without
                ``branch``, also if it was saved with another compressor or
                value of a level, or lacks statistics that the policy reads.
        """
        with damage_as_error():
            self._check_process(saved)
            check_devices(saved, self.job.world)
            state = copy.deepcopy(dict(saved))
            state["compressor"] = respell_compressor(state["compressor"], self.chosen.compressor)
            self._check_plain(state)
            if branch:
                for key in ("set", "set_before"):  # levels are another configuration's from here on
                    state.pop(key, None)
                return FittedState(self._continue_as_branch(state))
            self._check_kind(state)
            match = LayerMatch(get_column(state["layers"], "shape"), self.job.layers)
            if not match.is_same:
                state = state | self._match_layers(match, state)
            return FittedState(state, match.warning)

    def _check_kind(self, state: dict[str, Any]) -> None:
        """Raise if the state was saved with another compressor, other values of levels, or
        without statistics that this hook's policy reads."""
        values, mine = self.chosen.values, describe_compressor(self.chosen.compressor)
        if (saved := state["compressor"]) != mine:
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
        reducer, decide = self.steps.reducer, self.job.controller.decide
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

    # -- a branch ----------------------------------------------------------------------------

    def _continue_as_branch(self, state: State) -> State:
        """A state, a copy, as this hook continues it with another policy, level or compressor.

        Raises:
            ConfigError: it was saved within a unit, its layers are others, or the policy reads a
                statistic that the trunk's policy did not.
        """
        job, chosen = self.job, self.chosen
        steps, rows = state["steps"][0], state["rows"]
        if steps and not job.schedule.is_over(steps):
            refuse_state(
                f"it was saved after {steps} steps of a unit; branch where a unit has just ended"
            )
        saved, own = get_column(state["layers"], "shape"), own_part(state)
        if saved != (mine := layer_shapes(job.layers)):
            odd = sorted(saved.keys() ^ mine.keys())
            refuse_state(
                f"branch and trunk must train the same layers, one has frozen {list_names(odd)}"
            )
        gauges, theirs = job.panel.state_dict(), state["gauges"]
        if (rows or steps) and (unread := sorted(gauges.keys() - theirs.keys())):
            names = ", ".join(unread)
            refuse_state(f"the policy reads {names}, which the trunk's policy did not read")
        alike = state["compressor"] == describe_compressor(chosen.compressor)
        for name in gauges.keys() & theirs.keys():
            if name != "error" or (alike and chosen.values == state["values"]):  # of the levels
                gauges[name] = theirs[name]
        memories = get_column(state["layers"], "memory")
        residuals = get_column(own["layers"], "residual")
        if state["compressor"].partition("(")[0] != type(chosen.compressor).__qualname__:
            memories = restart_memories(memories, self.steps.reducer.state_dict()[0])
        if not chosen.keeps_residuals:
            residuals = dict.fromkeys(residuals)
        if job.schedule.optimizer is None and any(
            residuals[name] is not None and memory["residual_rate"] is not None
            for name, memory in memories.items()
        ):
            refuse_state(
                "its residuals are movements of the weights, and the learning rate makes gradients "
                "of them: attach with optimizer=optimizer"
            )
        layers = with_column(state["layers"], "memory", memories)
        parts = [{**own, "layers": by_layer(residual=residuals)}]
        branched = len(rows) + bool(steps)
        return state | {"layers": layers, "parts": parts, "gauges": gauges, "branched": branched}

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
