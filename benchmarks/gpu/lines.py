"""Results as JSON lines, each on the disk as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Lines:
    """A file of rows that is continued: what stands there is not measured again.

    Attributes:
        rows: all so far; each has "part" and "name".
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        words = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(x) for x in words if x.endswith("}")]

    def has(self, part: str, name: str) -> bool:
        """Stands it there, and well?"""
        return any(r["part"] == part and r["name"] == name and r.get("ok", True) for r in self.rows)

    def add(self, part: str, name: str, **what: Any) -> None:
        """One more, printed as well."""
        row = {"part": part, "name": name, **what}
        self.rows.append(row)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torn = self.file.exists() and not self.file.read_bytes().endswith(b"\n")
        with self.file.open("a", encoding="utf-8") as out:
            out.write(("\n" if torn else "") + json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())
        print(json.dumps(row), flush=True)
