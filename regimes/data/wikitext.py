"""WikiText-2 as numbers: the standard token files, their vocabulary, the download.

Merity et al., "Pointer Sentinel Mixture Models" (2017). The files hold words separated by spaces,
one paragraph per line, rare words already replaced by ``<unk>``; every line, an empty one too, ends
in ``<eos>``. The vocabulary is that of the whole training file, however much of it is trained on.
The original files give 33,278 words, 2,088,628 training tokens and 245,569 test tokens.

The authors' code splits these words once more with spaCy and makes them lower-case, and evaluates
on the validation file. Here they stay as they are, and the test file is what it is called.

Stands under `regimes.data.language`, which makes batches of the numbers.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64
from torch import Tensor

from regimes.data.image_folder import data_root
from regimes.data.sources import one_at_a_time, torchvision_datasets
from regimes.errors import DataError

if TYPE_CHECKING:
    from regimes.config import DataConfig

ARCHIVE = "https://wikitext.smerity.com/wikitext-2-v1.zip"  # kept by an author of the data set
MD5 = "542ccefacc6c27f945fb54453812b3cd"
FOLDER = "wikitext-2"
FILES = ("wiki.train.tokens", "wiki.test.tokens")
EOS, UNK = "<eos>", "<unk>"


@dataclass(frozen=True)
class Corpus:
    """A text in memory, as the numbers of its words."""

    train: Int64[Tensor, " train"]
    test: Int64[Tensor, " test"]
    words: tuple[str, ...]  # number -> word
    digest: str  # SHA-256 of all the above: equal on all processes, or they hold different data


def load(config: DataConfig) -> Corpus:
    """The corpus that a configuration names, cut to its sizes (in tokens), or DataError."""
    files = [_folder(config) / name for name in FILES]
    train, test = map(_tokens, files)
    words = vocabulary(train, config.vocabulary)
    number = {word: i for i, word in enumerate(words)}
    missing = sorted(set(test) - number.keys())
    if missing and UNK not in number:
        raise DataError(
            f"{files[1]} has {len(missing)} words that {files[0]} lacks, {missing[0]!r} the first, "
            f"and there is no {UNK} to stand for them: set data.vocabulary to {len(words) + 1} or "
            "fewer, which makes one."
        )
    unknown = number.get(UNK, -1)

    def ids(tokens: Sequence[str], size: int | None, split: str) -> Int64[Tensor, " n"]:
        return _first(torch.tensor([number.get(t, unknown) for t in tokens]), size, split)

    parts = ids(train, config.train_size, "train"), ids(test, config.test_size, "test")
    digest = hashlib.sha256(repr(words).encode())
    for part in parts:
        digest.update(repr(len(part)).encode())
        digest.update(part.numpy().data)
    return Corpus(*parts, words, digest.hexdigest())


def vocabulary(tokens: Sequence[str], size: int | None = None) -> tuple[str, ...]:
    """``<unk>`` and ``<eos>``, then all words, most frequent first, equally frequent ones in the
    order in which they come.

    Args:
        size: how many to keep, with these two; all others are ``<unk>``. None keeps all, and has
            ``<unk>`` only if the text has it.
    """
    counts = Counter(tokens)
    special = (UNK, EOS) if size is not None or UNK in counts else (EOS,)
    words = [word for word, _ in counts.most_common() if word not in special]
    if size is None:
        return (*special, *words)
    if not 3 <= size <= len(words) + 2:
        raise DataError(
            f"data.vocabulary = {size}: expected 3 to {len(words) + 2}, the words of the training "
            f"text with {UNK} and {EOS}."
        )
    return (*special, *words[: size - 2])


def _folder(config: DataConfig) -> Path:
    """The folder with the files, downloaded if that is wanted and needed."""
    root = Path(config.path) if config.path else data_root()
    folder = root if any((root / name).is_file() for name in FILES) else root / FOLDER
    if config.download and _missing(folder):
        _download(folder)
    if missing := _missing(folder):
        state = f"lacks {' and '.join(missing)}" if folder.is_dir() else "does not exist"
        raise DataError(
            f"WikiText-2: {folder} {state}; set data.download = true, or data.path to a folder "
            f"with {' and '.join(FILES)}."
        )
    return folder


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).is_file()]


def _download(folder: Path) -> None:
    """Each file appears whole or not at all; of several processes, one downloads."""
    torchvision_datasets()
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        with one_at_a_time(folder):
            if not _missing(folder):
                return
            with tempfile.TemporaryDirectory(dir=folder) as part:
                download_and_extract_archive(ARCHIVE, part, md5=MD5)
                for file in Path(part, FOLDER).glob("*.tokens"):
                    file.replace(folder / file.name)
    except (OSError, RuntimeError) as error:
        raise DataError(f"WikiText-2 could not be downloaded to {folder}: {error}.") from error


def _tokens(file: Path) -> list[str]:
    try:
        with open(file, encoding="utf-8") as lines:
            tokens = [word for line in lines for word in (*line.split(), EOS)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as a text in UTF-8: {error}.") from error
    if all(token == EOS for token in tokens):
        raise DataError(f"{file} is empty: expected words separated by spaces.")
    return tokens


def _first(ids: Int64[Tensor, " n"], size: int | None, split: str) -> Int64[Tensor, " m"]:
    if size is not None and not 2 <= size <= len(ids):
        raise DataError(
            f"data.{split}_size = {size}: expected 2 to {len(ids)}, the tokens of the {split} file."
        )
    return ids[:size]
