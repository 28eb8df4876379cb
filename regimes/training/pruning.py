"""A pruning event: from one unit on the smallest weights are zero, and stay so.

By magnitude, over all compressed layers at once (global magnitude pruning: Blalock et al., MLSys
2020). A pruned weight has no gradient. A low rank, momentum or error feedback may still
change it, so the masks are applied after each step. A level sends as many floats as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from regimes.collectives.requests import Layer
from regimes.config import PruningConfig
from regimes.errors import ConfigError


class Pruning:
    """Prunes a model once.

    Attributes:
        masks: by layer, 0 where a weight is pruned; empty before the event.

    Raises:
        ConfigError: no layer is compressed.
    """

    def __init__(
        self, settings: PruningConfig, layers: Sequence[Layer], parameters: Sequence[nn.Parameter]
    ) -> None:
        self.settings = settings
        named = zip(layers, parameters, strict=True)
        self.parameters = {layer.name: p for layer, p in named if layer.compressed}
        if not self.parameters:
            raise ConfigError(
                "pruning: the model has no layer that is compressed, so none to prune"
            )
        self.masks: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            parameter.register_hook(partial(self._masked, name))

    def begin(self, epoch: int) -> None:
        """Called before each unit: prune, if it is the configured one."""
        if epoch != self.settings.epoch:
            return
        sizes = torch.cat([p.detach().abs().flatten() for p in self.parameters.values()])
        masks = torch.ones_like(sizes)
        masks[sizes.argsort(stable=True)[: round(self.settings.share * len(sizes))]] = 0
        parts = masks.split([p.numel() for p in self.parameters.values()])
        named = zip(self.parameters.items(), parts, strict=True)
        self.masks = {name: part.view_as(p) for (name, p), part in named}
        self.apply_masks()

    def apply_masks(self) -> None:
        """After each step: pruned weights are zero again."""
        with torch.no_grad():
            for name, mask in self.masks.items():
                self.parameters[name] *= mask

    def _masked(self, name: str, gradient: Tensor) -> Tensor:
        return gradient * self.masks[name] if self.masks else gradient

    def state_dict(self) -> dict[str, Tensor]:
        return self.masks

    def load_state_dict(self, masks: dict[str, Tensor]) -> None:
        self.masks = {name: mask.to(self.parameters[name].device) for name, mask in masks.items()}
