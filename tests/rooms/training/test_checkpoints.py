"""When a checkpoint is written: by units, by time, at the end; every process as process 0 says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke as config

import regimes
from regimes.base.config import override, to_dict
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.job.move_residuals import residuals_for
from regimes.job.state import FORMAT
from regimes.job.termination import GracefulShutdown
from regimes.training import checkpoint, loop
from regimes.training.build import Run, prepare_run


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7]),
        (["checkpoint_seconds=20"], [2, 4, 6, 7]),
        (["checkpoint_seconds=25"], [3, 6, 7]),
        (["checkpoint_seconds=1e9"], [7]),
        (["checkpoint_every=2", "checkpoint_seconds=25"], [4, 7]),
        (["checkpoint_every=3", "checkpoint_seconds=0"], [3, 6, 7]),
    ],
)
def test_checkpoints_by_units_and_by_time(
    settings: list[str], saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unit takes ten seconds."""
    now, found, unit = [0.0], [], loop._train_unit

    def slow(run: Run, number: int, *rest: Any) -> Any:
        if number == 0:
            run.saved = 0.0  # it has started just now
        now[0] += 10.0
        return unit(run, number, *rest)

    monkeypatch.setattr(loop, "_train_unit", slow)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(loop, "save_run", lambda run, out: found.append(len(run.rows)))
    short = ["policy=static", "data.train_size=32", "data.test_size=20"]  # a step each
    c = override(config(epochs=7), [*short, *settings])
    regimes.run(c, tmp_path / "run")
    assert found == saved


@pytest.mark.parametrize("due", [True, False])
def test_all_processes_save_when_process_0_does(due: bool) -> None:
    run = prepare_run(config())
    run.header["config"] = to_dict(run.config)
    spent = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    run.world.gather_object = lambda mine: [(False, due, 5, spent[0]), (True, not due, 5, spent[1])]
    assert loop._end_of_unit_consensus(run, 0, GracefulShutdown(), {})[:2] == (True, due)


# -- what else may lie there ------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of five epochs."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "is_complete", lambda header, rows: len(rows) == 3)
        regimes.run(config(epochs=5), out)
    return out


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_a_copy_of_a_checkpoint_is_left_alone(out: Path) -> None:
    folder = out / "checkpoints"
    others = ("epoch-0003.bak", "epoch-0003 (copy)", "epoch-", "epoch-9", "epoch-x", "epoch-00003.")
    for name in others:
        shutil.copytree(folder / "epoch-0003", folder / name)
    (folder / "epoch-0003.txt").write_text("notes")
    assert len(regimes.run(config(epochs=5), out, resume=True).rows) == 5
    found = {path.name for path in folder.iterdir()}
    assert found == {"epoch-0004", "epoch-0005", *others, "epoch-0003.txt"}


def test_what_a_kill_has_left_is_not_part_of_the_checkpoint(out: Path) -> None:
    partial = out / "checkpoints/epoch-0004.partial"
    partial.mkdir()
    (partial / ".process-0.pt.0123456789abcdef.tmp").write_bytes(b"half")
    (partial / "process-7.pt").write_bytes(b"of another number of processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "is_complete", lambda header, rows: len(rows) == 4)
        regimes.run(config(epochs=5), out, resume=True)
    found = {path.name for path in (out / "checkpoints/epoch-0004").iterdir()}
    assert found == {"process-0.pt", "manifest.json"}


def replaced(content: Any) -> Callable[[Path], None]:
    """The state of process 0 with other content, its checksum in order."""

    def change(folder: Path) -> None:
        file = folder / "process-0.pt"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest = {"epochs": 3, "files": {"process-0.pt": digest}}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


def manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_text(text)


ODD: dict[str, Callable[[Path], object]] = {
    "an empty file": replaced(b""),
    "no state": replaced(b"PK" * 100),
    "a list": replaced([1, 2]),
    "no shared part": replaced({"format": FORMAT, "parts": [{"workers": [0]}]}),
    "no own part": replaced({"format": FORMAT, "model": {}, "parts": []}),
    "a folder": lambda folder: (
        (folder / "process-0.pt").unlink() or (folder / "process-0.pt").mkdir()
    ),
    "a pipe": lambda folder: (
        (folder / "process-0.pt").unlink() or os.mkfifo(folder / "process-0.pt")
    ),
    "a pipe for a manifest": lambda folder: (
        (folder / "manifest.json").unlink() or os.mkfifo(folder / "manifest.json")
    ),
    "a manifest that is a list": manifest("[]"),
    "a manifest that is deep": manifest("[" * 100_000),
    "an empty manifest": manifest(""),
    "no files": manifest('{"epochs": 3, "files": {}}'),
    "files that are a list": manifest('{"epochs": 3, "files": ["process-0.pt"]}'),
    "a file elsewhere": manifest('{"epochs": 3, "files": {"../epoch-0002/process-0.pt": ""}}'),
    "other epochs": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"epochs": 3', '"epochs": "3"')
    ),
    "a file": lambda folder: shutil.rmtree(folder) or folder.write_text("x"),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_checkpoint_is_passed_over_for_the_one_before(
    odd: str, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ODD[odd](out / "checkpoints/epoch-0003")
    found = checkpoint.load(out)
    assert found is not None
    assert found[0] == 2
    assert "epoch-0003 is damaged and passed over: " in caplog.text
    ODD[odd](out / "checkpoints/epoch-0002")
    if odd == "other epochs":
        manifest('{"epochs": 7}')(out / "checkpoints/epoch-0002")
    with pytest.raises(RecordError, match=r"no checkpoint of .* is complete"):
        checkpoint.load(out)


def theirs(out: Path) -> Path:
    """A folder of somebody's beside the run."""
    folder = out.with_name("theirs")
    folder.mkdir()
    (folder / "thesis.txt").write_text("theirs")
    return folder


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/epoch-0004.partial"])
def test_nothing_is_written_or_deleted_through_a_link(name: str, out: Path) -> None:
    """Links may come out of an archive; what a kill has left in a folder is deleted."""
    elsewhere = theirs(out)
    if (out / name).exists():
        shutil.move(out / name, elsewhere / "saved")
        (out / name).symlink_to(elsewhere / "saved")
    else:
        (out / name).symlink_to(elsewhere)
    before = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}
    with pytest.raises(RecordError, match=r"cannot write .*epoch-0004: .* is a symbolic link"):
        regimes.run(config(epochs=5), out, resume=True)
    assert {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")} == before


def test_a_checkpoint_that_cannot_be_put_in_its_place_is_told_of(out: Path) -> None:
    (out / "checkpoints/epoch-0004").symlink_to(theirs(out))
    with pytest.raises(RecordError, match=r"cannot write the checkpoint .*epoch-0004: .*link"):
        regimes.run(config(epochs=5), out, resume=True)


def test_an_older_checkpoint_that_is_a_link_is_left_alone(out: Path) -> None:
    (out / "checkpoints/epoch-0000").symlink_to(theirs(out))
    assert len(regimes.run(config(epochs=5), out, resume=True).rows) == 5
    assert (out / "checkpoints/epoch-0000/thesis.txt").exists()


@pytest.mark.parametrize("union", [True, False])
def test_residuals_of_other_processes_are_theirs_or_their_mean(union: bool) -> None:
    """Two files, of a row for each of two workers and of the mean of two, by hand."""
    rows = torch.tensor([[1.0], [2.0]])
    parts = [
        {"workers": workers, "layers": {"a": {"residual": residual}}}
        for workers, residual in (([0, 1], rows), ([2, 3], torch.tensor([[6.5]])))
    ]
    found = residuals_for(range(4), 4, parts, 4, ["a"], mean=union)["a"]
    assert found is not None
    assert found.tolist() == ([[4.0]] if union else [[1.0], [2.0], [6.5], [6.5]])


def test_a_state_that_does_not_fit_is_one_sentence(out: Path) -> None:
    """A stranger's, its checksum in order; or the model is one's own and has changed since."""
    file = out / "checkpoints/epoch-0003/process-0.pt"
    whole = torch.load(file, weights_only=True)
    name = next(iter(whole["model"]))
    model = {**whole["model"], name: torch.zeros(2, 2)}
    for part in ({"model": model}, {"model": []}, {"optimizer": {"a": 1}}, {"gauges": 3}):
        replaced({**whole, **part})(file.parent)
        with pytest.raises(RecordError, match=r"the checkpoint of .* does not fit its config"):
            regimes.run(config(epochs=5), out, resume=True)
    (own,) = whole["parts"]
    owed = {**own["layers"], name: {"residual": torch.zeros(3, 1, 1)}}
    for other in ({"workers": "abc"}, {"layers": owed}):
        replaced({**whole, "parts": [{**own, **other}]})(file.parent)
        with pytest.raises(RegimesError, match=r"does not fit|has shape \[[13], 1, 1\], the layer"):
            regimes.run(config(epochs=5), out, resume=True)


def test_a_checkpoint_of_0_3_or_before_is_one_sentence(out: Path, tmp_path: Path) -> None:
    """It is whole, and not passed over for the one before."""
    for folder in (out / "checkpoints").iterdir():
        replaced({"own": {"residuals": {}}, "workers": [0, 1, 2, 3], "shared": {}})(folder)
    said = r"the checkpoint .*epoch-0003 was saved by version 0\.3 or before: load it with version"
    with pytest.raises(ConfigError, match=said):
        regimes.run(config(epochs=5), out, resume=True)
    with pytest.raises(ConfigError, match=said):
        regimes.branch(out, at=3, set={"optimizer.lr": 0.1}, out=tmp_path / "branch")


# -- a finished run ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ended") / "run"
    regimes.run(config(epochs=3), out)
    return out


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("epochs.jsonl", "seconds.jsonl")}


def refuse(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Files under a folder cannot be listed or read, as for a user without the right."""
    listdir, opened = os.listdir, checkpoint.opened_to_read

    def no_list(path: Any = ".") -> list[str]:
        if Path(path).is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    def no_read(path: Path) -> Any:
        if path.is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    patch.setattr(os, "listdir", no_list)
    patch.setattr(checkpoint, "opened_to_read", no_read)


def empty(folder: Path) -> None:
    for file in folder.rglob("*.pt"):
        file.write_bytes(b"")


LOST: dict[str, Callable[[Path], Any]] = {
    "all": shutil.rmtree,
    "the newest": lambda folder: shutil.rmtree(folder / "epoch-0003"),
    "all but their folder": lambda folder: [shutil.rmtree(p) for p in folder.iterdir()],
    "their content": empty,
}


@pytest.mark.parametrize("lost", LOST)
def test_a_finished_run_is_never_trained_again(lost: str, ended: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(ended, tmp_path / "run"))
    before = contents(out)
    LOST[lost](out / "checkpoints")
    assert len(regimes.run(config(epochs=3), out, resume=True).rows) == 3
    assert contents(out) == before
    assert not (out / "superseded.jsonl").exists()


def test_a_finished_pulse_is_never_trained_again(tmp_path: Path) -> None:
    regimes.run(config("checkpoint_keep=all", epochs=3), tmp_path / "trunk")
    pulse = {"at": 1, "length": 1, "set": {"policy": {"name": "static", "level": "high"}}}
    regimes.branch(tmp_path / "trunk", out=tmp_path / "pulse", **pulse)
    before = contents(tmp_path / "pulse")
    shutil.rmtree(tmp_path / "pulse/checkpoints")
    regimes.branch(tmp_path / "trunk", out=tmp_path / "pulse", **pulse)
    assert contents(tmp_path / "pulse") == before


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/epoch-0003"])
def test_checkpoints_that_cannot_be_read_change_nothing(
    part: str, out: Path, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    refuse(out / part, monkeypatch)
    with pytest.raises(RecordError, match=r"cannot read .*Permission denied; nothing was changed"):
        regimes.run(config(epochs=5), out, resume=True)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    done = Path(shutil.copytree(ended, tmp_path / "done"))
    refuse(done / part, monkeypatch)
    assert len(regimes.run(config(epochs=3), done, resume=True).rows) == 3  # it needs none
