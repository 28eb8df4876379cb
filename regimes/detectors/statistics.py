"""Names of statistics, and what they mean: the one place that takes them apart. No torch.

A name is ``FAMILY``, ``FAMILY:VARIANT`` or either with ``*lr`` behind it. An instrument measures a
family ("eigenvalue"); a variant is how ("eigenvalue:batch"); ``*lr`` times the epoch's rate.
"norm" alone is the reading of the norm that the run's ``signal`` names.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from regimes.config import offered
from regimes.errors import ConfigError, nearest

INSTRUMENT = {  # family -> the instrument that measures it; a package's has the family's name
    **{name: name for name in offered("regimes.instruments")},
    "norm": "norms",
    "eigenvalue": "curvature",
    "hessian_trace": "curvature",
    "fisher_trace": "fisher",
    "critical_sharpness": "sharpness",
    "noise_scale": "noise",
    "diversity": "noise",
    "msdr": "msdr",
    "error": "error",
    "spread": "spread",
}


FIELDS: dict[str, dict[str, Any]] = {  # of the instrument, that have a statistic measured
    "eigenvalue:batch": {"modes": ["batch-statistics"]},
    "hessian_trace": {"probes": 10},
    "hessian_trace:batch": {"modes": ["batch-statistics"], "probes": 10},
}


def setting(*names: str) -> str:
    """The options of `regimes run` and `ablate` that have statistics measured.

    >>> print(setting("eigenvalue", "eigenvalue:batch"))
    --set 'instruments.curvature.modes=["eval","batch-statistics"]'
    >>> print(setting("diversity"))
    --set instruments.noise={}
    """
    tables: dict[str, dict[str, Any]] = {}
    for name in names:
        statistic = Statistic.parse(name)
        fields = tables.setdefault(statistic.instrument, {})
        if statistic.is_norm:
            reading = name.removesuffix("*lr").partition(":")[2] or "update"
            fields["readings"] = [*fields.get("readings", []), reading]
            continue
        wanted = FIELDS.get(statistic.name, {})
        if statistic.instrument == "curvature":  # what stands first is what it has by default
            wanted = {"modes": ["eval"], **wanted}
        for field, value in wanted.items():
            known = fields.get(field, [])
            more = isinstance(value, list)
            fields[field] = [*known, *(x for x in value if x not in known)] if more else value
    for fields in tables.values():
        if fields.get("modes") == ["eval"]:
            fields.pop("modes")
    options = []
    for instrument, fields in tables.items():
        for field, value in fields.items():
            text = json.dumps(value, separators=(",", ":"))
            options.append(shlex.quote(f"instruments.{instrument}.{field}={text}"))
        if not fields:
            options.append(f"instruments.{instrument}={{}}")
    return " ".join(f"--set {option}" for option in options)


@dataclass(frozen=True)
class Statistic:
    """A name, taken apart.

    Attributes:
        name: as records and policies have it, without ``*lr``.
        times_lr: whether each value counts times the rate of its epoch.
    """

    name: str
    times_lr: bool = False

    @classmethod
    def parse(cls, text: str) -> Statistic:
        """``"norm*lr"`` -> the norm, times the rate.

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
        """Is it a norm, which a whole model's is formed of from those of its layers?"""
        return self.family == "norm"

    @property
    def instrument(self) -> str:
        """The instrument that measures it."""
        if self.family not in INSTRUMENT:
            raise ConfigError(
                f"the policy needs the statistic {self.name!r}, which no instrument provides: "
                f"{nearest(self.family, INSTRUMENT)}"
            )
        return INSTRUMENT[self.family]


def norm_of(signal: str) -> str:
    """The record's name of the norm that a run's ``signal`` reads."""
    return f"norm:{signal}"
