"""Numbers that were computed before, in ``numbers.json``, with what they were computed from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import sources
from .sources import Number
from .values import decode, encode


class Missing(Exception):
    """A number is not in the store, or its archive has changed, and none may be computed."""


class Store:
    """Numbers by their call, e.g. ``effect(small, low, high)``.

    Attributes:
        functions: what computes them.
        compute: False: raise `Missing` in place of computing.
        entries: call -> ``{"value": ..., "files": [...]}``, only those that were asked for here.
    """

    def __init__(
        self, functions: Mapping[str, Number], path: Path | None, compute: bool = True
    ) -> None:
        self.functions, self.compute = functions, compute
        kept = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
        self._before: dict[str, Any] = kept.get("numbers", {})
        self._digests: dict[str, str] = kept.get("files", {})
        self.entries: dict[str, Any] = {}

    def get(self, name: str, *args: Any) -> Any:
        """The value of a call.

        Raises:
            Missing: see `compute`.
        """
        call = f"{name}({', '.join(map(str, args))})"
        if call not in self.entries:
            self.entries[call] = self._known(call) or self._computed(call, name, args)
        return decode(self.entries[call]["value"])

    def _known(self, call: str) -> dict[str, Any] | None:
        entry = self._before.get(call)
        fresh = entry and all(self._digests.get(f) == sources.digest(f) for f in entry["files"])
        return entry if fresh else None

    def _computed(self, call: str, name: str, args: tuple[Any, ...]) -> dict[str, Any]:
        if not self.compute:
            raise Missing(f"{call} is not in numbers.json, or its archive changed: `make pages`")
        with sources.reading() as files:
            value = self.functions[name](*args)
        return {"value": encode(value), "files": sorted(files)}

    def text(self, unused: bool = False) -> str:
        """The file: digests of the archives, then the numbers, one a line.

        Args:
            unused: also those that were not asked for here.
        """
        known = {call: entry for call in self._before if (entry := self._known(call))}
        kept = (known if unused else {}) | self.entries
        files = sorted({name for entry in kept.values() for name in entry["files"]})
        digests = {name: sources.digest(name) for name in files}
        rows = (
            f"  {json.dumps(call)}: {json.dumps(entry, ensure_ascii=False)}"
            for call, entry in sorted(kept.items())
        )
        head = json.dumps(digests, indent=1)
        return f'{{"files": {head},\n"numbers": {{\n' + ",\n".join(rows) + "\n}}\n"
