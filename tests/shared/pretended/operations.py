"""What Python asks for and what is launched: places are checked, launches and waits counted."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pretended.places import (
    ANYWHERE,
    CPU,
    HOST,
    MOVES,
    PINNED,
    copied,
    device,
    mark,
    number,
    numpy,
    on_gpu,
    place,
    tensors,
)
from pretended.streams import diary

FREE = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
    "resize_",
    "lift_fresh",
    "_local_scalar_dense",
}
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "_linalg_eigh",
    "_linalg_svd",
    "_linalg_check_errors",
}
COPIES = {"copy_", "_to_copy", "_foreach_copy_", "set_"}  # from one place to another
JOINS = {"cat", "stack", "mm", "bmm", "addmm", "addmv", "addmv_", "dot", "mv"}  # no CPU scalar
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with indices of the CPU, too
COPIED = {"tensor", "as_tensor", "new_tensor"}  # made on the CPU first

_here = threading.local()  # plain: is Python making a tensor of nothing?


class Functions(TorchFunctionMode):
    """Python's words: ``device=`` and what moves a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in MOVES:
            return MOVES[func](*args, **kwargs)
        if name == "__array__":
            return numpy(args[0])
        if name == "lstm" and args[5] > 0 and args[6]:
            raise RuntimeError("cuDNN keeps the state of an LSTM's dropout: no seed reaches it")
        wanted = device(args[0]) if name == "new_tensor" else kwargs.get("device")
        _check_generator(kwargs.get("generator"), wanted, args)
        pinned = kwargs.pop("pin_memory", False)
        if "device" in kwargs:
            kwargs["device"] = CPU
        before, _here.plain = getattr(_here, "plain", False), not [*tensors(args)]
        try:
            out = func(*args, **kwargs)
        finally:
            _here.plain = before
        if wanted is not None and isinstance(out, Tensor):
            if name in COPIED:
                copied(HOST, number(wanted))
            mark(out, number(wanted))
        return mark(out, PINNED) if pinned else out


def _check_generator(generator: Any, wanted: Any, args: Any) -> None:
    like = next(tensors(args), None)
    there = on_gpu(like) if wanted is None and like is not None else number(wanted or CPU) >= 0
    if generator is not None and there != (generator.device.type == "cuda"):
        raise RuntimeError("a generator of the CPU cannot draw on a GPU, nor the other way round")


class Operations(TorchDispatchMode):
    """What is launched in the end, by Python, C++ and autograd alike."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        inputs = [*tensors((*args, *kwargs.values()))]
        places = [place(x) for x in inputs]
        gpus = {where for where in places if where >= 0}
        if gpus and space != "c10d":
            _check_places(name, inputs, places, gpus)
            _count(func, name, args, kwargs, places)
        graph = diary.capturing
        if graph is not None:
            graph.before(inputs)
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        if graph is not None and space != "c10d":
            graph.record(func, args, kwargs, inputs, [*tensors([out])])
        where = min(gpus, default=HOST)
        if not gpus and (ANYWHERE in places or not (inputs or getattr(_here, "plain", False))):
            where = ANYWHERE  # made by C++ of nothing: it joins what it meets
        known = {id(x) for x in inputs}
        for made in tensors([out]):
            if id(made) not in known or (gpus and place(made) == ANYWHERE):
                mark(made, where)
        if gpus and not func.is_view:
            diary.memory[name] += _taken(inputs, out)
        return out


def _taken(inputs: list[Tensor], out: Any) -> int:
    """How many results have memory that no input has."""
    had = {x.untyped_storage()._cdata for x in inputs}
    return len({x.untyped_storage()._cdata for x in tensors([out])} - had)


def _check_places(name: str, inputs: list[Tensor], places: list[int], gpus: set[int]) -> None:
    if name in COPIES:
        return
    of_host = [x for x, where in zip(inputs, places, strict=True) if where in (HOST, PINNED)]
    first = places[0] in (HOST, PINNED)
    if name in INDEXED:
        strays = first
    else:
        strays = (first and name.endswith("_")) or any(x.dim() or name in JOINS for x in of_host)
    if strays or len(gpus) > 1:
        found = " and ".join(sorted({str(device(x)) for x in inputs}))
        raise RuntimeError(f"Expected all tensors on the same device, but found {found}: {name}")


def _count(func: Any, name: str, args: Any, kwargs: Any, places: list[int]) -> None:
    if not func.is_view and name not in FREE:
        diary.ops[name] += 1
    if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        diary.waits[name] += 1
    elif name == "copy_" and ANYWHERE not in places:
        copied(places[1], places[0], args[2] if len(args) > 2 else False)
    elif name in INDEXED:
        for index in tensors([args[1]]):
            if index.dtype == torch.bool and (name == "index" or args[2].dim()):
                diary.waits["index by a mask"] += 1
            if index.dim():
                copied(place(index), places[0])
