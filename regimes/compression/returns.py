"""What a compressor's ``send`` does and returns, checked once for each layer and level, so that a
wrong return is one sentence that names the compressor. Nothing is changed, no number is drawn."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Layer, Traffic
from regimes.config import Level
from regimes.errors import ConfigError

MOST = 1 << 16  # numbers of a layer that are looked at; of more, every second, third, ...


def sample(delta: Float[Tensor, "hosted n m"]) -> Float[Tensor, " some"]:
    """A copy of numbers all over a layer, of all of them where they are few."""
    flat = delta.detach().reshape(-1)
    return flat[:: flat.numel() // MOST + 1].clone()


def check_send(name: str, program: Any, layer: str) -> None:
    """Raise ConfigError unless ``send`` is a generator."""
    if not hasattr(program, "send"):
        got = type(program).__name__
        raise _wrong(name, layer, f"send returned a {got}, expected a generator: yield a request")


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
        before: `sample` of ``delta``, before the program began.
        feedback: is there error feedback? Then a program may take ``sent`` out of ``delta`` itself.

    Raises:
        ConfigError: a wrong type, shape or dtype; ``delta`` was changed and may not be.
    """
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Tensor):
        raise _wrong(name, layer, f"send returned {type(answer).__name__}, expected (update, sent)")
    update, sent = answer
    if (update.shape, update.dtype) != (delta.shape[1:], delta.dtype):
        raise _wrong(name, layer, f"the update is {_spelt(update)}, expected {_spelt(delta[0])}")
    if isinstance(sent, Tensor) and sent.shape not in (delta.shape, delta.shape[1:]):
        raise _wrong(
            name, layer, f"sent is {_spelt(sent)}, expected {_spelt(delta)} or {_spelt(delta[0])}"
        )
    if not isinstance(sent, Tensor | None):
        raise _wrong(name, layer, f"sent is a {type(sent).__name__}, expected a tensor or None")
    same = (sample(delta) == before) | (before != before)
    if not (feedback and sent is None) and not bool(same.all()):
        raise _wrong(
            name,
            layer,
            "send changed delta in place, expected to leave it as it is (with error feedback it "
            "may take out what it sends, and return None for sent)",
        )


def check_traffic(
    name: str, layer: Layer, level: Level, said: Traffic, steps: Collection[Traffic]
) -> None:
    """Raise ConfigError unless a compressor's formula gives the mean of what steps have sent."""
    floats, sent = (
        sum(values) / len(steps)
        for values in zip(*((step.floats, step.bytes) for step in steps), strict=True)
    )
    if abs(said.floats - floats) > 1e-6 * max(1.0, floats) or abs(said.bytes - sent) >= 1:
        raise _wrong(
            name,
            layer.name,
            f"traffic says {said.floats:g} floats and {said.bytes} bytes a step at level {level!r},"
            f" send has asked for {floats:g} and {sent:g}",
        )


def _spelt(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _wrong(name: str, layer: str, what: str) -> ConfigError:
    return ConfigError(f"the compressor {name}, layer {layer}: {what}")
