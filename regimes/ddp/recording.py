"""The header of a job's record: what its user says of it, and what a hook sees by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from regimes import policies
from regimes.collectives.group import GroupWorld
from regimes.collectives.requests import Layer
from regimes.compression.reducer import costs_per_step
from regimes.ddp.optimizer import described
from regimes.ddp.pace import Pace
from regimes.ddp.validate import Choice, facts
from regimes.errors import is_whole, require, unexpected
from regimes.records import OWN, check_reporters, provenance
from regimes.training.rows import layer_entries


@dataclass(frozen=True)
class Recording:
    """What a hook cannot know of a job, for its record.

    Attributes:
        folder: where the record is written; new, or that of the job which is continued.
        name: of the schedule, by which figures and tables group runs; None: the policy's.
        data: what the data set is called.
        batch_size: samples per process and step.
        metric: the name under which the script logs what it is judged by; "accuracy" as a share
            of one, "perplexity" and "bits per byte" are known to figures.
        units: how many the job will have, for progress; None: nobody knows.
        reporters: who else is told of each unit: "tensorboard", "wandb", ... (``reporters`` of a
            configuration).
    """

    folder: str | Path
    name: str | None = None
    data: str = OWN
    batch_size: int | None = None
    metric: str = "loss"
    units: int | None = None
    reporters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require("\0" not in str(self.folder), "record", self.folder, "a folder: no path has a NUL")
        for field in ("batch_size", "units"):
            value = getattr(self, field)
            good = value is None or is_whole(value, 1)
            require(good, f"Recording.{field}", value, "a whole number from 1 up")
        names = (self.reporters,) if isinstance(self.reporters, str) else tuple(self.reporters)
        check_reporters(names)
        object.__setattr__(self, "reporters", names)


def recording(given: Any) -> Recording | None:
    """The argument ``record`` of ``attach``; ConfigError unless it is a folder."""
    if given is None or isinstance(given, Recording):
        return given
    if isinstance(given, str | Path) and str(given):
        return Recording(given)
    raise unexpected("record", given, "a folder, or regimes.Recording(folder, ...)")


@runtime_checkable
class Described(Protocol):
    """What the header is taken from."""

    world: GroupWorld
    layers: list[Layer]
    pace: Pace


def header(
    about: Recording, job: Described, chosen: Choice, network: nn.Module, seed: int
) -> dict[str, Any]:
    """``run.json`` of a hook's record; what a hook cannot know is None, or left out."""
    rule, workers = policies.REGISTRY.table(chosen.policy), job.world.workers
    optimizer, dtype = job.pace.optimizer, job.world.meter.dtype
    config = {
        "name": about.name or rule["name"],
        "seed": seed,
        "epochs": None,  # "units" has them
        "unit_steps": job.pace.steps,
        "workers": workers,
        "batch_size": about.batch_size,
        "data": {"name": about.data},
        "model": {"name": type(getattr(network, "_orig_mod", network)).__name__},
        "optimizer": (described(optimizer) if optimizer else {"name": None})
        | {"lr": None, "schedule": None},  # the rates are those of the rows
        "dtype": "float64" if dtype == torch.float64 else "float32",
        **facts(chosen),
    }
    world = {"workers": workers, "processes": workers, "device": str(job.world.device)}
    return {
        "written_by": "hook",
        "config": config,
        "code": provenance.code(),
        "machine": provenance.machine(),
        "world": {**world, "union_pass": False},
        "data": {"digest": None, "train": None, "test": None},
        "metric": about.metric,
        "steps_per_epoch": None,
        "units": about.units,
        "budget": None,
        "per_step": costs_per_step(chosen.compressor, job.layers, chosen.levels, workers),
        "layers": layer_entries(job.layers),
    }
