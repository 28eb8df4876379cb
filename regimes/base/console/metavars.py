"""How the help of a command names the values of its options."""

from __future__ import annotations

from typing import Any

import tyro


def named(metavar: str) -> Any:
    """Names the value of an argument in the help, in place of its type: PRESET, not STR."""
    return tyro.conf.arg(metavar=metavar)


LEFT_OUT: Any = tyro.conf.arg(help_behavior_hint="")  # not "(default: None)"
