"""Texts as bytes and tokens: the parts against the rule written out, bits per byte against closed
forms, byte pairs against what they spell."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import write
from hypothesis import given
from hypothesis import strategies as st

import regimes
from regimes.base.config import DataConfig, RunConfig, from_dict
from regimes.base.errors import ConfigError, DataError
from regimes.data import texts, tokens
from regimes.data.language import TextTask
from regimes.data.texts import Parts
from regimes.plotting import groups
from regimes.plotting.schedules import tabulate_schedules
from regimes.plotting.text import metric_text

torch.set_num_threads(1)
FILES = {f"f{i}/{i}.txt": f"the file number {i}\n".encode() * (i + 1) for i in range(9)}


def read(path: Path | None, name: str = "text", **settings: Any) -> Parts:
    return texts.read_text(DataConfig(name=name, path=path and str(path), **settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine files to read, and some that are left out."""
    out = {
        "f0/.hidden": b"x",
        ".git/config": b"x",
        "f1/__pycache__/a": b"x",
        "empty": b"",
        "picture": b"ab\0c",
    }
    for name, content in (FILES | out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "f0/0.txt")
    return tmp_path


# -- the parts -----------------------------------------------------------------------------------


def test_a_folder_is_split_by_file_in_the_order_of_hashes(folder: Path) -> None:
    parts = read(folder)
    order = sorted(FILES, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    whole = b"".join(FILES[name] for name in order)
    assert parts.test + parts.validation + parts.train == whole
    ends = [sum(len(FILES[name]) for name in order[: n + 1]) for n in range(9)]
    least = ends[-1] / 20
    first = next(end for end in ends if end >= least)
    second = next(end for end in ends if end >= first + least)
    assert (len(parts.test), len(parts.test + parts.validation)) == (first, second)
    assert parts.facts == {"files": 9}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_folder_of_fewer_than_three_files_is_one_text(number: int, tmp_path: Path) -> None:
    contents = [*FILES.values()][5 : 5 + number]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.txt").write_bytes(content)
    parts = read(tmp_path)
    assert parts.facts.get("files") == (number if number >= 3 else None)


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=3, max_size=9))
def test_three_files_or_more_give_every_part_one(contents: list[bytes]) -> None:
    parts = texts.by_file(contents, {})
    assert parts.test + parts.validation + parts.train == b"".join(contents)
    assert all((parts.train, parts.validation, parts.test))


@given(st.text(alphabet="aä€😀\n", max_size=200))
def test_one_text_is_split_by_position_and_never_inside_a_character(text: str) -> None:
    content = text.encode()
    parts = texts.by_position(content)
    pieces = [parts.train, parts.validation, parts.test]
    assert b"".join(pieces) == content
    assert "".join(piece.decode() for piece in pieces) == text
    assert abs(len(parts.train) - 0.9 * len(content)) < 4
    assert abs(len(parts.validation) - 0.05 * len(content)) < 5


def test_a_file_of_any_bytes_is_read(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    (tmp_path / "f").write_bytes(content)
    parts = read(tmp_path / "f")
    assert parts.train + parts.validation + parts.test == content


def test_the_files_of_wikitext_are_the_parts(tmp_path: Path) -> None:
    write(tmp_path, ["the cat"], ["a dog"])
    (tmp_path / "wiki.valid.tokens").write_text("a bird\n")
    parts = read(tmp_path)
    assert (parts.train, parts.validation, parts.test) == (b"the cat\n", b"a bird\n", b"a dog\n")


def test_the_standard_library_has_no_tests_and_no_tables_of_characters() -> None:
    root = Path(texts.sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix() for path in texts._sources(root)}
    assert {"os.py", "json/decoder.py", "unittest/case.py"} <= files
    for part in ("test", "tests", "encodings", "pydoc_data", "site-packages", "idle_test"):
        assert not [name for name in files if part in name.split("/")[:-1]]
    parts = read(None, "stdlib")
    sizes = [len(part) for part in (parts.train, parts.validation, parts.test)]
    assert 7_500_000 < sum(sizes) <= 8_000_000
    assert min(sizes) >= sum(sizes) / 20
    assert parts.facts["python"] == ".".join(map(str, sys.version_info[:3]))
    everything = b"".join(path.read_bytes() for path in texts._sources(root))
    assert parts.test[:500] in everything


def test_missing_texts_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_bytes(b"abcde")
    for path, sentence in (
        (None, 'data.name = "text" needs data.path'),
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "empty", "has no text"),
    ):
        with pytest.raises(DataError, match=sentence):
            read(path)
    with pytest.raises(DataError, match="the test part of the text has 1 tokens, expected at"):
        load(tmp_path / "short")


def test_a_folder_that_cannot_be_read_is_not_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("f3"):
            raise PermissionError(13, "Permission denied", path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="f3 cannot be read: Permission denied"):
        read(folder)


# -- tokens and the metric -----------------------------------------------------------------------


def load(path: Path, **settings: Any) -> Any:
    return tokens.load_tokens(DataConfig(name="text", path=str(path), **settings))


def text_task(**data: Any) -> TextTask:
    return TextTask(from_dict(RunConfig, {"data": data}))


def test_bytes_are_their_own_numbers(folder: Path) -> None:
    corpus, parts = load(folder, validation_size=30), read(folder)
    assert bytes(corpus.train.tolist()) == parts.train
    assert bytes(corpus.test.tolist()) == parts.test
    assert bytes(corpus.validation.tolist()) == parts.validation[:30]
    assert corpus.facts["bytes"] == {
        "train": len(parts.train),
        "test": len(parts.test),
        "validation": 30,
    }
    assert load(folder).train.equal(corpus.train)
    assert load(folder).digest != corpus.digest


@pytest.mark.parametrize("layout", ["streams", "contiguous"])
def test_a_uniform_model_has_eight_bits_per_byte(layout: str, folder: Path) -> None:
    task = text_task(name="text", path=str(folder), sequence=5, windows=layout)
    model = task.build(from_dict(RunConfig, {"model": {"name": "gpt", "width": 8, "depth": 1}}))
    for parameter in model.parameters():
        parameter.data.zero_()
    loss, bits = task.evaluate(model, torch.device("cpu"), torch.float32)
    assert (loss, bits) == pytest.approx((math.log(256), 8.0), rel=1e-6)
    assert task.metric == "bits per byte"
    assert task.extra_metrics(loss) == pytest.approx({"perplexity": 256}, rel=1e-5)


def test_byte_pairs_spell_the_text_and_are_learnt_from_the_training_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text")
    monkeypatch.setenv("REGIMES_CACHE", str(tmp_path / "cache"))
    write(tmp_path, ["the cät saw the cät\n"] * 500, ["zzzz the zzzz"] * 40)
    chosen: dict[str, Any] = {"tokenizer": "bpe", "vocabulary": 262}
    corpus, parts = load(tmp_path, **chosen), read(tmp_path)
    assert len(corpus.words) == len(set(corpus.words)) == 262
    assert not [word for word in corpus.words if word.count("z") > 1]
    for split in ("train", "test"):
        ids = getattr(corpus, split).long()
        assert corpus.lengths[ids].sum() == len(getattr(parts, split))
    assert "".join(corpus.words[i] for i in corpus.test[:9].tolist()).startswith("zzzzĠthe")
    assert len(corpus.train) < 0.6 * len(parts.train)
    assert load(tmp_path, **chosen, train_size=50).words == corpus.words
    monkeypatch.setattr(tokens, "_train_tokenizer", None)  # what follows comes from the cache
    again = load(tmp_path, **chosen)
    assert (again.digest, again.words) == (corpus.digest, corpus.words)
    uniform = text_task(name="text", path=str(tmp_path), sequence=5, **chosen)
    model = uniform.build(from_dict(RunConfig, {"model": {"name": "gpt", "depth": 1}}))
    for parameter in model.parameters():
        parameter.data.zero_()
    targets = corpus.test[1:].long()
    expected = len(targets) * math.log2(262) / int(corpus.lengths[targets].sum())
    found = uniform.evaluate(model, torch.device("cpu"), torch.float32)
    assert found == pytest.approx((math.log(262), expected), rel=1e-6)


def test_byte_pairs_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGIMES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "f").write_bytes(b"\xff\xfe" * 50)
    with pytest.raises(DataError, match="the train part of the text is not in UTF-8"):
        load(tmp_path / "f", tokenizer="bpe")
    (tmp_path / "f").write_bytes(b"ab" * 50)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ConfigError, match="needs the package tokenizers: pip install"):
            load(tmp_path / "f", tokenizer="bpe")
    pytest.importorskip("tokenizers", reason="needs the extra text")
    with pytest.raises(DataError, match="vocabulary = 1024: expected 257 to 2"):
        load(tmp_path / "f", tokenizer="bpe")


def test_a_record_has_bits_per_byte_and_the_perplexity_of_a_token(
    folder: Path, tmp_path: Path
) -> None:
    table = {
        "epochs": 1,
        "workers": 2,
        "batch_size": 2,
        "policy": {"name": "static"},
        "data": {"name": "text", "path": str(folder), "sequence": 9},
        "model": {"name": "gpt", "width": 8, "depth": 1},
    }
    record = regimes.run(from_dict(RunConfig, table), tmp_path / "run")
    row = record.epochs.iloc[-1]
    assert record.header["metric"] == "bits per byte"
    assert row["metric"] == pytest.approx(row["test_loss"] / math.log(2))
    assert row["perplexity"] == pytest.approx(math.exp(row["test_loss"]))
    assert record.header["data"]["tokenizer"] == "bytes"
    assert record.header["data"]["files"] == 9
    shown = tabulate_schedules([record])
    assert shown.table(("metric",)).heads == ("schedule", "bits per byte")
    assert shown.table(("metric",)).rows == [(record.name, f"{row['metric']:.3f}")]
    assert groups.tested_by(record).lower
    assert metric_text(record.header, row["metric"]) == ("bits/byte", f"{row['metric']:.4g}")
