"""FSDP2's own collectives, compressed: its reduce-scatter of gradients and all-gather of weights.

FSDP2 calls them in its streams, module by module, with one flat tensor: of the reduce-scatter
``[ranks * part]``, for each rank the shards of a module's gradients, padded, end to end. At "dense"
torch's own collective runs, untouched.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.base.config import DENSE
from regimes.base.precision import full_precision
from regimes.base.torch_compat import current_backward
from regimes.collectives.layers import NO_LAYER
from regimes.collectives.meter import Meter
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.sharded_models import as_reduced
from regimes.compression.bucket import State
from regimes.compression.exchange import fill_if_nonfinite, finite_flag
from regimes.compression.pieces import make_pieces
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import WeightGather
from regimes.hook.ddp.steps import HookSteps
from regimes.hook.ddp.unit_steps import UnitSteps
from regimes.hook.fsdp.groups import ParameterGroup, check_root
from regimes.hook.fsdp.own_hooks import after_modules
from regimes.hook.fsdp.reductions import QuantisedReduction, WholeReduction
from regimes.job.clock import Clock

SEPARATE = (
    "set_separate_reduce_scatter_group has no effect on what attach_shards compresses: it "
    "travels in a group of the hook's own"
)


class _ModuleCollectives:
    """What replaces FSDP2's collectives: parts of the steps of a hook.

    Attributes:
        within: the processes that divide the model.
        reductions: of each module.
        gathered: counts the weights until a step begins, which may end a unit.
    """

    within: ProcessWorld
    reductions: Sequence[QuantisedReduction | WholeReduction]
    gathered: Meter
    clock: Clock
    warned_of_group = False

    def reduce_scatter(
        self, place: int, output: Tensor, flat: Tensor, op: Any, usual: Callable[[], Any]
    ) -> Any:
        """One module's reduce-scatter.

        Args:
            place: which module.
            output: ``[part]``, overwritten with the reduced gradient.
            flat: ``[ranks * part]``, without parameters that have no gradient.
            op: what torch wants of the sum.
            usual: calls torch's own collective.
        """
        others = flat.numel() - output.numel()
        self.within.meter.count_dense("scatter", others, flat.element_size())
        with self.clock.count_waiting(self.within):
            total = self.reduce_module(place, flat)
        if total is not None:
            # compressed gradients travel in the hook's own group
            info = self.reductions[place].group.own.mesh_info
            separate = getattr(info, "reduce_scatter_process_group", None) is not None
            if separate and not self.warned_of_group and self.within.rank == 0:
                self.warned_of_group = True
                warnings.warn(SEPARATE, stacklevel=2)
            self.write_output(place, output, as_reduced(total, op, self.within.workers), usual)
            return None
        calls = self.within.meter.calls
        calls["scatter"] = calls.get("scatter", 0) + 1
        self.reductions[place].count_dense(output)
        with self.communicating("FSDP2's reduce-scatter"):
            return usual()

    def reduce_module(self, place: int, flat: Tensor) -> Tensor | None:
        """See ``QuantisedReduction.reduce_module``."""
        raise NotImplementedError

    def write_output(
        self, place: int, output: Tensor, reduced: Tensor, usual: Callable[[], Any]
    ) -> None:
        """Overwrite the output with what was reduced."""
        output.copy_(reduced)

    @contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """The script waits for a collective of torch's own; on a GPU for its launch.

        Raises:
            TrainingError: a process is lost in it.
        """
        start = time.perf_counter()
        with self.within.explain_loss(what):
            yield
        self.clock.move_seconds(time.perf_counter() - start, "compute", "communicate")


class ModuleSteps(_ModuleCollectives, UnitSteps):
    """Follows backward passes in which FSDP2 reduces gradients. A pass without a reduce-scatter,
    after ``set_requires_gradient_sync(False)``, is no step."""

    by_process = True

    def _list_members(self) -> list[Sequence[nn.Parameter]]:
        return self.source.members

    def _prepare(self) -> None:
        source, reducer = self.source, self.reducer
        self.within = cast(ProcessWorld, reducer.world)
        self.sizes = [layout.owned_size for layout in source.layouts]
        self.reductions = source.make_reductions(reducer)
        self.gathered = Meter(self.within.meter.dtype, self.within.workers)
        self._pending: dict[int, Tensor] = {}  # outputs, which FSDP2 still divides
        self._updates: dict[int, Tensor] = {}
        self._due = False  # the step under way is measured
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}  # of outputs, and norms of these
        self._means: dict[int, Tensor] = {}  # updates without compression
        self._flags: list[Tensor] = []
        self._flag: tuple[Tensor, Any] | None = None  # of the last step, on its way to the host
        self._scale = 1.0  # of the loss of the step under way
        self._pass: int | None = None  # the autograd engine's number of the step under way

    # -- in backward, in a stream of FSDP2 -------------------------------------------------------

    def reduce_scatter(
        self, place: int, output: Tensor, flat: Tensor, op: Any, usual: Callable[[], Any]
    ) -> Any:
        self._begin_pass()
        self._collect_update(place)  # of an earlier call in the same pass
        self._pending[place] = output
        return super().reduce_scatter(place, output, flat, op, usual)

    def reduce_module(self, place: int, flat: Tensor) -> Tensor | None:
        reduction: QuantisedReduction | WholeReduction = self.reductions[place]
        return reduction.reduce_module(flat, self.present_levels, self._keep_memory)

    def write_output(
        self, place: int, output: Tensor, reduced: Tensor, usual: Callable[[], Any]
    ) -> None:
        if self._due:
            # a copy of what torch's own collective makes of the output: one exchange more
            with self.communicating("FSDP2's reduce-scatter"):
                if (work := usual()) is not None:
                    work.wait()
            meter, sent = self.within.meter, output.expand(1, self.within.workers, -1)
            meter.count_request(NO_LAYER, "scatter", sent, convention=False)
            meter.calls["scatter"] = meter.calls.get("scatter", 0) + 1
            exact = output.clone()
        super().write_output(place, output, reduced, usual)
        if self._due:
            self._exact[place] = exact, full_precision(output).norm()

    def _begin_pass(self) -> None:
        """The first reduce-scatter of a backward pass."""
        now = current_backward()
        if self._pass == now:
            return
        check_root(self.source.network)
        after_modules(self._finish_pass)
        self.undo_cleared()
        self.commit_step()  # from here on .grad may be the sum of several passes
        if self.source.follow():
            self.follow(self.source.members)
        self._pass, self._pending, self.reducer.kept = now, {}, {}
        self._updates, self._flags, self._exact, self._means = {}, [], {}, {}
        self.begin_pass()
        self._scale = self.loss_scale.of_pass()
        self._due = any(getattr(gauge, "due", True) for gauge in self.readers)
        self.within.meter.add_counts(self.gathered.take_counts())
        self.run_check()

    def _keep_memory(self, layer: int, scale: float) -> State:
        """A layer's memory, which this pass changes."""
        state: State = self.reducer.states[layer]
        self.reducer.scale = scale * self._scale
        if layer not in self.reducer.kept:
            self.reducer.keep([layer])
            if not self.reducer.compressors[layer].in_place:
                state.scale = self.reducer.scale
        return state

    def _collect_update(self, place: int) -> None:
        """Add a module's reduced gradient to the step's, once FSDP2 has divided it."""
        if (output := self._pending.pop(place, None)) is None:
            return
        updates_of = self.reductions[place].updates_of
        self._flags.append(finite_flag([output]).to(self.within.meter.dtype))
        if not self.gauges:
            return
        if self._due:
            now = full_precision(output).norm()
            exact, norm = self._exact.pop(place, (output, now))
            # FSDP2 has divided the output, and not what it would be without compression
            divided = torch.where(norm > 0, now / norm, 1.0)
            _add_updates(self._means, updates_of(full_precision(exact) * divided))
        _add_updates(self._updates, updates_of(output))

    @torch.no_grad()
    def _finish_pass(self) -> None:
        """The end of backward: FSDP2 has waited for all its streams."""
        for place in list(self._pending):
            self._collect_update(place)
        with self.clock.count_waiting(self.within):  # a collective, whatever this process has found
            assert self.within.tensor is not None
            own = torch.stack(self._flags).sum()  # NaN in the sum if one process has it, else 0
            flag = self.within.sum_over(self.within.tensor.group, own)
        # before the host knows whether the step is finite: ``_judge_last_step`` takes it back
        self.reducer.settle_step()
        self.within.meter.add_counts(
            self.gathered.take_counts()
        )  # of this step: after its first reduce-scatter
        self.count_step(finite=True)  # as far as is known
        if self.gauges:
            self._show_gauges(flag)
        self._flag, self._pass = _copy_to_host(flag), None
        self._updates = {}
        self.applied.note_exchange(self.may_warn)
        self.clock.stop_step()

    def _show_gauges(self, flag: Tensor) -> None:
        """Show a step to the gauges; one that is not finite adds nothing."""
        rows = self._fill_layers(self._updates)
        stack = torch.cat(self._fill_layers(self._means)) if self._due else rows[0].new_zeros(0)
        fill_if_nonfinite([*rows, stack], flag, 0.0)
        self.show_step(stack[None], rows)

    def _fill_layers(self, found: dict[int, Tensor]) -> list[Tensor]:
        """What this process owns of each layer, zero where the step has not used it."""
        like = next(iter(found.values()))
        return [found.get(i, like.new_zeros(size)) for i, size in enumerate(self.sizes)]

    # -- a step that has not counted -------------------------------------------------------------

    def undo_cleared(self, first_layer: int | None = None) -> None:
        self._judge_last_step()
        super().undo_cleared(first_layer)

    def commit_step(self) -> None:
        self._judge_last_step()
        super().commit_step()

    def _judge_last_step(self) -> None:
        """Was every gradient of the last step finite? If not, it leaves no memory. Asked late, when
        a GPU has the answer."""
        if self._flag is None:
            return
        (flag, event), self._flag = self._flag, None
        if event is not None:
            event.synchronize()
        if not bool(flag.isfinite()):
            self.reducer.undo_step()
            self._last = None
            self.finite_in_unit -= 1


def _add_updates(table: dict[int, Tensor], updates: Mapping[int, Tensor]) -> None:
    """Add layers' updates to those of earlier calls."""
    for layer, update in updates.items():
        before = table.get(layer)
        # a copy, because .grad may be a view of it, to which a later call is added
        table[layer] = update.clone() if before is None else before + update


def _copy_to_host(flag: Float[Tensor, ""]) -> tuple[Tensor, Any]:
    """A number's copy on the host, and the event after which it is there; None: it is."""
    if flag.device.type == "cpu":
        return flag, None
    host = torch.empty_like(flag, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flag.device))
    return host, event


class ReplicaSteps(_ModuleCollectives, HookSteps):
    """Follows the steps of replicas that FSDP2 divides, and replaces its collectives within a
    replica as well. What these send is counted for no layer: a layer's traffic is between
    replicas."""

    source: Any  # `ShardedReplicas`

    def _prepare(self) -> None:
        super()._prepare()
        source, reducer = self.source, self.reducer
        self.within, self.level = source.within, source.inside.level
        seed = reducer.states[0].key[0]
        self.inner = Reducer(source.inside.compressor, source.modules, self.within, seed)
        for state in self.inner.states:  # replicas draw numbers of their own
            state.hosted = (reducer.world.rank,)
        self.reductions = source.make_reductions(self.inner)
        self.gathered = Meter(reducer.world.meter.dtype, self.within.workers)

    def reduce_module(self, place: int, flat: Tensor) -> Tensor | None:
        levels, states = [self.level] * len(self.inner.states), self.inner.states
        return self.reductions[place].reduce_module(flat, levels, lambda layer, _: states[layer])

    def begin_step(self) -> None:
        super().begin_step()
        self._count_within()

    def settle_step(self) -> None:
        self._count_within()
        super().settle_step()

    def _count_within(self) -> None:
        """Count what was sent within the replica so far."""
        for meter in (self.within.meter.take_counts(), self.gathered.take_counts()):
            meter.layers.clear()
            self.reducer.world.meter.add_counts(meter)

    def state_dict(self) -> dict[str, Any]:
        return {"within": self.inner.state_dict()[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for layer, memory in zip(self.inner.layers, self.inner.states, strict=True):
            memory.load_shared_state(state.get("within", {}).get(layer.name, {"step": 0}))


class _Collective:
    """What stands in for a collective of FSDP2, with memory as the usual one has."""

    usual: Any

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as torch's own collective does, which may need special memory."""
        return self.usual.allocate(size, dtype=dtype, device=device)


class _ReduceScatter(_Collective):
    """The reduce-scatter of one module, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(self, place: int, steps: _ModuleCollectives, usual: Any) -> None:
        self.place, self.steps, self.usual = place, steps, usual

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
            self.place,
            output_tensor,
            input_tensor,
            op,
            lambda: usual(output_tensor, input_tensor, group, op, async_op),
        )


class _AllGather(_Collective):
    """The all-gather of one module's weights, for ``FSDPModule.set_custom_all_gather``.

    All processes compute with the rounded weights, their own included; the sharded weights, which
    the optimiser steps, stay as they are. Rounding is to the nearest, so that forward and backward
    see the same weights.
    """

    def __init__(
        self, steps: _ModuleCollectives, weights: WeightGather, group: ParameterGroup
    ) -> None:
        self.steps, self.weights, self.usual = steps, weights, group.gather
        self.pieces = group.make_layout(steps.within.workers, frozen=True).pieces

    def __call__(
        self,
        output_tensor: Float[Tensor, " numbers"],
        input_tensor: Float[Tensor, " part"],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        steps, level, block = self.steps, self.weights.level, self.weights.block
        world, meter = steps.within, steps.gathered
        others = group.size() - 1  # fewer with reshard_after_forward=NUMBER, in backward
        meter.count_dense("weights", input_tensor.numel() * others, input_tensor.element_size())
        plain = input_tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        plain &= len(input_tensor) == sum(piece.size for piece in self.pieces)
        if level == DENSE or not plain or others + 1 != world.workers:
            meter.count_weights(input_tensor, others)
            with steps.communicating("FSDP2's all-gather"):
                return self.usual(output_tensor, input_tensor, group, async_op)
        with steps.clock.count_waiting(world):
            exact = full_precision(input_tensor)
            pieces = make_pieces(self.pieces, int(level), block, input_tensor.dtype)
            wire = pieces.encode(exact[None], 0.5)
            meter.count_weights(wire, others)
            (wires,) = world.all_gather([wire])
            rows = pieces.decode(wires, exact.dtype)  # [ranks, part]
            output_tensor.view(rows.shape).copy_(rows)
        return None


def replace_collectives(
    groups: Sequence[ParameterGroup], steps: _ModuleCollectives, weights: WeightGather
) -> None:
    """Let modules call the steps in place of torch's collectives."""
    places = iter(range(len(groups)))
    for group in groups:
        group.module.set_custom_all_gather(_AllGather(steps, weights, group))
        if group.trained:
            group.watch_gradients()
            scatter = _ReduceScatter(next(places), steps, group.scatter)
            group.module.set_custom_reduce_scatter(scatter)


def restore_collectives(groups: Sequence[ParameterGroup]) -> None:
    """Give torch its own collectives back."""
    for group in groups:
        group.module.set_custom_all_gather(group.gather)
        group.module.set_custom_reduce_scatter(group.scatter)
        group.forget_gradients()
