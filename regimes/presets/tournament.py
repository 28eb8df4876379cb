"""Tournaments: every policy that adapts compression, and the schedules that it has to beat.

The arms of a grid share network, data, steps and PowerSGD's ranks 1 to 4, and differ in when, and
for which layers, a rank is taken. Each is to be trained at its own learning rate, which validation
data choose from one list for all (`RATES`), and then with other seeds::

    regimes tune tournament-smoke --set data.validation_size=200 --seeds 3 --first-seed 1000 \\
      --values optimizer.lr=0.003125,0.00625,0.0125,0.025,0.05,0.1,0.2,0.4,0.8 \\
      --out runs/tune/tournament-smoke
    regimes ablate runs/tune/tournament-smoke/chosen --seeds 16 --first-seed 3000 \\
      --out runs/tournament-smoke
    regimes figure tournament runs/tournament-smoke

What a policy is held against at the same number of floats: the same rank throughout, which may lie
between two (`static`); rank 4 in the first units and then rank 1 (`first`), or in the last
(`last`); rank 4 in units that a coin chose, and else rank 1 (`coin`, a draw of its own for each
share, the same for all seeds). ``forced`` is ACCORDION without its signal (a threshold that nothing
reaches): its start, its first evaluation and its decay rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.config import Budget, RunConfig
from regimes.presets import cpu, families, language
from regimes.presets.registry import Grid, grid

RANKS: dict[str, Any] = {"r4": 4, "r3": 3, "r2": 2, "r1": 1}
LADDER = ("r1", "r2", "r3", "r4")
ENDS = {"low": "r4", "high": "r1"}
SHARES = (6, 12, 18)  # units of 24 at rank 4
LADDERS: dict[str, tuple[str, ...]] = {  # the controls of one kind, from few floats to many
    "static": ("rank 1", "rank 2", "rank 3", "rank 4", "dense"),
    "first": ("rank 1", *(f"first {share}" for share in SHARES), "rank 4"),
    "last": ("rank 1", *(f"last {share}" for share in SHARES), "rank 4"),
    "coin": ("rank 1", *(f"coin {share}" for share in SHARES), "rank 4"),
}
PAPER = {  # arms that are schedules of the paper's figures 2 and 8, as its grids call them
    "dense": "dense",
    "rank 4": "low",
    "rank 1": "high",
    "accordion": "accordion",
    "critical 8": "low-in-critical",
    "high in critical 8": "high-in-critical",
    "first 6": "low-early",
    "last 6": "low-late",
    "rank 1 longer": "high-stretched",
}
OWN = {  # what `regimes tune tournament-small` chose for them, of RATES
    "dense": 0.05,
    "rank 4": 0.05,
    "rank 1": 0.0125,
    "accordion": 0.025,
    "critical 8": 0.05,
    "high in critical 8": 0.025,
    "first 6": 0.05,
    "last 6": 0.0125,
    "rank 1 longer": 0.025,
}
NEVER = 1e9  # a threshold: no norm changes so much
RATES = {
    "tournament-smoke": "0.003125,0.00625,0.0125,0.025,0.05,0.1,0.2,0.4,0.8",
    "tournament-lm": "0.0015,0.003,0.006,0.012",
    "tournament-small": "0.0125,0.025,0.05,0.1,0.2",
}


def policies(interval: int = 3) -> dict[str, families.Table]:
    """The contestants. Their thresholds are those of their authors, their interval that of the
    preset."""
    accordion = {"name": "accordion", "interval": interval, **ENDS}
    sharpness = {"name": "sharpness-change", "interval": interval}
    return {
        "accordion": accordion,
        "forced": {**accordion, "eta": NEVER},
        "accordion-ladder": {"name": "accordion-ladder", "levels": LADDER, "interval": interval},
        "sharpness": {"name": "detected", "detector": sharpness, "decay_rule": True, **ENDS},
        "adaqs": {"name": "adaqs", "levels": ("r1", "r2", "r4")},
        "error-ladder": {"name": "error-ladder", "levels": LADDER},
        "l-greco": {"name": "l-greco", "levels": LADDER, "base": families.static("r2")},
        "l-greco accordion": {"name": "l-greco", "levels": LADDER, "base": accordion},
        "gravac": {"name": "gravac", "levels": LADDER},
    }


def controls(units: int) -> dict[str, families.Table]:
    """What they are held against: nothing here looks at the training."""
    found = {"dense": families.static("dense")}
    found |= {f"rank {RANKS[level]}": families.static(level) for level in LADDER}
    for share in SHARES:
        found[f"first {share}"] = families.windows((0, share), inside="r4", outside="r1")
        found[f"last {share}"] = families.windows((units - share, units), inside="r4", outside="r1")
    for draw, share in enumerate(SHARES, start=1):
        found[f"coin {share}"] = families.coin(share, units, draw, **ENDS)
    return found


def arms(base: RunConfig, units: int = 24) -> Grid:
    """All arms of a tournament."""
    plain = replace(base, levels=RANKS)
    return families.follow(plain, {**controls(units), **policies()})


def longer(rank: RunConfig, epochs: int) -> RunConfig:
    """A rank trained on until it has sent what rank 4 sends, all epochs stretched."""
    return families.stretched(
        replace(rank, name=f"{rank.name} longer"), Budget("r4", rank.epochs), epochs
    )


@grid("tournament-smoke")
def tournament_smoke() -> Grid:
    """`regimes tune tournament-smoke ...`, see `presets/tournament.py`: all policies and controls
    on digits, and ranks 1 and 2 trained on for the floats of rank 4; 2.5 minutes a seed and rate,
    on one core."""
    cells = arms(cpu.smoke())
    extra = [longer(cells["rank 1"], 81), longer(cells["rank 2"], 46)]
    return cells | {cell.name: cell for cell in extra}


@grid("tournament-lm")
def tournament_lm() -> Grid:
    """`regimes tune tournament-lm ...`, likewise: the same on a text, `lm-small`; 12 minutes a seed
    and rate, on one core."""
    return arms(language.lm_small())


@grid("tournament-small")
def tournament_small() -> Grid:
    """`regimes tune tournament-small ...`, likewise: the same on CIFAR-10, `small`, with what the
    paper's Figures 2 and 8 need besides: rank 4 in the critical windows, rank 1 in them and no
    compression elsewhere, and rank 1 trained on for the floats of rank 4, with all epochs stretched
    or the decays where they were; 10 minutes a seed and rate, on one core."""
    base = cpu.small()
    cells = arms(base)
    critical = [(0, 6), (12, 14)]
    extra = families.follow(
        replace(base, levels=RANKS),
        {
            "critical 8": families.windows(*critical, inside="r4", outside="r1"),
            "high in critical 8": families.windows(*critical, inside="r1", outside="dense"),
        },
    )
    stretched = longer(cells["rank 1"], 83)
    on = replace(stretched, name="rank 1 on", optimizer=base.optimizer)
    return cells | extra | {cell.name: cell for cell in (stretched, on)}


@grid("small-own")
def small_own() -> Grid:
    """`regimes ablate small-own --seeds 10 --first-seed 3000 --jobs 2`: Figures 2 and 8, each
    schedule at the learning rate that 1,000 images held out chose; 20 minutes, 2 cores."""
    return families.at_own_rates(tournament_small(), OWN, 1000)


@grid("small-overlap-own")
def small_overlap_own() -> Grid:
    """`regimes ablate small-overlap-own --seeds 4 --first-seed 3000 --jobs 2`: Figure 4a, dense
    and rank 4 at the rates of `small-own`; 5 minutes, 2 cores."""
    return _as_ranked(cpu.small_overlap(), {"dense": "dense", "low": "rank 4"})


@grid("small-signals-own")
def small_signals_own() -> Grid:
    """`regimes ablate small-signals-own --seeds 5 --first-seed 3000 --jobs 2`: Figure 3, rank 4 at
    the rate of `small-own`; 10 minutes, 2 cores."""
    return _as_ranked(cpu.small_signals(), {"low": "rank 4"})


def _as_ranked(cells: Grid, arms_of: dict[str, str]) -> Grid:
    """Schedules of the paper at the rates that were chosen for the tournament's arms."""
    return families.at_own_rates(cells, {name: OWN[arm] for name, arm in arms_of.items()}, 1000)
