"""Image folders and archives of them: read, cached, checked; what is refused."""

from __future__ import annotations

import os
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from image_trees import pack, rows, save
from PIL import Image

from regimes.base.config import DataConfig
from regimes.base.errors import DataError
from regimes.data import image_folder, sources
from regimes.data import tree as tree_of
from regimes.data.images import load_images

pytestmark = pytest.mark.usefixtures("cache")
ARCHIVES = [".tar", ".tar.gz", ".tar.xz", ".zip"]


@pytest.mark.parametrize("prefix", ["", "./", "pets/"])
@pytest.mark.parametrize("suffix", ARCHIVES)
def test_folder_and_archives_are_the_same_data(tree, suffix, prefix):
    folder = load_images(DataConfig("folder", str(tree)))
    packed = load_images(DataConfig("folder", str(pack(tree, suffix, prefix))))
    assert packed.digest == folder.digest
    assert packed.classes == ("cat", "dog")
    assert packed.train_y.sort().values.tolist() == [0, 0, 0, 1, 1, 1]
    with Image.open(tree / "train" / "dog" / "2.png") as image:
        assert np.asarray(image).transpose(2, 0, 1).tobytes() in rows(packed.train_x)


def test_names_of_images_need_not_be_utf_8(tree, cache):
    before = load_images(DataConfig("folder", str(tree)))
    image = tree / "train" / "dog" / "2.png"
    image.rename(image.parent / os.fsdecode(b"2\xff.png"))
    for _ in range(2):  # decoded, and from the cache
        assert load_images(DataConfig("folder", str(tree))).digest == before.digest
    assert len([*cache.glob("*.npz")]) == 2


@pytest.mark.slow
def test_many_files_are_decoded_in_processes(tree, cache, monkeypatch):
    """The same arrays, and the same sentence about a file that cannot be decoded."""
    arrays = image_folder.load_tree(tree)
    for file in cache.glob("*.npz"):
        file.unlink()
    monkeypatch.setattr(image_folder, "SEVERAL", 2)
    monkeypatch.setattr(image_folder, "PART", 3)
    for a, b in zip(image_folder.load_tree(tree), arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    bad = sorted(tree.glob("train/*/*"))[-1]
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"{bad.name} cannot be decoded: it is no image"):
        image_folder.load_tree(tree)


def test_the_cache_is_used_and_follows_its_source(tree, cache, monkeypatch):
    first = image_folder.load_tree(tree)
    with monkeypatch.context() as patch:
        patch.setattr(image_folder, "_decode_pixels", lambda *_: pytest.fail("decoded again"))
        again = image_folder.load_tree(tree)
        image_folder.load_tree(os.path.relpath(tree))  # however the path is spelt
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a, b)
    assert [f.suffix for f in cache.iterdir()] == [".npz"]  # nothing temporary is left
    save(tree / "train" / "cat" / "3.png", 99)
    assert len(image_folder.load_tree(tree).train_y) == 7


@pytest.mark.parametrize("damage", [b"", b"not a zip file", None])
def test_a_corrupt_cache_file_is_rebuilt(tree, cache, caplog, damage):
    first = image_folder.load_tree(tree)
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[200] ^= 1  # a pixel: the file still opens, its CRC does not match
    file.write_bytes(bytes(content) if damage is None else damage)
    for logged in (True, False):  # the second time it is whole again
        caplog.clear()
        again = image_folder.load_tree(tree)
        assert np.array_equal(first.train_x, again.train_x)
        assert ("is rebuilt" in caplog.text) == logged


def test_without_a_writable_cache(tree, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("REGIMES_CACHE", str(tmp_path / "file" / "below"))
    assert len(image_folder.load_tree(tree).train_y) == 6
    assert "not cached" in caplog.text


def test_several_may_load_at_once(tree, cache):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(image_folder.load_tree, [tree] * 4))
    assert all(np.array_equal(r.train_x, results[0].train_x) for r in results)
    assert [f.suffix for f in cache.iterdir()] == [".npz"]


def test_grey_images(tree):
    save(tree / "train" / "cat" / "0.png", 1, (6, 6))
    mixed = image_folder.load_tree(tree)
    assert mixed.train_x.shape == (6, 3, 6, 6)
    assert (mixed.train_x[0] == mixed.train_x[0, 0]).all()  # three equal channels
    for file in tree.rglob("*/*/[0-9].png"):
        save(file, 1, (6, 6))
    assert image_folder.load_tree(tree).train_x.shape == (6, 1, 6, 6)


def test_a_constant_channel_is_not_divided_by_zero(tree):
    for file in tree.rglob("*/*/[0-9].png"):
        Image.new("L", (6, 6), 51).save(file)
    pictures = load_images(DataConfig("folder", str(tree)))
    assert (pictures.mean, pictures.std) == ((0.2,), (1.0,))


def remove(folder: Path) -> None:
    for file in folder.rglob("*.png"):
        file.unlink()


BAD = [  # how to spoil the tree, and what the error says
    (lambda t: save(t / "train/dog/1.png", 0, (6, 5, 3)), "train/dog/1.png is 5x6, but .* is 6x6"),
    (lambda t: (t / "test/cat/0.png").write_text("?"), "test/cat/0.png cannot be decoded"),
    (lambda t: save(t / "train/cat/1.png", 0, (6, 6)) or deep(t / "train/cat/1.png"), "more than"),
    (lambda t: halve(t / "train/cat/1.png"), "train/cat/1.png cannot be decoded"),
    (lambda t: remove(t / "train"), "pets.* has no images in train/<class>/"),
    (lambda t: remove(t / "test"), "pets.* has no images in test/<class>/"),
    (remove, "has no images"),
    (lambda t: [remove(t / s / "dog") for s in ("train", "test")], "has only one class, 'cat'"),
    (lambda t: save(t / "test/emu/0.png", 0), "class of test/emu/0.png has no images in train/"),
]


def deep(path: Path) -> None:
    Image.fromarray(np.full((6, 6), 60_000, dtype=np.uint16)).save(path)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_a_bad_tree_is_one_sentence_with_the_file(tree, cache, spoil, message):
    spoil(tree)
    with pytest.raises(DataError, match=message) as caught:
        load_images(DataConfig("folder", str(tree)))
    assert str(tree) in str(caught.value)
    assert not cache.exists()  # nothing bad is cached


def diamonds(tree: Path, depth: int) -> None:
    """No loop, and two ways from each folder to the next: 2^depth to the last one."""
    for i in range(depth):
        (tree / f"d{i}").mkdir()
        for way in "xy":
            (tree / f"d{i}" / way).symlink_to(f"../d{i + 1}")
    (tree / f"d{depth}").mkdir()
    (tree / "train/cat/deep").symlink_to("../../d0")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: os.mkfifo(t / "train/cat/9.png"), "train/cat/9.png is no regular file"),
        (lambda t: (t / "train/cat/9.png").symlink_to("/dev/zero"), "9.png is no regular file"),
        (lambda t: (t / "train/cat/9.png").symlink_to("nowhere"), "No such file .*9.png"),
        (lambda t: (t / "train/cat/9.png").symlink_to("9.png"), "symbolic links.*9.png"),
        (lambda t: (t / "train/cat/more").symlink_to("."), "more is a link to a folder that it"),
        (lambda t: diamonds(t, 30), "deep/x/.*/y is .*/x once more, through a link"),
        (lambda t: (t / "train/bird").symlink_to(".."), "bird is a link to a folder that it lies"),
        (lambda t: os.truncate(t / "train/cat/1.png", 2**40), "1.png is too large for an image"),
    ],
)
def test_odd_files_are_one_sentence_and_no_hang(tree, cache, spoil, message):
    spoil(tree)
    with pytest.raises(DataError, match=message):
        load_images(DataConfig("folder", str(tree)))
    assert not cache.exists()


@pytest.mark.parametrize("prefix", ["", "./", "pets/"])
def test_links_lead_to_their_images(tree, prefix, tmp_path):
    """Symbolic and hard ones, and links to links, in a folder and in an archive of it."""
    (tree / "train/cat/7.png").symlink_to("../dog/1.png")
    (tree / "train/cat/8.png").symlink_to("7.png")
    os.link(tree / "train/dog/2.png", tree / "train/dog/9.png")
    (tree / "train/emu").symlink_to("dog")
    folder = load_images(DataConfig("folder", str(tree)))
    assert torch.bincount(folder.train_y).tolist() == [5, 4, 4]
    packed = load_images(DataConfig("folder", str(pack(tree, ".tar.gz", prefix))))
    with tarfile.open(tree.with_name("packed.tar.gz")) as tar:
        assert {"1", "2"} <= {member.type.decode() for member in tar}  # hard and symbolic
    assert packed.digest == folder.digest


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("train/cat/9.png", "nowhere.png", "No such file or directory: 'train/cat/9.png'"),
        ("train/cat/9.png", "9.png", "symbolic links: 'train/cat/9.png'"),
        ("train/cat/9.png", "../../../../etc/passwd", "9.png is no regular file, nor a link"),
        ("train/cat/more", ".", "train/cat/more is a link to a folder that it lies in"),
    ],
)
def test_a_link_out_of_an_archive_is_not_left_out(tree, link, target, message):
    archive = tree.with_name("packed.tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(tree, ".")
        member = tarfile.TarInfo(link)
        member.type, member.linkname = tarfile.SYMTYPE, target
        tar.addfile(member)
    with pytest.raises(DataError, match=message):
        load_images(DataConfig("folder", str(archive)))


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_of_members_with_one_name_the_last_counts(tree, suffix):
    """As if the archive had been unpacked."""
    archive = pack(tree, suffix)
    save(tree / "train/cat/0.png", 77)
    if suffix == ".tar":
        with tarfile.open(archive, "a") as tar:
            tar.add(tree / "train/cat/0.png", "./train/cat/0.png")
    else:
        with zipfile.ZipFile(archive, "a") as target, pytest.warns(UserWarning, match="Duplicate"):
            target.write(tree / "train/cat/0.png", "train/cat/0.png")
    packed, folder = (load_images(DataConfig("folder", str(place))) for place in (archive, tree))
    assert packed.digest == folder.digest


def test_an_image_larger_than_memory_is_not_read(tree, monkeypatch):
    monkeypatch.setattr(tree_of, "LARGEST_IMAGE", 100)
    for place in (tree, *(pack(tree, suffix) for suffix in ARCHIVES)):
        with pytest.raises(DataError, match=r"png is too large for an image: \d+ bytes"):
            load_images(DataConfig("folder", str(place)))


WRONG = {
    "no class numbers": {"train_y": np.zeros((6, 1), np.int64)},
    "other types": {"train_x": np.zeros((6, 3, 6, 6))},
    "other sizes": {"test_x": np.zeros((2, 3, 5, 5), np.uint8)},
    "classes that are none": {"test_y": np.array([0, 2])},
    "no names": {"classes": np.array([1, 2])},
    "no images": {"test_x": np.zeros((0, 3, 6, 6), np.uint8), "test_y": np.zeros(0, np.int64)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_cache_with_other_arrays_is_rebuilt(tree, cache, caplog, wrong):
    first = load_images(DataConfig("folder", str(tree)))
    (file,) = cache.glob("*.npz")
    with np.load(file) as found:
        arrays = {**found, **WRONG[wrong]}
    np.savez(file, **arrays)
    assert load_images(DataConfig("folder", str(tree))).digest == first.digest
    assert "does not match its checksum" in caplog.text


def test_bad_paths(tmp_path):
    with pytest.raises(DataError, match=r"needs data\.path"):
        load_images(DataConfig("folder"))
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_images(DataConfig("folder", str(tmp_path / "nowhere")))
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(DataError, match="must be an image folder or archive"):
        load_images(DataConfig("folder", str(tmp_path / "pipe.tar")))
    for name in ("text.tar.xz", "text.zip", "text.csv"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(DataError, match=f"{name} is truncated or not a readable"):
            load_images(DataConfig("folder", str(tmp_path / name)))
    with pytest.raises(DataError, match=r"Unknown data set 'digit': did you mean 'digits'\?"):
        sources.read_images(DataConfig("digit"))


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_a_truncated_archive_is_an_error_or_complete(tree, suffix, monkeypatch):
    """A silent loss of images would be a different experiment."""
    monkeypatch.setattr(image_folder, "store_arrays", lambda *_: None)
    archive = pack(tree, suffix)
    whole, expected = archive.read_bytes(), image_folder.load_tree(archive)
    errors = 0
    cuts = np.unique(np.linspace(0, len(whole) - 1, 60, dtype=int))
    boundaries = np.arange(0, len(whole), 512) if suffix == ".tar" else []
    for cut in sorted({*cuts.tolist(), *map(int, boundaries)}):
        archive.write_bytes(whole[:cut])
        try:
            found = image_folder.load_tree(archive)
        except DataError as error:
            assert str(archive) in str(error)  # noqa: PT017
            errors += 1
        else:
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert errors > 30
    if suffix != ".tar":  # which has no checksum of its contents
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 4
        archive.write_bytes(flipped)
        with pytest.raises(DataError, match=str(archive)):
            image_folder.load_tree(archive)


@pytest.fixture
def real_archive() -> Path:
    beside = Path(__file__).parents[4] / "shared" / "data" / "cifar10-jpeg.tar.xz"
    path = Path(os.environ.get("REGIMES_TEST_CIFAR", beside))
    if not path.is_file():
        pytest.skip("no CIFAR-10 archive: set REGIMES_TEST_CIFAR to an image-folder archive of it")
    return path


@pytest.mark.slow
def test_cifar_10_from_its_archive(real_archive):
    """Counts, and the statistics that are printed everywhere (JPEG shifts them little)."""
    pictures = load_images(DataConfig("folder", str(real_archive)))
    assert torch.bincount(pictures.train_y).tolist() == [5000] * 10
    assert torch.bincount(pictures.test_y).tolist() == [1000] * 10
    assert pictures.train_x.shape == (50_000, 3, 32, 32)
    assert pictures.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-4)
    assert pictures.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=3e-3)
