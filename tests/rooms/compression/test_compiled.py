"""Rounding as one function (oracle: the operators one by one, in bits)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regimes.collectives.requests import Layer
from regimes.collectives.world import World
from regimes.compression import compiled, make_compressor
from regimes.compression.reducer import Reducer
from regimes.errors import ConfigError

SHAPES = [(6, 10), (40, 33), (5, 7, 3, 3), (64, 80)]
FEEDBACK = {"stochastic": False, "error_feedback": True}
CASES = [
    ("quantise", 8, 1, {}),
    ("quantise", 2, 3, {}),
    ("quantise", 4, 3, FEEDBACK),
    ("quantise", 16, 1, {}),  # as without
    ("quantised-all-reduce", 8, 1, {}),
    ("quantised-all-reduce", 4, 3, {}),  # parts of odd sizes
    ("quantised-all-reduce", 4, 3, FEEDBACK),
    ("quantised-all-reduce", 8, 3, {"block": 7}),  # as without
]


def updates(name: str, level: int, workers: int, **fields: Any) -> list[Tensor]:
    """Of two steps."""
    layers = [Layer(f"layer{i}", shape) for i, shape in enumerate(SHAPES)]
    reducer = Reducer(make_compressor({"name": name, **fields}), layers, World(workers), seed=0)
    made: list[Tensor] = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        stacks = [torch.randn(workers, *shape, generator=generator) for shape in SHAPES]
        made += reducer.reduce(range(len(layers)), stacks, [level] * len(layers)).values()
    return [update.clone() for update in made]


def check(name: str, level: int, workers: int, fields: dict[str, Any]) -> None:
    found = updates(name, level, workers, kernels="compiled", **fields)
    wanted = updates(name, level, workers, **fields)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("name", "level", "workers", "fields"), CASES)
def test_the_function_gives_the_bits_of_the_operators(
    name: str, level: int, workers: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def plain(*key: Any) -> Any:
        called.append(key)
        return lambda *given: compiled.round_blocks(*key[:-1], *given)

    monkeypatch.setattr(compiled, "kernel_of", plain)
    monkeypatch.setattr(compiled, "require_compiler", lambda: None)
    check(name, level, workers, fields)
    assert bool(called) == (level != 16 and fields.get("block") != 7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_the_compiled_function_gives_them_too() -> None:
    for case in CASES:
        check(*case)


def test_each_half_of_a_word_is_drawn_on_a_gpu_as_both_are_on_a_cpu() -> None:
    seeds, places = torch.tensor([[5, 2**62 + 1]]), torch.tensor([[7, 64]])
    word = compiled.mix_words(seeds.unsqueeze(-1), (places.unsqueeze(-1) + torch.arange(32)) // 2)
    both = compiled.uniform_of_blocks(seeds, places, 32, odd=True)
    assert torch.equal(compiled.half_of(word, places.unsqueeze(-1) + torch.arange(32)), both)


def test_without_a_compiler_the_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        updates("quantise", 8, 1, kernels="compiled")
