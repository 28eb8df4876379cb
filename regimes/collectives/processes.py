"""W workers on several processes, which ``connect`` joins when a launcher has started them.

With ``group``, ``call_guard`` and ``watcher`` the only user of torch.distributed.

A gloo group that is still referenced after its end keeps its threads, and they may abort the
process when Python ends. Therefore no reference to a group, and no traceback whose frames hold one,
may outlive it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives import devices
from regimes.collectives.launcher import Launched, attempt, launched
from regimes.collectives.watcher import Presence, Watcher
from regimes.collectives.world import World
from regimes.errors import TrainingError

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
ROLL_CALL = 3.0  # seconds in which a living process answers when contact is lost
_connections = itertools.count()  # the same on all processes, which connect in one order


def _unpin_default_group() -> None:
    """Remove torch's own lasting reference: the functions of ``torch.distributed.nn.functional``
    have as default argument the group that exists when they are first imported, which the first
    optimiser does."""
    if not dist.is_available():
        return
    from torch.distributed.nn import functional

    for function in vars(functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(  # None means the default group of the time of the call
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )


_unpin_default_group()  # at import: before this package makes a group


class ProcessWorld(World):
    """W workers over P processes of torch.distributed (gloo or NCCL).

    Python objects travel over gloo in both cases: over NCCL they would need a GPU, and torch takes
    the current one of whichever thread asks.

    Attributes:
        store: the store of the group.
        watcher: watches collectives of tensors over NCCL, for which the host does not wait; None
            over gloo, where it waits for each.
        lost: a process may be elsewhere in the program, so that the group cannot be reused.
    """

    lockstep = True
    store: dist.Store | None = None
    watcher: Watcher | None = None
    lost = False

    def __init__(
        self,
        workers: int,
        device: torch.device,
        store: dist.Store | None = None,
        nccl_limit: float | None = None,
    ) -> None:
        """
        Args:
            nccl_limit: seconds that a collective of NCCL may take; None: tensors go over gloo.
        """
        super().__init__(workers, processes=dist.get_world_size(), rank=dist.get_rank())
        self.device, self.store = device, store
        if store is not None and nccl_limit is not None:
            self._watch(store, nccl_limit)

    def _watch(self, store: dist.Store, limit: float, **options: Any) -> None:
        """From now on collectives of tensors run in the order of streams."""
        presence = Presence(store, self.rank, self.processes)
        self.watcher = Watcher(
            presence,
            f"process {self.rank} of {self.processes}",
            weakref.WeakMethod(self.abort_communicators),
            limit,
            device=self.device,
            **options,
        )

    def abort_communicators(self) -> None:
        """End collectives of NCCL that hang in a stream. The group itself stays."""
        _abort_nccl(dist.group.WORLD)

    @property
    def group(self) -> Any:
        """The group of the collectives; None for torch's default group. Not to be stored: see the
        module's docstring."""
        return None

    @property
    def peers(self) -> tuple[Any, int]:
        """The group over which means and gathers go, and the number of its processes."""
        return self.group, self.processes

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        answers: list[Tensor] = [torch.empty(0)] * len(tensors)
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            ids = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            parts = super().mean([tensors[i] for i in ids])
            flat = torch.cat([p.flatten() for p in parts])
            if len(flat):  # a share may be empty, on all peers alike
                self._wait(dist.all_reduce, flat, group=self.peers[0], async_op=True)
            flat /= self.peers[1]
            pieces = flat.split([p.numel() for p in parts])
            for i, piece, part in zip(ids, pieces, parts, strict=True):
                answers[i] = piece.view(part.shape)
        return answers

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        wires = [_packed(t.reshape(self.local, -1)).view(torch.uint8) for t in tensors]
        flat = torch.cat(wires, dim=1)  # [L, bytes]
        everyone = flat.new_empty((self.workers, flat.shape[1]))
        self._wait(getattr(dist, GATHER), everyone, flat, group=self.peers[0], async_op=True)
        pieces = everyone.split([w.shape[1] for w in wires], dim=1)
        return [
            # a copy, because a view as another dtype needs aligned storage
            p.clone(memory_format=torch.contiguous_format)
            .view(t.dtype)
            .view(self.workers, *t.shape[1:])
            for p, t in zip(pieces, tensors, strict=True)
        ]

    def exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        """The parts for one process, of all its workers and tensors, travel together."""
        shape = self.local, self.workers, -1
        wires = [_packed(t.reshape(shape)).view(torch.uint8) for t in tensors]
        flat = torch.cat(wires, dim=2)  # [L, W, bytes]
        group, count = self.peers
        flat = flat.unflatten(1, (count, self.local)).transpose(0, 1).contiguous()
        received = torch.empty_like(flat)  # [P, L of the sender, L of ours, bytes]
        self._wait(dist.all_to_all_single, received, flat, group=group, async_op=True)
        everyone = received.flatten(0, 1).transpose(0, 1)  # [L, W, bytes]
        pieces = everyone.split([w.shape[2] for w in wires], dim=2)
        return [
            p.clone(memory_format=torch.contiguous_format).view(t.dtype).view(t.shape)
            for p, t in zip(pieces, tensors, strict=True)
        ]

    def _broadcast(self, flat: Tensor) -> None:
        self._wait(dist.broadcast, flat, 0, async_op=True)

    def gather_object(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.processes
        self._wait(dist.all_gather_object, everyone, value)
        return everyone

    def abort(self) -> None:
        self.lost = True
        self._stop_watching()
        _leave(at_once=True)

    def _stop_watching(self) -> None:
        if self.watcher is not None:
            self.watcher.close()

    def close(self) -> None:
        self._stop_watching()
        if self.lost or (shared := _shared_now()) is None:
            _leave()
        else:
            shared.released = True

    def _finish(self, work: Any) -> None:
        """Wait for a collective of gloo."""
        work.wait()

    def _wait(self, collective: Any, *args: Any, **options: Any) -> None:
        """Call a collective, of ``group`` unless another one is among the options, and wait: the
        host, or with NCCL the current stream alone."""
        if self.watcher is not None:
            self.watcher.check()
        options.setdefault("group", self.group)
        on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in args)
        if self.watcher is not None and on_gpu:
            self._launch(self.watcher, collective, *args, **options)
            return
        spent, start = self._clock[0], time.perf_counter()
        self._clock = spent, start
        work = None
        try:
            work = collective(*args, **options)
            if work is not None:
                self._finish(work)
        except torch.OutOfMemoryError:
            raise  # also a RuntimeError, but of this process alone
        except RuntimeError as error:
            # The traceback of what is raised holds this frame, and a failed work holds the group.
            del work
            options.clear()
            raise self._lost(collective.__name__, error) from error.with_traceback(None)
        if self.device.type == "cuda":
            # A sync point of this thread's stream alone: else waiting would count as computing.
            torch.cuda.current_stream(self.device).synchronize()
        self._clock = spent + time.perf_counter() - start, None

    def _launch(self, watcher: Watcher, collective: Any, *args: Any, **options: Any) -> None:
        """Call a collective of NCCL: later work in the current stream waits for it."""
        start = self._mark()
        try:
            work = collective(*args, **options)
            work.wait()  # of the stream, not of the host
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            options.clear()
            watcher.check()  # where the watcher has aborted it, it knows why
            raise self._lost(collective.__name__, error) from error.with_traceback(None)
        end = self._mark()
        watcher.follow(work, end, collective.__name__, id(options["group"]))
        self._marks.append((start, end))

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def take_marks(self) -> list[tuple[Any, Any]]:
        marks, self._marks = self._marks, []
        return marks

    def _lost(self, name: str, error: RuntimeError) -> TrainingError:
        silent = _name_silent(self.store, self.rank, self.processes)
        reason = str(error).splitlines()[0]
        return TrainingError(
            f"process {self.rank} of {self.processes} lost contact with the others in {name} "
            f"({silent}): {reason}"
        )


def _abort_nccl(group: Any) -> None:
    """Abort the communicator of NCCL in a group, from any thread."""
    with contextlib.suppress(RuntimeError, AttributeError):  # it has ended
        group._get_backend(torch.device("cuda")).abort()


def _name_silent(store: dist.Store | None, rank: int, processes: int) -> str:
    """Names the processes that do not answer a roll call in the store."""
    others = {other: f"roll call/{other}" for other in range(processes) if other != rank}
    try:
        assert store is not None
        store.set(f"roll call/{rank}", "here")
        deadline = time.monotonic() + ROLL_CALL
        while others and time.monotonic() < deadline:
            others = {r: key for r, key in others.items() if not store.check([key])}
            time.sleep(0.05)
    except (RuntimeError, AssertionError):
        return "one of them has died or hangs"
    if not others:
        return "all of them still answer: the network, or another collective"
    return f"no sign of process {', '.join(map(str, others))}, which has died or hangs"


def connect(
    workers: int,
    device: torch.device,
    timeout: float = 600.0,
    make: Callable[..., ProcessWorld] | None = None,
) -> World:
    """The world of this process: simulated when alone, else joined to the launched group.

    NCCL carries the tensors if every process has a GPU for itself, gloo otherwise. A process's GPU
    becomes torch's current one.

    Args:
        make: the world of several processes that have met, by the arguments of ``ProcessWorld``.

    Raises:
        ConfigError: W is not a multiple of P; some processes are on a CPU, others on a GPU.
        TrainingError: the other processes do not connect in time.
    """
    count, us = next(_connections), launched()
    if us.count == 1:
        return World(workers)
    if make is None:
        World(workers, processes=us.count)  # checks the division, before any process waits
    store, limit = _join(device, timedelta(seconds=timeout), f"{attempt()}/{count}")
    return (make or ProcessWorld)(workers, device, store, limit)


@dataclass
class SharedGroup:
    """A group that runs use one after the other.

    Attributes:
        store: where the processes exchange whether they can use it again.
        wants: what it was made for; a run that wants something else makes another one.
        nccl_limit: see ``ProcessWorld``.
        released: the last run in it has ended well on this process.
    """

    store: dist.Store
    wants: Any
    nccl_limit: float | None
    released: bool = False

    def acquire(self, store: dist.Store, us: Launched, wants: Any) -> bool:
        """Whether a run may use it, by its own ``store``; the same answer on all processes."""
        usable, self.released = self.released and self.wants == wants, False
        store.set(f"whole/{us.rank}", "yes" if usable else "no")
        return {store.get(f"whole/{other}") for other in range(us.count)} == {b"yes"}


_shared: list[SharedGroup | None] = []  # of each ``shared_group``, the inner one last


def _shared_now() -> SharedGroup | None:
    return _shared[-1] if _shared else None


@contextlib.contextmanager
def shared_group() -> Iterator[None]:
    """Runs inside, one after the other, share a group: a grid has hundreds of runs, and making a
    group takes as long as a short run. The next run takes the group if all processes have ended the
    last one well and want the same of it; otherwise they leave it and make a new one."""
    _shared.append(None)
    try:
        yield
    finally:
        if _shared.pop() is not None:
            _end()


def _end() -> None:
    """Leave the group, if there is one, even where other processes have died."""
    _leave(at_once=True)
    _leave()


def _join(device: torch.device, timeout: timedelta, name: str) -> tuple[dist.Store, float | None]:
    """Make a group under ``name``, unless that of the run before can be reused; its store, and the
    limit of ``ProcessWorld``."""
    us, shared, wants = launched(), _shared_now(), (device, timeout)
    store: dist.Store | None = None
    try:
        if shared is not None:
            store = dist.PrefixStore(name, shared.store)
            if shared.acquire(store, us, wants):
                return store, shared.nccl_limit
        _end()  # the group of a run in this process that has failed
        if device.type == "cuda":
            torch.cuda.set_device(device)
        job, _, _ = next(dist.rendezvous(us.rendezvous, us.rank, us.count, timeout=timeout))
        job.set_timeout(timeout)  # rendezvous does not pass it to a store in a file
        store = dist.PrefixStore(name, job)
        devices.post_kind(store, us.rank, device)
        devices.check_kinds(store, us.rank, us.count)
        own_gpus = devices.one_gpu_each(store, us.rank, us.count, device)
        with errors_are_raised():
            dist.init_process_group(
                backends("nccl", device) if own_gpus else "gloo",
                store=store,
                world_size=us.count,
                rank=us.rank,
                timeout=timeout,
                device_id=device if own_gpus else None,
            )
        # A process that leaves at once must not close the store on one that still connects.
        store.set(f"met/{us.rank}", "")
        store.wait([f"met/{rank}" for rank in range(us.count)], timeout)
    except (RuntimeError, ValueError) as error:  # ValueError: the launcher names no address
        raise TrainingError(
            f"process {us.rank} of {us.count} lost contact with the others at the start "
            f"({_name_silent(store, us.rank, us.count)}): {str(error).splitlines()[0]}"
        ) from error
    nccl_limit = timeout.total_seconds() if own_gpus else None
    if _shared:  # offer it to later runs
        _shared[-1] = SharedGroup(store, wants, nccl_limit)
    return store, nccl_limit


def backends(own: str, device: torch.device) -> str:
    """``own`` for tensors on a GPU; with gloo for Python objects, if ``own`` cannot carry both."""
    return own if own == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


@contextlib.contextmanager
def errors_are_raised() -> Iterator[None]:
    """NCCL groups made inside leave their errors to our watcher. By torch's default a thread of its
    own ends the process instead, and neither the record nor the user learns the cause."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _leave(*, at_once: bool = False) -> None:
    """Leave the group, if there is one. ``at_once``: abort NCCL, whose orderly end waits for the
    other processes, dead or not; a gloo group stays."""
    if not dist.is_initialized():
        return
    if not at_once:
        dist.destroy_process_group()
    elif "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()


def _packed(t: Tensor) -> Tensor:
    """The tensor, or a copy without gaps. torch calls a tensor contiguous whatever the stride of a
    last dimension of one number is, but views it as bytes only if that stride is 1."""
    if t.is_contiguous() and t.stride(-1) == 1:
        return t
    return t.clone(memory_format=torch.contiguous_format)
