"""Data for a hook's curvature: the loss and batches that a script passes to ``attach``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regimes.errors import ConfigError, nearest, require, unexpected
from regimes.instruments import instruments
from regimes.reduction import tensors

ON_DATA = ("curvature", "sharpness")  # instruments that the hook can read on a probe
FORM = "a pair (loss, batches), or with a weight(batch) third: loss(model, batch) is a mean"


@dataclass(frozen=True)
class Probe:
    """What curvature is measured on.

    Attributes:
        loss: ``loss(model, batch)``, the mean over a batch; a scalar tensor.
        batches: this process's share, of any type that the loss takes.
        weight: by what a batch counts in the loss of all; None: found by trying.
    """

    loss: Callable[[nn.Module, Any], Tensor]
    batches: tuple[Any, ...]
    weight: Callable[[Any], Any] | None = None

    @property
    def samples(self) -> int:
        """How many this process has; all must have as many."""
        from regimes.curvature.probe import batch_size  # a hook without a probe has no curvature

        return sum(batch_size(batch) for batch in self.batches)

    def take(self, images: int, batch: int) -> list[tuple[Any]]:
        """The batches in the form that instruments take; ``images`` and ``batch`` are not used."""
        return [(batch,) for batch in self.batches]

    @property
    def weigh(self) -> Callable[[Any], Any] | None:
        """``weight`` of a batch in the form that instruments take."""
        weight = self.weight
        return None if weight is None else lambda batch: weight(*batch)

    def mean(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(model, batch)


def pick(given: Any, tables: Any) -> tuple[Probe | None, dict[str, Any]]:
    """The arguments ``probe`` and ``instruments`` of ``attach``.

    Raises:
        ConfigError: they do not go together, or one is wrong.
    """
    if tables is None and given is None:
        return None, {}
    if not isinstance(tables, Mapping) or not tables:
        raise unexpected("instruments", tables, 'a table like {"curvature": {}} with the probe')
    for name, table in tables.items():
        if name not in ON_DATA:
            raise ConfigError(f"instruments: {name!r}: {nearest(str(name), ON_DATA)}")
        if not isinstance(table, Mapping):
            raise unexpected(f"instruments.{name}", table, "a table of its fields, or {}")
        if unused := sorted({"images", "batch"} & {*table}):
            raise ConfigError(f"instruments.{name}.{unused[0]}: the probe has its own batches")
    found = {name: dict(table) for name, table in tables.items()}
    instruments(found)  # refuses wrong fields
    return _probe(given), found


def _probe(given: Any) -> Probe:
    several = isinstance(given, tuple | list) and len(given) in (2, 3)
    if not several or not all(map(callable, (given[0], *given[2:]))):
        raise unexpected("probe", given, FORM)
    loss: Callable[..., Any]
    loss, batches, *weight = given
    probe = Probe(loss, tuple(batches) if isinstance(batches, list) else (batches,), *weight)
    samples = probe.samples if any(True for _ in tensors(probe.batches)) else 0
    require(samples > 0, "probe", f"{samples} samples", f"{FORM}, with tensors in it")
    return probe
