"""Samples of a program's own: a data set with numbered samples, or two tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.utils.data import TensorDataset

from regimes.base.errors import DataError, require
from regimes.base.reduction import IGNORED, Batch
from regimes.base.seeding import preserve_streams, seed_streams

DIGESTED = 256  # samples of a data set, of which the digest is made


class Samples:
    """Gives the samples of a map-style data set, or of two tensors or arrays.

    Attributes:
        tensors: inputs and targets of all samples, where they are tensors; else None.
        tokens: whether a sample is a mapping with the tokens of a language model.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.name, self.tensors, self.tokens = name, None, False
        if isinstance(data, TensorDataset) and len(data.tensors) == 2:
            data = data.tensors
        arrays = Tensor | np.ndarray
        if isinstance(data, tuple | list) and data and all(isinstance(x, arrays) for x in data):
            shapes = [tuple(part.shape) for part in data]
            good = len(data) == 2 and all(shapes) and len(data[0]) == len(data[1])
            require(good, name, shapes, "inputs and targets, as many targets as inputs")
            x, y = (_as_tensor(part, name).detach().cpu() for part in data)
            self.tensors = x, y
        elif isinstance(data, Tensor | np.ndarray | Mapping) or not (
            hasattr(data, "__len__") and hasattr(data, "__getitem__")
        ):
            kind = type(data).__name__
            raise DataError(
                f"{name} is a {kind}: expected a data set with a length and numbered samples, or "
                "a tuple of two tensors, inputs and targets (a DataLoader has its data set in "
                ".dataset; a tensor of tokens can be a list of mappings with input_ids)"
            )
        self.data = data
        self.count = len(self.tensors[0]) if self.tensors else len(data)
        require(self.count > 0, name, self.count, "at least one sample")

    def take(self, index: Int64[Tensor, " n"], seed: int = 0) -> Batch:
        """Return inputs ``[n, ...]`` and targets ``[n, ...]`` of some samples.

        Args:
            seed: of the random numbers of a data set that augments its samples.
        """
        return self.take_each([(index, seed)])[0]

    def take_each(self, wanted: Sequence[tuple[Int64[Tensor, " n"], int]]) -> list[Batch]:
        """Do several times `take`, each of some samples and a seed. The global random streams go on
        as if nothing had been drawn."""
        if self.tensors is not None:
            x, y = self.tensors
            return [(x[index], y[index]) for index, _ in wanted]
        with preserve_streams():
            return [self._stack(index, seed) for index, seed in wanted]

    def _stack(self, index: Int64[Tensor, " n"], seed: int) -> Batch:
        """A batch; a function, so that its single samples are freed before the next one."""
        seed_streams(seed)
        items = [self._item(i) for i in index.tolist()]
        try:
            return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        except RuntimeError as error:
            raise DataError(f"the samples of {self.name} differ in shape: {error}") from None

    def _item(self, number: int) -> Batch:
        """One sample: a pair, or a mapping with the tokens of a causal language model."""
        item = self.data[number]
        if isinstance(item, Mapping) and "input_ids" in item:
            self.tokens = True
            return self._tokens(item)
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"a sample of {self.name} is a {type(item).__name__}: expected (input, target), or "
                'a mapping with "input_ids"'
            )
        x, y = (_as_tensor(part, f"a sample of {self.name}") for part in item)
        return x, y

    def _tokens(self, item: Mapping[str, Any]) -> Batch:
        """Tokens and the next ones; padding, which a mask of 0 marks, is no target."""
        given = {key: item.get(key) for key in ("input_ids", "labels", "attention_mask")}
        parts = {
            key: _as_tensor(part, f"{key} of a sample of {self.name}")
            for key, part in given.items()
            if part is not None or key == "input_ids"
        }
        tokens = parts["input_ids"]
        for key, part in parts.items():
            if part.ndim != 1 or len(part) != len(tokens):
                raise DataError(
                    f"{key} of a sample of {self.name} has the shape {list(part.shape)}: expected "
                    f"[{tokens.numel()}], one number for each token of one text"
                )
        targets, mask = parts.get("labels", tokens), parts.get("attention_mask")
        if mask is not None:
            kept = mask.bool()
            if (kept[1:] & ~kept[:-1]).any():
                raise DataError(
                    f"{self.name}: attention_mask leaves out tokens before others, and the model "
                    "is called with the tokens alone: pad at the end of a sample"
                )
            targets = targets.masked_fill(~kept, IGNORED)
        return tokens[:-1], targets[1:]

    def digested(self) -> Batch:
        """Take `DIGESTED` samples at equal distances."""
        index = torch.arange(0, self.count, max(1, self.count // DIGESTED))
        return self.take(index)

    def varied(self, count: int) -> Batch:
        """Take up to ``count`` samples at equal distances and, where targets are tensors, half as
        many again that are chosen to differ in their targets, so that classes, ignored targets and
        masks are seen."""
        step = max(1, -(-self.count // count))
        index = torch.arange(0, self.count, step)
        if self.tensors is not None:
            chosen = _unlike(self.tensors[1].reshape(self.count, -1), count // 2)
            index = torch.cat([chosen, index]).unique()[: count + count // 2]
        return self.take(index)

    def has(self, target: int) -> bool:
        """Answer whether a number is among the targets, as far as is known; of a data set that is
        not of tensors it may be."""
        return self.tensors is None or bool((self.tensors[1] == target).any())

    def digest(self) -> str:
        """Compute SHA-256 of the number of samples, and of `digested`."""
        digest = hashlib.sha256(str(self.count).encode())
        for part in self.digested():
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check_classes(self, classes: int, ignored: int = IGNORED) -> None:
        """Raise DataError if a class or token is not one of ``classes``: of all samples where they
        are tensors, else of `digested`."""
        x, y = self.tensors or self.digested()
        parts = {"target": y[y != ignored], **({"token": x} if self.tokens else {})}
        for what, part in parts.items():
            if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < classes:
                raise DataError(
                    f"{self.name} has a {what} of {int(part.min())} to {int(part.max())}: the "
                    f"model's outputs are {classes} classes, 0 to {classes - 1}"
                )


def _as_tensor(numbers: Any, what: str) -> Tensor:
    """A tensor of what torch takes for one; DataError for an image, a text and the like."""
    try:
        return torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(". ")
        raise DataError(
            f"{what} holds a {type(numbers).__name__}, of which torch makes no tensor ({why}): "
            "expected tensors, arrays or numbers"
        ) from None


def _unlike(targets: Shaped[Tensor, "n k"], count: int) -> Int64[Tensor, " m"]:
    """Samples with targets that differ: the first with each whole number, from both ends of their
    range; of real numbers those with the fewest and most zeros, with NaN, and of extreme means."""
    if targets.is_floating_point() or targets.is_complex():
        seen = [(targets == 0).sum(1), targets.isnan().sum(1), targets.abs().nan_to_num().sum(1)]
        return torch.stack(
            [end for numbers in seen for end in (numbers.argmin(), numbers.argmax())]
        )
    values = targets.unique()
    ends = torch.cat([values[: count // 2 + 1], values[-(count // 2) :]]).unique()
    return torch.stack([(targets == value).any(1).int().argmax() for value in ends])
