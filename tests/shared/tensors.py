"""Tables of tensors, compared: those of the second one decide which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def same(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: Any = None) -> None:
    """Bit for bit; None is None."""
    for name, tensor in theirs.items():
        assert tensor is mine[name] is None or torch.equal(mine[name], tensor), (where, name)


def near(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], most: float, where: Any = None
) -> None:
    """Apart by at most that much."""
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, rtol=0, atol=most), (where, name)


def close(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], most: float, where: Any = None
) -> None:
    """The same names, and apart by at most so much of each tensor's largest number."""
    assert mine.keys() == theirs.keys(), where
    for name, tensor in theirs.items():
        assert (mine[name] is None) == (tensor is None), (where, name)
        if tensor is not None:
            scale = tensor.abs().max().clamp_min(1e-30)
            assert (mine[name] - tensor).abs().max() / scale <= most, (where, name)


def alike(a: Any, b: Any) -> bool:
    """Tensors bit for bit, in tables and lists of any depth; NaN is NaN."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict):
        return [*a] == [*b] and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b or a != a)
