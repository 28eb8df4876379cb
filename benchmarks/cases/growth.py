"""Growth of one reduction with layers, parameters and simulated workers

The exponent e of cost ~ size^e by least squares over logarithms, 1 is linear; over the sizes that
cost at least twice as much as the smallest, because below that what is constant hides the rest.
Layers: of 64 x 576, from 1 to 256. Parameters: one matrix, from 2^12 to 2^22. Workers: 1 to 64 with
four layers of 64 x 576, each worker's gradient apart; what they hold grows from 1 to 75 MB and
leaves the caches on the way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Limits, Row, Step, interleaved
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK

WHY = (
    "The number of operations is linear; a value costs more once what one layer, or all workers, "
    "hold no longer fits the caches."
)
TARGET = 1.05  # linear, and what timing scatters
COMPRESSORS: dict[str, tuple[Compressor, Any]] = {
    "PowerSGD rank 2": (PowerSGD(), 2),
    "TopK 1 %": (TopK(), 1),
}


def of_layers(count: int) -> tuple[list[Layer], int]:
    return [Layer(f"{i}", (64, 576)) for i in range(count)], 1


def of_parameters(size: int) -> tuple[list[Layer], int]:
    n = 1 << (size.bit_length() - 1) // 2
    return [Layer("matrix", (n, size // n))], 1


def of_workers(workers: int) -> tuple[list[Layer], int]:
    return of_layers(4)[0], workers


AXES: dict[str, tuple[Callable[[int], tuple[list[Layer], int]], list[int]]] = {
    "layers": (of_layers, [2**i for i in range(9)]),
    "parameters": (of_parameters, [2**i for i in range(12, 23)]),
    "workers": (of_workers, [2**i for i in range(7)]),
}


def step(layers: list[Layer], workers: int, compressor: Compressor, level: Any) -> Step:
    stack = torch.randn(workers, sum(layer.size for layer in layers))
    return Step(Reducer(compressor, layers, World(workers), 0), level, stack)


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Over the sizes that cost at least twice as much as the smallest; at least the last three."""
    grown = next((i for i, s in enumerate(seconds) if s >= 2 * seconds[0]), len(sizes))
    start = min(grown, len(sizes) - 3)
    slope, _ = np.polyfit(np.log(sizes[start:]), np.log(seconds[start:]), 1)
    return float(slope)


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    rows = []
    for axis, (make, sizes) in AXES.items():
        for name, (compressor, level) in COMPRESSORS.items():
            tasks = {str(n): partial(step(*make(n), compressor, level)) for n in sizes}
            taken = interleaved(tasks, 5 if quick else 15)
            seconds = [statistics.median(taken[str(n)]) for n in sizes]
            rows.append(
                Row(
                    f"{name}, {sizes[0]} to {sizes[-1]} {axis}",
                    "linear",
                    exponent(sizes, seconds),
                    1,
                    TARGET,
                    unit="exponent",
                    rounds=5 if quick else 15,
                    note=WHY,
                    curve=tuple(zip(sizes, (1e3 * s for s in seconds), strict=True)),
                )
            )
    return rows


def plot(rows: list[Row], file: Path) -> None:
    """Milliseconds against size, one panel per axis, both logarithmic; dashes: linear."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(AXES), figsize=(10.5, 3.6), layout="constrained")
    for panel, axis in zip(panels, AXES, strict=True):
        drawn = (row for row in rows if row.setting.endswith(axis))
        for row, look in zip(drawn, ("o-", "s:"), strict=True):
            sizes, taken = zip(*row.curve, strict=True)
            label = f"{row.setting.split(',')[0]}: exponent {row.ours:.2f}"
            (line,) = panel.plot(sizes, taken, look, ms=4, label=label)
            linear = [taken[-1] * n / sizes[-1] for n in sizes]
            panel.plot(sizes, linear, "--", lw=0.8, color=line.get_color(), alpha=0.6)
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.set_xscale("log", base=2)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("ms per reduction, one core\nlower is better")
    most = max(row.ours for row in rows)
    figure.suptitle(
        f"Time grows about in proportion to size: exponents of {most:.2f} at most (thin dashes: 1)",
        x=0.01,
        ha="left",
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)
