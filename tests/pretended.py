"""A pretended GPU: CPU tensors that say they are on "cuda:0", so that placement shows without one.

The numbers are real. What is moved there, or made there, is marked, and so is whatever an operation
makes of something marked. Operations that mix places do not raise; what travels is looked at.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_Stream, _Event, _run = torch.cuda.Stream, torch.cuda.Event, threading.Thread.run
_marked: dict[int, StorageWeakRef] = {}  # the reference keeps the key from being used again


def on_gpu(tensor: Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _marked


def _mark(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _marked[storage._cdata] = StorageWeakRef(storage)
    return tensor


def _device(tensor: Tensor) -> torch.device:
    return GPU if on_gpu(tensor) else CPU


def _move(tensor: Tensor, *words: Any, **options: Any) -> Tensor:
    """``Tensor.to`` in its forms."""
    to, rest = options.pop("device", None), []
    for word in words:
        if isinstance(word, str | torch.device):
            to = word
        elif isinstance(word, Tensor):
            to, rest = _device(word), [word.dtype]
        elif isinstance(word, torch.dtype):
            rest = [word]
    known = {k: v for k, v in options.items() if k != "non_blocking" and v is not None}
    moved = Tensor.to(tensor, *rest, **known) if rest or known else tensor
    there = on_gpu(tensor) if to is None else torch.device(to).type == "cuda"
    if there == on_gpu(tensor):
        return _mark(moved) if there else moved
    fresh = moved.clone() if there else torch.from_numpy(moved.detach().numpy().copy())
    return _mark(fresh) if there else fresh


class _Functions(TorchFunctionMode):
    """Where Python says where."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            return _move(*args, **kwargs)
        if func is Tensor.cpu:
            return _move(args[0], CPU)
        there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if there:
            kwargs["device"] = CPU
        out = func(*args, **kwargs)
        return _mark(out) if there else out


class _Operations(TorchDispatchMode):
    """What comes of marked tensors is marked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marked = any(on_gpu(x) for x in inputs)
        out = func(*args, **(kwargs or {}))
        if marked:
            for made in tree_leaves(out):
                if isinstance(made, Tensor) and not any(made is x for x in inputs):
                    _mark(made)
        return out


def stream(*_: Any) -> Any:
    return Mock(spec=_Stream, record_event=lambda: Mock(spec=_Event))


def install(patch: Any, gpus: int = 1) -> list[str]:
    """Pretend in this process, in this thread and those to come, until ``patch`` (a
    ``pytest.MonkeyPatch``) is undone. Returns the list to which ``set_device`` writes."""
    seen: list[str] = []
    patch.setattr(torch.Tensor, "device", property(_device), raising=False)
    fakes = {
        "is_available": lambda: True, "device_count": lambda: gpus, "current_stream": stream,
        "get_device_name": lambda _: "pretended", "synchronize": lambda *_: None,
        "set_device": lambda device: seen.append(f"set_device {device}"),
        "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(), "Stream": stream,
        "Event": lambda **_: Mock(spec=_Event, elapsed_time=lambda _: 0.0),
    }  # fmt: skip
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(threading.Thread, "run", _run_on_gpu)
    _Functions().__enter__()
    _Operations().__enter__()
    return seen


def _run_on_gpu(thread: threading.Thread) -> None:
    with _Functions(), _Operations():
        _run(thread)
