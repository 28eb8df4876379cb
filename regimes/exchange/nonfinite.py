"""The flag of a gradient that is not finite: 0, or NaN. It costs no collective of its own.

Two ways: the flag is added to numbers that are averaged anyway, so that all processes know it in
the same step; or, where all compressors declare ``propagates_nonfinite``, the updates, which are
the same on all processes, show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.base import Compressor
from regimes.compression.bucket import State
from regimes.compression.kernels import on_gpu
from regimes.config import AnyLevel, Level


def finite_flag(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """0, or NaN where any entry is not finite. On a GPU also NaN where the sum overflows: to look
    at the entries, the host would have to wait."""
    if on_gpu(tensors[0]):
        return 0 * torch.stack(torch._foreach_norm([*tensors], 1)).sum()
    total = torch.stack([t.sum() for t in tensors]).sum()
    if not bool(total.isfinite()):
        finite = all(bool(t.isfinite().all()) for t in tensors)
        total = torch.full_like(total, 0.0 if finite else torch.nan)
    return 0 * total


def loss_with_flag(losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]) -> Tensor:
    """The losses, ``[rows]``, in float32 or float64; NaN where a row's gradient is not finite, as
    in ``finite_flag``."""
    sums = stack.sum(1)
    if not on_gpu(sums) and not bool(sums.isfinite().all()):
        sums = torch.where(stack.isfinite().all(1), 0, torch.nan)
    flagged = losses + 0 * sums
    return flagged if flagged.dtype == torch.float64 else flagged.to(torch.float32)


def shows_in_updates(compressors: Sequence[Compressor], rows: Sequence[Tensor]) -> bool:
    """Does a gradient that is not finite on any process show in the updates, which are smaller than
    the gradients? Not on a GPU, where the host would wait for it, nor in half precision, where an
    update may overflow as it is written."""
    return all(c.propagates_nonfinite for c in compressors) and all(
        not on_gpu(x) and x.dtype in (torch.float32, torch.float64) for x in rows
    )


def flag_of_updates(
    layers: Sequence[int],
    at: Callable[[int, AnyLevel], tuple[Compressor, Level]],
    updates: Mapping[int, Tensor],
    states: Sequence[State] | Mapping[int, State],
    levels: Sequence[AnyLevel],
) -> tuple[Float[Tensor, ""], bool]:
    """A flag, and whether it is finite: it is not where an update shows that a gradient was not
    finite, or is not finite itself; of compressors with ``propagates_nonfinite``. ``at``:
    `Reducer.at`."""
    at_levels = [at(i, levels[i]) for i in layers]
    probes = [
        compressor.finite_probe(updates[i], states[i], level)
        for i, (compressor, level) in zip(layers, at_levels, strict=True)
    ]
    total = torch.stack(torch._foreach_norm(probes, 1)).sum()
    # A sum may overflow where its numbers do not, and their product where they do not.
    if bool(total.isfinite()):
        return total, True
    flag = finite_flag([*(updates[i] for i in layers), *probes])
    return flag, bool(flag.isfinite())


def fill_if_nonfinite(tensors: Sequence[Tensor], flag: Tensor, value: float) -> None:
    """Fill tensors where the flag, 0 or NaN, is not finite. On a GPU the host does not ask whether
    it is."""
    if on_gpu(flag) and value != value:
        torch._foreach_add_([*tensors], flag)  # in few launches
        return
    broken = ~flag.isfinite()
    if not on_gpu(flag) and not broken:
        return
    for tensor in tensors:
        tensor.masked_fill_(broken, value)
