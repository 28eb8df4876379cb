"""``regimes.local_steps`` in somebody's own loop, on two gloo processes: against the same loop
written down with plain collectives, against torch's, resumed, recorded, held wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, own_loop

import regimes
from regimes.cli.html_report import render_page
from regimes.cli.monitor import watch_runs
from regimes.cost.cases import make_cases
from regimes.cost.network import Network
from regimes.cost.predict import predict_seconds
from regimes.records import read_header

DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def test_it_is_the_loop_as_written_down() -> None:
    """And that of Streaming DiLoCo: of the model's five tensors, 48, 8, 8, 24 and 3 numbers, the
    first is a fragment. Of several optimisers the rate of the first is recorded."""
    ways = [("sgd", {}, (1.0, 0.0, False))]
    ways += [(kind, DILOCO, (0.7, 0.9, True)) for kind in ("adamw", "muon")]
    streams = [{**DILOCO, "fragments": 2, "delay": delay, "mixing": 0.25} for delay in (0, 2)]
    written = [(own_loop.as_written, 11, kind, 4, numbers) for kind, _, numbers in ways]
    written += [(own_loop.streamed, 11, 4, outer, [[0], [1, 2, 3, 4]]) for outer in streams]
    rules = [(kind, outer) for kind, outer, _ in ways] + [("adamw", outer) for outer in streams]
    ours = [
        (own_loop.trained, 11, kind, {"policy": 4, "outer": outer, "every": 5})
        for kind, outer in rules
    ]
    answers = group.run_in_turn(2, *written, *ours)
    for i, (expected, found) in enumerate(zip(answers[:5], answers[5:], strict=True)):
        for (weights, running, floats, rows), theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(weights, theirs, rtol=1e-12, atol=1e-13)
            assert torch.equal(weights, found[0][0]), rules[i]
            if i >= len(ways):
                continue
            assert torch.equal(running, found[0][1])
            assert floats == 3 * weights.numel()  # after 4, 8 and 11 steps
            assert [row["sync"]["rounds"] for row in rows] == [1, 1, 1]
            assert rows[0]["lr"] == {"sgd": 0.1, "adamw": 0.03, "muon": 0.02}[rules[i][0]]


@pytest.mark.parametrize("outer", [{}, {"fragments": 2, "delay": 1}])
def test_a_buffer_that_the_forward_pass_replaces_is_averaged(outer: dict[str, Any]) -> None:
    """As DDP follows it; unless its shape has changed, of which there is no mean."""
    options = {"policy": 2, "outer": outer}
    (seen, last), (other, others) = group.run(own_loop.replaced_buffers, 2, 5, options)
    assert seen.any()
    assert torch.equal(seen, other)
    assert not torch.equal(last, others)


def test_what_uses_the_group_waits_for_the_thread_that_sends() -> None:
    """Movements leave after steps 4 and 8, a unit ends after 5, a state is saved after 8."""
    for seen in group.run(own_loop.ends_of_units, 2):
        assert seen == [False] * 3  # two units and the state


def test_it_is_torchs_optimizer() -> None:
    expected, found = group.run_in_turn(
        2, (own_loop.torchs_own, 12, 4), (own_loop.trained, 12, "sgd", {"policy": 4})
    )
    for (weights, *_), theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(weights, theirs, rtol=1e-12, atol=1e-13)


def test_averaging_what_is_alike_changes_nothing() -> None:
    """Where gradients are shared, averaging parameters as well must not cost accuracy, as it did
    in torch (pytorch issue 74157: 76.97 % fell to 69.62 %)."""
    for plain, averaged in group.run(own_loop.shared_gradients, 2, 20, 4):
        torch.testing.assert_close(plain, averaged, rtol=1e-14, atol=1e-15)


def test_continued(tmp_path: Path) -> None:
    """At a synchronisation and within a round: the same bits, rows and record."""
    stops = (4, 6)
    folders = [tmp_path / str(stop) for stop in stops]
    for folder in folders:
        folder.mkdir()
    whole, *cut = group.run_in_turn(
        2,
        (own_loop.resumed, tmp_path / "none", 99),
        *((own_loop.resumed, *job) for job in zip(folders, stops, strict=True)),
    )
    for folder, found in zip(folders, cut, strict=True):
        for (weights, floats, rows), (theirs, same, others) in zip(found, whole, strict=True):
            assert torch.equal(weights, theirs)
            assert (floats, rows) == (same, others)
        record = regimes.load(folder / "run")
        assert record.finished
        assert [row["sync"] for row in record.rows] == [row["sync"] for row in whole[0][2]]
        assert [row["floats"] for row in record.rows] == [row["floats"] for row in whole[0][2]]


def test_the_record(tmp_path: Path) -> None:
    rule = {"name": "windows", "windows": [[0, 1]], "inside": "low", "outside": "high"}
    options = {
        "policy": rule,
        "periods": {"low": 1, "high": 3},
        "every": 4,
        "record": str(tmp_path / "run"),
    }
    group.run(own_loop.trained, 2, 12, "sgd", options)
    record, header = regimes.load(tmp_path / "run"), read_header(tmp_path / "run")
    assert header["config"]["sync_policy"]["name"] == "windows"
    assert header["config"]["sync_levels"] == {"low": 1, "high": 3}
    assert [row["sync"]["period"] for row in record.rows] == [1, 3, 3]
    assert [row["sync"]["rounds"] for row in record.rows] == [4, 1, 2]
    assert all(row["train_loss"] > 0 and row["statistics"]["norm:update"] for row in record.rows)
    assert record.epochs["total_floats"].is_monotonic_increasing


QSR = {"policy": {"name": "qsr", "alpha": 0.2, "base": 2}}


@pytest.mark.parametrize(
    ("options", "name", "words", "periods", "rounds"),
    [
        ({"policy": 2, "outer": DILOCO}, "static", "every 2 steps", [2, 2, 2], [2, 2, 2]),
        (QSR, "qsr", "by qsr", [2, 4, 4], [2, 1, 1]),
    ],
)
def test_readers_show_periods_rounds_and_seconds(
    options: Any,
    name: str,
    words: str,
    periods: list[int],
    rounds: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    group.run(
        own_loop.trained, 2, 12, "sgd", {**options, "every": 4, "record": str(tmp_path / "run")}
    )
    record = regimes.load(tmp_path / "run")
    assert record.name == name
    assert record.config["sync_levels"] == {}  # words that the rule does not use are not said
    assert [row["sync"]["period"] for row in record.rows] == periods
    assert [row["sync"]["rounds"] for row in record.rows] == rounds
    for clock in ("compute", "compress", "communicate"):
        assert (record.epochs[f"seconds_{clock}"] > 0).all()
    watch_runs(tmp_path / "run", once=True)
    said = " ".join(capsys.readouterr().out.split())
    assert f"synchronised {words}" in said
    last = said.partition(" 12 ")[2].split()
    assert [str(periods[-1]), str(rounds[-1])] == last[5:7]
    priced = predict_seconds(make_cases([record]), Network.parse("10Gbit/s,50us"), 2)
    assert priced["case"].tolist() == ["dense", name]
    if name != "qsr":  # a page takes seconds
        return
    html = render_page(tmp_path / "run", "10Gbit/s,50us")
    assert f"synchronised {words}" in html
    assert "No prediction" not in html
    assert "do not say where the time went" not in html


def test_adacomm_reads_the_mean_loss_of_all_processes(tmp_path: Path) -> None:
    """With a record or without, resumed or not. Step t logs 1 / t on process 0, twice as much on
    process 1: the mean of a unit is 1.5 times that of 1 / t, and the period 4 sqrt(F / F_0)."""
    means = [1.5 * sum(1 / t for t in range(6 * u + 1, 6 * u + 7)) / 6 for u in range(4)]
    periods = [4, *(math.ceil(4 * math.sqrt(mean / means[0])) for mean in means[:3])]
    assert periods == [4, 4, 3, 2]
    ways = [(None, 99), (str(tmp_path / "99"), 99), (str(tmp_path / "9"), 9), (None, 12)]
    works = ((own_loop.by_the_loss, *way) for way in ways)
    for way, answers in zip(ways, group.run_in_turn(2, *works), strict=True):
        for rows in answers:
            assert [row["train_loss"] for row in rows] == pytest.approx(means, rel=1e-6), way
            assert [row["sync"]["period"] for row in rows] == periods, way
        if way[0] is not None:
            found = regimes.load(way[0]).rows
            assert [row["train_loss"] for row in found] == pytest.approx(means, rel=1e-6)


def test_the_time_of_a_unit_is_that_of_all_its_steps(tmp_path: Path) -> None:
    """The first iteration of a unit, whose beginning is not seen, counts as the others do."""
    group.run(own_loop.slow, 2, tmp_path / "run", 0.02)
    seconds = regimes.load(tmp_path / "run").epochs["seconds_compute"]
    assert len(seconds) == 3
    assert (seconds >= 4 * 0.02 * 0.999).all()


@pytest.mark.parametrize("closes", [False, True])
def test_processes_in_different_places_hear_why(closes: bool) -> None:
    words = "synchronisation" if closes else "a parameter of process 1 is not finite after step 2"
    assert all(words in heard for heard in group.run(own_loop.apart, 2, closes))
