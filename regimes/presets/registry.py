"""Where presets and grids are kept by name."""

from __future__ import annotations

from collections.abc import Callable

from regimes.config import RunConfig

Grid = dict[str, RunConfig]
PRESETS: dict[str, Callable[[], RunConfig]] = {}
GRIDS: dict[str, Callable[[], Grid]] = {}


def preset(name: str) -> Callable[[Callable[[], RunConfig]], Callable[[], RunConfig]]:
    """Register a configuration under a name."""

    def register(make: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
        PRESETS[name] = make
        return make

    return register


def grid(name: str) -> Callable[[Callable[[], Grid]], Callable[[], Grid]]:
    """Register a grid under a name."""

    def register(make: Callable[[], Grid]) -> Callable[[], Grid]:
        GRIDS[name] = make
        return make

    return register
