"""Interventions: plug-ins that act on a run while it trains, at fixed places of the loop. No torch.

A run has the interventions that its configuration has tables of (`regimes.config.interventions`).
Each checks by itself what it does not go with; a run without interventions knows nothing about
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from regimes.capabilities import Part, declared_needs
from regimes.config import RunConfig, check_bounds
from regimes.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from regimes.collectives.requests import Layer


class Job(Protocol):
    """What an intervention sees of a run, and may change."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def layers(self) -> Sequence[Layer]: ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """One per layer, in the order of ``layers``."""
        ...

    @property
    def present(self) -> tuple[int, ...]:
        """The workers that take part, in ascending order."""
        ...

    def set_present(
        self, workers: Sequence[int], optimizer: Literal["copy", "average", "reset"] = "copy"
    ) -> dict[int, dict[str, float]]:
        """Let workers of a simulated run leave and join (`training.present`).

        Returns:
            By worker that has left: the norms of its residual and of its unsent pseudo-gradient.
        """
        ...


class Intervention:
    """Base of what acts in one run: it does nothing. The loop calls these methods in this order."""

    def before_unit(self, unit: int) -> None:
        """Before the first step of a unit."""

    def before_step(self, unit: int, step: int) -> None:
        """Before a step's samples are read; ``step`` counts from the start of the run, at
        ``batch_size``. Only here may the workers that are present change."""

    def after_step(self) -> None:
        """After the optimiser's step, or each worker's own."""

    def columns(self) -> dict[str, Any]:
        """Columns that the row of the unit gets, in plain types."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """After a unit: what a resumed run needs besides the configuration, as tensors and plain
        types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; empty where a branch gives the run another table."""


@dataclass(frozen=True)
class Circumstances:
    """What is known of a run when its interventions are checked.

    Attributes:
        units: of the run; None: not yet known.
        first: the configuration holds from this unit on.
        before: the configuration of the unit before that, if it is another one.
    """

    units: int | None = None
    first: int = 0
    before: RunConfig | None = None


@dataclass(frozen=True)
class InterventionConfig:
    """Base of the tables: a frozen dataclass of fields that have defaults and, where they are
    numbers, bounds in their annotations.

    Attributes:
        requires: what it needs of the job (`capabilities`).
    """

    requires: ClassVar[frozenset[str]] = frozenset()

    @property
    def takes_away(self) -> Mapping[str, str]:
        """What other parts of the job lack beside it, and why; ``FIXED_WORKERS`` if it may call
        ``Job.set_present``."""
        return {}

    def check(self, config: RunConfig, known: Circumstances) -> None:
        """Called before any work, each time that more is known.

        Raises:
            ConfigError: its fields do not fit each other, ``config`` or ``known``.
        """

    def start(self, job: Job) -> Intervention:
        """Called once the parts of the run are built, before a checkpoint is restored."""
        raise NotImplementedError

    def ended(self, job: Job) -> Intervention | None:
        """What acts in a run that continues one with this intervention, but lacks its table."""
        return None


def intervention_parts(config: RunConfig) -> list[Part]:
    """What the interventions of a configuration need."""
    return [Part(name, declared_needs(table)) for name, table in config.interventions.items()]


def check_interventions(config: RunConfig, known: Circumstances) -> None:
    """Raise ConfigError for an intervention that does not fit the run."""
    for name, table in config.interventions.items():
        if not isinstance(table, InterventionConfig):
            kind = type(table).__name__
            raise ConfigError(f"{name}: the class {kind} is no intervention, see {__name__}")
        check_bounds(table, f"{name}.")
        table.check(config, known)
