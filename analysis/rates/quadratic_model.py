"""Quadratics with compressed gradients: a direction as a linear filter, a matrix by PowerSGD.

SGD with Nesterov's momentum trains one direction of curvature 1. A linear filter with a memory
(`FILTERS`) stands for compression, so that a period of steps is one matrix. A rate is stable while
no eigenvalue of that matrix exceeds 1. Three filters have error feedback. Their residual is the sum
of what they have not sent yet, the gradient of the step included:

- *in turns*: the residual in every p-th step, nothing in the others (a projection that reaches a
  direction in every p-th step);
- *low-pass*: 1 / p of the residual, in each step;
- *delayed*: the gradient of p - 1 steps ago.

*In turns, no feedback* sends every p-th gradient and drops the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from regimes.base.config import DENSE, Level

ROWS, COLUMNS = 16, 24  # of the matrix
STEPS = 400  # of a simulation
TOP = 8.0  # more than any rate that is stable without a filter
Array = np.ndarray

# -- one direction, computed -----------------------------------------------------------------


def optimizer(momentum: float, rate: float, sent: Array, size: int) -> Array:
    """One step of Nesterov's SGD as a matrix on (weight, momentum, memory ...).

    Args:
        sent: what is sent of that state, as a row.
        size: of the state; the rows of the memory are left zero.
    """
    step = np.zeros((size, size))
    step[1] = momentum * np.eye(size)[1] + sent
    step[0] = np.eye(size)[0] - rate * (sent + momentum * step[1])
    return step


def in_turns(period: int, momentum: float, rate: float, feedback: bool = True) -> Array:
    """``period`` steps; the last one sends the residual (without feedback: its own gradient)."""
    waits = optimizer(momentum, rate, np.zeros(3), 3)
    waits[2] = [1.0 * feedback, 0, 1.0 * feedback]  # the residual: the sum of the gradients since
    sends = optimizer(momentum, rate, np.array([1.0, 0, 1.0]), 3)
    return sends @ np.linalg.matrix_power(waits, period - 1)


def low_pass(period: float, momentum: float, rate: float) -> Array:
    """A step that sends 1 / ``period`` of the residual."""
    share = 1 / period
    step = optimizer(momentum, rate, share * np.array([1.0, 0, 1.0]), 3)
    step[2] = (1 - share) * np.array([1.0, 0, 1.0])
    return step


def delayed(period: int, momentum: float, rate: float) -> Array:
    """A step with the gradient of ``period`` - 1 steps ago."""
    size = 1 + period
    sent = np.eye(size)[0 if period == 1 else size - 1]
    step = optimizer(momentum, rate, sent, size)
    for i in range(2, size):
        step[i] = np.eye(size)[0 if i == 2 else i - 1]
    return step


def forgets(period: int, momentum: float, rate: float) -> Array:
    """`in_turns` without feedback."""
    return in_turns(period, momentum, rate, feedback=False)


FILTERS: dict[str, Callable[[int, float, float], Array]] = {
    "in turns": in_turns,
    "low-pass": low_pass,
    "delayed": delayed,
    "in turns, no feedback": forgets,
}


def radius(matrix: Array) -> float:
    """The largest absolute eigenvalue."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def limit(grows: Callable[[float], bool], top: float = TOP, parts: int = 400) -> float:
    """The smallest rate that is not stable, by bisection between neighbours of a grid; inf if all
    rates up to ``top`` are stable.

    >>> round(limit(lambda rate: rate > 2), 6)
    2.0
    """
    rates = np.geomspace(top / 1e4, top, parts)
    above = next((i for i, rate in enumerate(rates) if grows(float(rate))), None)
    if above is None:
        return math.inf
    low, high = (0.0 if above == 0 else float(rates[above - 1])), float(rates[above])
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) else (middle, high)
    return high


def computed(name: str, period: int, momentum: float) -> float:
    """The largest stable rate, times the curvature, of one of `FILTERS`."""
    steps = FILTERS[name]
    return limit(lambda rate: radius(steps(period, momentum, rate)) > 1 + 1e-9, top=40.0)


# -- a matrix, simulated ---------------------------------------------------------------------


def power_step(matrix: Array, q: Array) -> tuple[Array, Array]:
    """PowerSGD's approximation of a worker's matrix, and the next right factor ``[rank, m]``."""
    p = np.linalg.qr(matrix @ q.T)[0]
    q = p.T @ matrix
    return p @ q, q


def train(
    level: Level, momentum: float, rate: float, feedback: bool, steps: int = STEPS
) -> tuple[float, float]:
    """Growth of the norm of the weights in the second half of a training, as a factor per step, and
    the mean share of the energy of gradient and residual that is sent.

    The curvatures, from 0.1 to 1, are at random places of the matrix. There is one worker.
    """
    draw = np.random.default_rng(0)
    curvature = draw.permutation(np.geomspace(0.1, 1, ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    weights = draw.normal(size=(ROWS, COLUMNS))
    q = draw.normal(size=(1 if level == DENSE else int(level), COLUMNS))
    velocity = residual = np.zeros_like(weights)
    sizes: list[float] = []
    shares: list[float] = []
    for _ in range(steps):
        delta = curvature * weights + residual
        sent, q = (delta, q) if level == DENSE else power_step(delta, q)
        residual = feedback * (delta - sent)
        velocity = momentum * velocity + sent
        weights = weights - rate * (sent + momentum * velocity)
        sizes.append(math.log(np.linalg.norm(weights) + 1e-300))
        shares.append(float((sent**2).sum() / max((delta**2).sum(), 1e-300)))
        if sizes[-1] > sizes[0] + 200:
            return math.inf, shares[-1]
    half, part = steps // 2, steps // 8
    slope = (np.mean(sizes[-part:]) - np.mean(sizes[half : half + part])) / (half - part)
    return math.exp(float(slope)), float(np.mean(shares[half:]))


def simulated(level: Level, momentum: float, feedback: bool = True) -> tuple[float, float]:
    """The largest rate, within 2 %, at which the weights do not grow, and the share of the energy
    that is sent there."""
    low, high = TOP / 400, TOP
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        grows = train(level, momentum, middle, feedback)[0] > 1 + 1e-4
        low, high = (low, middle) if grows else (middle, high)
    return low, train(level, momentum, low, feedback)[1]
