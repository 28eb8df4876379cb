"""Branches in a grid: where their trunks are, what those keep, and what is trained first. No torch.

Each seed's trunk is trained once, with the checkpoints that its branches begin from. A trunk and
its branches make a tree; a branch may be a trunk itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.presets import Grid
from regimes.records import locate_trunk, trunk_reference

Cell = tuple[Path, RunConfig]  # as of `sweep`


def place_branches(grid: Grid, out: Path, seed: int) -> Grid:
    """Fit a grid's configurations to one seed: trunks keep the checkpoints that branches need, and
    branches name the path to their trunk in place of its schedule.

    Raises:
        ConfigError: a trunk is neither in the grid nor among the records.
    """
    needed: dict[str, set[int]] = {}
    for config in grid.values():
        if config.branch is not None:
            needed.setdefault(config.branch.of, set()).add(config.branch.at)
    configurations = {}
    for name, config in grid.items():
        if name in needed and config.checkpoint_keep != "all":
            own = config.checkpoint_keep if isinstance(config.checkpoint_keep, tuple) else ()
            config = replace(config, checkpoint_keep=tuple(sorted({*own, *needed[name]})))
        configurations[name] = _with_path(name, config, grid, out, seed)
    return configurations


def _with_path(
    name: str, config: RunConfig, grid: Mapping[str, RunConfig], out: Path, seed: int
) -> RunConfig:
    if config.branch is None:
        return config
    trunk = out / config.branch.of / f"seed-{seed}"
    if config.branch.of not in grid and not (trunk / "run.json").exists():
        raise ConfigError(
            f"{name} is a branch of {config.branch.of!r}, which is not among the schedules: add "
            f"--schedules {config.branch.of!r}"
        )
    path = trunk_reference(trunk, out / name / f"seed-{seed}")
    return replace(config, branch=replace(config.branch, of=path))


def group_waves(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Divide the runs into groups: a group needs only runs of earlier groups."""
    configs = {os.path.realpath(folder): config for folder, config in todo}

    def depth(place: str) -> int:
        config = configs.get(place)
        if config is None or config.branch is None:
            return 0
        return 1 + depth(os.path.realpath(locate_trunk(Path(place), config.branch.of)))

    depths = [depth(os.path.realpath(folder)) for folder, _ in todo]
    return [
        [cell for cell, mine in zip(todo, depths, strict=True) if mine == wave]
        for wave in sorted({*depths})
    ]
