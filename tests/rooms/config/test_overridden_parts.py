"""A word that a policy, a compressor, a deficit or an instrument does not know is refused where it
is written, by every way to write it (oracle: the fields of the classes)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from regimes import compression, instruments, policies
from regimes.base.config import RunConfig, override, override_fields
from regimes.base.errors import ConfigError
from regimes.data import deficits
from regimes.training.simulate import own_training

REGISTRIES = {
    "policy": policies.REGISTRY,
    "batch_policy": policies.REGISTRY,
    "sync_policy": policies.REGISTRY,
    "compressor": compression.REGISTRY,
    "deficit": deficits.REGISTRY,
}
DATA = torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)


def own(values: dict[str, Any]) -> RunConfig:
    return own_training(nn.Linear(2, 2), DATA, DATA, set=values)[0]


WAYS: dict[str, Callable[[dict[str, Any]], RunConfig]] = {
    "override": lambda values: override(RunConfig(), [f"{k}={v}" for k, v in values.items()]),
    "override_fields": lambda values: override_fields(RunConfig(), values),
    "simulate(set=)": own,
}


def misspelt() -> Iterator[tuple[dict[str, Any], str]]:
    """Settings, each with the path of its word and that which was meant."""
    for field, registry in REGISTRIES.items():
        for name in registry:
            yield {field: f"{name}z"}, name
            for known in dataclasses.fields(registry.dataclass(name)):
                if known.init:
                    yield {field: name, f"{field}.{known.name}z": 1}, known.name
    for name in instruments.REGISTRY:
        yield {f"instruments.{name}z.every": 1}, name
        for known in dataclasses.fields(instruments.REGISTRY.dataclass(name)):
            if known.init:
                yield {f"instruments.{name}.{known.name}z": 1}, known.name


@pytest.mark.parametrize("way", WAYS)
def test_a_field_that_a_later_name_would_lose_is_refused(way: str) -> None:
    """And kept if the name comes first."""
    for field, name, known in (
        ("policy", "accordion", "level"),
        ("compressor", "topk", "error_feedback"),
        ("model", "package.module:build", "width"),
    ):
        pairs = {f"{field}.{known}": "low", f"{field}.name": name}
        with pytest.raises(ConfigError, match=f"{field}.{known}: set {field}.name before it"):
            override(RunConfig(), [f"{k}={v}" for k, v in pairs.items()])
    both = WAYS[way]({"policy.name": "static", "policy.level": "low"})
    assert both.policy == {"name": "static", "level": "low"}


@pytest.mark.parametrize("way", WAYS)
def test_a_misspelt_word_is_refused_at_the_call(way: str) -> None:
    cases = [*misspelt()]
    assert len(cases) > 100
    for values, meant in cases:
        with pytest.raises(ConfigError) as error:
            WAYS[way](values)
        said = str(error.value)
        assert f"did you mean {meant!r}?" in said, (values, said)
        assert "\n" not in said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"policy": "accordion", "policy.eta": "much"}, "policy.eta = 'much': expected a number"),
        ({"policy": "accordion", "policy.interval": 0}, "interval"),
        ({"levels.low.error_feedback": "false"}, "write levels.low = {level = 4, error_feedback"),
        ({"compressor": "nowhere:Mine"}, "cannot import the compressor 'nowhere:Mine'"),
    ],
)
def test_a_value_that_is_none_is_refused_at_the_call(
    way: str, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        WAYS[way](values)
    assert sentence in str(error.value)


def test_a_misspelt_key_of_a_level_is_refused_at_the_call() -> None:
    with pytest.raises(ConfigError, match="did you mean 'error_feedback'"):
        override(RunConfig(), ["levels.low={level=1, error_feedbak=false}"])


def test_the_command_refuses_it_before_it_reads_data(command: Callable[..., Any]) -> None:
    done = command("run", "smoke", "--set", "policy.intervall=4", "--out", "here")
    assert done.returncode == 2
    assert "unknown key 'policy.intervall'" in done.stderr
