"""The instruments of one run: chosen, fed, read. Shared by the trainer and the DDP hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regimes.base import capabilities
from regimes.base.capabilities import HALF, ONE_WORKER, TEXT, UNION_PASS, Part
from regimes.base.config import Signal
from regimes.base.errors import ConfigError
from regimes.base.precision import is_half
from regimes.instruments import make_instruments
from regimes.instruments.base import (
    EndOfEpochGauge,
    Gauge,
    MeasurementContext,
    Reading,
    StatelessGauge,
)
from regimes.instruments.gradient_norm import Norms
from regimes.instruments.needs import needs_of
from regimes.policies.detectors.statistics import FIELDS, Statistic, measuring_options

Timer = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Readings:
    """Holds the statistics of one epoch as a record has them: None where JSON has no number.

    Attributes:
        layers: per statistic, one value per layer.
        model: per statistic, one value for the whole model.
        details: per instrument, the rest.
    """

    layers: dict[str, list[float | None]] = field(default_factory=dict)
    model: dict[str, float | None] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)


class Panel:
    """Feeds and reads the gauges of a run.

    Attributes:
        gauges: by the instrument's name.
        steps: number of steps since the last reading.
    """

    def __init__(self, gauges: Mapping[str, tuple[int, Gauge]], layers: int | None = None) -> None:
        """``gauges``: each with the units between its readings; ``layers``: how many values a
        statistic of layers has."""
        self.gauges = {name: gauge for name, (_, gauge) in gauges.items()}
        self._every = {name: every for name, (every, _) in gauges.items()}
        self.layers, self.steps = layers, 0

    def __iter__(self) -> Iterator[Gauge]:
        return iter(self.gauges.values())

    def step(
        self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor], timer: Timer = nullcontext
    ) -> None:
        """Show one step's gradients and updates to every gauge. ``timer`` clocks each instrument
        by its name; the norms, which are always read, as "instruments"."""
        self.steps += 1
        # In the configuration's order, on every process: a gauge may call collectives.
        for name, gauge in self.gauges.items():
            with timer(_clocked(name)):
                gauge.step(stack, updates)

    def read(self, epoch: int, timer: Timer = nullcontext, seen: bool = True) -> Readings:
        """Read the statistics of an epoch, of the gauges that are due. Without steps (``seen`` is
        False) only gauges that need none are read.

        Raises:
            ConfigError: a gauge returns something other than a reading of this model.
        """
        self.steps, readings = 0, dict[str, Reading]()
        for name, gauge in self.gauges.items():
            if epoch % self._every[name]:
                if isinstance(gauge, StatelessGauge):
                    gauge.drop_epoch()
            elif seen or isinstance(gauge, EndOfEpochGauge):
                with timer(_clocked(name)):
                    readings[name] = _check_reading(name, gauge.read(epoch), self.layers)
        return Readings(
            {
                k: [finite_or_none(x) for x in v]
                for r in readings.values()
                for k, v in r.layers.items()
            },
            {k: finite_or_none(v) for r in readings.values() for k, v in r.model.items()},
            {name: reading.detail for name, reading in readings.items() if reading.detail},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next readings depend on, by instrument."""
        return {name: gauge.state_dict() for name, gauge in self.gauges.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` has returned; an instrument that the state lacks starts
        anew."""
        for name, gauge in self.gauges.items():
            gauge.load_state_dict(state.get(name, {}))


def _clocked(name: str) -> str:
    return "instruments" if name == "norms" else name


def choose_instruments(
    tables: Mapping[str, Mapping[str, Any]],
    needs: Iterable[str],
    signal: Signal | None,
    context: MeasurementContext,
) -> Panel:
    """Make the configured instruments, and the instruments of statistics that the policies need.

    Args:
        tables: fields by instrument, as the configuration has them.
        needs: names of statistics.
        signal: the norm that is always read; None: none unless a policy needs it.

    Raises:
        ConfigError: an unknown instrument, a statistic that none measures, or an instrument that
            needs what the run lacks.
    """
    wanted = {name: dict(fields) for name, fields in tables.items()}
    for need in needs:
        instrument = Statistic.parse(need).instrument
        if instrument != "norms":
            wanted.setdefault(instrument, FIELDS.get(need, {}))
    tools = make_instruments(wanted)
    if signal is not None:
        norms = tools.get("norms", Norms(()))
        readings = dict.fromkeys([signal, *getattr(norms, "readings", ())])
        tools["norms"] = Norms(tuple(readings))
    parts = [Part(f"instruments.{name}", needs_of(tool)) for name, tool in tools.items()]
    modes = {  # those that only the model and the workers of a job tell
        UNION_PASS: context.union,
        ONE_WORKER: context.world.workers < 2,
        HALF: any(is_half(p.dtype) for p in context.model.parameters()),
        TEXT: bool(getattr(context.model, "text", False)),
    }
    capabilities.check(parts, [mode for mode, applies in modes.items() if applies])
    gauges = {name: (tool.every, tool.start(context)) for name, tool in tools.items()}
    return Panel(gauges, len(context.layers))


def _check_reading(name: str, reading: Any, layers: int | None) -> Reading:
    """The reading itself; ConfigError, with the instrument's name, if it is none."""

    def require_reading(good: bool, got: object, expected: str) -> None:
        if not good:
            raise ConfigError(f"the instrument {name}: got {got!r:.60}, expected {expected}")

    require_reading(isinstance(reading, Reading), reading, "a Reading")
    for statistic, values in reading.layers.items():
        good = isinstance(values, list | tuple) and len(values) == (layers or len(values))
        require_reading(good, values, f"{layers} values, one for each layer, as {statistic!r}")
    numbers = [(f"in {name!r}", x) for name, values in reading.layers.items() for x in values]
    for place, x in [*numbers, *((f"as {name!r}", x) for name, x in reading.model.items())]:
        good = x is None or (isinstance(x, int | float) and not isinstance(x, bool))
        require_reading(good, x, f"a number {place}")
    require_reading(isinstance(reading.detail, dict), reading.detail, "a table as its detail")
    return reading


def check_measured(needs: Iterable[str], readings: Readings) -> None:
    """Raise ConfigError unless the first readings have what the policies need."""
    for need in needs:
        if need != "norm" and need not in {*readings.layers, *readings.model}:
            raise ConfigError(
                f"the policy needs the statistic {need!r}, which the instrument "
                f"{Statistic.parse(need).instrument!r} as configured does not measure: "
                f"{measuring_options(need)}"
            )


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None where it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
