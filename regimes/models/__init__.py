"""Networks by name; one file per family. Parameter counts are those of the paper's Tables 8 and 9.

A builder takes ``classes``, ``channels``, ``image_size`` and, if it has a choice, ``width`` (the
channels of its first layer). Initialisation draws from torch's global generator: seed it around
`build`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import nn

from regimes.errors import ConfigError, nearest
from regimes.models.resnet import resnet8, resnet18
from regimes.models.vgg import vgg7, vgg19bn_cifar10, vgg19bn_cifar100

MODELS: dict[str, Callable[..., nn.Module]] = {
    "vgg7": vgg7,
    "vgg19bn-cifar10": vgg19bn_cifar10,
    "vgg19bn-cifar100": vgg19bn_cifar100,
    "resnet8": resnet8,
    "resnet18-cifar10": resnet18,
    "resnet18-cifar100": resnet18,
}


def build(
    name: str, *, classes: int, channels: int, image_size: int, width: int | None = None
) -> nn.Module:
    """The network of that name, or what the callable ``package.module:callable`` returns.

    `width` is passed on only if it is given.

    Raises:
        ConfigError: if there is no such network, or it does not fit the images.
    """
    keywords = {"classes": classes, "channels": channels, "image_size": image_size}
    if width is not None:
        if width < 1:
            raise ConfigError(f"model.width must be at least 1, got {width}.")
        keywords["width"] = width
    try:
        model = _builder(name)(**keywords)
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"Model {name!r} cannot be built with {keywords}: {reason}") from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Model {name!r} gave a {type(model).__name__}, expected an nn.Module.")
    return model


def _builder(name: str) -> Callable[..., object]:
    if name in MODELS:
        return MODELS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"Unknown model {name!r}: {nearest(name, MODELS)}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Model {name!r} cannot be imported: {error}.") from error
