"""Curvature as instruments of a run: Hessian eigenvalues and traces, and the Fisher trace.

``Curvature`` is compared with the gradient norm in the paper's Figure 3; ``Fisher`` is the quantity
behind the critical periods of Achille et al. (2019). ``regimes.curvature`` computes both, here on a
fixed probe of the training set, at the end of an epoch, averaged over all processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regimes.collectives.requests import Mean
from regimes.curvature import (
    Eigenpairs,
    HessianProduct,
    eigenvalues,
    fisher_trace,
    layer_eigenvalues,
    layer_traces,
)
from regimes.errors import ConfigError, require
from regimes.instruments.base import EndOfEpochGauge, MeasurementContext, Reading, require_at_least
from regimes.seeding import derive

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
        require_at_least(self, "curvature", every=1, largest=1, smallest=0, probes=0)
        where = "instruments.curvature"
        require(self.probes != 1, f"{where}.probes", self.probes, "0 or at least 2")
        require(bool(self.modes), f"{where}.modes", list(self.modes), "at least one")

    def start(self, context: MeasurementContext) -> CurvatureGauge:
        return CurvatureGauge(self, context)


class CurvatureGauge(EndOfEpochGauge):
    """Measures when read; keeps the eigenvectors as the start of the next reading."""

    def __init__(self, settings: Curvature, context: MeasurementContext) -> None:
        self.settings, self.context = settings, context
        self.batches = context.probe(settings.images, settings.batch)
        self.vectors: dict[str, Tensor] = {}  # per mode, [k, d]

    def read(self, epoch: int) -> Reading:
        reading, seed = Reading(), derive(self.context.seed, "curvature", epoch)
        for mode in self.settings.modes:
            hessian = HessianProduct(
                self.context.model,
                lambda model, batch: self.context.loss(model, *batch),
                self.batches,
                mode=mode,
                mean=process_mean(self.context),
            )
            self._values(hessian, mode, seed, reading)
            if self.settings.probes:
                self._traces(hessian, mode, seed, reading)
            reading.detail[f"products{SUFFIX[mode]}"] = hessian.products
        return reading

    def _values(self, hessian: HessianProduct, mode: Mode, seed: int, into: Reading) -> None:
        s, end = self.settings, SUFFIX[mode]
        options: Any = {"tolerance": s.tolerance, "max_products": s.max_products, "seed": seed}
        pairs = eigenvalues(
            hessian, largest=s.largest, smallest=s.smallest, start=self._previous(mode), **options
        )
        if s.warm:
            self.vectors[mode] = pairs.vectors
        _name(into.model, f"eigenvalue{end}", pairs.largest)
        _name(into.model, f"eigenvalue_min{end}", pairs.smallest)
        into.detail[f"eigenvalues{end}"] = describe(pairs)
        if s.layers:
            blocks = layer_eigenvalues(hessian, **options).values()
            into.layers[f"eigenvalue{end}"] = [float(block.largest[0]) for block in blocks]

    def _traces(self, hessian: HessianProduct, mode: Mode, seed: int, into: Reading) -> None:
        end, probes = SUFFIX[mode], self.settings.probes
        traces = list(layer_traces(hessian, probes=probes, seed=seed).values())
        into.layers[f"hessian_trace{end}"] = [t.value for t in traces]
        into.model[f"hessian_trace{end}"] = sum(t.value for t in traces)
        into.detail[f"hessian_trace_error{end}"] = [t.error for t in traces]

    def _previous(self, mode: Mode) -> Eigenpairs | None:
        vectors = self.vectors.get(mode)
        if vectors is None or not torch.isfinite(vectors[:, 0]).any():
            return None
        unknown = torch.full((len(vectors),), math.nan)
        return Eigenpairs(unknown, unknown[:0], unknown, vectors, 0, 0.0, "converged")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.vectors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.context.parameters[0].device
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
        require_at_least(self, "fisher", every=1)

    def start(self, context: MeasurementContext) -> FisherGauge:
        return FisherGauge(self, context)


class FisherGauge(EndOfEpochGauge):
    """Measures when read."""

    def __init__(self, settings: Fisher, context: MeasurementContext) -> None:
        if getattr(context.model, "text", False):
            raise ConfigError(
                "the instrument 'fisher' is for images, the data are a text: leave it out, "
                "'curvature' works on both"
            )
        self.settings, self.context = settings, context
        self.batches = context.probe(settings.images, settings.batch)

    def read(self, epoch: int) -> Reading:
        samples = sum(len(y) for _, y in self.batches)
        trace = fisher_trace(
            self.context.model,
            self.batches,
            kind=self.settings.kind,
            seed=derive(self.context.seed, "fisher", epoch),
            first_sample=self.context.world.rank * samples,
            mode="eval",
            mean=process_mean(self.context),
        )
        return Reading(
            layers={"fisher_trace": [layer.value for layer in trace.layers.values()]},
            model={"fisher_trace": trace.total.value},
            detail={"fisher_trace_error": trace.total.error},
        )


def process_mean(context: MeasurementContext) -> Any:
    """The mean of a tensor over processes, counted as an instrument's bytes; None if alone."""
    if context.world.processes == 1:
        return None
    return lambda flat: context.world.ask(Mean(flat[None]))[0]


def describe(pairs: Eigenpairs) -> dict[str, Any]:
    """An eigenvalue measurement in plain JSON types."""
    tensors = {x: getattr(pairs, x).tolist() for x in ("largest", "smallest", "residuals")}
    lists = {x: [v if math.isfinite(v) else None for v in row] for x, row in tensors.items()}
    return {**lists, "products": pairs.products, "stopped": pairs.stopped}


def _name(into: dict[str, float], name: str, values: Tensor) -> None:
    """``name`` for the first, ``name_2``, ``name_3``, ... for those after it."""
    for i, value in enumerate(values.tolist(), start=1):
        if math.isfinite(value):
            into[name if i == 1 else f"{name}_{i}"] = value
