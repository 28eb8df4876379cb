"""Process groups of torch, held weakly.

A gloo group that is still referenced after its end keeps its threads, and they may abort the
process when Python ends. So no reference to a group may outlive it, and no traceback either,
because its frames hold the group.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regimes.base.errors import TrainingError
from regimes.base.torch_compat import default_store, nccl_of
from regimes.collectives.launcher import attempt_name

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


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


def default_group() -> Any:
    """Return torch's default group, or None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(eq=False)
class Group:
    """Names processes that exchange something, and calls torch's collectives for them.

    Attributes:
        ranks: by their ranks in torch's default group.
        backend: of tensors, "gloo" or "nccl".
        made: torch's group; None: the default group.
    """

    ranks: tuple[int, ...]
    backend: str = "gloo"
    made: weakref.ref[Any] | None = None

    @staticmethod
    def of_default(backend: str = "gloo") -> Group:
        """Return the group of all processes, which is torch's default group."""
        return Group(tuple(range(dist.get_world_size())), backend)

    @staticmethod
    def of_torch(made: Any) -> Group:
        """Wrap a group of torch, which lives as long as its owner keeps it."""
        return Group(tuple(dist.get_process_group_ranks(made)), made=weakref.ref(made))

    @staticmethod
    def of_some(
        ranks: Sequence[int], backend: str, device: torch.device, limit: timedelta
    ) -> Group:
        """Make a new group of some processes, which all call this. It ends with ``destroy``, when
        the user destroys the default group, or when Python ends."""
        with contextlib.nullcontext() if backend == "gloo" else errors_are_raised():
            made = dist.new_group(
                ranks, limit, backend_string(backend, device), use_local_synchronization=True
            )
        group = Group(tuple(ranks), backend, weakref.ref(made))
        if backend == "gloo":
            atexit.register(group.destroy)
        return group

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Return this process's place in the group, from 0."""
        return self.ranks.index(dist.get_rank())

    @property
    def torch_group(self) -> Any:
        """Return the group as an argument of torch's functions. Callers must not store it.

        Raises:
            TrainingError: it has ended.
        """
        if self.made is None:
            return None
        if (ours := self.made()) is None:
            raise TrainingError(
                "the process group has ended: train before dist.destroy_process_group()"
            )
        return ours

    # -- collectives: those of tensors return torch's work, those of objects wait -----------------

    def all_reduce(self, flat: Tensor, **options: Any) -> Any:
        """Overwrite the tensor with the sum over all processes, or with the result of another
        ``op``."""
        return dist.all_reduce(flat, group=self.torch_group, async_op=True, **options)

    def all_gather(self, everyone: Tensor, flat: Tensor) -> Any:
        """Write all processes' tensors into ``everyone``, end to end."""
        return getattr(dist, GATHER)(everyone, flat, group=self.torch_group, async_op=True)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Write each process's part for this process into ``received``; ``sent`` has a part for
        each."""
        return dist.all_to_all_single(received, sent, group=self.torch_group, async_op=True)

    def reduce_scatter(self, mine: Tensor, flat: Tensor) -> Any:
        """Write this process's part of the sum over all processes into ``mine``."""
        return getattr(dist, SCATTER)(mine, flat, group=self.torch_group, async_op=True)

    def broadcast(self, flat: Tensor) -> Any:
        """Overwrite the tensor with the first process's."""
        return dist.broadcast(flat, self.ranks[0], group=self.torch_group, async_op=True)

    def all_gather_object(self, everyone: list[Any], value: Any) -> None:
        """Write all processes' objects into ``everyone``."""
        dist.all_gather_object(everyone, value, group=self.torch_group)

    def gather_object(self, everyone: list[Any] | None, value: Any) -> None:
        """Write all processes' objects into the first process's ``everyone``; the others pass
        None."""
        dist.gather_object(value, everyone, self.ranks[0], group=self.torch_group)

    def scatter_object(self, mine: list[Any], values: list[Any] | None) -> None:
        """Write this process's entry of the first process's ``values`` into ``mine[0]``."""
        dist.scatter_object_list(mine, values, self.ranks[0], group=self.torch_group)

    def destroy(self) -> None:
        """Destroy the group if it was made here and still exists."""
        if self.made is not None and (ours := self.made()) is not None:
            with contextlib.suppress(ValueError):  # destroyed already, but still referenced
                dist.destroy_process_group(ours)


def abort_nccl(groups: Iterable[Group]) -> None:
    """End collectives of NCCL that hang in a stream, from any thread. The groups stay."""
    for group in groups:
        with contextlib.suppress(RuntimeError, AttributeError):  # it has ended, or has no NCCL
            ours = dist.group.WORLD if group.made is None else group.made()
            nccl_of(ours).abort()


def job_store(name: str) -> dist.Store:
    """Return a part of the default group's store; ``name`` is the same on all processes of a
    group."""
    return dist.PrefixStore(f"{attempt_name()}/{name}", default_store())


def backend_string(own: str, device: torch.device) -> str:
    """Return the backend for torch: ``own`` for tensors on a GPU, with gloo for Python objects if
    ``own`` cannot carry both."""
    return own if own == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


@contextlib.contextmanager
def errors_are_raised() -> Iterator[None]:
    """Let NCCL groups that are made inside leave their errors to our watcher. By torch's default a
    thread of its own ends the process instead, and neither the record nor the user learns the
    cause."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
