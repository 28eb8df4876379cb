"""Regimes that do not begin at the start: what a detector could find and a fixed schedule cannot.

Something happens in the middle of a training: the task changes, the rate restarts, the batch
grows, most weights are pruned. Who spends where it happens? Each arm at its own rate, which
validation data choose, and then with other seeds, as in a tournament (`presets.tournament`)::

    regimes tune shift-smoke --set data.validation_size=200 --seeds 2 --first-seed 5000 \\
      --values optimizer.lr=0.003125,0.00625,0.0125,0.025,0.05,0.1,0.2,0.4 \\
      --out runs/tune/shift-smoke
    regimes ablate runs/tune/shift-smoke/chosen --seeds 8 --first-seed 6000 --out runs/shift-smoke
    regimes figure tournament runs/shift-smoke

``event N`` knows the event: rank 4 in N units of 24 that begin with it, else rank 1. What a policy
is held against at its own floats is that, beside the controls of the tournament, whose ``forced``
is here, too. ``random N`` has two windows at random places.
"""

from __future__ import annotations

from dataclasses import replace

from regimes.config import PruningConfig, RunConfig
from regimes.presets import cpu, families, tournament
from regimes.presets.registry import Grid, grid

EVENT = 12  # the unit in which a task shifts, a batch grows, weights are pruned
UNITS = 24
SHARES = tournament.SHARES
LADDER = tuple(f"event {share}" for share in SHARES)  # from few floats to many
CYCLE = 8  # units between two restarts of the rate


def contestants() -> dict[str, families.Table]:
    """ACCORDION by its interval and decay rule, and what is left of it without its signal."""
    found: dict[str, families.Table] = {}
    for interval in (1, 3):
        accordion = {"name": "accordion", "interval": interval, **tournament.ENDS}
        found[f"accordion {interval}"] = accordion
        found[f"accordion {interval}, no decay rule"] = {**accordion, "decay_rule": False}
        found[f"forced {interval}"] = {**accordion, "eta": tournament.NEVER}
    for share in SHARES[:2]:
        windows = {"name": "random-windows", "share": share / UNITS, "epochs": UNITS, "count": 2}
        found[f"random {share}"] = {"name": "detected", "detector": windows, **tournament.ENDS}
    return found


def at_event(first: int = EVENT) -> dict[str, families.Table]:
    """Rank 4 from one event on; what does not fit behind it is spent at the start."""
    found = {}
    for name, share in zip(LADDER, SHARES, strict=True):
        late = min(share, UNITS - first)
        spans = [(0, share - late)] if share > late else []
        spans.append((first, first + late))
        found[name] = families.windows(*spans, inside="r4", outside="r1")
    return found


def at_restarts(cycle: int = CYCLE) -> dict[str, families.Table]:
    """Rank 4 at the beginning of each cycle, the first among them."""
    starts = range(0, UNITS, cycle)
    found = {}
    for name, share in zip(LADDER, SHARES, strict=True):
        spans = [(start, start + share // len(starts)) for start in starts]
        found[name] = families.windows(*spans, inside="r4", outside="r1")
    return found


def arms(base: RunConfig, known: dict[str, families.Table]) -> Grid:
    """Controls, the event as it is known, and the contestants."""
    plain = replace(base, levels=tournament.RANKS)
    controls = tournament.controls(UNITS)
    return families.follow(plain, {**controls, **known, **contestants()})


@grid("shift-smoke")
def shift_smoke() -> Grid:
    """`regimes tune shift-smoke ...`, see `presets/events.py`: until epoch 12 another task, images
    upside down and labels 3 further; digits, one decay, at 20; 2 minutes a seed and rate, on one
    core."""
    smoke = cpu.smoke()
    return arms(
        replace(
            smoke,
            optimizer=replace(smoke.optimizer, decay_epochs=(20,)),
            deficit={"name": "other-task", "windows": [[0, EVENT]]},
        ),
        at_event(),
    )


@grid("restarts-smoke")
def restarts_smoke() -> Grid:
    """`regimes tune restarts-smoke ...`, likewise: three cosines of 8 epochs, no warm-up; 2 minutes
    a seed and rate, on one core."""
    smoke = cpu.smoke()
    cyclic = replace(
        smoke.optimizer, schedule="cyclic", cycle_epochs=CYCLE, decay_epochs=(), warmup_from=None
    )
    return arms(replace(smoke, optimizer=cyclic), at_restarts())


@grid("ramp-smoke")
def ramp_smoke() -> Grid:
    """`regimes tune ramp-smoke ...`, likewise: from epoch 12 on batches four times as large, at
    the same rate; one decay, at 20; 2 minutes a seed and rate, on one core."""
    smoke = cpu.smoke()
    return arms(
        replace(
            smoke,
            optimizer=replace(smoke.optimizer, decay_epochs=(20,), scale_with_batch=False),
            batch_levels={"small": smoke.batch_size, "large": 4 * smoke.batch_size},
            batch_policy=families.windows((0, EVENT), inside="small", outside="large"),
        ),
        at_event(),
    )


PRUNED = (  # of the arms: a policy, what knows the event, and what reads nothing
    "dense",
    *tournament.LADDERS["static"][:4],
    "first 6",
    "first 12",
    "last 6",
    "event 6",
    "event 12",
    "accordion 1",
    "accordion 3",
    "forced 3",
    "random 6",
)


@grid("pruned-smoke")
def pruned_smoke() -> Grid:
    """`regimes tune pruned-smoke ...`, likewise: from epoch 12 on the smallest 90 % of the weights
    are zero; one decay, at 20; 14 arms, a minute a seed and rate, on one core."""
    smoke = cpu.smoke()
    cells = arms(
        replace(
            smoke,
            optimizer=replace(smoke.optimizer, decay_epochs=(20,)),
            pruning=PruningConfig(epoch=EVENT, share=0.9),
        ),
        at_event(),
    )
    return {name: cells[name] for name in PRUNED}
