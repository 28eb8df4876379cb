"""One entrant of the race on this process of a group: a schedule of Regimes, or what torch offers.

Torch's own methods train the same model on the same batches in the same order at the same rates,
with torch's optimiser, in a loop of their own: DistributedDataParallel without and with torch's
hooks, PostLocalSGD, and fully_shard over two shards and two replicas. PostLocalSGD averages after
the first step of each period; each process evaluates its part of the text with its own model, where
a schedule of local steps evaluates the model of its last synchronisation.
"""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from regimes.base.config import RunConfig, from_dict
from regimes.training.build import Run, prepare_run
from regimes.training.loop import run
from regimes.training.optimizers import build_optimizers

Wrapped = tuple[nn.Module, Any, Callable[[], nn.Module]]  # model, optimiser, what is evaluated
BEFORE = 0.1  # share of the steps before torch's PowerSGD compresses
TORCH_RANK = 4
QUARTER = 0.25  # share of the steps before PostLocalSGD leaves every step
PERIOD = 8
POST_LOCAL = "DDP, PostLocalSGD"
NO_WARM_UP = "DDP, PostLocalSGD without warm-up"  # the same without our quarter: every 8 by torch
PLANNED = ("post-local 8", "qsr")  # schedules whose period changes
CHANGING = ("rate 2-1", "accordion", "l-greco")  # whose ranks change
# whose steps on unlimited links follow from those of others
DERIVED = {**dict.fromkeys(PLANNED, ("dense", "every 8")), POST_LOCAL: ("DDP", POST_LOCAL)}
KEPT: list[Any] = []  # to free a module with torch's fp16 hook can hang: the process ends instead


def train(kind: str, config: dict[str, Any], out: str) -> dict[str, Any]:
    """Train to the end.

    Args:
        kind: "regimes", or a key of `PEERS`.
        out: the folder of a record; it is removed.

    Returns:
        Per unit: steps, loss (bits per byte of the test text, and of the text held out if there is
        one) and seconds of training. On process 0 of a schedule also where they went, and bytes; of
        DistributedDataParallel the bytes of its buckets, and the seconds of a step's backward pass
        that follow the first exchange.
    """
    made = from_dict(RunConfig, config)
    return _recorded(made, out) if kind == "regimes" else _peer(kind, made)


def _recorded(config: RunConfig, out: str) -> dict[str, Any]:
    """A schedule, by the trainer."""
    record = run(config, out)
    spent = [x for x in record.epochs.columns if x.startswith("seconds_") and "evaluat" not in x]
    seconds = record.epochs[spent].fillna(0.0).sum(axis=1)
    kinds = {kind for row in record.rows for kind in row["collectives"]["bytes"]}
    sent = {
        what: {k: [row["collectives"][what].get(k, 0) for row in record.rows] for k in kinds}
        for what in ("calls", "bytes")
    }
    found = {
        "steps": record.epochs["steps"].tolist(),
        "loss": record.epochs["metric"].tolist(),
        "validation": [row["validation"]["metric"] for row in record.rows if "validation" in row],
        "seconds": seconds.tolist(),
        "parts": {name: record.epochs[name].fillna(0.0).tolist() for name in spent},
        "period": [row["sync"].get("period", 1) for row in record.rows],
        **sent,
    }
    dist.barrier() if dist.is_initialized() else None
    shutil.rmtree(out, ignore_errors=True)
    return found


# -- what torch offers -----------------------------------------------------------------------


def _ddp(parts: Run) -> Wrapped:
    return DistributedDataParallel(parts.model), parts.optimizer, lambda: parts.model


def _half(parts: Run) -> Wrapped:
    wrapped = DistributedDataParallel(parts.model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped, parts.optimizer, lambda: parts.model


def _power(parts: Run) -> Wrapped:
    wrapped = DistributedDataParallel(parts.model)
    begins = max(2, round(BEFORE * parts.units.total))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=TORCH_RANK, start_powerSGD_iter=begins
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, parts.optimizer, lambda: parts.model


def _post_local(parts: Run, quarter: float = QUARTER) -> Wrapped:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns

    wrapped = DistributedDataParallel(parts.model)
    begins = round(quarter * parts.units.total)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = post_localSGD_hook.PostLocalSGDState(
        None, alone[dist.get_rank()], begins, post_local_gradient_allreduce=False
    )
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=begins)
    (inner,) = parts.optimizer.parts
    parts.optimizer.parts = [PostLocalSGDOptimizer(inner, averager)]
    return wrapped, parts.optimizer, lambda: parts.model


def _hsdp(parts: Run) -> Wrapped:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = copy.deepcopy(parts.model)
    for block in [m for m in parts.model.modules() if isinstance(m, nn.ModuleList)]:
        for part in block:
            fully_shard(part, mesh=mesh)
    fully_shard(parts.model, mesh=mesh)
    optimizer = build_optimizers(parts.config.optimizer, parts.model, parts.task.classes)

    def gathered() -> nn.Module:
        state = {k: v.full_tensor() for k, v in parts.model.state_dict().items()}
        whole.load_state_dict(state)
        return whole

    return parts.model, optimizer, gathered


PEERS: dict[str, Callable[[Run], Wrapped]] = {
    "DDP": _ddp,
    "DDP, fp16 hook": _half,
    "DDP, PowerSGD hook": _power,
    POST_LOCAL: _post_local,
    NO_WARM_UP: functools.partial(_post_local, quarter=0.0),
    "HSDP": _hsdp,
}


def _peer(kind: str, config: RunConfig) -> dict[str, Any]:
    """One of torch's methods, in a loop like any script's."""
    parts = prepare_run(config)
    found: dict[str, list[Any]] = {"steps": [], "loss": [], "validation": [], "seconds": []}
    with parts.numerics.training():
        network, optimizer, evaluated = PEERS[kind](parts)
        KEPT.extend((parts, network, optimizer))
        if isinstance(network, DistributedDataParallel):
            network._set_ddp_runtime_logging_sample_rate(1)
        epochs = (parts.batches.epoch(i, parts.world.hosted) for i in itertools.count())
        batches = itertools.chain.from_iterable(epochs)
        for unit in range(len(parts.units)):
            first, stop = parts.units.step_span(unit)
            dist.barrier()
            start = time.perf_counter()
            network.train()
            for step, (x, y) in zip(
                range(first, stop), itertools.islice(batches, stop - first), strict=True
            ):
                for parameter in network.parameters():
                    parameter.grad = None
                parts.task.loss(network, x[0], y[0]).backward()
                optimizer.lr = parts.learning_rate(step)
                optimizer.step()
            found["seconds"].append(time.perf_counter() - start)
            found["steps"].append(stop - first)
            where = evaluated(), parts.device, parts.batches.dtype, parts.world.evaluators
            found["loss"].append(parts.task.evaluate(*where)[1])
            if config.data.validation_size is not None:
                found["validation"].append(parts.task.validate(*where)[1])
        if isinstance(network, DistributedDataParallel):
            logged = network._get_ddp_logging_data()
            found["buckets"] = [int(x) for x in logged["rebuilt_bucket_sizes"].split(", ")]
            found["overlap"] = logged["avg_backward_compute_comm_overlap_time"] / 1e9
    return found
