"""Types of the arguments that scripts give to `attach`, `local_steps`, `simulate` and their kin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from regimes.compression import Compressor
from regimes.policies import Policy

Table = Mapping[str, object]  # a name and fields, as a configuration has them
GivenPolicy = str | Table | Policy
GivenCompressor = str | Table | Compressor
GivenInstruments = Mapping[str, Table] | Collection[str]
GivenModel = nn.Module | Callable[[], nn.Module]

_ProbeLoss = Callable[[nn.Module, Any], Tensor]  # of the model and a batch, whatever a batch is
GivenProbe = tuple[_ProbeLoss, object] | tuple[_ProbeLoss, object, Callable[[Any], object]]


class HasGroups(Protocol):
    """Stands for an optimiser of torch, or for what has its parameter groups."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...


class HasEpoch(Protocol):
    """Stands for a ``DistributedSampler``, or for what has its epoch."""

    @property
    def epoch(self) -> int: ...


class HasScale(Protocol):
    """Stands for a ``GradScaler``, or for what has the scale of a loss."""

    def get_scale(self) -> float: ...


class HasSamples(Protocol):
    """Stands for a data set with a length and numbered samples, and for a pair of tensors or
    arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


GivenOptimizer = HasGroups | Sequence[HasGroups]
GivenEnd = Literal["epoch"] | int | HasEpoch  # of a unit
