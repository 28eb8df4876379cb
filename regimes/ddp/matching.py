"""What a state has by layer, for a model whose layers are not those that it was saved with.

Layers are matched by name. A layer that the state lacks (it was frozen then) begins empty; one that
the model lacks (it is frozen now) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regimes.collectives.requests import Layer

NAMED = 3  # so many layers a sentence names, and counts the rest


@dataclass(frozen=True)
class Match:
    """The layers of a model next to those of a state.

    Attributes:
        saved: the state's, with their shapes, in the order of its lists.
        layers: the model's.
    """

    saved: Mapping[str, Sequence[int]]
    layers: Sequence[Layer]

    @property
    def same(self) -> bool:
        """Whether the state's lists are the model's as they are."""
        return list(self.saved) == [layer.name for layer in self.layers]

    @property
    def lacking(self) -> list[str]:
        """Layers that the state lacks."""
        return [layer.name for layer in self.layers if layer.name not in self.saved]

    @property
    def left_out(self) -> list[str]:
        """Layers that the model lacks."""
        here = {layer.name for layer in self.layers}
        return [name for name in self.saved if name not in here]

    @property
    def news(self) -> str | None:
        """One sentence of what begins empty and what is left out; None where nothing does."""
        said = []
        if self.lacking:
            said.append(f"the state has no layer {several(self.lacking)}: no residual at first")
        if self.left_out:
            said.append(f"the model does not train {several(self.left_out)} of the state: left out")
        return f"hook: {'; '.join(said)}" if said else None

    def values(self, saved: Sequence[Any], unknown: Sequence[Any]) -> list[Any]:
        """A list of the state, one value per layer, in the model's order.

        Args:
            unknown: per layer of the model, what stands for a value that the state lacks.
        """
        found = dict(zip(self.saved, saved, strict=True))
        return [
            found.get(layer.name, other) for layer, other in zip(self.layers, unknown, strict=True)
        ]

    def rows(self, rows: Iterable[Mapping[str, Any]], levels: Sequence[str]) -> list[Any]:
        """Past epochs; None is what was not measured.

        Args:
            levels: per layer of the model, the level of one that the state lacks.
        """
        none = [None] * len(self.layers)
        return [
            {
                **row,
                "layers": {
                    name: self.values(values, levels if name == "level" else none)
                    for name, values in row["layers"].items()
                },
                "statistics": {k: self.values(v, none) for k, v in row["statistics"].items()},
            }
            for row in rows
        ]

    def sums(self, sums: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """The norms' sums of an epoch under way, zero where the state lacks a layer: "update" has a
        tensor for each layer, any other one whose last dimension is that of all layers."""
        return {name: self._sum(name, tensors) for name, tensors in sums.items()}

    def _sum(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        like = tensors[0]
        if name == "update":
            return self.values(tensors, [like.new_zeros(layer.shape) for layer in self.layers])
        parts = like.split([math.prod(shape) for shape in self.saved.values()], -1)
        zeros = [like.new_zeros(*like.shape[:-1], layer.size) for layer in self.layers]
        return [torch.cat(self.values(parts, zeros), -1)]


def several(names: Sequence[str]) -> str:
    """The first few of some layers, and how many more there are."""
    more = len(names) - NAMED
    rest = f" and {more} other{'s' * (more > 1)}" if more > 0 else ""
    return ", ".join(map(repr, names[:NAMED])) + rest
