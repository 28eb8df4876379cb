"""Checks what a compressor's ``send`` returns, once for each layer and level. A wrong return is one
sentence that names the compressor. The checks change nothing and draw no random number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Traffic
from regimes.config import Level
from regimes.errors import ConfigError

MOST = 1 << 16  # numbers of a layer that are compared; of more, every second, third, ...
Where = tuple[str, str]  # the names of the compressor and the layer


def sample(delta: Float[Tensor, "hosted n m"]) -> Float[Tensor, " some"]:
    """A copy of numbers spread evenly over a layer; of all if they are few."""
    flat = delta.detach().reshape(-1)
    return flat[:: flat.numel() // MOST + 1].clone()


def check_send(where: Where, program: Any) -> None:
    """Raise ConfigError unless ``send`` is a generator."""
    got = type(program).__name__
    what = f"send returned a {got}, expected a generator: yield a request"
    _require(hasattr(program, "send"), where, what)


def check_sent(
    where: Where,
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
    good = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor)
    _require(good, where, f"send returned {type(answer).__name__}, expected (update, sent)")
    (update, sent), of_one, of_all = answer, _describe(delta[0]), _describe(delta)
    good = (update.shape, update.dtype) == (delta.shape[1:], delta.dtype)
    _require(good, where, f"the update is {_describe(update)}, expected {of_one}")
    if isinstance(sent, Tensor):
        good = sent.shape in (delta.shape, delta.shape[1:])
        _require(good, where, f"sent is {_describe(sent)}, expected {of_all} or {of_one}")
    else:
        what = f"sent is a {type(sent).__name__}, expected a tensor or None"
        _require(sent is None, where, what)
    same = (sample(delta) == before) | (before != before)
    _require(
        (feedback and sent is None) or bool(same.all()),
        where,
        "send changed delta in place, expected to leave it as it is (with error feedback it may "
        "take out what it sends, and return None for sent)",
    )


def check_traffic(where: Where, level: Level, formula: Traffic, steps: Collection[Traffic]) -> None:
    """Raise ConfigError unless a compressor's formula gives the mean of what steps have sent."""
    floats = sum(step.floats for step in steps) / len(steps)
    sent = sum(step.bytes for step in steps) / len(steps)
    good = abs(formula.floats - floats) <= 1e-6 * max(1.0, floats)
    _require(
        good and abs(formula.bytes - sent) < 1,
        where,
        f"traffic says {formula.floats:g} floats and {formula.bytes} bytes a step at level "
        f"{level!r}, send has asked for {floats:g} and {sent:g}",
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _require(good: bool, where: Where, what: str) -> None:
    if not good:
        raise ConfigError(f"the compressor {where[0]}, layer {where[1]}: {what}")
