"""Graphs of a pretended GPU: launches of a capture with their addresses, which a replay repeats.

A capture computes nothing: memory that was there before is as it was, and what the capture has made
is NaN until a replay. A replay reads and writes the recorded addresses. Memory from outside that
has been freed since is an error, where a GPU would read what lies there now.

Graphs of one pool share memory: what a later one has left may lie where an earlier one has numbers
in passing. So a replay overwrites all that the graphs captured after it have left.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from pretended.places import tensors
from pretended.streams import Stream, _inside, diary


class Place(NamedTuple):
    """Where a tensor lies."""

    storage: Any  # of the graph's own memory, or a weak reference
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool = False  # a complex tensor that is read as its conjugate
    negative: bool = False

    def tensor(self) -> Tensor:
        storage = self.storage
        if isinstance(storage, StorageWeakRef):
            storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if storage is None:
                raise RuntimeError("a graph reads memory that has been freed since its capture")
        empty = torch.empty(0, dtype=self.dtype)
        found = empty.set_(storage, self.offset, self.size, self.stride)
        found = torch._conj(found) if self.conjugate else found
        return torch._neg_view(found) if self.negative else found


class Launch(NamedTuple):
    """One operation: its arguments, and the places that its new tensors have."""

    func: Any
    args: Any
    kwargs: Any
    made: list[tuple[int, Place]]


_numbers = itertools.count()
_pools: dict[Any, Any] = {}  # by handle: the graphs of each


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.launches: list[Launch] = []
        self.own: dict[int, Any] = {}  # storages that the capture has made
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}  # others: whole, and as they were
        self.ready = False
        self.number, self.peers = next(_numbers), WeakSet[Graph]()  # those of its pool

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def join(self, pool: Any) -> None:
        """Share memory with the other graphs of a pool; None: with none."""
        self.peers = WeakSet() if pool is None else _pools.setdefault(pool, WeakSet())
        self.peers.add(self)

    # -- capture --------------------------------------------------------------------------------

    def before(self, inputs: list[Tensor]) -> None:
        """Keep what lies in memory from outside."""
        for x in inputs:
            storage = x.untyped_storage()
            if storage._cdata not in self.own and storage._cdata not in self.outside:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.outside[storage._cdata] = whole, whole.clone()

    def record(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outs: Any) -> None:
        if not inputs and any(isinstance(x, torch.Generator) for x in kwargs.values()):
            return  # drawn on the host
        had = {x.untyped_storage()._cdata for x in inputs}
        made = []
        for i, out in enumerate(outs):
            key = out.untyped_storage()._cdata
            if key not in had:
                self.own.setdefault(key, out.untyped_storage())
                made.append((i, self._place(out)))
        if made or not func.is_view:
            args, kwargs = tree_map(self._placed, (args, kwargs))
            self.launches.append(Launch(func, args, kwargs, made))

    def _place(self, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()
        found = self.own.get(storage._cdata) or StorageWeakRef(storage)
        size, stride = tuple(tensor.shape), tensor.stride()
        reading = tensor.is_conj(), tensor.is_neg()
        return Place(found, tensor.dtype, tensor.storage_offset(), size, stride, *reading)

    def _placed(self, value: Any) -> Any:
        return self._place(value) if isinstance(value, Tensor) else value

    def end(self) -> None:
        """Nothing has been computed."""
        for whole, as_it_was in self.outside.values():
            whole.copy_(as_it_was)
        self.outside.clear()
        for launch in self.launches:
            for _, at in launch.made:
                if at.dtype.is_floating_point:
                    at.tensor().fill_(torch.nan)
        self.ready = True

    # -- replay ---------------------------------------------------------------------------------

    def replay(self) -> None:
        if not self.ready:
            raise RuntimeError("called CUDAGraph::replay without a preceding successful capture")
        diary.graphs["replayed"] += 1
        diary.ops["replay"] += 1
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for later in [x for x in self.peers if x.number > self.number]:
                for storage in later.own.values():
                    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN
            for launch in self.launches:
                _repeat(launch)


def _repeat(launch: Launch) -> None:
    args, kwargs = tree_map(_found, (launch.args, launch.kwargs), is_leaf=_is_place)
    out = launch.func(*args, **kwargs)
    outs = [*tensors([out])]
    for i, at in launch.made:
        at.tensor().copy_(outs[i])


def _is_place(value: Any) -> bool:
    return isinstance(value, Place)


def _found(value: Any) -> Any:
    return value.tensor() if isinstance(value, Place) else value


class Capture:
    """In the place of ``torch.cuda.graph``."""

    def __init__(
        self,
        cuda_graph: Graph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"unknown capture error mode {capture_error_mode!r}")
        self.graph, self.stream = cuda_graph, stream or Stream(name="capture")
        self.inside = _inside(self.stream)
        cuda_graph.join(pool)

    def __enter__(self) -> None:
        diary.waits["device"] += 1
        self.inside.__enter__()
        diary.capture = self.graph, self.stream

    def __exit__(self, *error: Any) -> None:
        diary.capture = None, None
        self.inside.__exit__(*error)
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            self.graph.end()
        if error[0] is None:
            diary.graphs["captured"] += 1
        else:
            self.graph.ready = False


def fakes() -> dict[str, Any]:
    return {
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: (0, next(_numbers)),
        "is_current_stream_capturing": lambda: diary.capturing is not None,
    }
