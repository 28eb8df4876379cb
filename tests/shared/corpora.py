"""Small texts as the files of WikiText-2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

TRAIN = ["", " = A title = ", " the cat saw the <unk> . ", "", " the cat sat . "]
TEST = [" the dog sat . ", ""]
WORDS = ["cat", "dog", "bird", "the", "a", "saw", "heard", ".", ",", "and"]


def write(folder: Path, train: Sequence[str] = TRAIN, test: Sequence[str] = TEST) -> Path:
    """The standard files with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in (("train", train), ("valid", test), ("test", test)):
        (folder / f"wiki.{split}.tokens").write_text("".join(f"{x}\n" for x in lines), "utf-8")
    return folder


def sentences(count: int, seed: int) -> list[str]:
    """Sentences of a random walk over ten words: each word has two that may follow."""
    generator = torch.Generator().manual_seed(seed)
    drawn, word = [], 0
    for _ in range(count):
        steps = torch.randint(0, 2, (7,), generator=generator).tolist()
        walk = [word := (3 * word + 1 + step) % 10 for step in steps]
        drawn.append(" ".join(WORDS[i] for i in walk))
    return drawn


def random_walk(folder: Path) -> Path:
    """800 training and 201 test tokens in 11 words."""
    return write(folder, sentences(100, seed=0), [*sentences(25, seed=1), ""])
