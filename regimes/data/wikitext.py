"""WikiText-2 as numbers: the standard token files, their vocabulary, the download.

Merity et al., "Pointer Sentinel Mixture Models" (2017). The files hold words separated by spaces,
one paragraph per line, rare words already replaced by ``<unk>``; every line, an empty one too, ends
in ``<eos>``. The vocabulary is of the complete training file, whatever ``data.train_size``.
The original files give 33,278 words, 2,088,628 training tokens and 245,569 test tokens.

The authors' code splits these words again with spaCy, makes them lower-case, and evaluates on the
validation file. Here the words are unchanged and the test file is the test set.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from regimes.base.config import DataConfig
from regimes.base.errors import DataError
from regimes.data.cache import data_root, user_path
from regimes.data.sources import one_at_a_time, torchvision_datasets
from regimes.data.texts import STANDARD
from regimes.data.tokens import Corpus, make_corpus

ARCHIVE = "https://wikitext.smerity.com/wikitext-2-v1.zip"  # hosted by an author of the data set
MD5 = "542ccefacc6c27f945fb54453812b3cd"
FOLDER = "wikitext-2"
EOS, UNK = "<eos>", "<unk>"


def load_wikitext(config: DataConfig) -> Corpus:
    """Load the corpus of a configuration, cut to its sizes in tokens, or raise DataError."""
    files = {"train": STANDARD["train"], "test": STANDARD["test"]}
    if config.validation_size is not None:
        files["validation"] = STANDARD["validation"]
    folder = _find_folder(config, tuple(files.values()))
    texts = {split: _tokens(folder / name) for split, name in files.items()}
    known = count_words(texts["train"], config.vocabulary)
    number = {word: i for i, word in enumerate(known)}
    for split, name in files.items():
        missing = sorted(set(texts[split]) - number.keys())
        if missing and UNK not in number:
            raise DataError(
                f"{folder / name} has {len(missing)} words that {folder / files['train']} lacks, "
                f"the first is {missing[0]!r}, and the vocabulary has no {UNK} to replace them: "
                f"set data.vocabulary to {len(known) + 1} or fewer, which adds {UNK}."
            )
    unknown = number.get(UNK, -1)

    def ids(tokens: Sequence[str]) -> Int64[Tensor, " n"]:
        return torch.tensor([number.get(t, unknown) for t in tokens])

    return make_corpus({split: ids(tokens) for split, tokens in texts.items()}, known, config)


def count_words(tokens: Sequence[str], size: int | None = None) -> tuple[str, ...]:
    """List ``<unk>`` and ``<eos>``, then all words, most frequent first, ties in the order of the
    text.

    Args:
        size: entries to keep, these two included; others become ``<unk>``. None keeps all, and
            has ``<unk>`` only if the text has it.
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


def _find_folder(config: DataConfig, wanted: Sequence[str]) -> Path:
    """The folder with the files, downloaded if one is missing and ``data.download`` is set."""
    root = user_path(config.path) if config.path else data_root()
    folder = root if any((root / name).is_file() for name in wanted[:2]) else root / FOLDER
    if config.download and _missing(folder, wanted):
        try:
            with one_at_a_time(folder):
                if _missing(folder, wanted):  # no other process has downloaded them meanwhile
                    _download_file(folder)
        except (OSError, RuntimeError) as error:
            raise DataError(f"WikiText-2 could not be downloaded to {folder}: {error}.") from error
    if missing := _missing(folder, wanted):
        state = f"lacks {' and '.join(missing)}" if folder.is_dir() else "does not exist"
        raise DataError(
            f"WikiText-2: {folder} {state}; set data.download = true, or data.path to a folder "
            f"with {' and '.join(wanted)}."
        )
    return folder


def _missing(folder: Path, wanted: Sequence[str]) -> list[str]:
    return [name for name in wanted if not (folder / name).is_file()]


def _download_file(folder: Path) -> None:
    """Download under a temporary name, so that no other process sees half a file."""
    torchvision_datasets()  # makes the import below work on any torch
    from torchvision.datasets.utils import download_and_extract_archive

    with tempfile.TemporaryDirectory(dir=folder) as part:
        download_and_extract_archive(ARCHIVE, part, md5=MD5)
        for file in Path(part, FOLDER).glob("*.tokens"):
            file.replace(folder / file.name)


def _tokens(file: Path) -> list[str]:
    try:
        with open(file, encoding="utf-8") as lines:
            tokens = [word for line in lines for word in (*line.split(), EOS)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as a text in UTF-8: {error}.") from error
    if all(token == EOS for token in tokens):
        raise DataError(f"{file} is empty: expected words separated by spaces.")
    return tokens
