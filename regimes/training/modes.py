"""Which modules of a model are in training, and which a user keeps in evaluation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from regimes.data.models.copies import copy_model


def modules_in_eval(model: nn.Module) -> list[nn.Module]:
    """List the modules that are in evaluation within a model that is in training: frozen statistics
    of a BatchNorm, say. Of a model that is in evaluation as a whole there are none, because
    training sets that."""
    return [module for module in model.modules() if not module.training] if model.training else []


def set_training(model: nn.Module, in_eval: Iterable[nn.Module]) -> None:
    """Put the model into training, except for the modules that stay in evaluation."""
    model.train()
    for module in in_eval:
        module.training = False  # and not ``eval()``: parts of it may be in training


def training_copy(model: nn.Module) -> nn.Module:
    """Copy a model that was not evaluated yet, as its training passes have it."""
    trial = copy_model(model)
    set_training(trial, modules_in_eval(trial))
    return trial
