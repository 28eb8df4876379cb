"""A level of a compressor: a number or a word, or one with error feedback of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from regimes.base.config.convert import from_dict
from regimes.base.errors import ConfigError, require

Level = float | int | str  # a rank, the percentage that is sent, a number of bits, or "dense"
DENSE = "dense"


@dataclass(frozen=True)
class FeedbackLevel:
    """Gives a level error feedback of its own, ``{level = 1, error_feedback = false}``.

    Attributes:
        level: the compressor's.
        error_feedback: in place of the compressor's: true, false, or the share of the residual that
            each step keeps.

    Raises:
        ConfigError: "dense", which sends everything, or a share outside (0, 1].
    """

    level: Level
    error_feedback: bool | float

    def __post_init__(self) -> None:
        given = self.error_feedback
        good = isinstance(given, bool) or (isinstance(given, int | float) and 0 < given <= 1)
        require(good, "error_feedback of a level", given, "true, false, or a share in (0, 1]")
        if self.level == DENSE:
            raise ConfigError(
                'the level "dense" sends everything, so that it has no error feedback: write '
                '"dense" without error_feedback'
            )

    def __str__(self) -> str:
        """
        >>> print(FeedbackLevel(1, False), FeedbackLevel(1, 0.9), sep="; ")
        1 without feedback; 1 with feedback 0.9
        """
        share = "" if isinstance(self.error_feedback, bool) else f" {self.error_feedback}"
        return f"{self.level} {'with' if self.error_feedback else 'without'} feedback{share}"


AnyLevel = Level | FeedbackLevel
GivenLevel = AnyLevel | Mapping[str, Any]  # as a script writes it, read by ``as_level``
ByName = Mapping[str, GivenLevel]  # what the words of a policy mean: {"low": 4, "high": 1}


class AtLevel(Protocol):
    """Stands for a compressor with one level of its own, like ``PowerSGD(rank=4)``."""

    @property
    def error_feedback(self) -> bool | float: ...

    @property
    def level(self) -> Any: ...


# A policy's level: a name, or in a script the compressor at that level. A configuration has names.
if TYPE_CHECKING:
    LevelName = str | AtLevel
else:
    LevelName = str


def level_name(given: LevelName, usual: str) -> str:
    """Return the name of a policy's level; ``usual`` of one that is given as a compressor.

    >>> level_name("early", "low")
    'early'
    """
    if isinstance(given, str):
        return given
    compressor = hasattr(given, "level") and hasattr(given, "error_feedback")
    require(compressor, "a policy's level", given, "a name, or a compressor with a level")
    return usual


def is_by_name(given: Any) -> bool:
    """Answer whether it is a table of levels by name, and not one level with error feedback of its
    own.

    >>> is_by_name({"low": 4, "high": 1}), is_by_name({"level": 4, "error_feedback": False})
    (True, False)
    """
    return isinstance(given, Mapping) and given.keys().isdisjoint(("level", "error_feedback"))


def as_level(given: Any, where: str = "level") -> Any:
    """Read a level from the table that a file, a record or a script writes for it; others are
    unchanged.

    Raises:
        ConfigError: a table that has one of both keys, or others beside them.
    """
    keys = ("level", "error_feedback")
    if not isinstance(given, Mapping) or given.keys().isdisjoint(keys):
        return given
    for key in keys:
        if key not in given:
            raise ConfigError(
                f"{where} = {dict(given)!r}: expected {{level = ..., error_feedback = ...}}, it "
                f"has no {key}"
            )
    return from_dict(FeedbackLevel, given, f"{where}.")


def plain_levels(levels: Mapping[str, AnyLevel]) -> dict[str, Any]:
    """Return levels by name as a record and a saved state hold them."""
    return {
        name: asdict(level) if isinstance(level, FeedbackLevel) else level
        for name, level in levels.items()
    }
