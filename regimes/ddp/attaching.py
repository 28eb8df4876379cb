"""``regimes.attach``: the arguments of a hook, checked before anything is registered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from regimes.config import Level
from regimes.ddp import choices
from regimes.ddp.hook import Hook
from regimes.ddp.own_hooks import BareGradients
from regimes.ddp.probe import pick
from regimes.ddp.record import RecordOptions, record_options
from regimes.ddp.schedule import unit_schedule
from regimes.ddp.sharded import ShardedGradients
from regimes.ddp.source import DDPGradients, Source
from regimes.ddp.torchft import inner
from regimes.errors import ConfigError, is_whole, require, unexpected


def attach(
    model: nn.Module,
    *,
    replicas: Any = None,
    manager: Any = None,
    policy: Any = None,
    compressor: Any = "powersgd",
    level: Level | None = None,
    levels: Mapping[str, Level] | None = None,
    signal: str = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    optimizer: Any = None,
    every: Any = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: Any = None,
    instruments: Mapping[str, Mapping[str, Any]] | None = None,
    probe: Any = None,
    timeout: float = 600.0,
) -> Hook:
    """Let a DDP model, or islands of a sharded one, exchange gradients compressed, at a constant
    level, or at levels that a policy decides.

    Call it on every process, right after wrapping the model. ``.grad`` then holds the shared
    update after each backward pass, as without the hook. To accumulate gradients, use
    ``model.no_sync()`` for all backward passes of a step but the last.

    Args:
        model: a DistributedDataParallel model; with ``replicas`` one that ``fully_shard`` (FSDP2)
            has divided over another dimension of the same mesh.
        replicas: the mesh dimension between islands, ``mesh["replicate"]``, over which gradients
            are then averaged. The islands begin with the first one's parameters and buffers.
            To accumulate gradients, use ``set_requires_gradient_sync(False)``. PowerSGD compresses
            whole matrices, whatever the number of shards; other compressors each shard.
        manager: a ``Manager`` of torchft, whose replicas come and go; ``model`` is then the bare
            model, and ``optimizer`` ``torchft.Optimizer``. Model, optimiser and hook are
            registered with it. See docs/how-to/sites.md.
        policy, compressor: a name, a table like ``{"name": "accordion", "interval": 5}``, or an
            object. The default policy is "accordion".
        level: one level of the compressor throughout, in place of a policy and its levels: 4 for
            PowerSGD of rank 4.
        levels: what the policy's words mean for the compressor, by default the compressor's own:
            for PowerSGD ranks, ``{"low": 4, "high": 1}``.
        signal: what the norm is of, see ``regimes.instruments.gradient_norm``. All but "update"
            keep a copy of the gradients and send something at the end of an epoch.
        seed: of the compressor's random numbers.
        start_compressing_after: the first so many steps send the gradient uncompressed.
        optimizer: the hook reads the learning rate of its first group; then ``epoch_end()`` needs
            no rate. A list if several train one model.
        every: "epoch": a unit ends with ``epoch_end()``. A number: it ends by itself after so many
            steps, ``len(loader)`` for an epoch. A ``DistributedSampler``: it ends by itself when
            ``set_epoch`` names another epoch. The last two need the optimiser.
        record: a folder for a record of the job, as the trainer writes one; process 0 writes it.
        scaler: the GradScaler that scales the loss, if one does. The hook then works in units of
            the unscaled loss, so that a change of scale changes neither residuals nor norms.
        instruments: what else is measured at the end of each unit, with ``probe``:
            ``{"curvature": {}, "sharpness": {}}``, with the fields of `instruments.curvature`. The
            training ends in the same bits with and without them.
        probe: a pair (loss, batches): ``loss(model, batch)`` is the mean over a batch, and batches
            is one batch or a list of them, this process's share of the samples, which all
            processes have as many of. ``model`` is the one inside DistributedDataParallel. What the
            loss averages over is found by trying it on parts of batches; where that does not show
            it, a third part says it: ``weight(batch)``, say the number of tokens that count.
        timeout: seconds until a process that the others wait for counts as lost; with a manager
            its own count.

    Raises:
        ConfigError: one sentence, before anything is registered.
    """
    if manager is not None:
        _check_managed(replicas, signal, every, optimizer, scaler, instruments, probe)
        source: Source = BareGradients(model, manager)
    elif replicas is None:
        source = DDPGradients(model)
    else:
        source = ShardedGradients(model, replicas)
    choices.check_timeout(timeout)
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise unexpected("scaler", scaler, "a GradScaler of torch, with get_scale(), or None")
    good = is_whole(seed, -(2**63)) and seed < 2**63  # as in a configuration
    require(good, "seed", seed, "a whole number of at most 63 bits")
    schedule = unit_schedule(every, inner(optimizer), model)
    probed = pick(probe, instruments, schedule.automatic)
    policy, levels = choices.constant(policy, level, levels)
    chosen = choices.choose(policy, compressor, levels, signal, start_compressing_after, probed)
    if manager is not None:
        choices.check_needs(chosen.policy, ("norms",), "with a manager a hook gives")
    if replicas is not None:
        if chosen.probe is not None:
            raise ConfigError(
                "instruments: curvature needs whole parameters, and this model is sharded: leave "
                "instruments and probe out"
            )
        choices.check_needs(chosen.policy, ("norms",), "a sharded model gives")
        if scaler is not None:
            raise ConfigError(
                "scaler: a sharded model trains in bfloat16, which needs no gradient scaler: leave "
                "it out"
            )
    if chosen.compressor.reads_rate and schedule.optimizer is None:
        raise ConfigError(
            f"compressor: {type(chosen.compressor).__name__} with residual = "
            f"{chosen.compressor.residual!r} reads the learning rate of each step: add "
            "optimizer=optimizer"
        )
    options = record_options(record)
    return Hook(source, chosen, schedule, options, seed, scaler, float(timeout), optimizer)


def _check_managed(
    replicas: Any, signal: str, every: Any, optimizer: Any, scaler: Any, *measured: Any
) -> None:
    """Raise ConfigError for what replicas that come and go cannot have."""
    given = {"replicas": replicas, "scaler": scaler, "instruments or probe": any(measured) or None}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}: not together with a manager: leave it out")
    if signal != "update":
        raise ConfigError(
            f"signal = {signal!r}: its norms are sent at the end of a unit, outside of a quorum: "
            'with a manager use "update"'
        )
    if optimizer is None or isinstance(optimizer, list | tuple) or not is_whole(every, 1):
        raise ConfigError(
            "manager: a replica that joins needs the optimiser's state and units of equal length: "
            "attach(..., optimizer=optimizer, every=STEPS)"
        )
