"""The run-time checker of jaxtyping annotations in tests; an int is accepted where a float is."""

from __future__ import annotations

import re
from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

ROOT = Path(__file__).parents[2]
SHAPES = re.compile(r"jaxtyping|\b(Features|Hidden|Images|Index|Operator|Stacks|Stream|Targets)\b")


def install() -> None:
    """Check the modules that have shapes, and only them: a checked call costs 50 us, and in all
    modules that is a third of the suite's time."""
    plugins = ROOT / "analysis" / "plugins"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((*(ROOT / "regimes").rglob("[!_]*.py"), *plugins.glob("[!_]*.py")))
        if SHAPES.search(path.read_text())
    ]
    modules += [name.replace("analysis", "regimes_study") for name in modules if "plugins" in name]
    install_import_hook(modules, "shapes.check")
