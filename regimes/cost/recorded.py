"""A recorded run as a `DataParallelJob`, so that its report says what other methods would take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pandas as pd

from regimes.base.config import DENSE, as_level
from regimes.collectives.layers import Layer
from regimes.compression import REGISTRY
from regimes.cost.cases import recorded_work, trained_rows, uniform_level
from regimes.cost.methods import OTHERS, TRANSFERS, WIDE, Method, tabulate_methods, usual_methods
from regimes.cost.models import Model
from regimes.cost.network import Network
from regimes.cost.nodes import DataParallelJob, memory_of_step
from regimes.records import Record


def _job_of(run: Record, network: Network) -> DataParallelJob:
    """The run's model and seconds of compute, one replica for each of its workers, each with a link
    of its own. The speed of the memory is the one at which its own compressor took the seconds that
    are recorded; without compression `nodes.memory_of_step` of its seconds of compute.

    Raises:
        RecordError: the record does not say where the time of its epochs went.
    """
    layers = tuple(Layer(layer["name"], tuple(layer["shape"])) for layer in run.header["layers"])
    model = Model(str(run.config.get("model", {}).get("name", "the model")), layers)
    compute = statistics.median(work.compute for _, work in recorded_work(run))
    speeds = list(_speeds(run, sum(layer.size for layer in layers if layer.compressed)))
    return DataParallelJob(
        model,
        compute=compute,
        memory=statistics.median(speeds) if speeds else memory_of_step(model.size, compute),
        nodes=int(run.config["workers"]),
        gpus=1,
        within=network,
        between=network,
        bucket=float("inf"),
        algorithm="ring",
        priced="step",
    )


def _speeds(run: Record, size: int) -> Iterator[float]:
    """Bytes per second that compression has read and written, of each epoch at one level."""
    name = run.config["compressor"]["name"]
    moved = TRANSFERS.get(name, OTHERS) * WIDE * size
    for row, (_, work) in zip(trained_rows(run), recorded_work(run), strict=True):
        level = uniform_level(run, row)
        if level not in (None, DENSE) and work.compress > 0 and moved:
            yield moved / work.compress


def _own_methods(run: Record) -> list[Method]:
    """The levels of the run's own compressor."""
    chosen = dict(run.config["compressor"])
    given = run.config["levels"].values() if REGISTRY.knows(chosen["name"]) else ()
    levels = [getattr(level, "level", level) for level in map(as_level, given)]
    return [Method(chosen, level) for level in dict.fromkeys(levels) if level != DENSE]


def tabulate_alternatives(run: Record, network: Network) -> pd.DataFrame:
    """Make `methods.tabulate_methods` of the run's job: its own levels, then the usual methods."""
    job = _job_of(run, network)
    return tabulate_methods(job, [*_own_methods(run), *usual_methods(job)])
