"""A text in memory, as token numbers: the result of `wikitext` and `tokens`, read by `language`."""

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
    """
    Attributes:
        train, test, validation: token numbers, of any integer type.
        words: number -> printable token.
        digest: SHA-256 of all the above, compared between processes.
        lengths: bytes of each token, for bits per byte; None for words, whose separators are lost.
        facts: further entries of the record's header.
    """

    train: Integer[Tensor, " train"]
    test: Integer[Tensor, " test"]
    words: tuple[str, ...]
    digest: str
    validation: Integer[Tensor, " validation"] | None = None
    lengths: Int64[Tensor, " words"] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def tested_on(self, device: torch.device) -> Corpus:
        """A copy with all tensors but ``train`` on a device."""
        tensors = {name: getattr(self, name) for name in ("test", "validation", "lengths")}
        return replace(self, **{k: t.to(device) for k, t in tensors.items() if t is not None})


def make(
    parts: Mapping[Split, Integer[Tensor, " n"]],
    words: Sequence[str],
    config: DataConfig,
    lengths: Int64[Tensor, " words"] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Corpus:
    """The corpus of some parts, each cut to its configured size in tokens; without
    ``data.validation_size`` there is no validation part.

    Raises:
        DataError: a part is smaller than its size, or than two tokens.
    """
    sizes: dict[Split, int | None] = {"train": config.train_size, "test": config.test_size}
    if config.validation_size is not None:
        sizes["validation"] = config.validation_size
    cut = {split: _first(parts[split], size, split) for split, size in sizes.items()}
    digest = hashlib.sha256(repr(tuple(words)).encode())
    for part in cut.values():
        digest.update(repr(len(part)).encode())
        digest.update(part.numpy().data)
    words, hexdigest = tuple(words), digest.hexdigest()
    return Corpus(**cut, words=words, digest=hexdigest, lengths=lengths, facts=dict(facts or {}))


def _first(ids: Integer[Tensor, " n"], size: int | None, split: Split) -> Integer[Tensor, " m"]:
    if len(ids) < 2:
        raise DataError(f"the {split} part of the text has {len(ids)} tokens, expected at least 2.")
    if size is not None and not 2 <= size <= len(ids):
        raise DataError(
            f"data.{split}_size = {size}: expected 2 to {len(ids)}, the tokens of the {split} part "
            "of the text."
        )
    return ids[:size]
