"""Fits a saved state to the layers that a model has now, and refuses one that cannot be loaded.

Layers are matched by name. One that the state lacks (it was frozen then) begins empty; one that the
model lacks (it is frozen now) is left out.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from regimes.base.config.retired import RETIRED
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.job.state import State
from regimes.policies.controller import Row

_OF_VALUES = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
_OF_BYTES = (EOFError, pickle.UnpicklingError)  # and RuntimeError
_BY_LAYER = "update"  # the signal whose sums are one tensor per layer
_NAMED = 3  # layers that a sentence names; it counts the others


@dataclass(frozen=True)
class FittedState:
    """Holds a saved state after it was fitted to the layers that a job has now.

    Attributes:
        state: the state, with the job's layers.
        warning: a sentence that names layers that are new or left out, if there are any.
    """

    state: State
    warning: str | None = None


@dataclass(frozen=True)
class LayerMatch:
    """Matches the layers of a saved state with a model's layers, by name.

    Attributes:
        saved: shape by name of the state's layers, in the order of the state's lists.
        layers: the model's.
    """

    saved: Mapping[str, Sequence[int]]
    layers: Sequence[Layer]

    @property
    def is_same(self) -> bool:
        """Return whether the state's lists fit the model unchanged."""
        return list(self.saved) == [layer.name for layer in self.layers]

    @property
    def new_layers(self) -> list[str]:
        """Name the layers that the state lacks."""
        return [layer.name for layer in self.layers if layer.name not in self.saved]

    @property
    def warning(self) -> str | None:
        """Return one sentence that names new layers and those left out; None if there are none."""
        here = {layer.name for layer in self.layers}
        left_out = [name for name in self.saved if name not in here]
        parts = []
        if self.new_layers:
            parts.append(
                f"the state has no layer {list_names(self.new_layers)}: no residual at first"
            )
        if left_out:
            parts.append(f"the model does not train {list_names(left_out)} of the state: left out")
        return f"hook: {'; '.join(parts)}" if parts else None

    def match_values(self, saved: Sequence[Any], default: Sequence[Any]) -> list[Any]:
        """Return the state's list of one value per layer, in the model's order.

        Args:
            default: per layer of the model, the value if the state lacks it.
        """
        by_name = dict(zip(self.saved, saved, strict=True))
        return [by_name.get(x.name, d) for x, d in zip(self.layers, default, strict=True)]

    def match_rows(self, rows: Iterable[Row], levels: Sequence[str]) -> list[Row]:
        """Return the rows of past units in the model's order; what a new layer did not measure is
        None.

        Args:
            levels: per layer of the model, its level in past units if it is new.
        """
        none = [None] * len(self.layers)
        return [
            {
                **row,
                "layers": {
                    name: self.match_values(values, levels if name == "level" else none)
                    for name, values in row["layers"].items()
                },
                "statistics": {k: self.match_values(v, none) for k, v in row["statistics"].items()},
            }
            for row in rows
        ]

    def match_sums(self, sums: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Return in the model's order what the norms that detectors read (``signal``) have added up
        in a unit under way, zero for a new layer.

        Args:
            sums: by signal. "update" has a tensor per layer; any other has one tensor, with all
                layers end to end in its last dimension.
        """
        matched = {}
        for name, tensors in sums.items():
            like = tensors[0]
            if name == _BY_LAYER:
                zeros = [like.new_zeros(layer.shape) for layer in self.layers]
                matched[name] = self.match_values(tensors, zeros)
            else:
                parts = like.split([math.prod(shape) for shape in self.saved.values()], -1)
                zeros = [like.new_zeros(*like.shape[:-1], layer.size) for layer in self.layers]
                matched[name] = [torch.cat(self.match_values(parts, zeros), -1)]
        return matched


def describe_compressor(compressor: Any) -> str:
    """Return the text by which a state tells compressors apart, the same on all processes. A
    dataclass has its fields in it; other objects have their class's name."""
    return repr(compressor) if is_dataclass(compressor) else type(compressor).__qualname__


def respell_compressor(saved: str, compressor: Any) -> str:
    """Return the text of a saved compressor as this version would write it: without fields that
    have left, and with those that its version did not have yet. This is done only if this job's
    compressor has the defaults of these fields and is the same otherwise."""
    if not is_dataclass(compressor):
        return saved
    for path in RETIRED:
        if path.startswith("compressor."):
            name = path.removeprefix("compressor.")
            saved = re.sub(rf", {name}=(?:'[^']*'|\w+)", "", saved)
    known = [
        f"{field.name}={value!r}"
        for field in fields(compressor)
        if (value := getattr(compressor, field.name)) != field.default
        or re.search(rf"\b{field.name}=", saved)
    ]
    same = saved == f"{type(compressor).__qualname__}({', '.join(known)})"
    return repr(compressor) if same else saved


def list_names(names: Sequence[str]) -> str:
    """Join the first few names, and count the others."""
    more = len(names) - _NAMED
    rest = f" and {more} other{'s' * (more > 1)}" if more > 0 else ""
    return ", ".join(map(repr, names[:_NAMED])) + rest


@contextmanager
def damage_as_error() -> Iterator[None]:
    """Turn what a damaged state raises into the ConfigError of one that cannot be loaded."""
    try:
        yield
    except (*_OF_VALUES, *_OF_BYTES) as error:
        refuse_state(f"it is damaged ({type(error).__name__}: {str(error).partition(chr(10))[0]})")


def refuse_state(why: str) -> NoReturn:
    """Raise the ConfigError of a state that cannot be loaded."""
    raise ConfigError(f"cannot load the hook's state: {why}")
