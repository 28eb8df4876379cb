"""Notices that this process's script waits in its own collective.

A process whose loader is shorter goes on to the all-reduce of a metric, where it waits for the
others, which wait for it in the gradients of the next step: nothing would be said until a timeout.
Neither can look into the other, so each looks at the stack of its own main thread.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch.distributed as dist

# that end on all processes at about the same time; the root of a broadcast is done earlier
_ALIKE = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "barrier",
    "monitored_barrier",
    "reduce_scatter",
    "reduce_scatter_tensor",
}
_OWN = __name__.partition(".")[0]
IN_STEP = "a step"  # in place of a name: a collective of torch that a hook has called for it


def _waiting_in() -> tuple[str, list[int], int] | None:
    """The collective in which the main thread is now: its name, or ``IN_STEP``, its processes by
    their ranks in the default group, and what tells it from the next call. None: in none."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    found = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == _OWN:
            # the hook's own do not wait there; FSDP2's do, which a hook of its modules calls
            return None if found is None else (IN_STEP, [], id(found))
        if module == "torch.distributed.distributed_c10d" and frame.f_code.co_name in _ALIKE:
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    ranks = dist.get_process_group_ranks(found.f_locals.get("group"))
    return found.f_code.co_name, list(ranks), id(found)


def watch_script(guard: Any, seconds: float, end: threading.Event) -> None:
    """Look every so many seconds, in a thread, until the event, and let the guard post a collective
    that lasts."""
    me = weakref.ref(guard, lambda _: end.set())

    def look() -> None:
        before: Any = None
        while not end.wait(seconds):
            if (alive := me()) is None:
                return
            try:
                now = _waiting_in()
                alive.post_outside(now if now == before else None)
            except (RuntimeError, ValueError):  # the group has ended
                return
            before = now
            del alive

    threading.Thread(target=look, daemon=True, name="regimes-outside").start()
