"""Memories of compressors that change tentatively: a step may be skipped, or thrown away later.

A layer's state belongs to its parameter, not to a place in a bucket. What its fields were is kept
before a step, whose residuals go to other memory (`Bucket.take_turn`): so a step that was not
applied costs nothing but to set them again. What was kept stays until the next step, which may find
that the last one was not applied: ``undo_step``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from regimes.compression.reducer import Reducer


class TentativeMemories:
    """Takes steps of a reducer's memories back.

    Attributes:
        kept: by layer, its fields before the step under way.
        before: by layer, its fields before the last step; those that are not taken back yet. None:
            there is nothing to undo.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.kept: dict[int, dict[str, Any]] = {}
        self.before: dict[int, dict[str, Any]] | None = None

    @property
    def scales(self) -> list[float]:
        """Per layer, the scale of the loss in which its residual is stored."""
        pairs = zip(self.reducer.states, self.reducer.compressors, strict=True)
        return [state.scale if compressor.in_place else 1.0 for state, compressor in pairs]

    def keep(self, layers: Iterable[int]) -> None:
        """The step under way comes to these layers."""
        for i in layers:
            state = self.reducer.states[i]
            self.kept[i] = state.snapshot()
            if not self.reducer.tentative and state.residual is not None:
                state.residual = state.residual.detach()  # another tensor: it is not written to

    def settle_step(self, unapplied: Collection[int] = ()) -> None:
        """The step is over, and counts, except in ``unapplied`` layers: to adopt their residuals
        would forget an update that was never applied."""
        self._restore(self.kept, unapplied)
        self.before = {i: fields for i, fields in self.kept.items() if i not in unapplied}
        self.kept = {}

    def drop_step(self) -> None:
        """A step under way has failed, if there is one."""
        self._restore(self.kept, self.kept)

    def undo_step(self, layers: Collection[int] | None = None) -> set[int]:
        """Take the last step back in some layers, or in all; returns the layers it had changed."""
        if (before := self.before) is None:
            return set()
        chosen = {i for i in before if layers is None or i in layers}
        self._restore(before, chosen)
        self.before = {i: x for i, x in before.items() if i not in chosen} or None
        return chosen

    def rescale(self, ratio: float) -> None:
        """The present residuals are in units of ``ratio`` times the scale that was assumed."""
        for state, compressor in zip(self.reducer.states, self.reducer.compressors, strict=True):
            if compressor.in_place:
                state.scale *= ratio
            else:
                state.rescale_residual(ratio)

    def _restore(self, fields: dict[int, dict[str, Any]], layers: Iterable[int]) -> None:
        for i in layers:
            if i in fields:
                self.reducer.states[i].restore(fields[i])
