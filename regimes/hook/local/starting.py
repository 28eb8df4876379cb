"""``regimes.local_steps``: its arguments, checked before anything is sent."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from regimes.base import capabilities
from regimes.base.config import OuterConfig
from regimes.base.errors import ConfigError, require
from regimes.hook.local.arguments import check_trained, choose_local
from regimes.hook.local.steps import LocalSteps
from regimes.job.choices import check_seed, check_timeout
from regimes.job.given import GivenCompressor, GivenPolicy, Table
from regimes.job.probe import pick_probe
from regimes.job.recorder import RecordOptions, record_options
from regimes.job.spellings import takes_earlier

if TYPE_CHECKING:
    from regimes.collectives.sharded_models import DeviceMesh

# the job of each model that trains by local steps
_JOBS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LocalSteps]] = weakref.WeakKeyDictionary()


@takes_earlier
def local_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    replicas: DeviceMesh | None = None,
    policy: int | GivenPolicy = 32,
    periods: Mapping[str, int] | None = None,
    outer: OuterConfig | Table | None = None,
    compressor: GivenCompressor | None = None,
    level_policy: GivenPolicy | None = None,
    every: int = 100,
    record: str | Path | RecordOptions | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> LocalSteps:
    """Lets each process train ``model`` by itself, and synchronises all processes every so many
    steps.

    Call it on every process, after ``init_process_group`` and instead of wrapping the model: all
    begin with the parameters of process 0. Call ``step()`` once per iteration, after
    ``optimizer.step()``, and ``close()`` at the end, which synchronises the last steps.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> local = local_steps(model, optimizer, policy=2)
    >>> for x in torch.randn(4, 8, 3):
    ...     optimizer.zero_grad()
    ...     model(x).square().mean().backward()
    ...     optimizer.step()
    ...     local.step()
    >>> local.total
    4
    >>> local.close()
    >>> dist.destroy_process_group()

    Args:
        model: The bare model; with ``replicas`` one that ``fully_shard`` (FSDP2) has divided over
            another dimension of the same mesh.
        optimizer: The optimiser of this process, over the model's parameters; or a list of several,
            such as Muon for matrices and AdamW for all else.
        replicas: The mesh dimension between replicas, ``mesh["replicate"]``. The processes of a
            replica then take each step together, and the replicas synchronise. All begin with the
            parameters of the first replica. For compressors see ``regimes.attach``.
        policy: A period in steps, or a policy that decides it: a name, a table or an object.
        periods: The periods that the policy's levels stand for, by default ``{"low": 1, "high":
            32}``.
        outer: What a synchronisation does; by default it takes the mean. ``{"lr": 0.7, "momentum":
            0.9, "nesterov": True}`` is DiLoCo. With ``"fragments": 4, "delay": 5, "mixing": 0.5``
            as well it is Streaming DiLoCo: a quarter of the layers at a time is sent while the next
            five steps are taken, and mixed with the process's own. ``close()`` leaves the
            parameters that all share.
        compressor: The compressor of the movement that is exchanged, with its level,
            ``TopK(percent=1)``. By default there is none.
        level_policy: The policy that decides the compressor's level after each unit. The levels are
            then given as in `attach`.
        every: The number of steps in a unit, after which the policy decides and a row is recorded.
        record: The folder of a record of the job, which process 0 writes; or `RecordOptions`, which
            also say what is measured and checked. Weights are compared after a unit's last
            synchronisation.
        seed: The seed of the compressor's random numbers.
        timeout: The number of seconds after which a process that the others wait for counts as
            lost.

    Returns:
        The job, whose ``step()`` and ``close()`` you call.

    Raises:
        ConfigError: in one sentence, before anything is sent.
    """
    options = record_options(record)
    probe = options.probe
    require(probe is None, "probe", probe, "none: local steps have no gradient of all processes")
    _, measured = pick_probe(None, options.instruments, options.check_every, options.check_cosine)
    chosen = choose_local(policy, periods, outer, compressor, level_policy, every, measured)
    found = {
        capabilities.LOCAL_STEPS: True,
        capabilities.SHARDED_MODEL: replicas is not None,
        capabilities.STREAMING: chosen.outer.leaves_apart,
    }
    capabilities.check(chosen.needed_parts(), [mode for mode, applies in found.items() if applies])
    trained = check_trained(model, optimizer, replicas)
    known = _JOBS.get(model)
    earlier = None if known is None else known()
    if earlier is not None and not earlier.closed:
        raise ConfigError(
            "local_steps: this model has local steps already, and two would each average it: call "
            "close() of the first ones before"
        )
    check_timeout(timeout)
    check_seed(seed)
    world = trained.make_world(float(timeout))
    recorded = options if options.folder is not None else None
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
    job = LocalSteps(model, optimizers, trained, chosen, recorded, seed, world)
    job.summarizes, job.compares_weights = options.summary, options.compare_weights
    _JOBS[model] = reference = weakref.ref(job)
    atexit.register(_at_exit, reference)
    return job


def _at_exit(reference: weakref.ref[LocalSteps]) -> None:
    """Steps without a ``close`` are not synchronised, but summarised, as Python ends well."""
    if (job := reference()) is not None and getattr(sys, "last_value", None) is None:
        job._summarize()
