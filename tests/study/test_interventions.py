"""Interventions: where the loop calls them, their tables and states (oracle: a list of the calls,
the same run in another way)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import states
from configs import smoke
from copied_models import SGD, every, text
from runs import break_off, same_bits, same_weights

import regimes
from regimes.config import RunConfig, from_dict, override, to_dict
from regimes.config.interventions import registered_interventions
from regimes.errors import ConfigError
from regimes.job.upgrade import upgrade_state
from regimes.training import checkpoint
from regimes.training.interventions import Circumstances, Intervention, InterventionConfig, Job

ROOT = Path(__file__).parents[2]
SHORT = "policy=static", "data.train_size=64", "optimizer.decay_epochs=[]"


@dataclass(frozen=True)
class Logged(InterventionConfig):
    """Writes down each call."""

    calls: ClassVar[list[Any]] = []
    text: str = ""

    def start(self, job: Job) -> Intervention:
        return Log(self)


class Log(Intervention):
    def __init__(self, table: Logged) -> None:
        self.table, self.units = table, 0

    def before_unit(self, unit: int) -> None:
        Logged.calls.append(unit)

    def before_step(self, unit: int, step: int) -> None:
        Logged.calls.append((unit, step))

    def after_step(self) -> None:
        Logged.calls.append("after")

    def columns(self) -> dict[str, Any]:
        self.units += 1
        return {"watched": {"text": self.table.text, "units": self.units}}

    def state_dict(self) -> dict[str, Any]:
        return {"units": self.units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.units = state.get("units", 0)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setitem(registered_interventions(), "watched", Logged)
    Logged.calls.clear()
    return Logged.calls


def columns(folder: Path) -> list[Any]:
    return [row["watched"] for row in regimes.load(folder).rows]


@pytest.mark.parametrize("local", [(), (every(3),)], ids=["shared", "local"])
def test_the_loop_calls_it_in_fixed_places(
    local: tuple[str, ...], logged: list[Any], tmp_path: Path
) -> None:
    regimes.run(text("steps=4", "unit_steps=2", "watched={text='a'}", *SGD, *local), tmp_path)
    steps = [[(unit, step), "after"] for unit, step in ((0, 0), (0, 1), (1, 2), (1, 3))]
    assert logged == [0, *steps[0], *steps[1], 1, *steps[2], *steps[3]]
    assert columns(tmp_path) == [{"text": "a", "units": 1}, {"text": "a", "units": 2}]


def test_a_run_that_is_only_watched_is_the_run_without(logged: list[Any], tmp_path: Path) -> None:
    c = smoke(*SHORT, epochs=2)
    regimes.run(c, tmp_path / "without")
    regimes.run(override(c, ["watched={}"]), tmp_path / "with")
    same_weights(tmp_path / "without", tmp_path / "with")
    assert logged


def test_its_state_is_resumed_and_starts_anew_with_another_table(
    logged: list[Any], tmp_path: Path
) -> None:
    c = smoke(*SHORT, "watched={text='a'}", "checkpoint_keep=all", epochs=3)
    break_off(c, tmp_path / "run", 2)
    regimes.run(c, tmp_path / "run", resume=True)
    assert [column["units"] for column in columns(tmp_path / "run")] == [1, 2, 3]
    for name, found in (("a", 3), ("b", 1)):
        folder = tmp_path / name
        regimes.branch(
            tmp_path / "run", at=2, set={"watched.text": name, "optimizer.lr": 0.1}, out=folder
        )
        assert columns(folder)[-1] == {"text": name, "units": found}
    regimes.branch(tmp_path / "run", at=2, set={"watched": None}, out=tmp_path / "none")
    assert "watched" not in regimes.load(tmp_path / "none").rows[-1]


def test_states_of_version_0_3_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have an intervention's state beside the other parts."""
    c = smoke(*SHORT, "pruning={epoch=1,share=0.5}", epochs=4)
    regimes.run(c, tmp_path / "whole")
    break_off(c, tmp_path / "old", 2)
    load = checkpoint.load

    def older(folder: Path) -> Any:
        found = load(folder)
        assert found is not None
        old = states.as_of_0_3(found[1])
        assert old["shared"]["pruning"]
        return found[0], upgrade_state(old)

    monkeypatch.setattr(checkpoint, "load", older)
    regimes.run(c, tmp_path / "old", resume=True)
    same_bits(tmp_path / "whole", tmp_path / "old")


# -- tables ----------------------------------------------------------------------------------


def test_a_table_stands_beside_the_fields_with_all_of_its_own() -> None:
    c = override(RunConfig(), ["pruning.epoch=3"])
    plain = to_dict(c)
    assert plain["pruning"] == {"epoch": 3, "share": 0.9}
    assert "interventions" not in plain
    assert from_dict(RunConfig, plain) == c
    assert override(c, ["pruning=none"]) == RunConfig()
    assert to_dict(replace(c, interventions={})) == to_dict(RunConfig())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("churn.unit=3", "unknown key 'churn.unit': Known: absent, away"),
        ("chrun={}", "unknown key 'chrun': did you mean 'churn'"),
        ("interventions={churn={}}", "unknown key 'interventions'"),
    ],
)
def test_a_wrong_table_is_a_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        override(RunConfig(), [setting])


def test_a_class_that_is_none_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registered_interventions(), "circumstances", Circumstances)
    with pytest.raises(ConfigError, match="circumstances: the class Circumstances is no interv"):
        regimes.run(smoke("circumstances={}"), "nowhere")


def test_without_its_package_a_run_is_refused_and_its_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = smoke(*SHORT, "churn={absent=[1]}", "checkpoint_keep=all", epochs=2)
    regimes.run(c, tmp_path / "run")
    seen = regimes.load(tmp_path / "run")
    before = [seen.epochs, regimes.summary([seen])]
    monkeypatch.delitem(registered_interventions(), "churn")
    record = regimes.load(tmp_path / "run")
    assert record.epochs["present"].tolist() == [3.0, 3.0]
    assert record.config["churn"]["absent"] == [1]
    assert all(
        a.equals(b) for a, b in zip(before, [record.epochs, regimes.summary([record])], strict=True)
    )
    sentence = "unknown key 'churn': .* If a package offers this table, install the package"
    with pytest.raises(ConfigError, match=sentence):
        regimes.branch(tmp_path / "run", at=1, set={"seed": 0}, out=tmp_path / "branch")
    with pytest.raises(ConfigError, match=sentence):
        from_dict(RunConfig, record.config)


def test_the_toolkit_knows_no_intervention_but_a_column_of_its_records() -> None:
    names = re.compile("|".join(registered_interventions()), re.IGNORECASE)
    users = {
        path.relative_to(ROOT / "regimes").as_posix()
        for path in (ROOT / "regimes").rglob("*.py")
        if names.search(path.read_text())
    }
    assert {"churn", "pruning"} <= {*registered_interventions()}
    assert users == {"records/schema.py", "records/reader.py"}
