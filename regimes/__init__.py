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
import sys

TYPE_CHECKING = False  # that of `typing`, which is not imported; True for type checkers
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.4.0"

# Public names, grouped, imported at first use (`import regimes` does not load torch).
_PUBLIC = {
    "regimes.config": "RunConfig DataConfig ModelConfig OptimizerConfig OuterConfig override "
    "load_toml to_toml",
    "regimes.presets": "get_preset get_grid",
    "regimes.training.loop": "run",
    "regimes.training.branch": "branch",
    "regimes.training.simulate": "simulate",
    "regimes.records": "Record load load_all summary",
    "regimes.records.frame": "frame",
    "regimes.harms.harm": "harm",
    "regimes.harms.result": "Harm",
    "regimes.plans.plan": "plan",
    "regimes.plans.result": "Plan",
    "regimes.plotting.schedules": "compare",
    "regimes.plotting.lines": "plot",
    "regimes.policies": "Static Windows Accordion Detected BatchAccordion ByLayer Smith AdaQS "
    "RateLadder PostLocal QSR PastEpoch Decision",
    "regimes.ddp": "Hook RecordOptions attach",
    "regimes.local": "LocalSteps local_steps",
    "regimes.network": "Network",
    "regimes.detectors": "NormChange EigenvalueChange SharpnessChange FirstShare RandomWindows "
    "FixedWindows Verdict",
    "regimes.collectives.comm": "Comm",
    "regimes.collectives.layers": "Layer Traffic",
    "regimes.collectives.whole": "whole_model",
    "regimes.compression.base": "Compressor",
    "regimes.compression.bucket": "Bucket State",
    "regimes.compression.conformity": "check_compressor",
    "regimes.compression.elementwise": "Dense Sign Quantise Cast",
    "regimes.compression.powersgd": "PowerSGD ACPSGD",
    "regimes.compression.sparse": "TopK RandomK",
    "regimes.errors": "RegimesError ConfigError DataError RecordError TrainingError",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from regimes.config import DataConfig as DataConfig
    from regimes.config import ModelConfig as ModelConfig
    from regimes.config import OptimizerConfig as OptimizerConfig
    from regimes.config import RunConfig as RunConfig
    from regimes.config import override as override
    from regimes.harms.harm import harm as harm
    from regimes.harms.result import Harm as Harm
    from regimes.plans.plan import plan as plan
    from regimes.plans.result import Plan as Plan
    from regimes.plotting.lines import plot as plot
    from regimes.presets import get_preset as get_preset
    from regimes.records import Record as Record
    from regimes.records import load as load
    from regimes.records import load_all as load_all
    from regimes.records.frame import frame as frame
    from regimes.training.branch import branch as branch
    from regimes.training.loop import run as run
    from regimes.training.simulate import simulate as simulate


class _Late:
    """A public name, imported at first use. Completion in a notebook leaves descriptors alone, and
    would else import torch for the first name that it shows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: object, kind: object = None) -> "Any":
        return getattr(importlib.import_module(_HOME[self.name]), self.name)


_Module = type("_Module", (type(sys),), {name: _Late(name) for name in _HOME})
sys.modules[__name__].__class__ = _Module


def __getattr__(name: str) -> "Any":
    raise AttributeError(f"module 'regimes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
