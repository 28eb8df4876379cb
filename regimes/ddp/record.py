"""The header of a job's record: what its user says of the job, and what the job shows by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from regimes import policies
from regimes.compression.reducer import costs_per_step
from regimes.ddp.choices import Choice
from regimes.ddp.optimizer import described
from regimes.errors import is_whole, require, unexpected
from regimes.records import OWN, Header, check_reporters, provenance
from regimes.training.rows import layer_entries

if TYPE_CHECKING:
    from regimes.ddp.job import Job


@dataclass(frozen=True)
class RecordOptions:
    """What a job cannot find out by itself, for its record.

    Attributes:
        folder: where the record is written; new, or that of the job which is continued.
        name: of the schedule, by which figures and tables group runs; None: the policy's.
        data: what the data set is called.
        batch_size: samples per process and step.
        metric: the name under which the script logs what it is judged by; "accuracy" as a share
            of one, "perplexity" and "bits per byte" are known to figures.
        units: how many the job will have, for progress; None: not known.
        reporters: what else shows each unit: "tensorboard", "wandb", ... (``reporters`` of a
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
            require(good, f"RecordOptions.{field}", value, "a whole number from 1 up")
        names = (self.reporters,) if isinstance(self.reporters, str) else tuple(self.reporters)
        check_reporters(names)
        object.__setattr__(self, "reporters", names)


def record_options(record: Any) -> RecordOptions | None:
    """The argument ``record`` of ``attach``; ConfigError unless it is a folder."""
    if record is None or isinstance(record, RecordOptions):
        return record
    if isinstance(record, str | Path) and str(record):
        return RecordOptions(record)
    raise unexpected("record", record, "a folder, or regimes.RecordOptions(folder, ...)")


def header(
    options: RecordOptions, job: Job, chosen: Choice, network: nn.Module, seed: int
) -> Header:
    """``run.json`` of a job's record; what is not known is None, or left out."""
    rule, workers = policies.REGISTRY.table(chosen.policy), job.world.workers
    optimizer, dtype = job.schedule.optimizer, job.world.meter.dtype
    config = {
        "name": options.name or rule["name"],
        "seed": seed,
        "epochs": None,  # "units" has them
        "unit_steps": job.schedule.steps,
        "workers": workers,
        "batch_size": options.batch_size,
        "data": {"name": options.data},
        "model": {"name": type(getattr(network, "_orig_mod", network)).__name__},
        "optimizer": (described(optimizer) if optimizer else {"name": None})
        | {"lr": None, "schedule": None},  # the rates are those of the rows
        "dtype": "float64" if dtype == torch.float64 else "float32",
        **chosen.facts(),
    }
    world = {"workers": workers, "processes": workers, "device": str(job.world.device)}
    header = {
        "written_by": "hook",
        "config": config,
        "code": provenance.code(),
        "machine": provenance.machine(),
        "world": {**world, "union_pass": False},
        "data": {"digest": None, "train": None, "test": None},
        "metric": options.metric,
        "steps_per_epoch": None,
        "units": options.units,
        "budget": None,
        "per_step": costs_per_step(chosen.compressor, job.layers, chosen.levels, workers),
        "layers": layer_entries(job.layers),
    }
    return cast("Header", header)  # without "schema", which the writer adds
