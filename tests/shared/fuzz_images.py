"""Strangers' folders of images, and archives of them, for `fuzz.py`."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from outcome import one_sentence
from PIL import Image

from regimes.base.config import DataConfig
from regimes.data import images

PLACES = (
    "cat",
    "dog",
    "emu",
    "train/cat",
    "train/dog",
    "test/cat",
    "test/dog",
    "val/cat",
    "",
    "Train/cat",
    ".hidden",
    "__MACOSX",
    "a b/\u00fc",
    "cat/deep/er",
)
NAMES = ("1.png", "2.png", "3.JPG", "4.jpeg", "5.gif", "6.txt", "7", ".8.png", "9.png.png")
MODES = ("L", "RGB", "RGBA", "P", "1", "I;16", "CMYK", "LA")
ARCHIVES = ("", "", "zip", "tar", "gztar", "xztar")  # "": the folder itself


@st.composite
def tree(draw: Any) -> tuple[list[tuple[str, Any]], str, float, int | None]:
    """Files (path, what is in them), how they are packed, how much of the archive is kept, and
    the size that is asked for."""
    path = st.tuples(st.sampled_from(PLACES), st.sampled_from(NAMES)).map("/".join)
    picture = st.tuples(st.sampled_from(MODES), st.integers(1, 9), st.integers(1, 9))
    content = st.one_of(
        picture,
        picture,
        picture,
        st.binary(max_size=8),
        st.sampled_from(("cut", "link", "dangling", "loop", "folder")),
    )
    file = st.tuples(path, content)
    files = st.lists(file, max_size=14)
    ordinary = st.just(
        [(f"{label}/{i}.png", ("L", 8, 8)) for label in ("cat", "dog") for i in range(3)]
    )
    found = draw(
        st.one_of(
            files,
            st.tuples(ordinary, st.lists(file, max_size=2)).map(lambda both: [*both[0], *both[1]]),
        )
    )
    return (
        found,
        draw(st.sampled_from(ARCHIVES)),
        draw(st.sampled_from((1.0, 1.0, 1.0, 0.7))),
        draw(st.sampled_from((8, 8, None))),
    )


def make(root: Path, path: str, content: Any) -> None:
    """One file of a tree; what cannot be there, a file below a file, is left out."""
    file = root / path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if content == "link":
            file.symlink_to(root / "cat" / "0.png")
        elif content == "dangling":
            file.symlink_to("nothing")
        elif content == "loop":
            file.symlink_to(file.parent)
        elif content == "folder":
            file.mkdir()
        else:
            file.write_bytes(content if isinstance(content, bytes) else _picture(content))
    except OSError:
        return


def _picture(what: Any) -> bytes:
    mode, width, height = ("L", 8, 8) if what == "cut" else what
    saved = io.BytesIO()
    Image.new(mode, (width, height)).save(saved, "TIFF" if mode in ("CMYK", "LA") else "PNG")
    return saved.getvalue()[: 40 if what == "cut" else None]


def folders(what: tuple[list[tuple[str, Any]], str, float, int | None]) -> None:
    """Loaded as `data.name = "folder"` does; what is read stays as it was."""
    files, packed, kept, size = what
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "mine")
        root.mkdir()
        for path, content in files:
            make(root, path, content)
        source = root
        if packed:
            try:
                source = Path(shutil.make_archive(str(root), packed, place, "mine"))
            except OSError:  # a link that leads nowhere
                return
            content = source.read_bytes()
            source.write_bytes(content[: int(kept * len(content))])
        before = _digest(Path(place))
        with mock.patch.dict(os.environ, {"REGIMES_CACHE": tempfile.mkdtemp()}):
            config = DataConfig("folder", str(source), resize=size)
            one_sentence("folders", lambda: images.load_images(config))
            shutil.rmtree(os.environ["REGIMES_CACHE"])
        assert _digest(Path(place)) == before


def _digest(root: Path) -> str:
    """Of all names and contents; links are not followed."""
    found = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        found.update(os.fsencode(file))
        if file.is_symlink():
            found.update(os.fsencode(os.readlink(file)))
        elif file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()
