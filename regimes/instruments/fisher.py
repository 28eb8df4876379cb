"""The trace of the Fisher information: the signal of Achille et al. (2019) for critical periods.

The trace is the mean over samples of the squared gradient of log p(y | x): with labels y drawn from
the model's own softmax ("model", the Fisher proper, which for cross-entropy is the Gauss-Newton
matrix), or with the data's labels ("empirical"). Both are exact over the probe set given the
labels, since the gradients of single samples are taken one by one (a batch of one costs about
what its share of a batch costs on a large net, and four times as much on a small one).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from regimes.errors import ConfigError, TrainingError
from regimes.instruments.estimate import Estimate
from regimes.instruments.probe import Mean, Mode, check_deterministic
from regimes.instruments.untouched import random_states, same_random_states, untouched
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
    mean: Mean | None = None,
) -> FisherTrace:
    """The Fisher trace of a classifier over (inputs, class labels), with standard errors.

    Args:
        kind: "model" draws labels from the softmax, "empirical" uses the batch's.
        draws: labels per sample ("model" only).
        first_sample: index, in the union over processes, of this process's first sample. Labels
            are keyed by (seed, index), so any split of the data draws the same ones.
        mode: "eval" as in `HessianProduct`; batch statistics mix samples and are not offered.
        mean: averages over processes, which must hold equally many samples.

    Leaves no trace on the model. The error is that of the mean over the samples here, which it
    takes as drawn from a larger set.

    Raises:
        ConfigError: empty probe set, no parameter with a gradient, a non-deterministic model.
        TrainingError: a gradient is not finite.
    """
    if kind not in ("model", "empirical") or mode not in (None, "eval"):
        raise ConfigError(f"kind is {kind!r} and mode {mode!r}; see fisher_trace for the choices.")
    if draws < 1 or (kind == "empirical" and draws != 1):
        raise ConfigError(f"draws is {draws}; expected 1 or, for kind='model', more.")
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    samples = [pair for x, y in batches for pair in zip(x.split(1), y.split(1), strict=True)]
    if not samples or not named:
        what = "No parameter requires a gradient" if samples else "The probe set is empty"
        raise ConfigError(f"{what}; there is no Fisher trace to measure.")
    if mode is None:
        check_deterministic(model)
    rows = []
    with untouched(model), torch.enable_grad():
        if mode == "eval":
            model.eval()
        for index, (x, y) in enumerate(samples):
            key = None if kind == "empirical" else (seed, "fisher", first_sample + index)
            rows.append(_squares(model, list(named.values()), x, y, key, draws))
    return _summary(torch.stack(rows), list(named), mean, samples[0][0].device)


def _squares(
    model: nn.Module,
    parameters: list[nn.Parameter],
    x: Tensor,
    y: Tensor,
    key: tuple[int, str, int] | None,
    draws: int,
) -> Tensor:
    """Squared gradient norms of one sample, per layer, averaged over its labels."""
    before = random_states() if key is None or key[2] == 0 else None
    logits = model(x)
    if before is not None and not same_random_states(before, random_states()):
        raise ConfigError("The model draws random numbers; pass mode='eval' or call model.eval().")
    if not bool(torch.isfinite(logits).all()):
        raise TrainingError("The model's output is not finite; training has diverged.")
    labels = y.expand(draws)
    if key is not None:
        p = logits.detach().double().softmax(-1).cpu()
        labels = torch.multinomial(p[0], draws, replacement=True, generator=stream(*key)).to(y)
    out = torch.zeros(len(parameters), dtype=torch.float64)
    for label in labels:
        loss = functional.cross_entropy(logits, label.view(1))
        gradient = torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        norms = torch.stack([g.detach().double().square().sum() for g in gradient])
        out += norms.cpu() / draws
    return out


def _summary(
    squares: Tensor, names: list[str], mean: Mean | None, device: torch.device
) -> FisherTrace:
    """Means and standard errors over samples [n, layers], over all processes, which meet on the
    model's device."""
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
