"""The run-time checker of jaxtyping annotations in tests; an int is accepted where a float is."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import config, install_import_hook

ROOT = Path(__file__).parents[2]
SHAPES = re.compile(r"jaxtyping|\b(Features|Hidden|Images|Index|Operator|Stacks|Stream|Targets)\b")
# A check costs 50 us and a run calls thousands: `make test-all` checks every call.
CHECKED_CALLS = float(os.environ.get("CHECKED_CALLS", "100"))
_calls = 0


def begin_test() -> None:
    """Check the next ``CHECKED_CALLS`` calls, whatever was called before."""
    global _calls
    _calls = 0
    config.update("jaxtyping_disable", False)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks its arguments, and ends all checks after ``CHECKED_CALLS`` calls."""
    if "<locals>" in function.__qualname__:  # would be compiled at each call of the outer function
        return function
    checked = beartype(conf=BeartypeConf(is_pep484_tower=True))(function)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _calls
        _calls += 1
        if _calls > CHECKED_CALLS:
            config.update("jaxtyping_disable", True)
        return checked(*args, **kwargs)

    return counted


def install() -> None:
    """Check the modules that have shapes, and only them: in all modules that takes longer."""
    plugins = ROOT / "analysis" / "plugins"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((*(ROOT / "regimes").rglob("[!_]*.py"), *plugins.glob("[!_]*.py")))
        if SHAPES.search(path.read_text())
    ]
    install_import_hook(modules, "shapes.check")
