"""What a script lets a hook measure, and the loss and batches that it passes for curvature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest, unexpected_value
from regimes.base.reduction import tensors_in
from regimes.instruments import make_instruments

_ON_DATA = ("curvature", "sharpness")  # instruments that a hook can read on a probe
OF_EXCHANGE = ("error", "residual", "cosine")  # of what is exchanged, without any
_FORM = "a pair (loss, batches), or with a weight(batch) third: loss(model, batch) is a mean"


@dataclass(frozen=True)
class CurvatureProbe:
    """Holds the loss and the batches on which curvature is measured.

    Attributes:
        loss: ``loss(model, batch)``, the mean over a batch; a scalar tensor.
        batches: this process's share, of any type that the loss takes.
        weight: by what a batch counts in the loss of all; None: found by trying.
    """

    loss: Callable[[nn.Module, Any], Tensor]
    batches: tuple[Any, ...]
    weight: Callable[[Any], Any] | None = None

    @property
    def sample_count(self) -> int:
        """Return how many samples this process has; all processes must have equally many."""
        from regimes.instruments.hessian.probe import (
            batch_size,  # a hook without a probe has no curvature
        )

        return sum(batch_size(batch) for batch in self.batches)

    def take_batches(self, images: int, batch: int) -> list[tuple[Any]]:
        """Return the batches in the form that instruments take; ``images`` and ``batch`` are not
        used."""
        return [(batch,) for batch in self.batches]

    @property
    def weigh_batch(self) -> Callable[[Any], Any] | None:
        """Return ``weight`` of a batch in the form that instruments take."""
        weight = self.weight
        return None if weight is None else lambda batch: weight(*batch)

    def mean_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the model's mean loss over a batch."""
        return self.loss(model, batch)


def pick_probe(
    given: Any, tables: Any, check_every: Any = None, check_cosine: Any = None
) -> tuple[CurvatureProbe | None, dict[str, Any]]:
    """Check the arguments ``probe``, ``instruments``, ``check_every`` and ``check_cosine`` of
    ``attach``; return the probe and the tables of instruments.

    Raises:
        ConfigError: they do not go together, or one is wrong.
    """
    found, checked = _check_tables(tables, given), _cosine_table(check_every, check_cosine)
    if twice := found.keys() & checked.keys():
        raise ConfigError(
            f"check_every: instruments has {min(twice)!r}, which is the same check: leave one out"
        )
    found |= checked
    make_instruments(found)  # refuses wrong fields
    if given is None and not {*_ON_DATA} & {*found}:
        return None, found
    return as_probe(given), found


def _check_tables(tables: Any, probe: Any) -> dict[str, Any]:
    if tables is None and probe is None:
        return {}
    if isinstance(tables, set | list | tuple) and all(isinstance(name, str) for name in tables):
        tables = {name: {} for name in sorted(tables)}
    known = (*_ON_DATA, *OF_EXCHANGE)
    if not isinstance(tables, Mapping) or not tables:
        form = '{"error"}, or a table like ' if probe is None else "a table like "
        form += '{"error": {}}' if probe is None else '{"curvature": {}} with the probe'
        raise unexpected_value("instruments", tables, form)
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"instruments: {name!r}: {suggest_nearest(str(name), known)}")
        if not isinstance(table, Mapping):
            raise unexpected_value(f"instruments.{name}", table, "a table of its fields, or {}")
        unused = sorted({"images", "batch"} & {*table}) if name in _ON_DATA else []
        if unused:
            raise ConfigError(f"instruments.{name}.{unused[0]}: the probe has its own batches")
    return {name: dict(table) for name, table in tables.items()}


def _cosine_table(every: Any, least: Any) -> dict[str, Any]:
    """The instrument that ``check_every`` stands for."""
    if every is None:
        if least is not None:
            raise ConfigError("check_cosine: it is the bound of check_every: add check_every=500")
        return {}
    require(is_integer(every, 1), "check_every", every, "a number of steps from 1 up")
    if least is None:
        return {"cosine": {"stride": int(every)}}
    number = isinstance(least, Real) and not isinstance(least, bool)
    require(number and -1 <= float(least) <= 1, "check_cosine", least, "a number from -1 to 1")
    return {"cosine": {"stride": int(every), "least": float(least)}}


def as_probe(given: Any) -> CurvatureProbe:
    """Make a probe of a script's loss and batches; raise ConfigError if they are none."""
    several = isinstance(given, tuple | list) and len(given) in (2, 3)
    if not several or not all(map(callable, (given[0], *given[2:]))):
        raise unexpected_value("probe", given, _FORM)
    loss: Callable[..., Any]
    loss, batches, *weight = given
    probe = CurvatureProbe(
        loss, tuple(batches) if isinstance(batches, list) else (batches,), *weight
    )
    samples = probe.sample_count if any(True for _ in tensors_in(probe.batches)) else 0
    require(samples > 0, "probe", f"{samples} samples", f"{_FORM}, with tensors in it")
    return probe
