"""What a search is about: a preset, a file, a configuration, or a model with its data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from regimes.base.config import RunConfig, load_toml, override_fields
from regimes.base.errors import ConfigError
from regimes.presets import get_preset

if TYPE_CHECKING:
    from regimes.data.task import Task


def read_subject(
    what: Any, train: Any, test: Any, set: Mapping[str, Any] | None, training: Mapping[str, Any]
) -> tuple[RunConfig, Task | None]:
    """Read the configuration that a search is about, and, of a model, the task (else None)."""
    if isinstance(what, str | RunConfig):
        for name in [*training, *(["train_data"] if train is not None else [])]:
            raise ConfigError(f"{name}: expected none beside {what!r:.40}; set={{...}} changes it")
        if isinstance(what, str):
            what = load_toml(what) if what.endswith(".toml") else get_preset(what)
        return override_fields(what, dict(set or {})), None
    if train is None or test is None:
        raise ConfigError("train_data, test_data: expected both, beside a model")
    from regimes.training.simulate import own_training  # torch, so late

    static = {"name": "static", "level": "low"}
    given = {"policy": static, "set": set, **training}
    return own_training(what, train, test, **given)
