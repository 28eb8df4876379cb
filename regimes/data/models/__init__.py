"""Networks by name; one file per family. Parameter counts are in the paper's Tables 8-10.

A builder takes ``classes``, a builder for images also ``channels`` and ``image_size``, and, if it
has a choice, ``width`` (the channels of its first layer), ``depth`` (its layers), ``dropout`` (a
probability), and of a Transformer ``heads`` and ``tied``. Images may have any size unless a builder
says otherwise. Initialisation draws from torch's global generator: seed it around `build_model`.

Language models (``text = True``) take ``classes`` words and, if they have such a parameter,
``sequence``, the longest text. They map ``tokens [batch, time]`` and a hidden state to logits
``[batch, time, classes]`` and the next hidden state: None, or tensors with the batch on axis 1.

A network with a method ``start_from`` is given the first training images, normalised, before it
trains.

``head`` is the layer that gives the logits, or ends with it; None where no layer does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from regimes.base.config import Registry
from regimes.base.errors import ConfigError, require
from regimes.data.models.densenet import densenet121
from regimes.data.models.googlenet import googlenet
from regimes.data.models.lstm import LSTM
from regimes.data.models.resnet import (
    resnet8,
    resnet18,
    resnet20,
    se_resnet18,
    senet18,
    wideresnet28_10,
)
from regimes.data.models.speednet import SpeedNet
from regimes.data.models.transformer import GPT, Transformer
from regimes.data.models.vgg import vgg7, vgg19bn_cifar10, vgg19bn_cifar100

MODELS = Registry(
    "model",
    {
        "vgg7": vgg7,
        "vgg19bn-cifar10": vgg19bn_cifar10,
        "vgg19bn-cifar100": vgg19bn_cifar100,
        "resnet8": resnet8,
        "resnet20": resnet20,
        "speednet": SpeedNet,
        "resnet18-cifar10": resnet18,
        "resnet18-cifar100": resnet18,
        "senet18-cifar10": senet18,
        "se-resnet18-cifar10": se_resnet18,
        "senet18-cifar100": se_resnet18,
        "wideresnet28-10-cifar10": wideresnet28_10,
        "wideresnet28-10-cifar100": wideresnet28_10,
        "densenet-cifar10": densenet121,
        "densenet-cifar100": densenet121,
        "googlenet-cifar10": googlenet,
        "googlenet-cifar100": partial(googlenet, dropout=0.4),
        "lstm": LSTM,
        "transformer": Transformer,
        "gpt": GPT,
    },
)


def check_real(model: nn.Module) -> None:
    """Raise ConfigError for a complex parameter or buffer: the run's type is a real one."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_complex():
            raise ConfigError(
                f"{name} is of type {tensor.dtype}: complex numbers cannot be trained; store the "
                "real and the imaginary part (torch.view_as_real)"
            )


def build_model(
    name: str,
    *,
    classes: int,
    channels: int | None = None,
    image_size: int | None = None,
    sequence: int | None = None,
    **choices: Any,
) -> nn.Module:
    """Build the network of that name, or call ``package.module:callable``.

    `choices`, the other fields of `ModelConfig`, are passed on unless they are None,
    `sequence` if the builder has such a parameter.

    Raises:
        ConfigError: there is no such network, it does not fit the data, or has no such choice.
    """
    builder = _find_builder(name)
    shape = {"channels": channels, "image_size": image_size}
    images = shape if any(v is not None for v in shape.values()) else {}
    takes, data = input_kind(name), "images" if images else "text"
    if takes != data:
        raise ConfigError(f"Model {name!r} takes {takes}, the data are {data}: choose another.")
    keywords: dict[str, Any] = {"classes": classes, **images}
    if sequence is not None and "sequence" in inspect.signature(builder).parameters:
        keywords["sequence"] = sequence
    try:
        keywords |= _checked_choices(name, builder, choices)
        model = builder(**keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"Model {name!r} cannot be built with {keywords}: {reason}") from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Model {name!r} gave a {type(model).__name__}, expected an nn.Module.")
    return model


def input_kind(name: str) -> str:
    """Say what a network or a callable takes, by its attribute: "text" or "images"."""
    return "text" if getattr(_find_builder(name), "text", False) else "images"


def _checked_choices(
    name: str, builder: Callable[..., object], choices: dict[str, Any]
) -> dict[str, Any]:
    """The choices that are not None; ConfigError for one out of range or unknown to the builder."""
    chosen = {key: value for key, value in choices.items() if value is not None}
    parameters = inspect.signature(builder).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in chosen.items():
        if not takes_any and key not in parameters:
            raise ConfigError(
                f"Model {name!r} has no choice of {key}: leave model.{key} out, or take back what "
                f"the preset says by --set model.{key}=none"
            )
        if key == "dropout":
            require(0 <= value < 1, "model.dropout", value, "at least 0 and below 1")
        elif key in ("width", "depth", "heads"):
            require(value >= 1, f"model.{key}", value, "at least 1")
    return chosen


def _find_builder(name: str) -> Callable[..., object]:
    builder = MODELS.load(name)
    if not callable(builder):
        kind = type(builder).__name__
        raise ConfigError(f"Model {name!r} is of type {kind}, expected a callable.")
    return builder
