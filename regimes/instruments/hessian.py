"""Curvature as instruments of a run: Hessian eigenvalues and traces, and the Fisher trace.

``Curvature`` is what the paper's Figure 3 sets beside the gradient norm; ``Fisher`` is the quantity
behind the critical periods of Achille et al. (2019). The measurements themselves are in
``curvature`` and ``fisher``; here they are taken from a fixed probe of the training set, with the
weights of the epoch's end, averaged over all processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regimes.errors import ConfigError
from regimes.instruments.base import Reading, Scene, Still
from regimes.instruments.curvature import (
    Eigenpairs,
    HessianProduct,
    eigenvalues,
    layer_eigenvalues,
    layer_traces,
)
from regimes.instruments.fisher import fisher_trace
from regimes.seeding import derive
from regimes.world import mean_program

Mode = Literal["eval", "batch-statistics"]
SUFFIX = {"eval": "", "batch-statistics": ":batch"}  # of the statistics' names


@dataclass(frozen=True)
class Curvature:
    """Top eigenvalues of the Hessian of the training loss, traces if asked for.

    Attributes:
        images, batch: the probe set, in micro-batches (of equal size, shared evenly by processes).
        modes: BatchNorm with running statistics ("eval"), or with each micro-batch's own
            ("batch-statistics", whose statistics have the suffix ":batch"). They can differ by an
            order of magnitude.
        largest, smallest: how many eigenvalues at each algebraic end.
        layers: also the top eigenvalue of each layer's own block.
        probes: products for the trace, whole and per layer; 0 = no trace.
        warm: start from the eigenvectors of the last reading.
    """

    every: int = 1
    images: int = 200
    batch: int = 50
    modes: tuple[Mode, ...] = ("eval",)
    largest: int = 1
    smallest: int = 0
    layers: bool = False
    probes: int = 0
    tolerance: float = 1e-3  # residual over |eigenvalue|
    max_products: int = 100
    warm: bool = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.largest < 1 or self.smallest < 0 or not self.modes:
            raise ConfigError(
                "instruments.curvature needs every >= 1, largest >= 1, smallest >= 0 and a mode"
            )
        if self.probes == 1 or self.probes < 0:
            raise ConfigError(
                f"instruments.curvature.probes must be 0 or at least 2, got {self.probes}"
            )

    def start(self, scene: Scene) -> CurvatureGauge:
        return CurvatureGauge(self, scene)


class CurvatureGauge(Still):
    """Measures when read; remembers eigenvectors for the next time."""

    def __init__(self, settings: Curvature, scene: Scene) -> None:
        self.settings, self.scene = settings, scene
        self.batches = scene.probe(settings.images, settings.batch)
        self.vectors: dict[str, Tensor] = {}  # per mode, [k, d]

    def read(self, epoch: int) -> Reading:
        reading = Reading()
        for mode in self.settings.modes:
            self._measure(mode, epoch, reading)
        return reading

    def _measure(self, mode: Mode, epoch: int, into: Reading) -> None:
        s, end = self.settings, SUFFIX[mode]
        hessian = HessianProduct(
            self.scene.model,
            lambda model, batch: self.scene.loss(model, *batch),
            self.batches,
            mode=mode,
            mean=process_mean(self.scene),
        )
        seed = derive(self.scene.seed, "curvature", epoch)
        found = eigenvalues(
            hessian,
            largest=s.largest,
            smallest=s.smallest,
            tolerance=s.tolerance,
            start=self._previous(mode),
            max_products=s.max_products,
            seed=seed,
        )
        if s.warm:
            self.vectors[mode] = found.vectors
        _name(into.model, f"eigenvalue{end}", found.largest)
        _name(into.model, f"eigenvalue_min{end}", found.smallest)
        into.detail[f"eigenvalues{end}"] = describe(found)
        if s.layers:
            blocks = layer_eigenvalues(
                hessian, tolerance=s.tolerance, max_products=s.max_products, seed=seed
            )
            values = [float(block.largest[0]) for block in blocks.values()]
            into.layers[f"eigenvalue{end}"] = values
        if s.probes:
            traces = list(layer_traces(hessian, probes=s.probes, seed=seed).values())
            into.layers[f"hessian_trace{end}"] = [t.value for t in traces]
            into.model[f"hessian_trace{end}"] = sum(t.value for t in traces)
            into.detail[f"hessian_trace_error{end}"] = [t.error for t in traces]
        into.detail[f"products{end}"] = hessian.products

    def _previous(self, mode: Mode) -> Eigenpairs | None:
        vectors = self.vectors.get(mode)
        if vectors is None or not torch.isfinite(vectors[:, 0]).any():
            return None
        unknown = torch.full((len(vectors),), math.nan)
        return Eigenpairs(unknown, unknown[:0], unknown, vectors, 0, 0.0, "converged")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.vectors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.scene.parameters[0].device
        self.vectors = {mode: vectors.to(device) for mode, vectors in state.items()}


@dataclass(frozen=True)
class Fisher:
    """Fisher trace, whole and per layer.

    Attributes:
        images, batch: as for ``Curvature``.
        kind: labels drawn from the model ("model", the Fisher information) or the data's own
            ("empirical").
    """

    every: int = 1
    images: int = 200
    batch: int = 50
    kind: Literal["model", "empirical"] = "model"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"instruments.fisher.every must be at least 1, got {self.every}")

    def start(self, scene: Scene) -> FisherGauge:
        return FisherGauge(self, scene)


class FisherGauge(Still):
    """Measures when read."""

    def __init__(self, settings: Fisher, scene: Scene) -> None:
        if getattr(scene.model, "text", False):
            raise ConfigError(
                "the instrument 'fisher' draws one label per image; a text has one per token: "
                "leave it out, 'curvature' works on both"
            )
        self.settings, self.scene = settings, scene
        self.batches = scene.probe(settings.images, settings.batch)

    def read(self, epoch: int) -> Reading:
        here = sum(len(y) for _, y in self.batches)
        found = fisher_trace(
            self.scene.model,
            self.batches,
            kind=self.settings.kind,
            seed=derive(self.scene.seed, "fisher", epoch),
            first_sample=self.scene.world.rank * here,
            mode="eval",
            mean=process_mean(self.scene),
        )
        return Reading(
            layers={"fisher_trace": [layer.value for layer in found.layers.values()]},
            model={"fisher_trace": found.total.value},
            detail={"fisher_trace_error": found.total.error},
        )


def process_mean(scene: Scene) -> Any:
    """The mean of a tensor over processes, counted as an instrument's bytes; None if alone."""
    if scene.world.processes == 1:
        return None
    drive = scene.world.drive
    return lambda flat: drive([mean_program(flat[None])], [-1], signal=True)[0]


def describe(found: Eigenpairs) -> dict[str, Any]:
    """An eigenvalue measurement in plain JSON types."""
    return {
        "largest": [finite(v) for v in found.largest.tolist()],
        "smallest": [finite(v) for v in found.smallest.tolist()],
        "residuals": [finite(v) for v in found.residuals.tolist()],
        "products": found.products,
        "stopped": found.stopped,
    }


def finite(value: float) -> float | None:
    """JSON knows no NaN: None where a budget ended before a value existed."""
    return value if math.isfinite(value) else None


def _name(into: dict[str, float], name: str, values: Tensor) -> None:
    """``name`` for the first, ``name_2``, ``name_3``, ... for those after it."""
    for i, value in enumerate(values.tolist(), start=1):
        if math.isfinite(value):
            into[name if i == 1 else f"{name}_{i}"] = value
