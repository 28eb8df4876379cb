"""FSDP2's own collectives, compressed: its reduce-scatter of gradients and all-gather of weights.

FSDP2 calls them in its streams, module by module, with one flat tensor: of the reduce-scatter
``[ranks * part]``, for each rank the shards of a module's gradients, padded, end to end. At "dense"
torch's own collective runs, untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.islands import as_reduced
from regimes.compression.all_reduce import dequantise, quantise
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import QuantisedScatter, Weights
from regimes.config import DENSE
from regimes.ddp.source import after_backward
from regimes.ddp.unit_steps import UnitSteps
from regimes.precision import full_precision


class ModuleSteps(UnitSteps):
    """Backward passes in which FSDP2 reduces gradients, with a layer for each module. One without a
    reduce-scatter, after ``set_requires_gradient_sync(False)``, is no step."""

    by_process = True

    def __init__(
        self,
        source: Any,
        reducer: Reducer,
        gauges: Collection[Any],
        *,
        dense_start: int = 0,
        **_: Any,
    ) -> None:
        """
        Args:
            source: has the ``device``.
            gauges: see the reduced gradient of every step, ``[part]`` for each module.
            dense_start: so many steps send the gradient uncompressed.
        """
        super().__init__(reducer, source.device, dense_start)
        self.gauges, self.world = gauges, reducer.world
        self.scales = [1.0] * len(reducer.layers)
        self.sizes = [layer.shape[1] for layer in reducer.layers]
        self._pending: dict[int, Tensor] = {}  # outputs, which FSDP2 still divides
        self._updates: dict[int, Tensor] = {}
        self._pass: int | None = None  # the autograd engine's number of the step under way

    # -- called by the reduce-scatter, in a stream of FSDP2 ------------------------------------

    def reduce_scatter(
        self, layer: int, output: Tensor, flat: Tensor, op: Any, usual: Callable[[], Any]
    ) -> Any:
        """One module's reduce-scatter.

        Args:
            output: ``[part]``, overwritten with the reduced gradient.
            flat: ``[ranks * part]``; parameters without a gradient are left out of it.
            op: what torch wants of the sum.
            usual: calls torch's own collective.
        """
        self._begin()
        self._collect(layer)  # of an earlier call in the same pass
        level, state = self.present_levels[layer], self.reducer.states[layer]
        compressor, work = self.reducer.compressors[layer], None
        parts = flat.view(1, self.world.workers, -1)
        whole = parts.shape[2] == self.sizes[layer]
        kept = None if whole else state.residual  # of another order of numbers
        state.residual = state.residual if whole else None
        if level == DENSE or not isinstance(compressor, QuantisedScatter):
            if state.residual is not None and isinstance(compressor, QuantisedScatter):
                parts.copy_(compressor.add_residual(parts, state))
            state.step += 1
            self.world.meter.count(layer, "scatter", parts)
            calls = self.world.meter.calls
            calls["scatter"] = calls.get("scatter", 0) + 1
            with self.communicating():
                work = usual()
        else:
            with self.clock.waiting(self.world):
                total = self.world.drive([compressor.reduce(parts, state, level)], [layer])[0]
            output.copy_(as_reduced(total, op, self.world.workers))
        if not whole:
            state.residual = kept
        self._pending[layer] = output
        return work

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """The script waits for a collective of torch's own; on a GPU for its launch."""
        start = time.perf_counter()
        yield
        self.clock.move(time.perf_counter() - start, "compute", "communicate")

    def _begin(self) -> None:
        """The first reduce-scatter of a backward pass."""
        now = torch._C._current_graph_task_id()
        if self._pass == now:
            return
        # Twice, so that it comes after the callback of FSDP2's root, which may be queued during
        # backward and may reduce the gradients of the root's own parameters.
        after_backward(lambda: after_backward(self._finish))
        self._pass, self._pending, self._updates = now, {}, {}
        self.before_step()
        self.clock.start()
        self.run_check()

    def _collect(self, layer: int) -> None:
        """Add a module's reduced gradient to the step's, once FSDP2 has divided it."""
        if (output := self._pending.pop(layer, None)) is None or not self.gauges:
            return
        update = full_precision(output)
        if (missing := self.sizes[layer] - len(update)) > 0:
            update = torch.nn.functional.pad(update, (0, missing))
        before = self._updates.get(layer)
        # a copy, because .grad may be a view of it, to which a later call is added
        self._updates[layer] = update.clone() if before is None else before + update

    @torch.no_grad()
    def _finish(self) -> None:
        """The end of backward: FSDP2 has waited for all its streams."""
        for layer in list(self._pending):
            self._collect(layer)
        updates, self._updates, self._pass = self._updates, {}, None
        self.in_unit += 1
        self.finite_in_unit += 1
        self.total += 1
        if self.gauges:
            like = next(iter(updates.values()))
            rows = [
                updates[i] if i in updates else like.new_zeros(size)
                for i, size in enumerate(self.sizes)
            ]
            for gauge in self.gauges:
                gauge.step(like.new_zeros((1, 0)), rows)
        self.clock.stop()


class ReduceScatter:
    """The reduce-scatter of one module, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(self, layer: int, steps: ModuleSteps, usual: Any) -> None:
        self.layer, self.steps, self.usual = layer, steps, usual

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's own, whose memory it may need."""
        return self.usual.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Float[Tensor, " part"],
        input_tensor: Float[Tensor, " numbers"],
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        usual = self.usual
        return self.steps.reduce_scatter(
            self.layer,
            output_tensor,
            input_tensor,
            op,
            lambda: usual(output_tensor, input_tensor, group, op, async_op),
        )


class AllGather:
    """The all-gather of one module's weights, for ``FSDPModule.set_custom_all_gather``.

    All processes compute with the rounded weights, their own included; the sharded weights, which
    the optimiser steps, stay as they are. Rounding is to the nearest, so that forward and backward
    see the same weights.
    """

    def __init__(self, steps: ModuleSteps, weights: Weights, usual: Any) -> None:
        self.steps, self.weights, self.usual = steps, weights, usual

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's own, whose memory it may need."""
        return self.usual.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Float[Tensor, " numbers"],
        input_tensor: Float[Tensor, " part"],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        steps, level, block = self.steps, self.weights.level, self.weights.block
        world, meter = steps.world, steps.world.meter
        others = group.size() - 1  # fewer with reshard_after_forward=NUMBER, in backward
        plain = input_tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        if level == DENSE or not plain or others + 1 != world.workers:
            meter.count_weights(input_tensor, others)
            with steps.communicating():
                return self.usual(output_tensor, input_tensor, group, async_op)
        with steps.clock.waiting(world):
            exact = full_precision(input_tensor)
            wire, _ = quantise(exact[None], int(level), block, 0.5)
            meter.count_weights(wire, others)
            (wires,) = world.gather([wire])
            size = len(input_tensor)
            rows = dequantise(wires, int(level), block, size, exact.dtype)  # [ranks, part]
            output_tensor.view(rows.shape).copy_(rows)
        return None
