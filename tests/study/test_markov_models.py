"""Markov models of a text (oracles: dictionaries of bytes, sums of probabilities, a chain of known
entropy, the committed records)."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.common import markov
from analysis.findings.sources import REFERENCE
from regimes.base.config import DataConfig
from regimes.data import tokens


def by_hand(train: bytes, test: bytes, order: int, sequence: int) -> list[float]:
    """Witten and Bell's formula, byte by byte."""
    counts = Counter(train[i : i + n + 1] for n in range(order + 1) for i in range(len(train) - n))
    totals: Counter[bytes] = Counter()
    kinds: Counter[bytes] = Counter()
    for gram, count in counts.items():
        totals[gram[:-1]] += count
        kinds[gram[:-1]] += 1
    found = []
    for target in range(1, len(test)):
        p, within = 1 / 256, (target - 1) % sequence + 1
        for n in range(min(order, within) + 1):
            before = test[target - n : target]
            if before in totals:
                seen = counts[before + test[target : target + 1]]
                p = (seen + kinds[before] * p) / (totals[before] + kinds[before])
        found.append(p)
    return found


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("letters", [2, 5, 256])
@pytest.mark.parametrize(("order", "sequence"), [(0, 7), (1, 1), (2, 7), (3, 64), (4, 5)])
def test_a_counted_model_is_the_formula_byte_by_byte(
    letters: int, order: int, sequence: int
) -> None:
    draws = np.random.default_rng([letters, order])
    train, test = (bytes(draws.integers(0, letters, n).tolist()) for n in (300, 90))
    got = markov.probabilities(as_bytes(train), as_bytes(test), order, sequence)
    assert got.tolist() == pytest.approx(by_hand(train, test, order, sequence), rel=1e-12)


def test_the_order_of_a_chain_reaches_its_entropy_and_a_lower_one_does_not() -> None:
    """A letter is the sum of the two before it and of a coin, modulo 4: 1 bit; from the one letter
    before the first of a window, 2 bits."""
    letters, sequence = [0, 0], 64
    for coin in np.random.default_rng(0).integers(0, 2, 2**17).tolist():
        letters.append((letters[-2] + letters[-1] + coin) % 4)
    text, floor = as_bytes(bytes(letters)), (2 + (sequence - 1) * 1) / sequence
    train, test = text[: -(2**13) - 1], text[-(2**13) - 1 :]
    bits = {k: markov.bits_per_byte(train, test, k, sequence) for k in (1, 2)}
    assert floor - 0.03 < bits[2] < floor + 0.05
    assert bits[1] > bits[2] + 0.5


def first(archive: Path) -> Any:
    """The header of an archive's first run, as `markov` reads it of a record."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.endswith("run.json"):
                return SimpleNamespace(header=json.loads(tar.extractfile(member).read()))  # type: ignore[union-attr]
    raise AssertionError(archive)


def test_the_committed_texts_are_those_of_the_records() -> None:
    """Every text of bits per byte has its models."""
    kept = json.loads(markov.FILE.read_text(encoding="utf-8"))
    digests = set()
    for path in REFERENCE.glob("*.tar.xz"):
        run = first(path)
        if run.header["metric"] == "bits per byte":
            counted, about = markov.of(run), run.header["data"]
            assert counted is not None, path.name
            assert (counted.train, counted.test) == (about["train"], about["test"])
            assert counted.sequence == run.header["config"]["data"]["sequence"]
            assert counted.bits["3"] < counted.bits["2"] < 8
            digests.add(about["digest"])
        else:
            assert markov.of(run) is None
            assert markov.caption(run) == ""
    assert digests == kept.keys()


def test_the_text_of_this_python_is_counted_again() -> None:
    kept = json.loads(markov.FILE.read_text(encoding="utf-8"))
    config = DataConfig(
        name="stdlib", train_size=1228801, test_size=16385, sequence=64, windows="contiguous"
    )
    corpus = tokens.load_tokens(config)
    if corpus.digest not in kept:
        pytest.skip("the standard library of this Python is another text")
    for order in markov.ORDERS:
        bits = markov.bits_per_byte(corpus.train.numpy(), corpus.test.numpy(), order, 64)
        assert bits == pytest.approx(kept[corpus.digest]["bits"][str(order)], abs=1e-5)
