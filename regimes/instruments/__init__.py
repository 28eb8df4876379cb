"""Instruments measure statistics during training and leave no trace on the run.

``base`` has the contract; each file one family. ``PROVIDES`` says which instrument a statistic
comes from, so that a policy that needs one has it measured without being told how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from regimes.config import plug_in

if TYPE_CHECKING:
    from regimes.instruments.base import Instrument

REGISTRY = {
    "norms": "regimes.instruments.gradient_norm:Norms",
    "curvature": "regimes.instruments.hessian:Curvature",
    "fisher": "regimes.instruments.hessian:Fisher",
    "overlap": "regimes.instruments.overlap:Overlap",
    "noise": "regimes.instruments.noise:Noise",
    "msdr": "regimes.instruments.noise:Msdr",
    "error": "regimes.instruments.error:CompressionError",
    "moments": "regimes.instruments.moments:Moments",
    "moments-frozen": "regimes.instruments.moments:FrozenMoments",
}
PROVIDES = {  # statistic -> instrument
    "norm": "norms",
    "eigenvalue": "curvature",
    "hessian_trace": "curvature",
    "fisher_trace": "fisher",
    "overlap": "overlap",
    "noise_scale": "noise",
    "diversity": "noise",
    "msdr": "msdr",
    "error": "error",
    "moments": "moments",
    "moments-frozen": "moments-frozen",
}
UNASKED: dict[str, dict[str, Any]] = {  # fields of an instrument that a policy's need switches on
    "eigenvalue:batch": {"modes": ["batch-statistics"]},
    "hessian_trace": {"probes": 10},
    "hessian_trace:batch": {"modes": ["batch-statistics"], "probes": 10},
}


def instruments(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Instrument]:
    """The instruments that a configuration's tables name; ConfigError if one is none."""
    return {
        name: plug_in("instrument", {"name": name, **fields}, REGISTRY, f"instruments.{name}")
        for name, fields in tables.items()
    }
