"""Regimes: train under a communication schedule, measure critical learning regimes, record it all.

Vocabulary (one word for one thing, in code, command line and plots):

- *worker*: a logical data-parallel worker; W of them, fixed by a run's configuration.
- *process*: an operating-system process; P of them, P divides W, each hosts W / P workers.
- *layer*: one named parameter tensor, the unit at which compressors and ACCORDION decide.
- *compressor*: how a layer's worker gradients become one shared update.
- *level*: how much is sent, ``low`` or ``high`` *compression*, or "dense".
- *detector*: a pure function from a statistic's history to "is this a critical regime?".
- *policy*: turns detector answers, epochs and learning-rate events into the next levels.
- *instrument*: measures a statistic during training and leaves no trace on the run.
- *traffic*: what was passed to the collectives, as floats (the paper's count) and bytes.
- *record*: what a run leaves on disk: enough for every figure and for replaying every policy.

In five lines::

    import regimes
    config = regimes.get_preset("smoke")
    config = regimes.override(config, ["policy.interval=4", "seed=1"])
    record = regimes.run(config, "runs/mine")
    print(record.epochs[["epoch", "metric", "total_floats"]])
"""

# Under ``python -m regimes`` the current folder still comes first here: nothing is imported that
# Python has not loaded already (`__main__` then takes the folder off the path).
import importlib

__version__ = "0.4.0"


def _read_stub() -> dict[str, str]:
    """The module of each public name: the lines ``from MODULE import NAME as NAME`` of the stub
    beside this file, which type checkers and editors read."""
    with open(f"{__file__}i", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    return {words[3]: words[1] for words in lines}


_HOME = _read_stub()
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """A public name, imported at its first use: ``import regimes`` does not load torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'regimes' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
