"""One run, described: frozen dataclasses, checked before any work, in and out as TOML.

A configuration is a diff from the defaults. Plug-ins (compressor, policy) are tables with a
``name`` that is either registered or spelt ``package.module:Class``; the rest of the table are
the fields of that class. Nothing here imports torch.
"""

from regimes.config.convert import convert, from_dict, to_dict, today
from regimes.config.registry import Registry, offered
from regimes.config.run import (
    DENSE,
    Budget,
    DataConfig,
    Level,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    PruningConfig,
    RunConfig,
    Signal,
    check_windows,
    in_windows,
)
from regimes.config.toml import load_toml, overlaid, override, read_value, to_toml

__all__ = [
    "DENSE",
    "Budget",
    "DataConfig",
    "Level",
    "ModelConfig",
    "OptimizerConfig",
    "OuterConfig",
    "PruningConfig",
    "Registry",
    "RunConfig",
    "Signal",
    "check_windows",
    "convert",
    "from_dict",
    "in_windows",
    "load_toml",
    "offered",
    "overlaid",
    "override",
    "read_value",
    "to_dict",
    "to_toml",
    "today",
]
