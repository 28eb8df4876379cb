"""A pretended GPU: CPU tensors that say they are on "cuda:0" and must be treated as if they were.

The numbers and the gradients are real. A storage carries the place where it pretends to be: an
operation of two places raises as CUDA would, launches and waits of the host are counted, streams
and events keep a diary. Backward runs in a thread of its own, as a GPU's does.

It cannot see what only the machine does: races between streams, TF32, the order in which atomic
additions happen, cuDNN and the algorithms that it chooses, NCCL and its watchdog, what DDP does
with buckets and futures in C++, memory and its limits, time. What C++ makes of nothing belongs to
the place where it is used first. Kernels are those of the CPU, autocast too, and there is one
random stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pretended import graphs
from pretended.operations import Functions, Operations
from pretended.places import CPU, GPU, cloned, device, on_gpu
from pretended.streams import Diary, Generator, backward, diary, fakes

__all__ = ["CPU", "GPU", "Diary", "gpu", "on_gpu"]
_Autocast = torch.autocast


@contextlib.contextmanager
def gpu(count: int = 1) -> Iterator[Diary]:
    """Pretend in this process, in this thread and those that it starts."""
    diary.clear()
    with pytest.MonkeyPatch.context() as patch, Functions(), Operations():
        for name, fake in {**fakes(count), **graphs.fakes()}.items():
            patch.setattr(torch.cuda, name, fake)
        for name, found in (("device", device), ("is_cuda", on_gpu), ("is_cpu", _on_cpu)):
            patch.setattr(Tensor, name, property(found), raising=False)
        engine = backward(torch.autograd.graph._engine_run_backward)
        for owner in (torch.autograd, torch.autograd.graph):
            patch.setattr(owner, "_engine_run_backward", engine)
        patch.setattr(torch, "autocast", lambda _, *words, **o: _Autocast("cpu", *words, **o))
        patch.setattr(torch, "Generator", Generator)
        # or images would be resized by another path than a CPU's
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: False)
        patch.setattr(torch.UntypedStorage, "clone", cloned(torch.UntypedStorage.clone))
        patch.setattr(threading.Thread, "run", _threaded(threading.Thread.run))
        yield diary


def _on_cpu(tensor: Tensor) -> bool:
    return not on_gpu(tensor)


def _threaded(run: Any) -> Any:
    def with_modes(thread: threading.Thread) -> None:
        with Functions(), Operations():
            run(thread)

    return with_modes
