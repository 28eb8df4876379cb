"""Weights of the micro-batches of a probe, with which all together give the loss of one batch.

A loss of a model and a batch is a black box here: a mean over samples, over the tokens that are not
ignored, or something else. It is tried on parts of the batches, which leaves the model and the
random streams as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.reduction import (
    IGNORED,
    cut_batch,
    is_near,
    join_losses,
    merge_batches,
    nudge_parameters,
    split_samples,
    tensors_in,
)
from regimes.instruments.hessian.probe import (
    ProbeLoss,
    ProcessMean,
    batch_size,
    cross_entropy,
    preserve_model,
)

Weight = Callable[[Any], Any] | Literal["samples"] | None  # of a batch; None: found by trying
Check = tuple[float, list[float], list[Any]]  # a batch's loss, those of its parts, and the parts
REMEDY = (
    "say by what a batch counts, weight(batch), such as the number of its tokens that are not "
    "ignored"
)


def weights_of(
    model: nn.Module,
    loss: ProbeLoss,
    batches: Sequence[Any],
    weight: Weight = None,
    mean: ProcessMean | None = None,
) -> list[float]:
    """Find one weight for each batch: the sum of losses times weights, averaged over processes, is
    the loss of all batches of all processes as of one. All processes call it together.

    Raises:
        ConfigError: trying does not show what the loss averages over, or nothing counts.
    """
    if weight is None and loss is cross_entropy:
        weight = _count_labels  # batches may differ in length
    if weight is None:
        return _find_weights(model, loss, batches, mean)
    if weight == "samples":
        counts = [batch_size(batch) for batch in batches]
        return [n / sum(counts) for n in counts]
    weights = [float(weight(batch)) for batch in batches]
    (total,) = _over_processes([sum(weights)], mean, model)
    if not total > 0:
        raise ConfigError("No target of the probe counts: the weights of all batches are zero.")
    return [own / total for own in weights]


def _over_processes(
    numbers: list[float], mean: ProcessMean | None, model: nn.Module
) -> list[float]:
    if mean is None:
        return numbers
    device = next(model.parameters()).device
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    averaged: list[float] = mean(total).tolist()
    return averaged


# -- what a loss may average over ------------------------------------------------------------------


def _count_samples(batch: Any) -> float:
    return float(batch_size(batch))


def _count_next_labels(batch: Any) -> float:
    """As a model that predicts the next of its labels counts them (Hugging Face)."""
    return float((_labels(batch)[..., 1:] != IGNORED).sum())


def _count_labels(batch: Any) -> float:
    return float((_labels(batch) != IGNORED).sum())


def _count_unmasked(batch: Any) -> float:
    batch = _inner(batch)
    names = [name for name in batch if "mask" in str(name)] if isinstance(batch, Mapping) else []
    return float((batch[names[0]] != 0).sum()) if names else _count_labels(batch)


def _labels(batch: Any) -> Tensor:
    """``labels``, or the last tensor."""
    batch = _inner(batch)
    named = batch.get("labels") if isinstance(batch, Mapping) else None
    return named if isinstance(named, Tensor) else [*tensors_in(batch)][-1]


def _inner(batch: Any) -> Any:
    """What a hook's probe has in a tuple of one."""
    return batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch


CANDIDATES = _count_samples, _count_next_labels, _count_labels, _count_unmasked


def _find_weights(
    model: nn.Module, loss: ProbeLoss, batches: Sequence[Any], mean: ProcessMean | None
) -> list[float]:
    """The weights by the candidates that fit all checks, if they agree; what processes find is
    averaged before anything is raised, so that all go on or none."""
    if len(batches) == 1 and mean is None:
        return [1.0]
    checks, why = list[Check](), ""
    try:
        with preserve_model(model, "eval"), nudge_parameters(model), torch.enable_grad():
            checks = [*_evaluate_parts(model, loss, batches)]
    except Exception as error:  # of the user's loss, which may raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
    fits, weights = list[float](), list[list[float]]()
    for candidate in CANDIDATES:
        found = [] if why else _fit_candidate(candidate, batches, checks, model)
        fits.append(float(bool(found)))
        weights.append(found or [0.0 for _ in batches])
    # one mean for both: a candidate fits if it fits on all processes, and its weights are divided
    # by the mean over processes of their sums
    averaged = _over_processes([*fits, *map(sum, weights)], mean, model)
    fitting = [i for i in range(len(fits)) if averaged[i] == 1]
    shares = [[w / averaged[len(fits) + i] for w in weights[i]] for i in fitting]
    same = all(abs(a - b) < 1e-9 for row in shares for a, b in zip(row, shares[0], strict=True))
    (unlike,) = _over_processes([float(not same)], mean, model)
    if not fitting:
        raise ConfigError(f"The probe's loss is no mean over samples ({why or 'tried'}): {REMEDY}.")
    if unlike:
        raise ConfigError(
            "The probe's loss may be a mean over samples or over tokens, which differ here, and no "
            f"batch shows which it is: {REMEDY}."
        )
    return shares[0]


def _evaluate_parts(model: nn.Module, loss: ProbeLoss, batches: Sequence[Any]) -> Iterator[Check]:
    """Each batch against its parts; and the first samples of all batches together against the first
    samples of each, because samples may differ between batches alone."""

    def value(batch: Any) -> float:
        return float(loss(model, batch).detach())

    counts = [batch_size(batch) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        pieces = [cut_batch(batch, count, part) for part in split_samples(count)]
        if len(pieces) > 1:
            yield value(batch), [value(piece) for piece in pieces], pieces
    few = max(1, max(counts) // len(batches))
    firsts = [cut_batch(b, n, slice(0, few)) for b, n in zip(batches, counts, strict=True)]
    together = merge_batches(firsts, [min(few, n) for n in counts]) if len(batches) > 1 else None
    if together is not None:
        yield value(together), [value(first) for first in firsts], firsts


def _fit_candidate(
    weigh: Callable[[Any], float], batches: Sequence[Any], checks: list[Check], model: nn.Module
) -> list[float]:
    """A candidate's weights of the batches; empty if a check contradicts it."""
    try:
        weights = [weigh(batch) for batch in batches]
        for whole, values, pieces in checks:
            own = [weigh(piece) for piece in pieces]
            if not is_near(join_losses(values, own, sum(own)), whole, values, *model.parameters()):
                return []
    except (TypeError, ValueError, IndexError, RuntimeError):
        return []
    return weights if sum(weights) > 0 else []
