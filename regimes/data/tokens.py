"""Texts as numbers: their bytes, or byte pairs.

"bytes": 256 tokens, nothing to learn, any file.

"bpe": byte-pair encoding (Sennrich et al., "Neural Machine Translation of Rare Words with Subword
Units", 2016) over the bytes of a text in UTF-8, as GPT-2 does it, by the `tokenizers` library. The
pairs are learnt from the whole training part, however much of it is trained on, and from nothing
else. Vocabulary and numbers are kept in the cache, ``tokens/<key>.npz``; the key depends on the
three parts' bytes and the size of the vocabulary.

Stands on `regimes.data.texts` (the bytes), `regimes.data.corpus` (what comes of them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from regimes.data import texts
from regimes.data.cache import cache_root, load_arrays, store_arrays
from regimes.data.corpus import Corpus, Split, make
from regimes.data.texts import Parts
from regimes.errors import ConfigError, DataError, require

if TYPE_CHECKING:
    from regimes.config import DataConfig

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
BYTES = tuple(map(chr, range(256)))
VOCABULARY = 1024  # of byte pairs, unless data.vocabulary says otherwise
FORMAT = "1"  # of the cache file; part of its key
BLOCK = 2**16  # characters that are encoded at once


def load(config: DataConfig) -> Corpus:
    """The text that a configuration names, as tokens, cut to its sizes.

    Raises:
        ConfigError: byte pairs without the library, or of less than 256 bytes and one pair.
        DataError: the text cannot be read, is too small, or for byte pairs is not in UTF-8.
    """
    parts, pairs = texts.read(config), config.tokenizer == "bpe"
    words, ids = _pairs(parts, config.vocabulary or VOCABULARY) if pairs else _bytes(parts)
    lengths = torch.tensor([len(word) for word in words])  # one character stands for one byte
    said = {"tokenizer": config.tokenizer or "bytes", **parts.facts}
    corpus = make(ids, words, config, lengths, said)
    held = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    counts = {s: int(lengths[part.long()].sum()) for s, part in held.items() if part is not None}
    return replace(corpus, facts={**corpus.facts, "bytes": counts})


def _bytes(parts: Parts) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
    found = {split: bytearray(getattr(parts, split)) for split in SPLITS}
    return BYTES, {
        s: torch.frombuffer(b, dtype=torch.uint8) if b else torch.empty(0).byte()
        for s, b in found.items()
    }


def _pairs(parts: Parts, size: int) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
    """The vocabulary and the parts' numbers, from the cache where it has them."""
    require(size > 256, "data.vocabulary", size, "more than 256, the bytes")
    key = hashlib.sha256(f"{FORMAT}\0{size}".encode())
    for split in SPLITS:
        key.update(hashlib.sha256(getattr(parts, split)).digest())
    file = cache_root() / "tokens" / f"bpe-{key.hexdigest()[:20]}.npz"
    found = load_arrays(file, ("words", *SPLITS))
    if found is None:
        contents = {split: _decoded(getattr(parts, split), split) for split in SPLITS}
        words, tokenizer = _trained(contents["train"], size)
        numbers = [_encoded(tokenizer, contents[split]) for split in SPLITS]
        store_arrays(
            file, dict(zip(("words", *SPLITS), (words, *numbers), strict=True)), "byte pairs"
        )
        found = [np.array(words), *numbers]
    ids = {s: torch.from_numpy(n) for s, n in zip(SPLITS, found[1:], strict=True)}
    return tuple(found[0].tolist()), ids


def _decoded(content: bytes, split: Split) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the {split} part of the text is not in UTF-8 ({error.reason} at byte {error.start}): "
            'set data.tokenizer = "bytes", which reads any file'
        ) from None


def _trained(text: str, size: int) -> tuple[list[str], Any]:
    """(number -> token, tokenizer): tokens spelt with one character per byte."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(
            'data.tokenizer = "bpe" needs the package tokenizers: pip install "regimes[text]"'
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(_blocks(text), trainer)
    number_of = tokenizer.get_vocab()
    words = sorted(number_of, key=number_of.__getitem__)
    if len(words) < size:
        raise DataError(
            f"data.vocabulary = {size}: expected 257 to {len(words)}, the byte pairs of the "
            "training text with the bytes"
        )
    return words, tokenizer


def _encoded(tokenizer: Any, text: str) -> Int32[np.ndarray, " n"]:
    blocks = tokenizer.encode_batch(list(_blocks(text)))
    ids = [np.array(block.ids, np.int32) for block in blocks]
    return np.concatenate([np.empty(0, np.int32), *ids])


def _blocks(text: str) -> Iterator[str]:
    """The text in pieces that end with a line where they can."""
    place = 0
    while place < len(text):
        end = text.find("\n", place + BLOCK) + 1 or len(text)
        yield text[place:end]
        place = end
