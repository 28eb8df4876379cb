"""The units before a branch as its own policies would have decided them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from regimes.policies.controller import Controller, WholeController
from regimes.records import Row


def as_decided(
    seen: list[Row],
    rows: Sequence[Row],
    layers: Controller,
    whole: Mapping[str, WholeController | None] | None = None,
) -> list[Row]:
    """Add to ``seen``, which has the first of ``rows`` already, the others with the levels that
    these policies would have chosen, so that they meet no level that they do not know.

    Args:
        layers: decides the level of each layer.
        whole: by column ("batch", "sync"), what decides one level for all; None: nothing does.
    """
    for row in rows[len(seen) :]:
        decided: dict[str, Any] = {
            **row,
            "layers": {**row["layers"], "level": layers.decide(seen).names},
        }
        for column, rule in (whole or {}).items():
            if rule is not None:
                decided[column] = {**decided.get(column, {}), "level": rule.decide(seen).level}
        seen.append(cast("Row", decided))
    return seen
