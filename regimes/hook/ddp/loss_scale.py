"""The scale of the loss: of the GradScaler that ``attach`` was given, or of the one that is found.

torch leaves two traces of a scaler. It has its scale as a tensor once it has scaled a loss: where
one alone has, by the first backward pass, it is taken for the model's. And it steps an optimiser
within its own ``step``: this is certain, and decides from then on.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch.amp import GradScaler

from regimes.base.torch_compat import has_scaled, has_unscaled

_LATE = 64  # passes without a step that is seen: several may be exchanged for each step

UNKNOWN = (
    "a GradScaler scales losses here, and no optimiser of torch has shown whether this model's: "
    "what compression holds back may be added in the unit of another scale; name the model's own, "
    "attach(..., scaler=scaler)"
)


class LossScale:
    """Finds the scale of one model's loss.

    Attributes:
        used: of the last pass.
        certain: it is known which scaler gives it, or that none does.
        doubtful: it is not, and there are scalers.
    """

    doubtful = False

    def __init__(self, scaler: Any = None) -> None:
        self.used, self.certain = 1.0, scaler is not None
        self._given, self._passes = scaler, 0
        # weak: an earlier job's scaler must not outlive its script
        self._found: Callable[[], Any] = lambda: None

    @property
    def scaler(self) -> Any:
        """Return the scaler that gives the scale; None if the loss is not scaled."""
        return self._found() if self._given is None else self._given

    def _find(self, scaler: GradScaler | None) -> None:
        self._found = (lambda: None) if scaler is None else ref(scaler)

    def begin_pass(self) -> None:
        """Note that a backward pass has begun, and look for a scaler in the first one."""
        if self.certain:
            return
        self._passes += 1
        if self._passes == 1:
            found = _used_scalers()
            self.doubtful = bool(found)
            self._find(found[0] if len(found) == 1 else None)
        elif self._passes == _LATE and self.scaler is None and _used_scalers():
            warnings.warn(UNKNOWN, stacklevel=2)

    def of_pass(self) -> float:
        """Return the scale of the pass under way. This is a sync point if the scaler is on a
        GPU."""
        scaler = self.scaler
        self.used = 1.0 if scaler is None else float(scaler.get_scale())
        return self.used

    def see_step(self, optimizer: Any) -> float:
        """Find the scaler that lets an optimiser step the model.

        Returns:
            The scale of the last pass over what ``of_pass`` has said of it.
        """
        if self._given is not None or torch.compiler.is_compiling():
            return 1.0
        scaler = self.scaler
        found = _stepping_scaler(sys._getframe(1))
        if found is None:  # a script that has called unscale_() may step by itself
            known = [scaler] if self.certain else _used_scalers()
            found = next((x for x in known if has_unscaled(x, optimizer)), None)
        self.certain, self.doubtful = True, False
        if found is scaler:
            return 1.0
        self._find(found)
        said = self.used
        return self.of_pass() / said


def _stepping_scaler(frame: FrameType | None) -> GradScaler | None:
    """The scaler within whose ``step`` this is called."""
    while frame is not None:
        if frame.f_code.co_name == "step":
            owner = frame.f_locals.get("self")
            if isinstance(owner, GradScaler):
                return owner
        frame = frame.f_back
    return None


def _used_scalers() -> list[GradScaler]:
    """All scalers that have scaled a loss."""
    kinds: list[type] = [GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    return [one for one in found if one.is_enabled() and has_scaled(one)]
