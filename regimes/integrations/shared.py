"""What the integrations share: a hook from what a trainer knows, its numbers, its saved state."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes.collectives.launcher import launched
from regimes.ddp import Hook, RecordOptions, attach
from regimes.ddp.record import record_options
from regimes.errors import ConfigError, is_whole, nearest, require

STATE = "regimes.pt"  # in the folder of a checkpoint: the states of all processes
OWN = {"model", "optimizer", "every", "record", "scaler"}  # of ``attach``, known to the trainer
TESTED = re.compile(r"(?:eval|val|valid|validation|test)[_/](.+)")


@dataclass
class Wishes:
    """What a user has asked of the hook before there is a wrapped model.

    Attributes:
        every: "epoch", or so many optimiser steps: when levels are decided.
        record: a folder, a ``RecordOptions`` or None.
        options: other arguments of ``regimes.attach``.
    """

    every: Any
    record: Any
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        good = self.every == "epoch" or is_whole(self.every, 1)
        require(good, "every", self.every, '"epoch" or a number of steps from 1 up')
        self.record = record_options(self.record)
        known = inspect.signature(attach).parameters.keys() - OWN
        for name in self.options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}: {nearest(name, known)}")

    def attach(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        epoch: float | None,
        total: float | None,
        batch_size: int | None,
        scaler: Any = None,
    ) -> Hook:
        """The hook on a wrapped model, all that a trainer knows filled in.

        Args:
            epoch: optimiser steps of an epoch, None if nobody knows.
            total: those of the whole job, likewise.
            batch_size: samples per process and step, likewise.
        """
        every = self.every
        if every == "epoch":
            if epoch is None or not math.isfinite(epoch):
                raise ConfigError(
                    'every = "epoch": the training data has no length, so nobody knows how many '
                    "steps an epoch has: give a number of steps"
                )
            every = max(1, math.ceil(epoch))
        units = math.ceil(total / every) if total and math.isfinite(total) else None
        return attach(
            parallel(model),
            optimizer=plain(optimizer),
            every=every,
            scaler=scaler,
            record=filled(self.record, units, batch_size),
            **self.options,
        )

    def numbers(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        """What a trainer has logged, as ``Hook.log`` wants it: numbers alone, the loss on other
        data under "test_loss", the record's metric under its name."""
        found = {}
        for name, value in logged.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                continue
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool):
                tested = TESTED.fullmatch(name)
                short = tested[1] if tested else ""
                metric = None if self.record is None else self.record.metric
                found[{metric: metric, "loss": "test_loss"}.get(short) or name] = value
        return found


def filled(
    about: RecordOptions | None, units: int | None, batch_size: int | None
) -> RecordOptions | None:
    """What a user has not said of a job, said by its trainer."""
    if about is None:
        return None
    return replace(about, units=about.units or units, batch_size=about.batch_size or batch_size)


def parallel(model: nn.Module) -> nn.Module:
    """The DDP model that a trainer has made, compiled afterwards or not."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    if launched().count > 1:
        return model  # FSDP and others: `attach` says why not
    raise ConfigError(
        "the trainer has not wrapped the model in DistributedDataParallel, as it does where there "
        "are several processes: start the script with torchrun --nproc-per-node 2 SCRIPT"
    )


def plain(optimizer: Any) -> Any:
    """The optimiser of torch inside a trainer's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if hasattr(inner, "param_groups") else optimizer


def save(hook: Hook, folder: str | Path) -> None:
    """Put the hook's state into the folder of a checkpoint; all processes call this."""
    full = hook.full_state_dict()
    if full is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        part = Path(folder, f"{STATE}.part")
        torch.save(full, part)
        os.replace(part, Path(folder, STATE))


def load(hook: Hook, folder: str | Path) -> None:
    """Continue from a checkpoint with the hook's state; all processes call this.

    Raises:
        ConfigError: on all processes: it has none, or it does not fit.
    """
    file, full = Path(folder, STATE), None
    if hook.world.rank == 0 and file.is_file():
        full = torch.load(file, weights_only=True)
    try:
        hook.load_full_state_dict(full)
    except ConfigError as error:
        missing = f"{file} is missing: the checkpoint was saved without the hook"
        why = missing if hook.world.rank == 0 and full is None else f"{file}: {error}"
        raise ConfigError(why) from None
