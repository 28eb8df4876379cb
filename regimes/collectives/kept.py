"""One group for several runs of the same processes, so that only the first has to meet the others.

A grid has hundreds of runs. Inside ``sharing`` a run that ends well hands its group on to the next
one, if all processes say so and the next one wants the same of it; else they leave it and meet
anew, as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass
class Place:
    """Where the processes have met.

    Attributes:
        store: where they tell each other of their groups.
        wants: what the group was made for; a run that wants something else needs another one.
        patience: see ``ProcessWorld``.
        whole: has the last run in it ended well, here?
    """

    store: dist.Store
    wants: Any
    patience: tuple[timedelta, ...]
    whole: bool = False


_shared: list[Place | None] = []  # of this process: the place of each ``sharing``, the inner last


@contextmanager
def sharing(leave: Callable[[], None]) -> Iterator[None]:
    """Runs inside share a group.

    Args:
        leave: leaves the group that is there at the end.
    """
    _shared.append(None)
    try:
        yield
    finally:
        if _shared.pop() is not None:
            leave()


def met(store: dist.Store, wants: Any, patience: tuple[timedelta, ...]) -> None:
    """The processes have met, for a group that a later run may want."""
    if _shared:
        _shared[-1] = Place(store, wants, patience)


def store(name: str) -> dist.Store | None:
    """What processes tell each other about the run of that name, if a group is shared."""
    place = _shared[-1] if _shared else None
    return None if place is None else dist.PrefixStore(name, place.store)


def hand_on() -> bool:
    """A run has ended well: may its group stay?"""
    place = _shared[-1] if _shared else None
    if place is not None:
        place.whole = True
    return place is not None


def take_over(
    told: dist.Store | None, rank: int, count: int, wants: Any
) -> tuple[timedelta, ...] | None:
    """The patience of a group that this run may use; None: it has to meet the others. All
    processes get the same answer.

    Args:
        told: of this run (`store`).

    Raises:
        RuntimeError: the others do not answer in time.
    """
    place = _shared[-1] if _shared else None
    if place is None or told is None:
        return None
    good, place.whole = place.whole and place.wants == wants, False
    told.set(f"whole/{rank}", "yes" if good else "no")
    answers = {told.get(f"whole/{other}") for other in range(count)}
    return place.patience if answers == {b"yes"} else None
