"""What a step costs, in numbers that do not depend on time: operators, collectives, bytes.

``launches`` are operators of torch that compute something: neither views nor empty tensors. Ops of
all Python threads count, so that a step that is overlapped costs what it costs without. ``held``
are the bytes of all tensors that are alive when the last counted step is over: parameters,
gradients, residuals, memories, batches. ``peak`` are the bytes that the counted steps have taken
beyond what was there, at their highest; it is not known of several threads: their order varies.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN = {  # what allocates, or only looks at memory in another way
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
    "resize_",
    "lift_fresh",
    "detach",
    "_local_scalar_dense",
}
COLLECTIVES = ("c10d", "_c10d_functional")


class Meter:
    """Counts some steps of a training; ``step`` is called after each.

    Attributes:
        done: steps so far.
        counting: operators count now.
    """

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.last = first, first + steps
        self.done, self.counting = 0, False
        self.lock = threading.RLock()  # a storage may be freed while it is held
        self.launches = self.collectives = 0
        self.taken = self.peak = 0
        self.threads: set[int] = set()
        self.alive: dict[int, int] = {}  # storages that the counted steps have made
        self.counts: dict[str, int | None] | None = None
        self.mode = _Operators(self)
        self._count_threads()
        if first == 0:
            self._begin()

    def step(self) -> None:
        """A step is over."""
        self.done += 1
        if self.done == self.first:
            self._begin()
        elif self.done == self.last:
            self._end()

    def _begin(self) -> None:
        gc.collect()
        gc.disable()  # tensors in cycles would live until a moment that depends on the code
        self.mode.__enter__()
        self.counting = True

    def _end(self) -> None:
        self.counting = False
        self.mode.__exit__(None, None, None)
        gc.enable()
        self.counts = {
            "launches": self.launches,
            "collectives": self.collectives,
            "held": held(),
            "peak": self.peak if len(self.threads) == 1 else None,
        }

    def write(self, folder: Path) -> None:
        """Leave the counts in the folder of a case."""
        if self.counts is None:
            raise ValueError(f"{self.done} steps, of which {self.first} to {self.last} count")
        (folder / "counts.json").write_text(json.dumps(self.counts))

    def _count_threads(self) -> None:
        """Let every thread that begins from now on have its operators seen."""
        run = threading.Thread.run

        def seen(thread: threading.Thread) -> None:
            with _Operators(self):
                run(thread)

        threading.Thread.run = seen  # type: ignore

    def note(self, func: Any, inputs: Any, out: Any) -> None:
        """One operator was called."""
        space, _, name = func._schema.name.partition("::")
        with self.lock:
            self.threads.add(threading.get_ident())
            if space in COLLECTIVES:
                self.collectives += name != "wait_tensor"
            elif not (func.is_view or name in PLAIN):
                self.launches += 1
            had = {x.untyped_storage()._cdata for x in tree_leaves(inputs) if _is_plain(x)}
            for x in tree_leaves(out):
                if _is_plain(x) and x.untyped_storage()._cdata not in had:
                    self._take(x.untyped_storage())

    def _take(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive[key] = size
            self.taken += size
            self.peak = max(self.peak, self.taken)
            weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        with self.lock:
            self.taken -= self.alive.pop(key)


class _Operators(TorchDispatchMode):
    """Passes operators on, and to the meter while it counts."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.meter.counting:
            self.meter.note(func, (args, kwargs), out)
        return out


def held() -> int:
    """Bytes of all tensors that Python can reach, and of their gradients."""
    gc.collect()
    found = [x for x in gc.get_objects() if _is_plain(x)]
    found += [x.grad for x in found if x.is_leaf and x.grad is not None]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in found}
    return sum(storages.values())


def _is_plain(value: Any) -> bool:
    """Is it a tensor with memory of its own?"""
    return type(value) in (Tensor, torch.nn.Parameter)
