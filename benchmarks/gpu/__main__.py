"""One GPU in fifteen minutes: is it right, how fast is it, and the paper's setting.

    python -m benchmarks.gpu --slice 450 --images cifar10.tar.xz --out results
    python -m benchmarks.gpu --slice 270 --images cifar10.tar.xz --out results

The second call continues the first. Parts, in order of value: ``correct`` (checks side by side),
``speed`` and ``graphs``, ``setting`` (ResNet-18 on all of CIFAR-10), ``late`` (other precisions,
compiled). Each result is one line of JSON, printed and kept; after each line two files are complete
in ``--out``: ``lines.jsonl``, and ``gpu.tar.xz`` with the lines and the records of ``setting``.
Without a GPU all is rehearsed at toy size on the CPU; the times then mean nothing. Under torchrun,
or where a machine has several GPUs, ``--parts correct`` checks NCCL, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is used

PARTS = ("correct", "speed", "graphs", "setting", "late")
CHECKING = 120.0  # seconds of a call in which checks begin
LARGEST = 16 * 2**20  # bytes of a file that a lent machine gives back


def main() -> None:
    """All parts, or some; exit code 1 if a check has failed."""
    chosen = arguments()
    import torch

    from benchmarks.gpu import grouped, lines
    from benchmarks.gpu.campaign import Campaign
    from benchmarks.gpu.place import Place

    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(device, chosen.work.resolve(), chosen.images and chosen.images.resolve())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit(not grouped.check(place))
    if chosen.resume is not None:
        lines.fetch(chosen.resume, place.out)
    campaign = Campaign(place, chosen.out, time.monotonic() + chosen.slice, chosen.only)
    campaign.header()
    steps: dict[str, Callable[[], None]] = {
        "correct": lambda: campaign.side_by_side(
            "correct", CHECKING if place.large else chosen.slice
        ),
        "speed": lambda: campaign.alone("speed"),
        "graphs": lambda: campaign.alone("graphs"),
        "setting": campaign.setting,
        "late": lambda: campaign.alone("late"),
    }
    try:
        for part in PARTS:
            if part in chosen.parts.split(","):
                steps[part]()
    finally:
        size = campaign.close()
    print(f"{chosen.out / lines.ARCHIVE}: {size} bytes", flush=True)
    if size > LARGEST:
        print(f"it is larger than {LARGEST} bytes", flush=True)
    sys.exit(bool(campaign.failures("correct")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slice", type=float, default=450.0, help="seconds after which it ends")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--only", default="", help="rows whose name matches this")
    parser.add_argument("--images", type=Path, help="archive or folder of CIFAR-10's images")
    parser.add_argument("--work", type=Path, default=Path("runs", "gpu"), help="scratch, kept")
    parser.add_argument("--out", type=Path, default=Path("runs", "gpu"), help="of the two files")
    parser.add_argument("--resume", type=Path, help="the archive of an earlier call")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}: expected of {', '.join(PARTS)}")
    for option in ("images", "resume"):
        path = getattr(chosen, option)
        if path is not None and not path.exists():
            parser.error(f"--{option}: {path} does not exist")
    return chosen


if __name__ == "__main__":
    main()
