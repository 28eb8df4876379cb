"""Names of the grids' arms, for the figures that draw them.

A ladder is all controls of one kind, sorted by their floats.
"""

from __future__ import annotations

LADDERS: dict[str, tuple[str, ...]] = {  # arms/controls.toml
    "static": ("rank 1", "rank 2", "rank 3", "rank 4", "dense"),
    "first": ("rank 1", "first 6", "first 12", "first 18", "rank 4"),
    "last": ("rank 1", "last 6", "last 12", "last 18", "rank 4"),
    "coin": ("rank 1", "coin 6", "coin 12", "coin 18", "rank 4"),
}
PERIODS = tuple(f"every {steps}" for steps in (128, 32, 8, 4, 2, 1))  # lm-local.toml
FIGURE2 = ("low", "high")  # schedules that Figure 2 and its table need
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
STATISTICS = {  # detection-smoke.toml: what each detector reads, of the whole model
    "norm": "norm",
    "norm x rate": "norm*lr",
    "eigenvalue": "eigenvalue",
    "sharpness": "critical_sharpness",
    "Fisher": "fisher_trace",
    "noise": "noise_scale",
    "error": "error:r1",
}
ARMS = (  # rates-smoke.toml
    "dense",
    "rank 4",
    "rank 2",
    "rank 1",
    "rank 4, no feedback",
    "rank 1, no feedback",
    "TopK 1 %",
    "TopK 1 %, no feedback",
)
LATE = ("low-pass as rank 4", "low-pass as rank 2", "low-pass as rank 1")  # rates-low-pass.toml
SPOKEN = {  # arms in figures
    **{f"rank {rank}": f"rank {rank} throughout" for rank in (1, 2, 3, 4)},
    **{f"every {steps}": f"every {steps} steps" for steps in (128, 32, 8, 4, 2)},
    **{f"first {n}": f"rank 4 for the first {n}, then 1" for n in (6, 12, 18)},
    **{f"last {n}": f"rank 1, then 4 for the last {n}" for n in (6, 12, 18)},
    **{f"coin {n}": f"rank 4 in {n} by a coin, else 1" for n in (6, 12, 18)},
    "accordion": "ACCORDION",
    "forced": "ACCORDION without its signal",
    "accordion-ladder": "ACCORDION, ranks 1 to 4",
    "accordion 4-1": "ACCORDION, rank 4 or 1",
    "accordion 4-2": "ACCORDION, rank 4 or 2",
    "adaqs": "AdaQS",
    "gravac": "GraVAC",
    "l-greco": "L-GreCo",
    "l-greco accordion": "L-GreCo with ACCORDION",
    "sharpness": "ACCORDION by the sharpness",
    "error-ladder": "ranks by compression error",
    "critical 8": "rank 4 in 8 marked critical, else 1",
    "high in critical 8": "rank 1 in 8 marked critical, else dense",
    "rank 1 longer": "rank 1, trained longer",
    "rate 2-1": "rank 2, then 1 when the rate falls",
    "rate 3-1": "rank 3, then 1 when the rate falls",
    "rate 3-2-1": "rank 3, 2, 1 as the rate falls",
    "coin 2-1": "rank 2 in 15 by a coin, else 1",
    "late 2-1": "rank 1, then 2 for the last 15",
    "every 1": "every step",
    "diloco 32": "DiLoCo, every 32 steps",
    **{f"{n} quarter": f"often in the {n} quarter" for n in ("first", "second", "third", "last")},
    "random quarter": "often in a random quarter",
}


def spoken(arm: str) -> str:
    """An arm's name in a figure."""
    return SPOKEN.get(arm, arm)
