"""The header of a record, ``run.json``: one builder for the trainer and for a script's own job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from regimes.base.config import AnyLevel
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.traffic import costs_per_step
from regimes.job.rows import layer_entries
from regimes.records import Header, provenance


def build_header(
    config: Mapping[str, Any],
    code: Mapping[str, Any],
    world: World,
    device: torch.device,
    layers: Sequence[Layer],
    compressor: Compressor,
    levels: Mapping[str, AnyLevel],
    *,
    processes: int,
    union: bool = False,
    shards: int = 1,
    **entries: Any,
) -> Header:
    """Build the header of a record without "schema", which the writer adds.

    Args:
        config: in plain types.
        code: by ``provenance.code``.
        layers: whole.
        levels: their values by name.
        processes: that the job runs on.
        union: one pass of the model serves all hosted workers.
        shards: processes that divide a layer, where that decides what is sent.
        entries: what else is known of this kind of job: "data", "metric", "units", ...
    """
    workers = config["workers"]
    header = {
        "config": dict(config),
        "code": code,
        "machine": provenance.describe_machine(),
        "world": {
            "workers": workers,
            "processes": processes,
            **({} if world.shards == 1 else {"shards": world.shards}),
            "device": str(device),
            "union_pass": union,
        },
        **entries,
        "per_step": costs_per_step(compressor, layers, levels, workers, shards),
        "layers": layer_entries(layers),
    }
    return cast("Header", header)
