"""What jobs under FSDP2 do beside plain training: steps that do not count, other numbers of
processes, a process that is lost. The training is that of ``fsdp``.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from ddp_scripts import fsdp
from ddp_scripts.fsdp import STEPS, Case
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from regimes.base.errors import RegimesError

# -- steps that do not count -----------------------------------------------------------------------


def uncounted(rank: int, ranks: int, cases: list[Case], kinds: list[str]) -> list[dict[str, Any]]:
    """A job by case and kind of what comes before each step: "nothing", "a pass whose gradients are
    cleared", or "an overflow", a pass that one process makes infinite, without a step."""
    mesh, found = fsdp.flat_mesh(ranks), []
    for case in cases:
        for kind in kinds:
            net = fsdp.shard(fsdp.build(case), case, mesh)
            optimizer = fsdp.optimiser(net, case)
            hook = fsdp.attach(net, case, mesh, optimizer)
            for step in range(STEPS):
                if kind != "nothing" and step in (1, 3):
                    factor = -100.0
                    if kind == "an overflow":
                        factor = float("inf") if rank == ranks - 1 else 1.0
                    (factor * fsdp.loss_of(net, case, step + 50, 0, rank)).backward()
                fsdp.train(net, optimizer, case, rank, [step])
            hook.steps.undo_cleared()
            found.append(
                {
                    "weights": fsdp.weights(net),
                    "residuals": fsdp.residuals(hook),
                    "memories": {k: v["step"] for k, v in hook.reducer.state_dict()[0].items()},
                    "counts": [hook.steps.in_unit, hook.steps.finite_in_unit, hook.steps.total],
                }
            )
            hook.close()
            found[-1]["rows"] = hook.rows
    return found


# -- other numbers of processes --------------------------------------------------------------------


def regrouped(
    rank: int, ranks: int, cases: list[Case], folder: str, spans: list[tuple[int, int, str, str]]
) -> list[list[dict[str, Any]]]:
    """By span and case: steps ``first`` to ``last``, from a checkpoint and to another one, of these
    names; "" is none."""
    mesh = fsdp.flat_mesh(ranks)
    return [
        [_span(rank, mesh, case, f"{folder}/{i}", *span) for i, case in enumerate(cases)]
        for span in spans
    ]


def _span(
    rank: int, mesh: Any, case: Case, folder: str, first: int, last: int, before: str, after: str
) -> dict[str, Any]:
    net = fsdp.shard(fsdp.build(case), case, mesh)
    optimizer = fsdp.optimiser(net, case)
    hook = fsdp.attach(net, case, mesh, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if before:
            loaded = _parts(net, optimizer, hook, f"{folder}/{before}")
            dcp.load(loaded, checkpoint_id=f"{folder}/{before}")
            model, state = loaded["model"], loaded["optimizer"]
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
        begin = _memories(hook)
        fsdp.train(net, optimizer, case, rank, range(first, last))
        if after:
            dcp.save(_parts(net, optimizer, hook), checkpoint_id=f"{folder}/{after}")
    found = {"begin": begin, "end": _memories(hook)}
    hook.close()
    return found


def _parts(net: Any, optimizer: Any, hook: Any, saved: str | None = None) -> dict[str, Any]:
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": state, "hook": hook.sharded_state(saved=saved)}


def _memories(hook: Any) -> dict[str, Any]:
    return {"residuals": owed(hook), "sums": sums(hook), "total": hook.steps.total}


def owed(hook: Any) -> dict[str, Tensor]:
    """By layer, what this process owes: of quantised modules ``[shards, part]``."""
    compressor, found = hook.chosen.compressor, fsdp.residuals(hook)
    layers = {layer.name: layer for layer in hook.layers}
    return {name: compressor.numbers(x, layers[name])[0] for name, x in found.items()}


def sums(hook: Any) -> dict[str, Tensor]:
    """What this process has of the norms' sums."""
    kept = hook._norm_sums().get("update", [])
    return {layer.name: x.clone() for layer, x in zip(hook.layers, kept, strict=False)}


# -- a process that is lost ------------------------------------------------------------------------


def lost(rank: int, ranks: int, case: Case) -> str:
    """What the others hear when the last process ends after a step."""
    mesh = fsdp.flat_mesh(ranks)
    net = fsdp.shard(fsdp.build(case), case, mesh)
    hook = fsdp.attach(net, case, mesh, fsdp.optimiser(net, case), timeout=20.0)
    fsdp.loss_of(net, case, 0, 0, rank).backward()
    if rank == ranks - 1:
        os._exit(3)
    try:
        fsdp.loss_of(net, case, 1, 0, rank).backward()
    except RegimesError as error:
        return str(error)
    return f"nothing after {hook.steps.total} steps"
