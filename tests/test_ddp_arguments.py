"""What `regimes.attach` and a hook's state refuse, on a group of one process: one sentence each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import outcome
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = (tmp_path_factory.mktemp("group") / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=meeting, world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def wrapped(width: int = 6) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *[({"timeout": value}, f"timeout = {value!r}: expected a positive number of seconds")
          for value in (-1, 0, float("nan"), float("inf"), 1e300, "600", True, None)],
        *[({"seed": value}, f"seed = {value!r}: expected a whole number of at most 63 bits")
          for value in ("x", 0.5, True, None, 10**30)],
        *[({"levels": value}, "levels = .*: expected a table of levels by name")
          for value in (["low", "high"], "low", 4, {1: 2})],
        ({"levels": {"low": "4", "high": 1}}, "level of PowerSGD = '4': expected a rank"),
        *[({"scaler": value}, "scaler = .*: expected a GradScaler of torch")
          for value in (1.0, "dynamic", {"get_scale": 1})],
        ({"policy": 7}, "policy = 7: expected"),
        ({"policy": "regimes:PowerSGD"}, "is no policy: it has no"),
        ({"compressor": "regimes:Static"}, "is no compressor: it has no"),
    ],
)  # fmt: skip
def test_attach_refuses_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    model = wrapped()
    with pytest.raises(ConfigError, match=sentence.replace("+", r"\+")):
        regimes.attach(model, **given)
    regimes.attach(model)  # nothing was registered


def test_a_model_that_trains_nothing_is_one_sentence() -> None:
    model = wrapped()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter to train: DDP has nothing to reduce"):
        regimes.attach(model)


def trained(**given: Any) -> regimes.Hook:
    model = wrapped()
    hook = regimes.attach(model, **given)
    model(torch.ones(4, 5)).square().sum().backward()
    hook.epoch_end(lr=np.float32(0.1))
    return hook


def test_numbers_of_numpy_are_numbers() -> None:
    levels = {"low": np.int64(4), "high": np.int32(1)}
    hook = trained(levels=levels, timeout=np.float32(60), policy="static")
    assert {type(value) for value in hook.values.values()} == {int}
    percent = trained(compressor="topk", levels={"low": np.float64(50), "high": np.float32(1)})
    assert percent.values == {"low": 50.0, "high": 1.0}


def test_a_state_of_other_shapes_or_levels_is_refused() -> None:
    saved = trained().state_dict()
    altered = copy.deepcopy(saved)
    name = next(name for name, owed in altered["residuals"].items() if owed is not None)
    altered["residuals"][name] = altered["residuals"][name].flatten()[:-1]
    hook = trained()
    with pytest.raises(ConfigError, match=f"damaged .*what is owed of layer '{name}' has shape"):
        hook.load_state_dict(altered)
    hook.load_state_dict(saved)
    other = trained(levels={"low": 3, "high": 1})
    with pytest.raises(ConfigError, match="its level low is 4, and here it is 3"):
        other.load_state_dict(saved)
    del saved["values"]  # of an older version
    other.load_state_dict(saved)


def test_a_number_that_no_float_holds_is_not_logged(tmp_path: Path) -> None:
    hook = regimes.attach(wrapped(), record=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"log: loss = 10*: expected a number"):
        hook.log(loss=10**400)
    hook.log(loss=10**300)


@pytest.mark.parametrize(
    "key",
    ["steps", "total", "traffic", "rows", "memories", "gauges", "lr", "pace"],
)
@pytest.mark.parametrize("value", ["x", 7, [1], torch.ones(2), {"a": 1}], ids=str)
def test_a_damaged_state_is_one_sentence_and_changes_nothing(key: str, value: Any) -> None:
    model = wrapped()
    hook = regimes.attach(model, levels={"low": 2, "high": 1})
    model(torch.ones(2, 5)).sum().backward()
    hook.epoch_end(lr=0.1)
    before = hook.state_dict()
    if not outcome.one_sentence(
        "states", lambda: hook.load_state_dict({**copy.deepcopy(before), key: value})
    ):
        assert repr(hook.state_dict()) == repr(before)
    model(torch.ones(2, 5)).sum().backward()
    hook.epoch_end(lr=0.1)


@pytest.mark.parametrize("folder", ["\0", Path("runs\0/mine")])
def test_no_folder_has_a_nul_in_its_name(folder: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"record = .*: expected a folder: no path has a NUL"):
        regimes.Recording(folder)
