"""Reading WikiText-2: numbers against a count by hand, the download from a server of the test's
own, and what is said of files that cannot be used."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from corpora import TRAIN, write
from hypothesis import given
from hypothesis import strategies as st

from regimes.base.config import DataConfig
from regimes.base.errors import DataError
from regimes.data import wikitext


def load(folder: Path, **settings: object) -> wikitext.Corpus:
    return wikitext.load_wikitext(DataConfig(name="wikitext-2", path=str(folder), **settings))  # type: ignore[arg-type]


def spelt(text: wikitext.Corpus, ids: torch.Tensor) -> str:
    return " ".join(text.words[i] for i in ids.tolist())


# -- closed form -----------------------------------------------------------------------------


def test_every_line_ends_in_eos_and_unknown_words_are_unk(tmp_path: Path) -> None:
    text = load(write(tmp_path))
    assert spelt(text, text.train) == (
        "<eos> = A title = <eos> the cat saw the <unk> . <eos> <eos> the cat sat . <eos>"
    )
    assert spelt(text, text.test) == "the <unk> sat . <eos> <eos>"
    assert text.words == ("<unk>", "<eos>", "the", "=", "cat", ".", "A", "title", "saw", "sat")


def test_the_most_frequent_words_are_kept(tmp_path: Path) -> None:
    text = load(write(tmp_path), vocabulary=5)
    assert text.words == ("<unk>", "<eos>", "the", "=", "cat")
    assert spelt(text, text.train[6:13]) == "the cat <unk> the <unk> <unk> <eos>"


@given(st.lists(st.sampled_from("abcdef"), min_size=1), st.integers(3, 9))
def test_a_vocabulary_covers_as_much_as_its_size_can(words: list[str], size: int) -> None:
    kinds = len(set(words))
    if size > kinds + 2:
        with pytest.raises(DataError, match=f"expected 3 to {kinds + 2}, "):
            wikitext.count_words(words, size)
        return
    kept = wikitext.count_words(words, size)
    assert len(kept) == len(set(kept)) == size
    counts = sorted((words.count(w) for w in set(words)), reverse=True)
    assert sum(words.count(w) for w in kept) == sum(counts[: size - 2])


def test_the_vocabulary_is_that_of_the_whole_training_file(tmp_path: Path) -> None:
    whole, part = load(write(tmp_path)), load(tmp_path, train_size=4, test_size=2)
    assert part.words == whole.words
    assert torch.equal(part.train, whole.train[:4])
    assert torch.equal(part.test, whole.test[:2])


def test_the_digest_tells_texts_and_vocabularies_apart(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    write(tmp_path / "c", [x.replace("cat", "rat") for x in TRAIN])  # other words, same numbers
    assert torch.equal(load(tmp_path / "a").train, load(tmp_path / "c").train)
    digests = [load(tmp_path / x).digest for x in "abc"]
    digests += [load(tmp_path / "a", **{k: 5}).digest for k in ("train_size", "test_size")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_files_are_found_in_the_folder_and_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = load(write(tmp_path / "wikitext-2"))
    assert load(tmp_path).digest == inner.digest
    monkeypatch.setenv("REGIMES_DATA", str(tmp_path))
    assert wikitext.load_wikitext(DataConfig(name="wikitext-2")).digest == inner.digest


# -- download --------------------------------------------------------------------------------


class Server(SimpleHTTPRequestHandler):
    """Refuses Python's own name, as the real one does; and prints nothing."""

    def do_GET(self) -> None:
        if "Python-urllib" in self.headers["User-Agent"]:
            self.send_error(403)
        else:
            super().do_GET()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The archive, served from this machine."""
    source, file = write(tmp_path / "source"), tmp_path / "wikitext-2-v1.zip"
    with zipfile.ZipFile(file, "w") as z:
        for member in source.iterdir():
            z.write(member, f"wikitext-2/{member.name}")
    monkeypatch.setattr(wikitext, "MD5", hashlib.md5(file.read_bytes()).hexdigest())
    handler = partial(Server, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/{file.name}"
        monkeypatch.setattr(wikitext, "ARCHIVE", url)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield file
        server.shutdown()
        thread.join()


def test_download_once(archive: Path, tmp_path: Path) -> None:
    first = load(tmp_path / "cache", download=True)
    assert first.digest == load(tmp_path / "source").digest
    names = {f"wiki.{split}.tokens" for split in ("train", "valid", "test")}
    assert {f.name for f in (tmp_path / "cache/wikitext-2").glob("[!.]*")} == names
    archive.unlink()
    assert load(tmp_path / "cache", download=True).digest == first.digest


def test_download_completes_a_folder_that_lacks_a_file(archive: Path, tmp_path: Path) -> None:
    (write(tmp_path / "cache/wikitext-2") / "wiki.test.tokens").unlink()
    assert load(tmp_path / "cache", download=True).digest == load(tmp_path / "source").digest


def test_a_changed_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(DataError, match="could not be downloaded"):
        load(tmp_path / "cache", download=True)
    assert not list((tmp_path / "cache/wikitext-2").glob("wiki*"))


# -- bad input -------------------------------------------------------------------------------


def sentence(folder: Path, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_words_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    train = [line.replace("<unk>", "bat") for line in TRAIN]
    said = sentence(write(tmp_path, train))
    assert "wiki.test.tokens has 1 words that" in said
    assert "the first is 'dog', and the vocabulary has no <unk> to replace them" in said
    assert "set data.vocabulary to 11 or fewer" in said
    text = load(tmp_path, vocabulary=11)  # the advice
    assert "bat" in text.words
    assert spelt(text, text.test) == "the <unk> sat . <eos> <eos>"
    without = load(write(tmp_path, train, train))
    assert "<unk>" not in without.words


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "nowhere/wikitext-2 does not exist; set data.download" in sentence(tmp_path / "nowhere")
    for lines in ([], ["", "  "]):
        assert "wiki.train.tokens is empty" in sentence(write(tmp_path, train=lines))
    (write(tmp_path) / "wiki.test.tokens").write_bytes(b"\xff\xfe\x00")
    assert "wiki.test.tokens cannot be read as a text in UTF-8" in sentence(tmp_path)
    (tmp_path / "wiki.test.tokens").unlink()
    assert f"{tmp_path} lacks wiki.test.tokens; set data.download" in sentence(tmp_path)


def test_sizes_that_cannot_be_had(tmp_path: Path) -> None:
    write(tmp_path)
    given = {"vocabulary": ((2, 11), "3 to 10"), "train_size": ((20,), "2 to 19")}
    for name, (sizes, room) in {**given, "test_size": ((1,), "2 to 6")}.items():
        for size in sizes:
            assert f"data.{name} = {size}: expected {room}, " in sentence(tmp_path, **{name: size})
