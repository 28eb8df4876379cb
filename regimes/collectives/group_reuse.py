"""Reuse of one process group by several runs of the same processes.

A grid has hundreds of runs, and making a group takes as long as a short run. Inside ``sharing`` a
run that ends well releases its group, and the next run acquires it if all processes have released
it and want the same of it. Otherwise they leave it and make a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass
class SharedGroup:
    """The group of this process.

    Attributes:
        store: where the processes exchange whether they can reuse it.
        wants: what the group was made for; a run that wants something else needs another one.
        wait_timeout: see ``ProcessWorld``.
        released: the last run in it has ended well on this process.
    """

    store: dist.Store
    wants: Any
    wait_timeout: tuple[timedelta, ...]
    released: bool = False


_shared: list[SharedGroup | None] = []  # of each ``sharing``, the inner one last


@contextmanager
def sharing(leave: Callable[[], None]) -> Iterator[None]:
    """Runs inside share a group, which ``leave`` ends with the block."""
    _shared.append(None)
    try:
        yield
    finally:
        if _shared.pop() is not None:
            leave()


def register(store: dist.Store, wants: Any, wait_timeout: tuple[timedelta, ...]) -> None:
    """Offer a new group to later runs."""
    if _shared:
        _shared[-1] = SharedGroup(store, wants, wait_timeout)


def store(name: str) -> dist.Store | None:
    """The part of a shared group's store for the run of that name; None: no group is shared."""
    shared = _shared[-1] if _shared else None
    return None if shared is None else dist.PrefixStore(name, shared.store)


def release() -> bool:
    """A run has ended well. True if its group stays for the next one."""
    shared = _shared[-1] if _shared else None
    if shared is not None:
        shared.released = True
    return shared is not None


def acquire(
    store: dist.Store | None, rank: int, count: int, wants: Any
) -> tuple[timedelta, ...] | None:
    """The ``wait_timeout`` of a group that this run may use; None: it has to make one. All
    processes get the same answer.

    Args:
        store: of this run (`store`).

    Raises:
        RuntimeError: the others do not answer in time.
    """
    shared = _shared[-1] if _shared else None
    if shared is None or store is None:
        return None
    usable, shared.released = shared.released and shared.wants == wants, False
    store.set(f"whole/{rank}", "yes" if usable else "no")
    answers = {store.get(f"whole/{other}") for other in range(count)}
    return shared.wait_timeout if answers == {b"yes"} else None
