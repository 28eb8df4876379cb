"""Memories of compressors that change tentatively: a step may be skipped, or thrown away later.

A layer's state belongs to its parameter, not to a place in a bucket. During a step only a copy
changes. ``adopt`` replaces the states by the copies, of layers that the optimiser will step; error
feedback would otherwise forget what was never applied. The states before a step stay until the next
one, which may find that the step was not applied: then ``undo`` brings them back. This costs one
more residual per process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regimes.compression.base import State
from regimes.compression.kernels import on_gpu
from regimes.compression.reducer import Reducer


@dataclass
class Before:
    """The memories before the last step.

    Attributes:
        layers: whose memories the step has changed, and which are not taken back yet.
    """

    states: list[State]
    scales: list[float]
    layers: set[int]


class TentativeMemories:
    """Copies of a reducer's memories for one step at a time.

    Attributes:
        scales: per layer, the scale of the loss in which its residual is stored.
        spare: per layer, the residual before the last step: the next step writes to its memory.
        before: what ``undo`` needs; None: there is nothing to undo.
    """

    def __init__(self, reducer: Reducer) -> None:
        count = len(reducer.layers)
        self.reducer = reducer
        self.scales = [1.0] * count
        self.spare: list[Tensor | None] = [None] * count
        self.before: Before | None = None

    def copy(self, layer: int, scale: float, rows: Tensor | None = None) -> State:
        """A state that the step may change, its residual in units of the step's scale.

        Args:
            rows: the layer's gradients, ``[rows, *shape]``, whose memory the step may use; None:
                they stay as they are.
        """
        state = self.reducer.states[layer].twin()
        state.scale = scale
        residual, in_place = state.residual, self.reducer.compressors[layer].in_place
        if residual is None or not in_place:
            return state
        ratio, spare = scale / self.scales[layer], self.spare[layer]
        if ratio != 1 or on_gpu(residual):
            state.residual = torch.mul(residual, ratio, out=spare)
        else:  # the compressor adds the gradient to it, and leaves the present one
            room = torch.empty_like(residual) if spare is None else spare
            state.write_to(room, None if rows is None else _as_matrix(rows))
        return state

    def adopt(self, states: Mapping[int, State], unapplied: Collection[int] = ()) -> None:
        """The step's states are those of the layers from now on, but of ``unapplied`` ones."""
        own = self.reducer.states
        self.before = Before([*own], [*self.scales], states.keys() - unapplied)
        for i, new in states.items():
            if i in unapplied:
                self._reuse(i, new)
                continue
            self._keep(i, own[i].residual)
            own[i] = new
            if self.reducer.compressors[i].in_place:
                self.scales[i] = new.scale

    def free(self) -> None:
        """The last step counts for good, and the next one is far: hold no second residual."""
        self.spare, self.before = [None] * len(self.spare), None

    def drop(self, states: Mapping[int, State]) -> None:
        """The step has not happened."""
        for i, new in states.items():
            self._reuse(i, new)
        self.before = None

    def undo(self, layers: Collection[int] | None = None) -> set[int]:
        """Take the last step back, of some layers or of all; returns those of which it was."""
        if (before := self.before) is None:
            return set()
        chosen = before.layers if layers is None else before.layers.intersection(layers)
        for i in chosen:
            self._keep(i, self.reducer.states[i].residual)
            self.reducer.states[i], self.scales[i] = before.states[i], before.scales[i]
        before.layers = before.layers - chosen
        if not before.layers:
            self.before = None
        return chosen

    def _reuse(self, layer: int, state: State) -> None:
        """The next step may write to the residual of a state that is not adopted, unless it is the
        present one, because the step has not come to it."""
        if state.residual is not self.reducer.states[layer].residual:
            self._keep(layer, state.residual)

    def _keep(self, layer: int, residual: Tensor | None) -> None:
        """The next step may write its residual there, if its compressor does."""
        if self.reducer.compressors[layer].in_place:
            self.spare[layer] = residual


def _as_matrix(rows: Tensor) -> Tensor | None:
    """The memory of a single row as a matrix; None where it has gaps, or there are several rows."""
    if len(rows) > 1:
        return None
    gradient = rows[0]
    matrix = gradient.flatten(1) if gradient.ndim > 2 else gradient
    fits = matrix.is_contiguous() and matrix.data_ptr() == gradient.data_ptr()
    return matrix if fits else None
