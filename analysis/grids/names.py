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
EVENTS = ("event 6", "event 12", "event 18")  # arms/event.toml
PERIODS = tuple(f"every {steps}" for steps in (128, 32, 8, 4, 2, 1))  # lm-local.toml
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
