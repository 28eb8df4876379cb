"""Streams, events, threads and generators of a pretended GPU (``pretended``)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

GPU = torch.device("cuda", 0)
_here = threading.local()  # stream: the thread's
_Event, _Stream = torch.cuda.Event, torch.cuda.Stream


class _Forbidden(Counter[str]):
    """Counts what a graph that is captured must not have; there it is CUDA's error."""

    def __setitem__(self, name: str, count: int) -> None:
        if diary.capturing is not None and count:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        super().__setitem__(name, count)


class Diary:
    """What has happened since ``clear``: ``ops`` launched and ``waits`` of the host, by name;
    ``copies`` between places, waited for or not, and ``memory`` taken there, by number;
    ``calls`` of ``set_device`` by the main thread; what ``streams`` record and wait for, in order;
    ``graphs`` captured and replayed; GPUs that have ``contexts`` because a thread has left a
    stream there, as (thread, GPU)."""

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()
        self.capture: tuple[Any, Any] = None, None  # the graph, see ``graphs``, and its stream
        self.graphs: Counter[str] = Counter()
        self.waits: Counter[str] = _Forbidden()
        self.copies: Counter[str] = _Forbidden()
        self.memory: Counter[str] = Counter()
        self.calls: list[str] = []
        self.streams: list[str] = []
        self.contexts: set[tuple[str, int]] = set()

    @property
    def capturing(self) -> Any:
        """The graph, if it is captured in this thread's stream: other threads go on."""
        graph, stream = self.capture
        return graph if stream is _current() else None

    def clear(self) -> None:
        for part in (
            self.graphs,
            self.ops,
            self.waits,
            self.copies,
            self.memory,
            self.calls,
            self.streams,
            self.contexts,
        ):
            part.clear()


diary = Diary()


class Event:
    __class__ = property(lambda self: _Event)  # type: ignore[assignment]  # for isinstance

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed, self.at = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()
        diary.streams.append(f"event of {stream or _current()}")

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current()).wait_event(self)

    def query(self) -> bool:
        return _answered()

    def synchronize(self) -> None:
        diary.waits["event"] += 1

    def elapsed_time(self, later: Event) -> float:
        if not (self.timed and later.timed and self.at and later.at):
            raise RuntimeError("both events must be recorded, and made with enable_timing")
        return 1e3 * (later.at - self.at)


class Stream:
    __class__ = property(lambda self: _Stream)  # type: ignore[assignment]

    def __init__(self, device: Any = GPU, name: str = "side", **_: Any) -> None:
        self.device, self.name = torch.device(device), name

    def __str__(self) -> str:
        return self.name

    def synchronize(self) -> None:
        diary.waits["stream"] += 1

    def query(self) -> bool:
        return _answered()

    def wait_stream(self, other: Stream) -> None:
        diary.streams.append(f"{self} waits for {other}")

    def wait_event(self, event: Event) -> None:
        diary.streams.append(f"{self} waits for an event")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


def _answered() -> bool:
    if diary.capturing is not None:
        raise RuntimeError("operation not permitted when stream is capturing: query")
    return True


class Generator(torch.Generator):
    """One of the CPU that says it is where it was asked for."""

    device = property(lambda self: self.where)  # type: ignore[assignment]

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.where = torch.device(device)
        return made


def _current(device: Any = None) -> Stream:
    if not hasattr(_here, "stream"):
        _here.stream = Stream(device or GPU, "main")
    return _here.stream


def _gpu() -> int:
    """The thread's, 0 where none was set."""
    return getattr(_here, "gpu", 0)


def _set_gpu(device: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        diary.calls.append(f"set_device {device}")
    _here.gpu = torch.device(device).index or 0


@contextlib.contextmanager
def _inside(stream: Stream | None) -> Iterator[None]:
    before = _current()
    _here.stream = stream or before
    try:
        yield
    finally:
        _here.stream = before
        if stream is not None:  # torch makes the stream of before current, on the thread's GPU
            diary.contexts.add((threading.current_thread().name, _gpu()))


def backward(engine: Any) -> Any:
    """Autograd's engine in a thread, in the caller's stream."""

    def run(*args: Any, **options: Any) -> Any:
        found: list[Any] = []
        stream = _current()

        def work() -> None:
            _here.stream = stream
            try:
                found.extend([engine(*args, **options), None])
            except BaseException as error:
                found.extend([None, error])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if found[1] is not None:
            raise found[1]
        return found[0]

    return run


def _waits_for_all(*_: Any) -> None:
    diary.waits["device"] += 1


def fakes(gpus: int) -> dict[str, Any]:
    """What stands in the place of torch.cuda's."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_device": _gpu,
        "is_bf16_supported": lambda *_: True,
        "manual_seed_all": lambda *_: None,
        "get_device_name": lambda *_: "pretended",
        "synchronize": _waits_for_all,
        "get_device_properties": lambda gpu=GPU: SimpleNamespace(
            name="pretended", uuid=f"GPU {gpu}", major=8, minor=0, total_memory=1 << 36
        ),
        "set_device": _set_gpu,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "current_stream": _current,
        "default_stream": lambda *_: Stream(name="main"),
        "stream": _inside,
        "Stream": Stream,
        "Event": Event,
    }
