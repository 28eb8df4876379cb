"""The units of committed runs, read from the archives' lines without Regimes."""

from __future__ import annotations

import functools
import json
import tarfile
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
Rows = list[dict[str, Any]]
DRAWABLE = {  # an archive that each command without grids of its own can draw
    "agreement": "detection-signals-smoke",
    "batch": "small-batch",
    "claims": "small",
    "collapse": "smoke-quirks-topk",
    "controls": "smoke-controls",
    "criticality": "harm-lm",
    "cost": "small",
    "lost-time": "harm-smoke",
    "curves": "small-joint",
    "deficit": "smoke-deficit",
    "detectors": "lstm-small",
    "edge": "rates-edge",
    "equal-epochs": "paper-cifar10-short",
    "figure2": "small",
    "figure3": "small-signals",
    "figure4a": "small-overlap",
    "law": "harm-lm",
    "norm-hessian": "small-signals",
    "levels": "lstm-small",
    "mechanism": "rates-lm",
    "narrowing": "rates-when",
    "onset": "harm-lm",
    "rivals": "smoke-rivals",
    "settings": "harm-lm",
    "tournament": "tournament-lm",
}


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
