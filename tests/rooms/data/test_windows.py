"""Windows of a text, against plain lists: complete, the same for any workers, from any step on; and
the trainer's equivalences on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from runs import same_text

import regimes
from regimes.base.config import RunConfig, from_dict, override
from regimes.base.errors import ConfigError, DataError
from regimes.base.reduction import CarryingLoss
from regimes.data import load_task
from regimes.data.task import Batches, Task
from regimes.data.windows import TokenWindows, cover_text
from regimes.training import build

torch.set_num_threads(1)
TEXT = bytes(range(32, 126)) * 12  # each byte tells its place, nearly
LAYOUTS = ["contiguous", "sampled"]
places = st.integers(2, 200), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)


def windows(
    n: int, sequence: int, layout: Any, workers: int = 2, batch: int = 2, **options: Any
) -> TokenWindows:
    """Of a text in which each token tells its place."""
    ids = torch.arange(n, dtype=torch.int32)
    return TokenWindows(
        ids, sequence, layout, **{"seed": 3, "workers": workers, "batch_size": batch, **options}
    )


def union(batches: TokenWindows, epoch: int = 0, start: int = 0) -> torch.Tensor:
    """All windows of an epoch in global order."""
    steps = list(batches.epoch(epoch, range(batches.workers), start))
    assert all(torch.equal(y, x + 1) for x, y in steps)
    assert all(x.dtype == torch.int64 for x, _ in steps)
    return torch.cat([x.transpose(0, 1).flatten(0, 1) for x, _ in steps])


# -- against plain lists -------------------------------------------------------------------------


@settings(max_examples=30)
@given(*places)
def test_contiguous_windows_are_all_of_the_text_once(
    n: int, workers: int, batch: int, sequence: int
) -> None:
    assume(n > sequence)
    batches = windows(n, sequence, "contiguous", workers, batch)
    count = (n - 1) // sequence
    found = union(batches)
    firsts = found[:, 0].tolist()
    assert sorted(firsts[:count]) == list(range(0, count * sequence, sequence))
    assert torch.equal(found - found[:, :1], torch.arange(sequence).expand_as(found))
    assert firsts[count:] == (firsts[:count] * workers)[: len(firsts) - count]  # filled up
    assert len(firsts) == -(-count // workers) * workers
    assert len(batches) == -(-count // (workers * batch))
    assert firsts[:count] == (windows(n, sequence, "contiguous", 1, 1).offsets(0)).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=15)
@given(*places, st.data())
def test_the_same_windows_for_any_workers_processes_batch_and_start(
    layout: str, n: int, workers: int, batch: int, sequence: int, draw: st.DataObject
) -> None:
    assume(n > sequence)
    batches, start = windows(n, sequence, layout, workers, batch), draw.draw(st.integers(0, 3))
    whole = list(batches.epoch(1, range(workers)))
    alone = union(windows(n, sequence, layout, 1, 1), 1)
    assert torch.equal(union(batches, 1)[: len(alone)], alone)
    hosted = draw.draw(st.lists(st.integers(0, workers - 1), min_size=1, unique=True))
    part = list(batches.epoch(1, hosted, start))
    assert len(part) == max(0, len(whole) - start)
    for (x, y), (mine, targets) in zip(whole[start:], part, strict=True):
        assert torch.equal(mine, x[hosted])
        assert torch.equal(targets, y[hosted])
    again = batches.rebatched(batch + 1)
    assert torch.equal(union(again, 1)[: len(alone)], alone)


def test_sampled_windows_begin_anywhere_equally_often() -> None:
    batches = windows(21, 4, "sampled", 1, 1)
    assert len(batches) == 5  # as many as contiguous ones
    starts = Counter(f for e in range(3400) for f in batches.offsets(e).tolist())
    assert set(starts) == set(range(17))  # the last target is the last token
    assert all(1000 * 0.85 < count < 1000 * 1.15 for count in starts.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epochs_and_seeds_differ_and_repeat(layout: str) -> None:
    found = union(windows(200, 4, layout), 1)
    assert torch.equal(found, union(windows(200, 4, layout), 1))
    assert not torch.equal(found, union(windows(200, 4, layout), 2))
    assert not torch.equal(found, union(windows(200, 4, layout, seed=4), 1))
    fixed = windows(200, 4, layout, reshuffle=False)
    assert torch.equal(union(fixed, 1), union(fixed, 2))


def test_the_union_of_a_step_is_a_view() -> None:
    for x, _ in windows(200, 4, "sampled", 3, 2).epoch(0, range(3)):
        assert x.transpose(0, 1).flatten(0, 1).data_ptr() == x.data_ptr()


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 5))
def test_an_evaluation_has_every_token_as_a_target_once(n: int, sequence: int, batch: int) -> None:
    pairs = list(cover_text(torch.arange(n, dtype=torch.int32), sequence, batch))
    assert torch.cat([y.flatten() for _, y in pairs]).tolist() == list(range(1, n))
    assert all(torch.equal(y, x + 1) for x, y in pairs)
    assert all(x.shape[1] == sequence and len(x) <= batch for x, _ in pairs[:-1])


# -- the loop ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,128 bytes: 1,015 to train on, 56 for validation, 57 to test on."""
    path = tmp_path_factory.mktemp("windows") / "text"
    path.write_bytes(TEXT)
    return path


def config(file: Path, *settings: str) -> RunConfig:
    """13 steps of 4 x 2 windows of 10 bytes, a tiny Transformer in float64."""
    base = from_dict(
        RunConfig,
        {
            "epochs": 3,
            "workers": 4,
            "batch_size": 2,
            "dtype": "float64",
            "data": {"name": "text", "path": str(file), "sequence": 10},
            "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 1},
            "optimizer": {"lr": 0.5, "clip": 1.0},
            "levels": {"low": 2, "high": 1},
            "policy": {"name": "accordion", "interval": 1},
        },
    )
    return override(base, list(settings))


def test_the_protocols_are_kept(file: Path) -> None:
    c = config(file)
    task = load_task(c)
    assert isinstance(task, Task)
    assert not isinstance(task.loss, CarryingLoss)
    assert task.splits
    assert task.size == 101
    assert isinstance(task.batches(c, torch.device("cpu"), torch.float64), Batches)
    streams = load_task(config(file, "data.windows=streams"))
    assert isinstance(streams.loss, CarryingLoss)
    assert not streams.splits


def test_a_large_batch_is_accumulated(file: Path, tmp_path: Path) -> None:
    """Two micro-batches of 2 windows are one batch of 4."""
    levels = "batch_levels={low=2, high=4}"
    policy = "batch_policy={name='static', level='high'}"
    cut = config(
        file,
        levels,
        policy,
        "optimizer.scale_with_batch=false",
        "optimizer.clip=none",
        "optimizer.lr=0.02",
    )
    whole = replace(cut, batch_size=4, batch_levels={}, batch_policy=None)
    regimes.run(cut, tmp_path / "cut")
    regimes.run(whole, tmp_path / "whole")
    same_text(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        (["data.sequence=1020"], DataError, "1015 tokens has no window of data.sequence = 1020"),
        (["batch_size=30"], DataError, "101 training samples are too few for one step of 4"),
        (["data.windows=rolling"], ConfigError, "data.windows"),
        (["data.vocabulary=300"], ConfigError, "data.vocabulary = 300: expected none, or data.tok"),
        (["data.tokenizer=bpe", "data.vocabulary=256"], ConfigError, "256: expected more than 256"),
        (["data.validation_size=57"], DataError, "validation_size = 57: expected 2 to 56, the tok"),
        (["data.name=stdlib"], ConfigError, "data.path = "),
        (["data.name=texts"], DataError, "did you mean 'text'?"),
    ],
)
def test_bad_input_is_one_sentence(
    changes: list[str], error: type[Exception], sentence: str, file: Path
) -> None:
    with pytest.raises(error) as caught:
        build.prepare_run(config(file, *changes))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
