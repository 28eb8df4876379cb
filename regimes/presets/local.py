"""When must workers synchronise? Grids of local steps: constant periods, and a period of 1 in one
quarter of the run and of 32 in the rest, on the language model of `lm-small` and the images of
`small`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.config import OuterConfig, RunConfig
from regimes.presets import cpu, families, language
from regimes.presets.registry import Grid, grid

QUARTERS = {"first": (0, 6), "second": (6, 12), "third": (12, 18), "last": (18, 24)}
LADDER = tuple(f"every {n}" for n in (128, 32, 8, 4, 2, 1))  # from few floats to many
RANDOM = {
    "random quarter": {
        "name": "detected",
        "detector": {"name": "random-windows", "share": 0.25, "epochs": 24},
    }
}
DILOCO = OuterConfig(lr=0.7, momentum=0.9, nesterov=True)


def _base(plain: RunConfig, validation: int) -> RunConfig:
    return replace(
        plain,
        data=replace(plain.data, validation_size=validation),
        policy=families.static("dense"),
        sync_levels={"low": 1, "high": 32},
        signal="movement/lr",
    )


def _language() -> RunConfig:
    return _base(language.lm_small(), 16_385)


def _arms(base: RunConfig, rules: dict[str, dict[str, Any]]) -> Grid:
    return {name: replace(base, name=name, sync_policy=rule) for name, rule in rules.items()}


def _constant(*periods: int) -> dict[str, dict[str, Any]]:
    return {f"every {n}": families.static(str(n)) for n in periods}


def _quarters(*names: str) -> dict[str, dict[str, Any]]:
    return {f"{name} quarter": families.windows(QUARTERS[name]) for name in names}


@grid("lm-local")
def lm_local() -> Grid:
    """`regimes tune lm-local --values optimizer.lr=0.0015,0.003,0.006,0.012`, then `regimes ablate
    runs/tune/lm-local/chosen --seeds 8 --first-seed 2000`: AdamW; a period of 4 sends what a
    quarter at 1 sends; half a minute a run, 2 hours of one core."""
    cells = _arms(
        _language(),
        {
            **_constant(1, 2, 4, 8, 32, 128),
            **_quarters(*QUARTERS),
            **RANDOM,
            "accordion": {"name": "accordion", "interval": 3},
        },
    )
    diloco = replace(cells["every 32"], name="diloco 32", outer=DILOCO)
    return cells | {diloco.name: diloco}


@grid("lm-local-sgd")
def lm_local_sgd() -> Grid:
    """`regimes tune lm-local-sgd --values optimizer.lr=0.1,0.2,0.4,0.8`, then as `lm-local`: five
    arms with SGD and momentum; 70 minutes of one core."""
    base = _language()
    sgd = replace(base.optimizer, name="sgd", lr=0.2, momentum=0.9, weight_decay=0.0, clip=1.0)
    return _arms(
        replace(base, optimizer=sgd), {**_constant(1, 4, 32), **_quarters("first", "last")}
    )


@grid("small-local")
def small_local() -> Grid:
    """`regimes tune small-local --values optimizer.lr=0.0125,0.025,0.05,0.1,0.2,0.4`, then `regimes
    ablate runs/tune/small-local/chosen --seeds 8 --first-seed 2000`: a network with BatchNorm, SGD
    and momentum; half a minute a run on one core, 40 minutes with five of the arms."""
    return _arms(
        _base(cpu.small(), 1000),
        {
            **_constant(1, 4, 8, 32, 128),
            **_quarters(*QUARTERS),
            **RANDOM,
        },
    )
