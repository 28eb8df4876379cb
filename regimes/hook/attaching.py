"""``regimes.attach``, ``attach_replicas`` and ``attach_shards``: the arguments of a hook, checked
before anything is registered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes.base import capabilities
from regimes.base.capabilities import Mode, Part
from regimes.base.config import Signal
from regimes.base.console.units import format_quantity
from regimes.base.errors import ConfigError, is_integer, require, unexpected_value
from regimes.compression.scatter import QuantisedScatter
from regimes.hook.ddp.hook import Hook
from regimes.hook.ddp.nodes import GivenNodes
from regimes.hook.ddp.source import DDPGradients
from regimes.hook.ddp.steps import HookSteps, ModelAdapter
from regimes.hook.ddp.unit_steps import UnitSteps
from regimes.hook.fsdp import arguments
from regimes.hook.fsdp.collectives import ModuleSteps, ReplicaSteps
from regimes.hook.fsdp.replicas import ShardedGradients
from regimes.hook.fsdp.shards import FSDPModules, FSDPParameters, ShardedReplicas
from regimes.job import choices
from regimes.job.given import (
    GivenCompressor,
    GivenEnd,
    GivenOptimizer,
    GivenPolicy,
    HasScale,
    Table,
)
from regimes.job.probe import pick_probe
from regimes.job.recorder import RecordOptions, record_options
from regimes.job.spellings import takes_earlier
from regimes.job.unit_ends import unit_schedule

if TYPE_CHECKING:
    from regimes.collectives.sharded_models import DeviceMesh


@takes_earlier
def attach(
    model: DistributedDataParallel,
    optimizer: GivenOptimizer | None = None,
    *,
    compressor: GivenCompressor | None = None,
    policy: GivenPolicy | None = None,
    signal: Signal = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    every: GivenEnd = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: HasScale | None = None,
    nodes: GivenNodes = None,
    graphs: int | None = None,
    timeout: float = 600.0,
) -> Hook:
    """Lets a model of DistributedDataParallel exchange compressed gradients, at a constant level or
    at levels that a policy decides::

        hook = regimes.attach(model, optimizer, compressor=PowerSGD(rank=4))
        hook = regimes.attach(
            model, optimizer, policy=Accordion(low=PowerSGD(rank=4), high=PowerSGD(rank=1))
        )

    Call it on every process, right after wrapping the model. ``.grad`` then holds the shared update
    after each backward pass, as without the hook. To accumulate gradients, use ``model.no_sync()``
    for all backward passes of a step but the last. ``hook.detach()`` gives the model back.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from regimes import PowerSGD
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(nn.Linear(8, 8))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> hook = attach(model, optimizer, compressor=PowerSGD(rank=2), every=1)
    >>> for x in torch.randn(2, 4, 8):
    ...     optimizer.zero_grad()
    ...     model(x).square().mean().backward()
    ...     optimizer.step()
    >>> hook.close()
    >>> len(hook.rows)
    2
    >>> dist.destroy_process_group()

    Args:
        model: The model, wrapped in DistributedDataParallel. For a model that ``fully_shard``
            (FSDP2) divides, see `attach_shards` and `attach_replicas`.
        optimizer: The optimiser, or a list if several train one model. The hook reads the learning
            rate of its first group, so ``epoch_end()`` needs no rate.
        compressor: An object with its level, ``PowerSGD(rank=4)``, or a table, ``{"name":
            "powersgd", "level": 4}``. Several levels for a policy are given by name,
            ``PowerSGD(rank={"low": 4, "high": 1})`` or ``{"name": "powersgd", "levels": {"low": 4,
            "high": 1}}``; if there are none, they are the compressor's own. A level may have error
            feedback of its own, ``{"level": 1, "error_feedback": False}``. If you pass neither a
            compressor nor a policy, every step sends 8 bits per number (``QuantisedAllReduce``),
            and process 0 warns that nothing was chosen.
        policy: An object, a name, or a table such as ``{"name": "accordion", "interval": 5}``.
            Beside a compressor without a level the default is "accordion". The levels of a policy
            may be compressors, ``Accordion(low=PowerSGD(rank=4), high=PowerSGD(rank=1))``, in place
            of ``compressor``; they may differ only in level and error feedback. Beside a policy the
            default compressor is "powersgd".
        signal: The norm that detectors read, see ``regimes.instruments.gradient_norm``. All signals
            but "update" keep a copy of the gradients and send something at the end of an epoch.
        seed: The seed of the compressor's random numbers.
        start_compressing_after: The number of steps at the start that send the gradient
            uncompressed.
        every: When a unit ends. With "epoch" it ends with ``epoch_end()``. With a number it ends by
            itself after so many steps; ``len(loader)`` is an epoch. With a ``DistributedSampler``
            it ends by itself when ``set_epoch`` names another epoch. The last two need the
            optimiser.
        record: The folder of a record of the job, which process 0 writes; or `RecordOptions`, which
            also say what is measured and checked.
        scaler: The GradScaler that scales the loss. The hook works in units of the unscaled loss,
            so another scale changes neither residuals nor norms. A scaler of torch that steps the
            model's optimiser is found without this argument.
        nodes: The nodes that act as workers, if several devices share a node. Gradients are
            averaged within a node at full precision, and each device exchanges its rows of every
            layer with the same rows of the other nodes. It is a number of nodes, whose processes
            have consecutive ranks, or the dimension between nodes of a mesh, ``mesh["node"]``.
            Without it the nodes of the launcher (torchrun) are workers if this sends less between
            nodes and the numbers of the compressor cannot be added up on the way; process 0 says
            so. False: each process is a worker.
        graphs: On a GPU, record what a step launches between two collectives as CUDA graphs and
            replay them. This number is kept for each bucket, one for each combination of levels,
            and the one that was used longest ago is dropped. No GPU has run it yet, only tests
            that pretend one (docs/how-to/ddp.md). Unset: there are no graphs.
        timeout: The number of seconds after which a process that the others wait for counts as
            lost.

    Returns:
        The hook. ``hook.levels`` has the level of each layer, ``hook.traffic`` the traffic of this
        process, and ``hook.rows`` the units that have ended.

    Raises:
        ConfigError: in one sentence, before anything is registered.
    """
    given = _HookArguments(
        compressor, policy, signal, seed, start_compressing_after, every, record, scaler, timeout
    )
    source = DDPGradients(model, nodes)
    hook = given.make_hook(source, HookSteps, optimizer, [capabilities.WITHOUT_SHARDS], graphs)
    if nodes is None and source.nodes is not None and hook.world.rank == 0:
        # a node is a worker, and nobody has asked for it
        print(
            f"regimes: a worker is a node: the {hook.world.shards} processes of each of the "
            f"{hook.world.workers} nodes average their gradients at full precision, and what nodes "
            "exchange is compressed (nodes=False: each process compresses its own)",
            file=sys.stderr,
        )
    return hook


@takes_earlier
def attach_replicas(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: GivenOptimizer | None = None,
    *,
    scatter: QuantisedScatter | Table | None = None,
    gather: Table | None = None,
    compressor: GivenCompressor | None = None,
    policy: GivenPolicy | None = None,
    signal: Signal = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    every: GivenEnd = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: HasScale | None = None,
    timeout: float = 600.0,
) -> Hook:
    """Lets replicas of a model that ``fully_shard`` (FSDP2) divides exchange compressed gradients::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        hook = regimes.attach_replicas(
            model, mesh["replicate"], optimizer, compressor=PowerSGD(rank=4)
        )

    Gradients are averaged over the replicas; all begin with the parameters and buffers of the
    first. To accumulate gradients, use ``set_requires_gradient_sync(False)``. PowerSGD compresses
    whole matrices, whatever the number of shards; other compressors compress each shard.

    Args:
        model: The model, which ``fully_shard`` has divided over another dimension of the same mesh.
        mesh: The dimension between replicas, ``mesh["replicate"]``.
        scatter: How gradients are reduced within each replica, ``QuantisedScatter(bits=8)`` or
            ``{"level": 8}``. It has one level, and no error feedback. Without it FSDP2's own
            reduce-scatter runs. See docs/how-to/fsdp.md.
        gather: How weights are gathered within each replica, as in `attach_shards`.
        optimizer, compressor, policy, signal, seed, start_compressing_after: As in `attach`.
        every, record, scaler, timeout: As in `attach`.

    Returns:
        The hook, as in `attach`.

    Raises:
        ConfigError: in one sentence, before anything is registered.
    """
    given = _HookArguments(
        compressor, policy, signal, seed, start_compressing_after, every, record, scaler, timeout
    )
    source, steps = ShardedGradients(model, mesh), HookSteps
    modes = [capabilities.WITHOUT_SHARDS, capabilities.SHARDED_MODEL]
    if scatter is not None or gather is not None:
        within = arguments.within_replicas(scatter, gather)
        source, steps = ShardedReplicas(model, mesh, within), ReplicaSteps
        del modes[0]
    return given.make_hook(source, steps, optimizer, modes)


@overload
def attach_shards(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: GivenOptimizer | None = None,
    *,
    scatter: QuantisedScatter | Table | None = None,
    gather: Table | None = None,
    policy: GivenPolicy | None = None,
    signal: Signal = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    every: GivenEnd = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: HasScale | None = None,
    timeout: float = 600.0,
) -> Hook: ...


@overload
def attach_shards(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: GivenOptimizer | None = None,
    *,
    compressor: GivenCompressor | None,
    gather: Table | None = None,
    policy: GivenPolicy | None = None,
    signal: Signal = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    every: GivenEnd = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: HasScale | None = None,
    timeout: float = 600.0,
) -> Hook: ...


@takes_earlier
def attach_shards(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: GivenOptimizer | None = None,
    *,
    scatter: QuantisedScatter | Table | None = None,
    gather: Table | None = None,
    compressor: GivenCompressor | None = None,
    policy: GivenPolicy | None = None,
    signal: Signal = "update",
    seed: int = 0,
    start_compressing_after: int = 0,
    every: GivenEnd = "epoch",
    record: str | Path | RecordOptions | None = None,
    scaler: HasScale | None = None,
    timeout: float = 600.0,
) -> Hook:
    """Compresses what ``fully_shard`` (FSDP2) exchanges, module by module::

        fully_shard(model, mesh=mesh)
        hook = regimes.attach_shards(
            model, mesh, optimizer, scatter=QuantisedScatter(bits=4), gather={"level": 8}
        )

    Gradients are reduced by ``scatter`` or by ``compressor``, but not by both. See
    docs/how-to/fsdp.md.

    Args:
        model: The model, which ``fully_shard`` has divided.
        mesh: The mesh of one dimension that was given to ``fully_shard``.
        scatter: How gradients are quantised on the way to their owners:
            ``QuantisedScatter(bits=4)`` (or 8), or ``{"level": 4}``. With
            ``QuantisedScatter(bits={"low": 8, "high": 4})``, or ``{"levels": {"low": 8, "high":
            4}}``, the policy decides between the levels; the default is ACCORDION. A layer of the
            hook is then what one call of ``fully_shard`` has divided. Without it, and without a
            compressor, FSDP2's own reduce-scatter runs.
        compressor: A compressor of whole gradients, as in `attach`. Each process keeps its rows. A
            policy may have compressors in place of names of levels here, too:
            ``policy=Accordion(low=PowerSGD(rank=4), high=PowerSGD(rank=1))``.
        gather: How weights are gathered, in forward and backward: ``{"level": 8}`` (or 4 bits), and
            "block", the number of numbers that share a scale. Without it FSDP2's own all-gather
            runs.
        optimizer, policy, signal, seed, start_compressing_after, every, record, scaler, timeout: As
            in `attach`.

    Returns:
        The hook, as in `attach`.

    Raises:
        ConfigError: in one sentence, before anything is registered.
    """
    modes = [capabilities.SHARDED_COLLECTIVES]
    source: FSDPModules
    if compressor is not None or (scatter is None and arguments.has_whole_levels(policy)):
        if scatter is not None:
            raise ConfigError(
                f"compressor = {compressor!r}: it exchanges whole gradients, and scatter "
                "quantises the parts of their owners: leave one of them out"
            )
        source = FSDPParameters(model, mesh, arguments.choose_gather(gather))
        modes.append(capabilities.WHOLE_GRADIENTS)
    else:
        policy, compressor = arguments.choose_scatter(scatter, policy)
        source = FSDPModules(model, mesh, arguments.choose_gather(gather))
    given = _HookArguments(
        compressor, policy, signal, seed, start_compressing_after, every, record, scaler, timeout
    )
    hook = given.make_hook(source, ModuleSteps, optimizer, modes)
    whole = isinstance(source, FSDPParameters) and hook.chosen.keeps_residuals
    if whole and hook.summarizes and hook.world.rank == 0:
        # what error feedback on whole gradients costs each process
        layers = [x for x in hook.layers if x.compressed]
        size = hook.world.meter.dtype.itemsize * sum(layer.size for layer in layers)
        part = format_quantity(size / hook.world.processes, "B")
        print(
            f"regimes: error feedback keeps {format_quantity(2 * size, 'B')} on each process, "
            f"twice its residual of the whole gradient; a shard of the matrices has {part}",
            file=sys.stderr,
        )
    return hook


@dataclass
class _HookArguments:
    """The arguments that the three functions share."""

    compressor: GivenCompressor | None
    policy: GivenPolicy | None
    signal: Signal
    seed: int
    start_compressing_after: int
    every: GivenEnd
    record: str | Path | RecordOptions | None
    scaler: HasScale | None
    timeout: float

    def make_hook(
        self,
        source: ModelAdapter,
        steps: type[UnitSteps],
        optimizer: GivenOptimizer | None,
        modes: Sequence[Mode],
        graphs: int | None = None,
    ) -> Hook:
        """A hook of these arguments on a model.

        Args:
            modes: those of the model; the others follow from the arguments.
            graphs: as in `attach`.

        Raises:
            ConfigError: an argument is wrong, or does not go with another.
        """
        choices.check_timeout(self.timeout)
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            expected = "a GradScaler of torch, with get_scale(), or None"
            raise unexpected_value("scaler", self.scaler, expected)
        choices.check_seed(self.seed)
        options = record_options(self.record)
        schedule = unit_schedule(self.every, optimizer, source.network)
        probed = pick_probe(
            options.probe, options.instruments, options.check_every, options.check_cosine
        )
        nothing_named = self.policy is self.compressor is None
        policy, compressor, levels = choices.choose_levels(
            self.policy, choices.UNNAMED if nothing_named else self.compressor
        )
        chosen = choices.choose_exchange(
            policy, compressor, levels, self.signal, self.start_compressing_after, probed
        )
        conditions = {
            capabilities.WITHOUT_PROBE: chosen.probe is None,
            capabilities.WITHOUT_OPTIMIZER: optimizer is None,
            capabilities.ENDS_BY_ITSELF: schedule.automatic,
        }
        found = [mode for mode, applies in conditions.items() if applies]
        capabilities.check(chosen.needed_parts(), [capabilities.HOOK, *modes, *found])
        if graphs is not None:
            require(is_integer(graphs, 1), "graphs", graphs, "a number from 1 up, or none")
            named = f"with the compressor {type(chosen.compressor).__name__}"
            where = [*modes, capabilities.mode_of(chosen.compressor, named)]
            if source.device.type != "cuda":
                where.append(capabilities.ON_CPU)
            capabilities.check([Part("graphs", {capabilities.CAPTURED_EXCHANGES}, graphs)], where)
        if isinstance(source, DDPGradients):
            source.choose_nodes(chosen, [capabilities.HOOK, *modes, *found], float(self.timeout))
        hook = Hook(
            source,
            chosen,
            schedule,
            options if options.folder is not None else None,
            self.seed,
            self.scaler,
            float(self.timeout),
            steps,
            summarizes=options.summary,
            compares_weights=options.compare_weights,
            graphs=graphs,
        )
        if nothing_named and hook.world.rank == 0:
            choices.warn_of_unnamed()
        return hook
