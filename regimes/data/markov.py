"""A text of known entropy, the lower bound of a language model's bits per byte.

The text is a Markov chain of order `ORDER` over `LETTERS`: after each pair of letters one of
`BRANCHES` others follows, with probabilities in 64ths, both drawn once from a fixed seed. The
entropy rate (Shannon, "A Mathematical Theory of Communication", 1948, section 7; Cover & Thomas,
"Elements of Information Theory", theorem 4.2.4) is H = sum over states s of pi(s) H(next | s), with
pi the stationary distribution, and is exact to rounding.

A window starts from an empty context, with one letter before its first target, so the lower bound
for windows is a little higher: `Chain.floor`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int64

from regimes.seeding import make_generator

LETTERS = b"abcdefghijklmnop"
ORDER = 2
BRANCHES = 4
PARTS = 64  # probabilities are multiples of 1 / 64
BURN_IN = 256  # first letters, dropped: the chain starts in a fixed state


class Chain:
    """States are the last two letters, a b -> a * 16 + b; ``draws`` has the next letter for each of
    64 equally likely draws."""

    def __init__(self, seed: int = 0) -> None:
        generator, states = make_generator(seed, "markov chain"), len(LETTERS) ** ORDER
        self.draws: Int64[np.ndarray, "states parts"] = np.empty((states, PARTS), np.int64)
        self.seed = seed
        for state in range(states):
            letters = torch.randperm(len(LETTERS), generator=generator)[:BRANCHES].numpy()
            cuts = torch.randperm(PARTS - 1, generator=generator)[: BRANCHES - 1] + 1
            ends = [0, *sorted(cuts.tolist()), PARTS]
            self.draws[state] = np.repeat(letters, np.diff(ends))

    @cached_property
    def transitions(self) -> Float[np.ndarray, "states letters"]:
        """The probability of each letter after each state."""
        counts = [np.bincount(row, minlength=len(LETTERS)) for row in self.draws]
        return np.stack(counts) / PARTS

    @cached_property
    def stationary(self) -> Float[np.ndarray, " states"]:
        """The share of each state in a long text: pi P = pi, summing to 1."""
        states = len(self.draws)
        moves = np.zeros((states, states))
        for state, row in enumerate(self.transitions):
            first = state * len(LETTERS) % states  # a b -> b a, b b, b c, ...
            moves[state, first : first + len(LETTERS)] = row
        system = moves.T - np.eye(states)
        system[-1] = 1
        return np.linalg.solve(system, np.eye(states)[-1])

    @property
    def entropy_rate(self) -> float:
        """Bits per letter."""
        return float(self.stationary @ entropy(self.transitions))

    def floor(self, sequence: int) -> float:
        """The lower bound in bits per byte for windows of so many targets."""
        pairs = (self.stationary[:, None] * self.transitions).reshape(*[len(LETTERS)] * 3).sum(0)
        before = pairs.sum(1)  # probability of the one letter before the first target
        first = float(before @ entropy(pairs / np.maximum(before, 1e-300)[:, None]))
        return (first + (sequence - 1) * self.entropy_rate) / sequence

    def text(self, length: int) -> bytes:
        size, generator = length + BURN_IN, make_generator(self.seed, "markov text")
        draws, text, state = self.draws.tolist(), bytearray(size), 0
        for place, draw in enumerate(
            torch.randint(0, PARTS, (size,), generator=generator).tolist()
        ):
            letter = draws[state][draw]
            state = (state * len(LETTERS) + letter) % len(draws)
            text[place] = LETTERS[letter]
        return bytes(text[BURN_IN:])


def entropy(rows: Float[np.ndarray, "n letters"]) -> Float[np.ndarray, " n"]:
    """The entropy of each row of probabilities, in bits."""
    return -(rows * np.log2(np.where(rows > 0, rows, 1))).sum(1)
