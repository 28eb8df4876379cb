"""Checks what a compressor's ``send`` returns, once for each layer and level. A wrong return is one
sentence that names the compressor. The checks change nothing and draw no random number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Layer, Traffic
from regimes.config import Level
from regimes.errors import ConfigError

MOST = 1 << 16  # numbers of a layer that are compared; of more, every second, third, ...


def sample(delta: Float[Tensor, "hosted n m"]) -> Float[Tensor, " some"]:
    """A copy of numbers spread evenly over a layer; of all if they are few."""
    flat = delta.detach().reshape(-1)
    return flat[:: flat.numel() // MOST + 1].clone()


def check_send(name: str, program: Any, layer: str) -> None:
    """Raise ConfigError unless ``send`` is a generator."""
    if not hasattr(program, "send"):
        got = type(program).__name__
        raise _error(name, layer, f"send returned a {got}, expected a generator: yield a request")


def check_sent(
    name: str,
    layer: str,
    answer: Any,
    delta: Float[Tensor, "hosted n m"],
    before: Float[Tensor, " some"],
    feedback: bool,
) -> None:
    """Check what a program has returned.

    Args:
        answer: ``(update, sent)``.
        before: `sample` of ``delta`` before the program began.
        feedback: with error feedback a program may subtract ``sent`` from ``delta`` itself.

    Raises:
        ConfigError: a wrong type, shape or dtype; ``delta`` has changed without permission.
    """
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Tensor):
        raise _error(name, layer, f"send returned {type(answer).__name__}, expected (update, sent)")
    update, sent = answer
    if (update.shape, update.dtype) != (delta.shape[1:], delta.dtype):
        raise _error(
            name, layer, f"the update is {_describe(update)}, expected {_describe(delta[0])}"
        )
    if isinstance(sent, Tensor) and sent.shape not in (delta.shape, delta.shape[1:]):
        raise _error(
            name,
            layer,
            f"sent is {_describe(sent)}, expected {_describe(delta)} or {_describe(delta[0])}",
        )
    if not isinstance(sent, Tensor | None):
        raise _error(name, layer, f"sent is a {type(sent).__name__}, expected a tensor or None")
    same = (sample(delta) == before) | (before != before)
    if not (feedback and sent is None) and not bool(same.all()):
        raise _error(
            name,
            layer,
            "send changed delta in place, expected to leave it as it is (with error feedback it "
            "may take out what it sends, and return None for sent)",
        )


def check_traffic(
    name: str, layer: Layer, level: Level, formula: Traffic, steps: Collection[Traffic]
) -> None:
    """Raise ConfigError unless a compressor's formula gives the mean of what steps have sent."""
    floats, sent = (
        sum(values) / len(steps)
        for values in zip(*((step.floats, step.bytes) for step in steps), strict=True)
    )
    if abs(formula.floats - floats) > 1e-6 * max(1.0, floats) or abs(formula.bytes - sent) >= 1:
        raise _error(
            name,
            layer.name,
            f"traffic says {formula.floats:g} floats and {formula.bytes} bytes a step at level "
            f"{level!r}, send has asked for {floats:g} and {sent:g}",
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _error(name: str, layer: str, what: str) -> ConfigError:
    return ConfigError(f"the compressor {name}, layer {layer}: {what}")
