"""What a compressor's ``send`` returns, checked once for each layer and level.

A wrong answer is one sentence that names the compressor and the layer. The checks change nothing
and draw no random number.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from regimes.errors import ConfigError

MOST = 1 << 16  # at most so many numbers of a layer are compared, spread evenly over it
Where = tuple[str, str]  # the names of the compressor and the layer


def sample_evenly(delta: Float[Tensor, "hosted n m"]) -> Float[Tensor, " some"]:
    """A copy of numbers spread evenly over a layer; of all if they are few."""
    flat = delta.detach().reshape(-1)
    return flat[:: flat.numel() // MOST + 1].clone()


def check_send(where: Where, program: Any) -> None:
    """Raise ConfigError unless ``send`` is a generator."""
    got = type(program).__name__
    what = f"send returned a {got}, expected a generator: yield a request"
    require_of(hasattr(program, "send"), where, what)


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
        before: `sample_evenly` of ``delta`` before the program began.
        feedback: with error feedback a program may subtract ``sent`` from ``delta`` itself.

    Raises:
        ConfigError: a wrong type, shape or dtype; ``delta`` has changed without permission.
    """
    good = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor)
    require_of(good, where, f"send returned {type(answer).__name__}, expected (update, sent)")
    (update, sent), of_one, of_all = answer, _describe_answer(delta[0]), _describe_answer(delta)
    good = (update.shape, update.dtype) == (delta.shape[1:], delta.dtype)
    require_of(good, where, f"the update is {_describe_answer(update)}, expected {of_one}")
    if isinstance(sent, Tensor):
        good = sent.shape in (delta.shape, delta.shape[1:])
        require_of(good, where, f"sent is {_describe_answer(sent)}, expected {of_all} or {of_one}")
    else:
        what = f"sent is a {type(sent).__name__}, expected a tensor or None"
        require_of(sent is None, where, what)
    same = (sample_evenly(delta) == before) | (before != before)
    require_of(
        (feedback and sent is None) or bool(same.all()),
        where,
        "send changed delta in place, expected to leave it as it is (with error feedback it may "
        "take out what it sends, and return None for sent)",
    )


def _describe_answer(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def require_of(good: bool, where: Where, what: str) -> None:
    """Raise ConfigError, which names the compressor and the layer, unless ``good``."""
    if not good:
        raise ConfigError(f"the compressor {where[0]}, layer {where[1]}: {what}")
