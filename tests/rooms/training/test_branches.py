"""Branches of a run (oracle: with nothing changed, the trunk's bits; else a resumed run)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from configs import gpt, lstm, smoke
from corpora import random_walk
from runs import same_bits, same_weights, stop_after
from torch import Tensor, nn

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.records import read_lines
from regimes.records.same_experiment import identify_experiment


def lines(folder: Path) -> list[bytes]:
    return (folder / "epochs.jsonl").read_bytes().splitlines()


def ends_as_its_trunk(branch: Path, trunk: Path, at: int) -> None:
    """The same bits from unit ``at`` on, and the same rows when read."""
    assert lines(branch) == lines(trunk)[at:]
    same_weights(branch, trunk)
    assert regimes.load(branch).rows == regimes.load(trunk).rows


NULL: dict[str, RunConfig] = {
    "powersgd": smoke(),
    "two of three passes": smoke("union_pass=false"),
    "acp-sgd": smoke("compressor=acp-sgd"),
    "topk": smoke("compressor=topk", "levels={low=20, high=5}"),
    "randomk": smoke("compressor=randomk", "levels={low=20, high=5}"),
    "dct-topk": smoke("compressor=dct-topk", "levels={low=20, high=5}"),
    "sign": smoke("compressor=sign", "levels={low=1, high=1}"),
    "quantise": smoke("compressor=quantise", "levels={low=8, high=4}"),
    "cast": smoke("compressor=cast", "levels={low='bf16', high='bf16'}"),
    "dense": smoke("compressor=dense", "levels={}", "policy={name='static', level='dense'}"),
    "low-pass": smoke("compressor=low-pass", "levels={low=0.5, high=0.1}"),
    "adamw": smoke("optimizer.name=adamw", "optimizer.lr=0.01"),
    "muon": smoke("optimizer.name=muon", "optimizer.lr=0.01", "dtype=float32"),
    "no momentum": smoke("optimizer.momentum=0"),
    "local steps": smoke("sync_policy={name='static', level='7'}", "policy=static"),
    "local, DiLoCo": smoke(
        "sync_policy={name='post-local', before='1', after='4'}",
        "policy=static",
        "outer={lr=0.7, momentum=0.9, nesterov=true}",
    ),
    "batches": smoke(
        "batch_levels={low=8, high=16}", "batch_policy={name='accordion-batch', interval=1}"
    ),
    "units of steps": smoke("unit_steps=5", "steps=18", "epochs=6"),
    "deficit": smoke("deficit={name='blur', windows=[[1, 3]]}"),
    "gpt": gpt("unit_steps=6"),
}


@pytest.mark.parametrize("name", NULL)
def test_with_nothing_changed_a_branch_ends_in_the_trunks_bits(name: str, tmp_path: Path) -> None:
    short = [] if name in ("gpt", "units of steps") else ["data.train_size=64"]  # two steps
    config = override(NULL[name], ["checkpoint_keep=all", "data.test_size=40", *short])
    trunk = regimes.run(config, tmp_path / "trunk")
    for at in (0, 2):
        out = tmp_path / f"from {at}"
        regimes.branch(trunk, at=at, out=out)
        ends_as_its_trunk(out, tmp_path / "trunk", at)
    out = tmp_path / "pulse"
    regimes.branch(tmp_path / "trunk", at=1, length=1, out=out)
    ends_as_its_trunk(out, tmp_path / "trunk", 1)


def test_a_text_with_states_carried_on(tmp_path: Path) -> None:
    config = lstm(random_walk(tmp_path), "checkpoint_keep=[1]")
    regimes.run(config, tmp_path / "trunk")
    regimes.branch(tmp_path / "trunk", at=1, out=tmp_path / "branch")
    ends_as_its_trunk(tmp_path / "branch", tmp_path / "trunk", 1)


# -- units that are left out -----------------------------------------------------------------

LEFT_OUT: dict[str, list[str]] = {
    "powersgd": [],
    "topk, adamw": [
        "compressor=topk",
        "levels={low=20, high=5}",
        "optimizer={name='adamw', lr=0.01}",
    ],
    "dense, muon": ["policy.level=dense", "optimizer={name='muon', lr=0.01}", "dtype=float32"],
    "local steps": [
        "sync_policy={name='static', level='5'}",
        "outer={lr=0.7, momentum=0.9, nesterov=true}",
    ],
    "batches": [
        "batch_levels={low=8, high=16}",
        "batch_policy={name='static', level='high'}",
    ],
}
SAME = ["policy=static", "data.reshuffle=false", "data.augment=false", "optimizer.warmup_from=none"]


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("at", [0, 2])
def test_units_left_out_make_the_run_that_never_had_them(
    name: str, at: int, tmp_path: Path
) -> None:
    """A run that is two units shorter, and whose rate falls two units earlier, as all epochs have
    one order of the data here."""
    settings = [*SAME, *LEFT_OUT[name], "checkpoint_keep=all"]
    long, short = (
        smoke(*settings, f"optimizer.decay_epochs=[{decay}]", epochs=epochs)
        for epochs, decay in ((6, 5), (4, 3))
    )
    trunk = regimes.run(long, tmp_path / "trunk")
    never = regimes.run(short, tmp_path / "never")
    pulse = regimes.branch(trunk, at=at, length=2, skip=True, out=tmp_path / "pulse")
    same_weights(tmp_path / "pulse", tmp_path / "never")
    assert pulse.rows[:at] == trunk.rows[:at] == never.rows[:at] or at == 0
    for left in pulse.rows[at : at + 2]:
        assert (left["steps"], left["train_loss"], left["bytes"]) == (0, None, 0)
        assert left["metric"] == (trunk.rows[at - 1]["metric"] if at else left["metric"])
    for ours, theirs in zip(pulse.rows[at + 2 :], never.rows[at:], strict=True):
        for key in ("lr", "train_loss", "test_loss", "metric", "bytes", "statistics", "steps"):
            assert ours[key] == theirs[key], key  # type: ignore[literal-required]
    assert identify_experiment(pulse) != identify_experiment(trunk)


def test_units_left_out_go_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = regimes.run(smoke("checkpoint_keep=[1]"), tmp_path / "trunk")
    left_out: dict[str, Any] = {"at": 1, "length": 2, "skip": True}
    regimes.branch(trunk, **left_out, out=tmp_path / "whole")
    for stop in (2, 3):
        stop_after(stop, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            regimes.branch(trunk, **left_out, out=tmp_path / f"stopped {stop}")
        monkeypatch.undo()
        regimes.branch(trunk, **left_out, out=tmp_path / f"stopped {stop}")
        same_bits(tmp_path / "whole", tmp_path / f"stopped {stop}")


# -- what changes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trunks") / "trunk"
    regimes.run(smoke("checkpoint_keep=[1, 2]", "policy=static"), out)
    return out


CHANGED: dict[str, dict[str, Any]] = {
    "levels": {"levels.high": 2, "policy.level": "high"},
    "accordion": {"policy": "accordion", "policy.interval": 1},
    "compressor": {"compressor": "topk", "levels.low": 8, "levels.high": 4},
    "no feedback": {"compressor.error_feedback": False},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 0.01},
    "decay": {"optimizer.weight_decay": 0.1},
    "momentum": {"optimizer.momentum": 0.0, "optimizer.nesterov": False},
    "rate": {"optimizer.schedule": "cosine"},
    "batch": {"batch_size": 5},
    "batch policy": {
        "batch_levels": {"low": 8, "high": 16},
        "batch_policy": {"name": "accordion-batch", "interval": 1},
    },
    "local steps": {"sync_policy": {"name": "static", "level": "3"}},
    "qsr": {
        "sync_policy": {"name": "qsr", "alpha": 1.0, "base": 2},
        "compressor": "dense",
        "levels": {},
        "policy": {"name": "static", "level": "dense"},
    },
    "deficit": {"deficit": {"name": "noise", "windows": [[0, 9]]}},
    "gradient noise": {"deficit": {"name": "gradient-noise", "windows": [[2, 3]]}},
    "signal": {"signal": "global", "policy": "accordion", "policy.interval": 1},
    "instruments": {"instruments.msdr": {}},
    "longer": {"epochs": 5},
    "single": {"precision": "strict", "union_pass": False},
    "name": {"name": "other", "checkpoint_every": 2},
    "several": {
        "compressor": "topk",
        "levels.low": 8,
        "levels.high": 4,
        "optimizer.momentum": 0.0,
        "optimizer.nesterov": False,
        "batch_size": 5,
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "several" else pytest.mark.slow) for x in CHANGED],
)
def test_changes_that_a_state_allows(name: str, trunk: Path, tmp_path: Path) -> None:
    """As if the trunk had changed its own configuration: rows go on, weights and floats differ."""
    whole = regimes.load(trunk)
    record = regimes.branch(trunk, at=2, set=CHANGED[name], out=tmp_path / "branch")
    assert record.finished
    assert record.rows[0] == whole.rows[0]
    told = [e for e in read_lines(tmp_path / "branch/events.jsonl") if e["event"] == "changed"]
    assert len(told) == (name not in ("name", "instruments"))  # these decide no numbers
    if name == "no feedback":
        assert told[0]["state"]["residuals"].startswith("dropped")
    if name in ("compressor", "qsr", "several"):
        assert told[0]["state"]["memories"] == "started anew"
        assert told[0]["state"]["residuals"].startswith("kept")
    if name in ("adamw", "momentum", "several"):
        assert told[0]["state"]["momenta"] == "started anew"
    same = name in ("name", "instruments", "single", "signal", "longer")
    loss = record.rows[3]["train_loss"], whole.rows[3]["train_loss"]
    assert same == (loss[0] == pytest.approx(loss[1], rel=1e-9)), loss
    if name != "longer":
        pulse = regimes.branch(trunk, at=1, length=1, set=CHANGED[name], out=tmp_path / "pulse")
        assert pulse.finished
        assert pulse.rows[3]["lr"] == whole.rows[3]["lr"]
        assert pulse.rows[3]["batch_size"] == whole.rows[3]["batch_size"]
        assert pulse.rows[3]["layers"]["level"] == whole.rows[3]["layers"]["level"]


@pytest.mark.parametrize(
    "table",
    [
        {"name": "adaqs"},
        {"name": "error-ladder"},
        {"name": "accordion-ladder"},
        {"name": "rate-ladder"},
        {"name": "l-greco", "base": {"name": "accordion", "interval": 1}},
        {"name": "gravac"},
        {"name": "detected", "detector": {"name": "eigenvalue-change"}},
    ],
    ids=lambda table: table["name"],
)
def test_a_policy_takes_over_from_another(
    table: dict[str, Any], trunk: Path, tmp_path: Path
) -> None:
    """The trunk has measured none of the statistics that it reads."""
    levels = {"low": 4, "mid": 2, "high": 1}
    probe = {"images": 40, "batch": 20, "probes": 2}
    change = {"policy": table, "levels": levels}
    if table["name"] == "detected":
        change["instruments.curvature"] = probe
    assert regimes.branch(trunk, at=2, set=change, out=tmp_path / "branch").finished


def test_a_branch_measures_the_error_of_its_own_levels(tmp_path: Path) -> None:
    """One is renamed, and one dropped; of the other the measurement goes on."""
    measured = "instruments.error={}", "policy={name='static', level='low'}", "checkpoint_keep=[2]"
    trunk = regimes.run(smoke("levels={low=4, high=1, mid=2}", *measured), tmp_path / "trunk")
    change = {"levels": {"low": 4, "least": 1}}
    branch = regimes.branch(trunk, at=2, set=change, out=tmp_path / "branch")
    for row, same in zip(branch.rows[2:], trunk.rows[2:], strict=True):
        errors = {k: float(x or 0) for k, x in row["model"].items() if k.startswith("error:")}
        assert errors.keys() == {"error:low", "error:least"}
        assert errors["error:low"] == same["model"]["error:low"]
        assert errors["error:least"] > errors["error:low"] > 0


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": (
        {"seed": 3},
        {},
        "seed = 3: expected 0 in a branch: a branch shares",
    ),
    "workers": ({"workers": 2}, {}, "workers = 2: expected 4"),
    "width": ({"model.width": 16}, {}, r"model\.width = 16: expected 8"),
    "data": ({"data.train_size": 80}, {}, r"data\.train_size = 80: expected 120"),
    "dtype": ({"dtype": "float32"}, {}, "dtype = 'float32'"),
    "units": ({"unit_steps": 5}, {}, "unit_steps = 5: expected none"),
    "longer pulse": ({"epochs": 6}, {"length": 1}, "epochs = 6: expected 4 in a branch with a len"),
    "no checkpoint": ({}, {"at": 3}, r"no checkpoint before unit 3 \(it has .*\): train it in"),
    "no unit": ({}, {"at": 4}, r"branch\.at = 4: expected one of the run's 4 units"),
    "negative": ({}, {"at": -1}, r"branch\.at = -1"),
    "no length": ({}, {"length": 0}, r"branch\.length = 0: expected at least 1"),
    "left out for ever": ({}, {"skip": True}, r"branch\.length = None: expected a number"),
    "left out and changed": (
        {"optimizer.lr": 1.0},
        {"skip": True, "length": 1},
        "none with",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_branch_cannot_change_is_one_sentence(
    name: str, trunk: Path, tmp_path: Path
) -> None:
    changed, where, words = REFUSED[name]
    if name == "no checkpoint":
        trunk = Path(shutil.copytree(trunk, tmp_path / "trunk"))
        shutil.rmtree(trunk / "checkpoints/epoch-0003")
    with pytest.raises((ConfigError, RecordError), match=words) as error:
        regimes.branch(trunk, **{"at": 2, **where}, set=changed, out=tmp_path / "branch")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "branch").exists()


def test_a_folder_with_another_run_is_refused(trunk: Path, tmp_path: Path) -> None:
    regimes.branch(trunk, at=2, set=["policy.level=high"], out=tmp_path / "branch")
    with pytest.raises(RecordError, match="differs in policy"):
        regimes.branch(trunk, at=2, out=tmp_path / "branch")
    with pytest.raises(RecordError, match="differs in branch"):
        regimes.branch(trunk, at=1, set=["policy.level=high"], out=tmp_path / "branch")


def test_within_a_round_of_local_steps_the_workers_cannot_become_one(tmp_path: Path) -> None:
    local = ["sync_policy={name='static', level='50'}", "policy=static", "checkpoint_keep=[2]"]
    regimes.run(smoke(*local), tmp_path / "trunk")
    with pytest.raises(ConfigError, match="between two synchronisations"):
        regimes.branch(tmp_path / "trunk", at=2, set={"sync_policy": None}, out=tmp_path / "branch")


# -- what a trunk keeps ----------------------------------------------------------------------


def test_checkpoints_that_are_asked_for_stay(tmp_path: Path) -> None:
    def there() -> list[int]:
        return sorted(int(p.name[-4:]) for p in (tmp_path / "run/checkpoints").iterdir())

    regimes.run(smoke("checkpoint_keep=[0, 2, 4]"), tmp_path / "run")
    assert there() == [2, 3, 4]
    regimes.run(smoke(), tmp_path / "run", resume=True)  # it asks for none
    assert there() == [2, 3, 4]
    for keep in ("some", "[5]", "[-1]", "3", "['all']"):
        with pytest.raises(ConfigError, match="checkpoint_keep"):
            regimes.run(smoke(f"checkpoint_keep={keep}"), tmp_path / "wrong")


def test_a_checkpoint_in_the_list_is_written_between_others(tmp_path: Path) -> None:
    config = smoke("checkpoint_keep=[1]", "checkpoint_every=4")
    regimes.run(config, tmp_path / "run")
    assert {p.name for p in (tmp_path / "run/checkpoints").iterdir()} == {
        "epoch-0001",
        "epoch-0004",
    }


# -- a model and data of one's own -------------------------------------------------------------


class Output(NamedTuple):
    """As of a Hugging Face model."""

    logits: Tensor


class Causal(nn.Module):
    """A model of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.out(self.embed(input_ids)))


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(48, *shape, generator=torch.Generator().manual_seed(0))
    return x, x.flatten(1)[:, :3].argmax(1)


TEXT = [{"input_ids": [(i + j) % 11 for j in range(9)]} for i in range(48)]
OWN: dict[str, dict[str, Any]] = {
    "tabular": {
        "model": lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)),
        "train_data": drawn(6),
        "test_data": drawn(6),
    },
    "tokens": {"model": Causal, "train_data": TEXT, "test_data": TEXT},
}


def simulated(out: Path, own: dict[str, Any], policy: dict[str, Any]) -> regimes.Record:
    return regimes.simulate(
        **own,
        out=out,
        workers=2,
        batch_size=8,
        epochs=4,
        policy=policy,
        optimizer={"lr": 0.05},
        set={"checkpoint_keep": [1, 2]},
    )


@pytest.mark.parametrize("name", OWN)
def test_a_run_of_an_own_model_is_branched(name: str, tmp_path: Path) -> None:
    """With nothing changed the trunk's bits; a pulse has those of a run with its windows."""
    own, trunk = OWN[name], tmp_path / "trunk"
    simulated(trunk, own, {"name": "static", "level": "low"})
    regimes.branch(trunk, at=2, out=tmp_path / "null", **own)
    ends_as_its_trunk(tmp_path / "null", trunk, 2)
    changed: dict[str, Any] = {"policy": {"name": "static", "level": "high"}}
    regimes.branch(trunk, at=1, length=2, set=changed, out=tmp_path / "pulse", **own)
    simulated(tmp_path / "windows", own, {"name": "windows", "windows": [[0, 1], [3, 4]]})
    pulse, whole = (regimes.load(tmp_path / run) for run in ("pulse", "windows"))
    for ours, theirs in zip(pulse.rows, whole.rows, strict=True):
        assert ours["layers"]["level"] == theirs["layers"]["level"]
        assert (ours["train_loss"], ours["bytes"]) == (theirs["train_loss"], theirs["bytes"])
    assert pulse.rows[2]["bytes"] < regimes.load(trunk).rows[2]["bytes"]
    same_weights(tmp_path / "pulse", tmp_path / "windows")


def test_a_branch_of_an_own_model_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, at = OWN["tabular"], {"at": 1, "out": tmp_path / "branch"}
    trunk = simulated(tmp_path / "trunk", own, {"name": "static", "level": "low"})
    stop_after(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        regimes.branch(trunk, **at, **own)
    monkeypatch.undo()
    assert len(lines(tmp_path / "branch")) == 2
    regimes.branch(trunk, **at, **own)
    ends_as_its_trunk(tmp_path / "branch", tmp_path / "trunk", 1)


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "none": (dict.fromkeys(OWN["tabular"]), "pass model, train_data and test_data"),
    "model": ({"model": lambda: nn.Linear(5, 3)}, "does not take inputs"),
    "sizes": (
        {"model": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))},
        "trained with another model",
    ),
    "weights": ({"model": nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))}, "weights"),
    "data": ({"train_data": drawn(7)}, "does not take inputs"),
    "samples": ({"train_data": (drawn(6)[0] + 1, drawn(6)[1])}, "trained on other data"),
    "loss": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "trained with the loss"),
    "no loss": ({"loss": 3}, "loss = 3"),
    "arguments": ({"model": nn.Linear}, "needs in_features, out_features"),
}


def test_another_model_or_other_data_are_no_branch(tmp_path: Path) -> None:
    own = OWN["tabular"]
    trunk = simulated(tmp_path / "trunk", own, {"name": "static", "level": "low"})
    for changes, why in OTHER.values():
        with pytest.raises(RegimesError, match=why):
            regimes.branch(trunk, at=1, out=tmp_path / "branch", **own | changes)
        assert not (tmp_path / "branch").exists()


def test_a_preset_has_its_own_model(trunk: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model and data are those that its configuration names"):
        regimes.branch(trunk, at=1, out=tmp_path / "branch", **OWN["tabular"])
