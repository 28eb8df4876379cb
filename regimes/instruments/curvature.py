"""Curvature as instruments of a run: the Hessian, the Fisher trace, critical sharpness.

``regimes.instruments.hessian`` measures, on a fixed probe of the training set, with the
weights of the epoch's end, averaged over all processes.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from regimes.base import reduction
from regimes.base.capabilities import (
    FULL_PRECISION,
    LABELS,
    PROBE,
    SAMPLES,
    UNITS_BY_CALL,
)
from regimes.base.config import Bounded, Bounds
from regimes.base.config.bounds import Count, Natural, Positive
from regimes.base.errors import TrainingError, require
from regimes.base.reduction import Batch, Coupled, OwnMean, Sum, TargetMean
from regimes.base.seeding import derive_seed
from regimes.collectives.comm import mean_apart
from regimes.instruments.base import EndOfEpochGauge, MeasurementContext, Reading
from regimes.instruments.hessian import (
    HessianProduct,
    critical_sharpness,
    eigenvalues,
    fisher_trace,
    layer_eigenvalues,
    layer_traces,
)
from regimes.instruments.hessian.probe import ProcessMean
from regimes.instruments.hessian.weights import Weight

log = logging.getLogger(__name__)
Mode = Literal["eval", "batch-statistics"]
SUFFIX = {"eval": "", "batch-statistics": ":batch"}  # of the statistics' names


@dataclass(frozen=True)
class ProbeInstrument(Bounded):
    """Holds the fields that the instruments of curvature share.

    Attributes:
        every: Measure at the end of every this many units.
        images: The number of training samples of the probe set.
        batch: The number of samples of a micro-batch. All have the same size, and processes share
            them evenly.
    """

    requires = frozenset({PROBE, FULL_PRECISION, UNITS_BY_CALL})

    every: Count = 1
    images: int = 200
    batch: int = 50


class ProbeGauge(EndOfEpochGauge):
    """Measures on a probe: the base of such gauges. A model that FSDP2 divides is whole while they
    ``measure``."""

    def __init__(self, probe: ProbeInstrument, context: MeasurementContext) -> None:
        self.settings: Any = probe
        self.context, self.batches = context, context.probe(probe.images, probe.batch)

    def read(self, epoch: int) -> Reading:
        with self.context.gather_weights():
            return self.measure(epoch)

    def measure(self, epoch: int) -> Reading:
        """Measure the statistics of the epoch just ended."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.context.loss(model, *batch)

    def choose_weight(self) -> Weight:
        """Choose by what a batch counts in the loss of the probe, as far as the loss says.

        Raises:
            ConfigError: the probe is divided, and the loss is no mean.
        """
        if self.context.weight is not None:
            return self.context.weight
        joins = reduction.declared_reduction(self.context.loss)
        if isinstance(joins, TargetMean | OwnMean):
            return lambda batch: joins.weight(batch[1])
        if isinstance(joins, Coupled | Sum):
            why = joins.why if isinstance(joins, Coupled) else "the loss is a sum over samples"
            where, s = type(self.settings).bounds_prefix, self.settings
            expected = f"{s.images}, one batch on one process: {why}"
            alone = len(self.batches) == 1 and self.context.world.processes == 1
            require(alone, f"{where}batch", s.batch, expected)
        return None if joins is None else "samples"

    @property
    def process_mean(self) -> ProcessMean | None:
        """Return the mean over processes, counted apart from the job's traffic; None for one
        process."""
        world = self.context.world
        return None if world.processes == 1 else partial(mean_apart, world)


@dataclass(frozen=True)
class Curvature(ProbeInstrument):
    """Measures top eigenvalues of the Hessian of the training loss (the paper's Figure 3), and
    traces if asked for.

    Attributes:
        modes: How BatchNorm normalises: by running statistics ("eval"), or by the mean and variance
            of each micro-batch ("batch-statistics"). The names of what is measured in the second
            mode end in ":batch". The two can differ by an order of magnitude. In a model without
            running statistics both are one number; it is measured once and recorded under the names
            that were asked for.
        largest: The number of eigenvalues at the upper end.
        smallest: The number of eigenvalues at the lower end.
        layers: Also measure the top eigenvalue of the block of each layer.
        probes: The number of products for the trace, of the whole model and of each layer. 0: no
            trace.
        tolerance: The largest residual of an eigenvalue, divided by the eigenvalue.
        max_products: The largest number of Hessian products for a reading.
        warm: Start from the eigenvectors of the last reading.
    """

    bounds_prefix = "instruments.curvature."

    modes: tuple[Mode, ...] = ("eval",)
    largest: Count = 1
    smallest: Natural = 0
    layers: bool = False
    probes: Natural = 0
    tolerance: Positive = 1e-3  # residual over |eigenvalue|
    max_products: Count = 100
    warm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        where = self.bounds_prefix
        require(self.probes != 1, f"{where}probes", self.probes, "0 or at least 2")
        require(bool(self.modes), f"{where}modes", list(self.modes), "at least one")
        wanted = self.largest + self.smallest
        expected = f"at least {wanted}, one a value"
        require(self.max_products >= wanted, f"{where}max_products", self.max_products, expected)

    def start(self, context: MeasurementContext) -> CurvatureGauge:
        return CurvatureGauge(self, context)


class CurvatureGauge(ProbeGauge):
    """Remembers eigenvectors for the next reading."""

    def __init__(self, settings: Curvature, context: MeasurementContext) -> None:
        super().__init__(settings, context)
        self.weight = self.choose_weight()
        self.vectors: dict[str, Tensor] = {}  # per mode, [k, d]
        self.warned = False
        most = sum(p.numel() for p in context.parameters)
        for name, count in (("largest", settings.largest), ("smallest", settings.smallest)):
            where = f"{settings.bounds_prefix}{name}"
            require(count <= most, where, count, f"at most {most}, the model's parameters")
        # Refuse a loss without second derivatives before any unit is trained. Each process checks
        # by itself: a mean over processes would count as traffic. No graph is kept (memory=0).
        self.ends = {mode: [SUFFIX[mode]] for mode in settings.modes}  # of statistics, by mode
        with context.gather_weights():
            for mode in settings.modes:
                with suppress(TrainingError):  # a loss that is not finite is reported by the run
                    hessian = HessianProduct(
                        context.model,
                        self.loss,
                        self.batches,
                        mode=mode,
                        memory=0,
                        weight=self.weight,
                    )
                    hessian.check()
                    if not hessian.mode_matters:
                        self.ends = {mode: [*SUFFIX.values()]}
                        break

    def measure(self, epoch: int) -> Reading:
        reading, seed = Reading(), derive_seed(self.context.seed, "curvature", epoch)
        for mode, ends in self.ends.items():
            hessian = HessianProduct(
                self.context.model,
                self.loss,
                self.batches,
                mode=mode,
                mean=self.process_mean,
                weight=self.weight,
                symmetric=True,  # ``check`` has shown it before the first unit
            )
            self._read_eigenvalues(hessian, mode, seed, reading)
            if self.settings.probes:
                options: Any = {"probes": self.settings.probes, "seed": seed}
                blocks = layer_traces(hessian, layers=self.context.members, **options)
                traces = list(blocks.values())
                for end in ends:
                    reading.layers[f"hessian_trace{end}"] = [t.value for t in traces]
                    reading.model[f"hessian_trace{end}"] = sum(t.value for t in traces)
                    reading.detail[f"hessian_trace_error{end}"] = [t.error for t in traces]
            reading.detail[f"products{SUFFIX[mode]}"] = hessian.products
        return reading

    def _read_eigenvalues(
        self, hessian: HessianProduct, mode: Mode, seed: int, into: Reading
    ) -> None:
        s = self.settings
        options: Any = {"tolerance": s.tolerance, "max_products": s.max_products, "seed": seed}
        start = self.vectors.get(mode)
        pairs = eigenvalues(hessian, largest=s.largest, smallest=s.smallest, start=start, **options)
        if s.warm:
            self.vectors[mode] = pairs.vectors
        blocks, all_pairs = [], [pairs]
        if s.layers:
            found = layer_eigenvalues(hessian, layers=self.context.members, **options)
            blocks = [float(block.largest[0]) for block in found.values()]
            all_pairs += found.values()
        open_ones = sum(not one.converged for one in all_pairs)
        if open_ones and not self.warned and self.context.world.rank == 0:
            self.warned = True
            log.warning(
                "instruments.curvature: %d of %d searches for eigenvalues have ended after %d "
                "products without converging, so their values may be far from the true ones: set "
                "max_products higher, or tolerance",
                open_ones,
                len(all_pairs),
                s.max_products,
            )
        for end in self.ends[mode]:
            for name, values in (("eigenvalue", pairs.largest), ("eigenvalue_min", pairs.smallest)):
                for i, value in enumerate(values.tolist(), start=1):
                    if math.isfinite(value):
                        into.model[f"{name}{end}" if i == 1 else f"{name}{end}_{i}"] = value
            if s.layers:
                into.layers[f"eigenvalue{end}"] = blocks
        into.detail[f"eigenvalues{SUFFIX[mode]}"] = {
            key: [x if math.isfinite(x) else None for x in getattr(pairs, key).tolist()]
            for key in ("largest", "smallest", "residuals")
        } | {"products": pairs.products, "stopped": pairs.stopped}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.vectors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.context.parameters[0].device
        self.vectors = {mode: vectors.to(device) for mode, vectors in state.items()}


@dataclass(frozen=True)
class Fisher(ProbeInstrument):
    """Measures the trace of the Fisher information (Achille et al. 2019), of the whole model and of
    each layer.

    Attributes:
        kind: Where labels come from: drawn from the model ("model", the Fisher information), or the
            data's own ("empirical").
    """

    bounds_prefix = "instruments.fisher."
    requires = ProbeInstrument.requires | {SAMPLES, LABELS}

    kind: Literal["model", "empirical"] = "model"

    def start(self, context: MeasurementContext) -> FisherGauge:
        return FisherGauge(self, context)


class FisherGauge(ProbeGauge):
    """Keeps nothing between readings.

    Raises:
        ConfigError: a sample's target is no class.
    """

    def __init__(self, settings: Fisher, context: MeasurementContext) -> None:
        super().__init__(settings, context)
        for _, y in self.batches:
            classes = y.ndim == 1 and y.dtype in (torch.int64, torch.uint8)  # as torch takes them
            targets = f"{str(y.dtype).removeprefix('torch.')} targets {list(y.shape)}"
            require(classes, "instruments.fisher", targets, "a class, of type int64, a sample")

    def measure(self, epoch: int) -> Reading:
        samples_here = sum(len(y) for _, y in self.batches)
        trace = fisher_trace(
            self.context.model,
            self.batches,
            kind=self.settings.kind,
            seed=derive_seed(self.context.seed, "fisher", epoch),
            first_sample=self.context.world.rank * samples_here,
            mode="eval",
            mean=self.process_mean,
            processes=self.context.world.processes,
        )
        return Reading(
            layers={"fisher_trace": [layer.value for layer in trace.layers.values()]},
            model={"fisher_trace": trace.total.value},
            detail={"fisher_trace_error": trace.total.error},
        )


@dataclass(frozen=True)
class Sharpness(ProbeInstrument):
    """Measures the critical sharpness along the gradient of the probe set.

    With SGD this is the direction of a step. An optimiser that rescales the gradient has another
    sharpness.

    Attributes:
        tolerance: How far the measured critical rate may lie above the true one, as a share of it.
    """

    bounds_prefix = "instruments.sharpness."

    tolerance: Annotated[float, Bounds("a number between 0 and 1", above=0, below=1)] = 1 / 16

    def start(self, context: MeasurementContext) -> SharpnessGauge:
        return SharpnessGauge(self, context)


class SharpnessGauge(ProbeGauge):
    """Remembers the critical rate, from which the next search starts."""

    rate: float | None = None

    def __init__(self, settings: Sharpness, context: MeasurementContext) -> None:
        super().__init__(settings, context)
        self.weight = self.choose_weight()

    def measure(self, epoch: int) -> Reading:
        sharpness = critical_sharpness(
            self.context.model,
            self.loss,
            self.batches,
            start=self.rate,
            tolerance=self.settings.tolerance,
            mode="eval",
            mean=self.process_mean,
            weight=self.weight,
        )
        self.rate = sharpness.rate if math.isfinite(sharpness.rate) else None
        return Reading(
            model={"critical_sharpness": sharpness.value}, detail={"forwards": sharpness.forwards}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state.get("rate")
