"""The configuration of a run: frozen dataclasses, read from and written as TOML.

A configuration is a diff from the defaults. A plug-in (compressor, policy, ...) is a table with a
``name``, registered or ``package.module:Class``, and the fields of that class. Nothing here imports
torch.
"""

# ruff: noqa: F401 -- the names of the room

from regimes.base.config.bounds import MOST_EPOCHS, Bounded, Bounds
from regimes.base.config.convert import convert_value, from_dict, to_dict
from regimes.base.config.level import (
    DENSE,
    AnyLevel,
    AtLevel,
    ByName,
    FeedbackLevel,
    GivenLevel,
    Level,
    LevelName,
    as_level,
    is_by_name,
    level_name,
    plain_levels,
)
from regimes.base.config.registry import Registry
from regimes.base.config.retired import RETIRED, Retired
from regimes.base.config.run import (
    BranchConfig,
    Budget,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    Signal,
    check_windows,
    in_windows,
)
from regimes.base.config.toml import (
    load_toml,
    override,
    override_fields,
    override_table,
    read_value,
    to_toml,
)
