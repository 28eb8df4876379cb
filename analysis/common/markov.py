"""Markov models counted on a run's training text and tested on its windows: what a text is worth
without a network.

A model of order k predicts a byte from the k bytes before it by their counts in the training text,
interpolated with the lower orders (Witten & Bell, "The zero-frequency problem", 1991; Chen &
Goodman, "An empirical study of smoothing techniques", 1998, section 2.4). With c(h y) the count of
a context h followed by y, T(h) the number of different bytes that follow h, and h' the context
without its first byte:

    p(y | h) = (c(h y) + T(h) p(y | h')) / (c(h) + T(h)),    p = 1 / 256 below order 0

It has nothing to choose. Each window starts from an empty context, as it does for a network.

``data/reference/markov.json`` has the bits per byte of the texts of the committed records, by the
digest in their headers; a text that this Python or ``data.path`` has not is left as it is::

    python -m analysis.common.markov data/reference/*.tar.xz
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float, Int64, UInt8

from regimes.base.config import DataConfig, from_dict
from regimes.base.errors import DataError
from regimes.data import tokens
from regimes.records import Record, load_all, write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = Path(__file__).parents[2] / "data" / "reference" / "markov.json"
ORDERS = (2, 3)  # earlier tokens from which a chain predicts the next
DASHES: dict[int, Any] = {2: (0, (5, 2)), 3: (0, (1.5, 1.5))}  # of the lines in figures
ROOM = 0.04  # of an axis, beyond the lowest line
Text = UInt8[np.ndarray, " bytes"]


@dataclass(frozen=True)
class Counted:
    """A text, and what Markov models of it reach.

    Attributes:
        train, test: bytes of the two parts.
        sequence: bytes of a window.
        bits: bits per byte on the test part, by order.
    """

    train: int
    test: int
    sequence: int
    bits: dict[str, float]


def _grams(text: Text, order: int) -> Int64[np.ndarray, " grams"]:
    """Each byte with the ``order`` bytes before it, as a number of base 256."""
    grams = np.zeros(len(text) - order, np.int64)
    for place in range(order + 1):
        grams = grams * 256 + text[place : len(text) - order + place]
    return grams


def probabilities(
    train: Text, test: Text, order: int, sequence: int
) -> Float[np.ndarray, " targets"]:
    """What a model of an order gives each byte of a text but the first.

    Args:
        train: what is counted.
        sequence: bytes of a window; the i-th target of a window has i bytes of context at most.
    """
    known = np.full(len(test) - 1, 1 / 256)
    context = np.arange(len(test) - 1) % sequence + 1  # bytes of the window before each target
    for length in range(order + 1):
        grams, counts = np.unique(_grams(train, length), return_counts=True)
        contexts, first = np.unique(grams // 256, return_index=True)
        totals, kinds = np.add.reduceat(counts, first), np.diff([*first, len(grams)])
        asked = _grams(test, length)[1 if length == 0 else 0 :]
        places = slice(max(0, length - 1), None)  # of targets that have so many bytes before them
        at = np.minimum(np.searchsorted(contexts, asked // 256), len(contexts) - 1)
        seen = (contexts[at] == asked // 256) & (context[places] >= length)
        gram = np.minimum(np.searchsorted(grams, asked), len(grams) - 1)
        count = np.where(grams[gram] == asked, counts[gram], 0)
        lower = known[places]
        better = (count + kinds[at] * lower) / (totals[at] + kinds[at])
        known[places] = np.where(seen, better, lower)
    return known


def bits_per_byte(train: Text, test: Text, order: int, sequence: int) -> float:
    """The mean of -log2 p over the targets of the windows that cover a text."""
    return float(-np.log2(probabilities(train, test, order, sequence)).mean())


# -- of records ------------------------------------------------------------------------------


@functools.cache
def known(path: Path = FILE) -> dict[str, Counted]:
    """The counted texts by their digest; none where there is no file, as in the wheel."""
    if not path.exists():
        return {}
    return {d: Counted(**row) for d, row in json.loads(path.read_text(encoding="utf-8")).items()}


def of(run: Record) -> Counted | None:
    """The Markov models of a run's text; None of other data, or a text that was not counted."""
    return known().get(str(run.header.get("data", {}).get("digest")))


def caption(run: Record) -> str:
    """A sentence for the caption of a figure of a text, with a space after it: what the models
    reach, and on how much text; empty of other data."""
    if (counted := of(run)) is None:
        return ""
    orders = " and ".join(f"{counted.bits[str(order)]:.2f} (order {order})" for order in ORDERS)
    return (
        f"Markov models counted on the same training text reach {orders} bits per byte on the same "
        f"{counted.test / 1000:.0f} kB of test text; intervals hold seeds, not other texts. "
    )


def mark(ax: Axes, run: Record, axis: Literal["x", "y"], *, named: bool = True) -> None:
    """A grey line across an axis of bits per byte for each order of `ORDERS`, named at its end
    where there is room (the caption has the values); the axis is made long enough to show them."""
    if (counted := of(run)) is None:
        return
    for order in ORDERS:
        value = counted.bits[str(order)]
        ends = ax.get_xlim() if axis == "x" else ax.get_ylim()
        room = ROOM * (max(ends) - min(ends))
        least = min(*ends, value - room), max(*ends, value + room)
        look: Any = {"color": "#777777", "linewidth": 0.9, "linestyle": DASHES[order], "zorder": 1}
        label: Any = {"fontsize": 6, "color": "#555555"}
        if axis == "x":
            ax.set_xlim(*least)
            ax.axvline(value, **look)
            place: Any = ax.get_xaxis_transform()
            ax.text(value, 1.01, f"order {order}", transform=place, ha="center", **label)
        else:
            ax.set_ylim(*least)
            ax.axhline(value, **look)
            place = ax.get_yaxis_transform()
            if named:
                words = f"Markov, order {order}"
                ax.text(0.01, value, words, transform=place, va="bottom", **label)


def count(run: Record) -> Counted:
    """Count the text of a run's configuration.

    Raises:
        DataError: it is not there, or not the text of the run.
    """
    data = from_dict(DataConfig, run.config["data"])
    corpus = tokens.load_tokens(data)
    if corpus.digest != run.header["data"]["digest"]:
        raise DataError(f"the text of {run.folder} is another one on this machine")
    train, test = (part.numpy().astype(np.uint8) for part in (corpus.train, corpus.test))
    bits = {str(k): round(bits_per_byte(train, test, k, data.sequence), 5) for k in ORDERS}
    return Counted(len(train), len(test), data.sequence, bits)


def write(archives: Sequence[Path]) -> None:
    """Count the texts of records, each text once, and add them to `FILE`.

    Args:
        archives: of records, or folders.
    """
    found = dict(known())
    for path in archives:
        run = load_all(path)[0]
        digest = str(run.header.get("data", {}).get("digest"))
        if run.header["metric"] == "bits per byte" and digest not in found:
            try:
                found[digest] = count(run)
            except DataError as error:
                print(f"{path}: {error}")
    rows = {digest: asdict(counted) for digest, counted in sorted(found.items())}
    write_output(FILE, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    write([Path(name) for name in sys.argv[1:]])
