"""What the static rows of Tables 1-6 send, by rule: floats of one step times steps.

One step is the compressor's own formula (the paper's count, `regimes.compression`) summed over the
network's layers; one epoch of CIFAR is 98 steps of 4 x 128 images. Where that is not what the paper
prints, `EXPLAINED` has the change of the rule that is, found in the printed numbers themselves.
ACCORDION's rows in Tables 5 and 6 have a rule, too (`window`). Used by `tables`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from regimes.base.config import DENSE, Level

from . import published

WORKERS, BATCH, EPOCHS, IMAGES = 4, 128, 300, 50_000  # of the paper; a batch is a worker's
UNITS = {"M": 1e6, "G": 1e9}
NETWORKS = {"senet": "senet18"}  # the paper's -> ours


@dataclass(frozen=True)
class Rule:
    """What a static row sends: the floats of one step times the steps of the whole training.

    Attributes:
        batch: images per step, all workers together.
        short: whether the last, short batch of a worker's share of an epoch is a step.
        early: epochs at the start that train at batch 512 instead.
        why: in words, where this is not what the row of the paper says.
    """

    network: str
    compressor: str
    level: Level
    batch: int = WORKERS * BATCH
    epochs: int = EPOCHS
    short: bool = True
    early: int = 0
    why: str = ""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        rounded = math.ceil if self.short else math.floor
        first, later = (rounded(IMAGES / batch) for batch in (WORKERS * BATCH, self.batch))
        return self.early * first + (self.epochs - self.early) * later

    @property
    def floats(self) -> float:
        return _per_step(self.network, self.compressor, self.level) * self.steps


@functools.cache
def _per_step(network: str, compressor: str, level: Level) -> float:
    """Floats of one step; ``compressor`` "dense" sends every parameter."""
    from regimes import compression
    from regimes.compression.traffic import traffic_table
    from regimes.data import models
    from regimes.training.gradients import layer_table

    classes = 100 if network.endswith("cifar100") else 10
    layers = layer_table(models.build_model(network, classes=classes, channels=3, image_size=32))
    # the authors' code sends every matrix at its rank, also where that is more than the matrix
    authors = {"reset_on_change": True} if compressor == "powersgd" else {}
    chosen = compression.make_compressor({"name": compressor, **authors})
    return traffic_table(chosen, layers, level, WORKERS)[0]


_LARGER = "the SE-ResNet-18 of 11,389,726 parameters, not Table 8's"
_SHORT = {"short": False}
EXPLAINED: dict[tuple[int, str, str], dict[str, Any]] = {  # (table, network, level): the change
    **{
        (1, "senet", rank): {
            "network": "se-resnet18-cifar10",
            "epochs": 249,
            "why": f"{_LARGER}, for 249 epochs; the authors' logs of these runs have 300",
        }
        for rank in ("rank 4", "rank 1")
    },
    **{(3, "senet", k): {"network": "se-resnet18-cifar10", "why": _LARGER} for k in ("99%", "10%")},
    **{
        (table, "resnet18", "99%"): {"level": 100, "why": "K = 100 %, not 99 %"} for table in (3, 4)
    },
    (5, "resnet18", "512"): {
        "network": "resnet18-cifar100",
        **_SHORT,
        "why": "the number of Table 6 (CIFAR-100, 97 steps per epoch)",
    },
    **{
        (6, network, "512"): {**_SHORT, "why": "97 steps per epoch, the last batch left out"}
        for network in ("resnet18", "googlenet", "densenet")
    },
    **{
        (table, network, "4096"): {**_SHORT, "why": "12 steps per epoch, the last batch left out"}
        for table in (5, 6)
        for network in ("resnet18", "googlenet", "densenet")
    },
}


def rule(row: dict[str, Any]) -> Rule:
    """What a static row of the paper says that it is."""
    network = f"{NETWORKS.get(row['model'], row['model'])}-{row['data']}"
    if row["compressor"] == "batch":
        return Rule(network, DENSE, DENSE, batch=int(row["level"]))
    level = published.number(row["level"])
    return Rule(network, row["compressor"], int(level) if level.is_integer() else level)


def explained(row: dict[str, Any]) -> Rule:
    """What a static row of the paper must have been."""
    return replace(rule(row), **EXPLAINED.get((row["table"], row["model"], row["level"]), {}))


EARLY = 20  # epochs of small batches: with them five of six printed numbers come out
WINDOW = (
    f"small batches in epochs 0-{EARLY - 1} alone, a fixed window: {EARLY} x 97 + 280 x 12 steps"
)
ODD = (6, "resnet18", "the rule gives 59.47 G; the five other rows follow it")


def window(row: dict[str, Any]) -> Rule:
    """What an ACCORDION row of Tables 5 and 6 must have been: five of the six printed numbers are
    parameters times 5,300 steps. By the interval rule small batches would last 11 or 21 epochs,
    and come back at each decay."""
    network = f"{row['model']}-{row['data']}"
    odd = f"; {ODD[2]}" if (row["table"], row["model"]) == ODD[:2] else ""
    return Rule(network, DENSE, DENSE, batch=4096, short=False, early=EARLY, why=WINDOW + odd)


def agrees(floats: float, printed: str, unit: str) -> bool:
    """To the printed digits: less than one unit of the last away (the paper cuts or rounds)."""
    digits = len(printed.partition(".")[2])
    return abs(floats / UNITS[unit] - float(printed)) < 10.0**-digits * (1 - 1e-9)
