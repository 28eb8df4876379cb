"""Data: order and augmentation as functions of (seed, epoch, index), subsets, archives, cache."""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from regimes.config import DataConfig
from regimes.data import image_folder, sources
from regimes.data import tree as tree_of
from regimes.data.images import ImageBatches, Images, evaluation_batches, load
from regimes.errors import DataError

SMALL = settings(max_examples=40)


def numbered(n: int, c: int = 1, h: int = 1, w: int = 2) -> Images:
    """Images whose first two pixels spell their index; the rest is noise. Normalising: x -> x."""
    x = torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator())
    index = torch.arange(n)
    x.view(n, -1)[:, 0], x.view(n, -1)[:, 1] = index % 256, index // 256
    unit = (0.0,) * c, (1 / 255,) * c
    return Images(x, index, x[:3], index[:3], ("a", "b"), *unit, digest="")


def batches(pictures, config=None, *, workers=2, batch_size=3, seed=5, **options) -> ImageBatches:
    config = config or DataConfig()
    return ImageBatches(
        pictures, config, seed=seed, workers=workers, batch_size=batch_size, **options
    )


def union(b: ImageBatches, epoch: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels of an epoch in global order."""
    parts = list(b.epoch(epoch, range(b.workers), start))
    return tuple(torch.cat([p[i].transpose(0, 1).flatten(0, 1) for p in parts]) for i in (0, 1))


# -- order -----------------------------------------------------------------------------------


@SMALL
@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_order_is_one_permutation_whatever_the_workers_and_the_batch(n, workers, size, epoch):
    b = batches(numbered(n), workers=workers, batch_size=size)
    x, y = union(b, epoch)
    order = batches(numbered(n), workers=1, batch_size=1).order(epoch)
    assert torch.equal(order.sort().values, torch.arange(n))
    assert torch.equal(y[:n], order)  # every sample once, in the permutation's order ...
    assert torch.equal(y[n:], order.repeat(workers)[: len(y) - n])  # ... then from its start
    assert len(y) == -(-n // workers) * workers
    assert torch.equal(x[:, 0, 0, 0] + 256 * x[:, 0, 0, 1], y.float())  # image and label agree
    assert b.steps == len(b) == -(-n // (workers * size))


@SMALL
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_process_gets_its_workers_part(n, workers, size, draw):
    hosted = draw.draw(st.lists(st.integers(0, workers - 1), min_size=1, unique=True))
    start = draw.draw(st.integers(0, 3))
    b = batches(numbered(n), workers=workers, batch_size=size)
    whole, part = list(b.epoch(1, range(workers))), list(b.epoch(1, hosted, start))
    assert len(part) == max(0, len(whole) - start)
    for (x, y), (px, py) in zip(whole[start:], part, strict=True):
        assert torch.equal(px, x[hosted])
        assert torch.equal(py, y[hosted])


def test_interleaving():
    """Worker w of 2 has positions w, w + 2, w + 4 of the global batch of 6."""
    b = batches(numbered(12))
    _, y = next(b.epoch(0, range(2)))
    assert torch.equal(y, torch.stack([b.order(0)[0:6:2], b.order(0)[1:6:2]]))


def test_drop_last():
    b = batches(numbered(20), DataConfig(drop_last=True))
    assert b.steps == 3
    assert torch.equal(union(b, 0)[1], b.order(0)[:18])
    with pytest.raises(DataError, match="2 x 11 = 22 images with drop_last leaves no step"):
        b.rebatched(11)


def test_reshuffle_off_repeats_the_order_but_not_the_augmentation():
    fixed = batches(numbered(50), DataConfig(reshuffle=False))
    fresh = batches(numbered(50))
    assert torch.equal(fixed.order(0), fixed.order(7))
    assert torch.equal(fixed.order(0), fresh.order(0))
    assert not torch.equal(fresh.order(0), fresh.order(7))
    assert not torch.equal(fixed.crops(0), fixed.crops(7))


def test_the_seed_decides_the_order():
    orders = [batches(numbered(50), seed=seed).order(0) for seed in (1, 2, 1)]
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])


def test_rebatched_copies_no_image():
    b = batches(numbered(50))
    c = b.rebatched(10)
    assert (b.steps, c.steps, c.batch_size) == (9, 3, 10)
    assert c.x.data_ptr() == b.x.data_ptr()
    assert torch.equal(union(b, 2)[1][:50], union(c, 2)[1][:50])


# -- pixels ----------------------------------------------------------------------------------


def cropped(image: np.ndarray, row: int, column: int, flip: int) -> np.ndarray:
    """One image, the slow and obvious way."""
    c, h, w = image.shape
    out = np.zeros_like(image)
    for k, i, j in np.ndindex(c, h, w):
        y, x = i + row - 4, (w - 1 - j if flip else j) + column - 4
        if 0 <= y < h and 0 <= x < w:
            out[k, i, j] = image[k, y, x]
    return out


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([(1, 4, 6), (3, 8, 8), (2, 5, 3)]))
def test_augmentation_is_that_of_a_loop_over_images(workers, size, shape):
    pictures = numbered(17, *shape)
    b = batches(
        pictures, DataConfig(augment=True), workers=workers, batch_size=size, dtype=torch.float64
    )
    crops = b.crops(3).T.tolist()
    x, y = union(b, 3)
    wanted = [cropped(pictures.train_x[i].numpy(), *crops[i]) for i in y.tolist()]
    torch.testing.assert_close(x, torch.tensor(np.stack(wanted)).double(), rtol=1e-14, atol=1e-13)


def test_augmentation_draws_are_uniform():
    """81 x 2 outcomes; chi-squared with 161 degrees of freedom stays below its 0.1 % tail, 224."""
    row, column, flip = batches(numbered(60_000)).crops(0)
    counts = torch.bincount(row * 18 + column * 2 + flip, minlength=162).double()
    expected = 60_000 / 162
    assert len(counts) == 162
    assert ((counts - expected).square() / expected).sum() < 224


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_union_order_is_a_view(augment, channels_last):
    b = batches(numbered(30, 3, 8, 8), DataConfig(augment=augment), channels_last=channels_last)
    for x, _ in b.epoch(0, range(2)):
        whole = x.transpose(0, 1).flatten(0, 1)
        assert whole.data_ptr() == x.data_ptr()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert whole.is_contiguous(memory_format=layout)


def test_normalisation():
    pictures = load(DataConfig())
    exact = (pictures.test_x.double() / 255 - pictures.mean[0]) / pictures.std[0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.cat([x for x, _ in evaluation_batches(pictures, 100, dtype=dtype)])
        assert x.dtype == dtype
        by = {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {}
        torch.testing.assert_close(x, exact.to(dtype), **by)
    assert torch.equal(  # rounded once, at the end
        next(evaluation_batches(pictures, 9, dtype=torch.bfloat16))[0],
        next(evaluation_batches(pictures, 9))[0].bfloat16(),
    )


def test_evaluation_takes_each_image_once_and_in_order():
    parts = list(evaluation_batches(numbered(10), 2))
    assert torch.cat([y for _, y in parts]).tolist() == list(range(3))
    assert torch.cat([x for x, _ in parts])[:, 0, 0, 0].tolist() == list(range(3))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_pooling_is_the_rounded_mean(size):
    x, k = load(DataConfig()).test_x, 8 // size
    pooled = load(DataConfig(image_size=size)).test_x
    mean = x.double().numpy().reshape(-1, 1, size, k, size, k).mean((3, 5))
    assert np.array_equal(pooled, np.floor(mean + 0.5))


@pytest.mark.parametrize("size", [3, 16, 0])
def test_pooling_to_a_size_that_does_not_divide(size):
    with pytest.raises(DataError, match=f"image_size = {size} must divide the original size, 8x8"):
        load(DataConfig(image_size=size))


# -- digits and subsets ----------------------------------------------------------------------


def rows(x: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in x}


def test_digits():
    pictures = load(DataConfig())
    assert pictures.train_x.shape == (1000, 1, 8, 8)
    assert pictures.test_x.shape == (797, 1, 8, 8)
    assert pictures.train_x.max() == 255
    assert pictures.classes == tuple("0123456789")
    assert len(rows(pictures.train_x) | rows(pictures.test_x)) == 1797  # disjoint; none is double
    x = pictures.train_x.double() / 255
    assert pictures.mean == (round(x.mean().item(), 4),)
    assert pictures.std == (round(x.std(correction=0).item(), 4),)


@settings(max_examples=20)
@given(st.integers(1, 1740), st.integers(1, 40))
def test_subsets_hold_the_classes_in_equal_shares(train, test):
    pictures = load(DataConfig(train_size=train, test_size=None))
    assert len(pictures.train_y) + len(pictures.test_y) == 1797
    counts = torch.bincount(pictures.train_y, minlength=10)
    assert counts.tolist() == [train // 10 + (c < train % 10) for c in range(10)]
    for prefix in (7, 50, 333):  # and so does each prefix
        counts = torch.bincount(pictures.train_y[:prefix], minlength=10)
        assert counts.max() - counts.min() <= 1


def test_subsets_are_nested_and_the_same_each_time():
    small, again, large = (load(DataConfig(train_size=n)) for n in (400, 400, 1000))
    assert small.digest == again.digest != large.digest
    assert rows(small.train_x) < rows(large.train_x)
    assert len(small.test_y) == 1397
    some = load(DataConfig(train_size=400, test_size=50))
    assert torch.equal(some.test_x, small.test_x[:50])


@pytest.mark.parametrize("config", [{"train_size": 1750}, {"test_size": 790}, {"test_size": 0}])
def test_more_images_than_a_class_has(config):
    with pytest.raises(DataError, match=r"images of 10 classes take \d+ of class \d, which has"):
        load(DataConfig(**config))


def test_the_digest_sees_each_pixel_and_label(tree):
    digests = [load(DataConfig("folder", str(tree))).digest]
    for image in sorted(tree.rglob("[0-9].png")):
        pixels = np.array(Image.open(image))
        pixels[-1, -1, -1] ^= 1
        Image.fromarray(pixels).save(image)
        digests.append(load(DataConfig("folder", str(tree))).digest)
    for split in ("train", "test"):  # the last label alone
        moved = max((tree / split / "cat").glob("*.png"))
        moved.rename(tree / split / "dog" / "9.png")
        digests.append(load(DataConfig("folder", str(tree))).digest)
    assert len(set(digests)) == len(digests) == 1 + 8 + 2


# -- folders and archives --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("REGIMES_CACHE", raising=False)
    monkeypatch.setenv("REGIMES_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(path: Path, seed: int, size: tuple[int, ...] = (6, 6, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


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


ARCHIVES = [".tar", ".tar.gz", ".tar.xz", ".zip"]


@pytest.mark.parametrize("prefix", ["", "./", "pets/"])
@pytest.mark.parametrize("suffix", ARCHIVES)
def test_folder_and_archives_are_the_same_data(tree, suffix, prefix):
    folder = load(DataConfig("folder", str(tree)))
    packed = load(DataConfig("folder", str(pack(tree, suffix, prefix))))
    assert packed.digest == folder.digest
    assert packed.classes == ("cat", "dog")
    assert packed.train_y.sort().values.tolist() == [0, 0, 0, 1, 1, 1]
    with Image.open(tree / "train" / "dog" / "2.png") as image:
        assert np.asarray(image).transpose(2, 0, 1).tobytes() in rows(packed.train_x)


def test_the_cache_is_used_and_follows_its_source(tree, cache, monkeypatch):
    first = image_folder.load_tree(tree)
    with monkeypatch.context() as patch:
        patch.setattr(image_folder, "_pixels", lambda *_: pytest.fail("decoded again"))
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
    pictures = load(DataConfig("folder", str(tree)))
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
        load(DataConfig("folder", str(tree)))
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
        load(DataConfig("folder", str(tree)))
    assert not cache.exists()


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(DataError, match="must be an image folder or archive"):
        load(DataConfig("folder", str(tmp_path / "pipe.tar")))


@pytest.mark.parametrize("prefix", ["", "./", "pets/"])
def test_links_lead_to_their_images(tree, prefix, tmp_path):
    """Symbolic and hard ones, and links to links, in a folder and in an archive of it."""
    (tree / "train/cat/7.png").symlink_to("../dog/1.png")
    (tree / "train/cat/8.png").symlink_to("7.png")
    os.link(tree / "train/dog/2.png", tree / "train/dog/9.png")
    (tree / "train/emu").symlink_to("dog")
    folder = load(DataConfig("folder", str(tree)))
    assert torch.bincount(folder.train_y).tolist() == [5, 4, 4]
    packed = load(DataConfig("folder", str(pack(tree, ".tar.gz", prefix))))
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
        load(DataConfig("folder", str(archive)))


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
    packed, folder = (load(DataConfig("folder", str(place))) for place in (archive, tree))
    assert packed.digest == folder.digest


def test_an_image_larger_than_memory_is_not_read(tree, monkeypatch):
    monkeypatch.setattr(tree_of, "LARGEST_IMAGE", 100)
    for place in (tree, *(pack(tree, suffix) for suffix in ARCHIVES)):
        with pytest.raises(DataError, match=r"png is too large for an image: \d+ bytes"):
            load(DataConfig("folder", str(place)))


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
    first = load(DataConfig("folder", str(tree)))
    (file,) = cache.glob("*.npz")
    with np.load(file) as found:
        arrays = {**found, **WRONG[wrong]}
    np.savez(file, **arrays)
    assert load(DataConfig("folder", str(tree))).digest == first.digest
    assert "has other arrays than it should" in caplog.text


def test_bad_paths(tmp_path):
    with pytest.raises(DataError, match=r"needs data\.path"):
        load(DataConfig("folder"))
    with pytest.raises(DataError, match="nowhere does not exist"):
        load(DataConfig("folder", str(tmp_path / "nowhere")))
    for name in ("text.tar.xz", "text.zip", "text.csv"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(DataError, match=f"{name} is truncated or not a readable"):
            load(DataConfig("folder", str(tmp_path / name)))
    with pytest.raises(DataError, match=r"Unknown data set 'digit': did you mean 'digits'\?"):
        sources.read(DataConfig("digit"))


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_an_archive_cut_anywhere_is_an_error_or_whole(tree, suffix, monkeypatch):
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


def test_a_flipped_bit_in_an_xz_archive(tree):
    archive = pack(tree, ".tar.xz")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 4
    archive.write_bytes(content)
    with pytest.raises(DataError, match="truncated or not a readable"):
        load(DataConfig("folder", str(archive)))


@pytest.fixture
def real_archive() -> Path:
    beside = Path(__file__).parents[4] / "shared" / "data" / "cifar10-jpeg.tar.xz"
    path = Path(os.environ.get("REGIMES_TEST_CIFAR", beside))
    if not path.is_file():
        pytest.skip("no CIFAR-10 archive: set REGIMES_TEST_CIFAR to an image-folder archive of it")
    return path


def test_a_truncated_download_of_cifar(real_archive, tmp_path):
    part = tmp_path / "part.tar.xz"
    with open(real_archive, "rb") as whole:
        part.write_bytes(whole.read(300_000))
    with pytest.raises(DataError, match=r"part\.tar\.xz is truncated"):
        load(DataConfig("folder", str(part)))


@pytest.mark.slow
def test_cifar_10_from_its_archive(real_archive):
    """Counts, and the statistics that are printed everywhere (JPEG shifts them little)."""
    pictures = load(DataConfig("folder", str(real_archive)))
    assert torch.bincount(pictures.train_y).tolist() == [5000] * 10
    assert torch.bincount(pictures.test_y).tolist() == [1000] * 10
    assert pictures.train_x.shape == (50_000, 3, 32, 32)
    assert pictures.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-4)
    assert pictures.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=3e-3)


# -- CIFAR in its standard layout ------------------------------------------------------------


def as_python_2_wrote_it(content: dict) -> bytes:
    """Protocol 2, and the dtype's flags as integers, of which some versions of numpy warn."""
    raw = pickle.dumps(content, protocol=2)
    assert raw.count(b"\x89\x88\x87") == ("data" in content)
    return raw.replace(b"\x89\x88\x87", b"K\x00K\x01\x87")


def write_cifar(root: Path, name: str, monkeypatch) -> Path:
    """Ten images in the layout of the original, whose MD5 sums torchvision is told."""
    kind = getattr(sources.torchvision_datasets(), name.upper())
    folder, key = root / kind.base_folder, "labels" if name == "cifar10" else "fine_labels"
    folder.mkdir(parents=True)
    names = [f"class-{i}" for i in range(10 if name == "cifar10" else 100)]
    sums = {}

    def write(file: str, content: dict) -> None:
        raw = as_python_2_wrote_it(content)
        (folder / file).write_bytes(raw)
        sums[file] = hashlib.md5(raw).hexdigest()

    for number, (file, _) in enumerate(kind.train_list + kind.test_list):
        generator = np.random.default_rng(number)
        pixels = generator.integers(0, 256, (10, 3072), dtype=np.uint8)
        write(file, {"data": pixels, key: [(7 * i + number) % len(names) for i in range(10)]})
    write(kind.meta["filename"], {kind.meta["key"]: names})
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(kind, part, [[file, sums[file]] for file, _ in getattr(kind, part)])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums[kind.meta["filename"]]})
    return folder


@pytest.mark.parametrize(("name", "train", "classes"), [("cifar10", 50, 10), ("cifar100", 10, 100)])
def test_cifar_in_its_standard_layout(tmp_path, monkeypatch, name, train, classes):
    folder = write_cifar(tmp_path / "elsewhere", name, monkeypatch)
    pictures = load(DataConfig(name, str(tmp_path / "elsewhere")))
    assert pictures.train_x.shape == (train, 3, 32, 32)
    assert pictures.test_x.shape == (10, 3, 32, 32)
    assert pictures.classes == tuple(f"class-{i}" for i in range(classes))
    assert (pictures.mean, pictures.std) == ((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    original = pickle.loads((folder / ("train" if classes == 100 else "data_batch_1")).read_bytes())
    label = {raw.tobytes(): i for raw, i in zip(original["data"], labels_of(original), strict=True)}
    found = [
        (label[x.numpy().tobytes()], int(y))
        for x, y in zip(pictures.train_x, pictures.train_y, strict=True)
        if x.numpy().tobytes() in label
    ]
    assert len(found) == 10
    assert all(a == b for a, b in found)  # each image kept its label and its channel order


def labels_of(content: dict) -> list[int]:
    return content.get("labels") or content["fine_labels"]


def test_cifar_missing_or_corrupt(tmp_path, monkeypatch, cache):
    advice = r"set data\.download = true, or .* data\.name = \"folder\""
    with pytest.raises(DataError, match=f"cifar100 is missing: .*cifar-100-python; {advice}"):
        load(DataConfig("cifar100"))
    folder = write_cifar(cache, "cifar100", monkeypatch)
    assert len(load(DataConfig("cifar100")).train_y) == 10  # the default root
    file = folder / "train"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"cifar100 is corrupt or incomplete in .*; {advice}"):
        load(DataConfig("cifar100"))


@pytest.fixture
def server(tmp_path):
    """A folder and the address at which this machine serves it."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


def test_cifar_is_downloaded_and_verified(tmp_path, monkeypatch, server):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = write_cifar(tmp_path / "original", "cifar100", monkeypatch)
    archive = server[0] / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    kind = sources.torchvision_datasets().CIFAR100
    monkeypatch.setattr(kind, "url", f"{server[1]}/{archive.name}")
    config = DataConfig("cifar100", download=True)
    with pytest.raises(DataError, match="cifar100 could not be downloaded to"):  # its MD5 differs
        load(config)
    monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    with ThreadPoolExecutor(3) as pool:  # the processes of a run
        assert {load_.digest for load_ in pool.map(load, [config] * 3)} == {load(config).digest}
    archive.unlink()
    assert len(load(config).train_y) == 10  # it is there: no second download


def test_doctor_rows(tree, cache, tmp_path):
    assert [(r.name, r.available) for r in sources.find()] == [
        ("digits", True),
        ("cifar10", False),
        ("cifar100", False),
        ("wikitext-2", False),
    ]
    image_folder.load_tree(tree)
    (cache / "cifar-100-python").mkdir()
    found = {(r.name, r.available): r.where for r in sources.find()}
    assert found["cifar100", True] == str(cache / "cifar-100-python")
    assert Path(found["folder", True]).name.startswith("pets-")
    assert not any(r.available for r in sources.find(tmp_path / "empty") if r.name != "digits")
