"""Whether one pass over all workers' samples serves, for a model and a loss of a program's own: a
step is tried both ways on a copy, in float64.

Equal numbers alone do not show that it is exact. A pass that keeps something for the next one,
draws random numbers, or may choose by the values of its batch, can differ in a later step.
"""

from __future__ import annotations

import io
import pickle
import types
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regimes.base.reduction import Loss, nudge_parameters
from regimes.base.seeding import preserve_streams, read_streams
from regimes.base.torch_compat import has_hooks, version_of
from regimes.training.batchnorm import PerWorkerBatchNorm
from regimes.training.modes import training_copy

TRIED = 4  # workers, and samples of each
IN_CACHE = 1 << 19  # bytes: operations on larger tensors cost a CPU more in one pass than apart
SHARE = 4  # one pass may keep a fourth of a GPU's memory for backward
SCALE = 2.0**30  # of the loss of one pass: a backward pass that clips would show
# What tells Python the numbers in a tensor, or makes a shape of them.
_TELLS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"),
    *("__contains__", "__format__", "equal", "allclose"),
    *("is_nonzero", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
    *("bincount", "repeat_interleave"),
}


def one_pass_serves(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, samples: int, dtype: torch.dtype
) -> bool:
    """Answer whether one pass gives the workers' mean gradient, and is cheaper.

    Args:
        x, y: of some workers, ``[L, b, ...]``.
        samples: of all workers in a step, as numbers of ``dtype``.
    """
    if any(map(has_hooks, model.parameters())):
        return False  # a copy has none of them
    x, y = x[:TRIED, :TRIED], y[:TRIED, :TRIED]
    tried = len(x) * x.shape[1]
    try:
        with (
            preserve_streams(),
            torch.random.fork_rng([x.device] if x.is_cuda else []),
            warnings.catch_warnings(action="ignore"),
        ):
            trial = _Trial(model, loss)
            if not trial.is_exact(x.double() if x.is_floating_point() else x, y):
                return False
    except Exception:  # the user's code may raise anything, of a batch that it will not see
        return False
    kept = [size * samples * dtype.itemsize // (8 * tried) for size in trial.kept]
    if x.is_cuda:
        return SHARE * sum(kept) <= torch.cuda.get_device_properties(x.device).total_memory
    return sum(kept) <= IN_CACHE * len(kept)


class _Trial:
    """A copy of a model, and what its passes do.

    Attributes:
        kept: bytes of each tensor that the last pass has kept for backward.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = training_copy(model).double(), loss
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.batchnorm = PerWorkerBatchNorm(self.model)
        self.kept: list[int] = []
        self._own: set[int] = set()  # addresses of the parameters

    def is_exact(self, x: Tensor, y: Tensor) -> bool:
        """Answer whether one pass has the mean loss and gradients of the workers' passes, and none
        keeps, draws or reads anything."""
        with nudge_parameters(self.model):
            self._pass(x[:1], y[:1])  # what a first pass alone makes is there from now on
            before, held = self._state(x.device)
            with _Reads() as reads:
                apart = [self._pass(a, b) for a, b in zip(x.split(1), y.split(1), strict=True)]
                together = self._pass(x, y, SCALE)
            after, _ = self._state(x.device)
            del held
        return not reads.seen and after == before and _is_mean(together, apart)

    def _pass(self, x: Tensor, y: Tensor, scale: float = 1.0) -> list[Tensor | None]:
        """The loss and the gradients of one pass over the samples of some workers."""
        for p in self.parameters:
            p.grad = None
        self.kept = []
        self._own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        with (
            self.batchnorm.set_pass(len(x), update=False),
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor),
        ):
            loss = self.loss(self.model, *(t.transpose(0, 1).flatten(0, 1) for t in (x, y)))
            self.batchnorm.end_forward()
            (loss * scale).backward()
        return [
            loss.detach(),
            *(None if p.grad is None else p.grad / scale for p in self.parameters),
        ]

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._own:
            self.kept.append(tensor.numel() * tensor.element_size())
        return tensor

    def _state(self, device: torch.device) -> tuple[bytes, list[Any]]:
        """All that a pass may have changed, as text; and what this names by an address."""
        streams = [t.tolist() if isinstance(t, Tensor) else t for t in read_streams()]
        if device.type == "cuda":
            streams.append(torch.cuda.get_rng_state(device).tolist())
        text = io.BytesIO()
        pickler = _Pickler(text)
        pickler.dump([streams, self.model, self.loss])
        return text.getvalue(), [*pickler.named.values()]


class _Pickler(pickle.Pickler):
    """Writes down what modules and functions hold, and how often tensors were written to.

    Attributes:
        named: by address; a new object cannot have the address of one which is still there.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.named: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.named[id(value)] = value
            return id(value), version_of(value)
        if not isinstance(value, _NAMED):
            return None
        seen = id(value) in self.named
        self.named[id(value)] = value
        return id(value) if seen else (id(value), _contents(value))

    def reducer_override(self, value: Any) -> Any:
        try:
            value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # locks, files and the like are no state of a model
            self.named[id(value)] = value
            return int, (id(value),)
        return NotImplemented


_NAMED = (
    *(nn.Module, type, types.ModuleType, weakref.ReferenceType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


def _contents(value: Any) -> Any:
    """What code reads beside its arguments: attributes, variables of outer functions, globals."""
    if isinstance(value, nn.Module):
        return vars(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        names = sorted({*value.__code__.co_names} & value.__globals__.keys())
        variables = [value.__globals__[name] for name in names]
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return cells, [x for x in variables if not isinstance(x, _NAMED)]
    return None


class _Reads(TorchFunctionMode):
    """Whether code in Python came to know numbers of tensors, by which it may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.seen |= name in _TELLS or (name == "where" and len(args) == 1)
        if name == "__getitem__":
            self.seen |= _chooses(args[1])
        return func(*args, **(kwargs or {}))


def _chooses(index: Any) -> bool:
    """Does the number of elements that an index takes depend on numbers in tensors?"""
    if isinstance(index, tuple | list):
        return any(map(_chooses, index))
    if isinstance(index, slice):
        return any(isinstance(end, Tensor) for end in (index.start, index.stop, index.step))
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_mean(together: list[Tensor | None], apart: list[list[Tensor | None]]) -> bool:
    """Are these the means of the others, but for rounding in float64?"""
    whole, off = 0.0, [0.0]
    for one, parts in zip(together, zip(*apart, strict=True), strict=True):
        own = [part for part in parts if part is not None]
        if (one is None) != (not own):
            return False
        if one is not None:
            mean = torch.stack(own).sum(0) / len(parts)
            whole = max(whole, float(mean.norm()))
            off.append(float((one - mean).norm() - 1e-9 * mean.norm()))
    # what is 0 in theory, as a bias before BatchNorm has it, is rounding of other gradients
    return whole > 0 and all(x <= 1e-11 * whole for x in off)
