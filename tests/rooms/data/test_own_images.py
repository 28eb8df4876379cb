"""Somebody's own images: odd sizes, grey and transparent ones, classes beside each other, few.

Oracles: Pillow, on each image by itself; the names of the files.
"""

from __future__ import annotations

import itertools
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regimes
from regimes.base.config import DataConfig
from regimes.base.errors import ConfigError, DataError
from regimes.data import image_folder
from regimes.data.images import load_images

COUNTS = {"cat": 60, "dog": 33, "emu": 10}
MODES = ("RGB", "L", "RGBA", "P", "CMYK")
SUFFIX = {"RGB": "jpg", "L": "png", "RGBA": "png", "P": "gif", "CMYK": "jpg"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGIMES_CACHE", raising=False)
    monkeypatch.setenv("REGIMES_DATA", str(tmp_path / "cache"))


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three classes of 10 to 60 images of 17 to 90 pixels, five kinds, the class in the colour."""
    draw = np.random.default_rng(0)
    root = tmp_path / "pets"
    for label, (name, count) in enumerate(COUNTS.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            shape = (*draw.integers(17, 90, 2), 3)
            pixels = (draw.integers(0, 90, shape) + 80 * label).astype(np.uint8)
            mode = MODES[i % len(MODES)]
            image = Image.fromarray(pixels).convert(mode)
            image.save(root / name / f"{i:02d}.{SUFFIX[mode]}")
    (root / "README.txt").write_text("mine")
    (root / ".git").mkdir()
    (root / ".git/cat.png").write_text("no image")
    return root


def test_a_strangers_folder_trains_with_one_command(pets: Path, command: Callable) -> None:
    done = command(
        "run",
        "smoke",
        "--set",
        "data.name=folder",
        "--set",
        f"data.path={pets}",
        "--set",
        "data.resize=16",
        "--out",
        "run",
    )
    assert done.returncode == 0, done.stderr
    record = regimes.load(pets.parent / "run")
    assert record.header["data"]["train"] == 48 + 26 + 8
    assert record.header["data"]["test"] == 12 + 7 + 2
    assert record.header["data"]["classes"] == list(COUNTS)
    assert record.epochs["metric"].iloc[-1] > 0.8  # the colour tells


def test_sizes_that_a_preset_asks_for_are_at_most_those_of_the_data(
    pets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = load_images(DataConfig("folder", str(pets), train_size=3000, test_size=6, resize=8))
    assert len(found.train_y) == 82
    assert torch.bincount(found.test_y).tolist() == [2, 2, 2]
    assert "data.train_size = 3000" in caplog.text
    assert "has 82: all are taken" in caplog.text
    with pytest.raises(DataError, match=r"which has 8: set another data\.train_size, or none"):
        load_images(DataConfig("folder", str(pets), train_size=60, resize=8))


# -- sizes and kinds -------------------------------------------------------------------------


def test_each_image_is_resized_and_cropped_in_the_middle(tmp_path: Path) -> None:
    """A wide image of three stripes keeps the middle one; a tall one likewise."""
    stripes = np.repeat(np.array([0, 128, 255], np.uint8), 40)
    wide = np.tile(stripes, (40, 1))
    for split in ("train", "test"):
        for name, pixels in (("a", wide), ("b", wide.T)):
            (tmp_path / "tree" / split / name).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / "tree" / split / name / "0.png")
    found = image_folder.load_tree(tmp_path / "tree", resize=10)
    assert found.train_x.shape == (2, 1, 10, 10)
    assert (found.train_x[:, :, 2:-2, 2:-2] == 128).all()  # the edge sees its neighbours
    assert abs(found.train_x.astype(int) - 128).max() < 20


def test_an_image_is_as_the_camera_was_held(tmp_path: Path) -> None:
    pixels = np.zeros((20, 20), np.uint8)
    pixels[:10] = 255  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    for split in ("train", "test"):
        for name in "ab":
            (tmp_path / "tree" / split / name).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / "tree" / split / name / "0.png", exif=exif)
    as_stored = image_folder.load_tree(tmp_path / "tree").train_x[0, 0]
    held = image_folder.load_tree(tmp_path / "tree", resize=20).train_x[0, 0]
    assert (held == as_stored[::-1]).all()


@pytest.mark.parametrize("given", [{"test_share": 0.5}, {"split_seed": 7}])
def test_a_tree_with_a_division_of_its_own_takes_no_other(
    given: dict[str, Any], tmp_path: Path
) -> None:
    for split, name in itertools.product(("train", "test"), "ab"):
        (tmp_path / "tree" / split / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "tree" / split / name / "0.png")
    with pytest.raises(ConfigError, match=f"data.{next(iter(given))} = .*: expected none"):
        image_folder.load_tree(tmp_path / "tree", **given)


def test_without_a_size_the_sentence_names_it(pets: Path) -> None:
    with pytest.raises(DataError, match=r"must have one size: set data\.resize = 32"):
        load_images(DataConfig("folder", str(pets)))


def test_another_size_is_another_entry_of_the_cache(pets: Path) -> None:
    shapes = {image_folder.load_tree(pets, resize=n).train_x.shape[2] for n in (8, 16, 8)}
    assert shapes == {8, 16}


# -- the split -------------------------------------------------------------------------------


def names(pets: Path, seed: int | None = None, share: float | None = None) -> set[str]:
    """The images that test, by what is in them."""
    found = image_folder.load_tree(pets, 8, share, seed)
    return {x.tobytes() for x in found.test_x}


def test_the_split_is_a_function_of_seed_and_name(pets: Path) -> None:
    first = names(pets)
    assert first == names(pets, 0)
    assert first != names(pets, 1)
    assert len(names(pets, share=0.5)) > 2 * len(first)
    (removed,) = (pets / "dog").glob("32.*")
    removed.unlink()  # the others stay where they were, but for the count's rounding
    assert len(first - names(pets)) <= 1


def test_no_image_is_on_both_sides_and_each_class_on_both(pets: Path) -> None:
    found = image_folder.load_tree(pets, 8)
    train, test = ({x.tobytes() for x in part} for part in (found.train_x, found.test_x))
    assert not train & test
    assert len(train) + len(test) == sum(COUNTS.values())
    assert set(found.test_y.tolist()) == set(found.train_y.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("suffix", "prefix"), [(".zip", "my/pets/"), (".tar.gz", "./")])
def test_an_archive_of_it_is_the_same_data(pets: Path, suffix: str, prefix: str) -> None:
    folder = load_images(DataConfig("folder", str(pets), resize=8))
    shutil.rmtree(pets / ".git")
    if suffix == ".zip":
        archive = pets.with_suffix(".zip")
        with zipfile.ZipFile(archive, "w") as packed:
            for file in sorted(pets.rglob("*.*")):
                packed.write(file, prefix + file.relative_to(pets).as_posix())
    else:
        top = pets.parent / "packing"
        shutil.copytree(pets, top / prefix)
        archive = Path(shutil.make_archive(str(pets), "gztar", top))
    assert load_images(DataConfig("folder", str(archive), resize=8)).digest == folder.digest
    inside = pets.parent / "more/in"
    shutil.copytree(pets, inside / "pets")
    assert load_images(DataConfig("folder", str(inside), resize=8)).digest == folder.digest


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train", "bus"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (8, 8), i).save(tmp_path / "tree" / name / f"{i}.png")
    found = image_folder.load_tree(tmp_path / "tree")
    assert found.classes == ("bus", "train")
    assert (len(found.train_y), len(found.test_y)) == (8, 2)
    Image.new("L", (8, 8), 99).save(tmp_path / "tree/bus/9.png")
    assert len(image_folder.load_tree(tmp_path / "tree").train_y) == 9  # the cache follows


BAD = [
    (
        lambda t: (
            [f.unlink() for f in (t / "emu").glob("[1-9]*")]
            + [f.unlink() for f in (t / "emu").glob("0[1-9]*")]
        ),
        "emu has one image .* needs two",
    ),
    (lambda t: [shutil.rmtree(t / name) for name in ("cat", "dog")], "only one class, 'emu'"),
    (lambda t: (t / "cat/00.jpg").write_text("?"), "cat/00.jpg cannot be decoded"),
    (lambda t: shutil.copytree(t / "cat", t / "train/cat"), "has no images in test/<class>/"),
    (lambda t: (t / "cow/calves").mkdir(parents=True), "cow has no images .* needs two"),
    (lambda t: [f.rename(f.with_suffix(".heic")) for f in (t / "emu").glob("*")], "emu has no"),
    (
        lambda t: (
            [t.joinpath(a).rename(t / b) for a, b in (("cat", "Train"), ("dog", "val"))]
            and shutil.rmtree(t / "emu")
        ),
        "Train and val are no classes: name them",
    ),
    (
        lambda t: [f.rename(t / (f.parent.name + f.name)) for f in t.glob("[a-z]*/*")],
        "has no images in folders, and 103 outside",
    ),
    (lambda t: [shutil.rmtree(t / name) for name in COUNTS], "has no images in folders, and 0"),
    (
        lambda t: shutil.copy(t / "cat/00.jpg", t / "stray.jpg"),
        "stray.jpg lies outside the class folders",
    ),
    (
        lambda t: [shutil.copytree(t / "cat", t / split / "cat") for split in ("train", "Val")],
        "or <class>/ alone, which is split. If Val/ is to test, name it test.",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_a_bad_folder_is_one_sentence(pets: Path, spoil: Callable, message: str) -> None:
    spoil(pets)
    with pytest.raises(DataError, match=message) as caught:
        load_images(DataConfig("folder", str(pets), resize=8))
    assert str(pets) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["zip", "tar"])
def test_an_empty_class_is_one_in_an_archive_too(pets: Path, suffix: str) -> None:
    (pets / "cow").mkdir()
    archive = shutil.make_archive(str(pets), suffix, pets.parent, "pets")
    with pytest.raises(DataError, match=r"pets/cow has no images"):
        load_images(DataConfig("folder", archive, resize=8))


@pytest.mark.parametrize("name", ["Kätzchen", "猫"])  # DOS has letters for the first alone
def test_names_in_a_zip_that_does_not_say_utf_8(name: str, pets: Path) -> None:
    """Info-ZIP, say, writes UTF-8 without the flag for it: here the flag is taken off."""
    (pets / "cat").rename(pets / name)
    folder = load_images(DataConfig("folder", str(pets), resize=8))
    shutil.rmtree(pets / ".git")
    archive = Path(shutil.make_archive(str(pets), "zip", pets))
    assert load_images(DataConfig("folder", str(archive), resize=8)).digest == folder.digest
    content = bytearray(archive.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := content.find(signature, start + 1)) >= 0:
            content[start + flags + 1] &= 0xFF ^ 0x08
    archive.write_bytes(content)
    assert load_images(DataConfig("folder", str(archive), resize=8)).digest == folder.digest


def test_a_path_may_start_at_home(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of ``--set data.path=~/pets`` alone."""
    monkeypatch.setenv("HOME", str(pets.parent))
    found = load_images(DataConfig("folder", "~/pets", resize=8))
    assert found.digest == load_images(DataConfig("folder", str(pets), resize=8)).digest
