"""``regimes.attach``: the arguments of a hook, checked before anything is registered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from regimes import capabilities
from regimes.capabilities import Mode
from regimes.config import GivenLevel, Signal
from regimes.console.units import format_quantity
from regimes.ddp.fsdp_source import FSDPModules, FSDPParameters, ShardedReplicas
from regimes.ddp.fsdp_steps import ModuleSteps, ReplicaSteps
from regimes.ddp.hook import Hook
from regimes.ddp.sharded import ShardedGradients
from regimes.ddp.source import DDPGradients
from regimes.ddp.steps import Attached, HookSteps
from regimes.ddp.unit_steps import UnitSteps
from regimes.errors import ConfigError, require, unexpected_value
from regimes.job import choices
from regimes.job.given import (
    GivenCompressor,
    GivenEnd,
    GivenInstruments,
    GivenOptimizer,
    GivenPolicy,
    GivenProbe,
    HasScale,
    Table,
)
from regimes.job.probe import pick_probe
from regimes.job.recorder import RecordOptions, record_options
from regimes.job.schedule import UnitSchedule, unit_schedule

if TYPE_CHECKING:
    from regimes.collectives.sharded_models import DeviceMesh


def attach(
    model: nn.Module,
    *,
    replicas: DeviceMesh | None = None,
    shards: DeviceMesh | None = None,
    scatter: Table | None = None,
    gather: Table | None = None,
    policy: GivenPolicy | None = None,
    compressor: GivenCompressor | None = None,
    level: GivenLevel | None = None,
    levels: Mapping[str, GivenLevel] | None = None,
    signal: Signal = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    optimizer: GivenOptimizer | None = None,
    every: GivenEnd = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: HasScale | None = None,
    instruments: GivenInstruments | None = None,
    probe: GivenProbe | None = None,
    timeout: float = 600.0,
    check_every: int | None = None,
    check_cosine: float | None = None,
    summary: bool = True,
    compare_weights: bool = True,
) -> Hook:
    """Let a DDP model, a sharded one (FSDP2), or replicas of a sharded one exchange compressed
    gradients, at a constant level or at levels that a policy decides.

    Call it on every process, right after wrapping the model. ``.grad`` then holds the shared
    update after each backward pass, as without the hook. To accumulate gradients, use
    ``model.no_sync()`` for all backward passes of a step but the last.

    Args:
        model: a DistributedDataParallel model; with ``shards`` or ``replicas`` one that
            ``fully_shard`` (FSDP2) has divided. With ``replicas`` it is divided over another
            dimension of the same mesh.
        replicas: the mesh dimension between replicas, ``mesh["replicate"]``: gradients are averaged
            over it. All replicas begin with the first one's parameters and buffers.
            To accumulate gradients, use ``set_requires_gradient_sync(False)``. PowerSGD compresses
            whole matrices, whatever the number of shards; other compressors each shard.
        shards: the mesh of one dimension that was given to ``fully_shard``. FSDP2's own collectives
            are then compressed, module by module. With ``compressor`` whole gradients are
            exchanged, as in DDP, and each process keeps its rows. Without it a layer of the hook
            is what one call of ``fully_shard`` has divided, and ``scatter`` has its levels. With
            ``replicas``, ``shards`` is the other dimension of the mesh, and the layers are those of
            ``replicas`` alone. See docs/how-to/fsdp.md.
        scatter: with ``shards``, how gradients are reduced: ``{"level": 4}`` (or 8 bits), or
            ``{"levels": {"low": 8, "high": 4}}`` between which the policy decides, ACCORDION where
            none is named; with the fields of `QuantisedScatter`.
            Without it FSDP2's own reduce-scatter runs.
        gather: with ``shards``, how weights are gathered, in forward and backward: ``{"level":
            8}`` (or 4 bits), and "block", how many numbers have one scale. Without it FSDP2's own
            all-gather runs.
        policy, compressor: a name, a table like ``{"name": "accordion", "interval": 5}``, or an
            object. With neither, and without levels, every step sends 8 bits a number
            ("quantised-all-reduce"), and process 0 warns that nothing was chosen. Beside a
            policy the default compressor is "powersgd", beside a compressor without ``level`` the
            default policy "accordion".
        level: one level of the compressor throughout, in place of a policy and its levels: 4 for
            PowerSGD of rank 4.
        levels: what the policy's words mean for the compressor, by default the compressor's own:
            for PowerSGD ranks, ``{"low": 4, "high": 1}``. A level may have error feedback of its
            own: ``{"level": 1, "error_feedback": False}``.
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
        scaler: the GradScaler that scales the loss, if one does. The hook works in units of the
            unscaled loss: another scale changes neither residuals nor norms. One of torch that
            steps the model's optimiser is found without this argument.
        instruments: what else is measured: ``{"error", "residual"}``, or a table of their fields;
            with ``probe``, at the end of each unit, ``{"curvature": {}, "sharpness": {}}`` (fields
            of `instruments.curvature`). The training ends in the same bits with and without them.
        probe: a pair (loss, batches): ``loss(model, batch)`` is the mean over a batch, and batches
            is one batch or a list: this process's share of the samples, equally many on each
            process. ``model`` is the one inside DistributedDataParallel; one that FSDP2 divides has
            all weights then (`whole_model`). What the loss averages over is found by trying it on
            parts of batches; where that does not show it, a third part says it: ``weight(batch)``,
            say the number of tokens that count.
        timeout: seconds until a process that the others wait for counts as lost.
        check_every: every so many steps the gradient is exchanged once more, uncompressed, and
            compared with the update: the record has the cosine per layer, and process 0 warns where
            the model's cosine is less than ``check_cosine``, by default 0.3. Nothing else changes.
        summary: as the job ends, process 0 prints to stderr what was sent and waited for; with
            ``shards`` and a compressor, at once what its residuals cost in memory.
        compare_weights: once in each unit and at ``close()`` the processes compare a hash of the
            weights that the model has then, and each checks that these are the parameters that were
            attached. An error names processes that have drifted apart, and parameters whose
            gradients are not exchanged. It sends a few bytes with what is compared anyway.

    Raises:
        ConfigError: one sentence, before anything is registered.
    """
    source: Attached
    steps: type[UnitSteps] = HookSteps
    if shards is None and (scatter is not None or gather is not None):
        name = "gather" if scatter is None else "scatter"
        raise ConfigError(
            f"{name}: it compresses what FSDP2 exchanges: add shards=mesh, or leave it out"
        )
    if shards is not None and replicas is not None:
        within = choices.within_replicas(scatter, gather)
        source, steps = ShardedReplicas(model, replicas, shards, within), ReplicaSteps
    elif shards is not None and compressor is not None:
        choices.refuse_scatter(scatter, compressor)
        source = FSDPParameters(model, shards, choices._choose_gather(gather))
        steps = ModuleSteps
    elif shards is not None:
        compressor, level, levels = choices.choose_scatter(scatter, policy, level, levels)
        source = FSDPModules(model, shards, choices._choose_gather(gather))
        steps = ModuleSteps
    elif replicas is not None:
        source = ShardedGradients(model, replicas)
    else:
        source = DDPGradients(model)
    choices.check_timeout(timeout)
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise unexpected_value("scaler", scaler, "a GradScaler of torch, with get_scale(), or None")
    choices.check_seed(seed)
    schedule = unit_schedule(every, optimizer, model)
    probed = pick_probe(probe, instruments, check_every, check_cosine)
    whole = isinstance(source, FSDPParameters)
    nothing_named = policy is compressor is level is levels is None
    if nothing_named:
        compressor, level = choices.UNNAMED
    policy, levels = choices.choose_constant(policy, level, levels)
    compressor = "powersgd" if compressor is None else compressor
    chosen = choices.choose_exchange(
        policy, compressor, levels, signal, start_compressing_after, probed
    )
    modes = _list_modes(replicas, shards, optimizer, schedule, chosen.probe)
    modes += [capabilities.WHOLE_GRADIENTS] * whole
    capabilities.check(chosen.needed_parts(), modes)
    options = record_options(record)
    for name, given in (("summary", summary), ("compare_weights", compare_weights)):
        require(isinstance(given, bool), name, given, "true or false")
    hook = Hook(
        source,
        chosen,
        schedule,
        options,
        seed,
        scaler,
        float(timeout),
        steps,
        summarizes=summary,
        compares_weights=compare_weights,
    )
    if nothing_named and hook.world.rank == 0:
        choices.warn_of_unnamed()
    if whole and summary and chosen.keeps_residuals and hook.world.rank == 0:
        print(_describe_memory(hook), file=sys.stderr)
    return hook


def _describe_memory(hook: Hook) -> str:
    """What error feedback on whole gradients costs each process."""
    width, layers = hook.world.meter.dtype.itemsize, [x for x in hook.layers if x.compressed]
    size, shards = width * sum(layer.size for layer in layers), hook.world.processes
    kept, part = format_quantity(2 * size, "B"), format_quantity(size / shards, "B")
    return (
        f"regimes: error feedback keeps {kept} on each process, twice its residual of the whole "
        f"gradient; a shard of the matrices has {part}"
    )


def _list_modes(
    replicas: Any, shards: Any, optimizer: Any, schedule: UnitSchedule, probe: Any
) -> list[Mode]:
    """The modes in which a hook with these arguments works."""
    found = {
        capabilities.HOOK: True,
        capabilities.WITHOUT_SHARDS: shards is None,
        capabilities.SHARDED_MODEL: replicas is not None,
        capabilities.SHARDED_COLLECTIVES: shards is not None and replicas is None,
        capabilities.WITHOUT_PROBE: probe is None,
        capabilities.WITHOUT_OPTIMIZER: optimizer is None,
        capabilities.ENDS_BY_ITSELF: schedule.automatic,
    }
    return [mode for mode, applies in found.items() if applies]
