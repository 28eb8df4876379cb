"""A thread that exchanges while the caller goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch


class Background:
    """Runs one task after another in a thread of its own and, on a GPU, in a stream of its own.

    Between ``submit`` and ``synchronize`` only tasks may use their communicator: collectives of the
    main thread and of this thread would have no fixed order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.error: BaseException | None = None  # set by the thread, read after ``synchronize``
        self.closed = False
        self.tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        # The thread gets the queue alone: a reference to self would keep this alive, and the
        # finalizer, which ends the thread, would never run. A daemon, because a thread that is
        # in a collective with a dead process cannot be joined when Python ends.
        self.thread = threading.Thread(
            target=_serve_tasks, args=(self.tasks, device), daemon=True, name="regimes"
        )
        self.thread.start()
        weakref.finalize(self, self.tasks.put, None)

    def submit(self, task: Callable[[], object]) -> None:
        """Let the thread run this task after all earlier ones. The task sees tensors as the current
        stream has them now."""
        # An event, so that the other stream waits for these tensors and for nothing later.
        event = torch.cuda.current_stream(self.device).record_event() if self.stream else None
        self.tasks.put(partial(self._run_task, task, event))

    def synchronize(self) -> None:
        """Wait until all tasks are done, and let the current stream wait for their work on the GPU.

        Raises:
            BaseException: an error of the thread.
        """
        self.wait_idle()
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def close(self) -> None:
        """End the thread after the current task (or bucket), and drop the tasks that still wait."""
        self.closed = True
        self.tasks.put(None)
        self.thread.join()

    def wait_idle(self) -> None:
        """Wait until the thread has done all tasks so far; raise its error."""
        if not self.closed:  # else there is no thread that would answer
            done = threading.Event()
            self.tasks.put(done.set)
            done.wait()
        if self.error is not None:
            raise self.error

    @torch.no_grad()
    def _run_task(self, task: Callable[[], object], event: torch.cuda.Event | None) -> None:
        try:
            with torch.cuda.stream(self.stream):
                if self.stream is not None and event is not None:
                    self.stream.wait_event(event)
                if self.error is None and not self.closed:
                    task()
        except BaseException as error:  # raised in the main thread, by ``wait_idle``
            self.error = error


def _serve_tasks(tasks: SimpleQueue[Callable[[], Any] | None], device: torch.device) -> None:
    """The thread's loop."""
    if device.type == "cuda":
        # A thread begins on GPU 0, and torch returns there when a stream is left: without this each
        # process would have a context, and memory, on GPU 0.
        torch.cuda.set_device(device)
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds the pipeline, which must not live until the next task
