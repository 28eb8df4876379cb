"""Results as JSON lines, and the archive that is brought home: both complete after each row."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

LINES, ARCHIVE = "lines.jsonl", "gpu.tar.xz"
KEPT = (".json", ".jsonl", ".toml", ".log")


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
        return self.find(part, name) is not None

    def find(self, part: str, name: str) -> dict[str, Any] | None:
        """The last good row of that name."""
        good = [
            r for r in self.rows if (r["part"], r["name"]) == (part, name) and r.get("ok", True)
        ]
        return good[-1] if good else None

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


def deliver(work: Path, out: Path, checks: bool = False) -> int:
    """Put lines and records, without checkpoints, in two files in ``out``, each replaced at once;
    the archive's size in bytes.

    Args:
        checks: the records of checks, too.
    """
    out.mkdir(parents=True, exist_ok=True)
    if work != out and (work / LINES).exists():
        shutil.copyfile(work / LINES, out / f".{LINES}")
        os.replace(out / f".{LINES}", out / LINES)
    kept = [work / LINES, *(work / "logs").glob("*.log"), *(work / "setting").rglob("*")]
    if checks:
        kept += (work / "correct").rglob("*")
    with tarfile.open(out / f".{ARCHIVE}", "w:xz", preset=1) as archive:
        for file in sorted(kept):
            if file.is_file() and file.suffix in KEPT:
                archive.add(file, file.relative_to(work))
    os.replace(out / f".{ARCHIVE}", out / ARCHIVE)
    return (out / ARCHIVE).stat().st_size


def fetch(archive: Path, work: Path) -> None:
    """Continue from an archive of an earlier call, where nothing else is."""
    if not (work / LINES).exists():
        work.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as content:
            content.extractall(work, filter="data")
