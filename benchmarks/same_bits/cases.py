"""All cases."""

from __future__ import annotations

from benchmarks.same_bits import hook, local, own, trainer
from benchmarks.same_bits.case import Case

CASES: list[Case] = [*trainer.CASES, *own.CASES, *hook.CASES, *local.CASES]
