"""How every figure's module starts from the command line: errors are one sentence and a code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from regimes.errors import RegimesError


def start(main: Callable[..., Any], module: str) -> None:
    """Run ``main`` with its arguments from the command line (``python -m MODULE``)."""
    import tyro

    try:
        tyro.cli(main, prog=f"python -m {module}", config=(tyro.conf.PositionalRequiredArgs,))
    except RegimesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
