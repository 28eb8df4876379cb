"""Image folders and archives of them, for tests."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def save(path: Path, seed: int, size: tuple[int, ...] = (6, 6, 3)) -> None:
    """An image of random pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def rows(x: torch.Tensor) -> set[bytes]:
    """The pixels of each image."""
    return {image.numpy().tobytes() for image in x}


def pack(tree: Path, suffix: str, prefix: str = "") -> Path:
    """The tree as an archive, its members in reverse order."""
    archive = tree.with_name(f"packed{suffix}")
    links = [f for f in tree.rglob("*") if f.is_symlink() and f.is_dir()]
    files = sorted(
        (f for f in [*tree.rglob("*"), *links] if f.is_file() or f in links), reverse=True
    )
    names = {f: prefix + f.relative_to(tree).as_posix() for f in files}
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for file, name in names.items():
                target.write(file, name)
    else:
        with tarfile.open(archive, f"w:{suffix[5:]}") as target:
            for file, name in names.items():
                target.add(file, name)
    return archive
