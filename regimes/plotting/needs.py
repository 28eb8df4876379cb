"""What a figure needs of a grid: data, which `lacking` compares with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Needs:
    """Says what a figure needs of the runs of a grid.

    Attributes:
        schedules: each of them, by its name or its role.
        also: further ones, which are drawn where there are any.
        statistics: each of ``schedules`` records them; without such, any one schedule.
        like: a grid that has the schedules, as an example.
        instead: by schedule, another one that takes its part where it is missing.
    """

    schedules: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    like: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
