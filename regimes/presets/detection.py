"""Norm against Hessian: detectors that read different statistics and differ in nothing else.

``signals`` trains at rank 2 throughout and records every statistic, so that all detectors can be
replayed over the same runs (`regimes figure agreement`). The other arms are live: rank 4 after an
epoch in which the statistic of the whole model changed by a threshold or more, else rank 1; beside
them are the controls of the tournament (`presets.tournament`), which read nothing. Each arm is
trained at its own rate, as there::

    regimes ablate detection-smoke --schedules signals --seeds 8 --first-seed 7000 \\
      --out runs/detection-signals-smoke
    regimes figure agreement runs/detection-signals-smoke
    regimes tune detection-smoke --set data.validation_size=200 --seeds 3 --first-seed 5000 \\
      --values optimizer.lr=0.00625,0.0125,0.025,0.05,0.1,0.2 --out runs/tune/detection-smoke
    regimes ablate runs/tune/detection-smoke/chosen --seeds 8 --first-seed 6000 \\
      --out runs/detection-smoke
    regimes figure tournament runs/detection-smoke

The committed records lack the arms ``last``. A threshold that is the same number for each statistic
would compare numbers of different spread. `THRESHOLDS` are those that a quarter of the changes
behind the warm-up exceed, in two runs of ``signals`` with seeds of their own, 5000 and 5001
(`regimes figure agreement` writes them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regimes.config import RunConfig
from regimes.detectors.statistics import Statistic
from regimes.presets import cpu, families, language, tournament
from regimes.presets.registry import Grid, grid

STATISTICS = {  # detector: what it reads, of the whole model
    "norm": "norm",
    "norm x rate": "norm*lr",
    "eigenvalue": "eigenvalue",
    "sharpness": "critical_sharpness",
    "Fisher": "fisher_trace",
    "noise": "noise_scale",
    "error": "error:r1",
}
THRESHOLDS: dict[str, dict[str, float]] = {
    "detection-smoke": {
        "norm": 0.32,
        "norm x rate": 0.45,
        "eigenvalue": 0.44,
        "sharpness": 0.75,
        "Fisher": 2.62,
        "noise": 0.8,
        "error": 0.07,
    },
    "detection-lm": {
        "norm": 0.12,
        "norm x rate": 0.13,
        "eigenvalue": 0.18,
        "sharpness": 0.48,
        "noise": 0.49,
        "error": 0.19,
    },  # no Fisher trace of a text
}
TABLES: dict[str, dict[str, Any]] = {"noise": {"stride": 4}, "error": {"levels": ["r1"]}}


def instruments(*names: str) -> dict[str, dict[str, Any]]:
    """The instruments that some detectors need; the norm is always read."""
    needed = {Statistic.parse(STATISTICS[name]).instrument for name in names} - {"norms"}
    return {name: TABLES.get(name, {}) for name in sorted(needed)}


def detectors(base: RunConfig, thresholds: Mapping[str, float], rate: float) -> Grid:
    """One arm with every statistic at a rate of its own, an arm that follows each, and controls."""
    plain = replace(base, levels=tournament.RANKS)
    found: Grid = {
        "signals": replace(
            families.at_rate(plain, rate),
            name="signals",
            policy=families.static("r2"),
            union_pass=False,  # the noise is that between workers
            instruments=instruments(*thresholds),
        ),
        **families.follow(plain, tournament.controls(24)),
    }
    for name, eta in thresholds.items():
        rule = {
            "name": "change",
            "statistic": STATISTICS[name],
            "eta": eta,
            "interval": 1,
            "per_layer": False,
        }
        found[name] = replace(
            plain,
            name=name,
            policy={"name": "detected", "detector": rule, **tournament.ENDS},
            union_pass=name != "noise",
            instruments=instruments(name),
        )
    return found


@grid("detection-smoke")
def detection_smoke() -> Grid:
    """`regimes ablate detection-smoke --schedules signals --seeds 8`, and more in
    `presets/detection.py`: digits; half a minute a seed, on one core."""
    return detectors(cpu.smoke(), THRESHOLDS["detection-smoke"], 0.025)


@grid("detection-lm")
def detection_lm() -> Grid:
    """`regimes ablate detection-lm --schedules signals --seeds 8`, and more in
    `presets/detection.py`: a text, `lm-small`; 2 minutes a seed, on one core."""
    return detectors(language.lm_small(), THRESHOLDS["detection-lm"], 0.003)
