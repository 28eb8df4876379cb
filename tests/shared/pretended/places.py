"""Where a tensor pretends to be, and the moves between places."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pretended.streams import diary

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HOST, PINNED, ANYWHERE = -1, -2, -3  # places beside the numbers of GPUs
MANY = 20_000

_marks: dict[int, tuple[int, StorageWeakRef]] = {}  # a weak reference keeps its key from new use
_lock = threading.Lock()


def place(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return _marks.get(tensor.untyped_storage()._cdata, (HOST,))[0]


def on_gpu(tensor: Tensor) -> bool:
    return place(tensor) >= 0


def device(tensor: Tensor) -> torch.device:
    where = place(tensor)
    return torch.device("cuda", where) if where >= 0 else CPU


def number(device: Any) -> int:
    device = torch.device(device)
    return (device.index or 0) if device.type == "cuda" else HOST


def mark(tensor: Tensor, where: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
    with _lock:  # backward, and a hook's exchange, run in other threads
        if where == HOST:
            _marks.pop(storage._cdata, None)
            return tensor
        _marks[storage._cdata] = where, StorageWeakRef(storage)
        if len(_marks) > MANY:
            for key in [key for key, (_, storage) in [*_marks.items()] if storage.expired()]:
                del _marks[key]
    return tensor


def cloned(clone: Any) -> Any:
    """``UntypedStorage.clone``, by which tensors are deep-copied."""

    def marked(storage: Any) -> Any:
        out = clone(storage)
        if storage._cdata in _marks:
            _marks[out._cdata] = _marks[storage._cdata][0], StorageWeakRef(out)
        return out

    return marked


def tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def copied(source: int, target: int, without_waiting: bool = False) -> None:
    """Count a copy, and the wait of the host for all but quick ones of pinned memory."""
    if source == target or max(source, target) < 0:
        return
    name = "copy to the GPU" if target >= 0 else "copy from the GPU"
    diary.copies[name] += 1
    if not (without_waiting and PINNED in (source, target)):
        diary.waits[name] += 1


def _to(tensor: Tensor, *words: Any, **options: Any) -> Tensor:
    device, quick = options.pop("device", None), options.pop("non_blocking", False)
    for word in words:
        if isinstance(word, Tensor):
            device, options["dtype"] = word.device, word.dtype
        elif isinstance(word, str | torch.device):
            device = word
        elif isinstance(word, torch.dtype):
            options["dtype"] = word
        elif isinstance(word, bool):
            quick = word
    source = place(tensor)
    target = source if device is None else number(device)
    options = {k: v for k, v in options.items() if v is not None}
    moved = Tensor.to(tensor, **options) if options else tensor
    if source == target or max(source, target) < 0:
        return moved
    target = PINNED if target == HOST and quick else target  # as torch does it
    copied(source, target, quick)
    return mark(moved.clone(), target)


def _tolist(tensor: Tensor) -> Any:
    if on_gpu(tensor):
        diary.waits["tolist"] += 1
    return Tensor.tolist(tensor)


def numpy(tensor: Tensor, *words: Any, **options: Any) -> Any:
    if on_gpu(tensor):
        raise TypeError(f"can't convert {device(tensor)} device type tensor to numpy")
    return Tensor.numpy(tensor, *words, **options)


MOVES: dict[Any, Any] = {
    Tensor.to: _to,
    Tensor.cpu: lambda t: _to(t, CPU),
    Tensor.cuda: lambda t: _to(t, GPU),
    Tensor.tolist: _tolist,
    Tensor.numpy: numpy,
    Tensor.is_pinned: lambda t: place(t) == PINNED,
    Tensor.pin_memory: lambda t: mark(t.clone(), PINNED),
}
