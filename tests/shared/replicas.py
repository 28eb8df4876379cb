"""Replicas of torchft in threads of this process, each with a manager of its own.

Each manager is behind a front that has its public names only.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

LIMIT = timedelta(seconds=30)


@contextmanager
def lighthouse(least: int = 1, join_ms: int = 10_000) -> Iterator[str]:
    """A lighthouse in this process; its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=least, join_timeout_ms=join_ms, heartbeat_timeout_ms=5000
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


class Public:
    """The public names of a manager; the others are for torchft itself."""

    def __init__(self, manager: Any) -> None:
        self.__manager = manager

    def __getattr__(self, name: str) -> Any:
        reader = sys._getframe(1).f_globals["__name__"]
        if name.startswith("_") and not reader.startswith("torchft."):
            raise AssertionError(f"{reader} reads the private field {name} of a manager")
        return getattr(self.__manager, name)


@contextmanager
def managed(address: str, name: str, **options: Any) -> Iterator[Any]:
    """A manager of one replica, of which only public names can be read."""
    from torchft import Manager, ProcessGroupGloo

    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = {
        "pg": ProcessGroupGloo(timeout=LIMIT),
        "load_state_dict": None,
        "state_dict": None,
        "min_replica_size": 1,
        "use_async_quorum": False,
        "timeout": LIMIT,
        "quorum_timeout": LIMIT,
        "rank": 0,
        "world_size": 1,
        "store_addr": "localhost",
        "store_port": store.port,
        "lighthouse_addr": address,
        "replica_id": name,
        "heartbeat_interval": timedelta(milliseconds=50),
    }
    manager = Manager(**(arguments | options))
    try:
        yield Public(manager)
    finally:
        manager.shutdown(wait=False)


def together(count: int, replica: Callable[[int], Any]) -> list[Any]:
    """What each of so many threads returns; the first error of one is raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = replica(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    return results
