"""The record of a job under the hook: the trainer's, where both train the same; what is logged; no
trace on the training; continued and broken off."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import smoke
from ddp_scripts import group, recorded
from ddp_scripts.cases import Case
from runs import rows
from tensors import same

import regimes
from regimes.compression import make_compressor
from regimes.policies import make_policy
from regimes.records import read_header, read_lines

ONLY_TRAINER = {"batch_size", "train_loss", "test_loss", "metric", "collectives", "bytes"}
ONLY_HOOK = {"skipped", "logged"}


# -- equivalence -----------------------------------------------------------------------------


def test_the_record_is_the_trainers(tmp_path: Path) -> None:
    """Same header, same rows, but for what only the trainer knows; bytes differ by the news of
    non-finite gradients, which the trainer's loss carries."""
    config = smoke("device=cpu", "workers=2")
    regimes.run(config, tmp_path / "trainer")
    group.run(recorded.trained_like, 2, config, tmp_path / "hook")
    pairs = list(zip(rows(tmp_path / "trainer"), rows(tmp_path / "hook"), strict=True))
    assert len(pairs) == config.epochs
    for theirs, mine in pairs:
        assert mine.keys() ^ theirs.keys() == ONLY_HOOK
        for key in theirs.keys() - ONLY_TRAINER - {"statistics", "layers"}:
            assert mine[key] == theirs[key], key
        for key in ("level", "floats", "bytes"):
            assert mine["layers"][key] == theirs["layers"][key]
        (values,), (expected,) = (r["statistics"].values() for r in (mine, theirs))
        assert values == pytest.approx(expected, rel=1e-10)
    theirs, mine = (read_header(tmp_path / name) for name in ("trainer", "hook"))
    assert mine.keys() ^ theirs.keys() == {"written_by"}
    for key in ("per_step", "layers", "budget", "units"):
        assert mine[key] == theirs[key], key
    for key in ("workers", "levels", "signal", "seed", "dtype"):
        assert mine["config"][key] == theirs["config"][key], key
    for name, make in (("policy", make_policy), ("compressor", make_compressor)):
        assert make(mine["config"][name]) == make(theirs["config"][name])


@pytest.mark.parametrize("signal", ["update", "global"])
def test_units_that_end_by_themselves(signal: str, tmp_path: Path) -> None:
    """By hand, after so many steps, with the sampler; and a record leaves no trace: same bits."""
    for found in group.run(recorded.paces, 2, tmp_path, signal):
        whole = found.pop("by hand")
        assert len(whole["rows"]) == recorded.UNITS
        assert [row["lr"] for row in whole["rows"]] == pytest.approx([0.05] * 3 + [0.005] * 2)
        assert [row["next_lr"] for row in whole["rows"]] == pytest.approx([0.05] * 2 + [0.005] * 3)
        assert whole["rows"][3]["layers"]["why"][1]["rule"] == "lr decay"
        assert len({str(row["layers"]["level"]) for row in whole["rows"]}) > 1
        for name, other in found.items():
            assert other["rows"] == whole["rows"], name
            assert other["levels"] == whole["levels"], name
            same(other["weights"], whole["weights"], name)
    assert rows(tmp_path / "every") == rows(tmp_path / "sampler") == rows(tmp_path / "by hand")
    assert not (tmp_path / "no record").exists()


# -- what is logged --------------------------------------------------------------------------


def test_logged_values_are_those_of_their_unit(tmp_path: Path) -> None:
    group.run(recorded.logged, 2, tmp_path)
    folder = tmp_path / "run"
    found = rows(folder)
    assert [row["unit"] for row in found] == [
        {"first": 0, "stop": 3},
        {"first": 3, "stop": 6},
        {"first": 6, "stop": 8},
    ]
    assert [row["train_loss"] for row in found] == [1.0, 4.0, 6.5]
    assert [row["test_loss"] for row in found] == [0.5, 0.5, None]
    assert [row["metric"] for row in found] == [0.0, 0.25, None]
    assert [row["logged"] for row in found] == [
        {"norm": 2.0, "bad": None},
        {"norm": 2.0, "bad": None},
        {"norm": 2.0},
    ]
    header = read_header(folder)
    assert header["units"] == 3
    assert (header["metric"], header["config"]["batch_size"]) == ("accuracy", 6)
    assert (header["config"]["name"], header["config"]["data"]["name"]) == ("mine", "noise")
    assert (header["config"]["model"]["name"], header["config"]["optimizer"]["name"]) == (
        "Net",
        "SGD",
    )
    for seconds in read_lines(folder / "seconds.jsonl"):
        parts = [seconds[name] for name in ("compute", "compress", "communicate")]
        assert all(part > 0 for part in parts)
    assert [e["event"] for e in read_lines(folder / "events.jsonl")] == ["start", "end"]


# -- continued, broken off -------------------------------------------------------------------


def test_states_of_a_recorded_job_do_not_grow(tmp_path: Path) -> None:
    """All units come back from the record, on each process and from the single file."""
    results = group.run(recorded.grown, 2, tmp_path, [4, 40])
    for process, found in enumerate(results):
        for early, late in zip(*found["bytes"], strict=True):
            assert len(late) <= len(early) + 200, process  # digits of longer numbers
        gone, changed, right = zip(*[iter(found["said"])] * 2, strict=True)
        for sentences in (gone, changed):
            for said in sentences:
                assert "units are in the record" in said, process
        assert right == (True, True)


def test_a_continued_job_and_its_record_are_unbroken_ones(tmp_path: Path) -> None:
    """From a state at a unit's end, and from one in its middle, in which each process owes what is
    its own."""
    buckets = {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}
    topk = Case(ddp=buckets, compressor="topk", levels=(("low", 40), ("high", 5)))
    ways = [(recorded.CASE, recorded.STEPS), (topk, 4), (recorded.CASE, 2 * recorded.STEPS)]
    works = ((recorded.resumed, tmp_path / str(stop), *way) for way in ways for stop in way[1:])
    for (_, stop), answers in zip(ways, group.run_in_turn(2, *works), strict=True):
        for found in answers:
            same(found["cut"]["weights"], found["whole"]["weights"])
            for key in ("levels", "traffic", "owed"):
                assert found["cut"][key] == found["whole"][key], (stop, key)
            for mine, row in zip(found["cut"]["rows"], found["whole"]["rows"], strict=True):
                assert (
                    mine | {"train_loss": row["train_loss"]} == row
                )  # the record has what is lost
        assert answers[0]["cut"]["owed"] != answers[1]["cut"]["owed"]
        folder = tmp_path / str(stop)
        assert rows(folder / "cut") == rows(folder / "whole")
        assert len(rows(folder / "cut")) == recorded.UNITS
        events = [e["event"] for e in read_lines(folder / "cut" / "events.jsonl")]
        assert events == ["start", "resume", "end"]


def test_a_hook_that_is_let_go_of_ends_its_record(tmp_path: Path) -> None:
    """Long before Python ends, as one does that is closed; what it has to say is said once."""
    heard, others = group.run(recorded.let_go, 2, tmp_path)
    for name in ("let go", "closed"):
        assert [row["train_loss"] for row in rows(tmp_path / name)] == [1.0, 4.0, 6.5]
        events = [e["event"] for e in read_lines(tmp_path / name / "events.jsonl")]
        assert events == ["start", "end"]
    assert rows(tmp_path / "let go") == rows(tmp_path / "closed")
    assert heard[0] == heard[1]
    assert [said.count("has compared nothing") for said in heard] == [1, 1]
    assert others == ["", ""]


def test_a_killed_job_leaves_a_record_that_reads(tmp_path: Path) -> None:
    assert group.run(recorded.killed, 2, tmp_path) == [None, None]
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [0, 1]
    assert read_header(tmp_path / "run")["units"] is None
