"""Every registered compressor has its row in the benchmark of floors."""

from __future__ import annotations

from benchmarks.cases.compressors import LEVELS
from regimes.compression import REGISTRY, make_compressor


def test_every_compressor_is_measured_at_levels_that_it_takes() -> None:
    assert {*REGISTRY} == {*LEVELS}
    for name, levels in LEVELS.items():
        for level in levels:
            make_compressor({"name": name}).check(level)
