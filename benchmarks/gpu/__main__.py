"""One GPU in half an hour: is it right, how fast is it, and then a study, as far as time allows.

    python -m benchmarks.gpu

Three parts in this order: ``correct``, ``speed``, ``study``. Each result is one line of JSON,
printed and kept in ``OUT/lines.jsonl``; the same command goes on where it was stopped. At the end
of each call ``OUT/gpu.tar.xz`` has the lines and all records, without checkpoints. On a
machine without a GPU the same things are done at toy size on the CPU: a rehearsal, whose times
mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is used

SLICE = 420.0  # a call on a lent machine lasts 600 s at most, and a row up to two minutes
LARGEST = 16 * 2**20  # bytes of a file that a lent machine gives back
ARCHIVE = "gpu.tar.xz"
PARTS = ("correct", "speed", "study")


def main() -> None:
    """All parts, or some; exit code 1 if a check has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slice", type=float, default=SLICE, help="seconds in which rows begin")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--only", default="", help="rows whose name has these letters")
    parser.add_argument("--out", type=Path, default=Path("runs", "gpu"))
    chosen = parser.parse_args()
    if unknown := set(chosen.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}: expected of {', '.join(PARTS)}")
    import torch

    from benchmarks.gpu import correct, speed, study
    from benchmarks.gpu.lines import Lines
    from benchmarks.gpu.place import Place

    end = time.monotonic() + chosen.slice
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(device, chosen.out.resolve())
    lines = Lines(place.out / "lines.jsonl")
    checks = {name: checked(check, place) for name, check in correct.CHECKS.items()}
    for part, rows in (("correct", checks), ("speed", speed.rows(place))):
        for name, measure in rows.items() if part in chosen.parts else ():
            if chosen.only in name and not lines.has(part, name) and time.monotonic() < end:
                lines.add(part, name, **outcome(measure))
    if "study" in chosen.parts:
        try:
            study.study(place, lines, end)
        except study.SliceOver:
            print("the slice is over: the same command goes on", flush=True)
    size = pack(place.out)
    print(f"{place.out / ARCHIVE}: {size} bytes", flush=True)
    if size > LARGEST:
        print(f"it is larger than {LARGEST} bytes", flush=True)
    sys.exit(any(not row.get("ok", True) for row in lines.rows if row["part"] == "correct"))


def pack(out: Path) -> int:
    """Lines and records, without checkpoints, in one archive; its size in bytes."""
    kept = [f for f in sorted(out.rglob("*")) if f.suffix in (".json", ".jsonl", ".toml")]
    with tarfile.open(out / ARCHIVE, "w:xz") as archive:
        for file in kept:
            archive.add(file, file.relative_to(out))
    return (out / ARCHIVE).stat().st_size


def checked(check: Callable[[Any], str], place: Any) -> Callable[[], dict[str, Any]]:
    """A check as something that is measured."""
    return lambda: {"detail": check(place)}


def outcome(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row's content; an error is one, too, and the others go on."""
    began = time.monotonic()
    try:
        found = {"ok": True, **measure()}
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        found = {"ok": False, "detail": f"{type(error).__name__}: {said}"}
    return {**found, "seconds": round(time.monotonic() - began, 2)}


if __name__ == "__main__":
    main()
