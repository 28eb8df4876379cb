"""The parameter groups of a model that ``fully_shard`` (FSDP2) has divided: what each exchanges in
one reduce-scatter and one all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import is_root, own_collectives
from regimes.collectives.layers import Layer, Piece
from regimes.collectives.sharded_models import (
    current_parameter,
    fully_shard_calls,
    has_gradient,
    param_groups,
)
from regimes.hook.ddp.source import plain_names
from regimes.hook.fsdp.replicas import CHECKPOINT

_ROOT = "(root)"  # the name of a group without a path of its own


@dataclass(frozen=True)
class FlatLayout:
    """Describes where the numbers of a group's trained parameters are in FSDP2's flat tensors,
    ``[shards, part]``: each owner's pieces, end to end, padded to the size of the first owner's.

    Attributes:
        shapes: of the whole parameters.
        dims: which dimension of each is divided.
        shards: among so many processes.
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    shards: int

    def with_shards(self, shards: int) -> FlatLayout:
        """Return the layout of the same parameters on another number of processes."""
        return FlatLayout(self.shapes, self.dims, shards)

    def only(self, places: Sequence[int]) -> FlatLayout:
        """Return the layout of some of the parameters."""
        return FlatLayout(
            tuple(self.shapes[i] for i in places), tuple(self.dims[i] for i in places), self.shards
        )

    @property
    def piece_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of the first owner's piece of each parameter."""
        return [
            (*shape[:dim], -(-shape[dim] // self.shards), *shape[dim + 1 :])
            for shape, dim in zip(self.shapes, self.dims, strict=True)
        ]

    @property
    def piece_sizes(self) -> list[int]:
        """Return how many numbers a piece of each parameter has."""
        return [math.prod(piece) for piece in self.piece_shapes]

    @property
    def owned_size(self) -> int:
        """Return how many numbers each process owns."""
        return sum(self.piece_sizes)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return what each owner has of the parameters."""
        sizes = zip(self.piece_sizes, self.shapes, strict=True)
        return tuple(Piece(size, Layer("", shape).compressed) for size, shape in sizes)

    def make_layer(self, name: str) -> Layer:
        """Make one layer of the parameters, ``[shards, part]``."""
        return Layer(name, (self.shards, self.owned_size), pieces=self.pieces)

    def to_parameters(self, flat: Float[Tensor, "shards part"]) -> list[Tensor]:
        """Return the parameters' numbers, in their shapes; copies if a parameter has several
        owners."""
        found = []
        columns = flat.split(self.piece_sizes, dim=1)
        for numbers, shape, dim, piece in zip(
            columns, self.shapes, self.dims, self.piece_shapes, strict=True
        ):
            by_owner = numbers.unflatten(1, piece).movedim(0, dim)
            found.append(by_owner.flatten(dim, dim + 1).narrow(dim, 0, shape[dim]))
        return found

    def from_parameters(self, tensors: Sequence[Tensor]) -> Float[Tensor, "shards part"]:
        """Copy the parameters' numbers to the flat form, ``[shards, part]``; the padding is
        zero."""
        columns = []
        for tensor, dim, piece in zip(tensors, self.dims, self.piece_shapes, strict=True):
            room = self.shards * piece[dim] - tensor.shape[dim]
            padded = torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, room))
            by_owner = padded.unflatten(dim, (self.shards, piece[dim])).movedim(dim, 0)
            columns.append(by_owner.flatten(1))
        return torch.cat(columns, dim=1)

    def own_row(self, tensors: Sequence[Tensor], shard: int) -> Float[Tensor, " part"]:
        """Return the row of ``from_parameters`` that a process owns, ``[part]``."""
        found = []
        for tensor, dim, piece in zip(tensors, self.dims, self.piece_shapes, strict=True):
            start = min(shard * piece[dim], tensor.shape[dim])
            here = tensor.narrow(dim, start, min(piece[dim], tensor.shape[dim] - start))
            room = piece[dim] - here.shape[dim]
            padded = torch.nn.functional.pad(here, (0, 0) * (tensor.ndim - 1 - dim) + (0, room))
            found.append(padded.flatten())
        return torch.cat(found)


@dataclass(frozen=True)
class ParameterGroup:
    """Holds the parameters that one call of ``fully_shard`` has divided.

    Attributes:
        name: of its module, or of its modules.
        module: takes the collectives of the group.
        trained: its parameters that have a gradient, in the order of the flat input.
        frozen: the others.
        scatter, gather: torch's own collectives.
        factor: what the sum of gradients is divided by, where the user has set that
            (``set_gradient_divide_factor``); None: by the number of processes.
        own: torch's own group of these parameters.
        arriving: which of the trained parameters have a gradient in the reduce-scatter to come,
            once ``watch_gradients`` was called; FSDP2 leaves the others out.
    """

    name: str
    module: Any
    trained: Sequence[nn.Parameter]
    frozen: Sequence[nn.Parameter]
    scatter: Any
    gather: Any
    factor: Callable[[], float | None]
    own: Any
    arriving: list[bool] = field(default_factory=list)

    def watch_gradients(self) -> None:
        """Note in each backward pass which parameters have a gradient: the flat tensor does not
        say where one ends and the next begins."""
        usual, params = self.own.post_backward, self.own.fsdp_params
        trained = [x for x in params if current_parameter(x).requires_grad]

        def note_gradients(*args: Any) -> Any:
            self.arriving[:] = [has_gradient(self.own, x) for x in trained]
            return usual(*args)

        self.own.post_backward = note_gradients

    def forget_gradients(self) -> None:
        """Undo ``watch_gradients``."""
        vars(self.own).pop("post_backward", None)

    def gradient_scale(self, dtype: torch.dtype, shards: int) -> float:
        """Return what a gradient is multiplied by before its reduce-scatter.

        FSDP2's result is the sum of gradients over a divisor. Gradients are in units here in which
        that is their mean over the processes: multiplied by ``shards`` and over the divisor.
        """
        given = self.factor()
        factor = float(shards) if given is None else given
        return factor / (shards * _divided_before(dtype, factor))

    def make_layout(self, shards: int, *, frozen: bool = False) -> FlatLayout:
        """Describe where the trained parameters' numbers are, among so many processes.

        Args:
            frozen: those of the others, too, as where weights are gathered.
        """
        chosen: Sequence[Any] = self.trained
        if frozen:
            chosen = [current_parameter(x) for x in self.own.fsdp_params]
        dims = tuple(p.placements[-1].dim for p in chosen)
        return FlatLayout(tuple(tuple(p.shape) for p in chosen), dims, shards)


def check_root(network: Any) -> None:
    """Raise ConfigError if the model is known to be a part of another one; torch knows that from
    the first forward pass on."""
    if is_root(network) is False:
        raise ConfigError(
            "model: it is a part of a larger model that fully_shard has divided: give attach the "
            "whole model, or its other parts stay uncompressed"
        )


def groups_of(network: nn.Module) -> list[ParameterGroup]:
    """Return all groups that have a parameter, in the order of the modules.

    Raises:
        ConfigError: a module has several groups, one for each mesh, or is offloaded.
    """
    calls = fully_shard_calls(network)
    groups = []
    paths = [path or _ROOT for _, own_paths, _ in calls for path in own_paths]
    plain = plain_names(paths)
    for state, own_paths, module in calls:
        name = "+".join(plain[path or _ROOT].replace(CHECKPOINT, "") for path in own_paths)
        kept = param_groups(state)
        if len(kept) > 1:
            raise ConfigError(
                f"module {name!r} has {len(kept)} groups of parameters, each on a mesh of its own: "
                "the hook needs one mesh for all parameters of a module"
            )
        for group in kept:
            if any(param.offload_to_cpu for param in group.fsdp_params):
                raise ConfigError(
                    f"module {name!r} keeps its parameters on the CPU (CPUOffloadPolicy), which "
                    "the hook does not serve: leave offload_policy out"
                )
            trained = [x for x in group.fsdp_params if current_parameter(x).requires_grad]
            frozen = [x for x in group.fsdp_params if not current_parameter(x).requires_grad]
            groups.append(
                ParameterGroup(
                    name,
                    module,
                    [*map(current_parameter, trained)],
                    [*map(current_parameter, frozen)],
                    *own_collectives(group),
                    partial(getattr, group, "gradient_divide_factor", None),
                    group,
                )
            )
    return groups


def divided_modules(
    network: nn.Module, shards: int
) -> tuple[list[ParameterGroup], list[ParameterGroup], list[FlatLayout], list[Layer]]:
    """All groups; and those with a trained parameter, each with its layout, and as a layer
    ``[shards, numbers of a shard]``."""
    groups = groups_of(network)
    trained = [group for group in groups if group.trained]
    layouts = [group.make_layout(shards) for group in trained]
    pairs = zip(trained, layouts, strict=True)
    return groups, trained, layouts, [layout.make_layer(group.name) for group, layout in pairs]


def _divided_before(dtype: torch.dtype, factor: float) -> float:
    """The part of the divisor ``factor`` that FSDP2 divides by before a reduce-scatter: a power of
    two near its root, so that neither the sum overflows nor the parts underflow; it divides by the
    rest afterwards. 1 in float32 and bfloat16, where it fears neither."""
    divisor = 1
    while (
        dtype not in (torch.float32, torch.bfloat16)
        and factor % divisor == 0
        and factor / divisor > divisor
    ):
        divisor *= 2
    return float(divisor)
