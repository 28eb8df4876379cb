"""How schedules, levels and metrics are drawn and written: data.

The palette is safe for colour-blind readers; every schedule also has a line style and a marker of
its own, for grey prints. To give a schedule of your own a look: ``LOOKS["mine"] = Look(...)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from regimes.base.config.recorded import RECORDED
from regimes.base.errors import ConfigError

# points; polygons of many corners would look like a circle
STARS: dict[Any, float] = {"*": 8, (6, 1, 0): 8, (4, 1, 0): 7, (4, 1, 45): 7}


@dataclass(frozen=True)
class Look:
    """Holds the label and line of one schedule."""

    label: str
    colour: str
    dash: str | tuple[int, tuple[float, ...]] = "-"
    marker: str | tuple[int, int, int] = "o"  # a tuple: corners, style, degrees
    width: float = 1.4
    hollow: bool = False  # its markers

    @property
    def line(self) -> dict[str, Any]:
        """Return keywords of ``Axes.plot``."""
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "linewidth": self.width,
            "marker": self.marker,
            "markersize": STARS.get(self.marker, 4.5),
            "markerfacecolor": "white" if self.hollow else self.colour,
            "markeredgecolor": self.colour if self.hollow else "white",
            "markeredgewidth": 1.0 if self.hollow else 0.5,
            "zorder": 2 + self.width,
        }


# seaborn's "colorblind" without its yellow, which is too pale for a line
_C = (
    *("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"),
    *("#ca9161", "#fbafe4", "#949494", "#7d6b00", "#56b4e9"),
)
LOOKS = {
    "dense": Look("dense (no compression)", "#000000", "-", "s"),
    "low": Look("low compression", _C[0], (0, (6, 1.2)), "o"),
    "high": Look("high compression", _C[3], (0, (1.2, 1.2)), "v"),
    "accordion": Look("ACCORDION", _C[1], "-", "*", 2.4),
    "low-in-critical": Look("low in critical, high elsewhere", _C[2], (0, (4, 1.2, 1.2, 1.2)), "D"),
    "high-in-critical": Look("high in critical, dense elsewhere", _C[4], (0, (8, 2)), "X"),
    "dense-deleted": Look("control: dense, early epochs deleted", _C[7], (0, (2, 1)), "^", 1.0),
    "low-early": Look("control: low early only", _C[9], (0, (4, 1, 1, 1, 1, 1)), "<", 1.0),
    "low-late": Look("control: low late only", _C[7], (0, (2.5, 2.5)), ">", 1.0),
    "adaqs": Look("AdaQS (Guo et al., 2020)", _C[4], (0, (5, 1, 1, 1)), "P"),
    "smith": Look("Smith et al. (2017)", _C[5], (0, (7, 1.5, 1.5, 1.5)), (4, 1, 45)),
    "mid": Look("middle compression", _C[9], (0, (3, 1)), "p"),
    "high-longer": Look("high compression, longer", _C[8], (0, (2, 1.5)), "d"),
    "high-stretched": Look(
        "high compression, longer, decays stretched", _C[5], (0, (4, 1, 1.5, 1)), (4, 1, 0)
    ),
    "large-batch-8x": Look("large batch, 8 times the small", _C[8], (0, (2, 3)), (3, 0, 30)),
    "accordion-batch-8x": Look("ACCORDION, 8 times the small", _C[4], (0, (9, 1)), (6, 1, 0), 1.8),
}
LIKE = {  # drawn as one of the above, in figures without it
    "small-batch": ("low", "small batch"),
    "large-batch": ("high", "large batch"),
    "small-in-critical": ("low-in-critical", "small in critical, large elsewhere"),
    "large-in-critical": ("high-in-critical", "large in critical, small elsewhere"),
    "accordion-batch": ("accordion", "ACCORDION"),
    "rank 4": ("low", "rank 4"),
    "rank 2": ("mid", "rank 2"),
    "rank 1": ("high", "rank 1"),
    "accordion 4-1": ("accordion", "ACCORDION, ranks 4 and 1"),
    "accordion 4-2": ("accordion-batch-8x", "ACCORDION, ranks 4 and 2"),
    "none": ("dense", "no deficit"),
}
SPARE = (
    (_C[5], (0, (1, 1.5)), "P"),
    (_C[2], (0, (5, 1.5, 2, 1.5)), "<"),
    (_C[4], (0, (3, 1.5)), "D"),
    (_C[7], (0, (6, 2)), ">"),
    (_C[6], (0, (2, 2, 4, 2)), "^"),
    (_C[8], (0, (1, 1, 3, 1)), "X"),
    (_C[9], (0, (8, 1.5)), "d"),
    (_C[0], (0, (1, 3)), "h"),
    # for grids with many schedules: stars and polygons, by number of corners
    (_C[3], (0, (3, 3)), (4, 1, 0)),
    (_C[1], (0, (6, 3)), (5, 0, 36)),
    (_C[2], (0, (1, 1, 4, 1)), (3, 1, 0)),
    (_C[6], (0, (9, 3)), (4, 1, 45)),
    (_C[4], (0, (2, 4)), (8, 1, 0)),
    (_C[0], (0, (5, 4)), (7, 0, 0)),
    (_C[5], (0, (1, 4)), (3, 1, 60)),
    (_C[8], (0, (7, 4)), (5, 1, 36)),
    (_C[7], (0, (3, 1, 1, 3)), (10, 1, 0)),
    (_C[9], (0, (4, 2, 1, 2)), (9, 0, 0)),
    (_C[0], (0, (8, 3)), (4, 0, 20)),
    (_C[3], (0, (2, 1, 1, 3)), (7, 1, 0)),
    (_C[1], (0, (5, 2, 1, 2)), (3, 0, 30)),
    (_C[6], (0, (1, 5)), (12, 1, 0)),
)
LEVELS = {"high": "#e4e4e4", "low": _C[0], "dense": "#1a1a1a"}  # light to dark: more traffic
SPELT = {
    **dict.fromkeys(("powersgd", "acp-sgd"), "rank {}"),
    **dict.fromkeys(("topk", "randomk", "dct-topk", "chunked-topk"), "K = {} %"),
    "quantise": "{} bits",
    "threshold": "from {}",
    "low-pass": "share {}",
    **dict.fromkeys(("quantised-all-reduce", "quantised-scatter"), "{} bits"),
}


_NAMES = {target: name for name, target in RECORDED["compressor"].items()}


def level_text(compressor: str) -> str | None:
    """Return how a level of a compressor is written, e.g. "rank {}"; None if nothing says it."""
    return SPELT.get(_NAMES.get(compressor, compressor))


def style_of(name: str, spare: int = 0) -> Look:
    """Return a schedule's look; a schedule outside the tables has a spare one under its own
    name."""
    if name in LIKE:
        return replace(LOOKS[LIKE[name][0]], label=LIKE[name][1])
    return LOOKS.get(name, Look(name, *SPARE[spare % len(SPARE)]))


def styles_of(names: Iterable[str]) -> dict[str, Look]:
    """Return the looks of one figure's schedules, in order; those outside the tables have markers
    that no other has."""
    looks = {name: style_of(name) for name in order_schedules(names)}
    unknown = [name for name in looks if name not in LOOKS and name not in LIKE]
    taken = {look.marker for name, look in looks.items() if name not in unknown}
    free = [i for i, (*_, marker) in enumerate(SPARE) if marker not in taken]
    return looks | {name: style_of(name, free[i % len(free)]) for i, name in enumerate(unknown)}


def order_schedules(names: Iterable[str]) -> list[str]:
    """Sort schedules by the table's order, then the unknown ones by name."""
    place = {name: i for i, name in enumerate(LOOKS)}
    return sorted({*names}, key=lambda n: (place.get(LIKE.get(n, (n,))[0], len(place)), n))


# -- metrics ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """Says how a measured column of the epochs is written.

    Attributes:
        factor: from the record's unit to the shown one.
        unit: of a difference.
        log: whether its axis is logarithmic.
        digits: after the point, as shown in tables.
        lower: whether less is better.
    """

    name: str
    label: str
    heading: str
    unit: str
    factor: float = 1.0
    log: bool = False
    digits: int = 1
    lower: bool = False

    @property
    def directed(self) -> bool:
        """Answer whether it is known which way is better."""
        return self.name in METRICS

    @property
    def sign(self) -> int:
        """Return what a value is multiplied by where less must be better: 1, or -1 if more of the
        metric is better.

        Raises:
            ConfigError: which way is better is not known.
        """
        if not (self.directed or self.lower):
            raise ConfigError(
                f"metric {self.name!r}: whether less of it is better is not known, so no result is "
                f"the better one: name it as one of {', '.join(METRICS)}"
            )
        return 1 if self.lower else -1

    @property
    def ends(self) -> tuple[float, float]:
        """Return the lowest and the highest value that there is, in the unit in which it is
        shown."""
        if self.name == "accuracy":
            return 0.0, 100.0
        return (0.0 if self.directed else -math.inf), math.inf

    @property
    def axis(self) -> str:
        """Return the label of its axis, with the direction in which it is better."""
        way = "lower" if self.lower else "higher"
        return f"{self.label}\n{way} is better" if self.directed else self.label


_METRICS = (
    Metric("accuracy", "test accuracy (%)", "accuracy %", "points", 100.0),
    Metric("perplexity", "test perplexity", "perplexity", "perplexity", log=True, lower=True),
    Metric("bits per byte", "test bits per byte", "bits per byte", "bits", digits=3, lower=True),
    Metric(
        *("squared error", "squared error of all entries", "squared error", "squared error"),
        log=True,
        digits=3,
        lower=True,
    ),
    Metric("loss", "test loss", "test loss", "loss", digits=3, lower=True),
    Metric("train_loss", "training loss (nats)", "training loss", "nats", lower=True),
    Metric("test_loss", "test loss (nats)", "test loss", "nats", lower=True),
)
METRICS = {metric.name: metric for metric in _METRICS}


def find_metric(name: str, unit_known: bool = True) -> Metric:
    """Find how a metric is written; plainly, under its own name, if the table has none.

    Args:
        unit_known: whether a loss is in nats; False for a function of the user's.
    """
    metric = METRICS.get(name, Metric(name, name, name, name, digits=3))
    if unit_known or metric.unit != "nats":
        return metric
    return replace(metric, label=metric.heading, unit="loss", digits=3)
