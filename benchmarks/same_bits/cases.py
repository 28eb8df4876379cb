"""All cases."""

from __future__ import annotations

from benchmarks.same_bits import exchanges, own, trainer
from benchmarks.same_bits.case import Case

CASES: list[Case] = [*trainer.CASES, *own.CASES, *exchanges.CASES]
