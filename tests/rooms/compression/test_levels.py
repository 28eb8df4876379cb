"""Which levels a compressor has: listed by hand, and its usual ones among them."""

from __future__ import annotations

import pytest

from regimes.base.config import DENSE, Level
from regimes.base.errors import ConfigError
from regimes.compression import REGISTRY, make_compressor

TRIED: list[Level] = [*range(-1, 18), 32, 0.5, 0.0, 100, 100.5, "fp16", "bf16", "fp32", DENSE]
HAVE: dict[str, list[Level]] = {
    "dense": [DENSE],
    "low-pass": [0.5, 1, DENSE],
    "powersgd": [*range(1, 18), 32, 100, DENSE],
    "acp-sgd": [*range(1, 18), 32, 100, DENSE],
    "topk": [*range(1, 18), 32, 0.5, 100, DENSE],
    "randomk": [*range(1, 18), 32, 0.5, 100, DENSE],
    "dct-topk": [*range(1, 18), 32, 0.5, 100, DENSE],
    "sign": [1, DENSE],
    "quantise": [2, 4, 8, 16, DENSE],
    "quantised-all-reduce": [4, 8, DENSE],
    "threshold": [*range(1, 18), 32, 0.5, 100, 100.5, DENSE],
    "chunked-topk": [*range(1, 18), 32, 0.5, 100, DENSE],
    "cast": ["fp16", "bf16", DENSE],
}


def accepts(name: str, level: Level) -> bool:
    try:
        make_compressor({"name": name}).check(level)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", HAVE)
def test_levels_are_those_of_the_list(name: str) -> None:
    assert [level for level in TRIED if accepts(name, level)] == [
        level for level in TRIED if level in HAVE[name]
    ]


def test_every_compressor_has_its_usual_levels() -> None:
    assert set(HAVE) == {*REGISTRY, "dct-topk", "low-pass", "threshold"}
    for name in HAVE:
        usual = make_compressor({"name": name}).usual
        assert all(accepts(name, level) for level in usual.values()), name
