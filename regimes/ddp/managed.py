"""A hook, or local steps, whose replicas come and go: torchft decides which of them take part in a
step, and whether the step counts.

A replica that joins loads the others' state but for residuals, and begins with none. Policies see
the same history on all, so their decisions are the same. A replica that leaves takes its residual
with it; the others know its norm as of the last agreement, and the record has it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from regimes.collectives.managed import ManagedWorld
from regimes.compression.traffic import costs_per_step
from regimes.ddp.own_hooks import BUCKET, OwnHooks
from regimes.ddp.source import check_parameters, plain_names
from regimes.errors import ConfigError, RecordError
from regimes.records.schema import Cost

if TYPE_CHECKING:
    from regimes.ddp.choices import Choice
    from regimes.ddp.hook import Hook
    from regimes.ddp.job import Job

KEY = "regimes"  # of the state that a replica sends to one that joins


def inner(optimizer: Any) -> Any:
    """The optimiser that ``torchft.Optimizer`` wraps, or the optimiser itself."""
    return getattr(optimizer, "optim", optimizer)


class ManagedGradients(OwnHooks):
    """The gradients of a bare model, one for each layer; a ``Source``, whose layers are whole."""

    advice = (
        "call it through one module, or use hook.no_sync() for all backward passes but the last"
    )
    bucket_bytes = BUCKET
    _world: ManagedWorld

    def __init__(self, model: nn.Module, manager: Any) -> None:
        """
        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        network = getattr(model, "_orig_mod", model)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        kinds = {kind.__name__ for kind in type(network).__mro__}
        if found := kinds & {"DistributedDataParallel", "FSDPModule", "DataParallel"}:
            raise ConfigError(
                f"attach: {found.pop()} exchanges gradients by itself: with a manager give it the "
                "bare model"
            )
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not named:
            raise ConfigError("the model has no parameter to train: there is nothing to exchange")
        check_parameters(named)
        plain = plain_names(named)
        parameters = {plain[name]: p for name, p in named.items()}
        super().__init__(network, parameters, [p.data for p in parameters.values()])
        self.manager = manager

    def world(self, timeout: float) -> ManagedWorld:
        self._world = ManagedWorld(self.manager, self.device)
        return self._world

    def facts(self) -> dict[str, Any]:
        return {"manager": {"min_replica_size": self.manager._min_replica_size}}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are added up and not exchanged."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


class Attendance:
    """How many replicas took part in the steps of the unit under way.

    Attributes:
        counts: steps by their number of replicas.
        uncommitted: steps that did not count.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.counts: dict[int, int] = {}
        self.uncommitted = 0
        self.changes: list[dict[str, Any]] = []

    def note(self, replicas: int) -> None:
        """A step has counted."""
        self.counts[replicas] = self.counts.get(replicas, 0) + 1

    def take(self) -> dict[str, Any]:
        """The column "replicas" of a row; see docs/how-to/sites.md."""
        steps = sum(self.counts.values())
        left = [one["residual"] for change in self.changes for one in change["left"]]
        column = {
            "least": min(self.counts, default=0),
            "most": max(self.counts, default=0),
            "mean": sum(n * k for n, k in self.counts.items()) / max(1, steps),
            "joined": sum(len(change["joined"]) for change in self.changes),
            "left": len(left),
            "lost_residual": math.hypot(*left),
            "uncommitted": self.uncommitted,
            "changes": self.changes,
        }
        self.clear()
        return column

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))


def write_or_wait(job: Job, world: ManagedWorld) -> None:
    """The first replica of a quorum writes the record; one that no longer is lets go of the files.
    On separate disks each has all units from its first turn on.

    A replica that was only slow may still hold the files: the next unit tries again.

    Raises:
        RecordError: at the start of the job, if the record cannot be written.
    """
    recorder = job.recorder
    if recorder is None or recorder.closed:
        return
    if world.rank and recorder.writer is not None:
        recorder.suspend()
    elif not world.rank and recorder.writer is None:
        try:
            recorder.open(job.rows, job.continued or bool(job.rows))
        except RecordError as error:
            if not world.manager.current_step():
                raise
            if not recorder.warned:
                warnings.warn(f"{error}; training goes on, rows are kept in memory", stacklevel=2)
            recorder.warned = True


class HookQuorum:
    """The additional work of a hook whose replicas have a manager (torchft).

    Attributes:
        step: the manager's step when gradients were last exchanged; None: that is settled.
    """

    def __init__(self, hook: Hook, world: ManagedWorld, optimizer: Any) -> None:
        self.hook, self.world, self.optimizer = hook, world, inner(optimizer)
        self.attendance = Attendance()
        self.step: int | None = None
        self.manager = world.manager
        hook.buckets.applied = None  # the manager says what has counted
        self.manager.register_state_dict_fn(KEY, self.load, self.save)

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        self.resolve()
        changed = self.world.enter()
        self.step = self.manager.current_step()
        if changed:
            self.hook.buckets.check = self.hook._agree_on_unit

    def resolve(self) -> None:
        """Undo the last exchange unless the step has counted, which the manager's number says."""
        before, self.step = self.step, None
        if before is None:
            return
        buckets = self.hook.buckets
        if self.manager.current_step() > before:
            self.attendance.note(self.world.workers)
        else:
            buckets.undo()
            self.attendance.uncommitted += 1
        buckets.last = None

    def meet(self, **facts: Any) -> None:
        """The replicas of a new quorum, or of a new unit, agree. In the thread that sends."""
        hook, world = self.hook, self.world
        if world.rank:  # before the others may open the files
            write_or_wait(hook, world)
        world.meet(hook.reducer.residual_norm(), **facts)
        size_header(hook, hook.buckets.total, hook.chosen)
        hook.reducer.place(world.workers, world.hosted[0])
        self.attendance.changes += world.take_changes()
        write_or_wait(hook, world)

    # -- a replica joins ---------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """For a replica that joins; called within ``start_quorum``, in a thread of the manager."""
        self.resolve()
        hook = self.hook
        state = hook._codec.save(hook.levels)
        state["residuals"] = dict.fromkeys(state["residuals"])
        return {
            "model": copy.deepcopy(hook.source.network.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "hook": state,
            "attendance": self.attendance.state_dict(),
            "members": dict(self.world.members),
            "sizes": sizes(hook),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse, on the replica that joins, or that missed a step which the others took."""
        hook, world = self.hook, self.world
        world.heal(state["members"], hook.reducer.residual_norm())
        self.step = hook.buckets.last = None
        hook.source.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        hook._continue(hook._codec.fit(self.as_mine(state["hook"])))
        self.attendance.load_state_dict(state["attendance"])
        load_sizes(hook, state["sizes"])

    def as_mine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A hook's state in the place that this replica has now; places change with the quorum."""
        return {**state, "worker": self.world.rank, "workers": self.world.processes}


# -- the header says how many replicas the job began with ------------------------------------


def size_header(job: Job, steps: int, chosen: Choice) -> None:
    """Write the number of replicas into the header, before the first step of the job."""
    if steps == 0 and not job.rows:
        workers = job.world.workers
        job.header["world"] |= {"workers": workers, "processes": workers}
        job.header["config"]["workers"] = workers
        costs = costs_per_step(chosen.compressor, job.layers, chosen.levels, workers)
        job.header["per_step"] = cast("dict[str, Cost]", costs)


def sizes(job: Job) -> dict[str, Any]:
    """The part of the header that ``size_header`` has written."""
    header = job.header
    return copy.deepcopy({"world": header["world"], "per_step": header["per_step"]})


def load_sizes(job: Job, saved: Mapping[str, Any]) -> None:
    """The inverse."""
    job.header["world"], job.header["per_step"] = saved["world"], saved["per_step"]
    job.header["config"]["workers"] = saved["world"]["workers"]
