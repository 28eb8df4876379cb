"""Memories of compressors that change tentatively: a step may be skipped, or thrown away later.

A layer's state belongs to its parameter, not to a place in a bucket. During a step only a copy
changes. ``adopt_states`` replaces the states by the copies. The states before a step stay until the
next one, which may find that the step was not applied: then ``undo_step`` brings them back. This
costs one more residual per process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regimes.compression.bucket import State
from regimes.compression.kernels import on_gpu
from regimes.compression.reducer import Reducer


@dataclass
class Before:
    """The memories before the last step.

    Attributes:
        layers: the step has changed their memories, and they are not taken back yet.
    """

    states: list[State]
    scales: list[float]
    layers: set[int]


class TentativeMemories:
    """Copies of a reducer's memories for one step at a time.

    Attributes:
        scales: per layer, the scale of the loss in which its residual is stored.
        spare: per layer, the residual before the last step: the next step writes to its memory.
        before: what ``undo_step`` needs; None: there is nothing to undo.
    """

    def __init__(self, reducer: Reducer) -> None:
        count = len(reducer.layers)
        self.reducer = reducer
        self.scales = [1.0] * count
        self.spare: list[Tensor | None] = [None] * count
        self.before: Before | None = None

    def copy_state(self, layer: int, scale: float, rows: Tensor | None = None) -> State:
        """A state that the step may change, its residual in units of the step's scale.

        Args:
            rows: the layer's gradients, ``[rows, *shape]``; the step may write to their memory.
                None: they stay as they are.
        """
        state = self.reducer.states[layer].twin()
        state.scale = scale
        residual, in_place = state.residual, self.reducer.compressors[layer].in_place
        if residual is None or not in_place:
            return state
        ratio, spare = scale / self.scales[layer], self.spare[layer]
        if ratio != 1:
            state.residual = torch.mul(residual, ratio, out=spare)
        else:  # the compressor adds the gradient to it, and leaves the present one
            room = torch.empty_like(residual) if spare is None else spare
            state.write_to(room, None if rows is None or on_gpu(rows) else _as_matrix(rows))
        return state

    def adopt_states(self, states: Mapping[int, State], unapplied: Collection[int] = ()) -> None:
        """Make the step's states the layers' own, except in ``unapplied`` layers."""
        own = self.reducer.states
        self.before = Before([*own], [*self.scales], states.keys() - unapplied)
        for i, new in states.items():
            if i in unapplied:
                # the optimiser will not step the layer: to adopt this residual would forget the
                # update that was never applied
                self._reuse_residual(i, new)
                continue
            self._keep_spare(i, own[i].residual)  # intact until the next step, for ``undo_step``
            own[i] = new
            if self.reducer.compressors[i].in_place:
                self.scales[i] = new.scale

    def undo_step(self, layers: Collection[int] | None = None) -> set[int]:
        """Take the last step back in some layers, or in all; returns the layers it had changed."""
        if (before := self.before) is None:
            return set()
        chosen = before.layers if layers is None else before.layers.intersection(layers)
        for i in chosen:
            self._keep_spare(i, self.reducer.states[i].residual)
            self.reducer.states[i], self.scales[i] = before.states[i], before.scales[i]
        before.layers = before.layers - chosen
        if not before.layers:
            self.before = None
        return chosen

    def rescale(self, ratio: float) -> None:
        """The present residuals are in units of ``ratio`` times the scale that was assumed."""
        for i, state in enumerate(self.reducer.states):
            if self.reducer.compressors[i].in_place:
                self.scales[i] *= ratio
            else:
                state.rescale_residual(ratio)

    def _reuse_residual(self, layer: int, state: State) -> None:
        """The next step may write to the residual of a state that is not adopted, unless it is the
        present one, because the step has not come to it."""
        if state.residual is not self.reducer.states[layer].residual:
            self._keep_spare(layer, state.residual)

    def _keep_spare(self, layer: int, residual: Tensor | None) -> None:
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
