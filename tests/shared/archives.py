"""The units of committed runs, read from the archives' lines without Regimes."""

from __future__ import annotations

import functools
import json
import tarfile
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
Rows = list[dict[str, Any]]


@functools.cache
def rows_of(source: str) -> dict[tuple[str, int], Rows]:
    """The units of each run of an archive, by its schedule and seed."""
    found = {}
    with tarfile.open(REFERENCE / f"{source}.tar.xz") as archive:
        for member in archive:
            arm, _, rest = member.name.partition("/seed-")
            seed, _, file = rest.partition("/")
            if file == "epochs.jsonl":
                content = archive.extractfile(member)
                assert content is not None
                found[arm, int(seed)] = [json.loads(line) for line in content]
    return found
