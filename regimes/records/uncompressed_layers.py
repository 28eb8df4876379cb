"""Which layers a run sends whole, because their level would not send less of them."""

from __future__ import annotations

from regimes.base.config import as_level
from regimes.records.schema import Header

NAMED = 3  # layers, before the rest are dots


def list_uncompressed_layers(header: Header, level: str) -> list[str]:
    """Name the layers that are sent whole at a level of the configuration."""
    cost = header["per_step"].get(level)
    return cost.get("whole", []) if cost else []


def describe_uncompressed_layers(header: Header) -> list[str]:
    """Write a sentence for each level at which layers are sent whole."""
    count, sentences = sum(layer["compressed"] for layer in header["layers"]), list[str]()
    for level, value in header["config"]["levels"].items():
        if names := list_uncompressed_layers(header, level):
            some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            sentences.append(
                f"sent whole at level {level}: {len(names)} of {count} layers, because "
                f"{as_level(value)} would not send less of them ({some})"
            )
    return sentences
