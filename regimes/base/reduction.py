"""What a loss is, and how it joins the terms of a batch: as a sum of terms over a sum of weights.

A loss is a function of a model and one batch. Data, instruments and training share it.
Micro-batches, evaluation batches and the batches of a probe divide what is meant as one
batch. With the weight of a batch, a function of its targets, the losses of the parts give its loss,

    loss(batch) = sum over parts of loss(part) x weight(part) / weight(batch).

A mean over samples weighs their number, a mean over tokens the tokens that are not ignored, a mean
over classes with weights the weights of the targets' classes; a sum weighs 1 whatever the batch. A
loss says how it joins terms by an attribute ``reduction``. `measure_reduction` finds out by trying.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from regimes.base.errors import ConfigError

IGNORED = -100  # a target that torch's cross-entropy leaves out
Share = float | Tensor  # of a part in its batch: of all workers alike, or [L]
Batch = tuple[Tensor, Tensor]  # inputs and targets
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of the model, inputs, targets: mean, nats
LossT = TypeVar("LossT", bound=Callable[..., Any])


@runtime_checkable
class CarryingLoss(Protocol):
    """Computes a loss with a hidden state that one batch passes to the next, detached, within an
    epoch."""

    def carry(self, model: nn.Module, x: Tensor, y: Tensor, hidden: Any) -> tuple[Tensor, Any]: ...


class Reduction(ABC):
    """Says how a loss joins the terms of a batch.

    Attributes:
        zero_of_nothing: the gradient of a batch of weight 0 is 0; otherwise it may be NaN, as that
            of 0 / 0 is, whatever it is multiplied by.
    """

    zero_of_nothing = False

    @abstractmethod
    def weight(self, targets: Tensor) -> Float64[Tensor, ""]:
        """Compute what the sum of a batch's terms is divided by, up to a factor that all batches
        share."""

    def joined(self, weights: float) -> float:
        """Return the weight of a batch, from the sum of its parts' weights."""
        return weights

    def share(self, targets: Tensor, part: slice) -> Share:
        """Divide the weight of samples ``part`` by the weight of their workers' batches, ``[L]``.

        Args:
            targets: of the batches, ``[L, b, ...]``.
        """
        weights = [self.weight(row[part]) / self.weight(row) for row in targets]
        return torch.stack(weights)


class SampleMean(Reduction):
    """Joins terms as a mean over samples."""

    def weight(self, targets: Tensor) -> Float64[Tensor, ""]:
        return torch.full((), len(targets), dtype=torch.float64, device=targets.device)

    def share(self, targets: Tensor, part: slice) -> Share:
        count = targets.shape[1]
        return len(range(*part.indices(count))) / count


class TargetMean(Reduction):
    """Joins terms as a mean over the targets (classes, tokens) that are not ``ignored``, by the
    weights of their ``classes`` where there are some. In samples: 1 if all targets of a sample
    count by 1.

    Args:
        by_torch: torch computes it, and leaves out the targets that are ignored.
    """

    def __init__(
        self, ignored: int = IGNORED, classes: Tensor | None = None, *, by_torch: bool = False
    ) -> None:
        self.ignored, self.classes = ignored, classes
        # torch divides also by the weights of classes that weigh nothing
        self.zero_of_nothing = by_torch and (classes is None or bool(classes.all()))

    def weight(self, targets: Tensor) -> Float64[Tensor, ""]:
        kept = targets != self.ignored
        if self.classes is None:
            total = kept.sum().double()
        else:
            # kept there: a copy from the host in each step would wait, and no graph could have it
            self.classes = self.classes.to(targets.device)
            total = self.classes[targets.masked_fill(~kept, 0)].double().mul(kept).sum()
        return total / (targets.numel() / len(targets))


class Sum(Reduction):
    """Joins terms as a sum over samples, which nothing divides."""

    def weight(self, targets: Tensor) -> Float64[Tensor, ""]:
        return torch.ones((), dtype=torch.float64, device=targets.device)

    def joined(self, weights: float) -> float:
        return 1.0

    def share(self, targets: Tensor, part: slice) -> Share:
        return 1.0


class OwnMean(Reduction):
    """Joins terms as a mean by weights; their sum is a function of a batch's targets."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function

    def weight(self, targets: Tensor) -> Float64[Tensor, ""]:
        total = torch.as_tensor(self.function(targets), device=targets.device)
        return total.detach().double().reshape(())


class Coupled(Reduction):
    """Joins terms as no sum of terms over a sum of weights, as far as is known; ``why`` says what
    was seen."""

    def __init__(self, why: str) -> None:
        self.why = why

    def weight(self, targets: Tensor) -> Float64[Tensor, ""]:
        raise ConfigError(self.why)


def declared_reduction(loss: Any) -> Reduction | None:
    """Return what a loss says of itself; None if it says nothing."""
    stated = getattr(loss, "reduction", None)
    return stated if isinstance(stated, Reduction) else None


def declare_reduction(reduction: Reduction) -> Callable[[LossT], LossT]:
    """Decorate a loss, which joins its terms by ``reduction``."""

    def state(loss: LossT) -> LossT:
        loss.__dict__["reduction"] = reduction
        return loss

    return state


def scale_loss(loss: Tensor, share: Share) -> Tensor:
    """Multiply a part's loss by its share. A part that does not count adds 0, also where its loss
    is a mean over nothing (NaN); a batch that does not count has NaN for a share, which stays."""
    if isinstance(share, Tensor):
        return torch.where(share == 0, 0.0, loss * share.to(loss.dtype))
    return loss * share


# -- torch's losses ------------------------------------------------------------------------------


def of_torch(loss: Any, targets: Tensor) -> Reduction | None:
    """Return how a loss of ``torch.nn`` or ``torch.nn.functional``, perhaps with arguments bound by
    ``functools.partial``, joins its terms; None of any other. ``targets``: of some samples."""
    settings: dict[str, Any]
    if isinstance(loss, nn.Module):
        if type(loss).__module__ != nn.CrossEntropyLoss.__module__:
            return None
        by_class = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        names = ("weight", "ignore_index", "reduction")
        settings = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    else:
        partial = isinstance(loss, functools.partial)
        function = loss.func if partial else loss
        if getattr(function, "__module__", None) != F.__name__ or (partial and loss.args):
            return None
        by_class = function in (F.cross_entropy, F.nll_loss)
        parameters = inspect.signature(function).parameters
        settings = {name: p.default for name, p in parameters.items()}
        settings |= loss.keywords if partial else {}
    if settings.get("size_average") is not None or settings.get("reduce") is not None:
        return None  # of torch before 0.4.1
    joins = settings.get("reduction", "mean")
    if joins == "sum":
        return Sum()
    if joins not in ("mean", "batchmean"):
        return None
    if by_class and not targets.is_floating_point():  # else probabilities of classes
        return TargetMean(settings["ignore_index"], settings["weight"], by_torch=True)
    return SampleMean()


# -- what a loss of the user's does ----------------------------------------------------------------


def split_samples(count: int) -> list[slice]:
    """Divide samples into parts of 1, 2, 4, ... and the rest: two parts by chance alike hide
    nothing."""
    ends = [0, *(2**k - 1 for k in range(1, count.bit_length()) if 2**k - 1 < count), count]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def measure_reduction(
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    candidates: Sequence[Reduction],
) -> Reduction:
    """Find the first candidate that joins the losses of parts to the loss of a batch ``x [n,
    ...]``, ``y [n, ...]``; else `Coupled`. The model is a copy: it is evaluated."""
    model.eval()
    pieces = split_samples(len(y))
    with torch.no_grad(), nudge_parameters(model), torch.random.fork_rng(devices=[]):
        whole = float(loss(model, x, y))
        values = [float(loss(model, x[part], y[part])) for part in pieces]
    seen = ""
    for candidate in candidates:
        weights = [float(candidate.weight(y[part])) for part in pieces]
        joined = join_losses(values, weights, float(candidate.weight(y)))
        if is_near(joined, whole, values, x, *model.parameters()):
            return candidate
        seen = seen or f" ({whole:.6g}; {joined:.6g} from {len(pieces)} parts)"
    return Coupled(f"the loss of {len(y)} samples is no mean or sum of its parts' losses{seen}")


def join_losses(losses: Sequence[float], weights: Sequence[float], weight: float) -> float:
    """Compute the loss of a batch of a weight, from the losses and weights of its parts."""
    pairs = zip(losses, weights, strict=True)
    total = math.fsum(loss * own for loss, own in pairs if own != 0)
    return total / weight if weight else math.nan


def is_near(joined: float, whole: float, values: Sequence[float], *numbers: Tensor) -> bool:
    """Answer whether a number is the loss of the batch, but for rounding of the least exact of some
    numbers."""
    eps = max((torch.finfo(t.dtype).eps for t in numbers if t.is_floating_point()), default=1e-7)
    return abs(joined - whole) <= 100 * eps**0.9 * max(abs(whole), *map(abs, values))


@contextmanager
def nudge_parameters(model: nn.Module) -> Iterator[None]:
    """Add small random numbers to the parameters inside."""
    # A new model may give all samples the same output (a last layer of zeros): any weights of the
    # parts would then seem right.
    draws = torch.Generator().manual_seed(0)
    kept = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    for p, numbers in kept:
        scale = 0.1 * (p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0)
        noise = torch.randn(p.shape, generator=draws) * scale
        p.data = numbers + noise.to(p.device, p.dtype)
    try:
        yield
    finally:
        for p, numbers in kept:
            p.data = numbers


# -- batches of any kind --------------------------------------------------------------------------


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch: a tensor, or tuples, lists, mappings (BatchEncoding, too) and
    objects with attributes that hold some."""
    if isinstance(batch, Tensor):
        yield batch
    elif not isinstance(batch, str | bytes):
        for value in _values_of(batch):
            yield from tensors_in(value)


def _values_of(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    return list(getattr(batch, "__dict__", {}).values())


def cut_batch(batch: Any, count: int, part: slice) -> Any:
    """Cut a part of a batch of ``count`` samples: of its tensors and lists of that length."""
    if isinstance(batch, Tensor):
        return batch[part] if batch.ndim and len(batch) == count else batch
    if isinstance(batch, str | bytes) or not _values_of(batch):
        return batch
    if isinstance(batch, tuple | list) and not any(True for _ in tensors_in(batch)):
        return batch[part] if len(batch) == count else batch
    return _rebuild_batch(batch, [cut_batch(value, count, part) for value in _values_of(batch)])


def merge_batches(batches: Sequence[Any], counts: Sequence[int]) -> Any:
    """Join batches of so many samples into one; None where their samples differ in shape."""
    first = batches[0]
    if isinstance(first, Tensor):
        sized = [b.ndim and len(b) == n for b, n in zip(batches, counts, strict=True)]
        if all(sized):
            return torch.cat(list(batches)) if len({b.shape[1:] for b in batches}) == 1 else None
        return first if all(b.shape == first.shape and b.equal(first) for b in batches) else None
    if isinstance(first, str | bytes) or not _values_of(first):
        return first
    if isinstance(first, tuple | list) and not any(True for _ in tensors_in(first)):
        sized = [len(b) == n for b, n in zip(batches, counts, strict=True)]
        return type(first)(x for b in batches for x in b) if all(sized) else first
    columns = zip(*map(_values_of, batches), strict=True)
    values = [merge_batches(column, counts) for column in columns]
    if any(value is None for value in values):
        return None
    return _rebuild_batch(first, values)


def _rebuild_batch(batch: Any, values: Sequence[Any]) -> Any:
    """A batch of the same kind with other values."""
    if isinstance(batch, tuple | list):
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    other: Any = copy.copy(batch)
    if isinstance(batch, Mapping):
        for key, value in zip(batch, values, strict=True):
            other[key] = value
    else:
        for name, value in zip(vars(batch), values, strict=True):
            object.__setattr__(other, name, value)
    return other
