"""The tokens of a text as numbers (`Corpus`): bytes or byte pairs. Words are in `wikitext`.

"bytes": 256 tokens, for any file.

"bpe": byte-pair encoding (Sennrich et al., "Neural Machine Translation of Rare Words with Subword
Units", 2016) over the bytes of a text in UTF-8, as in GPT-2, by the `tokenizers` library. The pairs
are learnt from the complete training part, whatever ``data.train_size``. Vocabulary and numbers are
cached in ``tokens/<key>.npz``; the key is a digest of the three parts and of the vocabulary's size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int32, Int64, Integer
from torch import Tensor

from regimes.base.config import DataConfig
from regimes.base.errors import ConfigError, DataError, require
from regimes.data import texts
from regimes.data.cache import cache_root, load_arrays, store_arrays
from regimes.data.texts import Parts

Split = Literal["train", "test", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
BYTES = tuple(map(chr, range(256)))
VOCABULARY = 1024  # of byte pairs, unless data.vocabulary says otherwise
FORMAT = "2"  # of the cache file; part of its key
BLOCK = 2**16  # characters that are encoded at once


@dataclass(frozen=True)
class Corpus:
    """Holds a text as numbers of tokens.

    Attributes:
        train, test, validation: token numbers, of any integer type.
        words: number -> printable token.
        digest: SHA-256 of all the above, compared between processes.
        lengths: bytes of each token, for bits per byte; None for words: their separators are lost.
        facts: further entries of the record's header.
    """

    train: Integer[Tensor, " train"]
    test: Integer[Tensor, " test"]
    words: tuple[str, ...]
    digest: str
    validation: Integer[Tensor, " validation"] | None = None
    lengths: Int64[Tensor, " words"] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def with_test_on(self, device: torch.device) -> Corpus:
        """Copy it, with all tensors but ``train`` on a device."""
        tensors = {name: getattr(self, name) for name in ("test", "validation", "lengths")}
        return replace(self, **{k: t.to(device) for k, t in tensors.items() if t is not None})


def make_corpus(
    parts: Mapping[Split, Integer[Tensor, " n"]],
    vocabulary: Sequence[str],
    config: DataConfig,
    lengths: Int64[Tensor, " words"] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Corpus:
    """Make the corpus of some parts, each cut to its configured size in tokens; without
    ``data.validation_size`` there is no validation part.

    Raises:
        DataError: a part is smaller than its size, or than two tokens.
    """
    sizes: dict[Split, int | None] = {"train": config.train_size, "test": config.test_size}
    if config.validation_size is not None:
        sizes["validation"] = config.validation_size
    cut = {split: _first(parts[split], size, split) for split, size in sizes.items()}
    digest = hashlib.sha256(repr(tuple(vocabulary)).encode())
    for part in cut.values():
        digest.update(repr(len(part)).encode())
        digest.update(part.numpy().data)
    vocabulary, hexdigest = tuple(vocabulary), digest.hexdigest()
    return Corpus(
        **cut, words=vocabulary, digest=hexdigest, lengths=lengths, facts=dict(facts or {})
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


def load_tokens(config: DataConfig) -> Corpus:
    """Load the text of a configuration as tokens, cut to its sizes.

    Raises:
        ConfigError: byte pairs without the package tokenizers, or a vocabulary of at most 256.
        DataError: the text cannot be read, is too small, or for byte pairs is not in UTF-8.
    """
    parts = texts.read_text(config)
    if config.tokenizer == "bpe":
        vocabulary, ids = _encode_parts(parts, config.vocabulary or VOCABULARY)
    else:
        contents = {split: np.frombuffer(getattr(parts, split), np.uint8) for split in SPLITS}
        vocabulary, ids = BYTES, {s: torch.from_numpy(x.copy()) for s, x in contents.items()}
    lengths = torch.tensor([len(word) for word in vocabulary])  # one character stands for one byte
    facts = {"tokenizer": config.tokenizer or "bytes", **parts.facts}
    corpus = make_corpus(ids, vocabulary, config, lengths, facts)
    cut = {split: getattr(corpus, split) for split in SPLITS}
    counts = {s: int(lengths[part.long()].sum()) for s, part in cut.items() if part is not None}
    return replace(corpus, facts={**facts, "bytes": counts})


def _encode_parts(parts: Parts, size: int) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
    """The vocabulary and the parts' numbers, from the cache if it has them."""
    require(size > 256, "data.vocabulary", size, "more than 256, the bytes")
    key = hashlib.sha256(f"{FORMAT}\0{size}".encode())
    for split in SPLITS:
        key.update(hashlib.sha256(getattr(parts, split)).digest())
    file = cache_root() / "tokens" / f"bpe-{key.hexdigest()[:20]}.npz"
    arrays = load_arrays(file, ("words", *SPLITS))
    if arrays is None:
        contents = {split: _decode_text(getattr(parts, split), split) for split in SPLITS}
        words, tokenizer = _train_tokenizer(contents["train"], size)
        arrays = [np.array(words), *(_encode_text(tokenizer, contents[split]) for split in SPLITS)]
        store_arrays(file, dict(zip(("words", *SPLITS), arrays, strict=True)), "byte pairs")
    ids = {s: torch.from_numpy(n) for s, n in zip(SPLITS, arrays[1:], strict=True)}
    return tuple(arrays[0].tolist()), ids


def _decode_text(content: bytes, split: Split) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the {split} part of the text is not in UTF-8 ({error.reason} at byte {error.start}): "
            'set data.tokenizer = "bytes", which reads any file'
        ) from None


def _train_tokenizer(text: str, size: int) -> tuple[list[str], Any]:
    """(tokens by number, tokenizer); a token has one character per byte."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(
            'data.tokenizer = "bpe" needs the package tokenizers: pip install tokenizers'
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(_split_blocks(text), trainer)
    number_of = tokenizer.get_vocab()
    words = sorted(number_of, key=number_of.__getitem__)
    if len(words) < size:
        raise DataError(
            f"data.vocabulary = {size}: expected 257 to {len(words)}, the byte pairs of the "
            "training text with the bytes"
        )
    return words, tokenizer


def _encode_text(tokenizer: Any, text: str) -> Int32[np.ndarray, " n"]:
    blocks = tokenizer.encode_batch(list(_split_blocks(text)))
    ids = [np.array(block.ids, np.int32) for block in blocks]
    return np.concatenate([np.empty(0, np.int32), *ids])


def _split_blocks(text: str) -> Iterator[str]:
    """The text in pieces that end with a line, if it has lines."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + BLOCK) + 1 or len(text)
        yield text[start:end]
        start = end
