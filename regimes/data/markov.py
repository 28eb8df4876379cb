"""A text of known entropy: what a language model's bits per byte can fall to, and no further.

The text is a Markov chain of order `ORDER` over `LETTERS`: after each pair of letters one of
`BRANCHES` others follows, with probabilities in 64ths, both drawn once from a fixed seed. The
entropy rate (Shannon, "A Mathematical Theory of Communication", 1948, section 7; Cover & Thomas,
"Elements of Information Theory", theorem 4.2.4) is H = sum over states s of pi(s) H(next | s), with
pi the stationary distribution, and is exact to rounding.

A model that reads windows from an empty context sees only one letter before its first target, so
the least loss of windows lies a little higher: `Chain.floor`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int64

from regimes.seeding import stream

LETTERS = b"abcdefghijklmnop"
ORDER = 2
BRANCHES = 4
PARTS = 64  # probabilities are multiples of 1 / 64
BURN_IN = 256  # letters that are left out, from a start that may be in no stationary state


class Chain:
    """The chain: states are the last two letters, a b -> a * 16 + b.

    Attributes:
        lots: the letter that each of 64 equally likely lots brings, per state.
    """

    def __init__(self, seed: int = 0) -> None:
        generator, states = stream(seed, "markov chain"), len(LETTERS) ** ORDER
        self.lots: Int64[np.ndarray, "states parts"] = np.empty((states, PARTS), np.int64)
        self.seed = seed
        for state in range(states):
            letters = torch.randperm(len(LETTERS), generator=generator)[:BRANCHES].numpy()
            cuts = torch.randperm(PARTS - 1, generator=generator)[: BRANCHES - 1] + 1
            ends = [0, *sorted(cuts.tolist()), PARTS]
            self.lots[state] = np.repeat(letters, np.diff(ends))

    @cached_property
    def transitions(self) -> Float[np.ndarray, "states letters"]:
        """The probability of each letter after each state."""
        counts = [np.bincount(row, minlength=len(LETTERS)) for row in self.lots]
        return np.stack(counts) / PARTS

    @cached_property
    def stationary(self) -> Float[np.ndarray, " states"]:
        """The share of each state in a long text: pi P = pi, summing to 1."""
        states = len(self.lots)
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
        """The least bits per byte of windows of so many targets, each from an empty context: the
        first target has one letter before it, all others have both.

        For `ORDER` = 2.
        """
        pairs = (self.stationary[:, None] * self.transitions).reshape(*[len(LETTERS)] * 3).sum(0)
        seen = pairs.sum(1)  # of the letter before
        first = float(seen @ entropy(pairs / np.maximum(seen, 1e-300)[:, None]))
        return (first + (sequence - 1) * self.entropy_rate) / sequence

    def text(self, length: int) -> bytes:
        """So many letters."""
        size, generator = length + BURN_IN, stream(self.seed, "markov text")
        drawn = torch.randint(0, PARTS, (size,), generator=generator).tolist()
        lots, found = self.lots.tolist(), bytearray(size)
        state = 0
        for place, lot in enumerate(drawn):
            letter = lots[state][lot]
            state = (state * len(LETTERS) + letter) % len(lots)
            found[place] = LETTERS[letter]
        return bytes(found[BURN_IN:])


def entropy(rows: Float[np.ndarray, "n letters"]) -> Float[np.ndarray, " n"]:
    """Of each row of probabilities, in bits."""
    return -(rows * np.log2(np.where(rows > 0, rows, 1))).sum(1)
