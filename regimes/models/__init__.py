"""Networks by name; one file per family. Parameter counts are those of the paper's Tables 8-10.

A builder takes ``classes``, those of images also ``channels`` and ``image_size``, and, if it has
a choice, ``width`` (the channels of its first layer), ``depth`` (its layers), ``dropout`` (a
probability), and of a Transformer ``heads``, ``positions`` and ``tied``. Images may have any size
unless a builder says otherwise. Initialisation draws from torch's global generator: seed it around
`build`.

Language models (``text = True``) take ``classes`` words, and ``sequence``, the longest text they
are given, if they have a parameter of that name, and map ``tokens [batch, time]`` and a
hidden state to logits ``[batch, time, classes]`` and the next hidden state: None, or tensors with
the batch on axis 1. A network for a matrix (``matrix = True``) takes its ``rows`` and maps entries
``[batch, 2]`` to their values.

``head`` is the layer whose outputs are the logits, or ends with it; None where no layer does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from regimes.config import Registry, offered
from regimes.errors import ConfigError, require
from regimes.models.densenet import densenet121
from regimes.models.googlenet import googlenet
from regimes.models.gpt import GPT
from regimes.models.lstm import LSTM
from regimes.models.resnet import resnet8, resnet18
from regimes.models.senet import se_resnet18, senet18
from regimes.models.transformer import Transformer
from regimes.models.vgg import vgg7, vgg19bn_cifar10, vgg19bn_cifar100
from regimes.models.wideresnet import wideresnet28_10

MODELS = Registry(
    "model",
    offered("regimes.models")
    | {
        "vgg7": vgg7,
        "vgg19bn-cifar10": vgg19bn_cifar10,
        "vgg19bn-cifar100": vgg19bn_cifar100,
        "resnet8": resnet8,
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


def build(
    name: str,
    *,
    classes: int,
    channels: int | None = None,
    image_size: int | None = None,
    sequence: int | None = None,
    rows: int | None = None,
    **choices: Any,
) -> nn.Module:
    """The network of that name, or what the callable ``package.module:callable`` returns.

    `choices`, the other fields of `regimes.config.ModelConfig`, are passed on only if they are
    given; `channels` and `image_size` are left out for a language model, `sequence` for one that
    has no such parameter.

    Raises:
        ConfigError: there is no such network, it does not fit the data, or has no such choice.
    """
    builder = _builder(name)
    shape = {"channels": channels, "image_size": image_size}
    images = shape if any(v is not None for v in shape.values()) else {}
    takes, given = kind(name), "images" if images else "text" if rows is None else "a matrix"
    if takes != given:
        raise ConfigError(f"Model {name!r} takes {takes}, the data are {given}: choose another.")
    keywords: dict[str, Any] = {"classes": classes, **images}
    if rows is not None:
        keywords["rows"] = rows
    if sequence is not None and "sequence" in inspect.signature(builder).parameters:
        keywords["sequence"] = sequence
    try:
        keywords |= _given(name, builder, choices)
        model = builder(**keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"Model {name!r} cannot be built with {keywords}: {reason}") from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Model {name!r} gave a {type(model).__name__}, expected an nn.Module.")
    return model


def kind(name: str) -> str:
    """What the network of that name (or the user's callable) takes: "text" where it has ``text =
    True``, "a matrix" where it has ``matrix = True``, else "images"."""
    builder = _builder(name)
    if getattr(builder, "matrix", False):
        return "a matrix"
    return "text" if getattr(builder, "text", False) else "images"


def _given(name: str, builder: Callable[..., object], choices: dict[str, Any]) -> dict[str, Any]:
    """Those that are given; ConfigError for one that is out of range or that the builder lacks."""
    given = {key: value for key, value in choices.items() if value is not None}
    parameters = inspect.signature(builder).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in given.items():
        if not open_ended and key not in parameters:
            raise ConfigError(
                f"Model {name!r} has no choice of {key}: leave model.{key} out, or take back what "
                f"the preset says by --set model.{key}=none"
            )
        if key == "dropout":
            require(0 <= value < 1, "model.dropout", value, "at least 0 and below 1")
        elif key in ("width", "depth", "heads"):
            require(value >= 1, f"model.{key}", value, "at least 1")
    return given


def _builder(name: str) -> Callable[..., object]:
    builder = MODELS.load(name)
    if not callable(builder):
        kind = type(builder).__name__
        raise ConfigError(f"Model {name!r} is of type {kind}, expected a callable.")
    return builder
