"""Records of branches: composed with their trunk's rows, compared with its digests (oracle: the
record of the whole run)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from configs import smoke

import regimes
from regimes.base.errors import RecordError
from regimes.cli.machine import judge_record
from regimes.policies import make_policy
from regimes.policies.replay.replay import replay_rule
from regimes.records import load_all, pack_records, read_lines, splice_phases
from regimes.records.same_experiment import identify_experiment, separate_experiments

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk under ACCORDION, a pulse, a branch of other rate, and one with nothing changed."""
    root = tmp_path_factory.mktemp("made")
    instruments = ["instruments.msdr={}", "checkpoint_keep=all"]
    trunk = regimes.run(smoke(*instruments, epochs=5), root / "trunk")
    high = {"policy": "static", "policy.level": "high"}
    kept = {"checkpoint_keep": "all"}
    pulse = {**high, **kept, "name": "pulse"}
    regimes.branch(trunk, at=1, length=2, set=pulse, out=root / "pulse")
    slow = {**kept, "optimizer.lr": 0.1, "name": "slow"}
    regimes.branch(trunk, at=2, set=slow, out=root / "slow")
    regimes.branch(trunk, at=2, set={"name": "null"}, out=root / "null")
    regimes.branch(root / "slow", at=3, set={**high, "name": "second"}, out=root / "second")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "moved"))


def test_the_rows_of_a_branch_are_its_trunks_and_its_own(root: Path) -> None:
    trunk, null = regimes.load(root / "trunk"), regimes.load(root / "null")
    assert null.rows == trunk.rows
    assert null.details == trunk.details
    assert list(null.epochs["total_floats"]) == list(trunk.epochs["total_floats"])
    assert null.epochs["seconds_compute"].notna().all()
    assert [row["epoch"] for row in read_lines(root / "null/epochs.jsonl")] == [2, 3, 4]
    slow = regimes.load(root / "slow").rows
    assert slow[0] == trunk.rows[0]
    assert slow[1] == {**trunk.rows[1], "next_lr": slow[2]["lr"]}
    second = regimes.load(root / "second").rows
    assert second[:3] == slow[:3]
    for rows in (slow, second, regimes.load(root / "pulse").rows):
        rates = [(a["next_lr"], b["lr"]) for a, b in pairwise(rows)]
        assert all(known == rate for known, rate in rates)


def test_a_branch_is_another_experiment_unless_nothing_was_changed(root: Path) -> None:
    runs = {run.name: run for run in load_all(root)}
    assert len(runs) == 5
    known = [identify_experiment(run) for run in runs.values()]
    same = [
        name
        for name, run in runs.items()
        if identify_experiment(run) == identify_experiment(runs["accordion"])
    ]
    assert same == ["accordion", "null"] or same == ["null", "accordion"]
    assert sum(one == other for one in known for other in known) == 5 + 2
    trunk = regimes.load(root / "trunk")
    with pytest.raises(RecordError, match="would count twice"):
        separate_experiments([trunk, _named(root / "null", "accordion")])
    apart = separate_experiments([trunk, _named(root / "pulse", "accordion")])
    assert len({run.name for run in apart}) == 2


def _named(folder: Path, name: str) -> regimes.Record:
    record = regimes.load(folder)
    record.config["name"] = name
    return record


def test_a_policy_replayed_over_a_branch_decides_as_it_did(root: Path) -> None:
    regimes.branch(
        root / "pulse",
        at=3,
        set={"policy": "accordion", "policy.interval": 2, "policy.eta": 0.2},
        out=root / "follows",
    )
    for name in ("null", "slow", "follows", "trunk"):
        record = regimes.load(root / name)
        replayed = replay_rule(record, make_policy(record.config["policy"]))
        first = (record.config.get("branch") or {"at": 0})["at"]
        for epoch, group in replayed.groupby("epoch"):
            if epoch >= first:
                row = record.rows[epoch]
                compressed = [
                    level
                    for level, layer in zip(
                        row["layers"]["level"], record.header["layers"], strict=True
                    )
                    if layer["compressed"]
                ]
                assert list(group["level"]) == compressed, (name, epoch)


@pytest.mark.slow
def test_every_command_reads_a_branch(root: Path, command: Command) -> None:
    for words in (
        ["watch", str(root), "--once"],
        ["watch", str(root / "pulse"), "--once"],
        ["detect", str(root / "pulse"), "--detectors", "norm-change:interval=1"],
        ["cost", str(root / "pulse")],
        ["report", str(root), "--out", "page.html"],
        ["report", str(root / "pulse"), "--out", "one.html"],
        ["figure", "curves", str(root), "--out", "figures"],
        ["doctor", str(root / "pulse"), str(root / "second")],
    ):
        done = command(*words)
        assert done.returncode == 0, (words, done.stderr)


def test_an_archive_holds_a_branch_with_its_trunk(root: Path, tmp_path: Path) -> None:
    assert pack_records(root, tmp_path / "all.tar.xz") == 5
    packed = {run.name: run.rows for run in load_all(tmp_path / "all.tar.xz")}
    assert packed == {run.name: run.rows for run in load_all(root)}
    with pytest.raises(RecordError, match=r"without its trunk .*trunk: pack a folder that holds"):
        pack_records(root / "pulse", tmp_path / "one.tar.xz")


def edit_row(root: Path) -> None:
    path = root / "trunk/epochs.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    row = json.loads(first)
    row["train_loss"] += 1
    path.write_text("".join([json.dumps(row) + "\n", *rest]))


def edit_configuration(root: Path) -> None:
    path = root / "trunk/run.json"
    header = json.loads(path.read_text())
    header["config"]["optimizer"]["weight_decay"] = 0.5
    path.write_text(json.dumps(header))


def cut(root: Path) -> None:
    path = root / "trunk/epochs.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda root: shutil.rmtree(root / "trunk"), "which is missing"),
    "edited": (edit_row, "whose epochs.jsonl has changed since"),
    "reconfigured": (edit_configuration, "whose configuration has changed since"),
    "shortened": (cut, "whose epochs.jsonl has changed since"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_or_missing_trunk_is_one_sentence(name: str, root: Path) -> None:
    change, words = CHANGES[name]
    change(root)
    with pytest.raises(RecordError, match=words) as error:
        regimes.load(root / "slow")
    assert "\n" not in str(error.value)
    assert judge_record(root / "slow")[0] == "unreadable"
    with pytest.raises(RecordError):  # nor is it continued
        regimes.branch(root / "trunk", at=2, set={"optimizer.lr": 0.1}, out=root / "slow")


def test_later_rows_of_a_trunk_are_not_its_branches(root: Path) -> None:
    path = root / "trunk/epochs.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert len(regimes.load(root / "slow").rows) == 5


@pytest.mark.parametrize("of", ["/", ".", "../slow", "../second", "x" * 2000, ""])
def test_a_strangers_path_to_a_trunk(of: str, root: Path) -> None:
    path = root / "slow/run.json"
    header = json.loads(path.read_text())
    header["config"]["branch"]["of"] = of
    path.write_text(json.dumps(header))
    with pytest.raises(RecordError) as error:
        regimes.load(root / "slow")
    assert "\n" not in str(error.value)


def test_after_a_pulse_the_trunks_configuration_of_that_unit_returns() -> None:
    """Which may have changed while the pulse lasted."""
    trunk = [(0, {"lr": 1}), (2, {"lr": 2}), (4, {"lr": 3}), (7, {"lr": 4})]
    pulse = {"lr": 9, "branch": {"at": 1, "length": 4}}
    expected = [(0, {"lr": 1}), (1, pulse), (5, {"lr": 3}), (7, {"lr": 4})]
    assert splice_phases(trunk, pulse) == expected
