"""A hook's saved state for other layers, or another number of processes.

Layers are matched by name. One that the state lacks (it was frozen then) begins empty; one that the
model lacks (it is frozen now) is left out.

Most of a state is the same on all processes and is copied to each new one: compressor memories,
rows of past units, levels. Residuals differ. Error feedback has yet to send their mean over
workers, so that mean is preserved: the old workers are equal parts of [0, 1), and so are the new
ones; a new worker's residual is the mean of the old residuals over its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from regimes.collectives.requests import Layer
from regimes.errors import ConfigError
from regimes.policies.controller import Row

NAMED = 3  # layers that a sentence names; it counts the others


@dataclass(frozen=True)
class LayerMatch:
    """The layers of a state and those of a model.

    Attributes:
        saved: shape by name of the state's layers, in the order of the state's lists.
        layers: the model's.
    """

    saved: Mapping[str, Sequence[int]]
    layers: Sequence[Layer]

    @property
    def same(self) -> bool:
        """Whether the state's lists fit the model unchanged."""
        return list(self.saved) == [layer.name for layer in self.layers]

    @property
    def new(self) -> list[str]:
        """Layers that the state lacks."""
        return [layer.name for layer in self.layers if layer.name not in self.saved]

    @property
    def warning(self) -> str | None:
        """One sentence that names new layers and those left out; None if there are none."""
        here = {layer.name for layer in self.layers}
        left_out = [name for name in self.saved if name not in here]
        parts = []
        if self.new:
            parts.append(f"the state has no layer {several(self.new)}: no residual at first")
        if left_out:
            parts.append(f"the model does not train {several(left_out)} of the state: left out")
        return f"hook: {'; '.join(parts)}" if parts else None

    def values(self, saved: Sequence[Any], default: Sequence[Any]) -> list[Any]:
        """The state's list of one value per layer, in the model's order.

        Args:
            default: per layer of the model, the value if the state lacks it.
        """
        by_name = dict(zip(self.saved, saved, strict=True))
        return [by_name.get(x.name, d) for x, d in zip(self.layers, default, strict=True)]

    def rows(self, rows: Iterable[Row], levels: Sequence[str]) -> list[Row]:
        """Rows of past units; what a new layer did not measure is None.

        Args:
            levels: per layer of the model, its level in past units if it is new.
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
        """The norm's sums of a unit under way, zero for a new layer. "update" has a tensor per
        layer; any other has one tensor whose last dimension holds all layers end to end."""
        return {name: self._sum(name, tensors) for name, tensors in sums.items()}

    def _sum(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        like = tensors[0]
        if name == "update":
            return self.values(tensors, [like.new_zeros(layer.shape) for layer in self.layers])
        parts = like.split([math.prod(shape) for shape in self.saved.values()], -1)
        zeros = [like.new_zeros(*like.shape[:-1], layer.size) for layer in self.layers]
        return [torch.cat(self.values(parts, zeros), -1)]


def several(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED
    rest = f" and {more} other{'s' * (more > 1)}" if more > 0 else ""
    return ", ".join(map(repr, names[:NAMED])) + rest


def redistribute(full: Any, workers: int) -> list[dict[str, Any]]:
    """One state for each of ``workers`` processes; the saved ones if there were as many.

    Raises:
        ConfigError: it is no full state, or its statistics cannot be divided.
    """
    with damage_refused():
        saved = _processes(full)
        if len(saved) == workers:
            return saved
        if any(part["sums"].keys() - {"update"} for part in saved):
            refuse(
                f"it was saved within an epoch, when each of {len(saved)} processes had its own "
                f"sums for the norm's signal; this job has {workers}: on another number of "
                "processes load a state that was saved right after epoch_end"
            )
        residuals = {
            name: [part["residuals"][name] for part in saved] for name in saved[0]["residuals"]
        }
        return [
            {
                **saved[0],
                "worker": worker,
                "workers": workers,
                "residuals": {
                    name: residual_of(worker, workers, old) for name, old in residuals.items()
                },
            }
            for worker in range(workers)
        ]


def residual_of(worker: int, workers: int, old: Sequence[Tensor | None]) -> Tensor | None:
    """The residual of one of ``workers`` new workers, from those of the old ones; None is zero."""
    known = next((tensor for tensor in old if tensor is not None), None)
    if known is None:
        return None
    # Whole numbers: [0, 1) has len(old) * workers ticks, an old part ``workers`` of them, a new
    # part len(old).
    count, start = len(old), worker * len(old)
    ends = [(i * workers, (i + 1) * workers) for i in range(count)]
    overlaps = [max(0, min(start + count, end) - max(start, begin)) for begin, end in ends]
    unit = math.gcd(*overlaps)  # a part inside one old part has weight 1: a copy, bit for bit
    total = torch.zeros_like(known)
    for overlap, tensor in zip(overlaps, old, strict=True):
        if overlap and tensor is not None:
            total.add_(tensor, alpha=overlap // unit)
    return total.div_(count // unit)


def _processes(full: Any) -> list[dict[str, Any]]:
    """The states in a full one."""
    if full is None:
        refuse("process 0 must pass the value that hook.full_state_dict() returned there")
    if not isinstance(full, Mapping) or not full.get("processes"):
        one = isinstance(full, Mapping) and "residuals" in full
        hint = (
            ": it is the state of one process, load it with hook.load_state_dict()" if one else ""
        )
        refuse(f"it was not returned by hook.full_state_dict() on process 0{hint}")
    states = list(full["processes"])
    order = [(part["worker"], part["workers"]) for part in states]
    if order != [(i, len(states)) for i in range(len(states))]:
        refuse("it does not hold the states of all processes in their order")
    return states


@contextmanager
def damage_refused() -> Iterator[None]:
    """Turn what a damaged state raises into the ConfigError of one that cannot be loaded."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        refuse(f"it is damaged ({type(error).__name__}: {str(error).partition(chr(10))[0]})")


def refuse(why: str) -> NoReturn:
    """Raise the ConfigError of a state that cannot be loaded."""
    raise ConfigError(f"cannot load the hook's state: {why}")
