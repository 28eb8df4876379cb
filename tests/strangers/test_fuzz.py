"""A few examples of `fuzz.py`, the same each time."""

from __future__ import annotations

from collections.abc import Iterator

import fuzz
import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def group_ends() -> Iterator[None]:
    """The group that the hook's examples share would be there in later tests of this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "examples"), [("configurations", 40), ("records", 60), ("folders", 40), ("hook", 30)]
)
def test_whatever_a_stranger_writes_is_one_sentence(name: str, examples: int) -> None:
    before = fuzz.seen.copy()
    fuzz.tried(name, examples, 0)
    grown = fuzz.seen - before
    assert grown[f"{name} fine"] > 0
    assert grown[f"{name} refused"] > examples / 4


def test_a_second_round_tries_as_much_as_the_first() -> None:
    counts = []
    for number in (1, 2):
        before = fuzz.seen.copy()
        fuzz.tried("records", 5, number)
        counts.append((fuzz.seen - before).total())
    assert counts[0] == counts[1] > 0
