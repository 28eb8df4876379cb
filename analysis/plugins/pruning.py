"""A pruning event: from one unit on the smallest weights are zero, and stay so.

By magnitude, over all compressed layers at once (global magnitude pruning: Blalock et al., MLSys
2020). A pruned weight has no gradient. A low rank, momentum or error feedback may still
change it, so the masks are applied after each step. A level sends as many floats as before.

torch is imported where weights are pruned: who reads a record needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from regimes.capabilities import CAPTURED_STEPS, SHARED_UPDATES, WHOLE_LAYERS
from regimes.config import RunConfig
from regimes.config.bounds import InnerShare, Natural
from regimes.errors import ConfigError, require
from regimes.training.interventions import Circumstances, Intervention, InterventionConfig, Job

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pruning(InterventionConfig):
    """The smallest weights become zero, and stay zero.

    Attributes:
        epoch: the unit before which they are pruned.
        share: of the weights of all compressed layers.
    """

    requires: ClassVar[frozenset[str]] = frozenset({SHARED_UPDATES, WHOLE_LAYERS})

    epoch: Natural = 12
    share: InnerShare = 0.9

    def start(self, job: Job) -> Masks:
        return Masks(self, job)

    @property
    def takes_away(self) -> dict[str, str]:
        return {CAPTURED_STEPS: "masks appear during the run"}

    def check(self, config: RunConfig, known: Circumstances) -> None:
        if known.units is not None:
            expected = f"one of the run's {known.units} units"
            require(self.epoch < known.units, "pruning.epoch", self.epoch, expected)
        if known.before is not None and self not in known.before.interventions.values():
            expected = f"{known.first} or later: its unit is over where this configuration begins"
            require(self.epoch >= known.first, "pruning.epoch", self.epoch, expected)


class Masks(Intervention):
    """Prunes a model once.

    Attributes:
        masks: by layer, 0 where a weight is pruned; empty before the event.

    Raises:
        ConfigError: no layer is compressed.
    """

    def __init__(self, pruning: Pruning, job: Job) -> None:
        self.pruning = pruning
        named = zip(job.layers, job.parameters, strict=True)
        self.parameters = {layer.name: p for layer, p in named if layer.compressed}
        if not self.parameters:
            raise ConfigError(
                "pruning: the model has no layer that is compressed, so none to prune"
            )
        self.masks: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            parameter.register_hook(partial(self._masked, name))

    def before_unit(self, unit: int) -> None:
        """Prune, if it is the configured unit."""
        import torch

        if unit != self.pruning.epoch:
            return
        sizes = torch.cat([p.detach().abs().flatten() for p in self.parameters.values()])
        masks = torch.ones_like(sizes)
        masks[sizes.argsort(stable=True)[: round(self.pruning.share * len(sizes))]] = 0
        parts = masks.split([p.numel() for p in self.parameters.values()])
        named = zip(self.parameters.items(), parts, strict=True)
        self.masks = {name: part.view_as(p) for (name, p), part in named}
        self.after_step()

    def after_step(self) -> None:
        """Pruned weights are zero again."""
        for name, mask in self.masks.items():
            self.parameters[name].detach().mul_(mask)

    def _masked(self, name: str, gradient: Tensor) -> Tensor:
        return gradient * self.masks[name] if self.masks else gradient

    def state_dict(self) -> dict[str, Tensor]:
        return self.masks

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.masks = {name: mask.to(self.parameters[name].device) for name, mask in state.items()}
