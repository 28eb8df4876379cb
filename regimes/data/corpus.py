"""A text in memory, as the numbers of its tokens: what every source of texts ends in.

Stands under the sources (`regimes.data.wikitext`, `regimes.data.texts`); `regimes.data.language`
makes batches of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from regimes.errors import DataError

if TYPE_CHECKING:
    from regimes.config import DataConfig

Split = Literal["train", "test", "validation"]


@dataclass(frozen=True)
class Corpus:
    """A text in memory.

    Attributes:
        train, test, validation: token numbers, of any integer type; no validation part is None.
        words: number -> token, as it is shown.
        digest: SHA-256 of all the above; equal on all processes, or they hold different data.
        lengths: the bytes of each token, which give bits per byte; None for words, which were cut
            out of the text.
        facts: what the record's header says of the source besides.
    """

    train: Integer[Tensor, " train"]
    test: Integer[Tensor, " test"]
    words: tuple[str, ...]
    digest: str
    validation: Integer[Tensor, " validation"] | None = None
    lengths: Int64[Tensor, " words"] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def tested_on(self, device: torch.device) -> Corpus:
        """The same, with what is tested on already there."""
        held = {name: getattr(self, name) for name in ("test", "validation", "lengths")}
        there = {name: part.to(device) for name, part in held.items() if part is not None}
        return replace(self, **there)


def make(
    parts: Mapping[Split, Integer[Tensor, " n"]],
    words: Sequence[str],
    config: DataConfig,
    lengths: Int64[Tensor, " words"] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Corpus:
    """The corpus of whole parts, each cut to its size in tokens; the validation part is left out
    unless ``data.validation_size`` asks for it.

    Raises:
        DataError: a part is smaller than its size, or than two tokens.
    """
    sizes: dict[Split, int | None] = {"train": config.train_size, "test": config.test_size}
    if config.validation_size is not None:
        sizes["validation"] = config.validation_size
    kept = {split: _first(parts[split], size, split) for split, size in sizes.items()}
    digest = hashlib.sha256(repr(tuple(words)).encode())
    for part in kept.values():
        digest.update(repr(len(part)).encode())
        digest.update(part.numpy().data)
    return Corpus(
        kept["train"],
        kept["test"],
        tuple(words),
        digest.hexdigest(),
        kept.get("validation"),
        lengths,
        dict(facts or {}),
    )


def _first(ids: Integer[Tensor, " n"], size: int | None, split: Split) -> Integer[Tensor, " m"]:
    if len(ids) < 2:
        raise DataError(f"the {split} part of the text has {len(ids)} tokens, expected at least 2.")
    if size is not None and not 2 <= size <= len(ids):
        raise DataError(
            f"data.{split}_size = {size}: expected 2 to {len(ids)}, the tokens of the {split} part "
            "of the text."
        )
    return ids[:size]
