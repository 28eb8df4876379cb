"""CIFAR in its standard layout: read, verified, downloaded from a server of the test's own."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from regimes.base.config import DataConfig
from regimes.base.errors import DataError
from regimes.data import image_folder, sources
from regimes.data.images import load_images

pytestmark = pytest.mark.usefixtures("cache")


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
    pictures = load_images(DataConfig(name, str(tmp_path / "elsewhere")))
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
        load_images(DataConfig("cifar100"))
    folder = write_cifar(cache, "cifar100", monkeypatch)
    assert len(load_images(DataConfig("cifar100")).train_y) == 10  # the default root
    file = folder / "train"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"cifar100 is corrupt or incomplete in .*; {advice}"):
        load_images(DataConfig("cifar100"))


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
        load_images(config)
    monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    with ThreadPoolExecutor(3) as pool:  # the processes of a run
        assert {load_.digest for load_ in pool.map(load_images, [config] * 3)} == {
            load_images(config).digest
        }
    archive.unlink()
    assert len(load_images(config).train_y) == 10  # it is there: no second download


def test_doctor_rows(tree, cache, tmp_path):
    assert [(r.name, r.available) for r in sources.find_data()] == [
        ("digits", True),
        ("cifar10", False),
        ("cifar100", False),
        ("wikitext-2", False),
    ]
    image_folder.load_tree(tree)
    (cache / "cifar-100-python").mkdir()
    found = {(r.name, r.available): r.where for r in sources.find_data()}
    assert found["cifar100", True] == str(cache / "cifar-100-python")
    assert Path(found["folder", True]).name.startswith("pets-")
    assert not any(r.available for r in sources.find_data(tmp_path / "empty") if r.name != "digits")
