"""The model, optimiser and residuals of a run with workers divided among processes
(``collectives.connect``): sharded by FSDP2 for training, whole in a checkpoint.

A checkpoint is the same as without shards, so that a run with and one without can continue each
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from regimes.collectives.sharded_models import as_stored, as_whole, shard_module
from regimes.collectives.world import World
from regimes.errors import ConfigError
from regimes.training.optimizers import Optimizers


def shard_model(model: nn.Module, world: World) -> None:
    """Divide a model's parameters by rows, block by block, among the processes of each replica.

    Raises:
        ConfigError: FSDP2 cannot divide it.
    """
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ConfigError(
                f"--shards: the model's parameter {name!r} is a single number without rows to "
                "divide: give it the shape [1]"
            )
    for part in (*_find_blocks(model), model):
        shard_module(part, world.mesh)


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost members of sequences and lists that have modules of their own, such as residual
    or attention blocks: their gradients are reduced while backward goes on. A block that shares
    parameters with others stays a part of the model."""
    owners = Counter(
        id(p) for m in model.modules() for p in m.parameters(recurse=False) if p is not None
    )
    return [
        block
        for block in _list_members(model)
        if (own := [*block.parameters()]) and all(_owns_alone(block, p, owners) for p in own)
    ]


def _owns_alone(block: nn.Module, parameter: nn.Parameter, owners: Counter[int]) -> bool:
    own = sum(p is parameter for m in block.modules() for p in m.parameters(recurse=False))
    return own == owners[id(parameter)]


def _list_members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and any(child.children()):
            yield child
        else:
            yield from _list_members(child)


# -- a checkpoint ------------------------------------------------------------------------------


def gather_state(world: World, tree: Any) -> Any:
    """A state dictionary with whole tensors on the CPU, on process 0; other processes, which all
    call this, keep none."""

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        found = as_whole(value)  # all ask
        return found.detach().cpu() if world.rank == 0 else None

    return _map_tensors(tree, whole)


def _map_tensors(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, change) for value in tree)
    return change(tree)


def load_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """The inverse of ``gather_state``, of a model's state; one without shards loads as always."""
    here = model.state_dict()
    model.load_state_dict(
        {key: as_stored(here[key], value) if key in here else value for key, value in saved.items()}
    )


def load_optimizer(optimizer: Optimizers, saved: Mapping[str, Any]) -> None:
    """Likewise, of an optimiser's state: what has a parameter's shape is stored as it is."""
    parts = []
    for part, state in zip(optimizer.parts, saved["parts"], strict=True):
        parameters = [p for group in part.param_groups for p in group["params"]]
        stored = {
            i: {key: _as_parameter(parameters[i], value) for key, value in values.items()}
            for i, values in state["state"].items()
        }
        parts.append({**state, "state": stored})
    optimizer.load_state_dict({"parts": parts})


def _as_parameter(parameter: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        return as_stored(parameter, value)
    return value
