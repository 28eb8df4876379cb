"""Families of schedules: each makes a grid from one configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.config import Budget, RunConfig
from regimes.presets.registry import Grid

Table = dict[str, Any]  # of a policy


def static(level: str) -> Table:
    return {"name": "static", "level": level}


def windows(*windows: tuple[int, int], inside: str = "low", outside: str = "high") -> Table:
    return {"name": "windows", "windows": list(windows), "inside": inside, "outside": outside}


def at_rate(base: RunConfig, lr: float) -> RunConfig:
    """The same run at another learning rate, the start of the warm-up in proportion."""
    optimizer = base.optimizer
    start = optimizer.warmup_from and optimizer.warmup_from * lr / optimizer.lr
    return replace(base, optimizer=replace(optimizer, lr=lr, warmup_from=start))


def follow(base: RunConfig, policies: dict[str, Table]) -> Grid:
    """The same training by each policy."""
    return {name: replace(base, name=name, policy=table) for name, table in policies.items()}


def schedules(
    base: RunConfig, critical: list[tuple[int, int]], late: tuple[int, int], **accordion: Any
) -> Grid:
    """The schedules of Figure 2 and their controls.

    Args:
        critical: hand-made critical windows ``[first, stop)``; the first is the early one.
        late: a window as long as the early one, after the decay (control of equal traffic).
        accordion: fields of the ACCORDION policy.
    """
    early = critical[0]
    policies: dict[str, Table] = {
        "dense": static("dense"),
        "low": static("low"),
        "high": static("high"),
        "low-in-critical": windows(*critical),
        "high-in-critical": windows(*critical, inside="high", outside="dense"),
        "accordion": {"name": "accordion", **accordion},
        "low-early": windows(early),
        "low-late": windows(late),
    }
    cells = follow(base, policies)
    # As many epochs as the early window has are left out before the first decay (the warm-up
    # stays): does compression in that window do damage, or does it only cost time?
    sooner = tuple(first - early[1] for first in base.optimizer.decay_epochs)
    cells["dense-deleted"] = replace(
        cells["dense"],
        name="dense-deleted",
        epochs=base.epochs - early[1],
        optimizer=replace(base.optimizer, decay_epochs=sooner),
    )
    return cells


def three(base: RunConfig, interval: int) -> Grid:
    """The two levels and ACCORDION: the rows of the paper's tables."""
    accordion = {"name": "accordion", "interval": interval}
    return follow(base, {"low": static("low"), "high": static("high"), "accordion": accordion})


def signals(cells: Grid, *names: str) -> Grid:
    """Some schedules with every signal that a detector may read, from one probe of 200 images."""
    tables: dict[str, dict[str, Any]] = {
        "norms": {"readings": ["update", "global"]},
        "curvature": {"modes": ["eval", "batch-statistics"], "probes": 4},
        "fisher": {},
        "msdr": {},
    }
    return {name: replace(cells[name], instruments=tables) for name in names}


def batches(
    base: RunConfig,
    low: int,
    high: int,
    critical: list[tuple[int, int]],
    smith: tuple[int, ...],
    interval: int,
) -> Grid:
    """Batch size as a level: fixed, in windows, by ACCORDION, and Smith et al., who start with a
    batch and a rate 1.25 times larger and grow five-fold where the rate would decay."""
    plain = replace(
        base,
        compressor={"name": "dense"},
        levels={},
        policy=static("dense"),
        batch_size=low,
        batch_levels={"low": low, "high": high},
    )
    policies: dict[str, Table] = {
        "small-batch": static("low"),
        "large-batch": static("high"),
        "small-in-critical": windows(*critical),
        "large-in-critical": windows(*critical, inside="high", outside="low"),
        "accordion-batch": {"name": "accordion-batch", "interval": interval},
    }
    cells = {name: replace(plain, name=name, batch_policy=p) for name, p in policies.items()}
    words = [f"x{size // smith[0]}" for size in smith]
    optimizer = replace(base.optimizer, lr=base.optimizer.lr * smith[0] / low, decay_factor=5.0)
    cells["smith"] = replace(
        plain,
        name="smith",
        batch_size=smith[0],
        batch_levels=dict(zip(words, smith, strict=True)),
        batch_policy={"name": "smith", "levels": words},
        optimizer=optimizer,
    )
    return cells


def adaqs(base: RunConfig, interval: int) -> Grid:
    """AdaQS from the high level up to the low one, each rung half the compression of the one
    below: ranks 1, 2, 4, 8."""
    low, high = int(base.levels["low"]), int(base.levels["high"])
    between: list[int] = []
    while (rank := (between or [low])[-1] // 2) > high:
        between.append(rank)
    names = ["mid", *(f"mid{i}" for i in range(2, len(between) + 1))][: len(between)]
    levels: dict[str, Any] = {"low": low, **dict(zip(names, between, strict=True)), "high": high}
    ladder = [*reversed(levels)]
    base = replace(base, levels=levels)
    rule = {"name": "adaqs", "levels": ladder}
    return three(base, interval) | follow(base, {"adaqs": rule, "adaqs-0.2": {**rule, "fall": 0.2}})


def budget(base: RunConfig, max_epochs: int, interval: int) -> Grid:
    """The high level trained on: with the decays where they were, and with all epochs stretched by
    the ratio of the levels' traffic."""
    cells, budget = three(base, interval), Budget("low", base.epochs)
    longer = replace(cells["high"], name="high-longer", epochs=max_epochs, budget=budget)
    slower = stretched(replace(cells["high"], name="high-stretched"), budget, max_epochs)
    return {**cells, "high-longer": longer, "high-stretched": slower}


def stretched(cell: RunConfig, budget: Budget, max_epochs: int) -> RunConfig:
    """The same run for ``max_epochs`` unless the budget ends it before, decays in proportion."""
    decays = tuple(first * max_epochs // cell.epochs for first in cell.optimizer.decay_epochs)
    optimizer = replace(cell.optimizer, decay_epochs=decays)
    return replace(cell, epochs=max_epochs, budget=budget, optimizer=optimizer)


def ladder(base: RunConfig, interval: int) -> Grid:
    accordion = {"name": "accordion", "interval": interval}
    ranks: dict[str, Any] = {"r1": 1, "r2": 2, "r4": 4}
    rungs = list(ranks)
    policies: dict[str, Table] = {
        "rank 4": static("r4"),
        "rank 2": static("r2"),
        "rank 1": static("r1"),
        "accordion 4-1": {**accordion, "low": "r4", "high": "r1"},
        "accordion 4-2": {**accordion, "low": "r4", "high": "r2"},
        "error-ladder": {"name": "error-ladder", "levels": rungs, "error": 0.5},
        "accordion-ladder": {"name": "accordion-ladder", "levels": rungs, "interval": interval},
    }
    return follow(replace(base, levels=ranks), policies)


def deficits(base: RunConfig, windows: list[tuple[int, int]]) -> Grid:
    plain = replace(base, name="none", policy=static("dense"))
    cells = {"none": plain}
    for kind in ("blur", "labels"):
        for first, stop in windows:
            name = f"{kind} {first}-{stop - 1}"
            table = {"name": kind, "windows": [[first, stop]]}
            cells[name] = replace(plain, name=name, deficit=table)
    return cells


def shortened(config: RunConfig, share: float) -> RunConfig:
    """The same training in a share of its epochs or steps: decays, windows, intervals and the
    budget in proportion, each at least one."""

    def scaled(number: Any) -> Any:
        if isinstance(number, tuple):
            return tuple(map(scaled, number))
        return number and max(1, round(share * number))

    def table(rule: dict[str, Any]) -> dict[str, Any]:
        made = dict(rule)
        if "interval" in rule:
            made["interval"] = scaled(rule["interval"])
        if "windows" in rule:
            ends = [(round(share * first), scaled(stop)) for first, stop in rule["windows"]]
            made["windows"] = [(first, max(first + 1, stop)) for first, stop in ends]
        return made

    optimizer, budget = config.optimizer, config.budget
    counts = ("decay_epochs", "decay_steps", "warmup_epochs", "warmup_steps", "cycle_epochs")
    changed = {name: scaled(getattr(optimizer, name)) for name in (*counts, "cycle_steps")}
    hold = round(share * optimizer.warmup_hold)
    return replace(
        config,
        epochs=scaled(config.epochs),
        steps=scaled(config.steps),
        start_compressing_after=round(share * config.start_compressing_after),
        optimizer=replace(optimizer, **changed, warmup_hold=hold),
        policy=table(config.policy),
        batch_policy=config.batch_policy and table(config.batch_policy),
        sync_policy=config.sync_policy and table(config.sync_policy),
        budget=budget and replace(budget, epochs=scaled(budget.epochs)),
    )
