"""Starting and continuing a run: its record opened, its state saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regimes import checkpoint, provenance
from regimes.compression.reducer import traffic_table
from regimes.config import DENSE, Level, to_dict
from regimes.errors import RecordError
from regimes.records import Writer, check_same, read_header, read_lines
from regimes.setup import Parts


def open_record(p: Parts, out: Path, resume: bool) -> Writer | None:
    """Start or continue the record; every process comes back with the same ``rows`` and state."""
    if resume:
        check_same(out, to_dict(p.config))
        if read_header(out)["data"]["digest"] != p.task.digest:
            raise RecordError(f"{out} was trained on other data: the images have changed since")
        found = checkpoint.load(out)
        done = found[0] if found else 0
        p.rows = read_lines(out / "epochs.jsonl")[:done]
        if len(p.rows) < done:
            raise RecordError(f"{out} lacks epochs that its checkpoint has: was it edited?")
        if found:
            _restore(p, found[1])
    p.header = _header(p)
    p.world.barrier()
    failure = writer = None
    if p.world.rank == 0:
        try:
            if resume:
                place = {"code": provenance.code(), "processes": p.world.processes}
                writer = Writer.resume(out, len(p.rows), **place)
            else:
                writer = Writer.create(out, p.header)
        except RecordError as error:
            failure = str(error)
    failure = p.world.gather_object(failure)[0]
    if failure:
        raise RecordError(failure)
    return writer


def _header(p: Parts) -> dict[str, Any]:
    levels = {**{n: p.value(n) for n in p.config.levels}, DENSE: DENSE}
    per_step = {n: _per_step(p, value) for n, value in levels.items()}
    budget = p.config.budget
    return {
        "config": to_dict(p.config),
        "code": provenance.code(),
        "machine": provenance.machine(),
        "world": {
            "workers": p.world.workers,
            "processes": p.world.processes,
            "device": str(p.device),
            "union_pass": p.gradients.union,
        },
        "data": p.task.header(),
        "metric": p.task.metric,
        "steps_per_epoch": len(p.batches),
        "budget": None if budget is None else budget.epochs * len(p.batches)
        * per_step[budget.level]["floats"],
        "per_step": per_step,
        "layers": [{"name": x.name, "shape": list(x.shape), "compressed": x.compressed}
                   for x in p.layers],
    }  # fmt: skip


def _per_step(p: Parts, level: Level) -> dict[str, Any]:
    """What one step costs at a level; "layers": the floats of each layer."""
    floats, sent = traffic_table(p.compressor, p.layers, level, p.config.workers)
    costs = [p.compressor.cost(layer, level, p.config.workers) for layer in p.layers]
    return {"floats": floats, "bytes": sent, "layers": [c.floats for c in costs]}


def save(p: Parts, out: Path) -> None:
    memories, residuals = p.reducer.state_dict()
    momenta = {
        layer.name: p.optimizer.state[parameter].get("momentum_buffer")
        for layer, parameter in zip(p.layers, p.gradients.parameters, strict=True)
    }
    gauges = {name: gauge.state_dict() for name, (_, gauge) in p.gauges.items()}
    shared = {
        "model": p.model.state_dict(),
        "momentum": momenta,
        "memories": memories,
        "gauges": gauges,
    }
    checkpoint.save(out, len(p.rows), shared, {"residuals": residuals}, p.world)


def _restore(p: Parts, files: list[dict[str, Any]]) -> None:
    shared = next(f["shared"] for f in files if "shared" in f)
    p.model.load_state_dict(shared["model"])
    for layer, parameter in zip(p.layers, p.gradients.parameters, strict=True):
        momentum = shared["momentum"][layer.name]
        if momentum is not None:
            p.optimizer.state[parameter]["momentum_buffer"] = momentum.to(p.device)
    for name, (_, gauge) in p.gauges.items():
        gauge.load_state_dict(shared["gauges"].get(name, {}))
    residuals = {
        layer.name: _hosted_rows(
            p, [(f["workers"], f["own"]["residuals"][layer.name]) for f in files]
        )
        for layer in p.layers
    }
    p.reducer.load_state_dict(shared["memories"], residuals)
    p.reducer.to(p.device)


def _hosted_rows(p: Parts, saved: list[tuple[list[int], Tensor | None]]) -> Tensor | None:
    """The residual rows of this process's workers, from the files of any number of processes.

    A single row for several workers is their mean (a union pass), which is all that a linear
    compressor depends on.
    """
    if any(tensor is None for _, tensor in saved):
        return None
    hosted = list(p.world.hosted)
    for workers, tensor in saved:
        if workers == hosted:
            return tensor
    row = {
        worker: tensor[i if len(tensor) == len(workers) else 0]  # type: ignore[arg-type, index]
        for workers, tensor in saved
        for i, worker in enumerate(workers)
    }
    stack = torch.stack([row[worker] for worker in hosted])
    return stack.mean(0, keepdim=True) if p.gradients.union else stack
