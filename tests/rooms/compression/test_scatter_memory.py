"""What a quantised reduce-scatter holds beside the gradient: as it runs, and from step to step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import codes
from regimes.compression.scatter import QuantisedScatter

WORKERS, PART = 4, 1 << 17
NEAREST = {"stochastic": False}
FEEDBACK = {**NEAREST, "error_feedback": True}
CASES = {  # options: the most copies of the gradient at once, bytes of a number that is owed
    "at random": ({}, 2, 0),
    "to the nearest": (NEAREST, 2, 0),
    "feedback": (FEEDBACK, 3, 4),
    "feedback in 16 bits": (FEEDBACK | {"residual_bits": 16}, 3, 2),
    "feedback in 8 bits": (FEEDBACK | {"residual_bits": 8}, 3, 1 + 4 / 64),
}


class Held(TorchDispatchMode):
    """Bytes of the storages that operations inside have made, and their peak."""

    def __init__(self, *known: Tensor | None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {x.untyped_storage()._cdata: 0 for x in known if x is not None}

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = f(*args, **(kwargs or {}))
        for tensor in tree_leaves(answer):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, key)
        return answer

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@pytest.mark.parametrize("level", [8, 4])
@pytest.mark.parametrize("name", CASES)
def test_copies_of_a_gradient_and_bytes_of_what_is_owed(
    name: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all numbers are computed at once, as on a GPU."""
    monkeypatch.setattr(codes, "on_gpu", lambda tensor: True)
    options, most, owed = CASES[name]
    compressor, layer = QuantisedScatter(**options), Layer("a", (WORKERS, PART))
    state = compressor.init(layer, 0)
    state.workers = WORKERS
    others = World(WORKERS, processes=WORKERS)  # which answer with the same bytes
    for _ in range(2):  # the second step adds what the first one owes
        flat = torch.randn(1, WORKERS, PART)
        with Held(flat, state.residual) as held:
            compressor.reduce(flat, state, level, Comm(others))
    assert most - 1 < held.peak / flat.nbytes < most
    kept = 0 if state.residual is None else state.residual.nbytes
    assert kept == owed * flat.numel()
