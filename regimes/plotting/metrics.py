"""How measurements are written: a column of the epochs, its label, its unit."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Metric:
    """How a measured column of the epochs is written.

    Attributes:
        factor: from the record's unit to the shown one.
        unit: of a difference.
        log: whether its axis is logarithmic.
        digits: behind the point, as shown in tables.
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


METRICS = {
    "accuracy": Metric("accuracy", "test accuracy (%)", "accuracy %", "points", 100.0),
    "perplexity": Metric(
        "perplexity", "test perplexity", "perplexity", "perplexity", log=True, lower=True
    ),
    "bits per byte": Metric(
        "bits per byte", "test bits per byte", "bits per byte", "bits", digits=3, lower=True
    ),
    "squared error": Metric(
        "squared error",
        "squared error of all entries",
        "squared error",
        "squared error",
        log=True,
        digits=3,
        lower=True,
    ),
    "loss": Metric("loss", "test loss", "test loss", "loss", digits=3, lower=True),
    "train_loss": Metric("train_loss", "training loss (nats)", "training loss", "nats", lower=True),
    "test_loss": Metric("test_loss", "test loss (nats)", "test loss", "nats", lower=True),
}


def named(name: str, unit_known: bool = True) -> Metric:
    """How a metric is written; plainly, under its own name, if the table has none.

    Args:
        unit_known: whether a loss is in nats; False for a user's own.
    """
    metric = METRICS.get(name, Metric(name, name, name, name, digits=3))
    if unit_known or metric.unit != "nats":
        return metric
    return replace(metric, label=metric.heading, unit="loss", digits=3)
