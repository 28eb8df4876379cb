"""The steps of a hook's model: how many, at which levels, who sees them, and how the last one is
undone if the script throws it away."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from regimes.base.config import DENSE, AnyLevel
from regimes.base.torch_compat import foreach_div
from regimes.compression.graphs import ExchangeGraphs
from regimes.compression.reducer import Reducer
from regimes.hook.ddp.applied import UNKNOWN, AppliedSteps
from regimes.hook.ddp.loss_scale import LossScale
from regimes.instruments.gradient_norm import NormsGauge
from regimes.job.clock import Clock

# exchanged steps that wait for an optimiser's, which shows the scale of the loss, before gauges see
# them; several are exchanged for one of the optimiser where a script accumulates
_MOST_HELD = 4


class UnitSteps:
    """Follows the steps of one model, each a backward pass whose gradients are exchanged: counts
    them, shows them to gauges, and undoes the last one where no optimiser step has followed.

    Attributes:
        source: the model.
        reducer: the compressors, and the layers' memories.
        levels: per layer, what a backward pass sends after the first ``dense_start`` passes.
        total: backward passes since training began.
        in_unit: backward passes since ``restart_unit``.
        finite_in_unit: how many had a finite gradient, as far as that is known.
        before_step: called at the first gradients of a backward pass.
        check: called once, before the next gradient is reduced.
        clock: where the time since ``restart_unit`` went.
        gauges: each sees every finite step, in units of the unscaled loss; each is a ``Gauge``,
            made ``reversible`` here.
        applied: tells whether the last step was applied.
        loss_scale: what the loss of a pass is multiplied by.
        graphs: replays what is exchanged; None: nothing is captured.
        by_process: no process holds whole layers: there is no full state, and another number of
            processes can load only ``sharded_state``, from the folder of all.
    """

    by_process = False
    warned = False
    graphs: ExchangeGraphs | None = None

    def __init__(
        self,
        source: Any,
        reducer: Reducer,
        gauges: Collection[Any],
        *,
        readers: Sequence[Any] = (),
        loss_scale: LossScale,
        dense_start: int = 0,
        optimizer: Any = None,
    ) -> None:
        """
        Args:
            source: a ``ModelAdapter``.
            reducer: of the source's layers, or of this process's shards of them.
            readers: those of the gauges that, when they are ``due``, see more than what was
                exchanged: this process's own gradients, or the mean without compression.
            dense_start: how many steps, from the first on, send the gradient uncompressed.
            optimizer: steps the parameters, if it is known.
        """
        self.source, self.reducer, self.device = source, reducer, source.device
        self.dense_start, self.gauges, self.readers = dense_start, gauges, readers
        for gauge in gauges:
            gauge.reversible = True
        self.applied, self.loss_scale = AppliedSteps(self._list_members(), optimizer), loss_scale
        see_step = WeakMethod(self._see_step)  # torch keeps what it calls at a step
        self.applied.on_step = lambda optimizer: (alive := see_step()) and alive(optimizer)
        self.levels: Sequence[AnyLevel] = []
        # each gauge with its attributes before the last step, while that may still be undone
        self._last: list[tuple[Any, dict[str, Any]]] | None = None
        self._held: list[tuple[Tensor, list[Tensor]]] = []  # steps that no gauge has seen
        self.total = 0
        self.before_step: Callable[[], Any] = lambda: None
        self.check: Callable[[], Any] | None = None
        self.restart_unit()
        self._prepare()

    def _prepare(self) -> None:
        """Make what this kind of steps has of its own."""

    def _list_members(self) -> list[Sequence[nn.Parameter]]:
        """The parameters of each layer."""
        return [[parameter] for parameter in self.source.parameters.values()]

    def follow(self, parameters: Collection[Sequence[nn.Parameter]]) -> None:
        """Take these as the parameters of each layer from now on."""
        self.applied.follow(parameters)

    def detach(self) -> None:
        """Stop watching the steps of optimisers."""
        self.applied.stop_watching()

    def restart_unit(self) -> None:
        """Begin a unit: counts and clock start at zero."""
        self.in_unit = self.finite_in_unit = 0
        self.clock = Clock(self.device)

    @property
    def present_levels(self) -> Sequence[AnyLevel]:
        """Return the level of each layer in the step under way."""
        return [DENSE] * len(self.levels) if self.total < self.dense_start else self.levels

    def begin_pass(self) -> None:
        """The first gradients of a backward pass have come."""
        self.applied.begin_pass()
        self.loss_scale.begin_pass()
        self.before_step()  # before the clock: it may end a unit, which changes clock and levels
        self.clock.start_step()

    def run_check(self) -> None:
        """Call ``check``, once."""
        if self.check is not None:
            self.check, check = None, self.check
            check()

    def count_step(self, finite: bool) -> None:
        """Count a step; a finite one can be taken back. One that is not finite has changed no
        memory, and counts although a GradScaler skips it."""
        if finite:
            self.keep_for_undo()
        self.in_unit += 1
        self.total += 1
        self.finite_in_unit += finite

    def keep_for_undo(self) -> None:
        """Keep what a step that counts now will change, so that ``undo_step`` can take it back.
        Called before counts and gauges see the step."""
        self._last = [(gauge, dict(vars(gauge))) for gauge in self.gauges]

    @torch.no_grad()
    def _see_step(self, optimizer: Any) -> None:
        """An optimiser steps the model, which may show another scale of the last pass than was
        assumed: put right what was kept of it."""
        ratio = self.loss_scale.see_step(optimizer)
        if ratio != 1:
            self.reducer.rescale(ratio)
        if self._held:
            with self.on_hook_stream():
                self.show_held()

    def show_step(self, stack: Tensor, updates: Sequence[Tensor]) -> None:
        """Show a step to the gauges, or keep a copy until it is known what its loss was multiplied
        by. ``stack`` may be overwritten."""
        if self.loss_scale.doubtful:
            self._held.append((stack.clone(), [update.clone() for update in updates]))
            if len(self._held) <= _MOST_HELD:
                return
            stack, updates = self._held.pop(0)
        self._show_step(stack, updates)

    def show_held(self) -> None:
        """Show the steps that were kept."""
        held, self._held = self._held, []
        for step in held:
            self._show_step(*step)

    def _show_step(self, stack: Tensor, updates: Sequence[Tensor]) -> None:
        if (scale := self.loss_scale.used) != 1:
            stack, updates = stack.div_(scale), foreach_div(list(updates), scale)
        for gauge in self.gauges:
            gauge.step(stack, updates)

    # -- a step that has not counted -----------------------------------------------------------

    def commit_step(self) -> None:
        """Let the last step count for good."""
        self._last = self.reducer.before = None

    def undo_cleared(self, first_layer: int | None = None) -> None:
        """Undo the last step for layers with a gradient that was cleared and never applied.

        Args:
            first_layer: a layer that has its next gradient already.
        """
        self.reducer.drop_step()
        before, applied = self.reducer.before, self.applied  # ``before``: by layer, to be undone
        if self._last is None or before is None:
            return
        not_stepped = before.keys() - applied.stepped
        cleared = applied.find_cleared(not_stepped, first_layer)
        if thrown_away := cleared & applied.known:  # the optimiser of these layers has not stepped
            self.undo_step(thrown_away)
        elif cleared and not (applied.stepped or applied.elsewhere) and self.may_warn:
            # no optimiser is known to step these layers, so one may have without a trace: only warn
            held_back = any(self.reducer.states[i].residual is not None for i in cleared)
            if held_back and not applied.has_moved(cleared):
                self.warned = True
                warnings.warn(UNKNOWN, stacklevel=2)

    @property
    def may_warn(self) -> bool:
        """Return whether this process may still warn, once, and anything is held back."""
        first = not self.warned and self.reducer.world.rank == 0
        return first and any(state.residual is not None for state in self.reducer.states)

    def undo_step(self, layers: Collection[int]) -> None:
        """Take the last step back in some layers: states, statistics and counts are as before it.
        Its traffic stays counted, because it was sent. The step still counts while it is left in
        other layers.
        """
        if (last := self._last) is None:
            return
        chosen = self.reducer.undo_step(layers)
        if self.reducer.before is None:
            self._held = self._held[:-1]
        elif self._held:
            for i in chosen:
                self._held[-1][1][i].zero_()
        if self.reducer.before is not None:
            for gauge, before in last:
                if isinstance(gauge, NormsGauge):
                    gauge.revert(before["sums"], chosen)
            return
        self._last = None
        for gauge, before in last:
            vars(gauge).update(before)
        self.in_unit -= 1
        self.total -= 1
        self.finite_in_unit -= 1

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return entries of a saved state beside the reducer's, the same on all processes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these entries of a whole state."""

    @contextlib.contextmanager
    def on_hook_stream(self) -> Iterator[None]:
        """Run where the hook's own work runs on a GPU."""
        yield
