"""What the integrations share: making the hook, naming logged numbers, saving the state."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest
from regimes.base.torch_compat import uncompiled
from regimes.collectives.launcher import read_launch
from regimes.collectives.sharded_models import find_divided, load_parts, save_parts
from regimes.hook.attaching import attach, attach_shards
from regimes.hook.ddp import Hook, RecordOptions
from regimes.job.attached import on_all_processes
from regimes.job.fit_state import damage_as_error
from regimes.job.process_states import pack_state, unpack_state
from regimes.job.recorder import record_options
from regimes.job.spellings import EARLIER

STATE = "regimes.pt"  # in the folder of a checkpoint: the states of all processes
SHARDED = "regimes"  # there, of a sharded model: a folder of torch.distributed.checkpoint
FROM_TRAINER = {"model", "optimizer", "every", "record", "scaler"}  # arguments of ``attach``
EVALUATED = re.compile(r"(?:eval|val|valid|validation|test)[_/](.+)")


@dataclass
class HookSettings:
    """Holds a user's arguments for the hook, until the trainer has wrapped the model.

    Attributes:
        every: "epoch", or so many optimiser steps: when levels are decided.
        record: a folder, a ``RecordOptions`` or None.
        options: other arguments of ``regimes.attach``.
    """

    every: int | str
    record: str | Path | RecordOptions | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        good = self.every == "epoch" or is_integer(self.every, 1)
        require(good, "every", self.every, '"epoch" or a number of steps from 1 up')
        self.about = record_options(self.record)
        known = {
            *inspect.signature(attach_shards).parameters,
            *inspect.signature(attach).parameters,
            *EARLIER["attach"],
        } - FROM_TRAINER
        for name in self.options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}: {suggest_nearest(name, known)}")

    def attach(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        epoch_steps: float | None,
        total: float | None,
        batch_size: int | None,
        scaler: Any = None,
        clock: Any = None,
    ) -> Hook:
        """Attach the hook to a wrapped model.

        Args:
            model: as the trainer has wrapped it.
            epoch_steps: optimiser steps of an epoch; None if not known.
            total: optimiser steps of the whole job; None if not known.
            batch_size: samples per process and step; None if not known.
            clock: for an epoch of unknown steps, an object whose attribute ``epoch`` is the number
                of the present one; ``total`` then counts epochs, not steps.
        """
        every: Any
        if isinstance(self.every, int):
            every = self.every
        elif clock is not None:
            every = clock
        elif epoch_steps is not None and math.isfinite(epoch_steps):
            every = max(1, math.ceil(epoch_steps))
        else:
            raise ConfigError(
                'every = "epoch": the steps of an epoch are not known (training data without a '
                "length, or a loop of your own with Accelerate): give a number of steps"
            )
        steps = every if isinstance(every, int) else 1
        units = None
        if total is not None and 0 < total < math.inf:  # -1 is Lightning's "without end"
            units = math.ceil(total / steps)
        about = self.about
        size = about.batch_size or batch_size
        about = replace(about, units=about.units or units, batch_size=size)
        inner = getattr(optimizer, "optimizer", optimizer)  # in a trainer's wrapper
        wrapped, mesh = wrapped_model(model)
        of_fsdp = self.options.keys() & {"scatter", "gather"}
        if of_fsdp and mesh is None:
            raise ConfigError(
                f"{max(of_fsdp)}: it compresses what FSDP2 exchanges, and the trainer has not "
                "sharded the model: let it use FSDP2, on GPUs, or use a compressor of DDP"
            )
        given: dict[str, Any] = {
            "optimizer": inner if hasattr(inner, "param_groups") else optimizer,
            "every": every,
            "scaler": scaler,
            "record": about,
            **self.options,
        }
        if mesh is None:
            return attach(cast(DistributedDataParallel, wrapped), **given)
        return attach_shards(wrapped, mesh, **given)

    def numbers(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of ``Hook.log`` from what a trainer has logged: only numbers, the
        evaluation's loss as "test_loss", and the record's metric under its name."""
        metric = None if self.record is None else self.about.metric
        named = {}
        for name, value in logged.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                continue
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool):
                evaluated = EVALUATED.fullmatch(name)
                short = evaluated[1] if evaluated else ""
                # "eval_loss" is "test_loss", "eval_METRIC" is METRIC, others keep their names
                named[{metric: metric, "loss": "test_loss"}.get(short) or name] = value
        return named


def wrapped_model(model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the model of DDP or FSDP2 that a trainer has made, compiled afterwards or not, and the
    mesh of FSDP2; None in place of the mesh for DDP.

    Raises:
        ConfigError: neither has wrapped it.
    """
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return inner, None
    network, mesh = find_divided(inner)
    if mesh is not None:
        return network, mesh
    if read_launch().count > 1:
        return model, None  # FSDP1 and others: ``attach`` raises the error
    raise ConfigError(
        "the trainer has not wrapped the model in DistributedDataParallel, as it does where there "
        "are several processes: start the script with torchrun --nproc-per-node 2 SCRIPT"
    )


def save_hook(hook: Hook, folder: str | Path) -> None:
    """Save the hook's state in the folder of a checkpoint; all processes call this."""
    if hook.source.mesh is not None:
        save_parts({"hook": hook.sharded_state()}, Path(folder, SHARDED))
        return
    full = hook.full_state_dict()
    if full is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        part = Path(folder, f"{STATE}.part")
        torch.save(full, part)
        os.replace(part, Path(folder, STATE))


def load_hook(hook: Hook, folder: str | Path) -> None:
    """Continue from a checkpoint with the hook's state; all processes call this.

    Raises:
        ConfigError: on all processes: it has none, or it does not fit.
    """
    sharded = hook.source.mesh is not None
    file = Path(folder, SHARDED if sharded else STATE)
    if not hook.world.gather_object(file.exists())[0]:
        raise ConfigError(f"{file} is missing: the checkpoint was saved without the hook")
    try:
        if sharded:
            load_parts({"hook": hook.sharded_state(saved=file)}, file)
        else:
            full = on_all_processes(hook.world, lambda: _read_full(hook, file))
            hook.load_full_state_dict(full)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _read_full(hook: Hook, file: Path) -> Any:
    """The states of all processes, on process 0."""
    with damage_as_error():
        return torch.load(file, weights_only=True) if hook.world.rank == 0 else None


def collect_states(hook: Hook) -> dict[str, Any] | None:
    """Collect the states of all processes in one value, on process 0; all processes call this."""
    if hook.source.mesh is None:
        return hook.full_state_dict()
    states = hook.world.gather_to_first(pack_state(hook.state_dict()))
    return None if states is None else {SHARDED: states}


def load_collected(hook: Hook, saved: Mapping[str, Any]) -> None:
    """Continue from what ``collect_states`` gave; all processes call this, each with the whole
    value.

    Raises:
        ConfigError: on all processes: it does not fit.
    """
    sharded = hook.source.mesh is not None
    if sharded != (SHARDED in saved):
        here, there = ("FSDP2", "DDP") if sharded else ("DDP", "FSDP2")
        raise ConfigError(f"the checkpoint was saved under {there}, this job is one of {here}")
    if not sharded:
        hook.load_full_state_dict(saved)
        return
    states, world = saved[SHARDED], hook.world
    if len(states) != world.processes:
        raise ConfigError(
            f"the checkpoint was saved on {len(states)} processes, this job has {world.processes}: "
            "the state of a sharded model goes on, in a checkpoint of Lightning, on as many"
        )
    hook.load_state_dict(unpack_state(states[world.rank]))
