"""Starting and continuing a run: its record opened; what a checkpoint holds, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regimes.compression.reducer import costs_per_step
from regimes.config import to_dict
from regimes.errors import RecordError, RegimesError
from regimes.records import RecordWriter, check_same, provenance, read_header, read_lines
from regimes.training import checkpoint
from regimes.training.build import Run
from regimes.training.rounds import Rounds
from regimes.training.rows import layer_entries


def open_record(run: Run, out: Path, resume: bool) -> RecordWriter | None:
    """Start or continue the record; every process comes back with the same ``rows`` and state."""
    if resume:
        check_same(out, to_dict(run.config))
        if read_header(out)["data"]["digest"] != run.task.digest:
            raise RecordError(f"{out} was trained on other data: the images have changed since")
        found = checkpoint.load(out)
        done = found[0] if found else 0
        run.rows = read_lines(out / "epochs.jsonl")[:done]
        if len(run.rows) < done:
            raise RecordError(f"{out} lacks epochs that its checkpoint has: was it edited?")
        if found:
            _take_over(run, out, found[1])
    run.header = _header(run)
    run.world.barrier()
    failure = writer = None
    if run.world.rank == 0:
        try:
            if resume:
                place = {"code": provenance.code(), "processes": run.world.processes}
                writer = RecordWriter.resume(out, len(run.rows), **place)
            else:
                writer = RecordWriter.create(out, run.header)
        except RecordError as error:
            failure = str(error)
    failure = run.world.gather_object(failure)[0]
    if failure:
        raise RecordError(failure)
    return writer


def _header(run: Run) -> dict[str, Any]:
    levels = {n: run.value(n) for n in run.config.levels}
    per_step = costs_per_step(run.compressor, run.layers, levels, run.config.workers)
    budget = run.config.budget
    return {
        "config": to_dict(run.config),
        "code": provenance.code(),
        "machine": provenance.machine(),
        "world": {
            "workers": run.world.workers,
            "processes": run.world.processes,
            "device": str(run.device),
            "union_pass": run.gradients.union,
        },
        "data": run.task.header(),
        "metric": run.task.metric,
        "steps_per_epoch": len(run.batches),
        "units": len(run.units),
        "budget": None
        if budget is None
        else budget.epochs * len(run.batches) * per_step[budget.level]["floats"],
        "per_step": per_step,
        "layers": layer_entries(run.layers),
    }


def save(run: Run, out: Path) -> None:
    """A checkpoint of all processes: what they share, and each worker's own."""
    memories, residuals = run.reducer.state_dict()
    shared = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "memories": memories,
        "gauges": run.panel.state_dict(),
    }
    own = {"residuals": residuals, "hidden": run.gradients.carried()}
    if run.pruning is not None:
        shared["pruning"] = run.pruning.state_dict()
    if run.local is not None:
        shared["local"], own["local"] = run.local.state_dict()
    checkpoint.save(out, len(run.rows), shared, own, run.world)


def _take_over(run: Run, out: Path, files: list[dict[str, Any]]) -> None:
    """Raises RecordError where a checkpoint does not fit: a stranger's, or the model of one's own
    has changed since."""
    try:
        _restore(run, files)
    except RegimesError:
        raise
    except Exception as error:  # what other states make torch and plug-ins raise has no end
        why = " ".join(str(error).split()) or type(error).__name__
        raise RecordError(
            f"the checkpoint of {out} does not fit its configuration ({why:.200}): has the model, "
            "or another part of one's own, changed since? Train anew in another folder"
        ) from error


def _restore(run: Run, files: list[dict[str, Any]]) -> None:
    shared = next(f["shared"] for f in files if "shared" in f)
    run.model.load_state_dict(shared["model"])
    if "optimizer" in shared:
        run.optimizer.load_state_dict(shared["optimizer"])
    else:
        _restore_momenta(run, shared["momentum"])
    run.panel.load_state_dict(shared["gauges"])
    if run.pruning is not None:
        run.pruning.load_state_dict(shared["pruning"])
    residuals = {
        layer.name: _hosted_rows(
            run, [(f["workers"], f["own"]["residuals"][layer.name]) for f in files]
        )
        for layer in run.layers
    }
    run.reducer.load_state_dict(shared["memories"], residuals)
    run.reducer.to(run.device)
    if run.local is not None:
        _restore_local(run, run.local, shared["local"], files)
    hidden = {w: state for f in files for w, state in _hidden(f).items()}
    if hidden:
        run.gradients.carry_on(
            [tuple(part.to(run.device) for part in hidden[worker]) for worker in run.world.hosted]
        )


def _restore_local(
    run: Run, local: Rounds, shared: dict[str, Any], files: list[dict[str, Any]]
) -> None:
    own = [(f["workers"], f["own"]["local"]) for f in files]
    residuals = {
        layer.name: _hosted_rows(run, [(who, part["residuals"][layer.name]) for who, part in own])
        for layer in run.layers
    }
    states = {w: state for who, part in own for w, state in zip(who, part["workers"], strict=False)}
    hosted = [states[worker] for worker in run.world.hosted] if states else []
    local.load_state_dict(shared, residuals, hosted)


def _hidden(file: dict[str, Any]) -> dict[int, Any]:
    """By worker, what a language model carried along; older files do not have it."""
    return dict(zip(file["workers"], file["own"].get("hidden", ()), strict=False))


def _restore_momenta(run: Run, momenta: dict[str, Tensor | None]) -> None:
    """From a checkpoint of a version that knew SGD only."""
    (sgd,) = run.optimizer.parts
    for layer, parameter in zip(run.layers, run.gradients.parameters, strict=True):
        momentum = momenta[layer.name]
        if momentum is not None:
            sgd.state[parameter]["momentum_buffer"] = momentum.to(run.device)


def _hosted_rows(run: Run, saved: list[tuple[list[int], Tensor | None]]) -> Tensor | None:
    """The residual rows of this process's workers, from the files of any number of processes.

    A single row for several workers is their mean (a union pass), which is all that a linear
    compressor depends on.
    """
    if any(tensor is None for _, tensor in saved):
        return None
    hosted = list(run.world.hosted)
    for workers, tensor in saved:
        if workers == hosted:
            return tensor
    row = {
        worker: tensor[i if len(tensor) == len(workers) else 0]  # type: ignore[arg-type, index]
        for workers, tensor in saved
        for i, worker in enumerate(workers)
    }
    stack = torch.stack([row[worker] for worker in hosted])
    return stack.mean(0, keepdim=True) if run.gradients.union else stack
