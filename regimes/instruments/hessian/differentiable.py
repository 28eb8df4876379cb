"""Second derivatives of any model: what provides them, and what the error says where there is none.

Two kinds of operations lack one. Kernels of torch without it raise when they are differentiated.
Others return a gradient that autograd takes for a constant (a custom Function that is
``once_differentiable`` or computes outside of autograd, a gradient hook): products are then those
of no Hessian, without an error. A Hessian is symmetric and such a matrix is not, so one pair of
products tells (`asymmetry`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel

from regimes.base.errors import ConfigError
from regimes.base.seeding import make_generator
from regimes.base.torch_compat import CHECKPOINT_GENERATORS, forward_class, tree_leaves

OURS = "regimes.instruments.hessian."  # the module of our own Functions
REMEDY = "compute it by operations that torch differentiates twice, or measure no Hessian"


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Let activation checkpoints of the model store their activations inside.

    A re-entrant one supports neither ``autograd.grad`` nor a second derivative. The other kind runs
    its part again in each product, when the model is no longer in the mode of the measurement.
    """
    names = {
        "CheckpointFunction": _Direct,
        **dict.fromkeys(CHECKPOINT_GENERATORS, _no_recomputation),
    }
    with ExitStack() as stack:
        for name, instead in names.items():
            if hasattr(torch.utils.checkpoint, name):
                stack.enter_context(patch.object(torch.utils.checkpoint, name, instead))
        yield


class _Direct:
    """In place of torch's ``CheckpointFunction``."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_recomputation(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of the generator that surrounds a checkpointed call in torch."""
    yield


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Give attention a second derivative inside: of torch's kernels only the one of plain matrix
    products has one. Activation checkpoints are left out."""
    with without_checkpoints(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def named_operation() -> Iterator[None]:
    """Turn torch's error for an operation that cannot be differentiated (twice) into ConfigError.

    It names the operation: "derivative for aten::... is not implemented".
    """
    try:
        yield
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except RuntimeError as error:  # NotImplementedError is one
        text = str(error)
        if "deterministic" in text:  # explained by the trainer
            raise
        why = " ".join(text.split())
        raise ConfigError(f"The loss has no second derivative ({why:.300}): {REMEDY}.") from error


# -- symmetry ----------------------------------------------------------------------------------


def fixed_vectors(dimension: int, like: Tensor) -> Float[Tensor, "2 dimension"]:
    """Draw u and v, the same in every measurement and on every process."""
    pair = torch.randn(2, dimension, generator=make_generator(0, "symmetry"), dtype=like.dtype)
    return pair.to(like.device)


def asymmetry(pair: Float[Tensor, "2 d"], images: Float[Tensor, "2 d"]) -> float:
    """Compute |u'Hv - v'Hu| / sqrt(|Hu|^2 + |Hv|^2), from u, v and Hu, Hv.

    For normal u and v it is about |H - H'| / |H| in Frobenius norms, whatever the dimension, and
    about the relative error of a product where H is symmetric.
    """
    (u, v), (hu, hv) = pair.double(), images.double()
    size = _size(images)
    return abs(float(u @ hv - v @ hu)) / size if size > 0 else 0.0


def rounding_error(images: Float[Tensor, "2 d"], of_sum: Float[Tensor, " d"]) -> float:
    """Compute |H(u + v) - Hu - Hv|, relative to the same size: what products lose by rounding.

    It grows without limit where a loss tends to zero, because its curvature is then a difference of
    large terms.
    """
    size = _size(images)
    lost = of_sum.double() - images.double().sum(0)
    return float(lost.norm()) / size if size > 0 else 0.0


def _size(images: Float[Tensor, "2 d"]) -> float:
    return float(images.double().square().sum()) ** 0.5


# Times ``rounding_error``; in 40 states of three networks, from the first step to a loss of 3e-5,
# the asymmetry of true Hessians was at most 14 times that.
ROUNDINGS = 100


def negligible_asymmetry(dtype: torch.dtype) -> float:
    """Return an asymmetry that needs no third product to be explained: 3e-4 in float32, 1e-8 in
    float64."""
    return torch.finfo(dtype).eps ** 0.5


def not_symmetric(functions: list[str]) -> ConfigError:
    """Make the error for products that no Hessian has."""
    among = " or ".join([*functions, "a gradient hook"])
    return ConfigError(
        f"The loss has no Hessian (u'Hv is not v'Hu): {among} returns a gradient that autograd "
        f"cannot differentiate: {REMEDY}."
    )


class OwnFunctions:
    """Collects, while it is entered, the custom autograd Functions that a model's calls put in the
    graph."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, dict[str, None]()
        self._seen, self._handles = set[Any](), list[Any]()

    def __enter__(self) -> OwnFunctions:
        for name, module in self.model.named_modules():
            where = f"in module {name!r} ({type(module).__name__})" if name else "in the model"
            hook = lambda *call, where=where: self.collect(call[-1], where)  # noqa: E731
            self._handles.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def collect(self, output: Any, where: str = "in the loss") -> None:
        """Collect the Functions of this output that no earlier output has: inner modules return
        first."""
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            nodes.extend(parent for parent, _ in node.next_functions)
            if isinstance(node, BackwardCFunction):
                cls = forward_class(node)
                if not cls.__module__.startswith(OURS):
                    self.found[f"the Function {cls.__name__} {where}"] = None
