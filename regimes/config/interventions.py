"""The names of interventions: plug-ins that act on a run while it trains.

A package offers its own by entry points of the group ``regimes.interventions``. In files and
records each has a table of its own, beside the fields of a configuration and under this name.
"""

from __future__ import annotations

import functools

from regimes.config.registry import Registry

GROUP = "regimes.interventions"


@functools.cache
def registered_interventions() -> Registry:
    """The registered names, read when a table is no field: searching all packages takes time."""
    return Registry("intervention", group=GROUP)
