"""Half precision: its dtypes, and the conversion to float32 where sums would lose bits."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HALVES = frozenset(HALF.values())


def is_half(dtype: torch.dtype) -> bool:
    """Answer whether a type is float16 or bfloat16."""
    return dtype in _HALVES


def full_precision(numbers: Tensor) -> Tensor:
    """Return the tensor itself, or a copy in float32 of one in half precision: sums, residuals and
    factors need the bits that half precision lacks."""
    return numbers.float() if is_half(numbers.dtype) else numbers
