"""Less when the rate has fallen: a schedule proposed against one rank throughout.

In the tournament on a text rank 4 in the last quarter, at a third to a tenth of the rate, wins back
next to nothing, and no policy beats one rank throughout at its floats. So what is sent after a
decay may be worth less than what is sent before it: ``rate-ladder`` lets the rank follow the rate.
The three arms here are the best of fifteen allocations over time and layers tried with four seeds,
at one rate, on text held out (the tuning seeds of the tournament); they were fixed before any run
of this file. Each arm then at its own rate, and with other seeds::

    regimes tune falling-lm --set data.validation_size=16385 --seeds 2 --first-seed 1000 \\
      --values optimizer.lr=0.0015,0.003,0.006 --out runs/tune/falling-lm
    regimes ablate runs/tune/falling-lm/chosen --seeds 10 --first-seed 7000 --out runs/falling-lm
    regimes figure tournament runs/falling-lm

``rate 2-1`` is rank 2 until the first decay and then rank 1, and so on. It is held against one
rank throughout at its floats (`static`), against rank 2 in as many units at the end (``late 2-1``)
and in as many that a coin chose, once for all seeds (``coin 2-1``). What would refute it: a rate
ladder that is not better than `static`, after Holm's correction.

Is it the rate, or time? ``falling-lm-cosine`` has a rate that falls all along, and
``falling-lm-constant`` one that never does; there ``early 2-1`` is rank 2 in the first 15 of 24
units. Rates 0.00075 to 0.006 and six seeds, else likewise. On another text: ranks 1 and 2, ``rate
2-1`` and ``late 2-1`` of ``falling-lm`` (``--schedules``) on the bytes of WikiText-2, ``--set
data.name=text --set data.path=FOLDER``, with eight seeds; what would refute it is the same.
"""

from __future__ import annotations

from dataclasses import replace

from regimes.config import RunConfig
from regimes.presets import families, language, tournament
from regimes.presets.registry import Grid, grid

UNITS = 24
BEFORE = 15  # units of `lm-small` that begin before the first decay


def ladder(*ranks: int) -> families.Table:
    """A rank for each rate, from the highest rate on: two for half of it, three for 15 %, too."""
    levels = [f"r{rank}" for rank in reversed(ranks)]
    return {"name": "rate-ladder", "levels": levels, "shares": [0.15, 0.5][3 - len(ranks) :]}


def within(first: int, stop: int) -> families.Table:
    """Rank 2 in some units, else rank 1."""
    return families.windows((first, stop), inside="r2", outside="r1")


def static(*ranks: int) -> dict[str, families.Table]:
    return {f"rank {rank}": families.static(f"r{rank}") for rank in ranks}


def _text() -> RunConfig:
    return replace(language.lm_small(), levels=tournament.RANKS)


@grid("falling-lm")
def falling_lm() -> Grid:
    """`regimes tune falling-lm ...`, see `presets/falling.py`: ranks 1 to 4, ranks that follow the
    rate, and controls, on a text; 5 minutes a seed and rate, on one core."""
    return families.follow(
        _text(),
        {
            **static(1, 2, 3, 4),
            "rate 2-1": ladder(2, 1),
            "rate 3-1": ladder(3, 1),
            "rate 3-2-1": ladder(3, 2, 1),
            "coin 2-1": families.coin(BEFORE, UNITS, 1, low="r2", high="r1"),
            "late 2-1": within(UNITS - BEFORE, UNITS),
            "accordion": tournament.policies()["accordion"],
        },
    )


@grid("falling-lm-cosine")
def falling_lm_cosine() -> Grid:
    """`regimes tune falling-lm-cosine ...`, likewise: the rate falls along a cosine; 2.5 minutes a
    seed and rate, on one core."""
    text = _text()
    cosine = replace(text.optimizer, schedule="cosine", decay_steps=())
    arms = {**static(1, 2, 3), "rate 2-1": ladder(2, 1), "rate 3-1": ladder(3, 1)}
    return families.follow(replace(text, optimizer=cosine), arms)


@grid("falling-lm-constant")
def falling_lm_constant() -> Grid:
    """`regimes tune falling-lm-constant ...`, likewise: after the warm-up the rate stays; 2.5
    minutes a seed and rate, on one core."""
    text = _text()
    constant = replace(text.optimizer, schedule="constant", decay_steps=())
    arms = {
        **static(1, 2),
        "early 2-1": within(0, BEFORE),
        "late 2-1": within(UNITS - BEFORE, UNITS),
        "coin 2-1": families.coin(BEFORE, UNITS, 1, low="r2", high="r1"),
    }
    return families.follow(replace(text, optimizer=constant), arms)
