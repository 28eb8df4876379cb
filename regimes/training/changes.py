"""A state of training fitted to another configuration, where a branch or a pulse begins or ends.

What fits stays as it is: with an unchanged configuration nothing is touched. In other words:

- **Weights** stay. BatchNorm's statistics, too.
- **Residuals** have the shapes of the layers with every compressor, and stay. One without error
  feedback drops them. One of the other unit (``Compressor.residual``) converts them in its first
  step, at that step's rate. Where one pass served all workers (a union pass) and now each needs a
  residual of its own, each gets the mean.
- **Memories** of a compressor (PowerSGD's Q) stay with the same class, at other levels, too.
  Another class starts its own; the number of steps, by which random numbers are drawn, goes on.
- **Momenta** stay with the same class of optimiser and the same kind of state.
- **Local steps**: workers that step alone become one model after a synchronisation, with the mean
  of their momenta.
- **Instruments** and **interventions** whose table has changed start anew.
- **Policies** decide from the trunk's statistics and rates as if they had decided the levels so far
  themselves (as `replay` does), so that they meet no level that they do not know.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from regimes.compression import compressor
from regimes.compression.base import restarted, upgraded
from regimes.config import OptimizerConfig, RunConfig
from regimes.errors import ConfigError
from regimes.training import optimizers
from regimes.training.build import Run
from regimes.training.checkpoint import (
    OwnState,
    ProcessFile,
    SharedState,
    intervention_states,
)
from regimes.training.learning_rate import LearningRate
from regimes.training.units import Units

Residuals = dict[str, Tensor | None]  # by layer, [rows, ...]
Notes = dict[str, str]  # what became of each part of the state


def fitted(
    run: Run, files: list[ProcessFile], before: RunConfig
) -> tuple[list[ProcessFile], Notes]:
    """The files of a checkpoint under configuration ``before``, as ``run`` can restore them.

    Raises:
        ConfigError: the workers are between two synchronisations, and would not synchronise again.
    """
    files = [cast("ProcessFile", {**f, "own": OwnState(**f["own"])}) for f in files]
    of_first = next(file for file in files if "shared" in file)
    shared = of_first["shared"] = SharedState(**of_first["shared"])
    notes: Notes = {"weights": "kept"}
    if (before.sync_policy is None) != (run.local is None):
        _change_local_steps(run, files, shared, before)
    _fit_compressor(run, files, shared, before, notes)
    _fit_optimizer(run, files, shared, before, notes)
    tables = before.instruments, run.config.instruments
    gauges = shared["gauges"].items()
    shared["gauges"] = {k: v for k, v in gauges if tables[0].get(k) == tables[1].get(k)}
    earlier, states = before.interventions, intervention_states(shared)
    same = [k for k, table in run.config.interventions.items() if earlier.get(k) == table]
    shared["interventions"] = {name: states[name] for name in same if name in states}
    if before.batch_size != run.config.batch_size:
        for file in files:
            file["own"].pop("hidden", None)
    return files, notes


# -- compressors -----------------------------------------------------------------------------


def _fit_compressor(
    run: Run, files: list[ProcessFile], shared: SharedState, before: RunConfig, notes: Notes
) -> None:
    old, new = compressor(before.compressor), run.plug_ins.compressor
    same, union = type(old) is type(new), bool(shared.get("union"))
    fresh, _ = run.reducer.state_dict()

    def fit(memories: dict[str, Any]) -> dict[str, Any]:
        memories = upgraded(memories, old.residual)
        return memories if same else restarted(memories, fresh)

    shared["memories"] = fit(shared["memories"])
    if "local" in shared:
        shared["local"] = {**shared["local"], "memories": fit(shared["local"]["memories"])}
    notes["memories"] = "kept" if same else "started anew"
    there = [r for file in files for part in _residual_tables(file) for r in part.values()]
    notes["residuals"] = "none" if all(r is None for r in there) else "kept"
    if not new.error_feedback and notes["residuals"] == "kept":
        notes["residuals"] = "dropped: the compressor has no error feedback"
        for file in files:
            for part in _residual_tables(file):
                part.update(dict.fromkeys(part))
    elif union != run.gradients.union and notes["residuals"] == "kept":
        notes["residuals"] = "kept, as the workers' mean"
        _average_residuals(files, to_one=run.gradients.union)


def _residual_tables(file: ProcessFile) -> Iterator[Residuals]:
    """Copies, in place of those of the file, that may be changed."""
    own = file["own"]
    own["residuals"] = {**own["residuals"]}
    yield own["residuals"]
    if "local" in own:
        own["local"] = {**own["local"], "residuals": {**own["local"]["residuals"]}}
        yield own["local"]["residuals"]


def _average_residuals(files: list[ProcessFile], *, to_one: bool) -> None:
    """Each worker's residual becomes the mean over all workers, whatever processes they were on;
    ``to_one``: one row for all workers of a process, their own mean."""
    tables = [list(_residual_tables(file)) for file in files]
    for parts in zip(*tables, strict=True):
        for layer in parts[0]:
            rows = [part[layer] for part in parts]
            if any(row is None for row in rows):
                continue
            means = [cast(Tensor, row).mean(0, keepdim=True) for row in rows]
            every = torch.cat(means).mean(0, keepdim=True)
            for part, file, mean in zip(parts, files, means, strict=True):
                count = len(file["workers"])
                part[layer] = mean if to_one else every.repeat(count, *[1] * (every.ndim - 1))


# -- optimisers ------------------------------------------------------------------------------


def _fit_optimizer(
    run: Run, files: list[ProcessFile], shared: SharedState, before: RunConfig, notes: Notes
) -> None:
    """Loaded as it is, a state would bring the old decay and momentum with it."""
    old, new = before.optimizer, run.config.optimizer
    notes["momenta"] = "kept" if _same_kind(old, new) else "started anew"
    if old != new and "optimizer" in shared:
        fit = functools.partial(_fit_momenta, run, old)
        shared["optimizer"] = fit(shared["optimizer"])
        for file in files:
            if "local" in file["own"]:
                local = file["own"]["local"]
                workers = [{**w, "optimizer": fit(w["optimizer"])} for w in local["workers"]]
                file["own"]["local"] = {**local, "workers": workers}
    if before.outer != run.config.outer and run.local is not None and "local" in shared:
        saved, made = shared["local"]["optimizer"], run.local.sync.outer.optimizer.state_dict()
        kept = bool(before.outer.momentum) == bool(run.config.outer.momentum)
        outer = {**made, "state": saved["state"] if kept else made["state"]}
        shared["local"] = {**shared["local"], "optimizer": outer}
        if before.outer.fragments != run.config.outer.fragments:
            _refuse_between(shared, "outer.fragments")
            shared["local"] = {**shared["local"], **run.local.sync.state_dict()}


def _same_kind(old: OptimizerConfig, new: OptimizerConfig) -> bool:
    """Do both keep the same kind of state? Options that are no numbers may add to it."""

    def kind(config: OptimizerConfig) -> Any:
        words = {k: v for k, v in config.options.items() if isinstance(v, bool | str | None)}
        return config.name, words, config.name == "sgd" and config.momentum > 0

    return bool(kind(old) == kind(new)) or {old.name, new.name} == {"adamw", "muon"}


def _fit_momenta(run: Run, before: OptimizerConfig, saved: dict[str, Any]) -> dict[str, Any]:
    """The state of the run's optimiser with what each parameter has of an old one."""
    old, new = (
        optimizers.build(config, run.model, run.task.classes)
        for config in (before, run.config.optimizer)
    )
    old.load_state_dict(saved)
    if _same_kind(before, run.config.optimizer):
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


def _change_local_steps(
    run: Run, files: list[ProcessFile], shared: SharedState, before: RunConfig
) -> None:
    """Workers step alone from now on, or no longer do."""
    if run.local is not None:
        shared["local"], own = run.local.state_dict()
        for file in files:
            file["own"]["local"] = {"residuals": {**own["residuals"]}, "workers": []}
        return
    _refuse_between(shared, "sync_policy")
    by_worker = {
        worker: state["optimizer"]
        for file in files
        for worker, state in zip(file["workers"], file["own"]["local"]["workers"], strict=False)
    }
    if by_worker and before.outer.states == "reset":
        shared["optimizer"] = run.optimizer.state_dict()
    elif by_worker:
        states = [by_worker[worker] for worker in sorted(by_worker)]
        shared["optimizer"] = optimizers.mean_state(states)
    del shared["local"]
    for file in files:
        del file["own"]["local"]


def _refuse_between(shared: SharedState, field: str) -> None:
    if shared["local"]["since"]:
        raise ConfigError(
            f"{field}: at this unit the workers are between two synchronisations: branch where "
            f"a period has just ended, or keep {'a ' * (field == 'sync_policy')}{field}"
        )


# -- rates and decisions ---------------------------------------------------------------------


def rate_after(run: Run, unit: int) -> float:
    """The learning rate after a unit: that of the next phase, if one begins there."""
    after = run.phase.following
    if after is None or unit + 1 != run.phase.stop or unit + 1 >= len(run.units):
        return run.learning_rate(run.units.span(unit)[1])
    per_epoch = len(run.batches.rebatched(after.batch_size))
    units = Units.of(after, per_epoch)
    return LearningRate(after.optimizer, per_epoch, units.total)(units.span(unit + 1)[0])
