"""The trace of the Fisher information: the signal of Achille et al. (2019) for critical periods.

It is the mean over samples of the squared gradient of log p(y | x), exact over the probe set: the
gradient of each sample is taken on its own, which costs up to four times as much as in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from regimes.curvature.probe import (
    Estimate,
    Mode,
    ProcessMean,
    check_probe,
    no_random_draws,
    preserved,
)
from regimes.errors import TrainingError, require
from regimes.seeding import stream


@dataclass(frozen=True)
class FisherTrace:
    """Whole and per layer; the layers' values add up to the total's."""

    total: Estimate
    layers: dict[str, Estimate]


def fisher_trace(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    kind: str = "model",
    draws: int = 1,
    seed: int = 0,
    first_sample: int = 0,
    mode: Mode | None = None,
    mean: ProcessMean | None = None,
) -> FisherTrace:
    """The Fisher trace of a classifier over (inputs, class labels); leaves no trace on the model.

    Args:
        kind: "model" draws labels from the model's own softmax: the Fisher matrix proper, for
            cross-entropy the Gauss-Newton matrix. "empirical" uses the batch's.
        draws: labels per sample ("model" only).
        first_sample: index, in the union over processes, of this process's first sample. Labels
            are keyed by (seed, index), so any split of the data draws the same ones.
        mode: "eval" as in `HessianProduct`; batch statistics mix samples and are not offered.
        mean: averages over processes, which must hold equally many samples.

    The standard error is that of the mean over the samples, taken as drawn from a larger set.

    Raises:
        ConfigError: empty probe set, no parameter with a gradient, a non-deterministic model.
        TrainingError: a gradient is not finite.
    """
    require(kind in ("model", "empirical"), "kind", kind, "'model' or 'empirical'")
    require(mode in (None, "eval"), "mode", mode, "'eval' or None")
    require(draws == 1 or (draws > 1 and kind == "model"), "draws", draws, "1, or more for 'model'")
    samples = [pair for x, y in batches for pair in zip(x.split(1), y.split(1), strict=True)]
    named = check_probe(model, len(samples), mode)
    rows = []
    with preserved(model, mode), torch.enable_grad():
        for index, (x, y) in enumerate(samples):
            with nullcontext() if index else no_random_draws():
                logits = model(x)
            if not bool(torch.isfinite(logits).all()):
                raise TrainingError("The model's output is not finite; training has diverged.")
            if kind == "model":
                p = logits.detach().double().softmax(-1).cpu()
                key = stream(seed, "fisher", first_sample + index)
                y = torch.multinomial(p[0], draws, replacement=True, generator=key).to(y)
            rows.append(_squares(logits, y, list(named.values())))
    return _summary(torch.stack(rows), list(named), mean, samples[0][0].device)


def _squares(logits: Tensor, labels: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Squared gradient norms of one sample, per layer, averaged over its labels."""
    out = torch.zeros(len(parameters), dtype=torch.float64)
    for label in labels:
        loss = functional.cross_entropy(logits, label.view(1))
        gradient = torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        norms = torch.stack([g.detach().double().square().sum() for g in gradient])
        out += norms.cpu() / len(labels)
    return out


def _summary(
    squares: Tensor, names: list[str], mean: ProcessMean | None, device: torch.device
) -> FisherTrace:
    """Means and standard errors over samples [n, layers] and processes."""
    table = torch.cat([squares.sum(1, keepdim=True), squares], dim=1)
    moments = torch.cat([table.mean(0), table.square().mean(0)])
    if mean is not None:
        moments = mean(moments.to(device)).cpu()
    if not bool(torch.isfinite(moments).all()):
        raise TrainingError("A sample's gradient is not finite; training has diverged.")
    n = len(table)
    estimates = [
        Estimate(float(m), float((s - m * m).clamp(min=0) / max(n - 1, 1)) ** 0.5, n)
        for m, s in zip(*moments.chunk(2), strict=True)
    ]
    return FisherTrace(estimates[0], dict(zip(names, estimates[1:], strict=True)))
