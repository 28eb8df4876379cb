"""A state of training fitted to another configuration, where a branch or a pulse begins or ends.

What fits stays as it is: with an unchanged configuration nothing is touched. In other words:

- **Weights** stay. BatchNorm's statistics, too.
- **Residuals** have the shapes of the layers with every compressor, and stay. One without error
  feedback drops them. One of the other unit (``Compressor.residual``) converts them in its first
  step, at that step's rate. Where one pass served all workers (a union pass) and now each needs a
  residual of its own, each gets the mean.
- **Memories** of a compressor (PowerSGD's Q) stay with the same class, at other levels, too.
  Another class starts its own; the number of steps, a key of the random numbers, goes on.
- **Momenta** stay with the same class of optimiser and the same kind of state.
- **Local steps**: workers that step alone become one model after a synchronisation, with the mean
  momenta.
- **Instruments** start anew if their table has changed.
- **Policies** decide from the trunk's statistics and rates as if they had decided the levels so far
  themselves (as `replay` does), so that they meet no level that they do not know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from regimes.base.config import OptimizerConfig, RunConfig
from regimes.base.errors import ConfigError
from regimes.compression import make_compressor
from regimes.compression.base import has_feedback
from regimes.compression.bucket import restart_memories
from regimes.job.move_residuals import average_residuals
from regimes.job.state import State, by_layer, get_column, of_workers, with_column
from regimes.training import optimizers
from regimes.training.build import Run
from regimes.training.learning_rate import LearningRate
from regimes.training.units import Units

_Table = dict[str, dict[str, Any]]  # by layer
Notes = dict[str, str]  # what became of each part of the state


def fit_checkpoint(run: Run, saved: State, old_config: RunConfig) -> tuple[State, Notes]:
    """Fit the state of a checkpoint, which was written under configuration ``old_config``, to the
    configuration of ``run``. Returns the state, and what became of each part of it.

    Raises:
        ConfigError: the workers are between two synchronisations, and would not synchronise again.
    """
    state: State = {**saved, "parts": []}
    for part in saved["parts"]:  # tables of layers are copied, as they may be changed
        state["parts"].append(copied := {**part, "layers": {**part["layers"]}})
        if "outer" in part:
            copied["outer"] = {**part["outer"], "layers": {**part["outer"]["layers"]}}
    notes: Notes = {"weights": "kept"}
    if (old_config.sync_policy is None) != (run.local is None):
        _change_local_steps(run, state, old_config)
    _fit_compressor(run, state, old_config, notes)
    _fit_optimizer(run, state, old_config, notes)
    tables = old_config.instruments, run.config.instruments
    gauges = state["gauges"].items()
    state["gauges"] = {k: v for k, v in gauges if tables[0].get(k) == tables[1].get(k)}
    if old_config.batch_size != run.config.batch_size:
        for part in state["parts"]:
            part.pop("hidden", None)
    return state, notes


# -- compressors -----------------------------------------------------------------------------


def _fit_compressor(run: Run, state: State, old_config: RunConfig, notes: Notes) -> None:
    old, new = make_compressor(old_config.compressor), run.plug_ins.compressor
    same = type(old) is type(new)
    fresh, _ = run.reducer.state_dict()

    def fit(table: _Table) -> _Table:
        if same:
            return table
        return with_column(table, "memory", restart_memories(get_column(table, "memory"), fresh))

    state["layers"] = fit(state["layers"])
    if "outer" in state:
        state["outer"] = {**state["outer"], "layers": fit(state["outer"]["layers"])}
    notes["memories"] = "kept" if same else "started anew"
    kinds = [[*state["parts"]]]  # of gradients, of pseudo-gradients
    if "outer" in state:
        kinds.append([{**part["outer"], "workers": part["workers"]} for part in state["parts"]])
    tables = [part["layers"] for parts in kinds for part in parts]
    there = [residual for table in tables for residual in get_column(table, "residual").values()]
    notes["residuals"] = "none" if all(residual is None for residual in there) else "kept"
    if not has_feedback(new, run.config.levels.values()) and notes["residuals"] == "kept":
        notes["residuals"] = "dropped: the compressor has no error feedback"
        for table in tables:
            table.update(by_layer(residual=dict.fromkeys(table)))
    elif state["union"] != run.gradients.union and notes["residuals"] == "kept":
        notes["residuals"] = "kept, as the workers' mean"
        for parts in kinds:
            average_residuals(parts, to_one=run.gradients.union)


# -- optimisers ------------------------------------------------------------------------------


def _fit_optimizer(run: Run, state: State, old_config: RunConfig, notes: Notes) -> None:
    """Loaded as it is, a state would bring the old decay and momentum with it."""
    old, new = old_config.optimizer, run.config.optimizer
    notes["momenta"] = "kept" if _same_kind(old, new) else "started anew"
    if old != new:
        fit = functools.partial(_fit_momenta, run, old)
        state["optimizer"] = fit(state["optimizer"])
        for part in state["parts"]:
            if own := part.get("replicas"):
                part["replicas"] = [{**w, "optimizer": fit(w["optimizer"])} for w in own]
    if old_config.outer != run.config.outer and run.local is not None and "outer" in state:
        saved, made = state["outer"]["optimizer"], run.local.optimizer.state_dict()
        kept = bool(old_config.outer.momentum) == bool(run.config.outer.momentum)
        outer = {**made, "state": saved["state"] if kept else made["state"]}
        state["outer"] = {**state["outer"], "optimizer": outer}
        if old_config.outer.fragments != run.config.outer.fragments:
            _refuse_between(state, "outer.fragments")
            fresh = run.local.state_dict()[0]
            anew = {key: fresh[key] for key in ("begun", "fragments")}
            state["outer"] = {**state["outer"], **anew}


def _same_kind(old: OptimizerConfig, new: OptimizerConfig) -> bool:
    """Do both keep the same kind of state? Options that are no numbers may add to it."""

    def kind(config: OptimizerConfig) -> Any:
        words = {k: v for k, v in config.options.items() if isinstance(v, bool | str | None)}
        return config.name, words, config.name == "sgd" and config.momentum > 0

    return bool(kind(old) == kind(new)) or {old.name, new.name} == {"adamw", "muon"}


def _fit_momenta(run: Run, old_config: OptimizerConfig, saved: dict[str, Any]) -> dict[str, Any]:
    """The state of the run's optimiser with what each parameter has of an old one."""
    old, new = (
        optimizers.build_optimizers(config, run.model, run.task.classes)
        for config in (old_config, run.config.optimizer)
    )
    old.load_state_dict(saved)
    if _same_kind(old_config, run.config.optimizer):
        for parameter in run.gradients.parameters:
            source, target = (_part_of(made, parameter) for made in (old, new))
            if type(source) is type(target) and parameter in source.state:
                target.state[parameter] = source.state[parameter]
    return new.state_dict()


def _part_of(made: optimizers.Optimizers, parameter: Tensor) -> torch.optim.Optimizer:
    return next(
        part
        for part in made.parts
        for group in part.param_groups
        if any(p is parameter for p in group["params"])
    )


# -- local steps -----------------------------------------------------------------------------


def _change_local_steps(run: Run, state: State, old_config: RunConfig) -> None:
    """Workers step alone from now on, or no longer do."""
    if run.local is not None:
        state["outer"], own = run.local.state_dict()
        for part in state["parts"]:
            part["outer"] = {**own, "layers": {**own["layers"]}}
            part["replicas"] = []
        return
    _refuse_between(state, "sync_policy")
    parts = state["parts"]
    own_states = of_workers(parts, "replicas", range(run.config.workers))
    if own_states and old_config.outer.states == "reset":
        state["optimizer"] = run.optimizer.state_dict()
    elif own_states:
        state["optimizer"] = optimizers.mean_state([own["optimizer"] for own in own_states])
    del state["outer"]
    for part in parts:
        del part["outer"]


def _refuse_between(state: State, field: str) -> None:
    if any(f["since"] or f["left"] is not None for f in state["outer"]["fragments"]):
        raise ConfigError(
            f"{field}: at this unit the workers are between two synchronisations: branch where "
            f"a period has just ended, or keep {'a ' * (field == 'sync_policy')}{field}"
        )


# -- rates and decisions ---------------------------------------------------------------------


def rate_after(run: Run, unit: int) -> float:
    """Return the learning rate after a unit: the next phase's, if one begins there."""
    after = run.phase.following
    if after is None or unit + 1 != run.phase.stop or unit + 1 >= len(run.units):
        return run.learning_rate(run.units.step_span(unit)[1])
    per_epoch = len(run.batches.rebatched(after.batch_size))
    units = Units.from_config(after, per_epoch)
    return LearningRate(after.optimizer, per_epoch, units.total)(units.step_span(unit + 1)[0])
