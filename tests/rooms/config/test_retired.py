"""Retired fields of files and settings, and what earlier versions wrote into records.

Oracles: that, put there by hand; the same record without it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from configs import smoke
from runs import break_off, same_bits

import regimes
from regimes.base.config import RETIRED, RunConfig, from_dict, load_toml, override, to_dict
from regimes.base.errors import ConfigError
from regimes.compression import REGISTRY, make_compressor
from regimes.records import check_same_experiment, read_lines, select_runs
from regimes.records.earlier import as_present
from regimes.records.same_experiment import (
    identify_experiment,
    separate_experiments,
    sibling_difference,
)
from regimes.search import sweep

OTHER = {  # values that version 0.3 took of fields that have left
    "vmap": True,
    "model.positions": "learned",
    "optimizer.cycle_factor": 2,
    "optimizer.decay_vectors": True,
}
OF_PARTS = {"compressor.kernels": "compiled"}  # whose table its class checks
FIELDS = [path for path in RETIRED if path not in OF_PARTS]


@dataclasses.dataclass
class Own:
    kernels: str = "none"


def put(table: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The table, with a value at a dotted path."""
    name, _, key = path.rpartition(".")
    (table.setdefault(name, {}) if name else table)[key] = value
    return table


def of_version_3(table: dict[str, Any]) -> dict[str, Any]:
    """A plain configuration as version 0.3 wrote it."""
    return put(put(table, "vmap", False), "optimizer.cycle_factor", 1)


def edited(folder: Path, **values: Any) -> Path:
    """A record whose configuration has the fields of version 0.3, and some values."""
    header = json.loads((folder / "run.json").read_text())
    of_version_3(header["config"])
    for path, value in values.items():
        put(header["config"], path, value)
    (folder / "run.json").write_text(json.dumps(header))
    return folder


@pytest.mark.parametrize("path", FIELDS)
def test_no_class_has_a_retired_field(path: str) -> None:
    owner: Any = RunConfig()
    *tables, key = path.split(".")
    for name in tables:
        owner = getattr(owner, name)
    assert key not in {field.name for field in dataclasses.fields(owner)}


@pytest.mark.parametrize("path", FIELDS)
def test_a_value_is_one_sentence_with_what_to_do(path: str, tmp_path: Path) -> None:
    sentence = f"{path} = {{'a': 1}}: the field was retired in version {RETIRED[path].since}; "
    expected = f"{re.escape(sentence + RETIRED[path].instead)}$"
    with pytest.raises(ConfigError, match=expected):
        override(RunConfig(), [f"{path}={{a=1}}"])
    (tmp_path / "old.toml").write_text(f"{path} = {{a = 1}}\n")
    with pytest.raises(ConfigError, match=expected):
        load_toml(tmp_path / "old.toml")


def test_a_field_of_a_compressor_is_retired_where_its_class_has_none() -> None:
    classes = [REGISTRY.dataclass(name) for name in REGISTRY]
    assert "kernels" not in {field.name for kind in classes for field in dataclasses.fields(kind)}
    table = {"name": "quantise", "stochastic": False}
    instead = RETIRED["compressor.kernels"].instead
    sentence = f"compressor.kernels = 'compiled': the field was retired in version 0.5; {instead}"
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        make_compressor({**table, "kernels": "compiled"})
    assert from_dict(Own, {"kernels": "compiled"}, "compressor.").kernels == "compiled"


# -- records ---------------------------------------------------------------------------------


def test_names_of_before_are_read_under_the_present_ones() -> None:
    for word, now in {"none": "strict", "bfloat16": "bfloat16"}.items():
        assert as_present({"autocast": word}) == {"precision": now}
    for flag, names in ((True, ["tensorboard"]), (False, [])):
        assert as_present({"tensorboard": flag}) == {"reporters": names}
    assert as_present({"parcel_mb": 5.0, "precision": "none", "instruments": []}) == {
        "bucket_mb": 5.0,
        "precision": "none",
        "instruments": {},
    }


def test_a_field_that_left_is_dropped_with_the_value_of_records_without_it() -> None:
    config = of_version_3(to_dict(RunConfig()))
    assert from_dict(RunConfig, as_present(config)) == RunConfig()
    for path, other in (
        ("vmap", 0),
        ("optimizer.cycle_factor", 2),
        ("optimizer.cycle_factor", 1.0),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"unknown key '{path}'")):
            from_dict(RunConfig, as_present(put(of_version_3(to_dict(RunConfig())), path, other)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk and a branch with nothing changed."""
    root = tmp_path_factory.mktemp("made")
    trunk = regimes.run(smoke("checkpoint_keep=all", epochs=3), root / "trunk")
    regimes.branch(trunk, at=2, set={"name": "null"}, out=root / "branch")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "moved"))


def test_a_record_with_the_defaults_is_that_without(root: Path) -> None:
    config = smoke("checkpoint_keep=all", epochs=3)
    now = regimes.load(root / "trunk")
    then = regimes.load(edited(Path(shutil.copytree(root / "trunk", root / "then"))))
    check_same_experiment([now, then])
    assert identify_experiment(now) == identify_experiment(then)
    assert sibling_difference(to_dict(config), root / "another") == ""
    assert sweep.is_finished(then.folder, config)
    assert regimes.run(config, then.folder, resume=True).rows == now.rows


def test_a_run_of_version_3_is_continued(made: Path, tmp_path: Path) -> None:
    """To the bits of a run that was not stopped."""
    config = smoke("checkpoint_keep=all", epochs=3)
    break_off(config, tmp_path / "broken", 2)
    regimes.run(config, edited(tmp_path / "broken"), resume=True)
    same_bits(made / "trunk", tmp_path / "broken")


@pytest.mark.parametrize(("path", "value"), [*OTHER.items(), *OF_PARTS.items()])
def test_a_record_with_another_value_is_read_but_not_trained(
    path: str, value: Any, root: Path
) -> None:
    now = regimes.load(root / "trunk")
    folder = edited(Path(shutil.copytree(root / "trunk", root / "then")), **{path: value})
    then = regimes.load(folder)
    assert then.rows == now.rows
    assert regimes.plot([then]) is not None
    before, after = identify_experiment(now), identify_experiment(then)
    assert {k for k in {**before, **after} if before.get(k) != after.get(k)} == {path}
    assert all(path in run.variant for run in separate_experiments([now, then]))
    assert select_runs([now, then], [f"{path}={json.dumps(value)}"]) == [then]
    said = f"unknown key '{path}': " if path in OTHER else f"{path} = {value!r}: the field was"
    with pytest.raises(ConfigError, match=re.escape(said)):
        regimes.branch(folder, at=1, out=root / "other")


def test_a_branch_that_had_changed_one_is_read(root: Path) -> None:
    """As version 0.3 wrote it: the trunk has the default, and the branch's header says so."""
    edited(root / "trunk")
    folder = edited(root / "branch", **{"optimizer.cycle_factor": 2})
    header = json.loads((folder / "run.json").read_text())
    header["trunk"]["before"] = {"optimizer.cycle_factor": 1}
    (folder / "run.json").write_text(json.dumps(header))
    assert regimes.load(folder).rows[:1] == regimes.load(root / "trunk").rows[:1]
    assert len(read_lines(folder / "epochs.jsonl")) == 1
