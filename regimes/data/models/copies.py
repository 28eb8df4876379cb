"""Copies of a user's model, also where its modules keep tensors that a pass has computed.

torch copies no tensor with a history. Old ``weight_norm``, ``spectral_norm`` and ``prune`` keep
such a ``weight``, which each pass computes anew; other modules keep an activation. A copy has their
numbers without the history, which is right where a pass computes them anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import MODULE_TABLES

REMEDY = "remove it before, or give its class a __deepcopy__"


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model deeply; what a pass has computed becomes a tensor of its own, without a history.

    Raises:
        ConfigError: an attribute of a module cannot be copied.
    """
    computed = (t for tensors in find_computed(model).values() for t in tensors)
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in computed}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # any class of an attribute may raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
        where = _find_uncopied(model) or type(model).__name__
        raise ConfigError(f"model: {where} cannot be copied ({why}): {REMEDY}") from None


def find_computed(model: nn.Module) -> dict[str, list[Tensor]]:
    """Find the tensors with a history that modules keep, by the names of the attributes."""
    found = {
        name: [t for t in _tensors_in(value, set()) if t.grad_fn is not None]
        for name, value in _attributes(model)
    }
    return {name: tensors for name, tensors in found.items() if tensors}


def attribute_tensors(model: nn.Module, name: str) -> list[Tensor]:
    """Return the tensors that an attribute of a module keeps, by its name; empty if it is gone."""
    path, _, own = name.rpartition(".")
    return [*_tensors_in(vars(model.get_submodule(path)).get(own), set())]


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules keep beside parameters, buffers and modules, by its name."""
    for path, module in model.named_modules():
        for own, value in vars(module).items():
            if own not in MODULE_TABLES:
                yield f"{path}.{own}" if path else own, value


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a value: itself, in containers and in attributes of objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _tensors_in(part, seen)
    elif (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and not callable(value)
    ):
        yield from _tensors_in(vars(value), seen)


def _find_uncopied(model: nn.Module) -> str | None:
    """The attribute that cannot be copied."""
    for name, value in _attributes(model):
        memo: dict[int, Any] = {id(t): t.detach() for t in _tensors_in(value, set())}
        try:
            copy.deepcopy(value, memo)
        except Exception:
            return f"the attribute {name!r}, of {type(value).__name__},"
    return None
