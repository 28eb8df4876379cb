"""What does compression do to learning rates? Grids of one level and many rates.

A level throughout, at each rate of a list (`cells`); the warm-up in proportion, all else as in the
preset. `regimes figure mechanism` reads the usable range of rates off them, by arm::

    regimes ablate rates-smoke --seeds 4 --first-seed 4000 --out runs/rates/smoke
    regimes ablate rates-momentum --seeds 4 --first-seed 4000 --out runs/rates/momentum
    regimes figure mechanism runs/rates
    regimes ablate rates-low-pass --seeds 4 --first-seed 4000
    regimes figure mechanism runs/rates runs/rates-low-pass
    regimes ablate rates-lm --seeds 4 --first-seed 4000
    regimes figure mechanism runs/rates-lm
    regimes ablate rates-edge --seeds 8 --first-seed 4000
    regimes figure edge runs/rates-edge
    regimes ablate rates-when --seeds 8 --first-seed 4000
    regimes figure narrowing runs/rates-when

An arm is a level, with or without error feedback, and a momentum of SGD: 0.9 unless it is named.
With momentum m the rates are those of 0.9 at equal rate / (1 - m), which is how far a constant
gradient moves. ``rates-low-pass`` has arms that send a share of all that is owed in each step, with
the energy of a rank: late as with error feedback, in all directions alike. ``rates-when`` has rank
1 in six epochs only, at a constant rate: early, in the middle, or late (`regimes figure
narrowing`). ``rates-edge`` measures the curvature at constant rates (`regimes figure edge`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regimes.config import DENSE, Level, RunConfig
from regimes.presets import cpu, families, language
from regimes.presets.registry import Grid, grid

AT = " at "  # between an arm's name and its rate, in the name of a cell
MOMENTUM = 0.9
RATES = (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # of SGD with it
ADAM = (0.0015, 0.003, 0.006, 0.012, 0.024, 0.048)
WINDOWS = ((2, 8), (8, 14), (14, 20))  # epochs behind the warm-up
BARE = {"error_feedback": False}
EDGE = {"every": 2, "images": 100, "batch": 100, "modes": ["batch-statistics"], "tolerance": 0.02}
Arm = tuple[dict[str, Any], Level]  # compressor, level
POWER: dict[str, Arm] = {
    "dense": ({"name": "powersgd"}, DENSE),
    "rank 4": ({"name": "powersgd"}, 4),
    "rank 2": ({"name": "powersgd"}, 2),
    "rank 1": ({"name": "powersgd"}, 1),
    "rank 4, no feedback": ({"name": "powersgd", **BARE}, 4),
    "rank 1, no feedback": ({"name": "powersgd", **BARE}, 1),
}
ARMS: dict[str, Arm] = {
    **POWER,
    "TopK 1 %": ({"name": "topk"}, 1),
    "TopK 1 %, no feedback": ({"name": "topk", **BARE}, 1),
}
# 1 - (1 - share)^2 is the share of the energy of what is owed that a rank sends: 0.54, 0.315 and
# 0.17, the means over the steps of `smoke`; `tests/study/test_mechanism.py` measures them.
LATE: dict[str, Arm] = {
    "low-pass as rank 4": ({"name": "low-pass"}, 0.322),
    "low-pass as rank 2": ({"name": "low-pass"}, 0.172),
    "low-pass as rank 1": ({"name": "low-pass"}, 0.089),
}


def cells(base: RunConfig, arms: Mapping[str, Arm], rates: Sequence[float]) -> Grid:
    """Each arm at each rate: ``ARM at RATE``."""
    found = {}
    for arm, (compressor, level) in arms.items():
        levels = {} if level == DENSE else {"level": level}
        policy = families.static(next(iter(levels), DENSE))
        for rate in rates:
            name = f"{arm}{AT}{rate:g}"
            found[name] = replace(
                families.at_rate(base, rate),
                name=name,
                compressor=compressor,
                levels=levels,
                policy=policy,
            )
    return found


@grid("rates-smoke")
def rates_smoke() -> Grid:
    """`regimes ablate rates-smoke --seeds 4`: eight levels, nine rates, on digits; 6 minutes a seed
    on one core."""
    return cells(cpu.smoke(), ARMS, RATES)


@grid("rates-momentum")
def rates_momentum() -> Grid:
    """`regimes ablate rates-momentum --seeds 4`: dense, ranks 4 and 1 with SGD's momentum 0 and
    0.5, on digits; 5 minutes a seed on one core."""
    names = ("dense", "rank 4", "rank 1", "rank 1, no feedback")
    arms = {name: ARMS[name] for name in names}
    return at_momentum(0.0, arms) | at_momentum(0.5, arms)


@grid("rates-low-pass")
def rates_low_pass() -> Grid:
    """`regimes ablate rates-low-pass --seeds 4`: what comes late as with ranks 4, 2 and 1, but in
    all directions alike, with momentum 0.9 and 0, on digits; 3 minutes a seed on one core."""
    return cells(cpu.smoke(), LATE, RATES) | at_momentum(0.0, LATE)


def at_momentum(momentum: float, arms: Mapping[str, Arm]) -> Grid:
    """Arms on digits with another momentum, at equal rate / (1 - momentum)."""
    base = cpu.smoke()
    base = replace(base, optimizer=replace(base.optimizer, momentum=momentum))
    wider = (1 - momentum) / (1 - MOMENTUM)
    named = {f"{name}, momentum {momentum:g}": arm for name, arm in arms.items()}
    return cells(base, named, [float(f"{rate * wider:.6g}") for rate in RATES[2:]])


@grid("rates-lm")
def rates_lm() -> Grid:
    """`regimes ablate rates-lm --seeds 4`: dense, ranks 4 and 1 by the rate of AdamW, on a text,
    `lm-small`; 12 minutes a seed on one core."""
    names = ("dense", "rank 4", "rank 1", "rank 1, no feedback")
    return cells(language.lm_small(), {name: ARMS[name] for name in names}, ADAM)


@grid("rates-edge")
def rates_edge() -> Grid:
    """`regimes ablate rates-edge --seeds 8`: the top Hessian eigenvalue of dense, rank 1, with and
    without feedback, and its low-pass, in 12 epochs at four constant rates, on digits; half a
    minute a seed on one core."""
    base = cpu.smoke()
    base = replace(
        base,
        epochs=12,
        optimizer=replace(base.optimizer, schedule="constant", decay_epochs=()),
        instruments={"curvature": EDGE},
    )
    names = ("dense", "rank 1", "rank 1, no feedback", "low-pass as rank 1")
    return cells(base, {name: (ARMS | LATE)[name] for name in names}, (0.025, 0.1, 0.2, 0.4))


@grid("rates-when")
def rates_when() -> Grid:
    """`regimes ablate rates-when --seeds 8`: no compression but for six epochs of rank 1, early, in
    the middle or late, at nine constant rates, on digits; 2 minutes a seed on one core."""
    base = cpu.smoke()
    base = replace(
        base,
        epochs=WINDOWS[-1][1],
        levels={"level": 1},
        optimizer=replace(base.optimizer, schedule="constant", decay_epochs=()),
    )
    rules = {DENSE: families.static(DENSE)} | {
        f"rank 1 in {first}-{stop - 1}": families.windows(
            (first, stop), inside="level", outside=DENSE
        )
        for first, stop in WINDOWS
    }
    return {
        f"{arm}{AT}{rate:g}": replace(
            families.at_rate(base, rate), name=f"{arm}{AT}{rate:g}", policy=rule
        )
        for arm, rule in rules.items()
        for rate in RATES
    }
