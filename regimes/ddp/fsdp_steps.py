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
from regimes.collectives.requests import NO_LAYER
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
        readers: Collection[Any] = (),
        dense_start: int = 0,
        **_: Any,
    ) -> None:
        """
        Args:
            source: has the ``device``.
            gauges: see the reduced gradient of every step, ``[part]`` for each module.
            readers: those of them that, when they are ``due``, also see what it would be without
                compression.
            dense_start: so many steps send the gradient uncompressed.
        """
        super().__init__(reducer, source.device, dense_start)
        self.gauges, self.readers, self.world = gauges, readers, reducer.world
        self.scales = [1.0] * len(reducer.layers)
        self.sizes = [layer.shape[1] for layer in reducer.layers]
        self._pending: dict[int, Tensor] = {}  # outputs, which FSDP2 still divides
        self._updates: dict[int, Tensor] = {}
        self._due = False  # the step under way is measured
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}  # of outputs, and norms of these
        self._means: dict[int, Tensor] = {}  # updates without compression
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
        state, work = self.reducer.states[layer], None
        compressor, level = self.reducer.at(layer, self.present_levels[layer])
        parts = flat.view(1, self.world.workers, -1)
        others = flat.numel() - output.numel()
        self.world.meter.count_dense("scatter", others, flat.element_size())
        whole = parts.shape[2] == self.sizes[layer]
        kept = None if whole else state.residual  # of another order of numbers
        state.residual = state.residual if whole else None
        if level == DENSE or not isinstance(compressor, QuantisedScatter):
            if state.residual is not None and isinstance(compressor, QuantisedScatter):
                parts.copy_(compressor.add_residual(parts, state))
            state.step += 1
            self._count(layer, parts)
            with self.communicating():
                work = usual()
        else:
            if self._due:
                exact = self._uncompressed(output, parts, usual)
            with self.clock.waiting(self.world):
                total = self.world.drive([compressor.reduce(parts, state, level)], [layer])[0]
            output.copy_(as_reduced(total, op, self.world.workers))
            if self._due:
                self._exact[layer] = exact, full_precision(output).norm()
        if not whole:
            state.residual = kept
        self._pending[layer] = output
        return work

    def _uncompressed(self, output: Tensor, parts: Tensor, usual: Callable[[], Any]) -> Tensor:
        """A copy of what torch's own collective makes of ``output``: one exchange more."""
        with self.communicating():
            if (work := usual()) is not None:
                work.wait()
        self._count(NO_LAYER, parts)
        return output.clone()

    def _count(self, layer: int, parts: Tensor) -> None:
        """Count a reduce-scatter of torch's own."""
        meter = self.world.meter
        meter.count(layer, "scatter", parts, convention=layer != NO_LAYER)
        meter.calls["scatter"] = meter.calls.get("scatter", 0) + 1

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
        self._exact, self._means = {}, {}
        self.before_step()
        self._due = any(getattr(gauge, "due", True) for gauge in self.readers)
        self.clock.start()
        self.run_check()

    def _collect(self, layer: int) -> None:
        """Add a module's reduced gradient to the step's, once FSDP2 has divided it."""
        if (output := self._pending.pop(layer, None)) is None or not self.gauges:
            return
        if self._due:
            now = full_precision(output).norm()
            exact, norm = self._exact.pop(layer, (output, now))
            # FSDP2 has divided the output, and not what it would be without compression
            divided = torch.where(norm > 0, now / norm, 1.0)
            self._add(self._means, layer, full_precision(exact) * divided)
        self._add(self._updates, layer, output)

    def _add(self, table: dict[int, Tensor], layer: int, output: Tensor) -> None:
        update = full_precision(output)
        if (missing := self.sizes[layer] - len(update)) > 0:
            update = torch.nn.functional.pad(update, (0, missing))
        before = table.get(layer)
        # a copy, because .grad may be a view of it, to which a later call is added
        table[layer] = update.clone() if before is None else before + update

    @torch.no_grad()
    def _finish(self) -> None:
        """The end of backward: FSDP2 has waited for all its streams."""
        for layer in list(self._pending):
            self._collect(layer)
        updates, self._updates, self._pass = self._updates, {}, None
        means, self._means = self._means, {}
        self.in_unit += 1
        self.finite_in_unit += 1
        self.total += 1
        if self.gauges:
            rows = self._all(updates)
            stack = torch.cat(self._all(means))[None] if self._due else rows[0].new_zeros((1, 0))
            for gauge in self.gauges:
                gauge.step(stack, rows)
        self.clock.stop()

    def _all(self, found: dict[int, Tensor]) -> list[Tensor]:
        """``[part]`` of each module, zero where the step has not used it."""
        like = next(iter(found.values()))
        return [
            found[i] if i in found else like.new_zeros(size) for i, size in enumerate(self.sizes)
        ]


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
        meter.count_dense("weights", input_tensor.numel() * others, input_tensor.element_size())
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
