"""Names of statistics, and the instruments that measure them, with which options. No torch.

A name is ``FAMILY`` or ``FAMILY:VARIANT``, either with ``*lr`` appended. An instrument measures a
family ("eigenvalue"); a variant is a way to measure it ("eigenvalue:batch"); ``*lr`` multiplies by
the epoch's rate. "norm" alone is the norm that the run's ``signal`` names.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regimes.base.config.recorded import RECORDED
from regimes.base.errors import ConfigError, suggest_nearest

INSTRUMENT = {  # family -> the instrument that measures it; the study's have the family's name
    **{name: name for name in RECORDED["instrument"]},
    "norm": "norms",
    "eigenvalue": "curvature",
    "hessian_trace": "curvature",
    "fisher_trace": "fisher",
    "critical_sharpness": "sharpness",
    "noise_scale": "noise",
    "diversity": "noise",
    "msdr": "msdr",
    "error": "error",
    "residual": "residual",
    "cosine": "cosine",
    "spread": "spread",
    "overlap": "overlap",
}


@dataclass(frozen=True)
class Statistic:
    """Holds the parsed name of a statistic.

    Attributes:
        name: as in records and policies, without ``*lr``.
        times_lr: whether each value is multiplied by its epoch's rate.
    """

    name: str
    times_lr: bool = False

    @classmethod
    def parse(cls, text: str) -> Statistic:
        """Parse a name; ``"norm*lr"`` is the norm, times the rate.

        >>> Statistic.parse("eigenvalue:batch*lr")
        Statistic(name='eigenvalue:batch', times_lr=True)
        >>> Statistic.parse("eigenvalue:batch").instrument
        'curvature'
        """
        return cls(text.removesuffix("*lr"), text.endswith("*lr"))

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def is_norm(self) -> bool:
        """Return whether the statistic is a norm. A norm's value for the model is computed from the
        values of the layers."""
        return self.family == "norm"

    @property
    def instrument(self) -> str:
        """Return the instrument that measures the statistic; raise ConfigError if none does."""
        if self.family not in INSTRUMENT:
            raise ConfigError(
                f"no instrument measures the statistic {self.name!r}: "
                f"{suggest_nearest(self.family, INSTRUMENT)}"
            )
        return INSTRUMENT[self.family]


def norm_of(signal: str) -> str:
    """Return the name, in the record, of the norm that a run's ``signal`` names."""
    return f"norm:{signal}"


# -- tables of instruments -------------------------------------------------------------------------

# options with which an instrument measures a statistic, where it does not do so by default
FIELDS: dict[str, dict[str, Any]] = {
    "eigenvalue:batch": {"modes": ["batch-statistics"]},
    "hessian_trace": {"probes": 10},
    "hessian_trace:batch": {"modes": ["batch-statistics"], "probes": 10},
}

PROBING = ("curvature", "fisher", "sharpness")  # of 200 samples, where nothing else is set
OVERLAPPING = (32, 128, 512)  # batches whose gradients are compared, where nothing else is set
DEFAULT_MODES = ["eval"]  # of the instrument curvature, where its table has none


def _options(name: str) -> tuple[str, dict[str, Any]]:
    """The instrument that measures a statistic, and the options with which it does."""
    statistic = Statistic.parse(name)
    options = FIELDS.get(statistic.name, {})
    if statistic.is_norm:
        options = {"readings": [statistic.name.partition(":")[2] or "update"]}  # the usual signal
    elif statistic.instrument == "curvature":
        options = {"modes": DEFAULT_MODES, **options}
    return statistic.instrument, options


def _fitting(instrument: str, samples: int) -> dict[str, Any]:
    """The options of an instrument whose usual ones ask for more samples than there are.

    >>> _fitting("curvature", 100), _fitting("overlap", 100), _fitting("curvature", 400)
    ({'images': 100, 'batch': 25}, {'batches': [6, 25, 50]}, {})
    """
    quarter = max(1, samples // 4)  # of a probe, for up to four processes
    if instrument in PROBING and samples < 200:
        return {"images": min(samples, 4 * quarter), "batch": quarter}
    if instrument == "overlap" and samples < 2 * OVERLAPPING[-1]:  # of two disjoint batches
        sizes = [size for size in OVERLAPPING if 2 * size <= samples]
        few = [max(1, samples // 16), quarter, max(1, samples // 2)]
        return {"batches": sizes if len(sizes) > 1 else list(dict.fromkeys(few))}
    return {}


def with_statistics(
    instruments: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
    samples: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Extend tables of instruments so that they measure these statistics as well; what is set in
    them stays.

    Args:
        samples: of the training set, where it is known: a small one gets smaller probes.

    >>> with_statistics({"curvature": {"probes": 4}}, ["eigenvalue:batch", "fisher_trace"])
    {'curvature': {'probes': 4, 'modes': ['eval', 'batch-statistics']}, 'fisher': {}}

    Raises:
        ConfigError: no instrument measures one of them.
    """
    found = {name: dict(fields) for name, fields in instruments.items()}
    for name in lacking_statistics(instruments, names):
        instrument, options = _options(name)
        # A table that names no modes goes on measuring in the default ones; a new table measures in
        # the wanted ones alone.
        before = DEFAULT_MODES if instrument in found else []
        known = found.setdefault(instrument, {})
        if samples and instrument not in instruments:
            known |= _fitting(instrument, samples)
        for field, value in options.items():
            if isinstance(value, list):
                value = [*known.get(field, before if field == "modes" else []), *value]
                value = list(dict.fromkeys(value))
            elif known.get(field):
                continue
            known[field] = value
    return found


def lacking_statistics(
    instruments: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> list[str]:
    """Return the statistics that a run with these tables of instruments does not record. The norm
    that its signal names ("norm") is always recorded.

    >>> lacking_statistics({"curvature": {}}, ["norm", "eigenvalue", "eigenvalue:batch"])
    ['eigenvalue:batch']

    Raises:
        ConfigError: no instrument measures one of them.
    """
    missing = []
    for name in names:
        instrument, options = _options(name)
        given = instruments.get(instrument)
        has = given is not None and all(_has(given, field, x) for field, x in options.items())
        if name != "norm" and not has:
            missing.append(name)
    return missing


def _has(given: Mapping[str, Any], field: str, wanted: Any) -> bool:
    """Does an instrument's table ask for it? A list has each wanted value, a number is not 0."""
    if not isinstance(wanted, list):
        return bool(given.get(field))
    return {*wanted} <= {*given.get(field, DEFAULT_MODES if field == "modes" else [])}


def measuring_options(*names: str) -> str:
    """Write the options of `regimes run` and `ablate` that measure statistics.

    >>> print(measuring_options("eigenvalue", "eigenvalue:batch"))
    --set 'instruments.curvature.modes=["eval","batch-statistics"]'
    >>> print(measuring_options("diversity"))
    --set instruments.noise={}
    """
    tables: dict[str, dict[str, Any]] = {}
    for name in names:
        instrument, options = _options(name)
        fields = tables.setdefault(instrument, {})
        for field, value in options.items():
            many = isinstance(value, list)
            fields[field] = list(dict.fromkeys([*fields.get(field, []), *value])) if many else value
    settings = []
    for instrument, fields in tables.items():
        if fields.get("modes") == DEFAULT_MODES:
            fields.pop("modes")
        for field, value in fields.items():
            text = json.dumps(value, separators=(",", ":"))
            settings.append(f"--set {shlex.quote(f'instruments.{instrument}.{field}={text}')}")
        if not fields:
            settings.append(f"--set instruments.{instrument}={{}}")
    return " ".join(settings)
