"""A cache and a small image folder for tests of the data."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_trees import save


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of data and cache, empty and of this test alone."""
    monkeypatch.delenv("REGIMES_CACHE", raising=False)
    monkeypatch.setenv("REGIMES_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tree(tmp_path) -> Path:
    """Two classes, three training and one test image each, and files that are no images."""
    root = tmp_path / "pets"
    for label, offset in (("cat", 0), ("dog", 10)):
        for i in range(3):
            save(root / "train" / label / f"{i}.png", offset + i)
        save(root / "test" / label / "0.png", offset + 5)
    for stray in ("README.txt", "train/notes.txt", "train/cat/.0.png", "train/loose.png"):
        (root / stray).write_text("no image")
    return root
