"""The name of `analysis` in the wheel of version 0.4: the same modules under it, for one release.

In a wheel this file stands beside the package, as ``regimes_study.py``.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import analysis


class _Renamed(MetaPathFinder, Loader):
    """Finds ``regimes_study.NAME``, which becomes the module ``analysis.NAME``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith("regimes_study.") else None

    def exec_module(self, module: ModuleType) -> None:
        rest = module.__name__.removeprefix("regimes_study")
        sys.modules[module.__name__] = importlib.import_module(f"analysis{rest}")


warnings.warn("regimes_study is now analysis", DeprecationWarning, stacklevel=2)
sys.meta_path.insert(0, _Renamed())
sys.modules["regimes_study"] = analysis
